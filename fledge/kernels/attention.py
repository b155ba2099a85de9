"""Attention of a few queries, as verification and drafting make them, to many keys that several heads share."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

QUERIES = 128  # up to here the mask, said again for each head that shares a key, is small beside the keys
NAME = "fledge"  # of `for_transformers`, among transformers' attentions


def grouped_attention(
    q_BHSd: Tensor, k_BGLd: Tensor, v_BGLd: Tensor, mask_BSL: Tensor | None, scale: float | None = None
) -> Tensor:
    """softmax(q kᵀ scale + mask) v, [B, H, S, d], of H query heads that share G key heads in order; `scale` None is
    1/√d. The mask, of one request or each, is bool (seen) or is added; None where every query sees all.

    No key is copied for each of the heads that share it: on the CPU torch's attention takes them as they are, and
    elsewhere, where beside a mask it would not, `heads_as_rows` does without.
    """
    if q_BHSd.device.type != "cpu":
        return heads_as_rows(q_BHSd, k_BGLd, v_BGLd, mask_BSL, scale)
    mask = None if mask_BSL is None else mask_BSL[:, None]
    return F.scaled_dot_product_attention(q_BHSd, k_BGLd, v_BGLd, attn_mask=mask, scale=scale, enable_gqa=True)


def heads_as_rows(
    q_BHSd: Tensor, k_BGLd: Tensor, v_BGLd: Tensor, mask_BSL: Tensor | None, scale: float | None = None
) -> Tensor:
    """`grouped_attention` with the heads that share a key as the rows of one product."""
    B, H, S, d = q_BHSd.shape
    groups = H // k_BGLd.shape[1]
    mask = None if mask_BSL is None else mask_BSL.repeat(1, groups, 1)[:, None]
    q = q_BHSd.reshape(B, -1, groups * S, d)
    return F.scaled_dot_product_attention(q, k_BGLd, v_BGLd, attn_mask=mask, scale=scale).reshape(B, H, S, -1)


def for_transformers(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **more,
) -> tuple[Tensor, None]:
    """transformers' "sdpa" attention, but that of a few queries with a mask by `grouped_attention`."""
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    grouped = query.shape[1] > key.shape[1] and query.shape[2] <= QUERIES and not dropout
    masked = attention_mask is not None and attention_mask.shape[1] == 1 and attention_mask.shape[3] == key.shape[2]
    special = any(more.get(name) is not None for name in ("softcap", "position_bias", "cache"))
    if not (grouped and masked) or special:
        return sdpa_attention_forward(module, query, key, value, attention_mask, dropout, scaling, **more)
    out = grouped_attention(query, key, value, attention_mask[:, 0], scaling)
    return out.transpose(1, 2).contiguous(), None


def group_heads(model: torch.nn.Module) -> None:
    """Has a transformers model that attends by "sdpa" attend by `for_transformers`."""
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import sdpa_mask

    if getattr(model.config, "_attn_implementation", None) == "sdpa":
        AttentionInterface.register(NAME, for_transformers)
        AttentionMaskInterface.register(NAME, sdpa_mask)
        model.set_attn_implementation(NAME)
