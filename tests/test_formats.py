"""Drafts in files of other projects, built by hand: each computes the logits of the draft that was written."""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.nn import functional as F

from fledge.commands.inspect import InspectOptions, run
from fledge.config import DraftConfig
from fledge.drafts.draft import Draft
from fledge.drafts.weights import load_draft, open_draft, read_draft_config
from fledge.io.formats import OFFSETS, from_engine, to_engine
from support.drafts_on_disk import HEAD, HEADS, INNER, KV, D, V, make, refused
from support.files import change_json, listing, reconfigure

Tensors = dict[str, Tensor]
FLAT = dict(
    architectures=["LlamaForCausalLMEagle3"], model_type="llama", hidden_size=D, intermediate_size=INNER,
    num_attention_heads=HEADS, num_key_value_heads=KV, head_dim=HEAD, hidden_act="silu", rms_norm_eps=1e-5,
    vocab_size=V, draft_vocab_size=40, max_position_embeddings=256, rope_theta=10000.0, num_hidden_layers=1,
    tie_word_embeddings=False, torch_dtype="float32",
)  # fmt: skip


def logits(draft: Draft) -> Tensor:
    """The logits of 5 slots at the first step and of one more at the second, in float64, [6, W]."""
    draft, c = draft.double(), draft.config
    at = torch.Generator().manual_seed(7)
    embedding, head = torch.randn(2, V, D, generator=at, dtype=torch.float64)
    draft.share_target_weights(embedding, head)
    states = torch.randn(5, max(1, c.num_aux_hidden_states), D, generator=at, dtype=torch.float64)
    keys: dict[int, list[tuple[Tensor, Tensor]]] = {}

    def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        seen = keys.setdefault(layer, [])
        seen.append((k, v))
        k, v = (torch.cat(x).transpose(0, 1)[None] for x in zip(*seen, strict=True))
        S, L = len(q), k.shape[2]
        mask = torch.ones(S, L, dtype=torch.bool).tril(L - S)
        out = F.scaled_dot_product_attention(q.transpose(0, 1)[None], k, v, attn_mask=mask, enable_gqa=True)
        return out[0].transpose(0, 1)

    with torch.no_grad():
        out = draft.step(torch.tensor([3, 1, 4, 1, 5]), draft.fuse(states), torch.arange(5), attend)
        fed, head_input = draft.split_output(out)
        inputs = draft.mask_inputs() if c.family.one_pass else (torch.tensor([9]), fed[-1:])
        later = draft.step(*inputs, torch.tensor([5]), attend)
        return torch.cat([draft.logits(head_input), draft.logits(draft.split_output(later)[1])])


def assert_computes(directory: Path, draft: Draft) -> DraftConfig:
    loaded = load_draft(directory, dtype=torch.float64)
    assert torch.equal(loaded.target_ids(), draft.target_ids())
    torch.testing.assert_close(logits(loaded), logits(draft), rtol=0, atol=1e-12)
    return loaded.config


def written(directory: Path, config: dict[str, Any], tensors: Tensors) -> Path:
    directory.mkdir(exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config))
    save_file({n: t.detach().clone() for n, t in tensors.items()}, directory / "model.safetensors", {"format": "pt"})
    return directory


def t2d(draft: Draft, dtype: torch.dtype = torch.bool) -> Tensor:
    known = torch.zeros(V, dtype=dtype)
    known[draft.target_ids()] = 1
    return known


def renamed(tensors: Tensors, old: str, new: str) -> Tensors:
    return {n.replace(old, new, 1) if n.startswith(old) else n: x for n, x in tensors.items()}


# -- names and files ---------------------------------------------------------------------------------------------------


def joined(tensors: Tensors, parts: tuple[str, ...], fused: str) -> Tensors:
    """Projections joined to one, as vLLM and SGLang keep them in memory."""
    out = dict(tensors)
    for first in [n for n in tensors if f".{parts[0]}." in n]:
        out[first.replace(parts[0], fused)] = torch.cat([out.pop(first.replace(parts[0], part)) for part in parts])
    return out


CHANGES: dict[str, Callable[[Tensors, Draft], Tensors]] = {
    "midlayer": lambda t, d: t,
    "layers.0": lambda t, d: renamed(t, "midlayer.", "layers.0."),
    "model.": lambda t, d: {f"model.{n}": x for n, x in t.items()},
    "model.layers.0": lambda t, d: {f"model.{n}": x for n, x in renamed(t, "midlayer.", "layers.0.").items()},
    "fused qkv": lambda t, d: joined(t, ("q_proj", "k_proj", "v_proj"), "qkv_proj"),
    "fused gate and up": lambda t, d: joined(t, ("gate_proj", "up_proj"), "gate_up_proj"),
    "bool t2d": lambda t, d: t | {"t2d": t2d(d)},
    "int t2d": lambda t, d: t | {"t2d": t2d(d, torch.int64)},
    "int32 d2t": lambda t, d: t | {"d2t": t["d2t"].int()},
    "float64": lambda t, d: {n: x.double() if x.is_floating_point() else x for n, x in t.items()},
    "rotary buffers": lambda t, d: t | {f"{at}rotary_emb.inv_freq": torch.ones(4)
                                        for at in ("", "midlayer.self_attn.", "model.layers.0.self_attn.")},
}  # fmt: skip


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("change", CHANGES)
def test_names_and_types_of_tensors(tmp_path, change, bias):
    draft = make(num_hidden_layers=2, attention_bias=bias, mlp_bias=bias)
    config = FLAT | dict(num_hidden_layers=2, attention_bias=bias, mlp_bias=bias)
    assert_computes(written(tmp_path / "d", config, CHANGES[change](draft.state_dict(), draft)), draft)


@pytest.mark.parametrize(("name", "rows"), [("self_attn.qkv_proj", 64), ("mlp.gate_up_proj", 96)])
def test_a_fused_projection_of_another_size_is_refused(tmp_path, name, rows):
    draft = make()
    tensors = joined(draft.state_dict(), ("q_proj", "k_proj", "v_proj"), "qkv_proj")
    tensors = joined(tensors, ("gate_proj", "up_proj"), "gate_up_proj")
    written(tmp_path / "d", FLAT, tensors | {f"midlayer.{name}.weight": tensors[f"midlayer.{name}.weight"][:-1]})
    refused(tmp_path / "d", rf"{name}\.weight has {rows - 1} rows, but the config requires {rows}")


@pytest.mark.parametrize("twice", ["layers.0.mlp.up_proj.weight", "model.midlayer.self_attn.q_proj.weight"])
def test_a_tensor_under_two_names_is_refused(tmp_path, twice):
    tensors = make().state_dict()
    written(tmp_path / "d", FLAT, tensors | {twice: tensors["midlayer." + twice.split(".", 2)[2]]})
    refused(tmp_path / "d", "is in the file twice, under two names")


@pytest.mark.parametrize(
    "name", ["verifier_lm_head.weight", "midlayer.self_attn.sinks", "midlayer.self_attn.q_proj.lora_A"]
)
def test_unknown_tensors_are_refused_by_name(tmp_path, name):
    written(tmp_path / "d", FLAT, make().state_dict() | {name: torch.ones(3)})
    refused(tmp_path / "d", rf"{name} is not part of such a draft")


def test_a_map_of_zeros_is_the_identity(tmp_path):
    draft = make(V)
    tensors = draft.state_dict() | dict(d2t=torch.zeros(V, dtype=torch.int64), t2d=torch.ones(V, dtype=torch.bool))
    assert_computes(written(tmp_path / "d", FLAT | dict(draft_vocab_size=V), tensors), draft)


def test_the_targets_number_of_layers_in_the_config(tmp_path):
    draft = make()
    config = assert_computes(written(tmp_path / "d", FLAT | dict(num_hidden_layers=36), draft.state_dict()), draft)
    assert config.num_hidden_layers == 1


def test_a_pickle(tmp_path):
    draft = make()
    written(tmp_path / "d", FLAT, {})
    (tmp_path / "d" / "model.safetensors").unlink()
    torch.save({**draft.state_dict(), "t2d": t2d(draft)}, tmp_path / "d" / "pytorch_model.bin")
    assert_computes(tmp_path / "d", draft)


class Payload:
    """A pickle of this object would write a file when it is loaded."""

    def __reduce__(self):
        return Path.touch, (Path("ran"),)


@pytest.mark.parametrize("content", [Payload(), {"fc.weight": Payload()}], ids=["alone", "in a dict"])
def test_a_pickle_with_code_is_refused_and_not_run(tmp_path, content, monkeypatch):
    monkeypatch.chdir(tmp_path)
    written(tmp_path / "d", FLAT, {})
    (tmp_path / "d" / "model.safetensors").unlink()
    torch.save(content, tmp_path / "d" / "pytorch_model.bin")
    refused(tmp_path / "d", "holds more than tensors: loading it would run Python code, which fledge does not do")
    assert listing(tmp_path) == ["d"]


@pytest.mark.parametrize("how", ["by torch", "by pickle"])
@pytest.mark.filterwarnings("error")
def test_a_pickle_of_another_protocol_is_refused_without_advice_to_run_it(tmp_path, how, monkeypatch):
    monkeypatch.chdir(tmp_path)
    written(tmp_path / "d", FLAT, {})
    (tmp_path / "d" / "model.safetensors").unlink()
    file = tmp_path / "d" / "pytorch_model.bin"
    if how == "by torch":
        torch.save({"a": Payload()}, file, pickle_protocol=4)
    else:
        file.write_bytes(pickle.dumps({"a": Payload()}))
    message = refused(tmp_path / "d", "is no file of tensors alone: it holds something that fledge does not load")
    assert "weights_only" not in message and "truncated" not in message and listing(tmp_path) == ["d"]


# -- weights in several files ------------------------------------------------------------------------------------------


def sharded(directory: Path, draft: Draft) -> Path:
    """Weights in two files with an index."""
    tensors = draft.state_dict()
    written(directory, FLAT, {})
    (directory / "model.safetensors").unlink()
    names, places = sorted(tensors), {}
    for i, part in enumerate((names[:5], names[5:]), start=1):
        file = f"model-0000{i}-of-00002.safetensors"
        save_file({n: tensors[n] for n in part}, directory / file)
        places |= dict.fromkeys(part, file)
    index = {"metadata": {"total_size": 1}, "weight_map": places}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))
    return directory


def test_shards(tmp_path):
    draft = make()
    assert_computes(sharded(tmp_path / "d", draft), draft)


@pytest.mark.parametrize(
    ("places", "reason"),
    [
        (None, "it has no weight_map"), ([], "it has no weight_map"), ({}, "it has no weight_map"),
        ({"fc.weight": "../model-00001-of-00002.safetensors"}, "is not the name of a safetensors file"),
        ({"fc.weight": "/etc/passwd"}, "is not the name of a safetensors file"),
        ({"fc.weight": 3}, "3 is not the name of a safetensors file"),
        ({"fc.weight": "model-00003-of-00002.safetensors"}, "does not exist; the draft's weights are missing"),
        ({"fc.weight": "model-00001-of-00002.safetensors"}, "in that file and not in the index; copy the draft again"),
        ({"gone": "model-00001-of-00002.safetensors"}, "does not match model-00001-of-00002.safetensors"),
    ],
    ids=str,
)  # fmt: skip
def test_an_index_that_does_not_fit_its_files_is_refused(tmp_path, places, reason):
    sharded(tmp_path / "d", make())
    change_json(tmp_path / "d" / "model.safetensors.index.json", weight_map=places)
    refused(tmp_path / "d", reason)


def test_a_missing_or_damaged_shard_is_refused(tmp_path):
    sharded(tmp_path / "d", make())
    shard = tmp_path / "d" / "model-00002-of-00002.safetensors"
    shard.write_bytes(shard.read_bytes()[:-8])
    refused(tmp_path / "d", r"model-00002-of-00002\.safetensors cannot be read")
    shard.unlink()
    refused(tmp_path / "d", r"model-00002-of-00002\.safetensors does not exist")
    (tmp_path / "d" / "model.safetensors.index.json").write_text("{")
    refused(tmp_path / "d", r"index\.json cannot be read .* copy it again")


# -- speculators' format -----------------------------------------------------------------------------------------------

LAYER = dict(
    model_type="llama", attention_bias=False, attention_dropout=0.0, bos_token_id=2, eos_token_id=[1, 3], head_dim=HEAD,
    hidden_act="silu", hidden_size=D, initializer_range=0.02, intermediate_size=INNER, max_position_embeddings=256,
    mlp_bias=False, num_attention_heads=HEADS, num_hidden_layers=1, num_key_value_heads=KV, pretraining_tp=1,
    rms_norm_eps=1e-5, rope_scaling=None, rope_theta=10000.0, tie_word_embeddings=False, use_cache=True, vocab_size=V,
)  # fmt: skip
SPECULATORS = dict(
    architectures=["Eagle3DraftModel"], auto_map={"": "eagle3.Eagle3SpeculatorConfig"}, draft_vocab_size=40,
    embed_requires_grad=False, norm_before_residual=False, norm_before_fc=False, target_hidden_size=None,
    eagle_aux_hidden_state_layer_ids=None, speculators_model_type="eagle3", speculators_version="0.5.0",
    speculators_config={
        "algorithm": "eagle3", "default_proposal_method": "greedy",
        "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": 3}],
        "verifier": {"architectures": ["LlamaForCausalLM"], "name_or_path": "owner/target"},
    },
    torch_dtype="bfloat16", transformer_layer_config=LAYER, transformers_version="4.57.1",
)  # fmt: skip


def speculators_tensors(draft: Draft) -> Tensors:
    """Numbered layers, the embedding of the draft, and the map's two tensors."""
    return renamed(draft.state_dict(), "midlayer.", "layers.0.") | {"t2d": t2d(draft)}


@pytest.mark.parametrize(
    ("draft", "top", "layer"),
    [
        ({}, {}, {}),
        (dict(norm_before_residual=True), dict(norm_before_residual=True), {}),
        (dict(norm_before_fc=True), dict(norm_before_fc=True), {}),
        (dict(fc_norm=True, norm_output=True), dict(fc_norm=True, norm_output=True), {}),
        (dict(aux_layers=(1, 4, 6, 7), num_aux_hidden_states=4),
         dict(eagle_aux_hidden_state_layer_ids=[1, 4, 6, 7]), {}),
        (dict(qk_norm=True, num_hidden_layers=2), {}, dict(
            model_type="qwen3", num_hidden_layers=2, layer_types=["full_attention"] * 2, sliding_window=None)),
        (dict(method="peagle", mask_token_id=7, num_hidden_layers=2), dict(
            speculators_model_type="peagle", mask_token_id=7, architectures=["PEagleDraftModel"]),
         dict(num_hidden_layers=2)),
        (dict(method="peagle", mask_token_id=7), dict(speculators_model_type="peagle", ptd_token_id=7), {}),
    ],
    ids=["plain", "residual", "gpt-oss", "3.1", "four layers", "qwen3", "p-eagle", "early p-eagle"],
)  # fmt: skip
def test_speculators_drafts(tmp_path, draft, top, layer):
    draft = make(own_embeddings=True, **draft)
    hf = SPECULATORS | top | dict(transformer_layer_config=LAYER | layer)
    config = assert_computes(written(tmp_path / "d", hf, speculators_tensors(draft)), draft)
    assert config.aux_layers == draft.config.aux_layers and config.provenance.target == "owner/target"
    assert config.provenance.depth == 3  # as many tokens as the file proposes
    lines: list[str] = []
    assert run(InspectOptions(directory=str(tmp_path / "d")), lines.append)
    assert "Its files have speculators' format." in lines


def test_speculators_draft_with_the_embedding_of_its_target(tmp_path):
    draft = make()
    assert_computes(written(tmp_path / "d", SPECULATORS, speculators_tensors(draft)), draft)


def test_speculators_eagle_1(tmp_path):
    draft = make(V, method="eagle1", num_aux_hidden_states=0, fc_bias=True)
    tensors = renamed(renamed(draft.state_dict(), "midlayer.", "transformer."), "fc.", "fusion_fc.")
    hf = {k: x for k, x in SPECULATORS.items() if not k.startswith(("norm_", "draft_", "eagle_"))}
    hf |= dict(speculators_model_type="eagle", fusion_bias=True, layernorms=False)
    assert assert_computes(written(tmp_path / "d", hf, tensors), draft).fc_bias
    reconfigure(tmp_path / "d", layernorms=True)
    refused(tmp_path / "d", "an EAGLE-1 draft with layernorms")


@pytest.mark.parametrize(
    ("top", "layer", "reason"),
    [
        (dict(speculators_model_type="dspark"), {}, "of type 'dspark'; fledge reads eagle, eagle3, peagle"),
        (dict(speculators_model_type=None), {}, "of type None"),
        (dict(norm_before_residual=None), {}, "norm_before_residual is missing: vLLM then takes true"),
        (dict(transformer_layer_config=None), None, "lacks hidden_size"),
        ({}, dict(model_type="gemma3"), "transformer_layer_config.model_type is 'gemma3'"),
        ({}, dict(layer_types=["sliding_attention"], sliding_window=64), "attend to a sliding window only"),
        ({}, dict(layer_types="full"), "layer_types is 'full'; it must be a list"),
        ({}, dict(hidden_act="gelu"), "hidden_act 'gelu'"),
        ({}, dict(logit_scale=0.5), "logit_scale is 0.5"),
        (dict(quantization_config={"quant_method": "fp8"}), {}, "asks for quantized weights"),
        (dict(speculators_config=[]), {}, "speculators_config is a list of 0"),
        (dict(speculators_config={"verifier": 3}), {}, "verifier is 3"),
        (dict(fledge=3), {}, "fledge is 3"),
        (dict(speculators_model_type="peagle"), {}, "a P-EAGLE draft without mask_token_id"),
    ],
)  # fmt: skip
def test_speculators_drafts_that_are_refused(tmp_path, top, layer, reason):
    written(tmp_path / "d", SPECULATORS, speculators_tensors(make()))
    if layer is not None:
        top = top | dict(transformer_layer_config=LAYER | layer)
    reconfigure(tmp_path / "d", **top)
    refused(tmp_path / "d", reason)


# -- DeepSpec, and the numbering of layers -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        (dict(layer_types=["sliding_attention"], sliding_window=64), "attend to a sliding window only"),
        (dict(layer_types=["sliding_attention"], sliding_window=0), ""),
        (dict(layer_types=["full_attention", "sliding_attention"], sliding_window=64), ""),
        (dict(quantization_config={"quant_method": "fp8"}), "quantization_config asks for quantized weights"),
        (dict(quantization_config="fp8"), "it must be a JSON object"),
        (dict(logit_scale=-1), "logit_scale is -1"),
        (dict(logit_scale=1.0), ""),
        (dict(logit_scale="1"), "it must be a number from -1e\\+06"),
        (dict(eagle_config={"use_aux_hidden_state": False}), "use_aux_hidden_state is false"),
        (dict(eagle_config={"use_aux_hidden_state": True}), ""),
        (dict(dflash_config={"mask_token_id": 3}, dspark_noise_token_id=4), ""),  # of methods that have a mask token
    ],
)
def test_fields_with_which_engines_compute_something_else_are_refused(tmp_path, changes, reason):
    written(tmp_path / "d", FLAT | changes, dict(make().state_dict()))
    if reason:
        refused(tmp_path / "d", reason)
    else:
        load_draft(tmp_path / "d")


@pytest.mark.parametrize(
    "other",
    [dict(pard_token=4), dict(ptd_token_id=4), dict(dspark_noise_token_id=4), dict(dflash_config={"mask_token_id": 4})],
)
def test_two_mask_tokens_are_refused(tmp_path, other):
    draft = make(method="peagle", mask_token_id=3)
    written(tmp_path / "d", FLAT | dict(mask_token_id=3), dict(draft.state_dict()))
    load_draft(tmp_path / "d")
    reconfigure(tmp_path / "d", **other)
    refused(tmp_path / "d", "the mask token is 3 in mask_token_id and 4 in")


def test_eagle_1_has_no_hidden_states_of_layers_to_leave_out(tmp_path):
    draft = make(V, method="eagle1", num_aux_hidden_states=0)
    hf = FLAT | dict(architectures=["LlamaForCausalLMEagle"], draft_vocab_size=V, bias=False)
    hf |= dict(eagle_config={"use_aux_hidden_state": False})
    assert load_draft(written(tmp_path / "d", hf, dict(draft.state_dict()))).config.method == "eagle1"


def test_deepspecs_eagle_3(tmp_path):
    """Five layers, numbered by their outputs; q/k norms; the target's embedding and head are in the file."""
    draft = make(V, own_embeddings=True, qk_norm=True, aux_layers=(2, 3, 5, 6, 8), num_aux_hidden_states=5)
    hf = FLAT | dict(architectures=["Qwen3Eagle3Model"], model_type="qwen3", target_layer_ids=[1, 2, 4, 5, 7])
    hf |= dict(ttt_length=7, step_loss_decay=0.9, draft_vocab_size=None)
    tensors = renamed(draft.state_dict(), "midlayer.", "layers.0.")
    assert assert_computes(written(tmp_path / "d", hf, tensors), draft).aux_layers == (2, 3, 5, 6, 8)


def test_each_engines_numbering(tmp_path):
    """vLLM counts the layers that have run, SGLang names the layer whose output is read."""
    assert {name: to_engine((2, 4), name) for name in OFFSETS} == {
        "vllm": [2, 4], "speculators": [2, 4], "safeailab": [2, 4], "sglang": [1, 3], "deepspec": [1, 3],
        "dflash": [1, 3],
    }  # fmt: skip
    assert all(from_engine(to_engine((0, 5), name), name) == [0, 5] for name in OFFSETS)
    written(tmp_path / "d", FLAT | dict(eagle_config={"eagle_aux_hidden_state_layer_ids": [1, 3, 4]}), {})
    assert read_draft_config(tmp_path / "d").aux_layers == (2, 4, 5)


def test_the_layout_that_was_read(tmp_path):
    tensors = make().state_dict()
    for names, layout in (
        (tensors, "SafeAILab's layout"),
        (renamed(tensors, "midlayer.", "layers.0."), "vLLM's layout, with numbered layers"),
        ({f"model.{n}": x for n, x in tensors.items()}, "a layout with model. before the names of tensors (AutoModel)"),
    ):
        assert open_draft(written(tmp_path / "d", FLAT, names)).layout == layout
