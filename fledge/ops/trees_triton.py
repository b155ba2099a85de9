"""The operations of `ops.trees` in Triton: one program per request, or per block of a request's nodes.

Dynamic trees grow without sorting. The rank of a node within a level is the number of better nodes, and the rank is the
node's place in the next front. The lowest score of the best nodes is found bit by bit, and prefix sums give the nodes'
indices in the tree. The heap of `likeliest_prefixes` is an array in registers, in which the largest number is found.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl
from torch import Tensor

from fledge.ops.device import dependent_launch, with_unit_stride
from fledge.ops.topk_triton import keys_of, ordered, wait_for_previous
from fledge.types import Tree, Verdict

if TYPE_CHECKING:
    from fledge.ops.trees import Candidates

PAIRS = 16384  # nodes that are compared at a time
PLACED = 16  # nodes of a program of `place_trees`
LOWEST = tl.constexpr(-(2**31))  # less than every score as an ordered integer
LEAST, NO_CHILD = tl.constexpr(-1e300), tl.constexpr(float("-inf"))  # scores of a prefix of probability 0, and of none


@triton.jit
def _scores(i, n, logp_ptr, score_ptr, parent_ptr, WIDTH: tl.constexpr, ROOT: tl.constexpr):
    """The scores of the children i of the nodes that were expanded last."""
    score = tl.load(logp_ptr + i, mask=i < n, other=0.0)
    if not ROOT:
        parent = tl.load(parent_ptr + i // WIDTH, mask=i < n, other=0)
        score = tl.load(score_ptr + parent, mask=i < n, other=0.0) + score
    return score


@triton.jit(do_not_specialize=["n", "P", "X", "expanded"])
def _add_level(
    logp_ptr, child_ptr, ids_ptr, score_ptr, token_ptr, place_ptr, seen_ptr, front_ptr, row_ptr, n, P, X, expanded,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr, AT_ONCE: tl.constexpr, WORDS: tl.constexpr,
    ROOT: tl.constexpr, LAST: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Scores `n` children of the ROOT, or of the last WIDTH of `expanded` expanded nodes, and chooses the front."""
    wait_for_previous(DEPENDENT)
    b, i = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    logp_ptr += b * n
    score_ptr += b * P
    place_ptr += b * X
    seen_ptr += b * X * WORDS
    f, parents = i // WIDTH, expanded - WIDTH
    begin = WIDTH * (1 + parents) if not ROOT else 0
    score = _scores(i, n, logp_ptr, score_ptr, place_ptr + parents, WIDTH, ROOT)
    child = tl.load(child_ptr + b * n + i, mask=i < n, other=0)
    tl.store(score_ptr + begin + i, score, mask=i < n)
    tl.store(token_ptr + b * P + begin + i, child, mask=i < n)
    if not LAST:
        key, rank = keys_of(score, i), tl.zeros([BLOCK], tl.int32)
        for at in range(0, n, AT_ONCE):
            j = at + tl.arange(0, AT_ONCE)
            other = keys_of(_scores(j, n, logp_ptr, score_ptr, place_ptr + parents, WIDTH, ROOT), j)
            rank += tl.sum(((other[None, :] > key[:, None]) & (j < n)[None, :]).to(tl.int32), 1)
        chosen = (i < n) & (rank < WIDTH)
        node = expanded + rank
        tl.store(place_ptr + node, (begin + i).to(tl.int64), mask=chosen)
        for word in tl.static_range(WORDS):
            seen = tl.where(node // 64 == word, tl.full([BLOCK], 1, tl.int64) << (node % 64).to(tl.int64), 0)
            if not ROOT:
                seen |= tl.load(seen_ptr + (parents + f) * WORDS + word, mask=chosen, other=0)
            tl.store(seen_ptr + node * WORDS + word, seen, mask=chosen)
        tl.store(front_ptr + b * WIDTH + rank, tl.load(ids_ptr + child, mask=chosen, other=0), mask=chosen)
        tl.store(row_ptr + b * WIDTH + rank, b * (n // WIDTH) + f, mask=chosen)


def add_level_triton(
    found: Candidates, level: int, logp_BMw: Tensor, token_BMw: Tensor, ids_W: Tensor
) -> tuple[Tensor, Tensor] | None:
    """`add_level` in one kernel."""
    (B, M, w), (_, P), (_, X, J) = logp_BMw.shape, found.score_BP.shape, found.seen_BXJ.shape
    n, last = M * w, level + 1 == found.levels
    front, row = (found.token_BP.new_empty(B, 0 if last else w) for _ in range(2))
    block = triton.next_power_of_2(n)
    if B:
        _add_level[(B,)](
            logp_BMw.contiguous(), token_BMw.contiguous(), ids_W, found.score_BP, found.token_BP, found.place_BX,
            found.seen_BXJ, front, row, n, P, X, level * w,
            WIDTH=w, BLOCK=block, AT_ONCE=min(block, PAIRS // block), WORDS=J, ROOT=not level, LAST=last,
            num_warps=8 if block > 64 else 4, **dependent_launch(front.device),
        )  # fmt: skip
    return None if last else (front, row)


@triton.jit(do_not_specialize=["P", "X", "N"])
def _best_nodes(
    score_ptr, token_ptr, place_ptr, root_ptr, ids_ptr, node_ptr, tree_ptr, parent_ptr, slot_ptr, P, X, N,
    WIDTH: tl.constexpr, BP: tl.constexpr, BX: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """The best N - 1 of P nodes. `node_ptr` is room for the index of each node in the tree, 0 for those outside."""
    wait_for_previous(DEPENDENT)
    b, p, e = tl.program_id(0).to(tl.int64), tl.arange(0, BP), tl.arange(0, BX)
    place_ptr += b * X
    node_ptr += b * P
    tree_ptr += b * N
    parent_ptr += b * N
    slot_ptr += b * N
    score = ordered(tl.load(score_ptr + b * P + p, mask=p < P, other=0.0))
    score = tl.where(p < P, score, LOWEST)
    # the largest number that at least N - 1 scores reach
    lowest = tl.where(tl.sum((score >= 0).to(tl.int32), 0) >= N - 1, 0, LOWEST)
    for bit in range(31):
        higher = lowest + (1 << (30 - bit))
        lowest = tl.where(tl.sum((score >= higher).to(tl.int32), 0) >= N - 1, higher, lowest)
    left = N - 1 - tl.sum((score > lowest).to(tl.int32), 0)  # the number of first nodes to choose at the lowest score
    equal = score == lowest
    chosen = (score > lowest) | (equal & (tl.cumsum(equal.to(tl.int32), 0) <= left))
    node = tl.where(chosen, tl.cumsum(chosen.to(tl.int32), 0), 0)
    tl.store(node_ptr + p, node, mask=p < P)
    token = tl.load(token_ptr + b * P + p, mask=chosen, other=0)
    tl.store(tree_ptr + node, tl.load(ids_ptr + token, mask=chosen, other=0), mask=chosen)
    tl.store(slot_ptr + node, -1, mask=chosen)
    tl.store(tree_ptr, tl.load(root_ptr + b))
    tl.store(parent_ptr, -1)
    tl.store(slot_ptr, -1)
    tl.debug_barrier()  # the code below reads the indices of other threads' nodes, and overwrites slots
    above = p // WIDTH - 1  # the parent's index among the expanded nodes
    below = chosen & (above >= 0)
    parent = tl.load(place_ptr + above, mask=below, other=0)
    parent = tl.load(node_ptr + parent, mask=below, other=0)  # the root is node 0
    tl.store(parent_ptr + node, parent.to(tl.int64), mask=chosen)
    place = tl.load(place_ptr + e, mask=e < X, other=0)
    node = tl.load(node_ptr + place, mask=e < X, other=0)
    tl.store(slot_ptr + node, e.to(tl.int64), mask=(e < X) & (node > 0))


def best_nodes_triton(
    found: Candidates, nodes: int, root_B: Tensor, ids_W: Tensor
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """`best_nodes` in one kernel."""
    (B, P), X = found.score_BP.shape, found.place_BX.shape[1]
    N, BP = 1 + min(nodes - 1, P), triton.next_power_of_2(P)
    token, parent, slot = (root_B.new_empty(B, N) for _ in range(3))
    if B:
        _best_nodes[(B,)](
            found.score_BP, found.token_BP, found.place_BX, root_B.contiguous(), ids_W,
            torch.empty(B, P, dtype=torch.int32, device=root_B.device), token, parent, slot, P, X, N,
            WIDTH=found.width, BP=BP, BX=triton.next_power_of_2(max(X, 1)), num_warps=4 if BP <= 1024 else 8,
            **dependent_launch(root_B.device),
        )  # fmt: skip
    return token, parent, slot


@triton.jit
def _child_score(score, logp_ptr, exists):
    """The score of a child, at least LEAST, of a node with `score`; NO_CHILD unless it exists."""
    logp = tl.load(logp_ptr, mask=exists, other=0.0).to(tl.float64)
    logp = tl.where(logp == logp, logp, float("-inf"))
    return tl.where(exists, tl.maximum(score + logp, LEAST), NO_CHILD)


@triton.jit(do_not_specialize=["K", "w", "N"])
def _likeliest_prefixes(
    logp_ptr, token_ptr, root_ptr, ids_ptr, tree_ptr, parent_ptr, K, w, N, BN: tl.constexpr, DEPENDENT: tl.constexpr
):
    """The best of the nodes' next children is the next node. `score` are the scores of the nodes, `places` the places
    of their tokens in the table of K levels of w tokens, `child` the places of the tokens of their next children, and
    `child_score` the scores of these."""
    wait_for_previous(DEPENDENT)
    b, n = tl.program_id(0).to(tl.int64), tl.arange(0, BN)
    logp_ptr += b * K * w
    score, places, child = tl.zeros([BN], tl.float64), tl.zeros([BN], tl.int32), tl.zeros([BN], tl.int32)
    parents = tl.full([BN], -1, tl.int32)
    child_score = tl.where(n == 0, _child_score(score, logp_ptr + child, n == 0), NO_CHILD)
    for node in range(1, N):
        best = tl.max(child_score, 0)
        parent = tl.min(tl.where(child_score == best, n, BN), 0)
        place = tl.sum(tl.where(n == parent, child, 0), 0)
        above = tl.sum(tl.where(n == parent, score, 0.0), 0)
        sibling, below = place + 1, (place // w + 1) * w
        sibling_score = _child_score(above, logp_ptr + sibling, sibling % w != 0)
        below_score = _child_score(best, logp_ptr + below, below < K * w)
        child = tl.where(n == parent, sibling, tl.where(n == node, below, child))
        child_score = tl.where(n == parent, sibling_score, tl.where(n == node, below_score, child_score))
        score = tl.where(n == node, best, score)
        places = tl.where(n == node, place, places)
        parents = tl.where(n == node, parent, parents)
    drafted = tl.load(token_ptr + b * K * w + places, mask=(n > 0) & (n < N), other=0)
    token = tl.load(ids_ptr + drafted, mask=(n > 0) & (n < N), other=0)
    token = tl.where(n == 0, tl.load(root_ptr + b), token)
    tl.store(tree_ptr + b * N + n, token, mask=n < N)
    tl.store(parent_ptr + b * N + n, parents.to(tl.int64), mask=n < N)


def likeliest_prefixes_triton(
    logp_BKw: Tensor, token_BKw: Tensor, N: int, root_B: Tensor, ids_W: Tensor
) -> tuple[Tensor, Tensor]:
    """`likeliest_prefixes` in one kernel, as trees of N nodes."""
    B, K, w = logp_BKw.shape
    token, parent = torch.empty(2, B, N, dtype=torch.int64, device=root_B.device)
    if B:
        _likeliest_prefixes[(B,)](
            logp_BKw.contiguous(), token_BKw.contiguous(), root_B.contiguous(), ids_W, token, parent, K, w, N,
            BN=max(triton.next_power_of_2(N), 2), num_warps=1 if N <= 128 else 4, **dependent_launch(root_B.device),
        )  # fmt: skip
    return token, parent


@triton.jit(do_not_specialize=["N", "levels", "sp"])
def _place(
    parent_ptr, start_ptr, length_ptr, position_ptr, slot_ptr, seen_ptr, N, levels, sp,
    WORDS: tl.constexpr, BW: tl.constexpr, CHAIN: tl.constexpr, BLOCK: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """With CHAIN, `seen_ptr` gets the last node that each node sees."""
    wait_for_previous(DEPENDENT)
    n, b, word = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK), tl.program_id(1).to(tl.int64), tl.arange(0, BW)
    start, length = tl.load(start_ptr + b), tl.load(length_ptr + b)
    depth = n
    if CHAIN:
        tl.store(seen_ptr + b * N + n, n.to(tl.int64), mask=n < N)
    else:
        depth, at = tl.zeros([BLOCK], tl.int32), n
        seen = tl.zeros([BLOCK, BW], tl.int64)
        for _ in range(levels + 1):
            bit = tl.full([BLOCK], 1, tl.int64) << (at % 64).to(tl.int64)
            seen |= tl.where((at // 64)[:, None] == word[None, :], bit[:, None], 0)
            below = (at > 0) & (n < N)
            depth += below.to(tl.int32)
            at = tl.load(parent_ptr + b * sp + at, mask=below, other=0).to(tl.int32)
        tile = (n < N)[:, None] & (word < WORDS)[None, :]
        tl.store(seen_ptr + (b * N + n)[:, None] * WORDS + word[None, :], seen, mask=tile)
    tl.store(position_ptr + b * N + n, length + depth, mask=n < N)
    tl.store(slot_ptr + b * N + n, start + length + n, mask=n < N)


def place_trees_triton(tree: Tree, start_B: Tensor, length_B: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """`place_trees` in one kernel. Visibility is returned as words of bits; for chains, as the last visible node."""
    (B, N), chain, words = tree.token_BN.shape, tree.parent_BN is None, triton.cdiv(tree.token_BN.shape[1], 64)
    parent = length_B if chain else with_unit_stride(tree.parent_BN)
    position, slot = torch.empty(2, B, N, dtype=torch.int64, device=length_B.device)
    seen = position.new_empty((B, N) if chain else (B, N, words))
    if position.numel():
        _place[(triton.cdiv(N, PLACED), B)](
            parent, start_B.contiguous(), length_B.contiguous(), position, slot, seen, N,
            tree.levels, 0 if chain else parent.stride(0), WORDS=words, BW=triton.next_power_of_2(words), CHAIN=chain,
            BLOCK=PLACED, num_warps=1, **dependent_launch(length_B.device),
        )  # fmt: skip
    return position, slot, seen


@triton.jit(do_not_specialize=["N", "R", "st", "sp", "so"])
def _walk(
    token_ptr, parent_ptr, own_ptr, size_ptr, path_ptr, count_ptr, out_ptr, N, R, st, sp, so,
    BN: tl.constexpr, BR: tl.constexpr, CHAIN: tl.constexpr, SIZES: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    wait_for_previous(DEPENDENT)
    b, n = tl.program_id(0).to(tl.int64), tl.arange(0, BN)
    end = tl.minimum(tl.load(size_ptr + b), N) if SIZES else N
    real = (n > 0) & (n < end)
    token = tl.load(token_ptr + b * st + n, mask=real, other=0)
    parent = n - 1
    if not CHAIN:
        parent = tl.load(parent_ptr + b * sp + n, mask=real, other=-1).to(tl.int32)
    own_ptr += b * so
    real = real & (parent >= 0)
    matched = real & (token == tl.load(own_ptr + parent, mask=real, other=0))
    # the walk is in registers: a load at each step would wait for the previous load
    r, node, count = tl.arange(0, BR), 0, 1
    path = tl.zeros([BR], tl.int32)
    for step in range(1, R):
        child = tl.max(tl.where(matched & (parent == node), n, 0), 0)
        node = tl.where(child > 0, child, -1)  # after the end of a path, no further step finds a child
        path = tl.where((r >= step) & (child > 0), child, path)
        count += (child > 0).to(tl.int32)
    own = tl.load(own_ptr + path, mask=r < R, other=0)
    tl.store(path_ptr + b * R + r, path, mask=r < R)
    tl.store(out_ptr + b * R + r, tl.where(r < count, own, 0), mask=r < R)
    tl.store(count_ptr + b, count)


def accept_own_triton(tree: Tree, own_BN: Tensor) -> Verdict:
    """`accept_own` in one kernel. Copies tensors if a row's entries are strided."""
    (B, N), R = own_BN.shape, tree.levels + 1
    token, own = with_unit_stride(tree.token_BN), with_unit_stride(own_BN)
    parent = token if tree.parent_BN is None else with_unit_stride(tree.parent_BN)
    path, out = torch.empty(2, B, R, dtype=torch.int64, device=own.device)
    count = path.new_empty(B)
    if B:
        _walk[(B,)](
            token, parent, own, None if tree.count_B is None else tree.count_B.contiguous(), path, count, out, N, R,
            token.stride(0), parent.stride(0), own.stride(0), BN=max(triton.next_power_of_2(N), 2),
            BR=triton.next_power_of_2(R), CHAIN=tree.parent_BN is None, SIZES=tree.count_B is not None,
            num_warps=1 if N <= 128 else 4, **dependent_launch(own.device),
        )  # fmt: skip
    return Verdict(path, count, out)
