"""The small operations of a decoder layer, fused for decoding: a few rows, one kernel launch each, no gradients.

All compute in at least float32 and round each output once; a network that rounds in between, as transformers does in 16
bits, differs by such roundings. For a few rows on a CPU, each operation of plain torch costs its call, even a
conversion to the dtype that a tensor has. So the definitions have the fewest.

Axes beyond the legend in `fledge.types`: F width of the MLP, O = (H + 2 G) d outputs of the fused projection, P slots
of the pool of keys and values, r rotated dimensions of a head.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor
from torch.nn import functional as F

from fledge.ops.device import at_least_float32, use_triton


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / rms(x) * weight over the last axis (RMSNorm, Zhang and Sennrich 2019, arXiv:1910.07467), computed in at least
    float32, in the dtype of x."""
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
    """(sum / rms(sum) * weight, sum) with sum = x + residual, both [M, E] in the dtype of x.

    The norm reads the sum as rounded to that dtype. Without a residual, the sum is x itself.
    """
    if use_triton(x_ME):
        from fledge.ops.layer_triton import add_rms_norm_triton

        return add_rms_norm_triton(x_ME, residual_ME, weight_E, eps)
    sum_ME = x_ME if residual_ME is None else x_ME + residual_ME
    return rms_norm(sum_ME, weight_E, eps), sum_ME


def join_embedding(
    token_M: Tensor, state_ME: Tensor, embedding_VE: Tensor, token_gain_E: Tensor | None = None,
    state_gain_E: Tensor | None = None, eps: float = 1e-6, *, row_M: Tensor | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """[embedding of the token ; state] of each row, [M, 2E] in the dtype of the states: the input of a draft. Also
    returns the states, [M, E].

    With `token_gain_E` or `state_gain_E`, the embedding or the state is normalised (RMSNorm with this gain). `token_M`
    is int64. With `row_M` (int64), row m reads state `row_M[m]`, of any number of states.
    """
    if use_triton(state_ME):
        from fledge.ops.layer_triton import join_embedding_triton

        return join_embedding_triton(token_M, state_ME, embedding_VE, token_gain_E, state_gain_E, eps, row_M)
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
    q_norm_d: Tensor | None = None, k_norm_d: Tensor | None = None, eps: float = 1e-6,
) -> Tensor:  # fmt: skip
    """Rotates queries and keys of a fused projection, writes keys and values to the cache; returns queries [M, H, d].

    A row of `qkv_MO` has the heads of the H = `heads` queries, then of the keys, then of the values. With `q_norm_d` or
    `k_norm_d`, each head of the queries or keys is normalised first (RMSNorm with this gain, as in Qwen3). Of each
    head, the first r dimensions are rotated as in `fledge.ops.rope.apply_rope`; cos and sin are [n, r] with equal
    halves, where n divides M and each row is that of M / n consecutive rows.
    The key and value of row m go to slot `slot_M[m]` (int32 or int64, distinct) of the pools `keys_GPd` and
    `values_GPd`, which may be strided views with contiguous heads.
    """
    if use_triton(qkv_MO):
        from fledge.ops.layer_triton import rope_to_cache_triton

        norms = q_norm_d, k_norm_d, eps
        return rope_to_cache_triton(qkv_MO, cos_nr, sin_nr, heads, keys_GPd, values_GPd, slot_M, *norms)
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
    """silu(gate) * up, [M, F], of the output of a fused projection [M, 2 F] with the gate first."""
    if use_triton(gate_up_M2F):
        from fledge.ops.layer_triton import silu_mul_fused_triton

        return silu_mul_fused_triton(gate_up_M2F)
    gate, up = at_least_float32(gate_up_M2F).chunk(2, -1)
    return (F.silu(gate) * up).to(gate_up_M2F.dtype)
