"""RMSNorm that also returns its input, so that one backward kernel sums both gradients of the residual stream."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

PROGRAMS = 512  # programs of the backward kernel; each takes every 512th row and sums a partial gradient of the gain


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
    x_ptr, gain_ptr, scale_ptr, dy_ptr, dresidual_ptr, dx_ptr, partial_ptr, N,
    E: tl.constexpr, BE: tl.constexpr, RESIDUAL: tl.constexpr,
):  # fmt: skip
    first, e = tl.program_id(0), tl.arange(0, BE)
    inside, stride = e < E, tl.full([], E, tl.int64)
    gain = tl.load(gain_ptr + e, mask=inside, other=0.0).to(tl.float32)
    partial = tl.zeros([BE], tl.float32)
    for row in range(first, N, tl.num_programs(0)):
        at = row * stride + e
        scale = tl.load(scale_ptr + row)
        x = tl.load(x_ptr + at, mask=inside, other=0.0).to(tl.float32) * scale
        dy = tl.load(dy_ptr + at, mask=inside, other=0.0).to(tl.float32)
        partial += dy * x
        dy *= gain
        dx = (dy - x * (tl.sum(dy * x, 0) / E)) * scale
        if RESIDUAL:
            dx += tl.load(dresidual_ptr + at, mask=inside, other=0.0).to(tl.float32)
        tl.store(dx_ptr + at, dx.to(dx_ptr.dtype.element_ty), mask=inside)
    tl.store(partial_ptr + first * E + e, partial, mask=inside)


class _NormWithInput(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, gain, eps):
        ctx.set_materialize_grads(False)
        x = x.contiguous()
        (N, E), out = x.shape, torch.empty_like(x)
        scale = x.new_empty(N, dtype=torch.float32)
        if N:
            _forward[(N,)](x, gain, out, scale, eps, E=E, **_launch_options(E))
        ctx.save_for_backward(x, gain, scale)
        return out, x.view_as(x)

    @staticmethod
    def backward(ctx, dy, dresidual):
        x, gain, scale = ctx.saved_tensors
        if dy is None:
            return dresidual, None, None
        (N, E), dy, dx = x.shape, dy.contiguous(), torch.empty_like(x)
        dresidual = None if dresidual is None else dresidual.contiguous()
        partials = x.new_empty((min(N, PROGRAMS), E), dtype=torch.float32)
        if N:
            _backward[(len(partials),)](
                x, gain, scale, dy, dresidual, dx, partials, N, E=E, RESIDUAL=dresidual is not None,
                **_launch_options(E),
            )  # fmt: skip
        return dx, partials.sum(0).to(gain.dtype) if ctx.needs_input_grad[1] else None, None


def _launch_options(E: int) -> dict[str, int]:
    BE = triton.next_power_of_2(E)
    return dict(BE=BE, num_warps=4 if BE <= 1024 else 8 if BE <= 4096 else 16)


def norm_with_input(x_NE: Tensor, gain_E: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """(x / rms(x) * gain, x), computed in float32. Both outputs have the shape and dtype of x, [N, E].

    The second output is x, for the residual connection. The backward kernel adds its gradient to the gradient of the
    norm, which saves a separate addition over [N, E].
    """
    return _NormWithInput.apply(x_NE, gain_E, eps)
