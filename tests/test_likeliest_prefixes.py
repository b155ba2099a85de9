"""Trees of drafts with one distribution a level: they hold exactly the likeliest prefixes, by definition and kernel."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from fledge.ops.device import computed_by
from fledge.ops.trees import Candidates, add_level, best_nodes, likeliest_prefixes, most_prefixes
from support.devices import by_both, needs_triton

needs_triton()

pytestmark = pytest.mark.usefixtures("uninitialized_memory_is_nan")
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
FIRST_ROOT = 1000
IMPLEMENTATIONS = pytest.mark.parametrize("impl", ["definition", "triton"])
Prefix = tuple[int, ...]


def best_tokens(logp_BKW: Tensor, nodes: int) -> tuple[Tensor, Tensor]:
    """The tokens of each level that `likeliest_prefixes` asks for, by a stable sort in which NaN is -inf."""
    order_BKW = torch.where(logp_BKW.isnan(), -torch.inf, logp_BKW).sort(dim=-1, descending=True, stable=True).indices
    token_BKw = order_BKW[..., : nodes - 1]
    return logp_BKW.gather(-1, token_BKw), token_BKw


def trees(logp_BKW: Tensor, nodes: int, impl: str) -> list[list[Prefix]]:
    """The prefixes of each request's tree in order, as draft ids. Checks the form of the trees."""
    B, _, W = logp_BKW.shape
    root_B, ids_W = torch.arange(B, device=DEVICE) + FIRST_ROOT, torch.arange(W, device=DEVICE) * 3 + 1
    given = (x.to(DEVICE) for x in best_tokens(logp_BKW, nodes))
    with computed_by(impl):
        made = likeliest_prefixes(*given, nodes, root_B, ids_W)
    assert all(x.dtype == torch.int64 and x.is_contiguous() for x in made)
    found = []
    for b, (tokens, parents) in enumerate(zip(*(x.tolist() for x in made), strict=True)):
        assert tokens[0] == FIRST_ROOT + b and parents[0] == -1
        paths: list[Prefix] = [()]
        for n, (token, parent) in enumerate(zip(tokens[1:], parents[1:], strict=True), start=1):
            assert 0 <= parent < n
            paths.append((*paths[parent], (token - 1) // 3))
        assert len(set(paths)) == len(paths)
        found.append(paths[1:])
    return found


def score(logp_KW: list[list[float]], prefix: Prefix) -> float:
    total = 0.0
    for of_level, token in zip(logp_KW, prefix, strict=False):
        total += -math.inf if math.isnan(of_level[token]) else of_level[token]
    return total


def highest_scores(logp_KW: list[list[float]], count: int) -> list[float]:
    """The `count` highest scores of all prefixes, by scoring each."""
    K, W = len(logp_KW), len(logp_KW[0])
    prefixes = itertools.chain(*(itertools.product(range(W), repeat=k) for k in range(1, K + 1)))
    return sorted((score(logp_KW, p) for p in prefixes), reverse=True)[:count]


def distributions(B: int, K: int, W: int, kind: str, seed: int) -> Tensor:
    """Log-probabilities [B, K, W]: "random", "ties" of few different values, or "odd" ones with NaN and -inf."""
    generator = torch.Generator().manual_seed(seed)
    logp_BKW = (2 * torch.randn(B, K, W, generator=generator)).log_softmax(-1)
    if kind != "random":
        logp_BKW = logp_BKW.round()
    if kind == "odd":
        logp_BKW[torch.rand(B, K, W, generator=generator) < 0.4] = -torch.inf
        logp_BKW[torch.rand(B, K, generator=generator) < 0.2] = torch.nan
    return logp_BKW


@st.composite
def marginals(draw: st.DrawFn) -> Tensor:
    B, K, W = (draw(st.integers(1, most)) for most in (2, 4, 5))
    values = draw(
        st.sampled_from(
            [
                st.floats(-9, 0, width=32),
                st.sampled_from([0.0, -1.0, -2.0]),
                st.sampled_from([-0.0, -0.5, -1e-30, -math.inf]),
                st.sampled_from([-1.0, -2.5, -math.inf, math.nan]),
            ]
        )
    )
    return torch.tensor(draw(st.lists(values, min_size=B * K * W, max_size=B * K * W))).view(B, K, W)


@IMPLEMENTATIONS
@settings(max_examples=150, deadline=None)
@given(logp_BKW=marginals(), nodes=st.integers(2, 40))
def test_a_tree_holds_the_likeliest_prefixes(logp_BKW: Tensor, nodes: int, impl: str) -> None:
    """Those that scoring all prefixes finds, in descending order; all prefixes where these are fewer than nodes."""
    _, K, W = logp_BKW.shape
    count = most_prefixes(nodes, K, W) - 1
    assert count == min(nodes - 1, sum(W**k for k in range(1, K + 1)))
    for logp_KW, found in zip(logp_BKW.tolist(), trees(logp_BKW, nodes, impl), strict=True):
        assert [score(logp_KW, prefix) for prefix in found] == highest_scores(logp_KW, count)


@pytest.mark.parametrize("kind", ["random", "ties", "odd"])
@pytest.mark.parametrize(
    ("B", "K", "W", "nodes"),
    [
        (1, 1, 1, 2),
        (2, 3, 1, 9),
        (3, 5, 40, 60),
        (1, 16, 300, 128),
        (1, 64, 3, 130),
        (2, 2, 4, 200),
        (0, 3, 4, 9),
        pytest.param(8, 8, 32000, 60, marks=pytest.mark.gpu),
        pytest.param(3, 15, 1000, 256, marks=pytest.mark.gpu),
        pytest.param(1, 15, 2000, 1024, marks=pytest.mark.gpu),
    ],
)
def test_the_kernel(B: int, K: int, W: int, nodes: int, kind: str) -> None:
    given = [x.to(DEVICE) for x in best_tokens(distributions(B, K, W, kind, seed=nodes), nodes)]
    ids_W = torch.arange(W, device=DEVICE).flip(0)
    ours, exact = by_both(likeliest_prefixes, *given, nodes, torch.arange(B, device=DEVICE), ids_W)
    assert all(
        torch.equal(a, b) and a.shape == (B, most_prefixes(nodes, K, W)) for a, b in zip(ours, exact, strict=True)
    )


@IMPLEMENTATIONS
@pytest.mark.parametrize("kind", ["random", "ties", "odd"])
def test_a_smaller_tree_is_the_start_of_a_larger_one(kind: str, impl: str) -> None:
    """Also where prefixes are equally likely; and each request's tree is the tree that the request gets alone."""
    logp_BKW = distributions(3, 6, 30, kind, seed=1)
    whole = trees(logp_BKW, 50, impl)
    for nodes in (2, 3, 17, 49):
        assert trees(logp_BKW, nodes, impl) == [found[: nodes - 1] for found in whole]
    assert [trees(logp_BKW[b : b + 1], 50, impl)[0] for b in range(3)] == whole


@pytest.mark.parametrize("certain", [0.0, -0.1])
def test_a_draft_that_is_sure_makes_a_chain(certain: float) -> None:
    logp_BKW = torch.full((1, 5, 9), -50.0)
    logp_BKW[..., 4] = certain
    assert trees(logp_BKW, 6, "definition") == [[(4,) * k for k in range(1, 6)]]


def expected_length(logp_KW: list[list[float]], tree: list[Prefix]) -> float:
    """The tokens that a tree is accepted for on average, if the target's tokens have these distributions."""
    return sum(math.exp(score(logp_KW, prefix)) for prefix in tree)


def beam(logp_BKW: Tensor, nodes: int, w: int) -> list[list[Prefix]]:
    """The trees that expand the w best nodes of each level (`add_level`), with the same logits at all nodes."""
    B, K, W = logp_BKW.shape
    found, ids_W = Candidates.empty(B, K, w, torch.device("cpu")), torch.arange(W)
    best = logp_BKW.topk(w)
    for level in range(K):
        rows = w if level else 1
        add_level(found, level, *(x[:, level, None].expand(B, rows, w) for x in best), ids_W)
    token_BN, parent_BN, _ = best_nodes(found, nodes, ids_W[:B], ids_W)
    grown = []
    for tokens, parents in zip(token_BN.tolist(), parent_BN.tolist(), strict=True):
        paths: list[Prefix] = [()]
        for token, parent in zip(tokens[1:], parents[1:], strict=True):
            paths.append((*paths[parent], token))
        grown.append(paths[1:])
    return grown


@pytest.mark.parametrize("spread", [0.5, 2.0, 4.0])
def test_it_is_accepted_further_than_a_beam_by_levels(spread: float) -> None:
    """The expected accepted length is at least that of every beam, and larger than that of narrow beams."""
    generator = torch.Generator().manual_seed(3)
    logp_BKW = (spread * torch.randn(4, 7, 50, generator=generator)).log_softmax(-1)
    for nodes in (8, 32, 64):
        ours = trees(logp_BKW, nodes, "definition")
        for w in (1, 4, 10):
            for logp_KW, mine, other in zip(logp_BKW.tolist(), ours, beam(logp_BKW, nodes, w), strict=True):
                gain = expected_length(logp_KW, mine) - expected_length(logp_KW, other)
                assert gain > -1e-6 and (w > 1 or gain > 1e-3)
