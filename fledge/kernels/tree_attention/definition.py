"""Attention in decoding in plain torch: a dense reference, and one call of torch's attention per sequence."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from fledge.kernels.precision import at_least_float32


def pack_bits_torch(mask_BSJ: Tensor) -> Tensor:
    """The definition of `pack_bits`."""
    words_BSWb = F.pad(mask_BSJ, (0, -mask_BSJ.shape[2] % 64)).unflatten(2, (-1, 64))
    return (words_BSWb.long() << torch.arange(64, device=mask_BSJ.device)).sum(-1)


def seen_slots(length: int, visible_SJ: Tensor, window: int | None, position_S: Tensor | None) -> Tensor:
    """Which of a sequence's length + J slots each row reads, bool [S, length + J]."""
    slot = torch.arange(length, device=visible_SJ.device)
    prefix = torch.ones(visible_SJ.shape[0], length, dtype=torch.bool, device=visible_SJ.device)
    if window is not None:
        prefix &= slot > position_S[:, None] - window
    return torch.cat((prefix, visible_SJ), 1)


def tree_attention_reference(
    q_BSHd: Tensor, keys_GPd: Tensor, values_GPd: Tensor, start_B: Tensor, length_B: Tensor, visible_BSJ: Tensor,
    scale: float, window: int | None = None, position_BS: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """The definition: a dense softmax for each sequence, in at least float32."""
    (_, S, H, d), G, J = q_BSHd.shape, keys_GPd.shape[0], visible_BSJ.shape[-1]
    out = torch.empty_like(q_BSHd, memory_format=torch.contiguous_format)
    for b, (start, length) in enumerate(zip(start_B.tolist(), length_B.tolist(), strict=True)):
        slots = slice(start, start + length + J)
        k_GNd, v_GNd = at_least_float32(keys_GPd[:, slots]), at_least_float32(values_GPd[:, slots])
        q_SGgd = at_least_float32(q_BSHd[b]).reshape(S, G, H // G, d)
        seen_SN = seen_slots(length, visible_BSJ[b], window, None if window is None else position_BS[b])
        scores = torch.einsum("sgrd,gnd->sgrn", q_SGgd, k_GNd) * scale
        weights = scores.masked_fill(~seen_SN[:, None, None], float("-inf")).softmax(-1)
        out[b] = torch.einsum("sgrn,gnd->sgrd", weights, v_GNd).reshape(S, H, d).to(out.dtype)
    return out


def tree_attention_torch(
    q_BSHd: Tensor, keys_GPd: Tensor, values_GPd: Tensor, start_B: Tensor, length_B: Tensor, visible_BSJ: Tensor,
    scale: float, window: int | None = None, position_BS: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """`tree_attention_reference` with torch's attention, over views of the pool.

    The query heads that share a key head are laid along the rows, so that no key is repeated for them.
    """
    (_, S, H, d), G, J = q_BSHd.shape, keys_GPd.shape[0], visible_BSJ.shape[-1]
    group, out = H // G, []
    for b, (start, length) in enumerate(zip(start_B.tolist(), length_B.tolist(), strict=True)):
        slots = slice(start, start + length + J)
        mask_RN = None
        if window is not None or not bool(visible_BSJ[b].all()):
            seen_SN = seen_slots(length, visible_BSJ[b], window, None if window is None else position_BS[b])
            mask_RN = seen_SN.repeat(group, 1)  # rows R = group x S
        q_1GRd = q_BSHd[b].reshape(S, G, group, d).permute(1, 2, 0, 3).reshape(1, G, group * S, d)
        found_1GRd = F.scaled_dot_product_attention(
            q_1GRd, keys_GPd[None, :, slots], values_GPd[None, :, slots], attn_mask=mask_RN, scale=scale
        )
        out.append(found_1GRd.view(G, group, S, d).permute(2, 0, 1, 3).reshape(S, H, d))
    return torch.stack(out) if len(out) > 1 else out[0][None]
