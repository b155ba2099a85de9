"""`filter_top` in Triton, without a sort.

Tokens are ordered by score and, where scores are equal, by id. A row keeps the tokens from one place of the order on.
The place is found in three steps:

1. The tokens are counted in LEVELS levels by distance from the largest score. The last level has all tokens further
   away than `_reach`.
2. With top-k, the counts tell the level of the k-th score, and the ids of this level and all higher levels are
   gathered. With top-p alone, the counts bound the sum of weights exp(score - largest) of each level, and so the levels
   in which the sum can exceed 1 - p of the total. The ids of these levels are gathered, mostly some hundreds, and the
   total weight and the weight of lower levels are added up.
3. One program per row finds the k-th score among the gathered ids, and then the place where the sum of weights exceeds
   1 - p of the total, by bisection.

Weights are integers, multiples of 2^-40 of the largest weight: sums are exact and do not depend on an order. Rounding
elsewhere can change the gathered ids, but not the place.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from fledge.ops.device import dependent_launch, with_unit_stride
from fledge.ops.topk_triton import _in_order, ordered, wait_for_previous

CHUNK = 2048  # scores of a program
LEVELS = tl.constexpr(256)
FEW, GATHERED = 512, 8192  # ids that a program searches at a time: with up to FEW gathered ids, and with more
LOWEST, HIGHEST = tl.constexpr(-(2**31)), tl.constexpr(2**31 - 1)  # less and more than every score as an integer
ONE = tl.constexpr(float(2**40))  # the weight of the largest score
WEIGHTLESS = tl.constexpr(28.0)  # nats below the largest score from which on weights are 0: more than 40 ln 2
ROUNDING = tl.constexpr(1e-4)  # more than the relative rounding errors of a bound of weights


@triton.jit
def _level(x, top, per_nat):
    return tl.minimum((top - x) * per_nat, LEVELS - 1).to(tl.int32)


@triton.jit
def _weight(x, top):
    return (tl.exp(x - top) * ONE).to(tl.int64)


@triton.jit
def _tops(
    x_ptr, top_ptr, total_ptr, count_ptr, found_ptr, mass_ptr, sx, V, CHUNK: tl.constexpr, DEPENDENT: tl.constexpr
):
    """The largest score of a chunk, and the sum of exp(score - largest). A row's first program clears its sums."""
    wait_for_previous(DEPENDENT)
    chunk, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    i, level = chunk * CHUNK + tl.arange(0, CHUNK), tl.arange(0, LEVELS)
    x = tl.load(x_ptr + row * sx + i, mask=i < V, other=float("-inf"))
    top, at = tl.max(x, 0), row * tl.num_programs(0) + chunk
    tl.store(top_ptr + at, top)
    tl.store(total_ptr + at, tl.sum(tl.exp(x - tl.where(top == float("-inf"), 0.0, top)), 0))
    if chunk == 0:
        tl.store(count_ptr + row * LEVELS + level, tl.zeros([LEVELS], tl.int32))
        tl.store(found_ptr + row, 0)
        tl.store(mass_ptr + 2 * row + tl.arange(0, 2), tl.zeros([2], tl.int64))


@triton.jit
def _reach(total, k, p, V):
    """The nats from the largest score down to the last level. With top-k, the last level has weights of 0, else less
    than 1/64 of the weight that top-p removes. `total` is the sum of weights, up to rounding."""
    left_out = tl.maximum((1.0 - p).to(tl.float32) * total, 1e-30)
    return tl.where(k > 0, WEIGHTLESS, tl.minimum(tl.log(64.0 * V / left_out), WEIGHTLESS))


@triton.jit
def _counts(
    x_ptr, top_ptr, total_ptr, k_ptr, p_ptr, scale_ptr, count_ptr, sx, V, N,
    CHUNKS: tl.constexpr, CHUNK: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Adds the numbers of a chunk's scores in each level to the row's counts. Also stores the row's largest score (0 if
    all are -inf) and the row's levels per nat: the next kernels thus use exactly the same levels."""
    wait_for_previous(DEPENDENT)
    chunk, row, chunks = tl.program_id(0), tl.program_id(1).to(tl.int64), tl.num_programs(0)
    k, p = tl.load(k_ptr + row // N), tl.load(p_ptr + row // N)
    if (k > 0) | (p < 1.0):
        c, level = tl.arange(0, CHUNKS), tl.arange(0, LEVELS)
        tops = tl.load(top_ptr + row * chunks + c, mask=c < chunks, other=float("-inf"))
        totals = tl.load(total_ptr + row * chunks + c, mask=c < chunks, other=0.0)
        top = tl.max(tops, 0)
        top = tl.where(top == float("-inf"), 0.0, top)
        per_nat = (LEVELS - 1) / _reach(tl.sum(totals * tl.exp(tops - top), 0), k, p, V)
        i = chunk * CHUNK + tl.arange(0, CHUNK)
        x = tl.load(x_ptr + row * sx + i, mask=i < V, other=float("-inf"))  # behind the row: in the last level
        count = tl.histogram(_level(x, top, per_nat), LEVELS)
        tl.atomic_add(count_ptr + row * LEVELS + level, count, mask=count > 0, sem="relaxed")
        if chunk == 0:
            tl.store(scale_ptr + 2 * row, top)
            tl.store(scale_ptr + 2 * row + 1, per_nat)


@triton.jit
def _bounds(scale_ptr, count_ptr, k_ptr, p_ptr, bound_ptr, V, N, DEPENDENT: tl.constexpr):
    """The first and the last level of a row whose ids are gathered."""
    wait_for_previous(DEPENDENT)
    row, level = tl.program_id(0).to(tl.int64), tl.arange(0, LEVELS)
    k, p, per_nat = tl.load(k_ptr + row // N), tl.load(p_ptr + row // N), tl.load(scale_ptr + 2 * row + 1)
    count, first, last = tl.load(count_ptr + row * LEVELS + level), 0, -1
    if k > 0:
        last = tl.min(tl.where(tl.cumsum(count, 0) >= tl.minimum(k, V), level, LEVELS - 1), 0)
    elif p < 1.0:
        # upper and lower bounds of the sum of weights of each level
        nearest, furthest = level / per_nat, (level + 1) / per_nat
        most = count * tl.where(nearest > WEIGHTLESS, 0.0, tl.exp(-nearest)) * (1 + ROUNDING)
        least = count * tl.where(level < LEVELS - 1, tl.maximum(tl.exp(-furthest) - 1 / ONE, 0.0), 0.0)
        rest = (1.0 - p).to(tl.float32)
        # the place is in or below a level if that level and all lower levels surely exceed the weight to remove, and
        # above the level if their weights surely do not exceed it
        first = tl.max(tl.where(tl.cumsum(least, 0, reverse=True) > rest * tl.sum(most, 0), level, 0), 0)
        last = tl.min(tl.where(tl.cumsum(most, 0, reverse=True) <= rest * tl.sum(least, 0), level, LEVELS), 0) - 1
    tl.store(bound_ptr + 2 * row, first)
    tl.store(bound_ptr + 2 * row + 1, last)


@triton.jit
def _gather(
    x_ptr, scale_ptr, k_ptr, p_ptr, bound_ptr, found_ptr, mass_ptr, id_ptr, sx, V, N,
    CHUNK: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Appends a chunk's ids in the levels to search to the row's gathered ids, in any order. With top-p alone, also
    adds the total weight of the chunk, and the weight of lower levels, to the row's sums."""
    wait_for_previous(DEPENDENT)
    chunk, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    k, p = tl.load(k_ptr + row // N), tl.load(p_ptr + row // N)
    if (k > 0) | (p < 1.0):
        top, per_nat = tl.load(scale_ptr + 2 * row), tl.load(scale_ptr + 2 * row + 1)
        first, last = tl.load(bound_ptr + 2 * row), tl.load(bound_ptr + 2 * row + 1)
        i = chunk * CHUNK + tl.arange(0, CHUNK)
        x = tl.load(x_ptr + row * sx + i, mask=i < V, other=float("-inf"))
        level = _level(x, top, per_nat)
        chosen = (level >= first) & (level <= last) & (i < V)
        many = tl.sum(chosen.to(tl.int32), 0)
        if many > 0:
            to = tl.atomic_add(found_ptr + row, many, sem="relaxed") + tl.cumsum(chosen.to(tl.int32), 0) - 1
            tl.store(id_ptr + row * V + to, i, mask=chosen)
        if k <= 0:
            weight = _weight(x, top)
            tl.atomic_add(mass_ptr + 2 * row, tl.sum(weight, 0), sem="relaxed")
            tl.atomic_add(mass_ptr + 2 * row + 1, tl.sum(tl.where(level > last, weight, 0), 0), sem="relaxed")


@triton.jit
def _read(x_ptr, id_ptr, top, at, found, GATHERED: tl.constexpr):
    """Gathered ids, scores as ordered integers, and weights. Past the last id, scores are LOWEST and weights 0."""
    j = at + tl.arange(0, GATHERED)
    i = tl.load(id_ptr + j, mask=j < found, other=0)
    x = tl.load(x_ptr + i, mask=j < found, other=float("-inf"))
    return i, tl.where(j < found, ordered(x), LOWEST), tl.where(j < found, _weight(x, top), 0)


@triton.jit
def _range(first, x_ptr, id_ptr, top, found, GATHERED: tl.constexpr):
    """The lowest and the largest gathered score. `first` are the scores of the first ids, held in registers."""
    lowest, largest = tl.min(tl.where(first > LOWEST, first, HIGHEST), 0), tl.max(first, 0)
    for at in range(GATHERED, found, GATHERED):
        _, score, _ = _read(x_ptr, id_ptr, top, at, found, GATHERED)
        lowest = tl.minimum(lowest, tl.min(tl.where(score > LOWEST, score, HIGHEST), 0))
        largest = tl.maximum(largest, tl.max(score, 0))
    return lowest, largest


@triton.jit
def _middle(start, end):
    """The integer halfway from `start` up to a larger `end`, always above `start`."""
    return ((start.to(tl.int64) + end + 1) >> 1).to(tl.int32)


@triton.jit
def _count(low, first, x_ptr, id_ptr, top, found, GATHERED: tl.constexpr):
    """The number of gathered scores that are at least `low`."""
    count = tl.sum((first >= low).to(tl.int32), 0)
    for at in range(GATHERED, found, GATHERED):
        _, score, _ = _read(x_ptr, id_ptr, top, at, found, GATHERED)
        count += tl.sum((score >= low).to(tl.int32), 0)
    return count


@triton.jit
def _mass(low, high, first, weights, x_ptr, id_ptr, top, found, GATHERED: tl.constexpr):
    """The weight of the gathered scores of at least `low` and less than `high`."""
    mass = tl.sum(tl.where((first >= low) & (first < high), weights, 0), 0)
    for at in range(GATHERED, found, GATHERED):
        _, score, weight = _read(x_ptr, id_ptr, top, at, found, GATHERED)
        mass += tl.sum(tl.where((score >= low) & (score < high), weight, 0), 0)
    return mass


@triton.jit
def _equal_before(end, value, first, ids, x_ptr, id_ptr, top, found, GATHERED: tl.constexpr):
    """The number of gathered scores equal to `value` with an id below `end`."""
    count = tl.sum(((first == value) & (ids < end)).to(tl.int32), 0)
    for at in range(GATHERED, found, GATHERED):
        i, score, _ = _read(x_ptr, id_ptr, top, at, found, GATHERED)
        count += tl.sum(((score == value) & (i < end)).to(tl.int32), 0)
    return count


@triton.jit
def _place(k, p, total, below, x_ptr, id_ptr, top, found, V, GATHERED: tl.constexpr):
    """The lowest kept score of a row, and the first kept id with this score. With top-k, `total` and `below` are not
    read."""
    ids, first, weights = _read(x_ptr, id_ptr, top, 0, found, GATHERED)
    lowest, largest = _range(first, x_ptr, id_ptr, top, found, GATHERED)
    start = tl.full((), 0, tl.int32)
    if k > 0:  # the largest number that at least `enough` scores reach
        enough, end = tl.minimum(k, V), largest
        while lowest < end:
            middle = _middle(lowest, end)
            many = _count(middle, first, x_ptr, id_ptr, top, found, GATHERED)
            end = tl.where(many >= enough, end, middle - 1)
            lowest = tl.where(many >= enough, middle, lowest)
    if p < 1.0:
        if k > 0:
            total = _mass(lowest, HIGHEST, first, weights, x_ptr, id_ptr, top, found, GATHERED)
            below = tl.zeros_like(total)
        left = ((1.0 - p) * total.to(tl.float64)).to(tl.int64) - below  # the weight to remove from the gathered scores
        # the largest number, up to the largest score, with at most the weight `left` below the number
        value, end = lowest, largest
        while value < end:
            middle = _middle(value, end)
            less = _mass(lowest, middle, first, weights, x_ptr, id_ptr, top, found, GATHERED)
            end = tl.where(less <= left, end, middle - 1)
            value = tl.where(less <= left, middle, value)
        # scores equal to `value` are removed from the lowest id up, as many as `left` allows, except one
        left -= _mass(lowest, value, first, weights, x_ptr, id_ptr, top, found, GATHERED)
        each = _weight(_in_order(value).to(tl.float32, bitcast=True), top)
        equal = _equal_before(V, value, first, ids, x_ptr, id_ptr, top, found, GATHERED)
        out = tl.minimum(left // tl.maximum(each, 1), equal - 1)
        if out > 0:
            end = V
            while start < end:
                middle = _middle(start, end)
                before = _equal_before(middle, value, first, ids, x_ptr, id_ptr, top, found, GATHERED)
                end = tl.where(before <= out, end, middle - 1)
                start = tl.where(before <= out, middle, start)
        lowest = value
    return lowest, start


@triton.jit
def _search(
    x_ptr, scale_ptr, k_ptr, p_ptr, found_ptr, mass_ptr, id_ptr, place_ptr, sx, V, N,
    FEW: tl.constexpr, GATHERED: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Stores the place of a row, scores as ordered integers."""
    wait_for_previous(DEPENDENT)
    row = tl.program_id(0).to(tl.int64)
    k, p, found = tl.load(k_ptr + row // N), tl.load(p_ptr + row // N), tl.load(found_ptr + row)
    lowest, start = tl.full((), LOWEST, tl.int32), tl.full((), 0, tl.int32)
    if (k > 0) | (p < 1.0):
        x_ptr += row * sx
        id_ptr += row * V
        top = tl.load(scale_ptr + 2 * row)
        total, below = tl.load(mass_ptr + 2 * row), tl.load(mass_ptr + 2 * row + 1)
        if found <= FEW:
            lowest, start = _place(k, p, total, below, x_ptr, id_ptr, top, found, V, FEW)
        else:
            lowest, start = _place(k, p, total, below, x_ptr, id_ptr, top, found, V, GATHERED)
    tl.store(place_ptr + 2 * row, lowest)
    tl.store(place_ptr + 2 * row + 1, start)


@triton.jit
def _apply(x_ptr, place_ptr, out_ptr, sx, V, CHUNK: tl.constexpr, DEPENDENT: tl.constexpr):
    wait_for_previous(DEPENDENT)
    row = tl.program_id(1).to(tl.int64)
    i = tl.program_id(0) * CHUNK + tl.arange(0, CHUNK)
    x = tl.load(x_ptr + row * sx + i, mask=i < V, other=0.0)
    lowest, start = tl.load(place_ptr + 2 * row), tl.load(place_ptr + 2 * row + 1)
    kept = (ordered(x) > lowest) | ((ordered(x) == lowest) & (i >= start))
    tl.store(out_ptr + row * V + i, tl.where(kept, x, float("-inf")), mask=i < V)


def filter_top_triton(scores_BNV: Tensor, top_k_B: Tensor, top_p_B: Tensor) -> Tensor:
    """`filter_top` of float32 scores in six kernels."""
    (_, N, V), device = scores_BNV.shape, scores_BNV.device
    x = with_unit_stride(scores_BNV.reshape(-1, V))
    M, out = x.shape[0], torch.empty(scores_BNV.shape, dtype=torch.float32, device=device)
    if not out.numel():
        return out
    chunk = min(max(triton.next_power_of_2(V), 128), CHUNK)
    chunks = triton.cdiv(V, chunk)
    # not views of fewer tensors: their alignment would depend on M, and kernels would be compiled again
    tops, totals, scale = (torch.empty(M, n, dtype=torch.float32, device=device) for n in (chunks, chunks, 2))
    count, found, bound, place = (torch.empty(M, n, dtype=torch.int32, device=device) for n in (LEVELS.value, 1, 2, 2))
    mass = torch.empty(M, 2, dtype=torch.int64, device=device)
    ids = out.view(torch.int32)  # the memory of the result holds the gathered ids until `_apply`
    k, p, sx, options = top_k_B.contiguous(), top_p_B.contiguous(), x.stride(0), dependent_launch(device)
    each = dict(CHUNK=chunk, num_warps=4, **options)
    _tops[(chunks, M)](x, tops, totals, count, found, mass, sx, V, **each)
    _counts[(chunks, M)](x, tops, totals, k, p, scale, count, sx, V, N, CHUNKS=triton.next_power_of_2(chunks), **each)
    _bounds[(M,)](scale, count, k, p, bound, V, N, num_warps=4, **options)
    _gather[(chunks, M)](x, scale, k, p, bound, found, mass, ids, sx, V, N, **each)
    _search[(M,)](
        x, scale, k, p, found, mass, ids, place, sx, V, N, FEW=FEW, GATHERED=GATHERED, num_warps=16, **options
    )
    _apply[(chunks, M)](x, place, out, sx, V, **each)
    return out
