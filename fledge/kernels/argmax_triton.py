"""`argmax_rows` in Triton: one program per row, which keeps the largest number of each place of its blocks; of rows
longer than WHOLE, one per chunk, and one per row for what these find."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from fledge.kernels.implementations import dependent_launch

BLOCK = 8192  # numbers of a chunk, too
WHOLE = 4 * BLOCK
NOWHERE = tl.constexpr(2147483647)


@triton.jit
def _block(row_ptr, i, V):
    """The numbers at indices i of a row of V; -inf beyond its end."""
    return tl.load(row_ptr + i, mask=i < V, other=float("-inf"))


@triton.jit
def _larger(best, at, x, i):
    """The larger numbers of two blocks, and their indices; of equal numbers, those of the first block."""
    larger = x.to(tl.float32) > best
    return tl.where(larger, x.to(tl.float32), best), tl.where(larger, i, at)


@triton.jit(do_not_specialize=["V"])
def _argmax(x_ptr, ids_ptr, out_ptr, sx, V, BLOCK: tl.constexpr, IDS: tl.constexpr, DEPENDENT: tl.constexpr):
    if DEPENDENT:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    row, i = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    best, at = tl.full([BLOCK], float("-inf"), tl.float32), tl.zeros([BLOCK], tl.int32)
    row_ptr = x_ptr + row * sx
    for _ in range(0, V, 4 * BLOCK):  # four blocks at a time, whose loads are under way together
        j, k, l = i + BLOCK, i + 2 * BLOCK, i + 3 * BLOCK
        a, b, c, d = _block(row_ptr, i, V), _block(row_ptr, j, V), _block(row_ptr, k, V), _block(row_ptr, l, V)
        best, at = _larger(best, at, a, i)
        best, at = _larger(best, at, b, j)
        best, at = _larger(best, at, c, k)
        best, at = _larger(best, at, d, l)
        i += 4 * BLOCK
    # of equal numbers, the first; a place with no number above -inf keeps index 0
    first = tl.min(tl.where(best == tl.max(best, 0), at, NOWHERE), 0)
    tl.store(out_ptr + row, tl.load(ids_ptr + first) if IDS else first.to(tl.int64))


@triton.jit(do_not_specialize=["V"])
def _argmax_of_chunk(x_ptr, best_ptr, at_ptr, sx, V, BLOCK: tl.constexpr, DEPENDENT: tl.constexpr):
    """The largest number of a chunk, float32, and its first place, int32; each [M, chunks]."""
    if DEPENDENT:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    row, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    i = chunk * BLOCK + tl.arange(0, BLOCK)
    x = _block(x_ptr + row * sx, i, V).to(tl.float32)
    best = tl.max(x, 0)
    tl.store(best_ptr + row * tl.num_programs(1) + chunk, best)
    tl.store(at_ptr + row * tl.num_programs(1) + chunk, tl.min(tl.where(x == best, i, NOWHERE), 0))


@triton.jit(do_not_specialize=["chunks"])
def _argmax_of_chunks(
    best_ptr, at_ptr, ids_ptr, out_ptr, chunks, CHUNKS: tl.constexpr, IDS: tl.constexpr, DEPENDENT: tl.constexpr
):
    if DEPENDENT:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    row, c = tl.program_id(0).to(tl.int64), tl.arange(0, CHUNKS)
    best = tl.load(best_ptr + row * chunks + c, mask=c < chunks, other=float("-inf"))
    at = tl.load(at_ptr + row * chunks + c, mask=c < chunks, other=NOWHERE)
    first = tl.min(tl.where(best == tl.max(best, 0), at, NOWHERE), 0)
    tl.store(out_ptr + row, tl.load(ids_ptr + first) if IDS else first.to(tl.int64))


def argmax_triton(x: Tensor, ids_V: Tensor | None = None) -> Tensor:
    """The argmax of each row of x [.., V], or its id; numbers are compared as float32."""
    rows = x.reshape(-1, x.shape[-1])
    if rows.stride(1) != 1:
        rows = rows.contiguous()
    (M, V), ids = rows.shape, None if ids_V is None else ids_V.contiguous()
    out, launch = torch.empty(M, dtype=torch.int64, device=x.device), dependent_launch(x.device)
    if M and V <= WHOLE:
        _argmax[(M,)](rows, ids, out, rows.stride(0), V, BLOCK=BLOCK, IDS=ids is not None, num_warps=16, **launch)
    elif M:
        chunks = triton.cdiv(V, BLOCK)
        best, at = (torch.empty(M, chunks, dtype=dtype, device=x.device) for dtype in (torch.float32, torch.int32))
        _argmax_of_chunk[(M, chunks)](rows, best, at, rows.stride(0), V, BLOCK=BLOCK, num_warps=8, **launch)
        CHUNKS = triton.next_power_of_2(chunks)
        _argmax_of_chunks[(M,)](
            best, at, ids, out, chunks, CHUNKS=CHUNKS, IDS=ids is not None, num_warps=1, **launch
        )  # fmt: skip
    return out.view(x.shape[:-1])
