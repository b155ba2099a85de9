"""The key-value cache of a transformers target: exact rollback, and several sequences of different lengths."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers.cache_utils import Cache, DynamicLayer

from fledge.kernels.transfer import to_device
from fledge.models.kv_cache import buffer_capacity, concatenate_buffers, select_sequences


def move_slots(room: Tensor, from_BR: Tensor, to_BR: Tensor) -> None:
    """Copies slots `from_BR` of rooms [.., B, G, C, d] to slots `to_BR` of the same request, all read before any is
    written. Both int64 [B, R]."""
    b = torch.arange(from_BR.shape[0], device=room.device)[:, None]
    by_slot = room.transpose(-3, -2)  # [.., B, C, G, d]
    by_slot[..., b, to_BR, :, :] = by_slot[..., b, from_BR, :, :]


class GrowingLayer(DynamicLayer):
    """transformers' full-attention cache layer, which writes in place into buffers that double in size instead of
    concatenating.

    `room` holds the buffers [B, G, C, d] of keys and values; `keys` and `values` are views of their first slots, so
    that cropping is O(1) and exact. `at_BN`, where set, says which slots of each sequence the next states go to.
    """

    at_BN: Tensor | None = None
    room: list[Tensor] | None = None

    def update(self, key_states: Tensor, value_states: Tensor, *args, **kwargs) -> tuple[Tensor, Tensor]:
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        made = (key_states, value_states)
        if self.at_BN is not None:
            for room, states in zip(self.room, made, strict=True):
                b = torch.arange(states.shape[0], device=room.device)[:, None]
                room[b, :, self.at_BN] = states.transpose(1, 2)
            return self.keys, self.values
        old = self.get_seq_length()
        self.show(old + key_states.shape[-2], made)
        for room, states in zip(self.room, made, strict=True):
            room[..., old : self.get_seq_length(), :] = states
        return self.keys, self.values

    def move_into(self, room: list[Tensor], length: int) -> None:
        """Takes other buffers, of which the first `length` slots are in use, and releases the old ones."""
        self.room = room
        self.show(length)

    def show(self, length: int, like: Sequence[Tensor] = ()) -> None:
        """Makes `keys` and `values` the first `length` slots, in larger buffers where needed; `like` are states [..,
        N, d] to shape the first buffers after."""
        if self.room is None:
            self.room = [x.new_zeros(*x.shape[:-2], 0, x.shape[-1]) for x in like]
        if length > (there := self.room[0].shape[-2]):
            self.room = [F.pad(room, (0, 0, 0, buffer_capacity(length) - there)) for room in self.room]
        self.keys, self.values = (room[..., :length, :] for room in self.room)


class TargetCache(Cache):
    """A transformers cache that keeps every token in every layer. In sliding-window layers too the mask limits what is
    read, so that nothing a rollback needs is dropped.

    It holds one sequence, whose length transformers tracks, or B sequences (after `settle`, `select` or `append`),
    whose `lengths` are kept here and whose next states go to the slots that `allocate` gives.
    """

    def __init__(self) -> None:
        super().__init__(layer_class_to_replicate=GrowingLayer)
        self._lengths: list[int] = []  # of several sequences; empty for one

    @property
    def lengths(self) -> list[int]:
        """Tokens of each sequence."""
        return self._lengths or [self.get_seq_length()]

    def rollback(self, length: int) -> None:
        """Forgets everything after the first `length` tokens of the only sequence."""
        extra = self.get_seq_length() - length
        assert extra >= 0, (extra, length)
        if extra:
            self.crop(-extra)

    def settle(self, lengths: Sequence[int]) -> None:
        """After several prompts were read in one padded pass, keeps each one's first tokens, `lengths` of them."""
        if len(lengths) > 1:
            self._hold(list(lengths))

    @torch.inference_mode()
    def allocate(self, n: int) -> Tensor:
        """Opens `n` slots behind each of several sequences for the next states. Returns them, int64 [B, n]."""
        start = to_device([torch.tensor(self.lengths)], self.layers[0].keys.device)[0]
        at_BN = start[:, None] + torch.arange(n, device=start.device)
        for layer in self.layers:
            layer.at_BN = at_BN.to(layer.keys.device)
            layer.show(max(self.lengths) + n)
        return at_BN

    @torch.inference_mode()
    def keep(self, lengths: Sequence[int], paths: Sequence[Sequence[int]]) -> None:
        """See `fledge.targets.interface.Cache.keep`: moves the paths' slots behind the kept tokens."""
        if any(list(path) != list(range(len(path))) for path in paths):
            longest = max(map(len, paths))
            start = torch.tensor(lengths)[:, None]
            # a shorter path is filled up with slots that are copied to themselves
            from_BR = start + torch.tensor([[*path, *range(len(path), longest)] for path in paths])
            from_BR, to_BR = to_device([from_BR, start + torch.arange(longest)], self.layers[0].keys.device)
            for layer in self.layers:
                for room in layer.room:
                    move_slots(room, from_BR.to(room.device), to_BR.to(room.device))
        kept = [length + len(path) for length, path in zip(lengths, paths, strict=True)]
        if len(kept) == 1:
            self.rollback(kept[0])
        else:
            self._lengths = kept

    @torch.inference_mode()
    def select(self, sequences: Sequence[int]) -> None:
        """Keeps only these sequences, in this order."""
        lengths = [self.lengths[b] for b in sequences]
        for layer in self.layers:
            at = torch.tensor(sequences, device=layer.keys.device)
            layer.move_into([select_sequences(room, at, max(lengths)) for room in layer.room], max(lengths))
        self._hold(lengths)

    @torch.inference_mode()
    def append(self, others: Sequence[TargetCache]) -> None:
        """Adds the sequences of other caches after its own."""
        lengths = [*self.lengths, *(n for o in others for n in o.lengths)]
        for i, layer in enumerate(self.layers):
            together = zip(layer.room, *(o.layers[i].room for o in others), strict=True)
            layer.move_into([concatenate_buffers(rooms, max(lengths)) for rooms in together], max(lengths))
        self._hold(lengths)

    def _hold(self, lengths: list[int]) -> None:
        self._lengths = lengths if len(lengths) > 1 else []
        for layer in self.layers:
            layer.at_BN = None
            layer.show(max(lengths))
