"""`argmax_rows` in Triton: one program per row, which keeps the largest number of each place of its blocks."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from fledge.kernels.implementations import dependent_launch

BLOCK = 8192


@triton.jit(do_not_specialize=["V"])
def _argmax(x_ptr, ids_ptr, out_ptr, sx, V, BLOCK: tl.constexpr, IDS: tl.constexpr, DEPENDENT: tl.constexpr):
    if DEPENDENT:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    row, i = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    best, at = tl.full([BLOCK], float("-inf"), tl.float32), tl.zeros([BLOCK], tl.int32)
    for begin in range(0, V, BLOCK):
        x = tl.load(x_ptr + row * sx + begin + i, mask=begin + i < V, other=float("-inf")).to(tl.float32)
        larger = x > best
        best, at = tl.where(larger, x, best), tl.where(larger, begin + i, at)
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
