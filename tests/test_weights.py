"""Draft checkpoints: the exact files that other engines load, errors for bad files, and atomic writes."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from transformers import AutoConfig

from fledge.config import DraftConfig, Provenance, RopeConfig, default_aux_layers
from fledge.drafts import weights
from fledge.drafts.registry import new_draft
from fledge.drafts.weights import load_draft, read_draft_config, save_draft
from fledge.io.fields import read_json
from fledge.io.fingerprints import tokenizer_sha256
from fledge.targets.compatibility import connect_draft
from fledge.train.checkpoint import RunDirectory
from support.commands import python
from support.drafts_on_disk import HEAD, HEADS, INNER, KV, D, V, make, refused, rewrite, same, saved
from support.files import listing, reconfigure
from support.runs import save_checkpoint, state_file
from support.targets import tiny_draft, tiny_target, tiny_tokenizer

VARIANTS = {
    "eagle3": {},
    "eagle3.1": dict(fc_norm=True, norm_output=True),
    "norm_before_fc": dict(norm_before_fc=True, norm_before_residual=True),
    "qk_norm": dict(qk_norm=True),
    "biases": dict(attention_bias=True, mlp_bias=True),
    "two_layers": dict(num_hidden_layers=2),
    "own_embeddings": dict(own_embeddings=True),
    "narrow": dict(own_embeddings=True, hidden_size=16),
    "four_layers_read": dict(num_aux_hidden_states=4, aux_layers=(1, 3, 5, 8)),
}
ROPES = {
    "default": RopeConfig(rope_theta=5e5),
    "partial": RopeConfig(rope_theta=5e5, partial_rotary_factor=0.5),
    "linear": RopeConfig("linear", 5e5, factor=2.0),
    "llama3": RopeConfig(
        "llama3", 5e5, factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=64
    ),
    "yarn": RopeConfig("yarn", 5e5, factor=4.0, original_max_position_embeddings=64, beta_fast=16.0),
    "longrope": RopeConfig(
        "longrope", 5e5, factor=4.0, original_max_position_embeddings=64, short_factor=(1.0, 1.5, 2.0, 2.5),
        long_factor=(2.0, 3.0, 4.0, 5.0), long=True,
    ),
}  # fmt: skip


# -- the file ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "f32"])
@pytest.mark.parametrize("W", [40, V], ids=["W<V", "W=V"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_a_saved_draft_loads_bit_for_bit(tmp_path, variant, W, dtype):
    draft = make(W, **VARIANTS[variant])
    save_draft(draft, tmp_path / "draft", dtype)
    assert listing(tmp_path / "draft") == ["config.json", "model.safetensors"]
    loaded = load_draft(tmp_path / "draft")
    assert same(loaded, draft.to(dtype).float())
    assert same(load_draft(tmp_path / "draft", dtype=torch.float64), draft.double())
    known = loaded.config.provenance.vocabulary_sha256
    assert known and loaded.config == draft.config.with_provenance(vocabulary_sha256=known)
    assert torch.equal(loaded.target_ids(), draft.target_ids()) and not loaded.training


def portable(c: DraftConfig) -> dict[str, list[int]]:
    """Names and shapes of the tensors in the file that every engine loads."""
    E, A, q, kv = c.hidden_size, c.num_aux_hidden_states, HEADS * HEAD, KV * HEAD
    shapes = {"fc.weight": [E, A * D], "norm.weight": [E], "lm_head.weight": [c.draft_vocab_size, E]}
    for i in range(c.num_hidden_layers):
        at, width = ("midlayer", 2 * E) if i == 0 else (f"layers.{i}", E)
        # in further layers, hidden_norm is a copy of input_layernorm, because SGLang reads that name
        shapes |= {f"{at}.{n}.weight": [E] for n in ("input_layernorm", "hidden_norm", "post_attention_layernorm")}
        shapes |= {f"{at}.self_attn.{n}_proj.weight": [m, width] for n, m in (("q", q), ("k", kv), ("v", kv))}
        shapes |= {f"{at}.self_attn.o_proj.weight": [E, q], f"{at}.mlp.down_proj.weight": [E, INNER]}
        shapes |= {f"{at}.mlp.{n}_proj.weight": [INNER, E] for n in ("gate", "up")}
        if c.qk_norm:
            shapes |= {f"{at}.self_attn.{n}_norm.weight": [HEAD] for n in "qk"}
        if c.attention_bias:
            shapes |= {f"{at}.self_attn.{n}_proj.bias": [m] for n, m in (("q", q), ("k", kv), ("v", kv), ("o", E))}
        if c.mlp_bias:
            shapes |= {f"{at}.mlp.{n}_proj.bias": [m] for n, m in (("gate", INNER), ("up", INNER), ("down", E))}
    if c.fc_norm:
        shapes |= {f"fc_norm.{i}.weight": [D] for i in range(A)}
    if c.norm_before_fc:
        shapes |= {"input_norm.weight": [A * D]}
    if c.own_embeddings:
        shapes |= {"embed_tokens.weight": [V, E]}
    if c.draft_vocab_size < V:
        shapes |= {"d2t": [c.draft_vocab_size], "t2d": [V]}
    return shapes


@pytest.mark.parametrize("W", [40, V], ids=["W<V", "W=V"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_the_file_holds_exactly_the_expected_tensors(tmp_path, variant, W):
    draft = make(W, **VARIANTS[variant])
    save_draft(draft, tmp_path / "draft")
    with safe_open(tmp_path / "draft" / "model.safetensors", framework="pt") as f:
        assert f.metadata() == {"format": "pt"}
    tensors = load_file(tmp_path / "draft" / "model.safetensors")
    assert {n: list(t.shape) for n, t in tensors.items()} == portable(draft.config)
    if W < V:
        d2t, t2d = tensors.pop("d2t"), tensors.pop("t2d")
        assert d2t.dtype == torch.int64 and t2d.dtype == torch.bool
        assert torch.equal(d2t + torch.arange(W), draft.target_ids())
        assert torch.equal(t2d.nonzero().squeeze(-1), draft.target_ids())
    assert {t.dtype for t in tensors.values()} == {torch.bfloat16}
    for name in tensors:
        if name.startswith("layers.") and name.endswith("hidden_norm.weight"):
            assert torch.equal(tensors[name], tensors[name.replace("hidden_norm", "input_layernorm")])


CONFIG_KEYS = {
    "architectures", "model_type", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
    "num_key_value_heads", "head_dim", "hidden_act", "rms_norm_eps", "vocab_size", "draft_vocab_size",
    "max_position_embeddings", "attention_bias", "mlp_bias", "bias", "tie_word_embeddings", "bos_token_id",
    "eos_token_id", "pad_token_id", "torch_dtype", "rope_theta", "rope_scaling", "rope_parameters",
    "norm_before_residual", "norm_before_fc", "fc_norm", "norm_output", "num_aux_hidden_states",
}  # fmt: skip


def test_config_json_has_every_expected_key(tmp_path):
    saved(tmp_path / "d", fc_norm=True, norm_output=True)
    hf = json.loads((tmp_path / "d" / "config.json").read_text())
    assert hf.keys() == CONFIG_KEYS | {"fledge"}
    assert hf["architectures"] == ["LlamaForCausalLMEagle3"] and hf["model_type"] == "llama"
    assert (hf["vocab_size"], hf["draft_vocab_size"], hf["torch_dtype"]) == (V, 40, "float32")
    assert (hf["hidden_act"], hf["bias"], hf["tie_word_embeddings"]) == ("silu", False, False)
    assert (hf["fc_norm"], hf["norm_output"], hf["norm_before_fc"]) == (True, True, False)
    assert hf["rope_scaling"] is None and hf["rope_parameters"] == {"rope_type": "default", "rope_theta": 1e4}


@pytest.mark.parametrize("rope", ROPES)
def test_transformers_reads_the_config_alike(tmp_path, rope):
    draft = saved(tmp_path / "d", rope=ROPES[rope])
    read = AutoConfig.from_pretrained(tmp_path / "d")
    for key in ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim",
                "vocab_size", "rms_norm_eps", "max_position_embeddings"):  # fmt: skip
        assert getattr(read, key) == getattr(draft.config, key), key
    assert read.draft_vocab_size == 40
    expected = ROPES[rope].to_hf()
    assert expected["rope_theta"] == 5e5 and expected["rope_type"] == ROPES[rope].rope_type
    assert {k: read.rope_parameters[k] for k in expected} == expected
    assert read_draft_config(tmp_path / "d").rope == ROPES[rope]
    hf = json.loads((tmp_path / "d" / "config.json").read_text())
    assert hf["rope_theta"] == 5e5, "SafeAILab reads only this field"
    assert rope != "linear" or hf["rope_scaling"] == {"type": "linear", "factor": 2.0}, "SafeAILab's spelling"


def test_a_draft_with_qk_norms_names_the_qwen3_class(tmp_path):
    saved(tmp_path / "d", qk_norm=True)
    read = AutoConfig.from_pretrained(tmp_path / "d")
    assert (read.model_type, read.architectures) == ("qwen3", ["Eagle3Qwen3ForCausalLM"])


# -- which layers are read --------------------------------------------------------------------------------------------


def ids_of(directory: Path) -> tuple[list[int] | None, dict | None]:
    hf = json.loads((directory / "config.json").read_text())
    return hf.get("eagle_aux_hidden_state_layer_ids"), hf.get("eagle_config")


def test_other_layers_are_written_in_both_engines_numbering(tmp_path):
    saved(tmp_path / "d", aux_layers=(1, 4, 8))
    nested = {"eagle_aux_hidden_state_layer_ids": [0, 3, 7], "use_aux_hidden_state": True}
    assert ids_of(tmp_path / "d") == ([1, 4, 8], nested)
    assert read_draft_config(tmp_path / "d").aux_layers == (1, 4, 8)


def test_default_layers_are_not_written_for_the_engines(tmp_path):
    saved(tmp_path / "d")
    assert ids_of(tmp_path / "d") == (None, None)
    saved(tmp_path / "e", aux_layers=default_aux_layers(8), provenance=Provenance(target_layers=8))
    assert ids_of(tmp_path / "e") == (None, None)
    assert read_draft_config(tmp_path / "e").aux_layers == (2, 4, 5), "fledge's own field lists default layers too"


def test_a_draft_of_a_shallow_target_can_be_saved(tmp_path):
    """The engines have no default layers for a target of four layers, so the config lists the draft's layers."""
    saved(tmp_path / "d", aux_layers=(1, 2, 3), provenance=Provenance(target_layers=4))
    assert ids_of(tmp_path / "d")[0] == [1, 2, 3]


def test_layer_ids_of_other_writers_are_read(tmp_path):
    saved(tmp_path / "d")
    nested = {"eagle_aux_hidden_state_layer_ids": [1, 3, 4]}
    reconfigure(tmp_path / "d", fledge=None, eagle_config=nested)
    assert read_draft_config(tmp_path / "d").aux_layers == (2, 4, 5), "SGLang's ids are one less"
    reconfigure(tmp_path / "d", eagle_aux_hidden_state_layer_ids=[2, 4, 5], eagle_config=nested)
    assert read_draft_config(tmp_path / "d").aux_layers == (2, 4, 5)
    reconfigure(tmp_path / "d", eagle_aux_hidden_state_layer_ids=None, eagle_config=None)
    assert read_draft_config(tmp_path / "d").aux_layers is None


# -- files of others --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("prefix", ["", "model."])
@pytest.mark.parametrize("layer", ["midlayer.", "layers.0."])
def test_other_names_for_the_same_tensors(tmp_path, prefix, layer):
    draft = saved(tmp_path / "d", num_hidden_layers=2)

    def rename(tensors):
        for name in list(tensors):
            tensors[prefix + name.replace("midlayer.", layer)] = tensors.pop(name)
        tensors["midlayer.self_attn.rotary_emb.inv_freq"] = torch.ones(4)

    rewrite(tmp_path / "d", rename)
    assert same(load_draft(tmp_path / "d"), draft)


def test_sglangs_old_names_of_the_feature_norms(tmp_path):
    draft = saved(tmp_path / "d", fc_norm=True)

    def rename(tensors):
        for i, name in enumerate(("low", "mid", "high")):
            tensors[f"aux_norm_{name}.weight"] = tensors.pop(f"fc_norm.{i}.weight")

    rewrite(tmp_path / "d", rename)
    reconfigure(tmp_path / "d", fc_norm=None, use_aux_norm=True)
    assert same(load_draft(tmp_path / "d"), draft)


def test_the_authors_eagle_3(tmp_path):
    """The files follow the authors' layout: Llama's architecture, only the fields that their configuration class reads,
    and a pickle. A truncated pickle is refused."""
    draft, written = make(), tmp_path / "d"
    written.mkdir()
    c = draft.config
    hf = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": c.hidden_size,
        "intermediate_size": c.intermediate_size, "num_attention_heads": c.num_attention_heads,
        "num_key_value_heads": c.num_key_value_heads, "num_hidden_layers": 1, "vocab_size": V,
        "draft_vocab_size": c.draft_vocab_size, "rms_norm_eps": c.rms_norm_eps, "hidden_act": "silu",
        "rope_theta": 10000.0, "max_position_embeddings": c.max_position_embeddings, "head_dim": c.head_dim,
        "tie_word_embeddings": False, "torch_dtype": "float16", "use_cache": True,
    }  # fmt: skip
    (written / "config.json").write_text(json.dumps(hf))
    t2d = torch.zeros(V, dtype=torch.bool)
    t2d[draft.target_ids()] = True
    torch.save({**draft.state_dict(), "t2d": t2d}, written / "pytorch_model.bin")
    loaded = load_draft(written)
    assert loaded.config.method == "eagle3" and same(loaded, draft)
    whole = (written / "pytorch_model.bin").read_bytes()
    (written / "pytorch_model.bin").write_bytes(whole[: len(whole) // 2])
    refused(written, r"pytorch_model\.bin cannot be read .*; it is truncated or damaged, copy it again")


def test_int32_offsets_and_no_t2d(tmp_path):
    draft = saved(tmp_path / "d")
    rewrite(tmp_path / "d", lambda t: (t.pop("t2d"), t.update(d2t=t["d2t"].int())))
    assert same(load_draft(tmp_path / "d"), draft)


def test_an_embedding_in_the_file_is_used(tmp_path):
    """A draft's own embedding is used even if its config does not mention it, as in vLLM."""
    draft = saved(tmp_path / "d", own_embeddings=True)
    reconfigure(tmp_path / "d", fledge=None)
    loaded = load_draft(tmp_path / "d")
    loaded.share_target_weights(torch.zeros(V, D))
    assert torch.equal(loaded.embed(torch.arange(V)), draft.embed_tokens.weight)


def test_a_written_target_width_that_equals_the_drafts_needs_no_embedding(tmp_path):
    draft = saved(tmp_path / "d")
    reconfigure(tmp_path / "d", fledge=None, target_hidden_size=D)
    assert same(load_draft(tmp_path / "d"), draft)


# -- refusals ---------------------------------------------------------------------------------------------------------


def test_no_such_draft(tmp_path):
    refused(tmp_path / "none", r"holds no config\.json; a draft is a directory")
    saved(tmp_path / "d")
    (tmp_path / "d" / "model.safetensors").unlink()
    refused(tmp_path / "d", "does not exist; the draft's weights are missing")


@pytest.mark.parametrize("keep", [0, 4, 200, 0.5, -1], ids=["empty", "header", "names", "half", "last byte"])
def test_cut_weights(tmp_path, keep):
    saved(tmp_path / "d")
    file = tmp_path / "d" / "model.safetensors"
    content = file.read_bytes()
    file.write_bytes(content[: int(keep * len(content)) if isinstance(keep, float) else keep])
    refused(tmp_path / "d", r"cannot be read .*; it is truncated or damaged, copy it again")


@pytest.mark.parametrize("text", ["", "{", '{"hidden_size": 32', "\x00\x01", "[]", "3", "null", '{"hidden_size": 32}'])
def test_broken_configs(tmp_path, text):
    saved(tmp_path / "d")
    (tmp_path / "d" / "config.json").write_text(text)
    refused(tmp_path / "d", r"config\.json")


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        (
            dict(
                architectures=["LlamaForCausalLM"],
                draft_vocab_size=None,
                num_hidden_layers=4,
                num_aux_hidden_states=None,
                fledge=None,
            ),
            r"\['LlamaForCausalLM'\] is not a draft that fledge knows",
        ),
        (
            dict(architectures=["LlamaForCausalLMEagle"], draft_vocab_size=None, fledge=None),
            "d2t is not part of such a draft",
        ),
        (dict(hidden_act="gelu"), "hidden_act 'gelu'"),
        (dict(intermediate_size=None), "lacks intermediate_size; is this a draft"),
        (dict(rope_scaling={"type": "dynamic", "factor": 2.0}), "RoPE type 'dynamic' is refused"),
        (dict(rope_scaling={"type": "odd"}), "unknown RoPE type 'odd'"),
        (dict(draft_vocab_size=V + 1), "121 tokens and the target's only 120"),
        (dict(num_attention_heads="four"), r"config\.json"),
        (dict(fc_norm=True, norm_before_fc=True), "exclude each other"),
    ],
)
def test_configs_that_are_not_of_a_readable_draft_are_refused(tmp_path, changes, match):
    saved(tmp_path / "d")
    reconfigure(tmp_path / "d", **changes)
    refused(tmp_path / "d", match)


def move_one(tensors):
    d2t = tensors["d2t"]
    d2t[-1] += 1 if d2t[-1] + len(d2t) - 1 < V - 1 else -(d2t[-1] - d2t[-2])


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (lambda t: t.pop("d2t"), "has no d2t: .* target ids are unknown"),
        (move_one, "its vocabulary map does not match the hash in its config.json"),
        (lambda t: t["d2t"].zero_(), "does not match the hash in its config.json"),
        (lambda t: t.pop("midlayer.hidden_norm.weight"), "midlayer.hidden_norm.weight is missing"),
        (lambda t: t.pop("lm_head.weight"), "lm_head.weight is missing"),
        (lambda t: t.update({"foo.weight": torch.ones(2)}), "foo.weight is not part of such a draft"),
        (lambda t: t.update({"mask_hidden": torch.ones(1, 1, 96)}), "mask_hidden is not part of such a draft"),
        (lambda t: t.update({"fc_norm.0.weight": torch.ones(D)}), "fc_norm.0.weight is not part of such a draft"),
        (
            lambda t: t.update({"fc.weight": torch.ones(D, 2 * D)}),
            r"fc.weight has shape \[32, 64\], .* requires \[32, 96\]",
        ),
        (lambda t: t.update({"d2t": torch.zeros(39, dtype=torch.int64)}), r"d2t has shape \[39\], .* requires \[40\]"),
        (lambda t: [t.pop(n) for n in list(t) if n.startswith("midlayer")], r"is missing; .* \(and 7 more\)"),
    ],
)
def test_weights_that_do_not_fit_their_config(tmp_path, change, match):
    saved(tmp_path / "d")
    rewrite(tmp_path / "d", change)
    refused(tmp_path / "d", match)


@pytest.mark.parametrize("offset", [-V, V])
def test_maps_outside_the_targets_vocabulary_are_refused(tmp_path, offset):
    saved(tmp_path / "d")
    rewrite(tmp_path / "d", lambda t: t.update(d2t=t["d2t"] + offset))
    refused(tmp_path / "d", "outside the target's vocabulary 0..119")


def test_maps_with_a_token_twice_are_refused(tmp_path):
    saved(tmp_path / "d")
    rewrite(tmp_path / "d", lambda t: t["d2t"].copy_(-torch.arange(40)))
    refused(tmp_path / "d", "ascending distinct ids")


# -- the draft and its target -----------------------------------------------------------------------------------------


def test_a_draft_that_fits_reads_its_layers_and_shares_the_embedding(target):
    draft = tiny_draft(target, draft_vocab_size=100, aux_layers=(1, 4, 8))
    assert connect_draft(draft, target) == (1, 4, 8)
    assert draft._shared["embedding"].data_ptr() == target.embedding.data_ptr()
    assert connect_draft(tiny_draft(target), target) == default_aux_layers(8)


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        (dict(vocab_size=399, draft_vocab_size=399), "vocabulary of 399 tokens, and the target has 400"),
        (dict(target_hidden_size=64, own_embeddings=True), "hidden states of size 64, and the target's have size 32"),
        (dict(provenance=Provenance(target_layers=9)), "a target of 9 layers, and this one has 8"),
        (dict(provenance=Provenance(tokenizer_sha256="0" * 64)), "trained with another tokenizer"),
        (dict(aux_layers=(2, 4, 9)), "but the target has layers 0..8"),
    ],
)
def test_a_draft_of_another_target_is_refused(target, changes, match):
    other = new_draft(replace(tiny_draft(target).config, **changes))
    with pytest.raises(ValueError, match=match):
        connect_draft(other, target)


def test_the_right_tokenizer_is_recognised(target):
    known = Provenance(target_layers=8, tokenizer_sha256=tokenizer_sha256(tiny_tokenizer()), template_sha256="other")
    connect_draft(new_draft(replace(tiny_draft(target).config, provenance=known)), target)
    smaller = tokenizer_sha256(tiny_tokenizer(vocab_size=300))
    assert smaller != known.tokenizer_sha256


def test_a_target_with_the_other_longrope_factors_is_refused():
    lists = {"short_factor": [1.0] * 4, "long_factor": [4.0] * 4}
    rope = {"rope_parameters": {"rope_type": "longrope", "rope_theta": 1e4, **lists}}
    short, long = (
        tiny_target("phi3", max_length=n, original_max_position_embeddings=64, **rope) for n in (64, 256)
    )  # fmt: skip
    draft = tiny_draft(short)
    with pytest.raises(ValueError, match="longrope's short factors; load the target with max_length"):
        connect_draft(draft, long)


# -- whole or not at all ----------------------------------------------------------------------------------------------


def test_readers_find_the_old_content_without_renaming(tmp_path, monkeypatch):
    """If a replacement stopped between its two renames, readers find the old content, even on a read-only disk."""
    draft = saved(tmp_path / "d")
    (tmp_path / "d").rename(tmp_path / ".d.fledge-old")
    run = RunDirectory(tmp_path / "run")
    save_checkpoint(run, draft, torch.float32, {"step": 3})
    run.checkpoint.rename(tmp_path / "run" / ".checkpoint.fledge-old")
    before = listing(tmp_path), listing(tmp_path / "run")

    def read_only(*given, **named):
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    for name in ("rename", "replace", "mkdir", "unlink", "rmdir"):
        monkeypatch.setattr(os, name, read_only)
    assert same(load_draft(tmp_path / "d"), draft)
    assert read_draft_config(tmp_path / "d") == load_draft(tmp_path / "d").config
    assert run.load_progress() == {"step": 3}
    assert same(load_draft(run.checkpoint), draft)
    assert (listing(tmp_path), listing(tmp_path / "run")) == before


def test_a_draft_that_is_replaced_while_it_is_read_is_read_again(tmp_path, monkeypatch):
    """The reader never combines one draft's config with another's weights, and does not fail on removed files."""
    small = dict(hidden_size=16, own_embeddings=True)
    saved(tmp_path / "d", seed=1)
    read, replaced = weights.read_tensors, []

    def replacing_first(file):
        if not replaced:
            replaced.append(saved(tmp_path / "d", seed=2, **small))
        return read(file)

    monkeypatch.setattr(weights, "read_tensors", replacing_first)
    assert same(load_draft(tmp_path / "d"), replaced[0]) and len(replaced) == 1


def test_a_draft_in_the_current_directory_is_loaded(tmp_path, monkeypatch):
    draft = saved(tmp_path / "d")
    monkeypatch.chdir(tmp_path / "d")
    assert same(load_draft("."), draft)


def test_neighbouring_directories_are_not_touched(tmp_path):
    """Readers and writers do not touch directories such as d.old and d.new, which users make."""
    draft = saved(tmp_path / "d")
    copies = {name: saved(tmp_path / name, seed=5) for name in ("d.old", "d.new")}
    assert same(load_draft(tmp_path / "d"), draft)
    saved(tmp_path / "d", seed=2)
    assert all(same(load_draft(tmp_path / name), copy) for name, copy in copies.items())


CHILD = """
import json, os, resource, signal, sys, time
from pathlib import Path
import torch
torch.set_num_threads(1)
from support.drafts_on_disk import make, saved
from fledge.drafts.weights import save_draft
from fledge.train.checkpoint import RunDirectory
from support.runs import save_checkpoint
here = Path(sys.argv[1])
"""
KILLED_WHILE_WRITING = (
    CHILD
    + """
def half(self, content):
    with self.open("wb") as f:
        f.write(content[: len(content) // 2])
        f.flush()
        print("half", flush=True)
        time.sleep(600)
saved(here / "d", seed=1)
Path.write_bytes = half
save_draft(make(seed=2), here / "d", torch.float32)
"""
)
FULL_DISK = (
    CHILD
    + """
run = RunDirectory(here)
run.start("a: 1")
save_draft(make(seed=1), run.draft, torch.float32)
save_checkpoint(run, make(seed=1), torch.float32, {"step": 1})
run.metrics.write_text('{"step": 1}\\n' * 20_000)
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, 50_000))
small = dict(hidden_size=8, own_embeddings=True, num_attention_heads=2, num_key_value_heads=1, intermediate_size=8)
big, room = {"x": torch.zeros(50_000)}, {f"x{i}": torch.zeros(2_000) for i in range(40)}
jobs = {
    "publish": lambda: save_draft(make(seed=2), run.draft, torch.float32),
    "checkpoint draft": lambda: save_checkpoint(run, make(seed=2), torch.float32, {}),
    "checkpoint state": lambda: save_checkpoint(run, make(seed=2, **small), torch.bfloat16, {}, **big),
    "checkpoint state, later": lambda: save_checkpoint(run, make(seed=2, **small), torch.bfloat16, {}, **room),
    "metrics": lambda: run.truncate_metrics(5),
}
for name, job in jobs.items():
    try:
        job()
        print(json.dumps([name, None, None, "no error"]), flush=True)
    except Exception as e:
        print(json.dumps([name, type(e).__name__, getattr(e, "errno", None), str(e)]), flush=True)
"""
)


def test_a_process_killed_while_writing_leaves_the_old_draft(tmp_path):
    with python(KILLED_WHILE_WRITING, tmp_path) as process:
        try:
            assert process.stdout.readline() == "half\n"
        finally:
            process.kill()
    assert (tmp_path / ".d.fledge-new" / "model.safetensors").stat().st_size > 0, "it was killed too early"
    assert same(load_draft(tmp_path / "d"), make(seed=1))
    draft = make(seed=3)
    save_draft(draft, tmp_path / "d", torch.float32)
    assert same(load_draft(tmp_path / "d"), draft) and listing(tmp_path) == ["d"]


def test_a_full_disk_gives_one_sentence_and_keeps_the_old_content(tmp_path):
    """A file size limit of 50,000 bytes stands for a full disk: the system raises EFBIG in place of ENOSPC."""
    with python(FULL_DISK, tmp_path) as process:
        lines = [json.loads(line) for line in process.stdout]
    assert [name for name, *_ in lines] == [
        "publish", "checkpoint draft", "checkpoint state", "checkpoint state, later", "metrics",
    ]  # fmt: skip
    for name, kind, number, message in lines:
        what = tmp_path / {"publish": "draft", "metrics": "metrics.jsonl"}.get(name, "checkpoint")
        assert (kind, number) == ("DiskFullError", errno.EFBIG), (name, message)
        assert "no space to " in message and str(what) in message and "ree some disk space" in message
        assert "\n" not in message
    run = RunDirectory(tmp_path)
    assert same(load_draft(run.draft), make(seed=1)) and run.load_progress() == {"step": 1}
    assert run.metrics.read_text() == '{"step": 1}\n' * 20_000
    assert listing(tmp_path) == ["checkpoint", "draft", "metrics.jsonl", "recipe.yaml"]


@pytest.mark.parametrize("where", ["write_bytes", "mkdir"])
def test_no_space_left(tmp_path, monkeypatch, where):
    draft = saved(tmp_path / "d", seed=1)

    def full(self, *args, **kwargs):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(Path, where, full)
    with pytest.raises(
        OSError, match=r"no space to save .*d \(No space left on device\); the previous content is unchanged"
    ):
        save_draft(make(seed=2), tmp_path / "d")
    monkeypatch.undo()
    assert same(load_draft(tmp_path / "d"), draft) and listing(tmp_path) == ["d"]


# -- a run's directory ------------------------------------------------------------------------------------------------


def test_a_run_is_started_once(tmp_path):
    run = RunDirectory(tmp_path / "deep" / "run")
    with pytest.raises(ValueError, match="holds no training run to resume"):
        run.options_file()
    run.start("lr: 0.1")
    assert run.options_file().read_text() == "lr: 0.1" and run.load_progress() is None
    with pytest.raises(
        ValueError, match=r"holds a training run; continue it with --resume .*run, or choose another --out"
    ):
        run.start("lr: 0.2")


@pytest.mark.parametrize("damage", ["cut", "noise", "gone", "empty", "other"])
@pytest.mark.parametrize("what", ["progress.json", "state"])
def test_a_damaged_state_is_refused(tmp_path, what, damage):
    run = RunDirectory(tmp_path)
    save_checkpoint(run, make(), torch.float32, {"step": 1}, x=torch.ones(1000))
    file = state_file(tmp_path) if what == "state" else run.checkpoint / what
    content = file.read_bytes()
    file.unlink()
    if damage == "other":
        file.write_text("[1, 2]") if what == "progress.json" else save_file({"y": torch.ones(3)}, file)
    elif damage != "gone":
        file.write_bytes({"cut": content[: len(content) // 2], "noise": b"not a checkpoint", "empty": b""}[damage])
    reason = rf"{re.escape(str(run.checkpoint))}/.*cannot be read .* damaged, start a new run.* --init-from"
    with pytest.raises(ValueError, match=reason):
        run.load_progress()
    if what == "state":
        with pytest.raises(ValueError, match=reason):
            run.load_tensors({"x": torch.zeros(1000)})


@pytest.mark.parametrize("name", ["state", "progress.json", "model.safetensors", "config.json"])
def test_a_flipped_bit_in_a_checkpoint_is_found(tmp_path, name):
    run = RunDirectory(tmp_path)
    save_checkpoint(run, make(), torch.float32, {"step": 1}, x=torch.ones(1000))
    file = state_file(tmp_path) if name == "state" else run.checkpoint / name
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
    with pytest.raises(
        ValueError, match=rf"{re.escape(str(file))} cannot be read \(its SHA-256 differs.*start a new run"
    ):
        run.load_progress()
    sums = run.checkpoint / "SHA256SUMS"
    for damage, why in ((lambda: sums.write_text("garbled"), "it holds no hashes"), (sums.unlink, "it is missing")):
        damage()
        with pytest.raises(ValueError, match=rf"SHA256SUMS cannot be read \({why}\).* start a new run; --init-from"):
            run.load_progress()


def test_the_hashes_are_those_of_sha256sum(tmp_path):
    run = RunDirectory(tmp_path)
    save_checkpoint(run, make(), torch.float32, {"step": 1})
    names = [f"state/{state_file(tmp_path).name}", "model.safetensors", "config.json", "progress.json"]
    assert (run.checkpoint / "SHA256SUMS").read_text().splitlines() == [
        f"{hashlib.sha256((run.checkpoint / name).read_bytes()).hexdigest()}  {name}" for name in names
    ]
    assert sorted([*(name.split("/")[0] for name in names), "SHA256SUMS"]) == listing(run.checkpoint)


def test_a_checkpoint_is_read_back_and_its_draft_loads(tmp_path):
    """What is saved are the values at the time of the call, although it is written later."""
    run, draft, m, n = RunDirectory(tmp_path), make(), torch.randn(7), torch.tensor(3.0)
    before = {"m": m.clone(), "n": n.clone()}
    run.save_checkpoint(draft, torch.float32, {"m": m, "n": n}, {"address": [3, 4], "tau": 1 / 3})
    m.zero_()
    n.zero_()
    run.finish_saving()
    assert run.load_progress() == {"address": [3, 4], "tau": 1 / 3}
    run.load_tensors({"m": m, "n": n})
    assert torch.equal(m, before["m"]) and torch.equal(n, before["n"])
    assert same(load_draft(run.checkpoint), draft)


@pytest.mark.parametrize("line", ['{"loss": 1}', '{"step": "2"}', '["step"]', "{}}", '{"step": 1e999}', "\xff}"])
def test_a_metrics_line_that_training_did_not_write_is_refused(tmp_path, line):
    run = RunDirectory(tmp_path)
    before = b'{"step": 1}\n' + line.encode("latin-1").replace(b"]", b"]}") + b'\n{"step": 2}\n'
    run.metrics.write_bytes(before)
    with pytest.raises(ValueError, match=r"metrics\.jsonl, line 2 was not written by training; remove it"):
        run.truncate_metrics(1)
    assert run.metrics.read_bytes() == before


OWNED = {
    "draft": "directory",
    "checkpoint": "directory",
    "metrics.jsonl": "file",
    "summary.json": "file",
    "recipe.yaml": "file",
}


@pytest.mark.parametrize("name", [*OWNED, ".checkpoint.fledge-new", ".draft.fledge-old"])
@pytest.mark.parametrize("how", ["link", "dangling link", "other kind"])
def test_files_that_a_run_cannot_replace_are_refused_before_it_starts(tmp_path, name, how):
    run = RunDirectory(tmp_path / "run")
    run.path.mkdir()
    elsewhere, place, kind = tmp_path / "elsewhere", run.path / name, OWNED.get(name, "directory")
    if how == "other kind":
        place.write_text("mine") if kind == "directory" else place.mkdir()
    else:
        place.symlink_to(elsewhere)
        if how == "link":
            elsewhere.mkdir() if kind == "directory" else elsewhere.write_text("mine")
    wanted = f"is not a {kind}, so a run" if how == "other kind" else "is a symbolic link.*move the link's target here"
    with pytest.raises(ValueError, match=f"{re.escape(name)} {wanted}"), run.locked():
        pytest.fail("the run started")
    assert listing(run.path) == [name] and place.is_symlink() == ("link" in how)
    if name in OWNED:
        with pytest.raises(ValueError, match=r"exists, and a run|holds a training run"):
            run.check_free()


def test_a_run_directory_may_be_a_symbolic_link(tmp_path):
    (tmp_path / "disk").mkdir()
    (tmp_path / "run").symlink_to(tmp_path / "disk")
    run = RunDirectory(tmp_path / "run")
    with run.locked():
        run.start("a: 1")
        for step in (1, 2):
            save_checkpoint(run, make(), torch.float32, {"step": step})
    assert run.load_progress() == {"step": 2} and listing(tmp_path / "disk") == ["checkpoint", "recipe.yaml"]


def test_a_run_is_locked_by_one_process_that_repairs_it(tmp_path):
    """After a kill, the next process that locks the run repairs it; a second process cannot lock it."""
    run = RunDirectory(tmp_path / "run")
    with run.locked():
        save_checkpoint(run, make(), torch.float32, {"step": 1})
    run.checkpoint.rename(run.path / ".checkpoint.fledge-old")
    (run.path / ".fledge-new-0123").write_text("half of metrics.json")
    (run.path / ".fledge-lock").write_text("process 1 on another machine")
    with run.locked():
        assert listing(run.path) == [".fledge-lock", "checkpoint"]
        with (
            pytest.raises(ValueError, match=rf"run is in use: process {os.getpid()} on .* since .*; wait"),
            run.locked(),
        ):
            pytest.fail("two processes hold the lock")
    assert listing(run.path) == ["checkpoint"]


def test_a_run_that_writes_nothing_leaves_no_directory(tmp_path):
    with pytest.raises(ValueError, match="no data"), RunDirectory(tmp_path / "run").locked():
        raise ValueError("no data")
    (tmp_path / "mine").mkdir()
    with RunDirectory(tmp_path / "mine").locked():
        pass
    assert listing(tmp_path) == ["mine"]


@pytest.mark.parametrize("end", ["\n", "\r\n"])
def test_metrics_are_kept_with_any_line_ends(end, tmp_path):
    run = RunDirectory(tmp_path)
    lines = [f'{{"step": {i}}}' for i in range(1, 5)]
    for last in ("", end, f'{end}{{"step": 5, "parts": {{"data": 1}}'):
        run.metrics.write_text(end.join(lines) + last, newline="")
        run.truncate_metrics(3)
        assert run.metrics.read_text().splitlines() == lines[:3]
    run.metrics.write_text(end.join(lines), newline="")
    run.truncate_metrics(4)  # a last line without an end is whole
    assert run.metrics.read_text().splitlines() == lines


def test_metrics_after_a_step_are_dropped_and_half_lines_too(tmp_path):
    run = RunDirectory(tmp_path)
    run.truncate_metrics(3)  # none yet
    run.metrics.write_text('{"step": 1}\n{"step": 2}\n{"step": 3}\n{"step": 3, "parts": {"data": 1}')
    run.truncate_metrics(2)
    assert run.metrics.read_text() == '{"step": 1}\n{"step": 2}\n' and listing(tmp_path) == ["metrics.jsonl"]


def test_a_config_without_end_is_not_read(fledge, tmp_path, monkeypatch):
    """Devices have the size 0, and no end."""
    monkeypatch.setattr("fledge.io.fields.MOST_BYTES", 1000)
    saved(tmp_path / "draft")
    (tmp_path / "draft/config.json").write_text(" " * 1001)
    went = fledge("inspect", tmp_path / "draft")
    said = " ".join((went.out + went.err).split())
    assert went.code and "config.json is not JSON (it has more than 1,000 bytes)" in said, said
    with pytest.raises(ValueError, match="it has more than 1,000 bytes"):
        read_json(Path("/dev/zero"))
