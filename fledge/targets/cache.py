"""The key-value cache of a transformers target, with exact rollback, for several sequences of different lengths."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers.cache_utils import Cache, DynamicLayer

from fledge.kernels.transfer import to_device
from fledge.models.kv_cache import buffer_capacity, concatenate_buffers, select_sequences


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
    """

    def __init__(self) -> None:
        super().__init__(layer_class_to_replicate=GrowingLayer)
        self._lengths: list[int] = []  # of several sequences; empty if there is one

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
    def keep(self, lengths: Sequence[int], paths: Sequence[Sequence[int]]) -> None:
        """See `fledge.targets.interface.Cache.keep`. Moves the paths' slots to directly after the kept tokens."""
        if any(list(path) != list(range(len(path))) for path in paths):
            longest = max(map(len, paths))
            start = torch.tensor(lengths)[:, None]
            # shorter paths are padded with slots that are copied to themselves
            from_BR = start + torch.tensor([[*path, *range(len(path), longest)] for path in paths])
            from_BR, to_BR = to_device([from_BR, start + torch.arange(longest)], self.layers[0].keys.device)
            for layer in self.layers:
                for buffer in layer.buffers:
                    move_slots(buffer, from_BR.to(buffer.device), to_BR.to(buffer.device))
        kept = [length + len(path) for length, path in zip(lengths, paths, strict=True)]
        if len(kept) == 1:
            self.rollback(kept[0])
        else:
            self._lengths = kept

    @torch.inference_mode()
    def select(self, sequences: Sequence[int]) -> None:
        """Keeps only the sequences with these indices, in this order."""
        lengths = [self.lengths[b] for b in sequences]
        for layer in self.layers:
            indices = torch.tensor(sequences, device=layer.keys.device)
            layer.replace_buffers([select_sequences(b, indices, max(lengths)) for b in layer.buffers], max(lengths))
        self._set_lengths(lengths)

    @torch.inference_mode()
    def append(self, others: Sequence[TargetCache]) -> None:
        """Appends the sequences of other caches."""
        lengths = [*self.lengths, *(n for o in others for n in o.lengths)]
        for i, layer in enumerate(self.layers):
            buffers = zip(layer.buffers, *(o.layers[i].buffers for o in others), strict=True)
            layer.replace_buffers([concatenate_buffers(pair, max(lengths)) for pair in buffers], max(lengths))
        self._set_lengths(lengths)

    def _set_lengths(self, lengths: list[int]) -> None:
        self._lengths = lengths if len(lengths) > 1 else []
        for layer in self.layers:
            layer.next_slot_BN = None
            layer.resize(max(lengths))
