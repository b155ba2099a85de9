"""Draft files of other trainers (key names and configs written by hand), and what they would misread in our files."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from fledge.check.draft_files import read_files, vocabulary_findings
from fledge.commands.inspect import InspectOptions, run
from fledge.config import DraftConfig, RopeConfig
from fledge.drafts.draft import Draft
from fledge.drafts.weights import load_draft, read_draft_config, save_draft
from fledge.engines.support import trainer_notes
from fledge.io.formats import config_from_hf, config_to_hf
from support.drafts_on_disk import HEAD, HEADS, INNER, KV, D, V, make, refused, same, saved
from support.files import reconfigure
from support.targets import tiny_target

SHAPE = dict(
    model_type="llama", hidden_size=D, intermediate_size=INNER, num_attention_heads=HEADS, num_key_value_heads=KV,
    head_dim=HEAD, hidden_act="silu", rms_norm_eps=1e-5, vocab_size=V, max_position_embeddings=256, rope_theta=10000.0,
    rope_scaling=None, attention_bias=False, tie_word_embeddings=False, torch_dtype="bfloat16", num_hidden_layers=1,
    bos_token_id=2, eos_token_id=[1, 3], pad_token_id=0, use_cache=True, transformers_version="4.57.1",
)  # fmt: skip
MAPS = ("d2t", "t2d")


def written(directory: Path, config: dict[str, Any], tensors: dict[str, Tensor]) -> Path:
    """Writes a draft's directory with the given config and tensors, as another trainer would."""
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(config))
    save_file({n: t.detach().clone() for n, t in tensors.items()}, directory / "model.safetensors", {"format": "pt"})
    return directory


def under(prefix: str, draft: Draft, layer: str = "layers.0.") -> dict[str, Tensor]:
    """A draft's tensors with numbered layers, and a prefix on all names except the head, the vocabulary map and
    mask_hidden."""
    outside = ("lm_head.weight", "d2t", "mask_hidden")
    tensors = {n.replace("midlayer.", layer): t for n, t in draft.state_dict().items()}
    return {n if n in outside else prefix + n: t for n, t in tensors.items()}


def t2d(draft: Draft) -> Tensor:
    known = torch.zeros(V, dtype=torch.bool)
    known[draft.target_ids()] = True
    return known


def assert_read(directory: Path, draft: Draft, method: str = "eagle3") -> None:
    """Asserts that the files load as the given draft, bit for bit, and again after saving with fledge."""
    loaded = load_draft(directory)
    assert loaded.config.method == method and same(loaded, draft)
    save_draft(loaded, directory.parent / "again", torch.float32)
    again = load_draft(directory.parent / "again")
    assert same(again, draft) and again.config.num_hidden_layers == draft.config.num_hidden_layers


def test_specforges_eagle_3(tmp_path):
    """SpecForge writes its state dict without the embedding, with `midlayer.` and both vocabulary maps."""
    draft = make()
    tensors = under("", draft, "midlayer.") | {"t2d": t2d(draft)}
    config = SHAPE | dict(architectures=["LlamaForCausalLMEagle3"], draft_vocab_size=40)
    assert_read(written(tmp_path / "d", config, tensors), draft)


def test_specforges_eagle_3_of_the_whole_vocabulary(tmp_path):
    """With the whole vocabulary, SpecForge writes a map of zeros, since every draft id is the target id."""
    draft = make(V)
    tensors = under("", draft, "midlayer.") | dict(d2t=torch.zeros(V, dtype=torch.int64), t2d=torch.ones(V) > 0)
    config = SHAPE | dict(architectures=["LlamaForCausalLMEagle3"], draft_vocab_size=V)
    directory = written(tmp_path / "d", config, tensors)
    assert_read(directory, draft)
    tensors["d2t"][3] = 1
    save_file(tensors, directory / "model.safetensors")
    with pytest.raises(ValueError, match="d2t is not part of such a draft"):
        load_draft(directory)


def foreign(directory: Path, changes: dict[str, Any], **tensors: Tensor) -> Path:
    """A draft of 40 tokens in SpecForge's layout, with `changes` of config.json and further `tensors`."""
    given = under("", make(), "midlayer.") | {"t2d": t2d(make())} | tensors
    config = SHAPE | dict(architectures=["LlamaForCausalLMEagle3"], draft_vocab_size=40) | changes
    return written(directory, config, given)


ZEROS = torch.zeros(40, dtype=torch.int64)
FIRST = torch.arange(V) < 40  # a t2d that marks the first 40 tokens


@pytest.mark.parametrize(
    ("tensors", "reason"),
    [
        (dict(d2t=ZEROS), "its d2t is all zeros, which takes draft ids for target ids"),
        (dict(d2t=ZEROS, t2d=torch.ones(7) > 0), "its d2t is all zeros, which takes draft ids for target ids"),
        (dict(t2d=torch.ones(V) > 0), "t2d and d2t contradict each other: t2d marks other tokens as the draft's"),
        (dict(t2d=FIRST), "t2d and d2t contradict each other: t2d marks other tokens as the draft's"),
    ],
)
def test_a_wrong_vocabulary_map_is_not_passed(tmp_path, fledge, tensors, reason):
    draft = foreign(tmp_path / "d", {}, **tensors)
    seen = fledge("inspect", draft)
    assert seen.code == 1 and f"Wrong: {reason}" in seen.out.replace(f"{draft / 'model.safetensors'}: ", ""), seen.out
    made = fledge("export", "--draft", draft, "--to", "vllm", "--out", tmp_path / "out")
    assert made.code == 2 and reason in made.err and not (tmp_path / "out").exists(), made.err
    if "all zeros" in reason:  # whatever reads the draft would take its tokens for others
        refused(draft, reason)


def test_a_map_of_zeros_that_t2d_confirms_is_right(tmp_path, fledge):
    draft = foreign(tmp_path / "d", {}, d2t=ZEROS, t2d=FIRST)
    assert fledge("inspect", draft).code == 0
    assert fledge("export", "--draft", draft, "--to", "vllm").code == 0
    assert not vocabulary_findings(read_files(draft)[0], None)
    assert load_draft(draft).target_ids().tolist() == list(range(40))


FC_NORM = {f"fc_norm.{i}.weight": torch.ones(D) for i in range(3)}


def test_norm_output_of_specforge_is_named_and_without_it_the_draft_is_that_of_training(tmp_path, fledge):
    """SpecForge normed what the head reads, and fed the state before the norm back."""
    ours = saved(tmp_path / "ours", fc_norm=True, norm_output=True)
    theirs = foreign(tmp_path / "theirs", dict(fc_norm=True, norm_output=True), **FC_NORM)
    words = "Note: norm_output is true. With this field, SpecForge before its pull request 879"
    for command in (["inspect", theirs], ["export", "--draft", theirs, "--to", "vllm"]):
        said = fledge(*command)
        assert said.code == 0 and words in said.out and "remove norm_output from config.json" in said.out
    assert words not in fledge("inspect", tmp_path / "ours").out
    for name, prefix in (("vllm", ""), ("automodel", "model.")):  # of these, no file is SpecForge's
        tensors = under(prefix, ours)
        other = written(tmp_path / name, json.loads((theirs / "config.json").read_text()), tensors)
        assert words not in fledge("inspect", other).out
    reconfigure(theirs, norm_output=None)
    assert words not in fledge("inspect", theirs).out
    draft, state = load_draft(theirs), torch.randn(5, D)
    fed_back, read_by_head = draft.split_output(state)
    assert fed_back is state and torch.equal(read_by_head, draft.norm(state))


@pytest.mark.parametrize("residual", [False, True])
def test_specforges_p_eagle(tmp_path, residual):
    """Numbered layers, trained embeddings, a map of zeros, and the class name PEagleDraftModel."""
    draft = make(V, method="peagle", mask_token_id=V - 1, num_hidden_layers=3, own_embeddings=True,
                 norm_before_residual=residual)  # fmt: skip
    tensors = under("", draft) | dict(d2t=torch.zeros(V, dtype=torch.int64), t2d=torch.ones(V) > 0)
    config = SHAPE | dict(
        architectures=["PEagleDraftModel"], num_hidden_layers=3, draft_vocab_size=V, mask_token_id=V - 1,
        norm_before_residual=residual,
    )  # fmt: skip
    directory = written(tmp_path / "d", config, tensors)
    assert_read(directory, draft, "peagle")
    reconfigure(directory, mask_token_id=None)
    with pytest.raises(ValueError, match=r"without mask_token_id; SpecForge writes it to peagle_config\.json"):
        load_draft(directory)


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_automodels_eagle_3(tmp_path, family):
    """The config has the target's number of layers and model type, but the file has one layer; all names, also the
    embedding's, start with `model.`."""
    draft = make(own_embeddings=True)
    tensors = under("model.", draft) | {"t2d": t2d(draft)}
    target = tiny_target(family, tokenizer=False, vocab_size=V, num_hidden_layers=36).config.to_dict()
    config = target | dict(
        architectures=["LlamaEagle3DraftModel"], draft_vocab_size=40, target_hidden_size=D, rms_norm_eps=1e-5,
        tie_word_embeddings=False, attn_implementation="eager", fc_norm=False, norm_output=False,
        parallel_drafting=False,
    )  # fmt: skip
    directory = written(tmp_path / "d", config, tensors)
    assert read_draft_config(directory).num_hidden_layers == 36
    assert load_draft(directory).config.num_hidden_layers == 1
    assert_read(directory, draft)


def test_automodels_eagle_3_1_and_p_eagle(tmp_path):
    draft = make(own_embeddings=True, fc_norm=True, norm_output=True)
    config = SHAPE | dict(
        architectures=["LlamaEagle3DraftModel"], draft_vocab_size=40, target_hidden_size=D, num_hidden_layers=36,
        fc_norm=True, norm_output=True, parallel_drafting=False,
    )  # fmt: skip
    assert_read(written(tmp_path / "d", config, under("model.", draft) | {"t2d": t2d(draft)}), draft)
    draft = make(V, own_embeddings=True, method="peagle", mask_token_id=7, num_hidden_layers=2)
    config |= dict(draft_vocab_size=V, num_hidden_layers=2, fc_norm=False, norm_output=False, parallel_drafting=True)
    config |= dict(mask_token_id=7, num_depths=8, down_sample_ratio=0.8)
    assert_read(written(tmp_path / "p", config, under("model.", draft)), draft, "peagle")


def test_automodels_eagle_1_with_its_extra_norm_is_refused(tmp_path):
    draft = make(V, method="eagle1", num_aux_hidden_states=0)
    tensors = under("model.", draft) | {
        "model.norm.weight": torch.ones(D),
        "model.embed_tokens.weight": torch.ones(V, D),
    }
    config = SHAPE | dict(architectures=["LlamaEagleDraftModel"])
    with pytest.raises(ValueError, match=r"norm\.weight is not part of such a draft"):
        load_draft(written(tmp_path / "d", config, tensors))


def test_speculators_tensors_in_the_flat_layout(tmp_path):
    """Tensors converted for vLLM: numbered layers, norm_before_residual, and layer ids at the config's top level."""
    draft = make(norm_before_residual=True, own_embeddings=True, aux_layers=(1, 4, 6))
    config = SHAPE | dict(
        architectures=["LlamaForCausalLMEagle3"], draft_vocab_size=40, norm_before_residual=True,
        eagle_aux_hidden_state_layer_ids=[1, 4, 6], target_hidden_size=D,
    )  # fmt: skip
    directory = written(tmp_path / "d", config, under("", draft) | {"t2d": t2d(draft)})
    assert_read(directory, draft)
    assert load_draft(directory).config.aux_layers == (1, 4, 6)


def test_the_authors_eagle_3_in_safetensors(tmp_path):
    draft = make()
    config = SHAPE | dict(architectures=["LlamaForCausalLM"], draft_vocab_size=40)
    assert_read(written(tmp_path / "d", config, under("", draft, "midlayer.") | {"t2d": t2d(draft)}), draft)


# -- files written for other engines ----------------------------------------------------------------------------------


def test_norm_fields_that_are_false_are_not_written(tmp_path):
    """SpecForge skips its final norm if norm_output is present and false."""
    for directory, on in (("plain", {}), ("3.1", dict(fc_norm=True, norm_output=True))):
        saved(tmp_path / directory, **on)
        hf = json.loads((tmp_path / directory / "config.json").read_text())
        assert [hf.get(key) for key in ("fc_norm", "norm_output")] == ([True, True] if on else [None, None])


@pytest.mark.parametrize(
    "given",
    [
        {}, dict(beta_fast=16.0), dict(mscale=0.7), dict(mscale=1.0, mscale_all_dim=0.8), dict(truncate=False),
        dict(attention_factor=0.9),
    ],
    ids=str,
)  # fmt: skip
def test_every_field_of_yarn_is_written(given):
    """SpecForge has no defaults for a field without a value, and computes another scale if only one mscale is given;
    the written values are the defaults of transformers and vLLM."""
    rope = RopeConfig.from_hf(
        dict(
            rope_theta=1e4,
            rope_scaling=dict(rope_type="yarn", factor=4.0, original_max_position_embeddings=64, **given),
        )
    )
    config = DraftConfig(
        hidden_size=D, intermediate_size=INNER, num_attention_heads=HEADS, num_key_value_heads=KV, head_dim=HEAD,
        vocab_size=V, draft_vocab_size=V, target_hidden_size=D, rope=rope,
    )  # fmt: skip
    hf = config_to_hf(config)
    fields = {
        "factor",
        "original_max_position_embeddings",
        "beta_fast",
        "beta_slow",
        "mscale",
        "mscale_all_dim",
        "truncate",
    }
    for written_in in ("rope_scaling", "rope_parameters"):
        found = hf[written_in]
        assert all(found[key] is not None for key in fields)
        scales = [0.1 * found[key] * math.log(found["factor"]) + 1.0 for key in ("mscale", "mscale_all_dim")]
        theirs = scales[0] / scales[1]  # SpecForge's factor on cos and sin
        ours = theirs if "mscale_all_dim" in given else 0.1 * math.log(4.0) + 1.0
        assert theirs == pytest.approx(ours)
    assert config_from_hf(hf).rope == rope


@pytest.mark.parametrize(
    ("changes", "remark"),
    [
        (dict(draft_vocab_size=V), "SpecForge leaves t2d and d2t uninitialized"),
        (dict(method="peagle", mask_token_id=3), "SpecForge loads this file as a one-layer EAGLE-3 draft"),
    ],
)
def test_inspect_says_what_specforge_would_misread(tmp_path, changes, remark):
    saved(tmp_path / "plain")
    assert not any("SpecForge" in line for line in trainer_notes(read_draft_config(tmp_path / "plain")))
    W = changes.pop("draft_vocab_size", 40)
    saved(tmp_path / "d", W, **changes)
    lines: list[str] = []
    assert run(InspectOptions(directory=str(tmp_path / "d")), lines.append)
    assert any(line.startswith("Note: ") and remark in line for line in lines)
