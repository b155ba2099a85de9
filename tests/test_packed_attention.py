"""Sequences that attend together attend as each does by itself."""

from __future__ import annotations

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from fledge.decode.load import load
from fledge.drafts.kv_cache import PromptRows
from fledge.ops.attention_prompt import PackedAttention, _flash_supports, causal_attention, without_cudnn_sdpa
from fledge.types import Prompt
from support.decoding import assert_same, prompts
from support.targets import P_EAGLE, SLIDING, tiny_draft, tiny_target

CPU = torch.device("cpu")


@pytest.mark.parametrize("window", [None, 3, 20, 200])
@pytest.mark.parametrize(
    ("counts", "lengths", "groups"),
    [
        ([5], [0], []),
        ([1, 70, 64, 3, 0, 9], [0] * 6, [2, 3]),  # rows of at most SHORT tokens, and longer ones
        ([4, 70, 5, 100, 36], [0, 6, 2, 0, 0], [2]),  # two that continue, one alone, and two of similar lengths
        ([200, 90, 99, 101], [0] * 4, [2, 2]),
        ([70, 70, 40], [0] * 3, [3]),  # in order, with padding behind the last one only
        ([80, 80], [0] * 2, [2]),
        ([0, 0], [3, 0], []),
    ],
)
def test_groups(counts: list[int], lengths: list[int], groups: list[int], window: int | None) -> None:
    H, G, d = 4, 2, 8
    draw = torch.Generator().manual_seed(0)
    starts = [7 + 310 * b for b in range(len(counts))]  # gaps between the segments
    q_MHd = torch.randn(sum(counts), H, d, generator=draw, dtype=torch.float64)
    keys, values = torch.randn(2, G, starts[-1] + 310, d, generator=draw, dtype=torch.float64)
    attention = PackedAttention(counts, lengths, starts, CPU, grouped=True)
    sizes = sorted(group.row_BN.shape[0] for group in attention.groups)
    expected = []
    slots, positions = [], []
    for q, count, length, start in zip(q_MHd.split(counts), counts, lengths, starts, strict=True):
        own = slice(start, start + length + count)
        slots += range(start + length, start + length + count)
        positions += range(length, length + count)
        if count:
            expected.append(causal_attention(q, keys[:, own], values[:, own], 0.4, window))
    assert sizes == groups
    assert (attention.slot_M.tolist(), attention.position_M.tolist()) == (slots, positions)
    found = attention(q_MHd, keys, values, 0.4, window)
    torch.testing.assert_close(found, torch.cat(expected) if expected else q_MHd, rtol=0, atol=1e-12)
    assert not PackedAttention(counts, lengths, starts, CPU).groups, "a CPU would compute the padding"


@pytest.mark.parametrize("heads", [(4, 4), (6, 2)])
@pytest.mark.parametrize("at_once", [False, True])
def test_the_last_tokens_of_a_prompt(heads: tuple[int, int], at_once: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The next part of a long prompt sees all parts before it, with one call of torch's attention as on a GPU, and in
    parts with masks."""
    monkeypatch.setattr("fledge.ops.attention_prompt._flash_supports", lambda *_: at_once)
    monkeypatch.setattr("fledge.ops.attention_prompt.QUERIES", 7)
    (H, G), d, L = heads, 8, 50
    q, k, v = (torch.randn(n, L, d, dtype=torch.float64) for n in (H, G, G))
    whole = causal_attention(q.transpose(0, 1), k, v, 0.4, None)
    for S in (1, 13, L):
        found = causal_attention(q[:, -S:].transpose(0, 1), k, v, 0.4, None)
        torch.testing.assert_close(found, whole[-S:], rtol=0, atol=1e-12)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("window", [None, 300, 5000])
def test_the_last_tokens_of_a_prompt_on_a_gpu(dtype: torch.dtype, window: int | None) -> None:
    H, G, L, d = 8, 2, 2500, 128
    q, k, v = (torch.randn(n, L, d, dtype=dtype, device="cuda") for n in (H, G, G))
    whole = causal_attention(*(x.cpu().double() for x in (q.transpose(0, 1), k, v)), None, window)
    for S in (1, 700, 2499):
        found = causal_attention(q[:, -S:].transpose(0, 1), k, v, None, window)
        error = (found.cpu().double() - whole[-S:]).norm() / whole[-S:].norm()
        assert error < (1e-5 if dtype == torch.float32 else 1e-2)
    assert _flash_supports(q[None], k[None], v[None]) == (dtype != torch.float32)


WAYS = {
    "chain": dict(depth=3),
    "tree": dict(mode="tree", depth=3, nodes=12, width=3),
    "one pass": dict(depth=3),
    "no draft": {},
}


@pytest.mark.parametrize("kind", SLIDING)
@pytest.mark.parametrize("way", WAYS)
def test_prompts_in_one_pass(kind: str, way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Target and draft read prompts of mixed lengths together, in groups as on a GPU: logits and features are those of
    single prompts, and so are the answers, in all ways of drafting."""
    target = tiny_target(dtype=torch.float64, native=True, **SLIDING[kind])
    asked = [(p * 30)[:n] for p, n in zip(prompts(6, seed=3), (3, 90, 17, 70, 1, 40), strict=True)]
    draft = None if way == "no draft" else tiny_draft(target, **(P_EAGLE if way == "one pass" else {}))
    engine = load(target, draft, **WAYS[way])
    alone = [engine.generate(p, max_new_tokens=6) for p in asked]
    singles = []
    for prompt in asked:
        cache = target.new_cache([len(prompt)])
        logits, [features] = target.prefill([Prompt(prompt)], cache, (1, 4, 8))
        singles.append((logits[0], features, cache.pool.buffer[..., : len(prompt), :].clone()))
        cache.select([])
    made: list[int] = []

    class Grouped(PackedAttention):
        def __init__(self, *given: object) -> None:
            super().__init__(*given, grouped=True)
            made.append(len(self.groups))

    monkeypatch.setattr("fledge.drafts.kv_cache.PackedAttention", Grouped)
    cache = target.new_cache([len(p) for p in asked])
    logits_BV, features = target.prefill([Prompt(p) for p in asked], cache, (1, 4, 8))
    assert cache.lengths == cache.length_B.tolist() == [len(p) for p in asked]
    for i, (logits_V, of_one, kept) in enumerate(singles):
        first, length = cache.segments[i][0], len(asked[i])
        torch.testing.assert_close(logits_BV[i], logits_V, rtol=0, atol=1e-10)
        torch.testing.assert_close(features[i].aux_TAD, of_one.aux_TAD, rtol=0, atol=1e-10)
        torch.testing.assert_close(cache.pool.buffer[..., first : first + length, :], kept, rtol=0, atol=1e-10)
    cache.select([])
    together = engine.generate_all(asked, batch=4, max_new_tokens=6)
    for done, one in zip(together, alone, strict=True):
        assert_same(done, one)
        assert [r.accepted for r in done.trace.rounds] == [r.accepted for r in one.trace.rounds]
    assert max(made) > 0


def test_what_the_host_knows_of_lengths() -> None:
    """The lengths of a cache are known without asking the device while only prompts are added."""
    target = tiny_target(native=True)
    cache = target.new_cache([40, 40, 40])
    for parts in ([[5] * 4, [6], [7] * 9], [[5] * 3, [], [6]]):
        target.prefill([Prompt(p) for p in parts], cache)
    assert cache.known_lengths == cache.length_B.tolist() == [7, 1, 10]
    cache.select([2, 0])
    assert cache.known_lengths == cache.length_B.tolist() == [10, 7]
    cache.keep(None, torch.tensor([1, 2]))
    assert cache.known_lengths is None and cache.lengths == [11, 9]
    assert PromptRows(cache, [1, 1]).position_M.tolist() == [11, 9]
    other = target.new_cache([20])
    other.append(cache)
    assert other.lengths == [0, 11, 9]
    other.select([])
    assert target.pool.slots == 0


@pytest.mark.parametrize(
    "only",
    [
        [SDPBackend.FLASH_ATTENTION],
        [SDPBackend.MATH, SDPBackend.FLASH_ATTENTION],
        [SDPBackend.MATH, SDPBackend.CUDNN_ATTENTION],
    ],
)
def test_cudnn_is_excluded_whatever_is_set(only: list[SDPBackend]) -> None:
    """Within it, and in a second one within the first, all backends but cuDNN are on; after it, those that were."""

    def enabled() -> list[bool]:
        flags = torch.backends.cuda
        return [
            flags.flash_sdp_enabled(), flags.mem_efficient_sdp_enabled(), flags.math_sdp_enabled(),
            flags.cudnn_sdp_enabled(),
        ]  # fmt: skip

    device = torch.device("cuda")
    with sdpa_kernel(only):
        before = enabled()
        with without_cudnn_sdpa(device):
            assert enabled() == [True, True, True, False]
            with without_cudnn_sdpa(device):
                assert enabled() == [True, True, True, False]
            assert enabled() == [True, True, True, False]
        assert enabled() == before
