"""The caches of a transformers target: `TargetCache` with exact rollback, for several sequences of different lengths,
and `RecurrentCache` without rollback, for a model with recurrent layers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers.cache_utils import Cache, DynamicLayer

from fledge.ops.device import to_device

MIN_CAPACITY = 256  # slots per sequence of a new buffer


def buffer_capacity(needed: int) -> int:
    """The slots per sequence to allocate for `needed` slots in use: twice the number, since growing a buffer copies."""
    return max(2 * needed, MIN_CAPACITY)


def sequences_of(buffer: Tensor) -> Tensor:
    """The index of each sequence of a buffer [B, G, C, d], int64 [B, 1]."""
    return torch.arange(buffer.shape[0], device=buffer.device)[:, None]


class GrowingLayer(DynamicLayer):
    """transformers' full-attention cache layer with preallocated buffers, which double in size when they are full.

    `buffers` are the buffers of keys and of values, each [B, G, C, d]. `keys` and `values` are views of the buffers'
    first slots, so cropping is exact and costs nothing. `next_slot_BN` are the slots that the next states are written
    to (int64; None: the slots after the view, for a cache of one sequence).
    """

    next_slot_BN: Tensor | None = None
    buffers: list[Tensor] | None = None

    def update(self, key_states: Tensor, value_states: Tensor, *args, **kwargs) -> tuple[Tensor, Tensor]:
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        old, new_states = self.get_seq_length(), (key_states, value_states)
        if self.next_slot_BN is None:
            self.resize(old + key_states.shape[-2], new_states)
        for buffer, states in zip(self.buffers, new_states, strict=True):
            if self.next_slot_BN is None:
                buffer[..., old : self.get_seq_length(), :] = states
            else:
                buffer[sequences_of(buffer), :, self.next_slot_BN] = states.transpose(1, 2)
        return self.keys, self.values

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

    Sliding-window layers keep all tokens too, and the mask applies the window, so that a rollback finds all keys. The
    cache has one sequence, whose length transformers tracks, or B sequences (after `trim_padding`, `select` or
    `append`). For B sequences, `lengths` are tracked here, and `allocate` must be called before each pass.
    `committed` are the lengths before the last verification.
    """

    def __init__(self) -> None:
        super().__init__(layer_class_to_replicate=GrowingLayer)
        self._lengths: list[int] = []  # of several sequences; empty for one sequence
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
        """Assigns the next `n` slots of each of B sequences to the next pass. Returns the slots, int64 [B, n]."""
        start = to_device([torch.tensor(self.lengths)], self.layers[0].keys.device)[0]
        slot_BN = start[:, None] + torch.arange(n, device=start.device)
        for layer in self.layers:
            layer.next_slot_BN = slot_BN.to(layer.keys.device)
            layer.resize(max(self.lengths) + n)
        return slot_BN

    @torch.inference_mode()
    def keep(self, path_BR: Tensor | None, count_B: Tensor) -> None:
        """Moves the paths' slots to directly after the kept tokens. Synchronizes the device."""
        if path_BR is not None:
            start = to_device([torch.tensor(self.committed)], path_BR.device)[0][:, None]
            place_R = torch.arange(path_BR.shape[1], device=path_BR.device)
            # behind the accepted nodes, slots are copied to themselves
            from_BR = start + torch.where(place_R < count_B[:, None], path_BR, place_R)
            for buffer in (buffer for layer in self.layers for buffer in layer.buffers):
                b, old_BR, new_BR = sequences_of(buffer), from_BR.to(buffer.device), (start + place_R).to(buffer.device)
                buffer[b, :, new_BR] = buffer[b, :, old_BR]
        kept = [length + count for length, count in zip(self.committed, count_B.tolist(), strict=True)]
        if len(kept) == 1:
            self.rollback(kept[0])
        else:
            self._lengths = kept

    @torch.inference_mode()
    def select(self, sequences: Sequence[int]) -> None:
        """Keeps only the sequences with the given indices, in the given order."""
        if not sequences:
            self.layers, self._lengths = [], []
            return
        lengths = [self.lengths[b] for b in sequences]
        capacity = buffer_capacity(max(lengths))  # frees the memory of a long sequence that has ended
        for layer in self.layers:
            indices = torch.tensor(sequences, device=layer.keys.device)
            layer.buffers = [buffer[:, :, :capacity].index_select(0, indices) for buffer in layer.buffers]
            layer.resize(max(lengths))  # frees the layer's old buffers before the next layer's are copied
        self._set_lengths(lengths)

    @torch.inference_mode()
    def append(self, other: TargetCache) -> None:
        """Appends the sequences of another cache. A cache without layers takes over the other cache's layers."""
        if not self.layers:
            self.layers, self._lengths = other.layers, other._lengths
            return
        before, lengths = len(self.lengths), [*self.lengths, *other.lengths]
        capacity = buffer_capacity(max(lengths))
        for layer, added in zip(self.layers, other.layers, strict=True):
            for i, (ours, theirs) in enumerate(zip(layer.buffers, added.buffers, strict=True)):
                _, G, _, d = ours.shape
                layer.buffers[i] = ours.new_zeros(len(lengths), G, capacity, d)
                for part, rows in ((ours, slice(before)), (theirs, slice(before, None))):
                    used = part[:, :, :capacity]
                    layer.buffers[i][rows, :, : used.shape[2]] = used
            layer.resize(max(lengths))  # frees the layer's old buffers before the next layer's are copied
        self._set_lengths(lengths)

    def _set_lengths(self, lengths: list[int]) -> None:
        self._lengths = lengths if len(lengths) > 1 else []
        for layer in self.layers:
            layer.next_slot_BN = None
            layer.resize(max(lengths))


class RecurrentCache:
    """The cache of a model with recurrent layers (state-space models, linear attention): wraps the model's own cache of
    one sequence. With `recompute`, there is no cache: every call runs the whole sequence again.

    Has the methods of `TargetCache` that decoding without a draft needs.
    """

    def __init__(self, recompute: bool = False):
        self.recompute = recompute
        self.token_1T: Tensor | None = None
        self.state: Any = None  # the cache that the model returned

    @property
    def lengths(self) -> list[int]:
        """The number of tokens of the only sequence."""
        return [0 if self.token_1T is None else self.token_1T.shape[1]]

    def run(self, model: nn.Module, input_ids: Tensor, argument: str, **inputs: Any) -> Tensor:
        """Runs tokens [1, N] after the earlier tokens. `argument` is the name of the model's cache argument. Returns
        the logits [1, N, V], or [1, n, V] if `inputs` has `logits_to_keep` = n."""
        N = input_ids.shape[1]
        self.token_1T = input_ids if self.token_1T is None else torch.cat([self.token_1T, input_ids], dim=1)
        if self.recompute:
            return model(input_ids=self.token_1T, use_cache=False, **inputs).logits[:, -N:]
        if self.state is not None:
            inputs = {argument: self.state, **inputs}
        out = model(input_ids=input_ids, use_cache=True, **inputs)
        # transformers 5.24 names the cache `cache` in outputs, even if a model's own code has an older argument name
        self.state = out["cache"] if "cache" in out else out.get(argument)
        return out.logits

    def trim_padding(self, lengths: Sequence[int]) -> None:
        """Asserts that the cache has a single prompt, without padding."""
        assert list(lengths) == self.lengths, (lengths, self.lengths)

    def keep(self, path_BR: Tensor | None, count_B: Tensor) -> None:
        """Asserts that no tree was verified, since the cache cannot remove nodes. Does nothing else: all tokens are
        kept."""
        assert path_BR is None

    def select(self, sequences: Sequence[int]) -> None:
        """Keeps the sequence; without indices, removes the sequence."""
        if not sequences:
            self.token_1T = self.state = None

    def append(self, other: RecurrentCache) -> None:
        """Takes the sequence of another cache. Raises ValueError if this cache already has a sequence."""
        if self.token_1T is not None:
            raise ValueError(
                "a target whose cache cannot be rolled back decodes one request at a time; use a batch of 1"
            )
        self.token_1T, self.state = other.token_1T, other.state
