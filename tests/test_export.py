"""`fledge export`: what is written for each engine, and that reading it gives the same draft, bit for bit."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch import Tensor

from fledge.config import DraftConfig, Provenance, RopeConfig
from fledge.drafts.draft import Draft
from fledge.drafts.registry import new_draft
from fledge.drafts.weights import DraftFiles, open_draft, save_draft, write_files
from fledge.engines.export import TargetName, export, needs_export
from fledge.engines.support import ENGINES, unsupported
from support.drafts_on_disk import HEAD, HEADS, D, V, config, saved
from support.files import listing, reconfigure
from support.targets import tiny_draft, tiny_target_directory

ROPES = (
    RopeConfig(), RopeConfig(rope_theta=5e5, partial_rotary_factor=0.5), RopeConfig("linear", factor=2.0),
    RopeConfig("llama3", 5e5, factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0,
               original_max_position_embeddings=64),
    RopeConfig("yarn", factor=4.0, original_max_position_embeddings=64, beta_fast=16.0),
    RopeConfig("longrope", factor=4.0, original_max_position_embeddings=64, short_factor=(1.0, 1.5, 2.0, 2.5),
               long_factor=(2.0, 3.0, 4.0, 5.0), long=True),
)  # fmt: skip
FLAGS = ("attention_bias", "mlp_bias", "qk_norm", "norm_before_residual", "norm_output", "own_embeddings")
LAYERS = (None, (2, 4, 5), (1, 4, 6), (0, 2, 8), (3,), (1, 2, 3, 4))
TARGET = TargetName("owner/target", ("LlamaForCausalLM",))


@st.composite
def configs(draw: st.DrawFn) -> DraftConfig:
    """Configs of every method, with fields that other projects write in their own way."""
    method = draw(st.sampled_from(["eagle3", "peagle", "eagle1"]))
    values = dict(
        method=method, num_hidden_layers=draw(st.integers(1, 2)), rope=draw(st.sampled_from(ROPES)),
        rms_norm_eps=draw(st.sampled_from([1e-5, 1e-6])), eos_token_id=draw(st.sampled_from([None, 1])),
        provenance=Provenance(target="owner/target", target_layers=draw(st.sampled_from([None, 8])),
                              depth=draw(st.sampled_from([None, 7]))),
    )  # fmt: skip
    if method == "eagle1":
        return config(V, num_aux_hidden_states=0, fc_bias=draw(st.booleans()), attention_bias=draw(st.booleans()),
                      own_embeddings=draw(st.booleans()), **values)  # fmt: skip
    values |= dict.fromkeys(draw(st.sets(st.sampled_from(FLAGS), max_size=3)), True)
    values |= {draw(st.sampled_from(["fc_norm", "norm_before_fc"])): draw(st.booleans())}
    if layers := draw(st.sampled_from(LAYERS)):
        values |= dict(aux_layers=layers, num_aux_hidden_states=len(layers))
    if "own_embeddings" in values and draw(st.booleans()):
        values |= dict(hidden_size=D // 2)
    if method == "peagle":
        values |= dict(mask_token_id=draw(st.integers(0, V - 1)))
    return config(draw(st.sampled_from([40, V])), **values)


def draft_of(c: DraftConfig) -> Draft:
    torch.manual_seed(0)
    draft = new_draft(c)
    for p in draft.parameters():
        torch.nn.init.normal_(p)
    draft.set_vocabulary(torch.randperm(V)[: c.draft_vocab_size].sort().values)
    return draft


def equal(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(a[n].dtype == b[n].dtype and torch.equal(a[n], b[n]) for n in a)


def written(draft: DraftFiles, engine: str, directory: Path, target: TargetName | None = TARGET) -> DraftFiles:
    """The draft that is read from an export."""
    directory.mkdir()
    write_files(export(draft, engine, target).encode(), directory)
    return open_draft(directory)


@settings(max_examples=40, deadline=None)
@given(c=configs(), dtype=st.sampled_from([torch.bfloat16, torch.float32]))
def test_an_export_is_read_as_the_same_draft(c, dtype):
    """For every engine that supports the draft, and again after a second export to every such engine."""
    with TemporaryDirectory() as parent:
        save_draft(draft_of(c), Path(parent, "draft"), dtype)
        draft = open_draft(Path(parent, "draft"))
        known = c.with_provenance(vocabulary_sha256=draft.config.provenance.vocabulary_sha256)
        assert draft.config == known
        able = [engine for engine in ENGINES if not unsupported(c, engine)]
        for engine in able:
            first = written(draft, engine, Path(parent, engine))
            assert first.config == draft.config and equal(first.tensors, draft.tensors)
            assert not needs_export(first, engine)
            for other in able:
                second = written(first, other, Path(parent, f"{engine}-{other}"))
                assert second.config == draft.config and equal(second.tensors, draft.tensors)


SPELLINGS: dict[str, dict] = {  # of files that vLLM loads as it loads fledge's own
    "no bias": dict(bias=None),
    "other class": dict(architectures=["LlamaForCausalLM"]),
    "vLLM's class": dict(architectures=["Eagle3LlamaForCausalLM"]),
    "no head_dim": dict(head_dim=None),
    "RoPE of transformers 5 alone": dict(rope_theta=None, rope_scaling=None),
    "numbered layers, no t2d": {},
}


@pytest.mark.parametrize("name", SPELLINGS)
def test_vllm_needs_no_export_of_another_spelling(name, tmp_path):
    draft = saved(tmp_path / "d", provenance=Provenance(), head_dim=D // HEADS)
    if not SPELLINGS[name]:
        tensors = {n.replace("midlayer.", "layers.0."): x for n, x in draft.state_dict().items()}
        save_file(tensors, tmp_path / "d" / "model.safetensors")
    reconfigure(tmp_path / "d", fledge=None, **SPELLINGS[name])
    assert export(open_draft(tmp_path / "d"), "vllm").differences == ()


def test_vllm_needs_an_export_of_what_it_would_read_otherwise(tmp_path):
    saved(tmp_path / "d", rope=ROPES[0], norm_before_residual=True)
    reconfigure(tmp_path / "d", architectures=["LlamaForCausalLMEagle", "X"])
    assert "architectures" in " ".join(export(open_draft(tmp_path / "d"), "vllm").differences)


@pytest.mark.parametrize("engine", ENGINES)
def test_an_export_of_foreign_files_is_complete(tmp_path, engine):
    """AutoModel's names, the target's number of layers, and its architecture: all of it is replaced."""
    draft = saved(tmp_path / "d", rope=ROPES[2])
    tensors = {"model." + n.replace("midlayer.", "layers.0."): x for n, x in draft.state_dict().items()}
    save_file(tensors, tmp_path / "d" / "model.safetensors")
    reconfigure(tmp_path / "d", fledge=None, num_hidden_layers=36, architectures=["LlamaEagle3DraftModel"])
    read = open_draft(tmp_path / "d")
    assert needs_export(read, engine) and "num_hidden_layers" in " ".join(export(read, "vllm").differences)
    again = written(read, engine, tmp_path / "e")
    assert again.config == replace(read.config, provenance=again.config.provenance)
    assert equal(again.tensors, draft.state_dict()) and not needs_export(again, engine)


CHANGES: dict[str, tuple[dict, str]] = {  # of config.json, each with the difference to vLLM's files
    "a field": (dict(bias=True), "config.json: bias false, not true"),
    "part of an object": (
        dict(eagle_config={"use_aux_hidden_state": True, "layer_ids": [1, 2, 4]}),
        'config.json: eagle_config absent, not {"use_aux_hidden_state": true, "layer_ids": [1, 2, 4]}',
    ),
    "the default of all engines": (dict(eagle_config={"use_aux_hidden_state": True}), ""),
    "fields that mean nothing": (
        dict(layer_types=["full_attention"], sliding_window=64, logit_scale=1, dflash_config={}),
        "",
    ),
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_difference_of_the_config_names_its_values(name, tmp_path):
    changes, difference = CHANGES[name]
    saved(tmp_path / "d")
    reconfigure(tmp_path / "d", **changes)
    assert export(open_draft(tmp_path / "d"), "vllm").differences == ((difference,) if difference else ())


def test_sglang_loads_eagle_3_with_prefixed_names_and_vllm_does_not(tmp_path):
    draft = saved(tmp_path / "d")
    outside = ("lm_head.weight", "d2t")
    prefixed = {n if n in outside else f"model.{n}": x for n, x in draft.state_dict().items()}
    save_file(prefixed, tmp_path / "d" / "model.safetensors")
    read = open_draft(tmp_path / "d")
    assert {e for e in ("vllm", "sglang", "safeailab") if needs_export(read, e)} == {"vllm", "safeailab"}
    save_file({f"model.{n}": x for n, x in draft.state_dict().items()}, tmp_path / "d" / "model.safetensors")
    assert needs_export(open_draft(tmp_path / "d"), "sglang")  # its head is not below `model.`


STRAYS = {  # a file's name, and the engines that read it
    "model-00002-of-00002.safetensors": ("vllm", "sglang"),
    "pytorch_model.bin": ("safeailab",),
}


@pytest.mark.parametrize("name", STRAYS)
def test_other_weights_in_the_directory_are_left_out(tmp_path, fledge, name):
    saved(tmp_path / "d")
    weights = load_file(tmp_path / "d" / "model.safetensors")
    write = torch.save if name.endswith(".bin") else save_file
    write(weights, tmp_path / "d" / name)  # the same weights change nothing
    assert open_draft(tmp_path / "d").strays == () and fledge("inspect", tmp_path / "d").code == 0
    write(weights | {"norm.weight": 2 * weights["norm.weight"]}, tmp_path / "d" / name)
    for engine in ("vllm", "sglang", "safeailab"):
        found = export(open_draft(tmp_path / "d"), engine).differences
        assert found == ((f"without {name}, with other weights",) if engine in STRAYS[name] else ())
    shown = fledge("inspect", tmp_path / "d")
    assert shown.code == 1 and f"{name} holds other weights than model.safetensors" in shown.out
    words = "export", "--draft", tmp_path / "d", "--to", STRAYS[name][0], "--out", tmp_path / "e"
    assert fledge(*words).code == 0 and listing(tmp_path / "e") == ["config.json", "model.safetensors"]


def test_an_index_of_other_files_is_not_the_drafts(tmp_path):
    saved(tmp_path / "d")
    index = tmp_path / "d" / "model.safetensors.index.json"
    for shard, strays in (("model.safetensors", ()), ("other.safetensors", (index.name,))):
        index.write_text(json.dumps({"weight_map": {"fc.weight": shard}}))
        assert open_draft(tmp_path / "d").strays == strays


# -- what each engine needs -------------------------------------------------------------------------------------------


def content(directory: Path) -> tuple[dict, dict[str, Tensor]]:
    return json.loads((directory / "config.json").read_text()), load_file(directory / "model.safetensors")


def exported(tmp_path: Path, engine: str, *args, **overrides) -> tuple[dict, dict[str, Tensor]]:
    saved(tmp_path / "d", *args, **overrides)
    written(open_draft(tmp_path / "d"), engine, tmp_path / "e")
    return content(tmp_path / "e")


@pytest.mark.parametrize("engine", ["vllm", "sglang", "safeailab"])
def test_the_files_of_training_need_no_export(tmp_path, engine, fledge):
    saved(tmp_path / "d")
    went = fledge("export", "--draft", tmp_path / "d", "--to", engine)
    assert went.code == 0 and " are loaded as they are by " in went.out and "--out" not in went.out
    assert fledge("export", "--draft", tmp_path / "d", "--to", engine, "--out", tmp_path / "e").code == 0
    for file in ("config.json", "model.safetensors"):
        assert (tmp_path / "e" / file).read_bytes() == (tmp_path / "d" / file).read_bytes()
    assert listing(tmp_path / "e") == ["config.json", "model.safetensors"]


def test_safeailab_reads_own_embeddings_if_the_targets_width_is_written(tmp_path):
    hf, tensors = exported(tmp_path, "safeailab", own_embeddings=True)
    assert hf["target_hidden_size"] == D and list(tensors["embed_tokens.weight"].shape) == [V, D]
    assert needs_export(open_draft(tmp_path / "d"), "safeailab")
    assert not needs_export(open_draft(tmp_path / "d"), "vllm")


def test_sglangs_attention_must_not_get_the_bias_of_eagle_1s_fc(tmp_path):
    hf, tensors = exported(tmp_path, "sglang", V, method="eagle1", num_aux_hidden_states=0, fc_bias=True)
    assert hf["bias"] is False and tensors["fc.bias"].any()
    assert open_draft(tmp_path / "e").config.fc_bias


def test_speculators_config_has_every_field_that_vllm_reads(tmp_path):
    """vLLM makes a plain config of `transformer_layer_config`, without defaults of Llama."""
    saved(tmp_path / "d", fc_norm=True, norm_output=True, aux_layers=(1, 2, 3, 4), num_aux_hidden_states=4,
          provenance=Provenance(depth=7))  # fmt: skip
    written(open_draft(tmp_path / "d"), "speculators", tmp_path / "e")
    hf, _ = content(tmp_path / "e")
    assert "model_type" not in hf and "hidden_size" not in hf
    assert hf["speculators_model_type"] == "eagle3" and hf["architectures"] == ["Eagle3DraftModel"]
    how = hf["speculators_config"]
    assert how["algorithm"] == "eagle3" and how["default_proposal_method"] == "greedy"
    assert [m["speculative_tokens"] for m in how["proposal_methods"]] == [7]
    assert how["verifier"] == {"name_or_path": "owner/target", "architectures": ["LlamaForCausalLM"]}
    layer = hf["transformer_layer_config"]
    expected = dict(
        model_type="llama", hidden_size=D, num_attention_heads=HEADS, head_dim=HEAD, vocab_size=V, hidden_act="silu",
        num_hidden_layers=1, max_position_embeddings=256, rms_norm_eps=1e-5, num_aux_hidden_states=4,
        rope_parameters={"rope_type": "default", "rope_theta": 1e4},
    )  # fmt: skip
    assert {k: layer[k] for k in expected} == expected and "rope_scaling" not in layer
    assert hf["eagle_aux_hidden_state_layer_ids"] == [1, 2, 3, 4] and hf["draft_vocab_size"] == 40
    assert (hf["fc_norm"], hf["norm_output"], hf["norm_before_fc"], hf["norm_before_residual"]) == (
        True, True, False, False,
    )  # fmt: skip


def test_speculators_tensors(tmp_path):
    _, tensors = exported(tmp_path, "speculators", num_hidden_layers=2)
    assert not [n for n in tensors if n.startswith("midlayer.")] and "layers.0.hidden_norm.weight" in tensors
    assert "layers.1.input_layernorm.weight" in tensors and "layers.1.hidden_norm.weight" not in tensors
    assert tensors["d2t"].dtype == torch.int64 and tensors["t2d"].dtype == torch.bool


def test_speculators_files_of_the_whole_vocabulary_have_no_map(tmp_path):
    _, tensors = exported(tmp_path, "speculators", V)
    assert not {"d2t", "t2d"} & tensors.keys()


def test_speculators_p_eagle(tmp_path):
    hf, tensors = exported(tmp_path, "speculators", method="peagle", mask_token_id=9, own_embeddings=True)
    assert (hf["speculators_model_type"], hf["mask_token_id"], hf["embed_requires_grad"]) == ("peagle", 9, True)
    assert list(tensors["mask_hidden"].shape) == [1, 1, 3 * D]


# -- the command ------------------------------------------------------------------------------------------------------


def test_the_command_writes_and_explains(tmp_path, fledge):
    saved(tmp_path / "d", fc_norm=True, norm_output=True)
    words = ["export", "--draft", tmp_path / "d", "--to", "speculators"]
    (tmp_path / "target").mkdir()
    (tmp_path / "target" / "config.json").write_text('{"architectures": ["Qwen3ForCausalLM"]}')
    asked = fledge(*words)
    assert asked.code == 2 and "give the target's hub id with --target" in asked.err
    dry = fledge(*words, "--target", tmp_path / "target")
    assert dry.code == 0 and "config.json in speculators' format" in dry.out and "Nothing was written" in dry.out
    assert "needs vLLM 0.25 or later" in dry.out and "takes only a hub id" in dry.out
    assert listing(tmp_path) == ["d", "target"]
    went = fledge(*words, "--target", tmp_path / "target", "--out", tmp_path / "e")
    assert went.code == 0 and f"Wrote {tmp_path / 'e'}." in went.out
    verifier = content(tmp_path / "e")[0]["speculators_config"]["verifier"]
    assert verifier == {"name_or_path": str(tmp_path / "target"), "architectures": ["Qwen3ForCausalLM"]}
    shown = fledge("inspect", tmp_path / "e")
    assert shown.code == 0 and "Its files have speculators' format." in shown.out
    assert "vLLM can serve these files (from 0.22 on)." in shown.out
    assert "SafeAILab's code (commit" in shown.out and "cannot serve this draft: it has none of" in shown.out


def test_embeddings_that_are_a_copy_of_the_targets_are_left_out(tmp_path, target, fledge):
    """Trainers whose files always have the embedding write drafts that SGLang would refuse otherwise."""
    path = tiny_target_directory(tmp_path)
    draft = tiny_draft(target, own_embeddings=True)
    draft.embed_tokens.weight.data.copy_(target.embedding)
    save_draft(draft, tmp_path / "copy", torch.bfloat16)
    draft.embed_tokens.weight.data[3] += 1
    save_draft(draft, tmp_path / "own", torch.bfloat16)
    save_draft(tiny_draft(target), tmp_path / "none", torch.bfloat16)

    def run(name: str, *words):
        return fledge("export", "--draft", tmp_path / name, "--to", "sglang", *words)

    assert "if they are a copy of those, fledge export --target leaves them out" in run("copy").err
    assert "are not a copy of those of" in run("own", "--target", path).err
    assert "--target has no effect" in run("none", "--target", path).err
    went = run("copy", "--target", path, "--out", tmp_path / "e")
    assert went.code == 0 and "without the tensors embed_tokens.weight" in went.out, went.err
    before, after = open_draft(tmp_path / "copy"), open_draft(tmp_path / "e")
    assert not after.config.own_embeddings and not needs_export(after, "sglang")
    rest = {name: x for name, x in before.tensors.items() if name != "embed_tokens.weight"}
    assert equal(after.tensors, rest)


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (["--to", "tensorrt"], "--to tensorrt is not one of vllm, sglang, safeailab, speculators"),
        (
            ["--to", "sglang"],
            "SGLang (0.5.17 and 0.5.23) cannot serve this draft: it replaces the draft's own embeddings",
        ),
        (["--to", "vllm", "--out", "d"], "holds files; choose another name, or empty it"),
        (["--to", "vllm", "--out", "d/config.json"], "is a file; choose another name"),
        (["--to", "vllm", "--out", ""], "--out is empty"),
    ],
)
def test_what_cannot_be_exported(tmp_path, words, reason, fledge, monkeypatch):
    monkeypatch.chdir(tmp_path)
    saved(tmp_path / "d", own_embeddings=True)
    before = (tmp_path / "d" / "config.json").read_bytes()
    went = fledge("export", "--draft", "d", *words)
    assert went.code == 2 and reason in went.err
    assert listing(tmp_path) == ["d"] and (tmp_path / "d" / "config.json").read_bytes() == before


def test_a_draft_that_cannot_be_exported_asks_no_hub(tmp_path, fledge, monkeypatch):
    draft = saved(tmp_path / "d", fc_norm=True, norm_output=True, method="peagle", mask_token_id=3)
    assert unsupported(draft.config, "speculators")
    monkeypatch.setattr("fledge.io.hub.architectures", lambda name: pytest.fail("the hub was asked"))
    went = fledge("export", "--draft", tmp_path / "d", "--to", "speculators", "--target", "someone/model")
    assert went.code == 2 and "cannot hold this draft" in went.err.replace("\n", " ")


def test_without_the_hub_speculators_files_lack_the_targets_class_and_the_command_says_so(
    tmp_path, fledge, monkeypatch
):
    saved(tmp_path / "d")

    def unreachable(*given, **more):
        raise OSError("no network")

    monkeypatch.setattr("huggingface_hub.hf_hub_download", unreachable)
    words = "export", "--draft", tmp_path / "d", "--to", "speculators", "--target", "owner/target"
    went = fledge(*words, "--out", tmp_path / "e")
    assert went.code == 0
    assert "verifier.architectures in these files is empty" in " ".join(went.out.split())
    assert content(tmp_path / "e")[0]["speculators_config"]["verifier"]["architectures"] == []


def test_what_safeailabs_code_needs_of_the_target_is_said(tmp_path, fledge):
    drafts = {"eagle3": {}, "own": dict(own_embeddings=True), "eagle1": dict(method="eagle1", num_aux_hidden_states=0)}
    said = {}
    for name, how in drafts.items():
        saved(tmp_path / name, *([V] if name == "eagle1" else []), **how)
        out = fledge("export", "--draft", tmp_path / name, "--to", "safeailab").out
        said[name] = ("Llama's and Qwen3's" in out, "one file without that index" in " ".join(out.split()))
    assert said == {"eagle3": (True, True), "own": (True, False), "eagle1": (False, True)}


def test_a_refusal_names_what_could_serve_the_draft():
    refused = unsupported(config(method="peagle", mask_token_id=3), "sglang")
    assert refused.count("; serve it with vLLM") == 1
