"""The small operations of a decoder layer in plain torch."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from fledge.kernels.precision import at_least_float32
from fledge.kernels.rope import apply_rope


def _rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / rms(x) * weight over the last axis, in at least float32, and not rounded to the dtype of x."""
    x = at_least_float32(x)
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight.to(x.dtype)


def add_rms_norm(x_ME: Tensor, residual_ME: Tensor | None, weight_E: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    sum_ME = x_ME if residual_ME is None else x_ME + residual_ME
    return _rms_norm(sum_ME, weight_E, eps).to(x_ME.dtype), sum_ME


def join_embedding(
    token_M: Tensor, state_ME: Tensor, embedding_VE: Tensor, token_gain_E: Tensor | None, state_gain_E: Tensor | None,
    eps: float,
) -> Tensor:  # fmt: skip
    parts = (F.embedding(token_M, embedding_VE), token_gain_E), (state_ME, state_gain_E)
    return torch.cat([x if gain is None else F.rms_norm(x, gain.shape, gain, eps) for x, gain in parts], -1)


def rope_to_cache(
    qkv_MO: Tensor, cos_Mr: Tensor, sin_Mr: Tensor, heads: int, keys_GPd: Tensor, values_GPd: Tensor, slot_M: Tensor,
    q_norm_d: Tensor | None, k_norm_d: Tensor | None, eps: float,
) -> Tensor:  # fmt: skip
    G, _, d = keys_GPd.shape
    qk_MNd, v_MGd = qkv_MO.view(-1, heads + 2 * G, d).split((heads + G, G), 1)
    qk_MNd = at_least_float32(qk_MNd)
    if q_norm_d is not None or k_norm_d is not None:
        parts = zip(qk_MNd.split((heads, G), 1), (q_norm_d, k_norm_d), strict=True)
        qk_MNd = torch.cat([x if weight is None else _rms_norm(x, weight, eps) for x, weight in parts], 1)
    cos, sin = (at_least_float32(x)[:, None] for x in (cos_Mr, sin_Mr))
    q_MHd, k_MGd = apply_rope(qk_MNd, cos, sin).to(qkv_MO.dtype).split((heads, G), 1)
    slot = slot_M.long()
    keys_GPd.index_copy_(1, slot, k_MGd.transpose(0, 1))
    values_GPd.index_copy_(1, slot, v_MGd.transpose(0, 1))
    return q_MHd


def silu_mul_fused(gate_up_M2F: Tensor) -> Tensor:
    gate, up = at_least_float32(gate_up_M2F).chunk(2, -1)
    return (F.silu(gate) * up).to(gate_up_M2F.dtype)
