"""`fledge check`: sound drafts of every method pass, and each deliberate damage is named."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from fledge.check import pair
from fledge.check.draft_files import config_findings, read_files
from fledge.check.probe import CONTEXT, RECORD, SLOTS, STEPS, TENSORS, ProbeDecoding, excerpt_range, replay
from fledge.check.read_probe import read_probe
from fledge.data.documents import Document
from fledge.data.pack import make_row
from fledge.drafts.weights import build_draft
from fledge.engines.support import ENGINES
from fledge.io.formats import config_from_hf
from fledge.targets.loading import load_target
from support.chats import tiny_chats
from support.drafts_on_disk import rewrite
from support.files import change_json, listing, metrics_of, reconfigure, write_rows
from support.targets import CHATML, tiny_target, tiny_target_directory, tiny_tokenizer

METHODS = ("eagle3", "eagle3.1", "eagle1", "peagle")
THINKING = "{% if not enable_thinking %}{{ '/no_think\n' }}{% endif %}" + CHATML


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A target whose template knows a thinking mode, and a briefly trained draft of each method."""
    from fledge.check import make_probe as probe
    from fledge.commands.train import run
    from fledge.io.display import ProgressDisplay
    from fledge.train.setup.options import TrainOptions

    root = tmp_path_factory.mktemp("check")
    tiny_target_directory(root)
    tiny_tokenizer(THINKING).save_pretrained(root / "target")
    tiny_chats(root / "chats.jsonl", 30)
    tiny_chats(root / "prompts.jsonl", 2)
    show = ProgressDisplay(quiet=True)
    monkeypatch = pytest.MonkeyPatch()
    monkeypatch.setattr(probe, "PROMPTS", 3)
    monkeypatch.setattr(probe, "NEW_TOKENS", 6)
    for method in METHODS:
        shape = {} if method == "eagle1" else dict(draft_vocab=200, depth=3)
        options = TrainOptions(
            target=str(root / "target"), data=[str(root / "chats.jsonl")], out=str(root / method), method=method,
            max_length=64, row_length=256, steps=3, device="cpu", template_kwargs='{"enable_thinking": false}',
            eval_prompts=str(root / "prompts.jsonl"), eval_every=1, eval_tokens=2, **shape,
        )  # fmt: skip
        run(options, show.say, show)
    monkeypatch.undo()
    return root


@pytest.fixture
def check(made, fledge):
    """Runs `fledge check --json` on a draft; returns the exit code and the result."""

    def run(draft: Path, *more: Any, target: Path | None = None) -> tuple[int, dict[str, Any]]:
        ran = fledge(
            "check", "--target", target or made / "target", "--draft", draft, "--device", "cpu", "--json", *more
        )
        assert ran.code in (0, 1), ran.err
        return ran.code, json.loads(ran.out)

    return run


@pytest.fixture
def damaged(made, tmp_path):
    """Copies a draft and the target, so that they can be damaged."""

    def copy(method: str) -> tuple[Path, Path]:
        shutil.copytree(made / method / "draft", tmp_path / "draft")
        shutil.copytree(made / "target", tmp_path / "target")
        return tmp_path / "draft", tmp_path / "target"

    return copy


@pytest.mark.parametrize("engine", ENGINES)
def test_an_export_is_as_sound_as_the_draft(made, check, fledge, tmp_path, engine):
    """It has the draft's probe, which is replayed."""
    draft = made / "eagle3" / "draft"
    words = ["--target", made / "target"] if engine == "speculators" else []
    assert fledge("export", "--draft", draft, "--to", engine, "--out", tmp_path / "out", *words).code == 0
    code, result = check(tmp_path / "out")
    assert code == 0 and "logits" in {p["check"] for p in result["passed"]}, result


@pytest.mark.parametrize("method", METHODS)
def test_a_sound_draft_passes(made, check, method):
    code, result = check(made / method / "draft", "--engine", "vllm")
    assert (code, result["findings"], result["notes"]) == (0, [], []) and result["sound"]
    assert {p["check"] for p in result["passed"]} >= {"weights", "template", "features", "logits", "decoding", "engine"}
    assert result["measured"]["logits_error"] < 1e-5 and max(result["measured"]["feature_errors"]) < 0.005
    assert result["measured"]["tau"] == result["measured"]["recorded_tau"] >= 1
    record = read_probe(made / method / "draft").record
    measured = {m["step"]: m["eval_tau"] for m in metrics_of(made / method)}
    assert record.eval_tau == measured[record.step] == max(measured.values())  # the probe is that of the best draft


FILES = {"weights", "vocabulary", "target", "config", "template", "logits"}


@pytest.mark.parametrize("method", METHODS)
def test_files_are_checked_without_the_targets_weights(made, fledge, monkeypatch, tmp_path, method):
    """The target's weights are not even there."""
    shutil.copytree(made / "target", tmp_path / "target", ignore=shutil.ignore_patterns("*.safetensors"))
    words = ["check", "--target", tmp_path / "target", "--draft", made / method / "draft", "--files-only"]
    went = fledge(*words, "--json")
    result = json.loads(went.out)
    assert went.code == 0 and result["files_only"] and result["replayed"] and not result["findings"], went.err
    checked = {p["check"] for p in result["passed"]}
    assert checked >= FILES and not checked & {"features", "decoding"}
    assert "hidden states and τ are not compared" in " ".join(result["notes"])
    went = fledge(*words)
    assert "sound" not in went.out and "No fault found in the files; what the target computes was not" in went.out


def test_a_device_has_no_effect_on_files(made, fledge):
    went = fledge("check", "--target", made / "target", "--draft", made, "--files-only", "--device", "cpu")
    assert went.code == 2 and "--device has no effect with --files-only" in went.err, went.err


def without_room(patch: pytest.MonkeyPatch) -> None:
    patch.setattr("fledge.check.pair.free_bytes", lambda device: 1000)


def out_of_room(patch: pytest.MonkeyPatch) -> None:
    """The message of torch's allocator on a CPU, as raised while the weights are loaded."""
    load = load_target

    def fail(*given: Any, weights: bool = True, **options: Any) -> Any:
        if weights:
            raise RuntimeError(
                "[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes"
            )
        return load(*given, weights=False, **options)

    patch.setattr("fledge.check.pair.load_target", fail)


@pytest.mark.parametrize("how", [without_room, out_of_room])
def test_a_target_that_does_not_fit_has_an_exit_code_of_its_own(made, fledge, monkeypatch, how):
    how(monkeypatch)
    went = fledge("check", "--target", made / "target", "--draft", made / "eagle3" / "draft", "--device", "cpu")
    said = " ".join(went.err.split())
    assert went.code == 3 and "does not fit in the memory here (" in said and "with --files-only" in said, said


# -- damages ----------------------------------------------------------------------------------------------------------

Tensors = dict[str, torch.Tensor]
MID = "midlayer.self_attn"


def tensors(change: Callable[[Tensors], Any]) -> Callable[[Path, Path], None]:
    """A damage to the tensors of a draft."""
    return lambda draft, target: rewrite(draft, change)


def config(**changes: Any) -> Callable[[Path, Path], None]:
    """A damage to the config.json of a draft."""
    return lambda draft, target: reconfigure(draft, **changes)


def swap(a: str, b: str) -> Callable[[Tensors], None]:
    def change(x: Tensors) -> None:
        x[a], x[b] = x[b], x[a]

    return change


def put(name: str, change: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[Tensors], None]:
    return lambda x: x.__setitem__(name, change(x[name]).contiguous())


def drop(*names: str) -> Callable[[Tensors], None]:
    return lambda x: [x.pop(name) for name in names]


def chunks(order: list[int]) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda fc: torch.cat([fc.chunk(len(order), dim=1)[i] for i in order], dim=1)


def fledge_field(**changes: Any) -> Callable[[Path, Path], None]:
    def change(draft: Path, target: Path) -> None:
        own = json.loads((draft / "config.json").read_text())["fledge"]
        reconfigure(draft, fledge={k: v for k, v in (own | changes).items() if v is not None})

    return change


def layers(top: list[int] | None, nested: list[int] | None) -> Callable[[Path, Path], None]:
    """Writes layer lists, of which the right ones are 2, 4, 5 and 1, 3, 4."""
    name = "eagle_aux_hidden_state_layer_ids"
    return config(**{name: top, "eagle_config": nested and {name: nested, "use_aux_hidden_state": True}})


def truncate(draft: Path, target: Path) -> None:
    file = draft / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])


def second_file(draft: Path, target: Path) -> None:
    head = load_file(draft / "model.safetensors")["lm_head.weight"]
    save_file({"lm_head.weight": 2 * head}, draft / "model-00002-of-00002.safetensors")


def other_pickle(draft: Path, target: Path) -> None:
    weights = load_file(draft / "model.safetensors")
    torch.save(weights | {"norm.weight": 2 * weights["norm.weight"]}, draft / "pytorch_model.bin")


def other_step(draft: Path, target: Path) -> None:
    torch.manual_seed(0)
    rewrite(draft, put("lm_head.weight", lambda w: w + 0.5 * w.std() * torch.randn_like(w)))


def close_step(draft: Path, target: Path) -> None:
    torch.manual_seed(0)
    rewrite(draft, put("lm_head.weight", lambda w: w + 0.02 * w.std() * torch.randn_like(w)))


def rope_base(draft: Path, target: Path) -> None:
    reconfigure(draft, rope_theta=500000.0, rope_parameters={"rope_type": "default", "rope_theta": 500000.0})


def system_prompt(draft: Path, target: Path) -> None:
    pirate = "{{ '<|im_start|>system\nYou are a pirate.<|im_end|>\n' }}"
    tiny_tokenizer(pirate + THINKING).save_pretrained(target)


def other_weights(draft: Path, target: Path) -> None:
    tiny_target(seed=5).model.save_pretrained(target)


def fewer_layers(draft: Path, target: Path) -> None:
    tiny_target(num_hidden_layers=4).model.save_pretrained(target)


def captured_elsewhere(draft: Path, target: Path) -> None:
    """Another program has captured the outputs of layers 2, 4 and 5 and called them 2, 4, 5."""
    stored = load_file(draft / TENSORS)
    tokens = stored["tokens"].numpy()
    row = make_row([Document(tokens, np.full_like(tokens, -1))], len(tokens))
    states = load_target(target).features(row, [3, 5, 6]).aux_TAD[-stored["states"].shape[0] :]
    save_file(stored | {"states": states.to(torch.bfloat16)}, draft / TENSORS)


def stored_for_neighbours(x: Tensors) -> None:
    """Orders the rows of queries and keys as in Meta's checkpoints, whose pairs for RoPE are neighbours."""
    for p in "qk":
        put(f"{MID}.{p}_proj.weight", lambda w: w.unflatten(0, (-1, 2, 4)).transpose(1, 2).flatten(0, 2))(x)


def minus_one(x: Tensors) -> None:
    for name in [name for name in x if "norm" in name]:
        put(name, lambda w: w.float() - 1)(x)


def shifted_without_hash(draft: Path, target: Path) -> None:
    """Without record and hash, t2d tells what d2t should be."""
    without_probe(draft, target)
    rewrite(draft, put("d2t", lambda d: d + 1))
    fledge_field(vocabulary_sha256=None)(draft, target)


def inputs_turned(x: Tensors) -> None:
    for p in "qkv":
        put(f"{MID}.{p}_proj.weight", chunks([1, 0]))(x)


Q, K, V, O = (f"{MID}.{p}_proj.weight" for p in "qkvo")
NORMS = swap("midlayer.hidden_norm.weight", "midlayer.input_layernorm.weight")
GATES = swap("layers.0.mlp.gate_proj.weight", "layers.0.mlp.up_proj.weight")
FC_NORMS = drop(*(f"fc_norm.{i}.weight" for i in range(3)))
MASKS = dict.fromkeys(("mask_token_id", "pard_token", "ptd_token_id"), 7)
EMBEDDING = {"embed_tokens.weight": torch.randn(400, 32)}
THINKS = {"enable_thinking": True}
# of each: the method, the damage, and words of the message
DAMAGES = {
    "layers moved by one, vLLM's list": (
        "eagle3",
        layers([3, 5, 6], [1, 3, 4]),
        "vLLM (eagle_aux_hidden_state_layer_ids) reads the hidden states [3, 5, 6]",
    ),
    "layers moved by one, SGLang's list": (
        "eagle3",
        layers([2, 4, 5], [2, 4, 5]),
        "layer_ids) reads the hidden states [3, 5, 6]",
    ),
    "layers moved by one, fledge's list": (
        "eagle3",
        fledge_field(aux_layers=[1, 3, 4]),
        "[1, 3, 4] in place of [2, 4, 5]",
    ),
    "features captured as outputs": ("eagle3", captured_elsewhere, "hidden states [2, 4, 5] differ from those of"),
    "d2t zeroed": ("eagle3", tensors(put("d2t", torch.zeros_like)), "all of it is zero"),
    "d2t shifted": ("eagle3", tensors(put("d2t", lambda d: d + 1)), "d2t is wrong"),
    "d2t shifted by 3": ("eagle3", tensors(put("d2t", lambda d: d + 3)), "it is not the vocabulary map of training"),
    "d2t shifted without a hash": ("eagle3", shifted_without_hash, "t2d and d2t contradict"),
    "another vocab_size": ("eagle3", config(vocab_size=500), "the draft does not fit"),
    "d2t rolled": ("eagle3", tensors(put("d2t", lambda d: d.roll(1))), "its ids are not ascending"),
    "d2t holds ids": ("eagle3", tensors(put("d2t", lambda d: d + torch.arange(200))), "in place of their distances"),
    "d2t missing": ("eagle3", tensors(drop("d2t")), "d2t is missing, and the draft predicts 200 of 400"),
    "t2d contradicts d2t": ("eagle3", tensors(put("t2d", lambda t: t.roll(1))), "t2d and d2t contradict"),
    "norms swapped": (
        "eagle3",
        tensors(NORMS),
        "hidden_norm.weight is what training wrote as midlayer.input_la",
    ),
    "fc transposed": ("eagle3", tensors(put("fc.weight", lambda w: w.T)), "fc.weight has shape [96, 32], but"),
    "square matrix transposed": ("eagle3", tensors(put(O, lambda w: w.T)), "o_proj.weight is not what training wrote"),
    "chunks of fc": ("eagle3", tensors(put("fc.weight", chunks([2, 0, 1]))), "fc.weight is not what training wrote"),
    "halves of EAGLE-1's fc": (
        "eagle1",
        tensors(put("fc.weight", chunks([1, 0]))),
        "fc.weight is not what training wrote",
    ),
    "inputs of q, k and v turned": ("eagle3", tensors(inputs_turned), "v_proj.weight are not what training wrote"),
    "q and k swapped": ("eagle3", tensors(swap(Q, K)), "q_proj.weight has shape"),
    "k and v swapped": ("peagle", tensors(swap(K, V)), "v_proj.weight is what training wrote as"),
    "gate and up swapped": ("eagle1", tensors(GATES), "up_proj.weight is what training wrote as"),
    "RoPE on neighbours": ("eagle3", tensors(stored_for_neighbours), "k_proj.weight are not what training wrote"),
    "norms as distances from 1": ("eagle3.1", tensors(minus_one), "are not what training wrote"),
    "RoPE base": ("eagle3", rope_base, "RoPE is rope_theta 500000.0"),
    "another class": ("eagle3", config(architectures=["LlamaForCausalLMEagle3X"]), 'was ["LlamaForCausalLMEagle3"]'),
    "another family": ("eagle3", config(model_type="qwen2"), 'model_type is "qwen2" in config.json, and was "llama"'),
    "two norms of fc swapped": (
        "eagle3.1",
        tensors(swap("fc_norm.0.weight", "fc_norm.2.weight")),
        "fc_norm.0.weight",
    ),
    "one matrix of a step close by": ("eagle3", close_step, "lm_head.weight is not what training wrote"),
    "RoPE base of one field": (
        "eagle3",
        config(rope_theta=5000.0),
        "rope_theta and rope_scaling say rope_theta 5000",
    ),
    "norm_output off": ("eagle3.1", config(norm_output=None), "norm_output is False in config.json, and was True"),
    "norm_output on": ("eagle3", config(norm_output=True), "norm_output is True in config.json, and was False"),
    "fc_norm left out": ("eagle3.1", config(fc_norm=None), "fc_norm is False in config.json, and was True"),
    "fc_norm's tensors left out": ("eagle3.1", tensors(FC_NORMS), "fc_norm.2.weight are missing"),
    "norm_before_residual": ("eagle3", config(norm_before_residual=True), "norm_before_residual is True"),
    "epsilon": ("eagle1", config(rms_norm_eps=1e-2), "rms_norm_eps is 0.01"),
    "mask token": ("peagle", config(**MASKS), "mask_token_id is 7"),
    "mask_hidden missing": ("peagle", tensors(drop("mask_hidden")), "mask_hidden is missing"),
    "head missing": ("eagle3", tensors(drop("lm_head.weight")), "lm_head.weight is missing"),
    "head of zeros": ("eagle3", tensors(put("lm_head.weight", torch.zeros_like)), "lm_head.weight has only zeros"),
    "head of another step": ("eagle3", other_step, "lm_head.weight is not what training wrote"),
    "head tied": ("eagle3", config(tie_word_embeddings=True), "tie_word_embeddings is true"),
    "a matrix in fp8": (
        "eagle3",
        tensors(put("fc.weight", lambda w: w.to(torch.float8_e4m3fn))),
        "fc.weight has dtype float8_e4m3fn, which fledge does not read",
    ),
    "queries in fp8": (
        "eagle3",
        tensors(put(Q, lambda w: w.to(torch.float8_e5m2))),
        "q_proj.weight has dtype float8_e5m2",
    ),
    "NaN": ("eagle3", tensors(put("norm.weight", lambda w: w * torch.nan)), "norm.weight has NaN"),
    "truncated file": ("eagle3", truncate, "truncated"),
    "final norm missing": ("eagle3", tensors(drop("norm.weight")), "norm.weight is missing"),
    "final norm in EAGLE-1": (
        "eagle1",
        tensors(lambda x: x.update({"norm.weight": torch.ones(32)})),
        "norm.weight is not part of such",
    ),
    "context too small": ("eagle3", config(max_position_embeddings=128), "max_position_embeddings is 128"),
    "other embeddings": (
        "eagle3",
        tensors(lambda x: x.update(EMBEDDING)),
        "embed_tokens.weight is in the file, and was not in training",
    ),
    "embeddings of another vocabulary": (
        "eagle3",
        tensors(lambda x: x.update({"embed_tokens.weight": torch.randn(500, 32)})),
        "embed_tokens.weight is in the file, and was not in training",
    ),
    "a sliding window": (
        "eagle3",
        config(sliding_window=64, layer_types=["sliding_attention"]),
        "attend to a sliding window only (layer_types, sliding_window 64). vLLM masks",
    ),
    "quantized": ("eagle1", config(quantization_config={"quant_method": "fp8"}), "asks for quantized weights ('fp8')"),
    "scaled logits": ("eagle3", config(logit_scale=0.25), "logit_scale is 0.25. vLLM multiplies"),
    "the final hidden state": (
        "eagle3",
        config(eagle_config={"use_aux_hidden_state": False}),
        "use_aux_hidden_state is false. vLLM leaves out fc",
    ),
    "two mask tokens": ("peagle", config(pard_token=7), "and 7 in pard_token"),
    "a mask token of another method": (
        "peagle",
        config(dflash_config={"mask_token_id": 7}),
        "and 7 in dflash_config.mask_token_id",
    ),
    "a bias": ("eagle3", config(bias=True), "bias is true in config.json, and was false in training"),
    "layers that only vLLM 0.33 reads": (
        "eagle3",
        config(eagle_config={"layer_ids": [1, 2, 3]}),
        "eagle_config.layer_ids is [1, 2, 3] in config.json, and training wrote none",
    ),
    "a bias that fc does not have": (
        "eagle3",
        tensors(lambda x: x.update({"fc.bias": torch.ones(32)})),
        "fc.bias is not part of such a draft. vLLM refuses the file or leaves",
    ),
    "a second file of weights": (
        "eagle3",
        second_file,
        "model-00002-of-00002.safetensors lies beside the draft's weights",
    ),
    "a pickle of another draft": ("eagle3", other_pickle, "pytorch_model.bin lies beside the draft's weights"),
    "another system prompt": ("eagle3", system_prompt, "You are a pirate"),
    "thinking mode": ("eagle3", fledge_field(template_kwargs=THINKS), "(thinking mode)"),
    "a target of fewer layers": ("eagle3", fewer_layers, "trained for a target of 8 layers, and this one has 4"),
    "another target": ("eagle3", other_weights, "the target's hidden states [2, 4, 5] differ from those of training"),
}


@pytest.mark.parametrize("name", DAMAGES)
def test_a_damage_is_named(check, damaged, name):
    method, damage, words = DAMAGES[name]
    draft, target = damaged(method)
    damage(draft, target)
    code, result = check(draft, target=target)
    text = "\n".join(f"{f['cause']}. {f['symptom']}" for f in result["findings"])
    assert code == 1 and words in text, text or result
    assert len(result["findings"]) <= 3, text
    assert all(f["cure"] for f in result["findings"])


WITHOUT_WEIGHTS = (
    "layers moved by one, vLLM's list", "d2t shifted", "norms swapped", "fc transposed", "head of another step",
    "norm_output off", "norm_output on", "truncated file", "context too small", "thinking mode",
    "a target of fewer layers",
)  # fmt: skip


@pytest.mark.parametrize("name", WITHOUT_WEIGHTS)
def test_a_damage_is_named_without_the_targets_weights(fledge, damaged, name):
    method, damage, words = DAMAGES[name]
    draft, target = damaged(method)
    damage(draft, target)
    for file in target.glob("*.safetensors"):
        file.unlink()
    went = fledge("check", "--target", target, "--draft", draft, "--files-only", "--json")
    found = json.loads(went.out)["findings"]
    assert went.code == 1 and words in "\n".join(f["cause"] for f in found), found


def test_a_contradiction_of_t2d_names_both_possibilities(check, damaged):
    """Without a hash, neither of d2t and t2d is known to be right; with one, d2t is."""
    draft, target = damaged("eagle3")
    rewrite(draft, put("t2d", lambda t: t.roll(1) | t))
    (finding,) = check(draft, target=target)[1]["findings"]
    assert finding["cure"].startswith("write t2d again")
    without_probe(draft, target)
    fledge_field(vocabulary_sha256=None)(draft, target)
    found = [f for f in check(draft, target=target)[1]["findings"] if f["check"] == "vocabulary"]
    assert "either may be wrong" in found[0]["cure"]


def test_a_map_of_another_size_is_not_compared(check, damaged):
    draft, target = damaged("eagle3")
    reconfigure(draft, vocab_size=500)
    assert not [f for f in check(draft, target=target)[1]["findings"] if "t2d" in f["cause"] + f["cure"]]


# -- what is no fault, and what is said then --------------------------------------------------------------------------


def lower_precision(draft: Path, target: Path) -> None:
    rewrite(draft, lambda x: x.update({n: w.half() for n, w in x.items() if w.is_floating_point()}))


def rounded(draft: Path, target: Path) -> None:
    fp8 = torch.float8_e4m3fn
    rewrite(draft, lambda x: x.update({n: w.to(fp8).to(w.dtype) for n, w in x.items() if n.endswith("_proj.weight")}))


def one_row(draft: Path, target: Path) -> None:
    rewrite(draft, lambda x: x["lm_head.weight"][3].mul_(1.01))


def other_row(draft: Path, target: Path) -> None:
    """A row whose logit is not stored."""
    rewrite(draft, lambda x: x["lm_head.weight"][3].mul_(-30))


def another_date(draft: Path, target: Path) -> None:
    chats = json.loads((draft / RECORD).read_text())["chats"]
    change_json(draft / RECORD, chats=[chat.replace("/no_think", "Monday") for chat in chats])


def same_words(draft: Path, target: Path) -> None:
    tiny_tokenizer("{# a comment #}" + THINKING).save_pretrained(target)


def trained_further(draft: Path, target: Path) -> None:
    loaded = tiny_target()
    with torch.no_grad():
        loaded.model.model.layers[-1].mlp.up_proj.weight.mul_(1.01)
    loaded.model.save_pretrained(target)


def without_probe(draft: Path, target: Path) -> None:
    shutil.rmtree(draft / "fledge")


NO_FAULTS = {
    "float16": (lower_precision, ""),
    "weights rounded to fp8": (rounded, "its weights were rounded"),
    "a row of the head": (
        one_row,
        "lm_head.weight is not what training wrote: of another step or draft, or changed by a conversion, though",
    ),
    "a template with a date": (another_date, "e.g. another date"),
    "a template with a comment": (same_words, ""),
    "a target trained further": (trained_further, "quantized, trained further"),
    "no probe": (without_probe, "nothing to replay"),
}


def test_a_row_of_the_head_that_changes_the_probabilities_is_a_fault(check, damaged):
    draft, target = damaged("eagle3")
    other_row(draft, target)
    code, result = check(draft, target=target)
    assert code == 1 and "lm_head.weight is not what training wrote" in result["findings"][0]["cause"]


@pytest.mark.parametrize("name", NO_FAULTS)
def test_what_is_no_fault_is_at_most_a_note(check, damaged, monkeypatch, name):
    change, words = NO_FAULTS[name]
    draft, target = damaged("eagle3")
    change(draft, target)
    monkeypatch.setattr(pair, "_decode_questions", lambda *given: None)
    code, result = check(draft, target=target)
    assert code == 0 and not result["findings"], result["findings"]
    assert words in " ".join(result["notes"]) and bool(result["notes"]) == bool(words), result["notes"]


def test_swapped_tensors_are_a_fault_however_little_they_change(made, damaged):
    """fc_norm's gains are nearly 1 after a brief training, so that the logits hardly tell."""
    draft, _ = damaged("eagle3.1")
    rewrite(draft, swap("fc_norm.0.weight", "fc_norm.2.weight"))
    read, probe = read_files(draft)
    (finding,), notes, error = pair.logits_findings(read, replace(probe, logits_RKSJ=replayed(read, probe)), False)
    assert error <= pair.SAME and not notes
    assert "fc_norm.0.weight is what training wrote as fc_norm.2.weight" in finding.cause


def replayed(read: Any, probe: Any) -> torch.Tensor:
    return replay(build_draft(read.config, read.tensors), probe)


def test_the_measured_tau_is_given(check, damaged):
    draft, target = damaged("eagle3")
    rewrite(draft, put("lm_head.weight", lambda w: w * 2))
    code, result = check(draft, target=target)
    measured = result["measured"]
    note = f"τ is {measured['tau']:.2f} on the recorded prompts, and was {measured['recorded_tau']:.2f}."
    assert code == 1 and note in result["notes"]


def test_a_changed_rope_base_of_the_target_is_named(check, damaged):
    draft, target = damaged("eagle3")
    reconfigure(target, rope_theta=5e5, rope_parameters={"rope_type": "default", "rope_theta": 5e5})
    notes = " ".join(check(draft, target=target)[1]["notes"])
    assert "its RoPE has rope_theta 10000.0, and the target's rope_theta 500000.0" in notes


@pytest.mark.parametrize("file", [TENSORS, RECORD])
@pytest.mark.parametrize("how", ["truncated", "missing"])
def test_a_damaged_probe_is_reported(check, damaged, monkeypatch, file, how):
    draft, target = damaged("eagle3")
    content = (draft / file).read_bytes()
    (draft / file).unlink()
    if how == "truncated":
        (draft / file).write_bytes(content[: len(content) // 2])
    monkeypatch.setattr(pair, "_decode_questions", lambda *given: None)
    code, result = check(draft, target=target)
    assert code == 1 and [f["check"] for f in result["findings"]] == ["probe"]
    cause = result["findings"][0]["cause"]
    assert "cannot be read" in cause and (f"{Path(file).name} is missing" in cause) == (how == "missing")


@pytest.mark.parametrize(
    "changes",
    [
        dict(format=2), dict(layers=[2, 4]), dict(layers=None), dict(tensors=[]), dict(config={"hidden_size": 3}),
        dict(chats=[5]), dict(steps=4), dict(spacings=[]), dict(precision="int4"), dict(decoding={}),
        dict(decoding={"prompts": [], "rounds": [], "committed": [], "new_tokens": 8, "depth": 3, "dtype": ""}),
    ],
)  # fmt: skip
def test_a_record_with_other_fields_is_refused(made, tmp_path, changes):
    shutil.copytree(made / "eagle3" / "draft" / "fledge", tmp_path / "fledge")
    assert read_probe(tmp_path) is not None
    change_json(tmp_path / RECORD, **changes)
    with pytest.raises(ValueError, match="cannot be read"):
        read_probe(tmp_path)


def test_a_draft_without_a_probe_decodes_and_is_read_in_other_ways(check, damaged, monkeypatch):
    """At chance, a draft whose layers are moved by one is found by decoding with the layers before and after."""
    draft, target = damaged("eagle3")
    without_probe(draft, target)
    fledge_field(aux_layers=[3, 5, 6])(draft, target)
    layers([3, 5, 6], [2, 4, 5])(draft, target)
    code, result = check(draft, target=target)
    assert code in (0, 1) and result["measured"]["tau"] >= 1  # such a short training is near chance either way

    accepts = 0

    def decode(target: Any, draft: Any, prompts: list[list[int]], new: int, depth: int) -> ProbeDecoding:
        accepted = accepts + (2 if draft.config.aux_layers == (2, 4, 5) else 0)
        return ProbeDecoding(prompts, new, depth, [10 * (1 + accepted)] * 8, [10] * 8, "float32")

    monkeypatch.setattr("fledge.check.pair.decode", decode)
    code, result = check(draft, target=target)
    (finding,) = result["findings"]
    assert code == 1 and "τ is 1.00" in finding["cause"] and "3.00 if its layers are [2, 4, 5]" in finding["cause"]
    accepts = 1  # also where more is accepted than by chance
    code, result = check(draft, target=target)
    (finding,) = result["findings"]
    assert code == 1 and "τ is 2.00 on 8 questions, and 4.00 if its layers" in finding["cause"]


def test_norm_output_that_specforge_may_have_trained_is_noted(fledge, damaged):
    """fledge's own field says that fledge trained the draft."""
    draft, target = damaged("eagle3.1")
    without_probe(draft, target)
    for own in (True, False):
        if not own:
            reconfigure(draft, fledge=None)
        went = fledge("check", "--target", target, "--draft", draft, "--files-only", "--json")
        notes = " ".join(json.loads(went.out)["notes"])
        assert ("remove norm_output from config.json" in notes) is not own, notes


def test_without_a_probe_a_draft_is_not_called_sound(fledge, damaged, monkeypatch):
    draft, target = damaged("eagle3")
    without_probe(draft, target)
    monkeypatch.setattr(pair, "_decode_questions", lambda *given: None)
    ran = fledge("check", "--target", target, "--device", "cpu", "--draft", draft)
    assert ran.code == 0 and "sound" not in ran.out and "without a probe the weights cannot be compared" in ran.out


def test_an_engine_that_would_not_serve_the_draft_is_named(made, check, damaged):
    code, result = check(made / "peagle" / "draft", "--engine", "sglang")
    (finding,) = result["findings"]
    assert code == 1 and "no one-pass drafting" in finding["cause"] and "serve it with vLLM" in finding["cause"]
    draft, target = damaged("eagle3")
    reconfigure(draft, architectures=["Eagle3LlamaForCausalLM"])
    code, result = check(draft, "--engine", "sglang", target=target)
    assert code == 1 and "fledge export" in result["findings"][0]["symptom"]


def test_names_that_vllm_refuses_are_a_note_and_with_vllm_a_fault(check, damaged):
    draft, target = damaged("eagle3")
    outside = ("lm_head.weight", "d2t", "t2d")
    rewrite(draft, lambda x: [x.update({f"model.{n}": x.pop(n)}) for n in sorted(x) if n not in outside])
    code, result = check(draft, target=target)
    (note,) = result["notes"]
    assert code == 0 and note.startswith("vLLM needs other files: tensors fc.weight") and "--to vllm --out DIR" in note
    assert check(draft, "--engine", "vllm", target=target)[0] == 1
    code, result = check(draft, "--engine", "sglang", target=target)
    assert (code, result["notes"]) == (0, [])


def test_a_file_that_an_engine_does_not_read_is_no_fault_with_it(check, damaged):
    draft, target = damaged("eagle3")
    other_pickle(draft, target)
    assert check(draft, "--engine", "vllm", target=target)[0] == 0
    (draft / "pytorch_model.bin").unlink()
    second_file(draft, target)
    code, result = check(draft, "--engine", "vllm", target=target)
    assert code == 1 and "vLLM and SGLang read it too" in result["findings"][0]["symptom"]


def test_the_rest_of_a_draft_with_a_refused_field_is_checked(check, damaged):
    draft, target = damaged("eagle3")
    reconfigure(draft, logit_scale=0.5)
    result = check(draft, target=target)[1]
    assert {"weights", "features", "logits"} <= {p["check"] for p in result["passed"]}
    assert result["notes"] == ["nothing is decoded: fledge does not load a draft with such a config.json."]


def test_fields_that_mean_the_same_are_no_fault(check, damaged):
    draft, target = damaged("eagle3")
    reconfigure(draft, bias=None, layer_types=["full_attention"], sliding_window=64, logit_scale=1.0)
    code, result = check(draft, target=target)
    assert (code, result["findings"], result["notes"]) == (0, [], [])


@pytest.mark.parametrize(("name", "symptom"), [("draft_vocab_size", "SGLang"), ("num_aux_hidden_states", "vLLM")])
def test_a_field_that_only_an_engine_misses_is_named(made, name, symptom):
    """fledge gives it a default, with which the draft is the same."""
    read, probe = read_files(made / "eagle3" / "draft")
    four = read.hf | dict(num_aux_hidden_states=4, fledge=read.hf["fledge"] | dict(aux_layers=[1, 2, 4, 5]))
    record = replace(probe.record, config=four)
    left = {n: value for n, value in four.items() if n != name}
    cut = replace(read, hf=left, config=config_from_hf(four))
    (finding,) = config_findings(cut, SimpleNamespace(context=64), record)
    assert f"{name} is missing in config.json, and was {four[name]}" in finding.cause and symptom in finding.symptom


def test_a_target_without_a_chat_template_is_said_to_have_none(made, fledge, tmp_path):
    shutil.copytree(made / "target", tmp_path / "target")
    (tmp_path / "target" / "chat_template.jinja").unlink()
    shape = ["--steps", 1, "--depth", 3, "--max-length", 64, "--row-length", 256, "--device", "cpu"]
    write_rows(tmp_path / "text.jsonl", [{"text": f"a b c d e f {i}"} for i in range(30)])
    words = "train", "--target", tmp_path / "target", "--data", tmp_path / "text.jsonl", "--out", tmp_path / "run"
    trained = fledge(*words, *shape)
    assert trained.code == 0, trained.err
    words = "check", "--target", tmp_path / "target", "--draft", tmp_path / "run" / "draft", "--device", "cpu"
    ran = fledge(*words)
    assert "template: the target has no chat template, as in training." in ran.out, ran.out + ran.err


def test_layers_of_the_other_engine_are_no_fault_of_this_one(check, damaged):
    draft, target = damaged("eagle3")
    layers([3, 5, 6], [1, 3, 4])(draft, target)
    assert check(draft, "--engine", "sglang", target=target)[0] == 1  # other files than fledge export would write
    assert not [f for f in check(draft, "--engine", "sglang", target=target)[1]["findings"] if f["check"] == "layers"]


def test_what_only_sglang_refuses_is_no_fault_with_vllm(check, damaged):
    draft, target = damaged("eagle3")
    reconfigure(draft, max_position_embeddings=128)
    assert check(draft, "--engine", "vllm", target=target)[0] == 0
    assert check(draft, "--engine", "sglang", target=target)[0] == 1


def test_layers_that_the_target_does_not_have_are_named(check, damaged):
    draft, target = damaged("eagle3")
    fledge_field(aux_layers=[2, 4, 99])(draft, target)
    code, result = check(draft, target=target)
    assert code == 1 and "the target has layers 0..8" in result["findings"][0]["cause"]


def test_results_are_printed_as_lines(made, fledge, damaged):
    words = "check", "--target", made / "target", "--device", "cpu", "--draft"
    sound = fledge(*words, made / "eagle3" / "draft")
    assert sound.code == 0 and "layers: 2, 4, 5 in vLLM's numbering and 1, 3, 4 in SGLang's numbering." in sound.out
    assert (
        sound.out.endswith("The draft is sound.\n") and 'chat_template_kwargs {"enable_thinking": false}' in sound.out
    )
    draft, target = damaged("eagle3")
    truncate(draft, target)
    broken = fledge(*words, draft)
    assert broken.code == 1 and "Wrong, weights: " in broken.out and broken.out.endswith("1 problem.\n")
    for wrong in ((*words, "nowhere"), (*words, draft, "--engine", "tgi"), (*words[:2], "nowhere", *words[3:], made)):
        assert fledge(*wrong).code == 2


def test_names_are_printed_as_they_are(made, fledge, damaged):
    draft, target = damaged("eagle3")
    tensors(put("fc.weight", lambda w: w.T))(draft, target)
    layers([3, 5, 6], [1, 3, 4])(draft, target)
    out = " ".join(fledge("check", "--target", target, "--device", "cpu", "--draft", draft).out.split())
    assert "Wrong, weights: fc.weight has shape" in out and "Wrong, layers: vLLM (eagle_aux" in out
    assert "; cure: copy the draft again" in out and "Fc.weight" not in out and "VLLM" not in out


def test_training_from_features_on_disk_stores_a_probe_of_them(made, check, fledge, tmp_path):
    data = ["--data", made / "chats.jsonl", "--max-length", 64, "--device", "cpu"]
    kwargs = ["--template-kwargs", '{"enable_thinking": false}']
    written = fledge(
        "features", "--target", made / "target", *data, *kwargs, "--out", tmp_path / "f", "--precision", "fp8"
    )
    assert written.code == 0, written.err
    shape = ["--steps", 2, "--depth", 3, "--draft-vocab", 200, "--row-length", 256, "--device", "cpu"]
    trained = fledge("train", "--features", tmp_path / "f", "--out", tmp_path / "run", *shape)
    assert trained.code == 0, trained.err
    record = read_probe(tmp_path / "run" / "draft").record
    assert (record.precision, record.decoding, record.layers) == ("fp8", None, [2, 4, 5])
    code, result = check(tmp_path / "run" / "draft")
    assert code == 0 and "τ is not compared" in " ".join(result["notes"])
    assert all(0.005 < error < pair.FP8 for error in result["measured"]["feature_errors"])


@pytest.mark.gpu
@pytest.mark.parametrize("method", METHODS)
def test_a_draft_trained_on_a_gpu_is_sound_there_and_on_a_cpu(check, fledge, tmp_path, method):
    shape = dict(hidden_size=512, intermediate_size=1536, head_dim=64, num_attention_heads=8)
    target, chats = tiny_target_directory(tmp_path, **shape), tiny_chats(tmp_path / "chats.jsonl", 200)
    lengths = ["--max-length", 128, "--row-length", 512, "--steps", 20]
    more = [*lengths, "--dtype", "bfloat16", "--device", "cuda", "--out", tmp_path / "run"]
    trained = fledge("train", "--target", target, "--data", chats, "--method", method, *more)
    assert trained.code == 0, trained.err
    for device in ("cuda", "cpu"):
        ran = fledge("check", "--target", target, "--draft", tmp_path / "run" / "draft", "--device", device)
        assert ran.code == 0 and ran.out.endswith("The draft is sound.\n"), ran.out


# -- the probe --------------------------------------------------------------------------------------------------------


def test_the_probe_is_in_a_subfolder_of_its_own(made):
    """Engines load every *.safetensors in the draft's directory, but not in its subfolders."""
    draft = made / "eagle3" / "draft"
    assert listing(draft) == ["README.md", "config.json", "fledge", "model.safetensors"]
    assert listing(draft / "fledge") == ["probe.safetensors", "record.json"]


@pytest.mark.parametrize(("n", "first"), [(3, 1), (4, 3), (10, 2), (60, 1), (60, 55), (5000, 4000)])
def test_an_excerpt_lies_within_its_document(n, first):
    spans = np.full(n, -1, dtype=np.int32)
    spans[first:] = 0
    start, end, steps = excerpt_range(Document(np.arange(n, dtype=np.int32), spans))
    assert 0 <= start < end <= min(n, CONTEXT) and 1 <= steps <= STEPS and end - start >= steps + 2
    assert end - start == min(n, SLOTS + 1 + steps) and (start <= first or first < 4)


def decoding(committed: list[int], rounds: list[int]) -> ProbeDecoding:
    return ProbeDecoding([[1]] * len(rounds), 8, 3, committed, rounds, "float32")


def test_the_standard_error_is_that_of_a_difference_of_ratios():
    before = decoding([20, 30], [10, 15])
    assert before.tau == 2 and pair.tau_error(before, before) == 0
    assert decoding([0, 0], [0, 0]).tau == 0 == pair.tau_error(decoding([0, 0], [0, 0]), before)
    random = torch.Generator().manual_seed(0)
    rounds = torch.randint(5, 20, (2000, 2, 8), generator=random)
    committed = rounds + torch.randint(0, 20, (2000, 2, 8), generator=random)
    pairs = [
        [decoding(*each) for each in zip(c, r, strict=True)]
        for c, r in zip(committed.tolist(), rounds.tolist(), strict=True)
    ]
    differences = torch.tensor([now.tau - before.tau for now, before in pairs])
    errors = torch.tensor([pair.tau_error(now, before) for now, before in pairs])
    assert abs(float(errors.mean() / differences.std()) - 1) < 0.1


def test_all_lists_moved_together_are_one_finding(check, damaged):
    draft, target = damaged("eagle3")
    layers([3, 5, 6], [2, 4, 5])(draft, target)
    fledge_field(aux_layers=[3, 5, 6])(draft, target)
    (finding,) = check(draft, target=target)[1]["findings"]
    assert finding["cause"].startswith("fledge (fledge.aux_layers) and vLLM (")
    assert "[3, 5, 6] in place of [2, 4, 5]" in finding["cause"]
    assert finding["cure"].endswith("eagle_config.eagle_aux_hidden_state_layer_ids to [1, 3, 4]")


def test_a_lower_tau_is_a_fault_beyond_its_standard_error():
    def of(accepted: list[int]) -> ProbeDecoding:
        return decoding([10 + a for a in accepted], [10] * 4)

    before = of([10, 12, 9, 11])
    assert not pair.decoding_findings(of([10, 11, 9, 10]), before, False)[0]
    assert "τ is 1.10" in pair.decoding_findings(of([1, 1, 1, 1]), before, False)[0][0].cause
    assert not pair.decoding_findings(of([1, 1, 1, 1]), before, True)[0]  # other findings say why
