"""The small operations of a decoder layer in plain torch."""

from __future__ import annotations

import functools

import torch
from torch import Tensor
from torch.nn import functional as F

from fledge.ops.precision import at_least_float32

# For a few rows on a CPU, each operation costs its call, even a conversion to the dtype that a tensor has. So these
# functions have the fewest.


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / rms(x) * weight over the last axis, computed in at least float32, in the dtype of x."""
    out = _rms_norm(x, weight, eps)
    return out if out.dtype == x.dtype else out.to(x.dtype)


def _rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """`rms_norm`, not rounded to the dtype of x."""
    x = at_least_float32(x)
    length = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
    inverse = torch.addcmul(_scalar(eps, x.dtype, x.device), length, length, value=1 / x.shape[-1]).rsqrt_()
    return (x * inverse).mul_(weight if weight.dtype == x.dtype else weight.to(x.dtype))


@functools.cache
def _scalar(value: float, dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.tensor(value, dtype=dtype, device=device)


def add_rms_norm(x_ME: Tensor, residual_ME: Tensor | None, weight_E: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    sum_ME = x_ME if residual_ME is None else x_ME + residual_ME
    return rms_norm(sum_ME, weight_E, eps), sum_ME


def join_embedding(
    token_M: Tensor, state_ME: Tensor, embedding_VE: Tensor, token_gain_E: Tensor | None, state_gain_E: Tensor | None,
    eps: float, row_M: Tensor | None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    state_ME = state_ME if row_M is None else state_ME[row_M]
    embedded_ME = F.embedding(token_M, embedding_VE)
    if token_gain_E is not None and state_gain_E is not None:
        both_M2E, gain_2E = torch.stack((embedded_ME, state_ME), 1), torch.stack((token_gain_E, state_gain_E))
        return rms_norm(both_M2E, gain_2E, eps).flatten(1), state_ME
    parts = (embedded_ME, token_gain_E), (state_ME, state_gain_E)
    normed = [x if gain is None else rms_norm(x, gain, eps) for x, gain in parts]
    return torch.cat(normed, -1), state_ME


def rope_to_cache(
    qkv_MO: Tensor, cos_nr: Tensor, sin_nr: Tensor, heads: int, keys_GPd: Tensor, values_GPd: Tensor, slot_M: Tensor,
    q_norm_d: Tensor | None, k_norm_d: Tensor | None, eps: float,
) -> Tensor:  # fmt: skip
    M, n, (G, _, d) = qkv_MO.shape[0], cos_nr.shape[0], keys_GPd.shape
    cos_Mr, sin_Mr = at_least_float32(cos_nr), at_least_float32(sin_nr)
    if n < M:
        cos_Mr, sin_Mr = (x.repeat_interleave(M // n, 0) for x in (cos_Mr, sin_Mr))
    qkv_NMd = qkv_MO.view(M, -1, d).transpose(0, 1)  # heads first, as in the cache
    qk_NMd, v_GMd = qkv_NMd.split_with_sizes((heads + G, G))
    qk_NMd = at_least_float32(qk_NMd)
    if q_norm_d is not None or k_norm_d is not None:
        parts = zip(qk_NMd.split_with_sizes((heads, G)), (q_norm_d, k_norm_d), strict=True)
        qk_NMd = torch.cat([x if weight is None else _rms_norm(x, weight, eps) for x, weight in parts])
    rotated_NMd = _rotated(qk_NMd, cos_Mr, sin_Mr)
    if rotated_NMd.dtype != qkv_MO.dtype:
        rotated_NMd = rotated_NMd.to(qkv_MO.dtype)
    q_HMd, k_GMd = rotated_NMd.split_with_sizes((heads, G))
    slot_M = slot_M.long()
    keys_GPd.index_copy_(1, slot_M, k_GMd)
    values_GPd.index_copy_(1, slot_M, v_GMd)
    return q_HMd.transpose(0, 1)


def _rotated(x_NMd: Tensor, cos_Mr: Tensor, sin_Mr: Tensor) -> Tensor:
    """`apply_rope` of heads first, in fewer operations, which have no gradients."""
    r = cos_Mr.shape[-1]
    if r < x_NMd.shape[-1]:
        return torch.cat((_rotated(x_NMd[..., :r], cos_Mr, sin_Mr), x_NMd[..., r:]), -1)
    out_NMd, sin_Mh = x_NMd * cos_Mr, sin_Mr[:, : r // 2]
    (a, b), (out_a, out_b) = x_NMd.chunk(2, -1), out_NMd.chunk(2, -1)
    out_a.addcmul_(b, sin_Mh, value=-1)
    out_b.addcmul_(a, sin_Mh)
    return out_NMd


def silu_mul_fused(gate_up_M2F: Tensor) -> Tensor:
    gate, up = at_least_float32(gate_up_M2F).chunk(2, -1)
    return (F.silu(gate) * up).to(gate_up_M2F.dtype)
