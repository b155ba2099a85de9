"""The growth of dynamic trees: the kernels against their definitions, bit by bit, and these against a search."""

from __future__ import annotations

import random
from dataclasses import fields

import pytest
import torch
from torch import Tensor

from fledge.ops.device import computed_by
from fledge.ops.trees import MOST_CANDIDATES, MOST_WIDTH, Candidates, add_level, best_nodes
from support.devices import by_both, needs_triton

needs_triton()

pytestmark = pytest.mark.usefixtures("uninitialized_memory_is_nan")
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
VOCABULARY = 50
SIZES = [  # requests, levels, width, nodes
    (1, 1, 1, 2),
    (2, 1, 5, 4),
    (1, 4, 1, 9),
    (3, 3, 4, 12),
    (2, 4, 3, 200),
    (1, 8, 10, 60),
    pytest.param(8, 8, 10, 60, marks=pytest.mark.gpu),
    pytest.param(2, 8, MOST_WIDTH, 256, marks=pytest.mark.gpu),
    pytest.param(1, 12, MOST_WIDTH + 1, 60, marks=pytest.mark.gpu),
]


def children(B: int, M: int, w: int, kind: str, seed: int) -> tuple[Tensor, Tensor]:
    """Log-probabilities in descending order and distinct draft ids; "ties" have few different ones, "nan" some NaN."""
    generator = torch.Generator().manual_seed(seed)
    logp = -torch.rand(B, M, w, generator=generator) * 3
    if kind != "random":
        logp = logp.round()
    if kind == "nan":
        logp[torch.rand(B, M, w, generator=generator) < 0.1] = torch.nan
        logp[torch.rand(B, M, w, generator=generator) < 0.1] = -torch.inf
    token = torch.rand(B, M, VOCABULARY, generator=generator).argsort(-1)[..., :w]
    return logp.sort(-1, descending=True).values.to(DEVICE), token.to(DEVICE)


def grow(B: int, levels: int, w: int, nodes: int, kind: str, impl: str, device: torch.device = DEVICE) -> list[Tensor]:
    """All that the functions make of a tree."""
    ids_W = torch.arange(VOCABULARY, device=device) * 3 + 1
    found, made = Candidates.empty(B, levels, w, device), []
    with computed_by(impl):
        for level in range(levels):
            logp, token = children(B, w if level else 1, w, kind, seed=level)
            front = add_level(found, level, logp.to(device), token.to(device), ids_W)
            assert (front is None) == (level + 1 == levels)
            made += front or ()
        root_B = torch.arange(B, device=device) + 1000
        made += best_nodes(found, nodes, root_B, ids_W)
    return [*made, *(x for x in (getattr(found, f.name) for f in fields(found)) if isinstance(x, Tensor))]


@pytest.mark.parametrize("kind", ["random", "ties", "nan"])
@pytest.mark.parametrize(("B", "levels", "w", "nodes"), SIZES)
def test_the_kernels(B: int, levels: int, w: int, nodes: int, kind: str) -> None:
    ours = grow(B, levels, w, nodes, kind, "triton")
    exact = grow(B, levels, w, nodes, kind, "definition", torch.device("cpu"))
    for a, b in zip(ours, exact, strict=True):
        assert a.is_contiguous()
        torch.testing.assert_close(a.cpu(), b, rtol=0, atol=0, equal_nan=True)


def test_one_nan_is_like_another(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever their bits, though a sort may order them by these, as those of GPUs do for long rows."""
    bits = torch.tensor([0x7FC00000, 0x7FFFFFFF, -1, 0x7F800001], dtype=torch.int32)
    score = torch.rand(2, 60, generator=torch.Generator().manual_seed(0))
    score[:, ::7], score[1, 3] = bits.view(torch.float32).repeat(3)[:9], torch.inf

    def by_bits(x: Tensor, **options) -> torch.return_types.sort:
        return torch.sort(x.view(torch.int32) if x.is_floating_point() else x, **options)

    found = Candidates.empty(2, 1, 60, torch.device("cpu"))
    found.score_BP.copy_(score)
    found.token_BP.copy_(torch.arange(60).expand(2, 60))
    for nodes in (5, 9, 20):
        made = []
        for sort in (Tensor.sort, by_bits):
            with monkeypatch.context() as patch:
                patch.setattr(Tensor, "sort", sort)
                made.append(best_nodes(found, nodes, torch.arange(2), torch.arange(60)))
        assert all(torch.equal(a, b) for a, b in zip(*made, strict=True))


@pytest.mark.parametrize("impl", ["definition", "triton"])
@pytest.mark.parametrize("kind", ["random", "ties"])
def test_a_search_finds_the_same(kind: str, impl: str) -> None:
    """Trees of Python lists: the order among equal scores, parents before children, who sees whom, and the slots."""
    for levels, w, nodes in ((1, 4, 3), (3, 3, 8), (5, 2, 100), (4, 5, 40), (18, 4, 30)):
        *fronts, token_BN, parent_BN, slot_BN, score_BP, _, place_BX, seen_BXJ = grow(2, levels, w, nodes, kind, impl)
        for b in range(2):
            scored: list[tuple[float, int, int]] = []  # score, draft id, place of the parent
            expanded, last = [], [-1]
            for level in range(levels):
                logp, token = (x[b].tolist() for x in children(2, w if level else 1, w, kind, seed=level))
                begin = len(scored)
                for f, place in enumerate(last):
                    above = torch.tensor(scored[place][0] if level else 0.0)
                    scored += [
                        (float(above + torch.tensor(p)), t, place) for p, t in zip(logp[f], token[f], strict=True)
                    ]
                if level + 1 < levels:
                    front = sorted(range(begin, len(scored)), key=lambda p: (-scored[p][0], p))[:w]
                    rows = [last.index(scored[p][2]) + b * len(last) for p in front]
                    assert fronts[2 * level][b].tolist() == [3 * scored[p][1] + 1 for p in front]
                    assert fronts[2 * level + 1][b].tolist() == rows
                    expanded += front
                    last = front
            assert score_BP[b].tolist() == [s for s, *_ in scored] and place_BX[b].tolist() == expanded
            for e, place in enumerate(expanded):
                path = set()
                while place >= 0:
                    path.add(expanded.index(place))
                    place = scored[place][2]
                words = sum(word % 2**64 << 64 * j for j, word in enumerate(seen_BXJ[b, e].tolist()))
                assert words == sum(1 << i for i in path)
            best = sorted(sorted(range(len(scored)), key=lambda p: (-scored[p][0], p))[: nodes - 1])
            assert token_BN[b].tolist() == [1000 + b, *(3 * scored[p][1] + 1 for p in best)]
            tree = [-1, *best]
            assert parent_BN[b].tolist() == [-1, *(tree.index(scored[p][2]) for p in best)]
            assert slot_BN[b].tolist() == [-1, *(expanded.index(p) if p in expanded else -1 for p in best)]


def test_many_candidates() -> None:
    """As many as one program holds, and more; wider trees than the kernels take; no requests."""
    for levels, w in ((9, MOST_WIDTH), (2, MOST_WIDTH + 1)):
        P = Candidates.empty(1, levels, w, DEVICE).score_BP.shape[1]
        assert P > MOST_CANDIDATES or w > MOST_WIDTH
        ours, exact = (grow(1, levels, w, 40, "ties", impl) for impl in ("triton", "definition"))
        assert all(torch.equal(a, b) for a, b in zip(ours, exact, strict=True))
    assert [x.shape[0] for x in grow(0, 3, 4, 9, "random", "triton")] == [0] * 11


@pytest.mark.parametrize("seed", range(5))
def test_the_best_of_any_scores(seed: int) -> None:
    """Scores of both signs, zeros of both signs, infinite ones, and all alike."""
    draw = random.Random(seed)
    for scores in ([0.0, -0.0, 1.0, -1.0, torch.inf, -torch.inf], [-2.5], [-torch.inf], [1e-40, -1e-40, 0.0]):
        found = Candidates.empty(2, 1, 37, DEVICE)
        found.score_BP.copy_(torch.tensor([[draw.choice(scores) for _ in range(37)] for _ in range(2)]))
        found.token_BP.copy_(torch.arange(37).expand(2, 37))
        ids_W = torch.arange(37, device=DEVICE)
        for nodes in (2, 7, 37, 38):
            ours, exact = by_both(best_nodes, found, nodes, ids_W[:2], ids_W)
            assert all(torch.equal(a, b) for a, b in zip(ours, exact, strict=True))
