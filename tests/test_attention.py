"""Attention of few queries to keys that several heads share, against its definition and against transformers."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from fledge.decode.load import load
from fledge.drafts.kv_cache import TreeRows
from fledge.ops.attention_prompt import additive_mask, grouped_attention, heads_as_rows, prepare_mask
from fledge.targets.interface import Cache, DecodingTarget
from fledge.targets.transformers import MAX_QUERIES, attend
from fledge.types import Prompt, Tree
from support.mutations import replace_function
from support.targets import tiny_draft, tiny_target

GROUPED = SimpleNamespace(num_key_value_groups=2, is_causal=True)


def case(requests: int, queries: int, keys: int, heads: int, key_heads: int) -> tuple[torch.Tensor, ...]:
    """q, k and v in float64, and a random mask in which each query attends to at least the first key."""
    generator = torch.Generator().manual_seed(queries * 100 + keys)
    q, k, v = (
        torch.randn(requests, h, n, 8, generator=generator, dtype=torch.float64)
        for h, n in ((heads, queries), (key_heads, keys), (key_heads, keys))
    )
    mask = torch.rand(requests, 1, queries, keys, generator=generator) < 0.6
    mask[..., 0] = True
    return q, k, v, mask


def prefilled(target: DecodingTarget, prompt: list[int]) -> Cache:
    """A cache that holds a prompt."""
    cache = target.new_cache([len(prompt) + 8])
    target.prefill([Prompt(prompt)], cache)
    return cache


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
def test_kernels_match_the_definition(attend, sizes: tuple[int, ...]) -> None:
    q, k, v, mask = case(*sizes)
    times = 1 if attend is grouped_attention else q.shape[1] // k.shape[1]
    for scale in (8**-0.5, 0.7):
        expected = by_definition(q, k, v, mask, scale)
        added = torch.zeros(mask.shape, dtype=q.dtype).masked_fill(~mask, -torch.inf)
        for given in (mask, added):
            assert torch.allclose(attend(q, k, v, additive_mask(given, times, q.dtype), scale), expected)
    everything = by_definition(q, k, v, torch.ones_like(mask), 8**-0.5)
    assert torch.allclose(attend(q, k, v, None), everything)


def test_a_mask_is_prepared_once_per_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each pass of the target prepares its mask once for all layers, for a chain and for a tree. The draft makes one
    for the layers that compute all rows, and one for the last."""
    target, prepared, made = tiny_target(), [], []
    tree = Tree(torch.tensor([[4, 5, 6]]), torch.tensor([[-1, 0, 0]]), 1)
    draft = tiny_draft(target, num_hidden_layers=2)
    caches = [prefilled(target, [1, 2, 3]) for _ in range(2)]

    def counted(*of):
        prepared.append(of[1:])
        return prepare_mask(*of)

    monkeypatch.setattr("fledge.targets.transformers.prepare_mask", counted)
    for given, cache in zip((Tree.chain(tree.token_BN), tree), caches, strict=True):
        target.verify(given, cache)
        assert prepared == [(2, torch.float32)]
        prepared.clear()
    replace_function(
        monkeypatch, TreeRows, "__init__", lambda begin, *of, **more: made.append(of) or begin(*of, **more)
    )
    load(target, draft, depth=1).generate([1, 2, 3], max_new_tokens=2)
    assert len(made) == 2


def test_a_mask_made_for_other_layers_is_prepared_again() -> None:
    """A prepared mask is prepared again for layers with another number of heads per key, and for attention that is left
    to transformers."""
    q, k, v, mask = case(1, 3, 9, 4, 2)
    expected = by_definition(q, k, v, mask, 8**-0.5)
    for times in (1, 2, 4):
        given = additive_mask(mask, times, q.dtype)
        assert torch.allclose(attend(GROUPED, q, k, v, given)[0], expected)
        assert torch.allclose(attend(GROUPED, q, k, v, given, softcap=None, cache=0)[0], expected)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("sizes", [(1, 6, 37, 8, 2), (3, 32, 301, 8, 4), (2, 1, 64, 4, 4)])
def test_kernels_match_the_definition_on_a_gpu(sizes: tuple[int, ...], dtype: torch.dtype) -> None:
    q, k, v, mask = (x.cuda() for x in case(*sizes))
    expected = by_definition(q, k, v, mask, 0.4)
    ready = prepare_mask(mask, q.shape[1] // k.shape[1], dtype)
    found = grouped_attention(*(x.to(dtype) for x in (q, k, v)), ready, 0.4)
    assert (found.double() - expected).norm() <= (2e-2 if dtype == torch.bfloat16 else 1e-3) * expected.norm()


@pytest.fixture
def transformers_result(monkeypatch: pytest.MonkeyPatch) -> str:
    """Replaces transformers' attention by a function that returns this string."""
    monkeypatch.setattr("fledge.targets.transformers.sdpa_attention_forward", lambda *of, **more: "transformers_result")
    return "transformers_result"


@pytest.mark.parametrize("queries", [1, 5, MAX_QUERIES + 1])
def test_attention_is_what_transformers_computes(queries: int) -> None:
    """The output equals transformers' for few and many queries, with and without a mask."""
    q, k, v, mask = case(2, queries, queries + 20, 6, 2)
    module = SimpleNamespace(num_key_value_groups=3, is_causal=True)
    for given in (mask, None) if queries > 1 else (mask,):
        if given is None:
            k, v = k[:, :, :queries], v[:, :, :queries]
        ours, _ = attend(module, q, k, v, given, 0.0, 0.4, is_causal=None)
        theirs, _ = sdpa_attention_forward(module, q, k, v, given, 0.0, 0.4, is_causal=None)
        assert ours.shape == theirs.shape and torch.allclose(ours, theirs)


@pytest.mark.parametrize("unknown", [dict(softcap=30.0), dict(position_bias=0), dict(cache=0), dict(dropout=0.1)])
def test_unknown_options_are_left_to_transformers(unknown: dict, transformers_result: str) -> None:
    q, k, v, mask = case(1, 3, 9, 4, 2)
    assert attend(GROUPED, q, k, v, mask) != transformers_result
    assert attend(GROUPED, q, k, v, mask, **unknown) == transformers_result


def test_other_masks_are_left_to_transformers(transformers_result: str) -> None:
    """Attention goes to transformers for masks of other shapes (fewer keys, one row for all queries, one mask per head,
    fewer dimensions), and if no heads share a key."""
    q, k, v, mask = case(1, 3, 9, 4, 2)
    for other in (mask[..., :5], mask[:, :, :1], mask.expand(1, 4, 3, 9), mask[0], mask[0, 0]):
        assert attend(GROUPED, q, k, v, other) == transformers_result
    assert attend(GROUPED, q, *(x.repeat_interleave(2, 1) for x in (k, v)), mask) == transformers_result, (
        "no heads share a key"
    )


def test_a_target_verifies_with_grouped_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    """Verification calls grouped_attention once per layer, unless the model's attention implementation is not sdpa."""
    seen = []

    def counted(*of):
        seen.append(of)
        return grouped_attention(*of)

    monkeypatch.setattr("fledge.targets.transformers.grouped_attention", counted)
    for implementation in (None, "eager"):
        target = tiny_target(attn_implementation=implementation)
        cache = prefilled(target, [1, 2, 3])
        seen.clear()  # the first prefill also makes calls to check the model
        target.verify(Tree.chain(torch.tensor([[4, 5]])), cache)
        assert len(seen) == (0 if implementation else target.num_layers)


def test_a_model_that_needs_sdpa_by_name_keeps_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """A model keeps sdpa if its code compares the implementation's name, or if its implementation cannot be set."""
    monkeypatch.setattr("inspect.getsource", lambda module: 'if config._attn_implementation == "sdpa":')
    assert tiny_target().config._attn_implementation == "sdpa"
    monkeypatch.undo()
    monkeypatch.setattr("transformers.PreTrainedModel._can_set_attn_implementation", lambda *_: False)
    assert tiny_target().config._attn_implementation == "sdpa"


@pytest.mark.parametrize("family", ["llama", "mistral"])
def test_a_gpus_masks_verify_chains_and_trees(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU, masks repeat each row for every head that shares a key. With such masks, here on the CPU, a target
    gives the same logits and an engine the same answers."""
    target = tiny_target(family, dtype=torch.float64)
    ours = load(target, tiny_draft(target), mode="tree", nodes=9, width=3)
    tree, prompts = Tree(torch.tensor([[4, 5, 6]]), torch.tensor([[-1, 0, 0]]), 1), [[1, 2, 3], [7, 8, 9, 10, 11]]
    expected = []
    for given in (Tree.chain(tree.token_BN), tree):
        expected.append(target.verify(given, prefilled(target, prompts[0]))[0])
    answers = [c.tokens for c in ours.generate_all(prompts, batch=2, max_new_tokens=12)]
    rows = []

    def as_rows(*of):
        rows.append(of[3] is None or of[3].shape[2] == 2 * of[0].shape[2])
        return heads_as_rows(*of)

    for module in ("ops.attention_prompt", "targets.transformers"):
        monkeypatch.setattr(f"fledge.{module}.mask_repeats", lambda device, heads: heads)
    monkeypatch.setattr("fledge.targets.transformers.grouped_attention", as_rows)
    for given, logits in zip((Tree.chain(tree.token_BN), tree), expected, strict=True):
        found, _ = target.verify(given, prefilled(target, prompts[0]))
        torch.testing.assert_close(found, logits)
    assert [c.tokens for c in ours.generate_all(prompts, batch=2, max_new_tokens=12)] == answers
    assert rows and all(rows)
