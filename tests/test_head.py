"""A target of which only the embedding, the head and the last layer are loaded has the whole target's properties."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from transformers import (
    NemotronHConfig,
    NemotronHForCausalLM,
    PreTrainedModel,
    Qwen3_5Config,
    Qwen3_5ForConditionalGeneration,
)

from fledge.targets.distributed import load_head
from fledge.targets.loading import load_target
from fledge.train.setup.target import target_fingerprint
from support.targets import FAMILIES, tiny_target, tiny_target_directory

PROPERTIES = (
    "name",
    "num_layers",
    "max_length",
    "context",
    "stop_ids",
    "rotary",
    "plain_head",
    "dtype",
    "device",
)


def assert_same(head, whole) -> None:
    for name in PROPERTIES:
        assert getattr(head, name) == getattr(whole, name), name
    ours, theirs = ({**x.shape, "_name_or_path": ""} for x in (head, whole))
    assert ours == theirs
    states = torch.randn(5, whole.embedding.shape[1], dtype=whole.dtype)
    torch.testing.assert_close(head.logits(states), whole.logits(states), rtol=1e-5, atol=1e-5)
    assert torch.equal(head.embedding, whole.embedding) and torch.equal(head.head_weight, whole.head_weight)
    ours, theirs = head.last_layer_weights(), whole.last_layer_weights()
    assert ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)
    assert target_fingerprint(head) == target_fingerprint(whole)
    assert all(x.is_meta for x in head.layers[0].parameters())


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("tied", [False, True])
def test_properties(family: str, tied: bool, tmp_path: Path) -> None:
    path = tiny_target_directory(tmp_path, family=family, tie_word_embeddings=tied, num_hidden_layers=3)
    assert_same(load_head(path), load_target(path))


def test_a_checkpoint_of_several_files(tmp_path: Path) -> None:
    target = tiny_target(num_hidden_layers=4)
    target.model.save_pretrained(tmp_path, max_shard_size="30KB")
    target.tokenizer.save_pretrained(tmp_path)
    whole = load_target(tmp_path)
    files = json.loads((tmp_path / "model.safetensors.index.json").read_text())["weight_map"]
    others = set(files.values()) - {file for key, file in files.items() if not re.search(r"layers\.[012]\.", key)}
    assert others
    for file in others:  # files of other layers are not read
        (tmp_path / file).write_bytes(b"")
    assert_same(load_head(tmp_path), whole)


def qwen3_5() -> PreTrainedModel:
    """A model with pictures, of which fledge takes the text model."""
    text = dict(
        vocab_size=512, hidden_size=32, intermediate_size=64, num_hidden_layers=4, num_attention_heads=2,
        num_key_value_heads=1, head_dim=16, linear_key_head_dim=16, linear_value_head_dim=16, linear_num_key_heads=1,
        linear_num_value_heads=2,
    )  # fmt: skip
    vision = dict(
        depth=1, hidden_size=16, intermediate_size=16, num_heads=1, out_hidden_size=32, num_position_embeddings=4
    )
    return Qwen3_5ForConditionalGeneration(Qwen3_5Config(text_config=text, vision_config=vision))


def nemotron_h() -> PreTrainedModel:
    """Its files have the prefix of the model's first version."""
    return NemotronHForCausalLM(
        NemotronHConfig(
            vocab_size=512, hidden_size=32, hybrid_override_pattern="M-*-", intermediate_size=64, head_dim=16,
            num_attention_heads=2, num_key_value_heads=1, mamba_num_heads=2, mamba_head_dim=16, n_groups=1,
            ssm_state_size=16,
        )
    )  # fmt: skip


@pytest.mark.parametrize(("make", "prefix"), [(qwen3_5, "model.language_model."), (nemotron_h, "backbone.")])
def test_files_with_other_names_than_the_model(make: Callable, prefix: str, tmp_path: Path) -> None:
    make().save_pretrained(tmp_path)
    tiny_target().tokenizer.save_pretrained(tmp_path)
    with safe_open(tmp_path / "model.safetensors", "pt") as file:
        assert any(key.startswith(prefix) for key in file.keys())  # noqa: SIM118
    assert_same(load_head(tmp_path), load_target(tmp_path))


def test_the_dtype_of_the_checkpoint_does_not_change_the_fingerprint(tmp_path: Path) -> None:
    path = tiny_target_directory(tmp_path)
    wide, narrow = load_head(path), load_head(path, dtype=torch.bfloat16)
    assert narrow.dtype == torch.bfloat16 and target_fingerprint(wide) == target_fingerprint(narrow)
    other = tiny_target_directory(tmp_path / "other", seed=3)
    assert target_fingerprint(load_head(other)) != target_fingerprint(wide)


def test_files_without_these_tensors_are_loaded_as_a_whole(tmp_path: Path) -> None:
    path = tiny_target_directory(tmp_path)
    file = path / "model.safetensors"
    file.rename(path / "other.safetensors")
    assert load_head(path) is None


def test_errors_are_those_of_the_whole_target(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="holds no config"):
        load_head(tmp_path)
    path = tiny_target_directory(tmp_path)
    (path / "model.safetensors").write_bytes(b"damaged")
    with pytest.raises(ValueError, match=r"cannot be loaded: .*copy or download it again"):
        load_head(path)
