"""Attention of a few queries, as verification and drafting make them, to many keys that several heads share."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.weak import WeakIdKeyDictionary


def grouped_attention(
    q_BHSd: Tensor, k_BGLd: Tensor, v_BGLd: Tensor, mask_B1SL: Tensor | None, scale: float | None = None
) -> Tensor:
    """softmax(q kᵀ scale + mask) v, [B, S, H, d], of H query heads that share G key heads in order; `scale` None is
    1/√d. The mask, of one request or each, is bool (seen) or is added; None where every query sees all. One mask may
    serve many layers.

    No key is copied for each of the heads that share it: on the CPU torch's attention takes them as they are, and
    elsewhere, where beside a mask it would not, `heads_as_rows` does without.
    """
    if q_BHSd.device.type != "cpu":
        return heads_as_rows(q_BHSd, k_BGLd, v_BGLd, mask_B1SL, scale)
    mask = _made_once(mask_B1SL, 1, q_BHSd.dtype)
    out = F.scaled_dot_product_attention(q_BHSd, k_BGLd, v_BGLd, attn_mask=mask, scale=scale, enable_gqa=True)
    return out.transpose(1, 2)


def heads_as_rows(
    q_BHSd: Tensor, k_BGLd: Tensor, v_BGLd: Tensor, mask_B1SL: Tensor | None, scale: float | None = None
) -> Tensor:
    """`grouped_attention` with the heads that share a key as the rows of one product."""
    B, H, S, d = q_BHSd.shape
    groups = H // k_BGLd.shape[1]
    mask = _made_once(mask_B1SL, groups, q_BHSd.dtype)
    q = q_BHSd.reshape(B, -1, groups * S, d)
    out = F.scaled_dot_product_attention(q, k_BGLd, v_BGLd, attn_mask=mask, scale=scale)
    return out.unflatten(2, (groups, S)).permute(0, 3, 1, 2, 4).reshape(B, S, H, -1)


_MADE = WeakIdKeyDictionary()  # masks that are in use, to what is made of them


def _made_once(mask_B1SL: Tensor | None, groups: int, dtype: torch.dtype) -> Tensor | None:
    """`_to_be_added`, made by the first layer that asks."""
    if mask_B1SL is None:
        return None
    made_for, made = _MADE.get(mask_B1SL, (None, None))
    if made_for != (groups, dtype):
        made = _to_be_added(mask_B1SL, groups, dtype)
        _MADE[mask_B1SL] = (groups, dtype), made
    return made


def _to_be_added(mask_B1SL: Tensor, groups: int, dtype: torch.dtype) -> Tensor:
    """The mask to be added, [B, 1, groups S, L], in rows of a length that torch's attention need not copy; a bool one
    it would make that of in every layer."""
    B, _, S, L = mask_B1SL.shape
    added = torch.zeros(B, 1, groups, S, -(-L // 8) * 8, dtype=dtype, device=mask_B1SL.device)[..., :L]
    if mask_B1SL.dtype == torch.bool:
        added.masked_fill_(~mask_B1SL[:, :, None], float("-inf"))
    else:
        added.copy_(mask_B1SL[:, :, None])
    return added.flatten(2, 3)
