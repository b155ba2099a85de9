"""`argmax_rows` in Triton: one program per row, which keeps the largest number of each place of its blocks."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 8192


@triton.jit(do_not_specialize=["V"])
def _argmax(x_ptr, out_ptr, sx, V, BLOCK: tl.constexpr):
    row, i = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    best, at = tl.full([BLOCK], float("-inf"), tl.float32), tl.zeros([BLOCK], tl.int32)
    for begin in range(0, V, BLOCK):
        x = tl.load(x_ptr + row * sx + begin + i, mask=begin + i < V, other=float("-inf")).to(tl.float32)
        larger = x > best
        best, at = tl.where(larger, x, best), tl.where(larger, begin + i, at)
    # of equal numbers, the first; a place with no number above -inf keeps index 0
    first = tl.min(tl.where(best == tl.max(best, 0), at, 2147483647), 0)
    tl.store(out_ptr + row, first.to(tl.int64))


def argmax_triton(x: Tensor) -> Tensor:
    """The argmax of each row of x [.., V]; numbers are compared as float32."""
    rows = x.reshape(-1, x.shape[-1])
    if rows.stride(1) != 1:
        rows = rows.contiguous()
    out = torch.empty(rows.shape[0], dtype=torch.int64, device=x.device)
    if out.numel():
        _argmax[(out.numel(),)](rows, out, rows.stride(0), rows.shape[1], BLOCK=BLOCK, num_warps=16)
    return out.view(x.shape[:-1])
