"""A new draft is initialised from its target's last layer, as far as both compute the same function."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from fledge.drafts.draft import Draft
from fledge.targets.interface import Target
from support.targets import tiny_draft, tiny_target


def start_from(target: Target, draft: Draft) -> None:
    draft.initialize(target.last_layer_weights(), target.head_weight, target.embedding)


@pytest.mark.parametrize("family", ["llama", "qwen3", "phi3"])
def test_a_draft_starts_with_the_last_layers_weights(family):
    target = tiny_target(family)
    draft = tiny_draft(target, draft_vocab_size=100)
    start_from(target, draft)
    E, last, ours = 32, target.layers[-1], draft.midlayer
    torch.testing.assert_close(draft.lm_head.weight, target.head.weight[draft.target_ids()])
    torch.testing.assert_close(draft.norm.weight, target.norm.weight)
    torch.testing.assert_close(ours.mlp.down_proj.weight, last.mlp.down_proj.weight)
    x = torch.randn(3, E)
    if family == "phi3":
        q, k, v = last.self_attn.qkv_proj(x).split([32, 16, 16], dim=-1)
        gate, up = last.mlp.gate_up_proj(x).chunk(2, dim=-1)
    else:
        q, k, v = (getattr(last.self_attn, f"{n}_proj")(x) for n in "qkv")
        gate, up = last.mlp.gate_proj(x), last.mlp.up_proj(x)
    for projection, expected in zip("qkv", (q, k, v), strict=True):
        weight = getattr(ours.self_attn, f"{projection}_proj").weight
        found = x @ weight[:, E:].T
        mine = 16 if projection == "q" else 8  # skip the rows of the first key head, which are initialised differently
        torch.testing.assert_close(found[:, mine:], expected[:, mine:])
        assert 0.01 < weight[mine:, :E].std() < 0.03  # the columns that read the embedding are random
    torch.testing.assert_close(ours.mlp.gate_proj(x), gate)
    torch.testing.assert_close(ours.mlp.up_proj(x), up)
    assert (draft.fc.weight[:, -E:].diagonal() > 0.9).all()


def test_the_first_head_attends_to_its_own_token():
    """A query of the first key head's group matches the key of the same token, and the values of different tokens are
    linearly independent."""
    target = tiny_target(hidden_size=64, head_dim=32)
    draft = tiny_draft(target)
    start_from(target, draft)
    attention, heads = draft.midlayer.self_attn, draft.config.num_attention_heads // draft.config.num_key_value_heads
    tokens = torch.nn.functional.rms_norm(torch.randn(20, 64), (64,))
    made = []

    def attend(q, k, v):
        made.extend((q, k, v))
        return q

    x = torch.cat((tokens, torch.randn(20, 64)), -1)
    attention(x, torch.zeros(20, 64), draft.rotary(torch.zeros(20), torch.float32), attend)
    q, k, v = made
    scores = torch.einsum("qhd,kd->hqk", q[:, :heads], k[:, 0]) / 32**0.5
    assert (scores.argmax(-1) == torch.arange(20)).all()
    assert 3 < scores.diagonal(dim1=1, dim2=2).mean() < 5 and scores.mean().abs() < 1
    assert torch.linalg.matrix_rank(v[:, 0]) == 20


def test_a_norm_of_another_kind_is_not_copied(monkeypatch):
    """Gemma's norm multiplies by one plus its weight, so its weights would be wrong in the draft's norm."""

    class OnePlus(nn.Module):
        def __init__(self, norm: nn.Module):
            super().__init__()
            self.weight, self.norm = norm.weight, norm

        def forward(self, x):
            return self.norm(x) + x / x.pow(2).mean(-1, keepdim=True).sqrt()

    target = tiny_target()
    draft = tiny_draft(target)
    before = draft.norm.weight.clone()
    target.norm = OnePlus(target.norm)
    start_from(target, draft)
    assert torch.equal(draft.norm.weight, before)


def test_a_draft_of_another_width_starts_from_random_weights():
    target = tiny_target()
    draft = tiny_draft(target, hidden_size=16, own_embeddings=True, num_attention_heads=2, num_key_value_heads=1)
    start_from(target, draft)
    assert 0.015 < draft.lm_head.weight.std() < 0.025
