"""The operations of `ops.topk` in Triton: a program per chunk of a row, then a program per row for the chunks' results.

In `largest` and `likeliest`, a number and its place are one integer, a key: the larger of two keys has the larger
number or, of equal numbers, the first place. All keys of a row are distinct: the largest key can be found and removed k
times, in registers. A row's results do not depend on the other rows. Other kernels use `wait_for_previous`, `ordered`
and `keys_of` too.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from fledge.ops.device import dependent_launch, with_unit_stride

CHUNK = 8192  # numbers per program of the argmax
NOWHERE = tl.constexpr(2147483647)
BLOCK = 2048  # numbers of a chunk
NOTHING = tl.constexpr(-(2**63))  # less than the key of -inf
LOWER_BITS = tl.constexpr(2**31 - 1)


@triton.jit
def wait_for_previous(DEPENDENT: tl.constexpr):
    """Waits for the kernel in front, which a dependent launch overlaps, and lets the next kernel start."""
    if DEPENDENT:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def _first_largest(x, at):
    """The largest of float32 numbers `x`, and its place, the first among equal numbers. NaN counts as -inf, so that the
    place is always in `at`."""
    x = tl.where(x == x, x, float("-inf"))
    best = tl.max(x, 0)
    return best, tl.min(tl.where(x == best, at, NOWHERE), 0)


@triton.jit(do_not_specialize=["V"])
def _argmax_of_chunk(
    x_ptr, best_ptr, at_ptr, ids_ptr, out_ptr, sx, V,
    BLOCK: tl.constexpr, WHOLE: tl.constexpr, IDS: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """The largest number of a chunk, float32, and its place, int32, each [M, chunks]; for a WHOLE row, the result."""
    wait_for_previous(DEPENDENT)
    row, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    i = chunk * BLOCK + tl.arange(0, BLOCK)
    best, at = _first_largest(tl.load(x_ptr + row * sx + i, mask=i < V, other=float("-inf")).to(tl.float32), i)
    if WHOLE:
        tl.store(out_ptr + row, tl.load(ids_ptr + at) if IDS else at.to(tl.int64))
    else:
        tl.store(best_ptr + row * tl.num_programs(1) + chunk, best)
        tl.store(at_ptr + row * tl.num_programs(1) + chunk, at)


@triton.jit(do_not_specialize=["chunks"])
def _argmax_of_chunks(
    best_ptr, at_ptr, ids_ptr, out_ptr, chunks, CHUNKS: tl.constexpr, IDS: tl.constexpr, DEPENDENT: tl.constexpr
):
    wait_for_previous(DEPENDENT)
    row, c = tl.program_id(0).to(tl.int64), tl.arange(0, CHUNKS)
    best = tl.load(best_ptr + row * chunks + c, mask=c < chunks, other=float("-inf"))
    _, at = _first_largest(best, tl.load(at_ptr + row * chunks + c, mask=c < chunks, other=NOWHERE))
    tl.store(out_ptr + row, tl.load(ids_ptr + at) if IDS else at.to(tl.int64))


def argmax_triton(x: Tensor, ids_V: Tensor | None = None) -> Tensor:
    """The argmax of each row of x [.., V], or its id; numbers are compared as float32."""
    rows = with_unit_stride(x.reshape(-1, x.shape[-1]))
    (M, V), device = rows.shape, x.device
    ids, chunks = None if ids_V is None else ids_V.contiguous(), triton.cdiv(V, CHUNK)
    options = dict(IDS=ids is not None, **dependent_launch(device))
    out = torch.empty(M, dtype=torch.int64, device=device)
    best = at = out  # written only where a row has several chunks
    if chunks > 1:
        best, at = (torch.empty(M, chunks, dtype=dtype, device=device) for dtype in (torch.float32, torch.int32))
    if M:
        block = min(triton.next_power_of_2(V), CHUNK)
        _argmax_of_chunk[(M, chunks)](
            rows, best, at, ids, out, rows.stride(0), V, BLOCK=block, WHOLE=chunks == 1,
            num_warps=8 if block > 1024 else 1, **options,
        )  # fmt: skip
    if M and chunks > 1:
        _argmax_of_chunks[(M,)](
            best, at, ids, out, chunks, CHUNKS=triton.next_power_of_2(chunks), num_warps=1, **options
        )  # fmt: skip
    return out.view(x.shape[:-1])


@triton.jit
def _in_order(bits):
    """The bits of float32 numbers as int32 in the same order; the inverse is the same function."""
    return bits ^ ((bits >> 31) & LOWER_BITS)


@triton.jit
def ordered(x):
    """int32 numbers in the same order as float32 numbers; equal for equal ones, and largest for NaN."""
    x = tl.where(x == 0, 0.0, x)  # -0 equals 0
    bits = x.to(tl.int32, bitcast=True)
    # all NaN become one NaN above +inf, set by bits: compilers do not distinguish NaN values
    bits = tl.where((bits & 0x7FFFFFFF) > 0x7F800000, 0x7FC00000, bits)
    return _in_order(bits)


@triton.jit
def keys_of(x, place):
    """The keys of float32 numbers and their places (int32)."""
    return (ordered(x).to(tl.int64) << 32) | (place ^ LOWER_BITS).to(tl.int64)


@triton.jit
def _store_largest(key, value_ptr, place_ptr, top, log_total, K: tl.constexpr, LOG_SOFTMAX: tl.constexpr):
    """Stores the numbers and the places of the K largest keys."""
    for k in range(K):
        best = tl.max(key, 0)
        key = tl.where(key == best, NOTHING, key)
        value = _in_order((best >> 32).to(tl.int32)).to(tl.float32, bitcast=True)
        if LOG_SOFTMAX:
            value = value - top - log_total
        tl.store(value_ptr + k, value)
        tl.store(place_ptr + k, (best & LOWER_BITS) ^ LOWER_BITS)


@triton.jit
def _largest_of_chunk(
    x_ptr, key_ptr, top_ptr, total_ptr, value_ptr, place_ptr, sx, W,
    K: tl.constexpr, BLOCK: tl.constexpr, WHOLE: tl.constexpr, LOG_SOFTMAX: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """The K largest keys of a chunk, its largest number and its sum of exponentials; of a WHOLE row, the results."""
    wait_for_previous(DEPENDENT)
    chunk, row, chunks = tl.program_id(0), tl.program_id(1).to(tl.int64), tl.num_programs(0)
    i = chunk * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + row * sx + i, mask=i < W, other=float("-inf")).to(tl.float32)
    key = tl.where(i < W, keys_of(x, i), NOTHING)
    top, total, log_total = 0.0, 0.0, 0.0
    if LOG_SOFTMAX:
        top = tl.max(x, 0)
        total = tl.sum(tl.exp(x - tl.where(top == float("-inf"), 0.0, top)), 0)
        log_total = tl.log(total)
    if WHOLE:
        _store_largest(key, value_ptr + row * K, place_ptr + row * K, top, log_total, K, LOG_SOFTMAX)
    else:
        at = row * chunks + chunk
        if LOG_SOFTMAX:
            tl.store(top_ptr + at, top)
            tl.store(total_ptr + at, total)
        for k in range(K):
            best = tl.max(key, 0)
            key = tl.where(key == best, NOTHING, key)
            tl.store(key_ptr + at * K + k, best)


@triton.jit
def _largest_of_row(
    key_ptr, top_ptr, total_ptr, value_ptr, place_ptr, chunks,
    K: tl.constexpr, KEYS: tl.constexpr, CHUNKS: tl.constexpr, LOG_SOFTMAX: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    wait_for_previous(DEPENDENT)
    row, i, c = tl.program_id(0).to(tl.int64), tl.arange(0, KEYS), tl.arange(0, CHUNKS)
    key = tl.load(key_ptr + row * chunks * K + i, mask=i < chunks * K, other=NOTHING)
    top, log_total = 0.0, 0.0
    if LOG_SOFTMAX:
        tops = tl.load(top_ptr + row * chunks + c, mask=c < chunks, other=float("-inf"))
        totals = tl.load(total_ptr + row * chunks + c, mask=c < chunks, other=0.0)
        top = tl.max(tops, 0)
        log_total = tl.log(tl.sum(totals * tl.exp(tops - top), 0))
    _store_largest(key, value_ptr + row * K, place_ptr + row * K, top, log_total, K, LOG_SOFTMAX)


def largest_triton(x: Tensor, k: int, log_softmax: bool) -> tuple[Tensor, Tensor]:
    """The k largest numbers of each row of x [.., W], float32, and their places, int64, each [.., k]; k is at most W.

    With `log_softmax`, from each number of a row the logarithm of the row's sum of exponentials is subtracted.
    """
    rows = with_unit_stride(x.reshape(-1, x.shape[-1]))
    (M, W), chunks, device = rows.shape, triton.cdiv(x.shape[-1], BLOCK), x.device
    values = torch.empty(*x.shape[:-1], k, dtype=torch.float32, device=device)
    places = torch.empty(values.shape, dtype=torch.int64, device=device)
    if not M:
        return values, places
    whole, options = chunks == 1, dict(LOG_SOFTMAX=log_softmax, **dependent_launch(device))
    keys, tops, totals = places, values, values  # read and written only where a row has several chunks
    if not whole:
        keys = torch.empty(M * chunks * k, dtype=torch.int64, device=device)
        tops, totals = torch.empty(2, M * chunks, dtype=torch.float32, device=device)
    _largest_of_chunk[(chunks, M)](
        rows, keys, tops, totals, values, places, rows.stride(0), W,
        K=k, BLOCK=min(BLOCK, triton.next_power_of_2(W)), WHOLE=whole, num_warps=4 if W > 512 else 1, **options,
    )  # fmt: skip
    if not whole:
        KEYS = triton.next_power_of_2(chunks * k)
        _largest_of_row[(M,)](
            keys, tops, totals, values, places, chunks,
            K=k, KEYS=KEYS, CHUNKS=triton.next_power_of_2(chunks), num_warps=4 if KEYS > 512 else 1, **options,
        )  # fmt: skip
    return values, places
