"""`argmax_rows` in Triton: one program per chunk of a row, and one per row for what these find."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from fledge.ops.implementations import dependent_launch

CHUNK = 8192  # numbers of a program
NOWHERE = tl.constexpr(2147483647)


@triton.jit
def _first_largest(x, at):
    """The largest of some float32 numbers, and its place; of equal ones, the first place. NaN counts as -inf, so that
    the place always is one of theirs."""
    x = tl.where(x == x, x, float("-inf"))
    best = tl.max(x, 0)
    return best, tl.min(tl.where(x == best, at, NOWHERE), 0)


@triton.jit(do_not_specialize=["V"])
def _argmax_of_chunk(
    x_ptr, best_ptr, at_ptr, ids_ptr, out_ptr, sx, V,
    BLOCK: tl.constexpr, WHOLE: tl.constexpr, IDS: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """The largest number of a chunk, float32, and its place, int32; each [M, chunks]. Of a WHOLE row, the result."""
    if DEPENDENT:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
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
    if DEPENDENT:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    row, c = tl.program_id(0).to(tl.int64), tl.arange(0, CHUNKS)
    best = tl.load(best_ptr + row * chunks + c, mask=c < chunks, other=float("-inf"))
    _, at = _first_largest(best, tl.load(at_ptr + row * chunks + c, mask=c < chunks, other=NOWHERE))
    tl.store(out_ptr + row, tl.load(ids_ptr + at) if IDS else at.to(tl.int64))


def argmax_triton(x: Tensor, ids_V: Tensor | None = None) -> Tensor:
    """The argmax of each row of x [.., V], or its id; numbers are compared as float32."""
    rows = x.reshape(-1, x.shape[-1])
    if rows.stride(1) != 1:
        rows = rows.contiguous()
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
