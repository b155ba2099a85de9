"""The small operations of a decoder layer in Triton, for a few rows.

At batch 1 each operation takes little more than a launch, so that the aim is one launch and enough programs: a row each
for the norm, a row and some heads each for the rotation, 1,024 outputs of a row each for the activation.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from fledge.ops.device import dependent_launch, with_unit_stride
from fledge.ops.topk_triton import wait_for_previous

BLOCK = 1024
HEADS = 8  # heads of a row per program of the rotation: with a program per head, launches would limit many rows


@triton.jit
def _add_rms_norm(
    x_ptr, residual_ptr, weight_ptr, out_ptr, sum_ptr, sx, sr, eps,
    E: tl.constexpr, BE: tl.constexpr, RESIDUAL: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    wait_for_previous(DEPENDENT)
    row, e = tl.program_id(0).to(tl.int64), tl.arange(0, BE)
    x = tl.load(x_ptr + row * sx + e, mask=e < E, other=0.0).to(tl.float32)
    if RESIDUAL:
        x += tl.load(residual_ptr + row * sr + e, mask=e < E, other=0.0).to(tl.float32)
        rounded = x.to(sum_ptr.dtype.element_ty)
        tl.store(sum_ptr + row * E + e, rounded, mask=e < E)
        x = rounded.to(tl.float32)
    weight = tl.load(weight_ptr + e, mask=e < E, other=0.0).to(tl.float32)
    scale = 1.0 / tl.sqrt(tl.sum(x * x, 0) / E + eps)
    tl.store(out_ptr + row * E + e, (x * scale * weight).to(out_ptr.dtype.element_ty), mask=e < E)


def add_rms_norm_triton(
    x_ME: Tensor, residual_ME: Tensor | None, weight_E: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """`add_rms_norm` with one program per row; E is at most 16,384, and rows may be strided."""
    (M, E), dtype = x_ME.shape, x_ME.dtype
    x, weight = with_unit_stride(x_ME), weight_E.contiguous()
    residual = x if residual_ME is None else with_unit_stride(residual_ME)
    out = torch.empty(M, E, dtype=dtype, device=x.device)
    total = x_ME if residual_ME is None else torch.empty_like(out)
    if M:
        BE = triton.next_power_of_2(E)
        _add_rms_norm[(M,)](
            x, residual, weight, out, total, x.stride(0), residual.stride(0), eps, E=E, BE=BE,
            RESIDUAL=residual_ME is not None, num_warps=4 if BE <= 1024 else 8 if BE <= 4096 else 16,
            **dependent_launch(x.device),
        )  # fmt: skip
    return out, total


@triton.jit
def _join_embedding(
    token_ptr, state_ptr, embedding_ptr, token_gain_ptr, state_gain_ptr, row_ptr, out_ptr, read_ptr, ss, se, eps,
    E: tl.constexpr, BE: tl.constexpr, TOKEN_NORM: tl.constexpr, STATE_NORM: tl.constexpr, CHOSEN: tl.constexpr,
    DEPENDENT: tl.constexpr,
):  # fmt: skip
    wait_for_previous(DEPENDENT)
    row, is_state, e = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.arange(0, BE)
    if is_state == 0:
        token = tl.load(token_ptr + row).to(tl.int64)
        x = tl.load(embedding_ptr + token * se + e, mask=e < E, other=0.0).to(tl.float32)
        if TOKEN_NORM:
            x *= tl.load(token_gain_ptr + e, mask=e < E, other=0.0).to(tl.float32) / tl.sqrt(tl.sum(x * x, 0) / E + eps)
    else:
        at = tl.load(row_ptr + row).to(tl.int64) if CHOSEN else row
        x = tl.load(state_ptr + at * ss + e, mask=e < E, other=0.0)
        if CHOSEN:
            tl.store(read_ptr + row * E + e, x, mask=e < E)
        x = x.to(tl.float32)
        if STATE_NORM:
            x *= tl.load(state_gain_ptr + e, mask=e < E, other=0.0).to(tl.float32) / tl.sqrt(tl.sum(x * x, 0) / E + eps)
    tl.store(out_ptr + (2 * row + is_state) * E + e, x.to(out_ptr.dtype.element_ty), mask=e < E)


def join_embedding_triton(
    token_M: Tensor, state_ME: Tensor, embedding_VE: Tensor, token_gain_E: Tensor | None, state_gain_E: Tensor | None,
    eps: float, row_M: Tensor | None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """`join_embedding` with two programs per row; E is at most 16,384, and rows may be strided."""
    M, E, state, embedding = (
        token_M.numel(),
        state_ME.shape[1],
        with_unit_stride(state_ME),
        with_unit_stride(embedding_VE),
    )
    token_gain, state_gain = (None if x is None else x.contiguous() for x in (token_gain_E, state_gain_E))
    out, chosen = torch.empty(M, 2 * E, dtype=state.dtype, device=state.device), row_M is not None
    read = torch.empty(M, E, dtype=state.dtype, device=state.device) if chosen else state_ME
    if M:
        BE = triton.next_power_of_2(E)
        _join_embedding[(M, 2)](
            token_M.contiguous(), state, embedding, token_gain, state_gain, row_M.contiguous() if chosen else None,
            out, read, state.stride(0), embedding.stride(0), eps,
            E=E, BE=BE, TOKEN_NORM=token_gain is not None, STATE_NORM=state_gain is not None, CHOSEN=chosen,
            num_warps=4 if BE <= 1024 else 8 if BE <= 4096 else 16, **dependent_launch(state.device),
        )  # fmt: skip
    return out, read


@triton.jit
def _store_heads(
    ptr, head_at, held, a, b, rest,
    D: tl.constexpr, R: tl.constexpr, BR: tl.constexpr, BP: tl.constexpr,
):  # fmt: skip
    """Stores the heads that are `held`, at offsets `head_at`, of dimensions [a; b; rest], where a and b are the halves
    of the R rotated ones."""
    half: tl.constexpr = R // 2
    i = tl.arange(0, BR)
    dtype = ptr.dtype.element_ty
    at, inside = ptr + head_at[:, None] + i[None, :], held[:, None] & (i < half)[None, :]
    tl.store(at, a.to(dtype), mask=inside)
    tl.store(at + half, b.to(dtype), mask=inside)
    if R < D:
        p = tl.arange(0, BP)
        inside = held[:, None] & (p < D - R)[None, :]
        tl.store(ptr + head_at[:, None] + R + p[None, :], rest.to(dtype), mask=inside)


@triton.jit(do_not_specialize_on_alignment=["slot_ptr"])
def _rope_to_cache(
    qkv_ptr, cos_ptr, sin_ptr, k_ptr, v_ptr, slot_ptr, q_norm_ptr, k_norm_ptr, out_ptr,
    sx, sc, ss, skg, skp, svg, svp, shared, eps,
    H: tl.constexpr, G: tl.constexpr, D: tl.constexpr, R: tl.constexpr, BR: tl.constexpr, BP: tl.constexpr,
    BH: tl.constexpr, Q_NORM: tl.constexpr, K_NORM: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """BH heads of a row."""
    wait_for_previous(DEPENDENT)
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1) * BH + tl.arange(0, BH)
    is_q, is_k = head < H, (head >= H) & (head < H + G)
    is_v = (head >= H + G) & (head < H + 2 * G)
    half: tl.constexpr = R // 2
    i, p = tl.arange(0, BR), tl.arange(0, BP)
    held, rotated, kept = (head < H + 2 * G)[:, None], (i < half)[None, :], (p < D - R)[None, :]
    x_ptrs = qkv_ptr + row * sx + head[:, None] * D
    a = tl.load(x_ptrs + i[None, :], mask=held & rotated, other=0.0).to(tl.float32)
    b = tl.load(x_ptrs + half + i[None, :], mask=held & rotated, other=0.0).to(tl.float32)
    rest = a
    if R < D:
        rest = tl.load(x_ptrs + R + p[None, :], mask=held & kept, other=0.0).to(tl.float32)
    slot = tl.load(slot_ptr + row).to(tl.int64)
    turn = (tl.program_id(0) // shared).to(tl.int64)
    cos = tl.load(cos_ptr + turn * sc + i, mask=i < half, other=0.0).to(tl.float32)[None, :]
    sin = tl.load(sin_ptr + turn * ss + i, mask=i < half, other=0.0).to(tl.float32)[None, :]
    if Q_NORM or K_NORM:
        squares = tl.sum(a * a, 1) + tl.sum(b * b, 1)
        if R < D:
            squares += tl.sum(rest * rest, 1)
        scale = 1.0 / tl.sqrt(squares / D + eps)
        if Q_NORM:
            a, b, rest = _times_gain(a, b, rest, scale, is_q, q_norm_ptr, D, R, BR, BP)
        if K_NORM:
            a, b, rest = _times_gain(a, b, rest, scale, is_k, k_norm_ptr, D, R, BR, BP)
    new_a = tl.where(is_v[:, None], a, a * cos - b * sin)
    new_b = tl.where(is_v[:, None], b, b * cos + a * sin)
    key, value = (head - H).to(tl.int64), (head - H - G).to(tl.int64)
    _store_heads(out_ptr, (row * H + head) * D, is_q, new_a, new_b, rest, D, R, BR, BP)
    _store_heads(k_ptr, key * skg + slot * skp, is_k, new_a, new_b, rest, D, R, BR, BP)
    _store_heads(v_ptr, value * svg + slot * svp, is_v, new_a, new_b, rest, D, R, BR, BP)


@triton.jit
def _times_gain(
    a, b, rest, scale, chosen, gain_ptr,
    D: tl.constexpr, R: tl.constexpr, BR: tl.constexpr, BP: tl.constexpr,
):  # fmt: skip
    """The chosen heads times their scale and a gain [D]."""
    half: tl.constexpr = R // 2
    i, p = tl.arange(0, BR), tl.arange(0, BP)
    gain_a = tl.load(gain_ptr + i, mask=i < half, other=1.0).to(tl.float32)
    gain_b = tl.load(gain_ptr + half + i, mask=i < half, other=1.0).to(tl.float32)
    a = tl.where(chosen[:, None], a * scale[:, None] * gain_a[None, :], a)
    b = tl.where(chosen[:, None], b * scale[:, None] * gain_b[None, :], b)
    if R < D:
        gain_rest = tl.load(gain_ptr + R + p, mask=p < D - R, other=1.0).to(tl.float32)
        rest = tl.where(chosen[:, None], rest * scale[:, None] * gain_rest[None, :], rest)
    return a, b, rest


def rope_to_cache_triton(
    qkv_MO: Tensor, cos_nr: Tensor, sin_nr: Tensor, heads: int, keys_GPd: Tensor, values_GPd: Tensor, slot_M: Tensor,
    q_norm_d: Tensor | None, k_norm_d: Tensor | None, eps: float,
) -> Tensor:  # fmt: skip
    """`rope_to_cache` with HEADS heads of a row per program. Raises ValueError if a head of the pools is not
    contiguous."""
    if not keys_GPd.stride(2) == values_GPd.stride(2) == 1:
        raise ValueError("rotary embedding 'triton' needs contiguous heads in the pools of keys and values")
    M, (n, r), (G, _, d) = qkv_MO.shape[0], cos_nr.shape, keys_GPd.shape
    q_norm, k_norm = (None if x is None else x.contiguous() for x in (q_norm_d, k_norm_d))
    qkv, cos, sin = (with_unit_stride(x) for x in (qkv_MO, cos_nr, sin_nr))
    q_MHd = torch.empty(M, heads, d, dtype=qkv.dtype, device=qkv.device)
    if M:
        _rope_to_cache[(M, triton.cdiv(heads + 2 * G, HEADS))](
            qkv, cos, sin, keys_GPd, values_GPd, slot_M.contiguous(), q_norm, k_norm, q_MHd,
            qkv.stride(0), cos.stride(0), sin.stride(0), *keys_GPd.stride()[:2], *values_GPd.stride()[:2], M // n, eps,
            H=heads, G=G, D=d, R=r, BR=triton.next_power_of_2(r // 2), BP=triton.next_power_of_2(max(d - r, 1)),
            BH=HEADS, Q_NORM=q_norm is not None, K_NORM=k_norm is not None, num_warps=HEADS // 2,
            **dependent_launch(qkv.device),
        )  # fmt: skip
    return q_MHd


@triton.jit
def _silu_mul_fused(x_ptr, out_ptr, sx, F, BLOCK: tl.constexpr):
    row, f = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    gate = tl.load(x_ptr + row * sx + f, mask=f < F, other=0.0).to(tl.float32)
    up = tl.load(x_ptr + row * sx + F + f, mask=f < F, other=0.0).to(tl.float32)
    tl.store(out_ptr + row * F + f, (gate * tl.sigmoid(gate) * up).to(out_ptr.dtype.element_ty), mask=f < F)


def silu_mul_fused_triton(gate_up_M2F: Tensor) -> Tensor:
    """`silu_mul_fused`, 1,024 outputs of a row per program; rows may be strided."""
    x, (M, double) = with_unit_stride(gate_up_M2F), gate_up_M2F.shape
    out = torch.empty(M, double // 2, dtype=x.dtype, device=x.device)
    if out.numel():
        _silu_mul_fused[(M, triton.cdiv(double // 2, BLOCK))](
            x, out, x.stride(0), double // 2, BLOCK=BLOCK, num_warps=4
        )
    return out
