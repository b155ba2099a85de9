"""Which of the new slots each new row sees."""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from fledge.ops.implementations import best_impl
from fledge.ops.tree_attention.definition import pack_bits_torch, unpack_bits


class Visible:
    """The new slots that S rows of each of B sequences see: those of J whose entry of `mask_BSJ` (bool) is True.

    The calls of all layers share one such object, so that the mask is packed once. `sees_all` tells that all rows see
    all slots; if it is False, they may or may not.
    """

    sees_all = False

    def __init__(self, mask_BSJ: Tensor):
        self.mask_BSJ = mask_BSJ
        self.shape = tuple(mask_BSJ.shape)

    @functools.cached_property
    def words_BSW(self) -> Tensor:
        """`pack_bits` of the mask."""
        return pack_bits(self.mask_BSJ)


class VisibleBits(Visible):
    """The same, given as words int64 [B, S, W] of bits (`pack_bits`), of which the first ceil(J / 64) are read."""

    def __init__(self, words_BSW: Tensor, J: int):
        self.words_BSW = words_BSW
        self.shape = (*words_BSW.shape[:2], J)

    @functools.cached_property
    def mask_BSJ(self) -> Tensor:
        """The same as a mask, bool."""
        return unpack_bits(self.words_BSW, self.shape[2])


class VisibleChain:
    """The new slots that rows of chains see: of J slots, row s of sequence b sees those up to `last_BS[b, s]` (int32 or
    int64, at least 0). `sees_all` is as in `Visible`."""

    def __init__(self, last_BS: Tensor, J: int, sees_all: bool = False):
        self.last_BS, self.sees_all = last_BS, sees_all
        self.shape = (*last_BS.shape, J)

    @functools.cached_property
    def mask_BSJ(self) -> Tensor:
        """The same as a mask, bool."""
        return torch.arange(self.shape[2], device=self.last_BS.device) <= self.last_BS[..., None]


def pack_bits(mask_BSJ: Tensor, *, impl: str | None = None) -> Tensor:
    """A mask (bool) as int64 words [B, S, ceil(J / 64)]: entry j is bit j % 64 of word j // 64, and the bits after the
    last entry are 0.

    `impl` is "definition" (plain torch), "triton" (one kernel; a GPU or Triton's interpreter), or None: "triton" on a
    GPU.
    """
    if (best_impl(mask_BSJ.device, torch.float32) if impl is None else impl) == "triton":
        from fledge.ops.tree_attention.place_triton import pack_bits_triton

        return pack_bits_triton(mask_BSJ)
    return pack_bits_torch(mask_BSJ)
