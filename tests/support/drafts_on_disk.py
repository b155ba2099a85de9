"""Drafts with random weights in directories, and changes to their files."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from fledge.config import DraftConfig
from fledge.drafts.draft import Draft
from fledge.drafts.registry import new_draft
from fledge.drafts.weights import load_draft, save_draft

V, D, INNER, HEADS, KV, HEAD = 120, 32, 48, 4, 2, 8


def config(W: int = 40, **overrides) -> DraftConfig:
    shape = dict(
        hidden_size=D, intermediate_size=INNER, num_attention_heads=HEADS, num_key_value_heads=KV, head_dim=HEAD,
        vocab_size=V, draft_vocab_size=W, target_hidden_size=D, max_position_embeddings=256, bos_token_id=2,
        eos_token_id=1, pad_token_id=0,
    )  # fmt: skip
    return DraftConfig(**{**shape, **overrides})


def make(W: int = 40, seed: int = 0, **overrides) -> Draft:
    """A draft with random weights and a random vocabulary of W of the target's tokens."""
    torch.manual_seed(seed)
    draft = new_draft(config(W, **overrides))
    for p in draft.parameters():
        torch.nn.init.normal_(p)
    draft.set_vocabulary(torch.randperm(V)[:W].sort().values)
    return draft


def saved(directory: Path, *args, **overrides) -> Draft:
    draft = make(*args, **overrides)
    save_draft(draft, directory, torch.float32)
    return draft


def rewrite(directory: Path, change) -> None:
    """Changes the weights file by `change`, a function that edits a dict of tensors in place."""
    tensors = load_file(directory / "model.safetensors")
    change(tensors)
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})


def same(a: Draft, b: Draft) -> bool:
    left, right = a.state_dict(), b.state_dict()
    return left.keys() == right.keys() and all(torch.equal(left[k], right[k]) for k in left)


def refused(directory: Path, match: str) -> str:
    """The message with which a draft is refused."""
    with pytest.raises(ValueError, match=match) as error:
        load_draft(directory)
    assert str(directory) in str(error.value), "the message must name the directory"
    return str(error.value)
