"""Attention in decoding in plain torch: a dense reference, and one call of torch's attention per sequence."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn import functional as F

from fledge.ops.attention import additive_mask
from fledge.ops.precision import at_least_float32

if TYPE_CHECKING:
    from fledge.ops.tree_attention.visible import Visible, VisibleChain


def pack_bits_torch(mask_BSJ: Tensor) -> Tensor:
    """The definition of `pack_bits`."""
    words_BSWb = F.pad(mask_BSJ, (0, -mask_BSJ.shape[2] % 64)).unflatten(2, (-1, 64))
    return (words_BSWb.long() << torch.arange(64, device=mask_BSJ.device)).sum(-1)


def unpack_bits(words_BSW: Tensor, J: int) -> Tensor:
    """The first J entries of masks that `pack_bits` packed, bool [B, S, J]."""
    bits_BSWb = words_BSW[..., None] >> torch.arange(64, device=words_BSW.device) & 1
    return bits_BSWb.flatten(2)[..., :J].bool()


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
    q_BSHd: Tensor, keys_GPd: Tensor, values_GPd: Tensor, start_B: Tensor, length_B: Tensor,
    visible: Visible | VisibleChain, scale: float, window: int | None = None, position_BS: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """`tree_attention_reference` with torch's attention, over views of the pool."""
    group = q_BSHd.shape[2] // keys_GPd.shape[0]
    reads = slots_and_masks(start_B, length_B, visible, window, position_BS, group, q_BSHd.dtype)
    read = [(keys_GPd[None, :, slots], values_GPd[None, :, slots], mask) for slots, mask in reads]
    return attend_to_slots(q_BSHd.flatten(0, 1), read, scale).view(q_BSHd.shape)


def slots_and_masks(
    start_B: Tensor, length_B: Tensor, visible: Visible | VisibleChain, window: int | None, position_BS: Tensor | None,
    group: int, dtype: torch.dtype,
) -> list[tuple[slice, Tensor | None]]:  # fmt: skip
    """What the rows of each sequence read, the same in all layers with this window: the slots, and an additive mask
    [1, 1, group · S, slots], None if all rows see all slots. Reads the lengths on the host."""
    reads, J = [], visible.shape[2]
    everything = window is None and (visible.sees_all or bool(visible.mask_BSJ.all()))
    for b, (start, length) in enumerate(zip(start_B.tolist(), length_B.tolist(), strict=True)):
        mask = None
        if not everything:
            seen_SN = seen_slots(length, visible.mask_BSJ[b], window, None if window is None else position_BS[b])
            mask = additive_mask(seen_SN[None, None], group, dtype)
        reads.append((slice(start, start + length + J), mask))
    return reads


def attend_to_slots(
    q_MHd: Tensor, read: Sequence[tuple[Tensor, Tensor, Tensor | None]], scale: float | None
) -> Tensor:  # fmt: skip
    """Attention of equally many rows of each sequence to its keys and values, each [1, G, slots, d], with its mask (see
    `slots_and_masks`): one call of torch's attention per sequence. Returns [M, H, d], contiguous. `scale` None is
    d^-1/2.

    The query heads that share a key head are laid along the rows, so that no key is repeated for them.
    """
    (M, H, d), out = q_MHd.shape, []
    parts = (q_MHd,) if len(read) == 1 else q_MHd.split(M // len(read))
    for q_SHd, (k_1GNd, v_1GNd, mask) in zip(parts, read, strict=True):
        q_1GRd = q_SHd.transpose(0, 1).reshape(1, k_1GNd.shape[1], -1, d)  # rows R = group x S
        found_1GRd = F.scaled_dot_product_attention(q_1GRd, k_1GNd, v_1GNd, attn_mask=mask, scale=scale)
        out.append(found_1GRd.reshape(H, -1, d).transpose(0, 1))
    # `found_1GRd` has another layout on a GPU than on a CPU
    return torch.cat(out) if len(out) > 1 else out[0].contiguous()
