"""Attention in decoding: a few new rows per sequence attend to a key-value cache and to a tree of new rows.

The keys and values of one layer are in a pool of P slots. Sequence b owns the slots from start_b on. The first length_b
slots of sequence b are the prefix, in the order of positions. The next J slots hold the new rows. Row s reads the
prefix and the new rows that `visible` names (in a draft tree, the row itself and its ancestors):

    out_s = softmax(scale [q_s . k_i for the prefix slots i ; q_s . k_j for the new slots j that s sees]) [v_i ; v_j]

With a window, row s at position p_s reads the prefix slots i > p_s - window only. Scores and softmax are computed in at
least float32. The kernels read lengths, starts, positions and visibility on the device, and their grids depend on
shapes alone: a CUDA graph of a call may be replayed with other values.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from fledge.ops.attention_prompt import additive_mask, heads_as_rows
from fledge.ops.device import at_least_float32, use_triton

COUNTERS = 1024  # integers that the kernels count programs in; see `tree_attention`


class Visible:
    """The new slots, of J, that S rows of each of B sequences see: the slots with True in `mask_BSJ` (bool).

    The calls of all layers share one `Visible` object, and the mask is packed once. `sees_all` True means that all rows
    see all slots; False leaves open whether rows see all slots.
    """

    chain = sees_all = False

    def __init__(self, mask_BSJ: Tensor):
        self.mask_BSJ = mask_BSJ
        self.shape = tuple(mask_BSJ.shape)

    @functools.cached_property
    def words_BSW(self) -> Tensor:
        """`pack_bits` of the mask."""
        return pack_bits(self.mask_BSJ)


class VisibleBits(Visible):
    """A `Visible` given as words of bits (`pack_bits`), int64 [B, S, W]; the first ceil(J / 64) words are read."""

    def __init__(self, words_BSW: Tensor, J: int):
        self.words_BSW = words_BSW
        self.shape = (*words_BSW.shape[:2], J)

    @functools.cached_property
    def mask_BSJ(self) -> Tensor:
        """The same as a mask, bool."""
        bits_BSWb = self.words_BSW[..., None] >> torch.arange(64, device=self.words_BSW.device) & 1
        return bits_BSWb.flatten(2)[..., : self.shape[2]].bool()


class VisibleChain:
    """The new slots that rows of chains see: of J slots, row s of sequence b sees the slots up to `last_BS[b, s]`
    (int32 or int64, at least 0). `sees_all` is as in `Visible`."""

    chain = True

    def __init__(self, last_BS: Tensor, J: int, sees_all: bool = False):
        self.last_BS, self.sees_all = last_BS, sees_all
        self.shape = (*last_BS.shape, J)

    @functools.cached_property
    def mask_BSJ(self) -> Tensor:
        """The same as a mask, bool."""
        return torch.arange(self.shape[2], device=self.last_BS.device) <= self.last_BS[..., None]


def pack_bits(mask_BSJ: Tensor) -> Tensor:
    """A mask (bool) as int64 words [B, S, ceil(J / 64)]: entry j is bit j % 64 of word j // 64, and the bits after the
    last entry are 0."""
    words_BSWb = F.pad(mask_BSJ, (0, -mask_BSJ.shape[2] % 64)).unflatten(2, (-1, 64))
    return (words_BSWb.long() << torch.arange(64, device=mask_BSJ.device)).sum(-1)


def tree_attention(
    q_BSHd: Tensor, keys_GPd: Tensor, values_GPd: Tensor, start_B: Tensor, length_B: Tensor,
    visible: Visible | VisibleChain, *, scale: float | None = None, window: int | None = None,
    position_BS: Tensor | None = None, counters: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Attention of S new rows of each of B sequences; returns [B, S, H, d] in the dtype of q.

    `keys_GPd` and `values_GPd` are the pool of one layer in the dtype of q, possibly strided views, and already hold
    the new rows. `start_B`, `length_B` and `position_BS` (for windows only) are int32 or int64. H / G consecutive query
    heads share a key head. `scale` is d^-1/2 unless given. Slots that a row does not see may hold any finite number.
    Every row must see at least one slot. There are no gradients.

    `counters` are COUNTERS zeros, int32, and are zeros again after the call; None costs a launch to create zeros. Calls
    in sequence on a stream may share counters; calls that may run at the same time must not.
    """
    scale = q_BSHd.shape[3] ** -0.5 if scale is None else scale
    if use_triton(q_BSHd):
        from fledge.ops.attention_tree_triton import tree_attention_triton

        counters = q_BSHd.new_zeros(COUNTERS, dtype=torch.int32) if counters is None else counters
        pool = keys_GPd, values_GPd, start_B, length_B
        return tree_attention_triton(q_BSHd, *pool, visible, scale, window, position_BS, counters)
    group = q_BSHd.shape[2] // keys_GPd.shape[0]
    reads = slots_and_masks(start_B, length_B, visible, window, position_BS, group, q_BSHd.dtype)
    read = [(keys_GPd[None, :, slots], values_GPd[None, :, slots], mask) for slots, mask in reads]
    return attend_to_slots(q_BSHd.flatten(0, 1), read, scale).view(q_BSHd.shape)


def seen_slots(length: int, visible_SJ: Tensor, window: int | None, position_S: Tensor | None) -> Tensor:
    """The visibility of a sequence's length + J slots to each row, bool [S, length + J]."""
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


def slots_and_masks(
    start_B: Tensor, length_B: Tensor, visible: Visible | VisibleChain, window: int | None, position_BS: Tensor | None,
    group: int, dtype: torch.dtype,
) -> list[tuple[slice, Tensor | None]]:  # fmt: skip
    """The slots that the rows of each sequence read, and an additive mask [1, 1, group · S, slots], None if all rows
    see all slots. The results are the same for all layers with this window. Reads the lengths on the host."""
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
    d^-1/2."""
    parts = q_MHd.split(q_MHd.shape[0] // len(read))
    out = [heads_as_rows(q.transpose(0, 1)[None], *given, scale)[0] for q, given in zip(parts, read, strict=True)]
    return torch.cat(out) if len(out) > 1 else out[0]
