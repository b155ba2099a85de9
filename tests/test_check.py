"""`fledge check`: sound drafts of every method pass, and each deliberate damage is named."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from fledge.data.pack import make_row
from fledge.eval.probe import TENSORS
from fledge.targets.loading import load_target
from fledge.types import Document
from support.chats import tiny_chats
from support.drafts_on_disk import rewrite
from support.files import reconfigure
from support.targets import CHATML, tiny_target, tiny_target_directory, tiny_tokenizer

METHODS = ("eagle3", "eagle3.1", "eagle1", "peagle")
THINKING = "{% if not enable_thinking %}{{ '/no_think\n' }}{% endif %}" + CHATML


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A target whose template knows a thinking mode, and a briefly trained draft of each method."""
    from fledge.jobs.display import ProgressDisplay
    from fledge.jobs.train import TrainOptions, run
    from fledge.jobs.training import probe

    root = tmp_path_factory.mktemp("check")
    tiny_target_directory(root)
    tiny_tokenizer(THINKING).save_pretrained(root / "target")
    tiny_chats(root / "chats.jsonl", 30)
    show = ProgressDisplay(quiet=True)
    monkeypatch = pytest.MonkeyPatch()
    monkeypatch.setattr(probe, "PROMPTS", 3)
    monkeypatch.setattr(probe, "NEW_TOKENS", 6)
    for method in METHODS:
        shape = {} if method == "eagle1" else dict(draft_vocab=200, depth=3)
        options = TrainOptions(
            target=str(root / "target"), data=[str(root / "chats.jsonl")], out=str(root / method), method=method,
            max_length=64, row_length=256, steps=3, device="cpu", template_kwargs='{"enable_thinking": false}', **shape,
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


@pytest.mark.parametrize("method", METHODS)
def test_a_sound_draft_passes(made, check, method):
    code, result = check(made / method / "draft", "--engine", "vllm")
    assert (code, result["findings"], result["notes"]) == (0, [], []) and result["sound"]
    assert {p["check"] for p in result["passed"]} >= {"weights", "template", "features", "logits", "decoding", "engine"}
    assert result["measured"]["logits_error"] < 1e-5 and max(result["measured"]["feature_errors"]) < 0.005
    assert result["measured"]["tau"] == result["measured"]["recorded_tau"] >= 1


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


def other_step(draft: Path, target: Path) -> None:
    torch.manual_seed(0)
    rewrite(draft, put("lm_head.weight", lambda w: w + 0.5 * w.std() * torch.randn_like(w)))


def rope_base(draft: Path, target: Path) -> None:
    reconfigure(draft, rope_theta=500000.0, rope_parameters={"rope_type": "default", "rope_theta": 500000.0})


def system_prompt(draft: Path, target: Path) -> None:
    pirate = "{{ '<|im_start|>system\nYou are a pirate.<|im_end|>\n' }}"
    tiny_tokenizer(pirate + THINKING).save_pretrained(target)


def other_weights(draft: Path, target: Path) -> None:
    tiny_target(seed=5).model.save_pretrained(target)


def captured_elsewhere(draft: Path, target: Path) -> None:
    """Another program has captured the outputs of layers 2, 4 and 5 and called them 2, 4, 5."""
    stored = load_file(draft / TENSORS)
    tokens = stored["tokens"]
    row = make_row([Document(tokens, torch.full_like(tokens, -1))], tokens.numel())
    states = load_target(target).features(row, [3, 5, 6]).aux_TAD[-stored["states"].shape[0] :]
    save_file(stored | {"states": states.to(torch.bfloat16)}, draft / TENSORS)


def stored_for_neighbours(x: Tensors) -> None:
    """Orders the rows of queries and keys as in Meta's checkpoints, whose pairs for RoPE are neighbours."""
    for p in "qk":
        put(f"{MID}.{p}_proj.weight", lambda w: w.unflatten(0, (-1, 2, 4)).transpose(1, 2).flatten(0, 2))(x)


def minus_one(x: Tensors) -> None:
    for name in [name for name in x if "norm" in name]:
        put(name, lambda w: w.float() - 1)(x)


def inputs_turned(x: Tensors) -> None:
    for p in "qkv":
        put(f"{MID}.{p}_proj.weight", chunks([1, 0]))(x)


Q, K, V, O = (f"{MID}.{p}_proj.weight" for p in "qkvo")  # noqa: E741
NORMS = swap("midlayer.hidden_norm.weight", "midlayer.input_layernorm.weight")
GATES = swap("layers.0.mlp.gate_proj.weight", "layers.0.mlp.up_proj.weight")
FC_NORMS = drop(*(f"fc_norm.{i}.weight" for i in range(3)))
MASKS = dict.fromkeys(("mask_token_id", "pard_token", "ptd_token_id"), 7)
EMBEDDING = {"embed_tokens.weight": torch.randn(400, 32)}
THINKS = {"enable_thinking": True}
# of each: the method, the damage, and words of the message
DAMAGES = {
    "layers moved by one, vLLM's list": ("eagle3", layers([3, 5, 6], [1, 3, 4]), "every layer moved up by one"),
    "layers moved by one, SGLang's list": ("eagle3", layers([2, 4, 5], [2, 4, 5]), "SGLang reads the hidden states [3"),
    "layers moved by one, fledge's list": ("eagle3", fledge_field(aux_layers=[1, 3, 4]), "moved down by one"),
    "features captured as outputs": ("eagle3", captured_elsewhere, "captured ids are moved by one"),
    "d2t zeroed": ("eagle3", tensors(put("d2t", torch.zeros_like)), "all of it is zero"),
    "d2t shifted": ("eagle3", tensors(put("d2t", lambda d: d + 1)), "d2t is wrong"),
    "d2t rolled": ("eagle3", tensors(put("d2t", lambda d: d.roll(1))), "moved by 1 place"),
    "d2t holds ids": ("eagle3", tensors(put("d2t", lambda d: d + torch.arange(200))), "in place of their distances"),
    "d2t missing": ("eagle3", tensors(drop("d2t")), "d2t is missing, and the draft predicts 200 of 400"),
    "t2d contradicts d2t": ("eagle3", tensors(put("t2d", lambda t: t.roll(1))), "t2d and d2t contradict"),
    "norms swapped": ("eagle3", tensors(NORMS), "hidden_norm.weight and midlayer.input_layernorm.weight are swapped"),
    "fc transposed": ("eagle3", tensors(put("fc.weight", lambda w: w.T)), "fc.weight is transposed"),
    "square matrix transposed": ("eagle3", tensors(put(O, lambda w: w.T)), "o_proj.weight is transposed"),
    "chunks of fc": ("eagle3", tensors(put("fc.weight", chunks([2, 0, 1]))), "chunks of fc are in the wrong order"),
    "halves of EAGLE-1's fc": ("eagle1", tensors(put("fc.weight", chunks([1, 0]))), "chunks of fc are in the wrong"),
    "inputs of q, k and v turned": ("eagle3", tensors(inputs_turned), "read the hidden state first"),
    "q and k swapped": ("eagle3", tensors(swap(Q, K)), "k_proj.weight are swapped"),
    "k and v swapped": ("peagle", tensors(swap(K, V)), "v_proj.weight are swapped"),
    "gate and up swapped": ("eagle1", tensors(GATES), "up_proj.weight are swapped"),
    "RoPE on neighbours": ("eagle3", tensors(stored_for_neighbours), "ordered for RoPE on neighbours"),
    "norms as distances from 1": ("eagle3.1", tensors(minus_one), "distances from 1"),
    "RoPE base": ("eagle3", rope_base, "RoPE is rope_theta 500000.0"),
    "RoPE base of one field": ("eagle3", config(rope_theta=5000.0), "rope_theta and rope_scaling say rope_theta 5000"),
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
    "NaN": ("eagle3", tensors(put("norm.weight", lambda w: w * torch.nan)), "norm.weight has NaN"),
    "truncated file": ("eagle3", truncate, "truncated"),
    "final norm missing": ("eagle3", tensors(drop("norm.weight")), "norm.weight is missing"),
    "final norm in EAGLE-1": ("eagle1", tensors(lambda x: x.update({"norm.weight": torch.ones(32)})), "no final norm"),
    "context too small": ("eagle3", config(max_position_embeddings=128), "max_position_embeddings is 128"),
    "other embeddings": ("eagle3", tensors(lambda x: x.update(EMBEDDING)), "own_embeddings is True"),
    "another system prompt": ("eagle3", system_prompt, "You are a pirate"),
    "thinking mode": ("eagle3", fledge_field(template_kwargs=THINKS), "(thinking mode)"),
    "another target": ("eagle3", other_weights, "embeds the probe's tokens otherwise"),
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
