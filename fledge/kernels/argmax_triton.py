"""`argmax_rows` in Triton: one program per row, which keeps the largest number of each place of its blocks."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from fledge.kernels.implementations import dependent_launch

BLOCK = 8192


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
    first = tl.min(tl.where(best == tl.max(best, 0), at, 2147483647), 0)
    tl.store(out_ptr + row, tl.load(ids_ptr + first) if IDS else first.to(tl.int64))


def argmax_triton(x: Tensor, ids_V: Tensor | None = None) -> Tensor:
    """The argmax of each row of x [.., V], or its id; numbers are compared as float32."""
    rows = x.reshape(-1, x.shape[-1])
    if rows.stride(1) != 1:
        rows = rows.contiguous()
    out = torch.empty(rows.shape[0], dtype=torch.int64, device=x.device)
    if out.numel():
        _argmax[(out.numel(),)](
            rows, None if ids_V is None else ids_V.contiguous(), out, rows.stride(0), rows.shape[1], BLOCK=BLOCK,
            IDS=ids_V is not None, num_warps=16, **dependent_launch(x.device),
        )  # fmt: skip
    return out.view(x.shape[:-1])
