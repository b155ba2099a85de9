"""The key-value cache of a transformers target, with exact rollback, for several sequences of different lengths."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers.cache_utils import Cache, DynamicLayer

from fledge.ops.transfer import to_device

MIN_CAPACITY = 256  # slots per sequence of a new buffer


def buffer_capacity(needed: int) -> int:
    """The slots per sequence to allocate if `needed` are used: twice the number, so that buffers rarely grow."""
    return max(2 * needed, MIN_CAPACITY)


def concatenate_buffers(buffers: Sequence[Tensor], needed: int) -> Tensor:
    """Concatenates buffers [.., B, G, C, d] along B, with a capacity for `needed` slots.

    The capacity may be smaller than before, so that the memory of a long sequence is freed after its end.
    """
    *lead, _, G, _, d = buffers[0].shape
    out = buffers[0].new_zeros(*lead, sum(b.shape[-4] for b in buffers), G, buffer_capacity(needed), d)
    start = 0
    for buffer in buffers:
        slots = min(buffer.shape[-2], out.shape[-2])
        out[..., start : start + buffer.shape[-4], :, :slots, :] = buffer[..., :slots, :]
        start += buffer.shape[-4]
    return out


def select_sequences(buffer: Tensor, indices: Tensor, needed: int) -> Tensor:
    """The sequences at `indices` (int64) of a buffer [.., B, G, C, d], with at most the capacity for `needed` slots."""
    return buffer[..., : buffer_capacity(needed), :].index_select(-4, indices)


def move_slots(buffer: Tensor, from_BR: Tensor, to_BR: Tensor) -> None:
    """Copies R slots within each sequence of a buffer [.., B, G, C, d]. The slot indices are int64 [B, R], and the two
    sets may overlap."""
    b = torch.arange(from_BR.shape[0], device=buffer.device)[:, None]
    by_slot = buffer.transpose(-3, -2)  # [.., B, C, G, d]
    by_slot[..., b, to_BR, :, :] = by_slot[..., b, from_BR, :, :]


class GrowingLayer(DynamicLayer):
    """transformers' full-attention cache layer with preallocated buffers, which double in size when they are full.

    `buffers` are those of keys and values, each [B, G, C, d]. `keys` and `values` are views of their first slots, so
    that cropping is exact and costs nothing. `next_slot_BN` are the slots that the next states are written to (int64;
    None: the slots after the view, which is the case of one sequence).
    """

    next_slot_BN: Tensor | None = None
    buffers: list[Tensor] | None = None

    def update(self, key_states: Tensor, value_states: Tensor, *args, **kwargs) -> tuple[Tensor, Tensor]:
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        new_states = (key_states, value_states)
        if self.next_slot_BN is not None:
            for buffer, states in zip(self.buffers, new_states, strict=True):
                b = torch.arange(states.shape[0], device=buffer.device)[:, None]
                buffer[b, :, self.next_slot_BN] = states.transpose(1, 2)
            return self.keys, self.values
        old = self.get_seq_length()
        self.resize(old + key_states.shape[-2], new_states)
        for buffer, states in zip(self.buffers, new_states, strict=True):
            buffer[..., old : self.get_seq_length(), :] = states
        return self.keys, self.values

    def replace_buffers(self, buffers: list[Tensor], length: int) -> None:
        """Replaces the buffers by others with `length` slots in use."""
        self.buffers = buffers
        self.resize(length)

    def resize(self, length: int, like: Sequence[Tensor] = ()) -> None:
        """Makes `keys` and `values` views of the first `length` slots, and grows the buffers if needed. New buffers get
        shape, dtype and device from `like`, states [.., N, d]."""
        if self.buffers is None:
            self.buffers = [x.new_zeros(*x.shape[:-2], 0, x.shape[-1]) for x in like]
        if length > (capacity := self.buffers[0].shape[-2]):
            self.buffers = [F.pad(b, (0, 0, 0, buffer_capacity(length) - capacity)) for b in self.buffers]
        self.keys, self.values = (b[..., :length, :] for b in self.buffers)


class TargetCache(Cache):
    """A transformers cache that keeps every token in every layer.

    Sliding-window layers keep all tokens too, and their window is applied by the mask, so that a rollback finds all
    keys. The cache has one sequence, whose length transformers tracks, or B sequences (after `trim_padding`, `select`
    or `append`). For B sequences, `lengths` are tracked here, and `allocate` must be called before each pass.
    `committed` are the lengths before the last verification.
    """

    def __init__(self) -> None:
        super().__init__(layer_class_to_replicate=GrowingLayer)
        self._lengths: list[int] = []  # of several sequences; empty if there is one
        self.committed: list[int] = []

    @property
    def lengths(self) -> list[int]:
        """The number of tokens of each sequence."""
        return self._lengths or [self.get_seq_length()]

    def rollback(self, length: int) -> None:
        """Removes all but the first `length` tokens of the only sequence."""
        extra = self.get_seq_length() - length
        assert extra >= 0, (extra, length)
        if extra:
            self.crop(-extra)

    def trim_padding(self, lengths: Sequence[int]) -> None:
        """Keeps the first `lengths[b]` tokens of each sequence, after a prefill of prompts padded to one length."""
        if len(lengths) > 1:
            self._set_lengths(list(lengths))

    @torch.inference_mode()
    def allocate(self, n: int) -> Tensor:
        """Assigns the next `n` slots of each of several sequences to the next pass. Returns them, int64 [B, n]."""
        start = to_device([torch.tensor(self.lengths)], self.layers[0].keys.device)[0]
        slot_BN = start[:, None] + torch.arange(n, device=start.device)
        for layer in self.layers:
            layer.next_slot_BN = slot_BN.to(layer.keys.device)
            layer.resize(max(self.lengths) + n)
        return slot_BN

    @torch.inference_mode()
    def keep(self, path_BR: Tensor | None, count_B: Tensor) -> None:
        """See `fledge.targets.interface.Cache.keep`. Moves the paths' slots to directly after the kept tokens.
        Synchronizes the device."""
        if path_BR is not None:
            start = to_device([torch.tensor(self.committed)], path_BR.device)[0][:, None]
            place_R = torch.arange(path_BR.shape[1], device=path_BR.device)
            # behind the accepted nodes, slots are copied to themselves
            from_BR = start + torch.where(place_R < count_B[:, None], path_BR, place_R)
            for layer in self.layers:
                for buffer in layer.buffers:
                    move_slots(buffer, from_BR.to(buffer.device), (start + place_R).to(buffer.device))
        kept = [length + count for length, count in zip(self.committed, count_B.tolist(), strict=True)]
        if len(kept) == 1:
            self.rollback(kept[0])
        else:
            self._lengths = kept

    @torch.inference_mode()
    def select(self, sequences: Sequence[int]) -> None:
        """Keeps only the sequences with these indices, in this order."""
        if not sequences:
            self.layers, self._lengths = [], []
            return
        lengths = [self.lengths[b] for b in sequences]
        for layer in self.layers:
            indices = torch.tensor(sequences, device=layer.keys.device)
            layer.replace_buffers([select_sequences(b, indices, max(lengths)) for b in layer.buffers], max(lengths))
        self._set_lengths(lengths)

    @torch.inference_mode()
    def append(self, other: TargetCache) -> None:
        """Appends the sequences of another cache, whose layers are taken over if this one has none."""
        if not self.layers:
            self.layers, self._lengths = other.layers, other._lengths
            return
        lengths = [*self.lengths, *other.lengths]
        for layer, added in zip(self.layers, other.layers, strict=True):
            pairs = zip(layer.buffers, added.buffers, strict=True)
            layer.replace_buffers([concatenate_buffers(pair, max(lengths)) for pair in pairs], max(lengths))
        self._set_lengths(lengths)

    def _set_lengths(self, lengths: list[int]) -> None:
        self._lengths = lengths if len(lengths) > 1 else []
        for layer in self.layers:
            layer.next_slot_BN = None
            layer.resize(max(lengths))
