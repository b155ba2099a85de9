"""Top-k and top-p by the kernels, against transformers and against sums in float64."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers import TopKLogitsWarper, TopPLogitsWarper

from fledge.ops.device import computed_by
from fledge.ops.sampling import MOST_TOKENS, filter_top
from support.devices import needs_triton

needs_triton()

from fledge.ops import top_filter_triton  # noqa: E402  (needs_triton skips before it)

pytestmark = pytest.mark.usefixtures("uninitialized_memory_is_nan")
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
ROUNDING = 1e-6  # of sums of probabilities


def filtered(scores_BNV: Tensor, top_k: list[int], top_p: list[float], impl: str | None = "triton") -> Tensor:
    k, p = torch.tensor(top_k, device=DEVICE), torch.tensor(top_p, dtype=torch.float64, device=DEVICE)
    with nullcontext() if impl is None else computed_by(impl):
        return filter_top(scores_BNV.to(DEVICE), k, p).cpu()


def check(scores_V: Tensor, k: int, p: float, found_V: Tensor) -> None:
    """The kept scores are unchanged, and are those of the definition, with sums in float64; where a sum is 1 - p up to
    rounding, either choice is right."""
    kept = found_V > -torch.inf
    assert torch.equal(found_V[kept], scores_V[kept]) and not found_V.isnan().any()
    among = scores_V >= (scores_V.topk(min(k, scores_V.numel())).values[-1] if k else -torch.inf)
    among &= scores_V > -torch.inf
    assert not (kept & ~among).any()
    order = scores_V.masked_fill(~among, -torch.inf).sort(stable=True).indices
    sums = scores_V.double().masked_fill(~among, -torch.inf).softmax(-1)[order].cumsum(-1)
    gone, close = sums <= 1 - p, (sums - (1 - p)).abs() < ROUNDING
    gone, close = gone & (p < 1), close & (p < 1)
    gone[-1] = close[-1] = False
    expected = among[order] & ~gone
    assert torch.equal(kept[order][~close], expected[~close])
    assert (kept[order].int().diff() >= 0).all()  # no token is left out before a less likely one


@settings(max_examples=25, deadline=None)
@given(
    st.lists(st.sampled_from([0.0, -0.0, 1.0, -1.0, 0.5, 7.0, -30.0, 88.0, 3e38, -3e38, -torch.inf]),
             min_size=1, max_size=24),
    st.integers(0, 26), st.sampled_from([1.0, 0.999, 0.9, 0.75, 0.5, 0.1, 1e-3, 1e-9]),
)  # fmt: skip
def test_ties(scores: list[float], k: int, p: float) -> None:
    row = torch.tensor(scores)
    if (row > -torch.inf).any():
        check(row, k, p, filtered(row[None, None], [k], [p])[0, 0])


@pytest.mark.parametrize("kind", ["flat", "peaked", "rounded"])
def test_rows_of_several_chunks(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests whose options differ, each with two rows, and few and more gathered ids than are searched at a time.
    One place is in the last level, and one sum that of nearly all weights."""
    for name, size in dict(CHUNK=128, FEW=32, GATHERED=128).items():
        monkeypatch.setattr(top_filter_triton, name, size)
    options = [(0, 1.0), (0, 0.9), (5, 1.0), (2000, 0.8), (0, 1 - 1e-7)]
    scores = torch.randn(len(options), 2, 300, generator=torch.Generator().manual_seed(0))
    scores *= {"flat": 0.01, "peaked": 12}.get(kind, 3)
    scores = scores.bfloat16().float() if kind == "rounded" else scores
    found = filtered(scores, *map(list, zip(*options, strict=True)))
    for b, (k, p) in enumerate(options):
        for n in range(2):
            check(scores[b, n], k, p, found[b, n])
    assert torch.equal(filtered(scores[1:2, :1], [0], [0.9])[0, 0], found[1, 0])  # in a batch as alone


def test_extremes(monkeypatch: pytest.MonkeyPatch) -> None:
    """One possible token, one score for all, the largest and the smallest numbers, and weights of 0."""
    monkeypatch.setattr(top_filter_triton, "CHUNK", 128)
    one = torch.full((300,), -torch.inf)
    one[199] = -5.0
    numbers = torch.tensor([3.4e38, -3.4e38, 1e-45, -1e-45, 0.0]).repeat(60)
    rows = [one, torch.full((300,), 2.5), numbers, numbers.clamp_max(0), torch.linspace(0, -60, 300)]
    for k, p in [(0, 0.9), (299, 0.5), (0, 1 - 1e-12), (250, 1 - 1e-12)]:
        found = filtered(torch.stack(rows)[None], [k], [p])[0]
        for row, kept in zip(rows, found, strict=True):
            check(row, k, p, kept)


def test_the_default(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernels on a GPU, if they have the dtype; sorting elsewhere."""
    calls = []
    monkeypatch.setattr(top_filter_triton, "filter_top_triton", lambda x, k, p: calls.append(x.dtype) or x)
    for dtype in (torch.float64, torch.float32):
        filtered(torch.zeros(1, 1, 5, dtype=dtype), [2], [0.5], None)
    assert calls == [torch.float32] * (DEVICE.type == "cuda")


@pytest.mark.parametrize(("k", "p"), [(7, 1.0), (0, 0.8), (30, 0.6)])
def test_as_transformers(k: int, p: float) -> None:
    """To the last bit, as no two of these scores are equal."""
    scores = 3 * torch.randn(4, 1, 300, generator=torch.Generator().manual_seed(1))
    expected = TopKLogitsWarper(k)(None, scores[:, 0]) if k else scores[:, 0]
    expected = TopPLogitsWarper(p)(None, expected) if p < 1 else expected
    assert torch.equal(filtered(scores, [k] * 4, [p] * 4)[:, 0], expected)
    assert torch.equal(filtered(scores, [k] * 4, [p] * 4, "definition")[:, 0], expected)


def test_other_inputs() -> None:
    """No rows, strided rows, a row without possible tokens, and float64."""
    assert filtered(torch.zeros(0, 3, 8), [], []).shape == (0, 3, 8)
    scores = torch.randn(2, 3, 8, generator=torch.Generator().manual_seed(2))
    strided = filtered(scores.permute(2, 0, 1).contiguous().permute(1, 2, 0), [3, 0], [0.9, 0.5])
    assert torch.equal(strided, filtered(scores, [3, 0], [0.9, 0.5]))
    assert (filtered(torch.full((1, 1, 5), -torch.inf), [2], [0.5]) == -torch.inf).all()
    exact = filtered(scores.double(), [3, 0], [0.9, 0.5], "definition")
    assert exact.dtype == torch.float64 and torch.equal(exact > -torch.inf, strided > -torch.inf)
    assert 2**40 * MOST_TOKENS < 2**63


@pytest.mark.gpu
@pytest.mark.parametrize("spread", [0.01, 1.0, 3.0, 10.0])
def test_a_vocabulary(spread: float) -> None:
    """Of 128,256 tokens; and a captured call gives the same for other scores and options."""
    options = [(0, 0.9), (40, 1.0), (50, 0.95), (0, 1.0), (1000, 0.5), (0, 0.999)]
    k, p = [o[0] for o in options], [o[1] for o in options]
    scores = (spread * torch.randn(len(options), 8, 128_256, generator=torch.Generator().manual_seed(0))).bfloat16()
    held, k_B = scores.float().to(DEVICE).flip(1), torch.tensor(k, device=DEVICE)
    p_B = torch.tensor(p, dtype=torch.float64, device=DEVICE)
    filter_top(held, k_B, p_B)  # compiles the kernels
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = filter_top(held, k_B, p_B)
    held.copy_(scores.float())
    graph.replay()
    for b, (top_k, top_p) in enumerate(options):
        for n in range(8):
            check(scores[b, n].float(), top_k, top_p, found[b, n].cpu())
