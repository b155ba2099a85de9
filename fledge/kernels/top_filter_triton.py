"""`filter_top` in Triton, without a sort.

Tokens are ordered by score and, where scores are equal, by id. What is kept of a row is what does not come before one
place of this order, which is found in three steps:

1. The tokens are counted in LEVELS levels by their distance from the largest score, WIDTH apart, and the weights
   exp(score - largest) of each level are added. (The last level has all that are further away.)
2. The level that contains the place is known from these sums. The ids of its tokens, and with top-k those of all levels
   above it, are gathered: mostly some hundreds.
3. One program per row finds the k-th score among them, and then the place where the sum of weights exceeds 1 - p of
   all, bit by bit.

Weights are integers, multiples of 2^-40 of the largest, so that their sums are exact and do not depend on an order.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from fledge.kernels.implementations import dependent_launch
from fledge.kernels.likeliest_triton import _in_order, ordered

CHUNK = 2048  # scores of a program
LANES = 128  # of these, scores that are counted at a time
LEVELS = tl.constexpr(32)
WIDTH = tl.constexpr(0.75)  # of a level, in nats
GATHERED = 4096  # ids that a program searches at a time
LOWEST, HIGHEST = tl.constexpr(-(2**31)), tl.constexpr(2**31 - 1)  # less and more than every score as an integer
NOWHERE = tl.constexpr(2**31 - 1)  # more than every id
ONE = tl.constexpr(float(2**40))  # the weight of the largest score


@triton.jit
def _largest(top_ptr, row, chunks, CHUNKS: tl.constexpr):
    """The largest score of a row, from those of its chunks; 0 if all are -inf."""
    c = tl.arange(0, CHUNKS)
    top = tl.max(tl.load(top_ptr + row * chunks + c, mask=c < chunks, other=float("-inf")), 0)
    return tl.where(top == float("-inf"), 0.0, top)


@triton.jit
def _level(x, top):
    return tl.minimum((top - x) * (1.0 / WIDTH), LEVELS - 1).to(tl.int32)


@triton.jit
def _weight(x, top):
    return (tl.exp(x - top) * ONE).to(tl.int64)


@triton.jit
def _tops(x_ptr, top_ptr, found_ptr, sx, V, CHUNK: tl.constexpr, DEPENDENT: tl.constexpr):
    """The largest score of a chunk. The first program of a row says that no ids are gathered yet."""
    if DEPENDENT:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    chunk, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    i = chunk * CHUNK + tl.arange(0, CHUNK)
    x = tl.load(x_ptr + row * sx + i, mask=i < V, other=float("-inf"))
    tl.store(top_ptr + row * tl.num_programs(0) + chunk, tl.max(x, 0))
    tl.store(found_ptr + row, 0, mask=chunk == 0)


@triton.jit
def _sums(
    x_ptr, top_ptr, count_ptr, mass_ptr, sx, V,
    CHUNKS: tl.constexpr, CHUNK: tl.constexpr, LANES: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """The number of scores of each level, and the sum of their weights, in a chunk."""
    if DEPENDENT:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    chunk, row, chunks = tl.program_id(0), tl.program_id(1).to(tl.int64), tl.num_programs(0)
    top = _largest(top_ptr, row, chunks, CHUNKS)
    level = tl.arange(0, LEVELS)
    count, mass = tl.zeros([LEVELS, LANES], tl.int32), tl.zeros([LEVELS, LANES], tl.int64)
    for part in tl.static_range(CHUNK // LANES):
        i = chunk * CHUNK + part * LANES + tl.arange(0, LANES)
        x = tl.load(x_ptr + row * sx + i, mask=i < V, other=float("-inf"))
        here = (_level(x, top)[None, :] == level[:, None]) & (i < V)[None, :]
        count += here.to(tl.int32)
        mass += tl.where(here, _weight(x, top)[None, :], 0)
    at = (row * chunks + chunk) * LEVELS + level
    tl.store(count_ptr + at, tl.sum(count, 1))
    tl.store(mass_ptr + at, tl.sum(mass, 1))


@triton.jit
def _bounds(count_ptr, mass_ptr, row, chunks, k, p, CHUNKS: tl.constexpr):
    """The first and the last level of which ids are gathered, the weight of the levels below, and that of all."""
    c, level = tl.arange(0, CHUNKS), tl.arange(0, LEVELS)
    at = (row * chunks + c)[:, None] * LEVELS + level[None, :]
    count = tl.sum(tl.load(count_ptr + at, mask=(c < chunks)[:, None], other=0), 0)
    mass = tl.sum(tl.load(mass_ptr + at, mask=(c < chunks)[:, None], other=0), 0)
    total = tl.sum(mass, 0)
    through, reached = tl.cumsum(count, 0), tl.cumsum(mass, 0)
    # the last level that is needed: of the k-th score, or where the sum from below exceeds 1 - p
    fits = total - reached <= ((1.0 - p) * total.to(tl.float64)).to(tl.int64)
    enough = tl.where(k > 0, through >= tl.minimum(k, tl.sum(count, 0)), fits)
    last = tl.min(tl.where(enough, level, LEVELS - 1), 0)
    first = tl.where(k > 0, 0, last)
    below = tl.sum(tl.where(level > last, mass, 0), 0)
    return first, last, below, total


@triton.jit
def _gather(
    x_ptr, top_ptr, count_ptr, mass_ptr, k_ptr, p_ptr, found_ptr, id_ptr, sx, V, N,
    CHUNKS: tl.constexpr, CHUNK: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Adds the ids of a chunk that are in the levels to search to those of its row, in any order."""
    if DEPENDENT:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    chunk, row, chunks = tl.program_id(0), tl.program_id(1).to(tl.int64), tl.num_programs(0)
    k, p = tl.load(k_ptr + row // N), tl.load(p_ptr + row // N)
    if (k > 0) | (p < 1.0):
        top = _largest(top_ptr, row, chunks, CHUNKS)
        first, last, _, _ = _bounds(count_ptr, mass_ptr, row, chunks, k, p, CHUNKS)
        i = chunk * CHUNK + tl.arange(0, CHUNK)
        x = tl.load(x_ptr + row * sx + i, mask=i < V, other=float("-inf"))
        level = _level(x, top)
        chosen = (level >= first) & (level <= last) & (i < V)
        many = tl.sum(chosen.to(tl.int32), 0)
        if many > 0:
            to = tl.atomic_add(found_ptr + row, many, sem="relaxed") + tl.cumsum(chosen.to(tl.int32), 0) - 1
            tl.store(id_ptr + row * V + to, i, mask=chosen)


@triton.jit
def _read(x_ptr, id_ptr, top, at, found, GATHERED: tl.constexpr):
    """Gathered ids, their scores as ordered integers, and their weights; less than all scores and 0 behind the last."""
    j = at + tl.arange(0, GATHERED)
    i = tl.load(id_ptr + j, mask=j < found, other=0)
    x = tl.load(x_ptr + i, mask=j < found, other=float("-inf"))
    return i, tl.where(j < found, ordered(x), LOWEST), tl.where(j < found, _weight(x, top), 0)


@triton.jit
def _count(low, first, x_ptr, id_ptr, top, found, GATHERED: tl.constexpr):
    """How many gathered scores are at least `low`. `first` are the scores of the first ids, which are in registers."""
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
    """How many gathered scores that equal `value` have an id below `end`."""
    count = tl.sum(((first == value) & (ids < end)).to(tl.int32), 0)
    for at in range(GATHERED, found, GATHERED):
        i, score, _ = _read(x_ptr, id_ptr, top, at, found, GATHERED)
        count += tl.sum(((score == value) & (i < end)).to(tl.int32), 0)
    return count


@triton.jit
def _search(
    x_ptr, top_ptr, count_ptr, mass_ptr, k_ptr, p_ptr, found_ptr, id_ptr, lowest_ptr, start_ptr, sx, V, chunks, N,
    CHUNKS: tl.constexpr, GATHERED: tl.constexpr, ID_BITS: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """The lowest score that a row keeps, and from which id on this score is kept. Scores are ordered integers."""
    if DEPENDENT:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    row = tl.program_id(0).to(tl.int64)
    k, p, found = tl.load(k_ptr + row // N), tl.load(p_ptr + row // N), tl.load(found_ptr + row)
    x_ptr += row * sx
    id_ptr += row * V
    top = _largest(top_ptr, row, chunks, CHUNKS)
    ids, first, weights = _read(x_ptr, id_ptr, top, 0, found, GATHERED)
    lowest, start = tl.full((), LOWEST, tl.int32), tl.full((), 0, tl.int32)
    if k > 0:  # the largest number that so many scores reach
        enough = tl.minimum(k, V).to(tl.int32)
        lowest = tl.where(_count(0, first, x_ptr, id_ptr, top, found, GATHERED) >= enough, 0, LOWEST)
        for bit in range(31):
            higher = lowest + (1 << (30 - bit))
            many = _count(higher, first, x_ptr, id_ptr, top, found, GATHERED)
            lowest = tl.where(many >= enough, higher, lowest)
    if p < 1.0:
        _, _, below, total = _bounds(count_ptr, mass_ptr, row, chunks, k, p, CHUNKS)
        if k > 0:
            total = _mass(lowest, HIGHEST, first, weights, x_ptr, id_ptr, top, found, GATHERED)
        below = tl.where(k > 0, 0, below)
        left = ((1.0 - p) * total.to(tl.float64)).to(tl.int64) - below  # what may be left out of the gathered ones
        # the largest number, but no larger than the largest score, below which no more is
        largest = ordered(top)
        negative = _mass(lowest, 0, first, weights, x_ptr, id_ptr, top, found, GATHERED)
        value = tl.where((negative <= left) & (largest >= 0), 0, LOWEST)
        for bit in range(31):
            higher = value + (1 << (30 - bit))
            less = _mass(lowest, higher, first, weights, x_ptr, id_ptr, top, found, GATHERED)
            value = tl.where((less <= left) & (higher <= largest), higher, value)
        # of the scores that equal it, those with the lowest ids, as many as fit, but one stays
        left -= _mass(lowest, value, first, weights, x_ptr, id_ptr, top, found, GATHERED)
        each = _weight(_in_order(value).to(tl.float32, bitcast=True), top)
        equal = _equal_before(NOWHERE, value, first, ids, x_ptr, id_ptr, top, found, GATHERED)
        out = tl.minimum(left // tl.maximum(each, 1), equal - 1)
        if out > 0:
            for bit in range(ID_BITS):
                later = start + (1 << (ID_BITS - 1 - bit))
                before = _equal_before(later, value, first, ids, x_ptr, id_ptr, top, found, GATHERED)
                start = tl.where(before <= out, later, start)
        lowest = value
    tl.store(lowest_ptr + row, lowest)
    tl.store(start_ptr + row, start)


@triton.jit
def _apply(x_ptr, lowest_ptr, start_ptr, out_ptr, sx, V, CHUNK: tl.constexpr, DEPENDENT: tl.constexpr):
    if DEPENDENT:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    row = tl.program_id(1).to(tl.int64)
    i = tl.program_id(0) * CHUNK + tl.arange(0, CHUNK)
    x = tl.load(x_ptr + row * sx + i, mask=i < V, other=0.0)
    lowest, start = tl.load(lowest_ptr + row), tl.load(start_ptr + row)
    kept = (ordered(x) > lowest) | ((ordered(x) == lowest) & (i >= start))
    tl.store(out_ptr + row * V + i, tl.where(kept, x, float("-inf")), mask=i < V)


def filter_top_triton(scores_BNV: Tensor, top_k_B: Tensor, top_p_B: Tensor) -> Tensor:
    """`filter_top` of float32 scores in five kernels."""
    (_, N, V), device = scores_BNV.shape, scores_BNV.device
    x = scores_BNV.reshape(-1, V)
    x = x if x.stride(1) == 1 else x.contiguous()
    M, out = x.shape[0], torch.empty(scores_BNV.shape, dtype=torch.float32, device=device)
    if not out.numel():
        return out
    chunk = min(max(triton.next_power_of_2(V), LANES), CHUNK)
    chunks = triton.cdiv(V, chunk)
    top = torch.empty(M, chunks, dtype=torch.float32, device=device)
    count = torch.empty(M, chunks, LEVELS.value, dtype=torch.int32, device=device)
    mass = torch.empty(count.shape, dtype=torch.int64, device=device)
    found, lowest, start = torch.empty(3, M, dtype=torch.int32, device=device)
    ids = out.view(torch.int32)  # the memory of the result holds the gathered ids until then
    k, p, sx = top_k_B.contiguous(), top_p_B.contiguous(), x.stride(0)
    many, options = dict(CHUNKS=triton.next_power_of_2(chunks)), dependent_launch(device)
    _tops[(chunks, M)](x, top, found, sx, V, CHUNK=chunk, num_warps=4, **options)
    _sums[(chunks, M)](x, top, count, mass, sx, V, CHUNK=chunk, LANES=LANES, num_warps=4, **many, **options)
    sums = top, count, mass, k, p, found
    _gather[(chunks, M)](x, *sums, ids, sx, V, N, CHUNK=chunk, num_warps=4, **many, **options)
    _search[(M,)](
        x, *sums, ids, lowest, start, sx, V, chunks, N, GATHERED=min(GATHERED, triton.next_power_of_2(V)),
        ID_BITS=V.bit_length(), num_warps=8, **many, **options,
    )  # fmt: skip
    _apply[(chunks, M)](x, lowest, start, out, sx, V, CHUNK=chunk, num_warps=4, **options)
    return out
