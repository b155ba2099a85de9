"""Rotary position embedding in Triton: the angles, which decoding needs too, and the rotation with its gradient."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _cos_sin(position_ptr, frequency_ptr, cos_ptr, sin_ptr, scale, R: tl.constexpr, BR: tl.constexpr):
    s, r = tl.program_id(0).to(tl.int64), tl.arange(0, BR)
    half: tl.constexpr = R // 2
    angle = tl.load(position_ptr + s).to(tl.float32) * tl.load(frequency_ptr + r % half, mask=r < R, other=0.0)
    tl.store(cos_ptr + s * R + r, (tl.cos(angle) * scale).to(cos_ptr.dtype.element_ty), mask=r < R)
    tl.store(sin_ptr + s * R + r, (tl.sin(angle) * scale).to(sin_ptr.dtype.element_ty), mask=r < R)


def cos_sin_triton(
    position_S: Tensor, frequency_F: Tensor, scale: float, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """`cos_sin` of `fledge.ops.rope`, one program per position."""
    position_S, S, R = position_S.contiguous(), position_S.numel(), 2 * frequency_F.numel()
    cos, sin = torch.empty(2, S, R, dtype=dtype, device=position_S.device)
    if S:
        _cos_sin[(S,)](position_S, frequency_F, cos, sin, scale, R=R, BR=triton.next_power_of_2(R))
    return cos, sin


@triton.jit
def _rotate(
    x_ptr, cos_ptr, sin_ptr, out_ptr, sign,
    H: tl.constexpr, D: tl.constexpr, R: tl.constexpr, BH: tl.constexpr, BR: tl.constexpr, BP: tl.constexpr,
):  # fmt: skip
    s = tl.program_id(0).to(tl.int64)
    h, r = tl.arange(0, BH), tl.arange(0, BR)
    half: tl.constexpr = R // 2
    tile = (h < H)[:, None] & (r < half)[None, :]
    offset = h[:, None] * D + r[None, :]
    x1 = tl.load(x_ptr + s * (H * D) + offset, mask=tile, other=0.0).to(tl.float32)
    x2 = tl.load(x_ptr + s * (H * D) + offset + half, mask=tile, other=0.0).to(tl.float32)
    cos = tl.load(cos_ptr + s * R + r, mask=r < half, other=0.0).to(tl.float32)[None, :]
    sin = tl.load(sin_ptr + s * R + r, mask=r < half, other=0.0).to(tl.float32)[None, :] * sign
    dtype = out_ptr.dtype.element_ty
    tl.store(out_ptr + s * (H * D) + offset, (x1 * cos - x2 * sin).to(dtype), mask=tile)
    tl.store(out_ptr + s * (H * D) + offset + half, (x2 * cos + x1 * sin).to(dtype), mask=tile)
    if R < D:
        p = tl.arange(0, BP)
        rest = h[:, None] * D + R + p[None, :]
        rest_tile = (h < H)[:, None] & (p < D - R)[None, :]
        x = tl.load(x_ptr + s * (H * D) + rest, mask=rest_tile, other=0.0)
        tl.store(out_ptr + s * (H * D) + rest, x, mask=rest_tile)


class _Rope(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, cos, sin):
        ctx.save_for_backward(cos, sin)
        return _launch_rotate(x, cos, sin, 1.0)

    @staticmethod
    def backward(ctx, dout):
        return _launch_rotate(dout, *ctx.saved_tensors, -1.0), None, None


def _launch_rotate(x: Tensor, cos: Tensor, sin: Tensor, sign: float) -> Tensor:
    (S, H, D), R = x.shape, cos.shape[-1]
    x = x.contiguous()
    out = torch.empty_like(x)
    if S:
        _rotate[(S,)](
            x, cos, sin, out, sign, H=H, D=D, R=R, BH=triton.next_power_of_2(H),
            BR=triton.next_power_of_2(R // 2), BP=triton.next_power_of_2(max(D - R, 1)),
        )  # fmt: skip
    return out


def rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """`apply_rope` in one kernel. cos and sin are [S, 1, rotated] with equal halves; they get no gradients.

    The backward pass rotates the gradient by the negative angle.
    """
    return _Rope.apply(x, cos.contiguous(), sin.contiguous())
