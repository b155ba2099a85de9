"""The kernels of a verification against their definitions: where nodes go, what they see, and which are accepted."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from fledge.ops.attention_tree import VisibleChain
from fledge.ops.trees import MOST_NODES, accept_own, place_trees
from fledge.types import Tree, Verdict
from support.devices import by_both, needs_triton
from support.trees import tree_lists

needs_triton()

pytestmark = pytest.mark.usefixtures("uninitialized_memory_is_nan")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SIZES = [(1, 1), (1, 2), (3, 9), (1, 64), (2, 70)]  # requests and nodes


def trees(B: int, N: int, seed: int, chain: bool = False, slack: int = 0) -> Tree:
    """Random trees with tokens 0 to 2 below different parents, in which siblings differ as far as there are tokens."""
    generator = torch.Generator().manual_seed(seed)

    def draw(n: int) -> int:
        return int(torch.randint(n, (), generator=generator))

    token = [[draw(3) for _ in range(N)] for _ in range(B)]
    if chain:
        return Tree.chain(torch.tensor(token, device=DEVICE))
    parent, deepest = [], 0
    for b in range(B):
        mine, depth, children = [-1], [0], {}
        for n in range(1, N):
            p = draw(n)
            mine.append(p)
            depth.append(depth[p] + 1)
            token[b][n] = children[p] = children.get(p, draw(2) - 1) + 1
        parent.append(mine)
        deepest = max(deepest, *depth)
    return Tree(*(torch.tensor(x, device=DEVICE) for x in (token, parent)), deepest + slack)


def strided(tree: Tree) -> Tree:
    """The same trees, whose tensors are not contiguous."""
    return Tree(
        tree.token_BN.T.contiguous().T, torch.cat([tree.parent_BN] * 2, 1)[:, : tree.token_BN.shape[1]], tree.levels
    )


@pytest.mark.parametrize(("B", "N"), SIZES)
def test_places_of_nodes(B: int, N: int) -> None:
    start_B, length_B = torch.arange(B, device=DEVICE) * 1000 + 7, torch.arange(B, device=DEVICE) * 3
    for tree in (trees(B, N, N), strided(trees(B, N, N, slack=3)), trees(B, N, N, chain=True)):
        ours, exact = by_both(place_trees, tree, start_B, length_B)
        for a, b in zip(ours[:2], exact[:2], strict=True):
            assert torch.equal(a, b) and a.dtype == b.dtype and a.is_contiguous()
        visible, expected = ours[2], exact[2]
        assert visible.shape == expected.shape and torch.equal(visible.mask_BSJ, expected.mask_BSJ)
        if isinstance(expected, VisibleChain):
            assert torch.equal(visible.last_BS, expected.last_BS)
        else:
            assert torch.equal(visible.words_BSW, expected.words_BSW)
    assert [x.shape for x in place_trees(trees(1, N, 0, chain=True), start_B[:0], length_B[:0])[:2]] == [(0, N)] * 2


def same(a: Verdict, b: Verdict) -> bool:
    return all(
        torch.equal(x, y) and x.dtype == y.dtype for x, y in zip(vars(a).values(), vars(b).values(), strict=True)
    )


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize(("B", "N"), SIZES)
def test_accepted_nodes(B: int, N: int, seed: int) -> None:
    """None, some and all nodes of paths; nodes that are padding; rows that are strided."""
    for tree in (trees(B, N, seed), strided(trees(B, N, seed, slack=2)), trees(B, N, seed, chain=True)):
        for follow in (0.0, 0.5, 0.9, 1.0):
            own_BN = own_tokens(tree, follow, seed)
            ours, exact = by_both(accept_own, tree, own_BN)
            assert same(ours, exact)
            if tree.parent_BN is None and N > 1:
                assert follow < 1 or (ours.count_B == N).all()
                for size in (1, N - 1, N):
                    short = Tree(tree.token_BN, None, N - 1, torch.full((B,), size, device=DEVICE))
                    ours, exact = by_both(accept_own, short, own_BN.T.contiguous().T)
                    assert same(ours, exact) and (ours.count_B <= size).all()


def own_tokens(tree: Tree, follow: float, seed: int) -> Tensor:
    """The target's tokens: after a node, with probability `follow` that of a child, if it has any."""
    generator, (B, N) = torch.Generator().manual_seed(seed), tree.token_BN.shape
    own = torch.full((B, N), 99)
    for b, (token, parent) in enumerate(tree_lists(tree)):
        for n in torch.randperm(N, generator=generator).tolist():
            if n and float(torch.rand((), generator=generator)) < follow:
                own[b, parent[n]] = token[n]
    return own.to(DEVICE)


def test_large_trees_take_the_definition() -> None:
    tree = Tree.chain(torch.zeros(1, MOST_NODES + 1, dtype=torch.int64, device=DEVICE))
    assert same(*by_both(accept_own, tree, tree.token_BN))
