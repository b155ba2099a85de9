"""Attention of few queries to keys that heads share, against its definition and transformers' own."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from fledge.kernels import attention
from fledge.kernels.attention import grouped_attention, heads_as_rows
from fledge.models.attention import QUERIES, attend
from support.targets import tiny_target

GROUPED = SimpleNamespace(num_key_value_groups=2, is_causal=True)


def case(requests: int, queries: int, keys: int, heads: int, key_heads: int) -> tuple[torch.Tensor, ...]:
    """q, k, v in float64, and a mask of which each query sees a part."""
    generator = torch.Generator().manual_seed(queries * 100 + keys)
    q, k, v = (
        torch.randn(requests, h, n, 8, generator=generator, dtype=torch.float64)
        for h, n in ((heads, queries), (key_heads, keys), (key_heads, keys))
    )
    mask = torch.rand(requests, 1, queries, keys, generator=generator) < 0.6
    mask[..., 0] = True
    return q, k, v, mask


def by_definition(q, k, v, mask, scale: float) -> torch.Tensor:
    groups = q.shape[1] // k.shape[1]
    out = torch.empty_like(q).transpose(1, 2)
    for b in range(q.shape[0]):
        for h in range(q.shape[1]):
            scores = q[b, h] @ k[b, h // groups].T * scale
            out[b, :, h] = scores.masked_fill(~mask[b, 0], -torch.inf).softmax(-1) @ v[b, h // groups]
    return out


@pytest.mark.parametrize("attend", [grouped_attention, heads_as_rows])
@pytest.mark.parametrize("sizes", [(1, 1, 5, 4, 2), (2, 3, 7, 6, 2), (3, 4, 9, 4, 4), (1, 6, 6, 4, 1)])
def test_it_is_attention(attend, sizes: tuple[int, ...]) -> None:
    q, k, v, mask = case(*sizes)
    for scale in (8**-0.5, 0.7):  # one mask for both
        expected = by_definition(q, k, v, mask, scale)
        assert torch.allclose(attend(q, k, v, mask, scale), expected)
        added = torch.zeros(mask.shape, dtype=q.dtype).masked_fill(~mask, -torch.inf)
        assert torch.allclose(attend(q, k, v, added, scale), expected)
    everything = by_definition(q, k, v, torch.ones_like(mask), 8**-0.5)
    assert torch.allclose(attend(q, k, v, None), everything)


def test_a_mask_is_made_ready_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """For all layers; again for other heads or another dtype; and what was made goes with the mask."""
    made, before = [], len(attention._MADE)
    make = attention._to_be_added
    monkeypatch.setattr(attention, "_to_be_added", lambda *of: made.append(of[1:]) or make(*of))
    q, k, v, mask = case(1, 3, 9, 4, 2)
    for _ in range(2):
        heads_as_rows(q, k, v, mask)
    assert made == [(2, torch.float64)]
    expected = by_definition(q, k[:, :1], v[:, :1], mask, 8**-0.5)
    assert torch.allclose(heads_as_rows(q, k[:, :1], v[:, :1], mask), expected)
    heads_as_rows(q.float(), k.float(), v.float(), mask)
    assert made == [(2, torch.float64), (4, torch.float64), (2, torch.float32)]
    assert len(attention._MADE) == before + 1
    del mask, made[:]
    assert len(attention._MADE) == before


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("sizes", [(1, 6, 37, 8, 2), (3, 32, 301, 8, 4), (2, 1, 64, 4, 4)])
def test_it_is_attention_on_a_gpu(sizes: tuple[int, ...], dtype: torch.dtype) -> None:
    q, k, v, mask = (x.cuda() for x in case(*sizes))
    expected = by_definition(q, k, v, mask, 0.4)
    found = grouped_attention(*(x.to(dtype) for x in (q, k, v)), mask, 0.4)
    assert (found.double() - expected).norm() <= (2e-2 if dtype == torch.bfloat16 else 1e-3) * expected.norm()


@pytest.fixture
def theirs(monkeypatch: pytest.MonkeyPatch) -> str:
    """What transformers' own attention now says."""
    monkeypatch.setattr("fledge.models.attention.sdpa_attention_forward", lambda *of, **more: "theirs")
    return "theirs"


@pytest.mark.parametrize("queries", [1, 5, QUERIES + 1])
def test_it_is_what_transformers_computes(queries: int) -> None:
    """Few queries or many, with a mask or without."""
    q, k, v, mask = case(2, queries, queries + 20, 6, 2)
    module = SimpleNamespace(num_key_value_groups=3, is_causal=True)
    for given in (mask, None) if queries > 1 else (mask,):
        if given is None:
            k, v = k[:, :, :queries], v[:, :, :queries]
        ours, _ = attend(module, q, k, v, given, 0.0, 0.4, is_causal=None)
        theirs, _ = sdpa_attention_forward(module, q, k, v, given, 0.0, 0.4, is_causal=None)
        assert ours.shape == theirs.shape and torch.allclose(ours, theirs)


@pytest.mark.parametrize("unknown", [dict(softcap=30.0), dict(position_bias=0), dict(cache=0), dict(dropout=0.1)])
def test_what_it_does_not_know_is_left_to_transformers(unknown: dict, theirs: str) -> None:
    q, k, v, mask = case(1, 3, 9, 4, 2)
    assert attend(GROUPED, q, k, v, mask) != theirs
    assert attend(GROUPED, q, k, v, mask, **unknown) == theirs


def test_other_masks_are_left_to_transformers(theirs: str) -> None:
    """Of other keys, the same for every query, each head's own, or of other dimensions."""
    q, k, v, mask = case(1, 3, 9, 4, 2)
    for other in (mask[..., :5], mask[:, :, :1], mask.expand(1, 4, 3, 9), mask[0], mask[0, 0]):
        assert attend(GROUPED, q, k, v, other) == theirs
    assert attend(GROUPED, q, *(x.repeat_interleave(2, 1) for x in (k, v)), mask) == theirs, "no head shares a key"


def test_a_target_verifies_by_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Once a layer, unless its attention is another than torch's."""
    seen = []

    def counted(*of):
        seen.append(of)
        return grouped_attention(*of)

    monkeypatch.setattr("fledge.models.attention.grouped_attention", counted)
    for implementation in (None, "eager"):
        target = tiny_target(attn_implementation=implementation)
        _, _, cache = target.prefill([[1, 2, 3]], features=False)
        seen.clear()  # of what the first prefill tries out
        target.forward(torch.tensor([[4, 5]]), cache, features=False)
        assert len(seen) == (0 if implementation else target.num_layers)


def test_a_model_that_asks_for_sdpa_by_name_is_let_be(monkeypatch: pytest.MonkeyPatch) -> None:
    """Some compute otherwise where it is called something else; some do not let it be chosen."""
    monkeypatch.setattr("inspect.getsource", lambda module: 'if config._attn_implementation == "sdpa":')
    assert tiny_target().config._attn_implementation == "sdpa"
    monkeypatch.undo()
    monkeypatch.setattr("transformers.PreTrainedModel._can_set_attn_implementation", lambda *_: False)
    assert tiny_target().config._attn_implementation == "sdpa"
