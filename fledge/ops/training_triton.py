"""The fused operations of training in Triton: RMSNorm, RoPE, SwiGLU's activation, and adding rows."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

PROGRAMS = 512  # programs of the backward kernel; each takes every 512th row and sums a partial gradient of the gain


@triton.jit
def _norm_forward(x_ptr, gain_ptr, out_ptr, scale_ptr, eps, E: tl.constexpr, BE: tl.constexpr):
    row, e = tl.program_id(0).to(tl.int64), tl.arange(0, BE)
    x = tl.load(x_ptr + row * E + e, mask=e < E, other=0.0).to(tl.float32)
    gain = tl.load(gain_ptr + e, mask=e < E, other=0.0).to(tl.float32)
    scale = 1.0 / tl.sqrt(tl.sum(x * x, 0) / E + eps)
    tl.store(scale_ptr + row, scale)
    tl.store(out_ptr + row * E + e, (x * scale * gain).to(out_ptr.dtype.element_ty), mask=e < E)


@triton.jit(do_not_specialize=["N"])
def _norm_backward(
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
            _norm_forward[(N,)](x, gain, out, scale, eps, E=E, **_launch_options(E))
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
            _norm_backward[(len(partials),)](
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


@triton.jit
def _silu_mul(g_ptr, u_ptr, out_ptr, n, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    g = tl.load(g_ptr + at, mask=at < n, other=0.0).to(tl.float32)
    u = tl.load(u_ptr + at, mask=at < n, other=0.0).to(tl.float32)
    tl.store(out_ptr + at, (g * tl.sigmoid(g) * u).to(out_ptr.dtype.element_ty), mask=at < n)


@triton.jit
def _silu_mul_backward(g_ptr, u_ptr, da_ptr, n, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    g = tl.load(g_ptr + at, mask=at < n, other=0.0).to(tl.float32)
    u = tl.load(u_ptr + at, mask=at < n, other=0.0).to(tl.float32)
    da = tl.load(da_ptr + at, mask=at < n, other=0.0).to(tl.float32)
    s = tl.sigmoid(g)
    silu = g * s
    dtype = g_ptr.dtype.element_ty
    tl.store(g_ptr + at, (da * u * s * (1.0 + g * (1.0 - s))).to(dtype), mask=at < n)
    tl.store(u_ptr + at, (da * silu).to(dtype), mask=at < n)
    tl.store(da_ptr + at, (silu * u).to(dtype), mask=at < n)


def silu_mul(g: Tensor, u: Tensor) -> Tensor:
    """silu(g) u in the dtype and shape of g, computed in float32. Both tensors must be contiguous."""
    out = torch.empty_like(g)
    if n := g.numel():
        _silu_mul[(triton.cdiv(n, 1024),)](g, u, out, n, BLOCK=1024)
    return out


def silu_mul_backward_(g: Tensor, u: Tensor, da: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Overwrites g, u and da by dg, du and a = silu(g) u, and returns them; `da` is the gradient of a."""
    if n := g.numel():
        _silu_mul_backward[(triton.cdiv(n, 1024),)](g, u, da, n, BLOCK=1024)
    return g, u, da


@triton.jit
def _add_rows(total_ptr, rows_ptr, x_ptr, O, BLOCK: tl.constexpr):
    row = tl.load(rows_ptr + tl.program_id(0)).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + tl.program_id(0).to(tl.int64) * O + at, mask=at < O, other=0.0)
    total = tl.load(total_ptr + row * O + at, mask=at < O, other=0.0)
    tl.store(total_ptr + row * O + at, total + x.to(tl.float32), mask=at < O)


def add_rows_(total_NO: Tensor, rows_S: Tensor, x_SO: Tensor) -> None:
    """total[rows] += x, where total is float32 and `rows_S` has S row indices.

    The additions are not atomic: for a row index that occurs more than once, the rows of x must be zero.
    """
    (S, O), x = x_SO.shape, x_SO.contiguous()
    if S:
        _add_rows[(S, triton.cdiv(O, 1024))](total_NO, rows_S, x, O, BLOCK=1024)


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
