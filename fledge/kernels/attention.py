"""Attention of a few queries, as verification and drafting make them, to many keys that several heads share."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F


def grouped_attention(
    q_BHSd: Tensor, k_BGLd: Tensor, v_BGLd: Tensor, mask: Tensor | None, scale: float | None = None
) -> Tensor:
    """softmax(q kᵀ scale + mask) v, [B, S, H, d], of H query heads that share G key heads in order; `scale` None is
    1/√d. `mask` is what `prepare_mask` made for H / G heads per key and the queries' dtype and device; None where every
    query sees all keys.

    No key is copied for each of the heads that share it: on the CPU torch's attention takes them as they are, and
    elsewhere, where it would copy them if there is a mask, `heads_as_rows` is used.
    """
    if q_BHSd.device.type != "cpu":
        return heads_as_rows(q_BHSd, k_BGLd, v_BGLd, mask, scale)
    out = F.scaled_dot_product_attention(q_BHSd, k_BGLd, v_BGLd, attn_mask=mask, scale=scale, enable_gqa=True)
    return out.transpose(1, 2)


def heads_as_rows(
    q_BHSd: Tensor, k_BGLd: Tensor, v_BGLd: Tensor, mask_B1RL: Tensor | None, scale: float | None = None
) -> Tensor:
    """`grouped_attention` with the heads that share a key as the rows of one product; the mask has R = H / G · S rows,
    those of a head together (`additive_rows`)."""
    B, H, S, d = q_BHSd.shape
    groups = H // k_BGLd.shape[1]
    q = q_BHSd.reshape(B, -1, groups * S, d)
    out = F.scaled_dot_product_attention(q, k_BGLd, v_BGLd, attn_mask=mask_B1RL, scale=scale)
    return out.unflatten(2, (groups, S)).permute(0, 3, 1, 2, 4).reshape(B, S, H, -1)


def prepare_mask(mask_B1SL: Tensor, heads_per_key: int, dtype: torch.dtype) -> Tensor:
    """A mask as `grouped_attention` takes it, made once for all layers: [B, 1, S, L] on a CPU, elsewhere
    [B, 1, heads_per_key · S, L]. The mask given is bool (True: seen) or is added to the scores."""
    return additive_rows(mask_B1SL, repeats(mask_B1SL.device, heads_per_key), dtype)


def repeats(device: torch.device, heads_per_key: int) -> int:
    """How many times a prepared mask holds each query's row."""
    return 1 if device.type == "cpu" else heads_per_key


def additive_rows(mask_B1SL: Tensor, times: int, dtype: torch.dtype) -> Tensor:
    """The mask to be added to scores, [B, 1, times · S, L], its S rows said `times` times over. Rows lie apart by a
    multiple of 8 values, so that torch's attention need not copy them in every layer."""
    B, _, S, L = mask_B1SL.shape
    added = torch.zeros(B, 1, times, S, -(-L // 8) * 8, dtype=dtype, device=mask_B1SL.device)[..., :L]
    if mask_B1SL.dtype == torch.bool:
        added.masked_fill_(~mask_B1SL[:, :, None], float("-inf"))
    else:
        added.copy_(mask_B1SL[:, :, None])
    return added.flatten(2, 3)
