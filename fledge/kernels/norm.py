"""RMSNorm beside the residual stream it reads: both gradients for the stream in one kernel."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

PROGRAMS = 512  # each takes rows in turn and sums its share of the gains' gradient


@triton.jit
def _forward(x_ptr, gain_ptr, out_ptr, scale_ptr, eps, E: tl.constexpr, BE: tl.constexpr):
    row, e = tl.program_id(0).to(tl.int64), tl.arange(0, BE)
    x = tl.load(x_ptr + row * E + e, mask=e < E, other=0.0).to(tl.float32)
    gain = tl.load(gain_ptr + e, mask=e < E, other=0.0).to(tl.float32)
    scale = 1.0 / tl.sqrt(tl.sum(x * x, 0) / E + eps)
    tl.store(scale_ptr + row, scale)
    tl.store(out_ptr + row * E + e, (x * scale * gain).to(out_ptr.dtype.element_ty), mask=e < E)


@triton.jit(do_not_specialize=["N"])
def _backward(
    x_ptr, gain_ptr, scale_ptr, dy_ptr, down_ptr, dx_ptr, share_ptr, N,
    E: tl.constexpr, BE: tl.constexpr, DOWN: tl.constexpr,
):  # fmt: skip
    first, e = tl.program_id(0), tl.arange(0, BE)
    inside, far = e < E, tl.full([], E, tl.int64)
    gain = tl.load(gain_ptr + e, mask=inside, other=0.0).to(tl.float32)
    share = tl.zeros([BE], tl.float32)
    for row in range(first, N, tl.num_programs(0)):
        at = row * far + e
        scale = tl.load(scale_ptr + row)
        x = tl.load(x_ptr + at, mask=inside, other=0.0).to(tl.float32) * scale
        dy = tl.load(dy_ptr + at, mask=inside, other=0.0).to(tl.float32)
        share += dy * x
        dy *= gain
        dx = (dy - x * (tl.sum(dy * x, 0) / E)) * scale
        if DOWN:
            dx += tl.load(down_ptr + at, mask=inside, other=0.0).to(tl.float32)
        tl.store(dx_ptr + at, dx.to(dx_ptr.dtype.element_ty), mask=inside)
    tl.store(share_ptr + first * E + e, share, mask=inside)


class _NormWithInput(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, gain, eps):
        ctx.set_materialize_grads(False)
        x = x.contiguous()
        (N, E), out = x.shape, torch.empty_like(x)
        scale = x.new_empty(N, dtype=torch.float32)
        if N:
            _forward[(N,)](x, gain, out, scale, eps, E=E, **_width(E))
        ctx.save_for_backward(x, gain, scale)
        return out, x.view_as(x)

    @staticmethod
    def backward(ctx, dy, down):
        x, gain, scale = ctx.saved_tensors
        if dy is None:
            return down, None, None
        (N, E), dy, dx = x.shape, dy.contiguous(), torch.empty_like(x)
        down = None if down is None else down.contiguous()
        shares = x.new_empty((min(N, PROGRAMS), E), dtype=torch.float32)
        if N:
            _backward[(len(shares),)](x, gain, scale, dy, down, dx, shares, N, E=E, DOWN=down is not None, **_width(E))
        return dx, shares.sum(0).to(gain.dtype) if ctx.needs_input_grad[1] else None, None


def _width(E: int) -> dict[str, int]:
    BE = triton.next_power_of_2(E)
    return dict(BE=BE, num_warps=4 if BE <= 1024 else 8 if BE <= 4096 else 16)


def norm_with_input(x_NE: Tensor, gain_E: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """x / rms(x) * gain, and x itself to be read further: what the readers of both send back is summed where the
    norm's own gradient is made. Computed in float32."""
    return _NormWithInput.apply(x_NE, gain_E, eps)
