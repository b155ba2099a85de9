"""Grouped-query attention with torch's kernels: of a few queries to many keys, and of prompts."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention.bias import causal_lower_right

from fledge.ops.sdpa import without_cudnn_sdpa

QUERIES = 2048  # queries of a prompt that attend together if they need a mask


def grouped_attention(
    q_BHSd: Tensor, k_BGLd: Tensor, v_BGLd: Tensor, mask: Tensor | None, scale: float | None = None
) -> Tensor:
    """softmax(q kᵀ scale + mask) v, [B, S, H, d], with H / G consecutive query heads per key-value head.

    `mask` is from `prepare_mask`, for H / G heads per key and the queries' dtype and device; None if every query sees
    all keys. `scale` None is 1/√d. Keys and values are not repeated for the heads that share them: on the CPU, torch
    supports shared keys directly; on other devices it would copy them if there is a mask, so `heads_as_rows` is used.
    """
    if q_BHSd.device.type != "cpu":
        return heads_as_rows(q_BHSd, k_BGLd, v_BGLd, mask, scale)
    out = F.scaled_dot_product_attention(q_BHSd, k_BGLd, v_BGLd, attn_mask=mask, scale=scale, enable_gqa=True)
    return out.transpose(1, 2)


def heads_as_rows(
    q_BHSd: Tensor, k_BGLd: Tensor, v_BGLd: Tensor, mask_B1RL: Tensor | None, scale: float | None = None
) -> Tensor:
    """`grouped_attention` with the query heads of a group as further rows of one head. The mask has R = H / G · S rows,
    S for each head (`additive_mask`)."""
    B, H, S, d = q_BHSd.shape
    groups = H // k_BGLd.shape[1]
    q = q_BHSd.reshape(B, -1, groups * S, d)
    out = F.scaled_dot_product_attention(q, k_BGLd, v_BGLd, attn_mask=mask_B1RL, scale=scale)
    return out.unflatten(2, (groups, S)).permute(0, 3, 1, 2, 4).reshape(B, S, H, -1)


def prepare_mask(mask_B1SL: Tensor, heads_per_key: int, dtype: torch.dtype) -> Tensor:
    """Converts a bool mask (True: visible) or an additive mask for `grouped_attention`, once for all layers. Returns an
    additive mask, [B, 1, S, L] on the CPU and [B, 1, heads_per_key · S, L] on other devices."""
    return additive_mask(mask_B1SL, mask_repeats(mask_B1SL.device, heads_per_key), dtype)


def mask_repeats(device: torch.device, heads_per_key: int) -> int:
    """The number of times that a prepared mask repeats its S rows."""
    return 1 if device.type == "cpu" else heads_per_key


def additive_mask(mask_B1SL: Tensor, times: int, dtype: torch.dtype) -> Tensor:
    """The additive mask [B, 1, times · S, L], with its S rows repeated `times` times. The stride of the rows is a
    multiple of 8 values, so that torch's attention does not copy the mask in every layer."""
    B, _, S, L = mask_B1SL.shape
    added = torch.zeros(B, 1, times, S, -(-L // 8) * 8, dtype=dtype, device=mask_B1SL.device)[..., :L]
    if mask_B1SL.dtype == torch.bool:
        added.masked_fill_(~mask_B1SL[:, :, None], float("-inf"))
    else:
        added.copy_(mask_B1SL[:, :, None])
    return added.flatten(2, 3)


def _flash_supports(q: Tensor, k: Tensor, v: Tensor) -> bool:
    """Whether torch's flash attention takes queries and keys of these dtypes and shapes, possibly with shared keys."""
    params = torch.backends.cuda.SDPAParams(q, k, v, None, 0.0, False, q.shape[1] != k.shape[1])
    return q.is_cuda and torch.backends.cuda.can_use_flash_attention(params)


def causal_attention(
    q_SHd: Tensor, keys_GLd: Tensor, values_GLd: Tensor, scale: float | None, window: int | None
) -> Tensor:
    """Attention of the last S of L tokens of a sequence to all tokens before them and themselves, [S, H, d]; with a
    window, to the last `window` of these."""
    (S, H, _), (G, L, _) = q_SHd.shape, keys_GLd.shape
    q, k, v = q_SHd.transpose(0, 1)[None], keys_GLd[None], values_GLd[None]
    options = dict(scale=scale, enable_gqa=H != G)
    with without_cudnn_sdpa(q.device):
        everything = window is None or window >= L
        if everything and S == L:
            return F.scaled_dot_product_attention(q, k, v, is_causal=True, **options)[0].transpose(0, 1)
        if everything and _flash_supports(q, k, v):  # no mask has to be read
            return F.scaled_dot_product_attention(q, k, v, causal_lower_right(S, L), **options)[0].transpose(0, 1)
        parts = []
        for first in range(L - S, L, QUERIES):  # in parts, so that the mask is small
            end = min(first + QUERIES, L)
            seen = slice(max(0, first + 1 - window) if window else 0, end)
            at, key = torch.arange(first, end, device=q.device)[:, None], torch.arange(end, device=q.device)[seen]
            mask = key <= at
            if window is not None:
                mask &= key > at - window
            rows, keys, values = q[:, :, first - (L - S) : end - (L - S)], keys_GLd[:, seen], values_GLd[:, seen]
            if q.device.type != "cpu":  # with a mask, torch's fast backends there do not support shared keys
                keys, values = (x.repeat_interleave(H // G, dim=0) for x in (keys, values))
                options["enable_gqa"] = False
            parts.append(F.scaled_dot_product_attention(rows, keys[None], values[None], attn_mask=mask, **options)[0])
    return torch.cat(parts, dim=1).transpose(0, 1)
