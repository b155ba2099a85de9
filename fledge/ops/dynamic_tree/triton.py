"""The growth of dynamic trees in Triton, one program per request.

Nothing is sorted. The rank of a node within its level is the number of nodes that are better, so that each node finds
its own place in the next front. The lowest score of the best nodes is found bit by bit, and sums over the nodes before
each one give its index in the tree.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from fledge.ops.dynamic_tree.candidates import Candidates
from fledge.ops.implementations import dependent_launch
from fledge.ops.likeliest_triton import keys_of, ordered

PAIRS = 16384  # nodes that are compared at a time
LOWEST = tl.constexpr(-(2**31))  # less than every score as an ordered integer


@triton.jit
def _scores(i, n, logp_ptr, score_ptr, parent_ptr, M, WIDTH: tl.constexpr, ROOT: tl.constexpr):
    """The scores of the children i of the nodes that were expanded last."""
    f = i // WIDTH
    score = tl.load(logp_ptr + tl.minimum(f, M - 1) * WIDTH + i % WIDTH, mask=i < n, other=0.0)
    if not ROOT:
        parent = tl.load(parent_ptr + f, mask=i < n, other=0)
        score = tl.load(score_ptr + parent, mask=i < n, other=0.0) + score
    return score


@triton.jit(do_not_specialize=["M", "n", "P", "X", "expanded"])
def _add_level(
    logp_ptr, child_ptr, ids_ptr, score_ptr, token_ptr, place_ptr, seen_ptr, front_ptr, row_ptr, M, n, P, X, expanded,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr, AT_ONCE: tl.constexpr, WORDS: tl.constexpr,
    ROOT: tl.constexpr, LAST: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """`n` children of the level after `expanded` expanded nodes, of which the last are their parents."""
    if DEPENDENT:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    b, i = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    logp_ptr += b * M * WIDTH
    score_ptr += b * P
    place_ptr += b * X
    seen_ptr += b * X * WORDS
    f, parents = i // WIDTH, expanded - WIDTH
    begin = WIDTH * (1 + parents) if not ROOT else 0
    score = _scores(i, n, logp_ptr, score_ptr, place_ptr + parents, M, WIDTH, ROOT)
    child = tl.load(child_ptr + b * M * WIDTH + tl.minimum(f, M - 1) * WIDTH + i % WIDTH, mask=i < n, other=0)
    tl.store(score_ptr + begin + i, score, mask=i < n)
    tl.store(token_ptr + b * P + begin + i, child, mask=i < n)
    if not LAST:
        key, rank = keys_of(score, i), tl.zeros([BLOCK], tl.int32)
        for at in range(0, n, AT_ONCE):
            j = at + tl.arange(0, AT_ONCE)
            other = keys_of(_scores(j, n, logp_ptr, score_ptr, place_ptr + parents, M, WIDTH, ROOT), j)
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
    n, last = w * w if level else w, level + 1 == found.levels
    front, row = (found.token_BP.new_empty(B, 0 if last else w) for _ in range(2))
    block = triton.next_power_of_2(n)
    if B:
        _add_level[(B,)](
            logp_BMw.contiguous(), token_BMw.contiguous(), ids_W, found.score_BP, found.token_BP, found.place_BX,
            found.seen_BXJ, front, row, M, n, P, X, level * w,
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
    if DEPENDENT:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    b, p, e = tl.program_id(0).to(tl.int64), tl.arange(0, BP), tl.arange(0, BX)
    place_ptr += b * X
    node_ptr += b * P
    tree_ptr += b * N
    parent_ptr += b * N
    slot_ptr += b * N
    score = ordered(tl.load(score_ptr + b * P + p, mask=p < P, other=0.0))
    score = tl.where(p < P, score, LOWEST)
    # the largest number that N - 1 scores reach
    lowest = tl.where(tl.sum((score >= 0).to(tl.int32), 0) >= N - 1, 0, LOWEST)
    for bit in range(31):
        higher = lowest + (1 << (30 - bit))
        lowest = tl.where(tl.sum((score >= higher).to(tl.int32), 0) >= N - 1, higher, lowest)
    left = N - 1 - tl.sum((score > lowest).to(tl.int32), 0)  # for the first of those that have the lowest score
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
    tl.debug_barrier()  # what follows reads the indices of other threads' nodes, and overwrites their slots
    above = p // WIDTH - 1  # as which node the parent was expanded
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
