"""Key-value caches with exact rollback: the draft's own, and a layer for transformers' cache."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers.cache_utils import Cache, DynamicLayer

from fledge.config import DraftConfig


class DraftCache:
    """Keys and values of a draft's layers for one sequence; `length` slots are kept, what lies beyond is scratch.

    Rolling back is setting `length`: later writes overwrite.
    """

    def __init__(self, config: DraftConfig, device: torch.device, dtype: torch.dtype, capacity: int = 256):
        self.shape = (config.num_hidden_layers, 2, config.num_key_value_heads, capacity, config.head_dim)
        self.buffer = torch.empty(self.shape, device=device, dtype=dtype)
        self.length = 0
        self.visible: Tensor | None = None  # where it is not the past: bool [S, length + T]
        self.groups = config.num_attention_heads // config.num_key_value_heads

    def reserve(self, length: int) -> None:
        """Makes room for `length` slots, keeping those there are."""
        if length > self.buffer.shape[3]:
            grown = self.buffer.new_empty(*self.shape[:3], max(length, 2 * self.buffer.shape[3]), self.shape[4])
            grown[:, :, :, : self.length] = self.buffer[:, :, :, : self.length]
            self.buffer = grown

    def keep(self, slots: Sequence[int]) -> None:
        """Of the scratch beyond `length` keeps these slots, ascending, and forgets the others."""
        if slots:
            at = torch.tensor(slots, device=self.buffer.device) + self.length
            self.buffer[..., self.length : self.length + len(slots), :] = self.buffer.index_select(-2, at)
            self.length += len(slots)

    def attend(self, layer: int, q_SHd: Tensor, k_TGd: Tensor, v_TGd: Tensor) -> Tensor:
        """Writes T slots after `length` and attends with the last S of them, causally or as `visible` says. Returns
        [S, H, d].

        The caller advances `length` once all layers have been through.
        """
        T, S = k_TGd.shape[0], q_SHd.shape[0]
        end = self.length + T
        keys, values = self.buffer[layer]
        keys[:, self.length : end] = k_TGd.transpose(0, 1)
        values[:, self.length : end] = v_TGd.transpose(0, 1)
        keys, values = keys[None, :, :end], values[None, :, :end]
        if S == 1 and self.visible is None:  # it sees all: the heads that share a key are the rows of one product
            q = q_SHd.view(1, -1, self.groups, q_SHd.shape[-1])
            return F.scaled_dot_product_attention(q, keys, values).reshape(q_SHd.shape)
        at = torch.arange(end, device=q_SHd.device)
        mask = at <= at[end - S :, None] if self.visible is None else self.visible
        q = q_SHd.transpose(0, 1)[None]
        return F.scaled_dot_product_attention(q, keys, values, attn_mask=mask, enable_gqa=True)[0].transpose(0, 1)


class GrowingLayer(DynamicLayer):
    """transformers' full-attention cache layer, writing in place into room that doubles instead of concatenating.

    `keys` and `values` are views of the room, so cropping them is O(1) and exact.
    """

    def update(self, key_states: Tensor, value_states: Tensor, *args, **kwargs) -> tuple[Tensor, Tensor]:
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
            self.room = None
        old = self.get_seq_length()
        new = old + key_states.shape[-2]
        if self.room is None or new > self.room[0].shape[-2]:
            self.room = [self._grow(states, held, new) for states, held in self._pairs(key_states, value_states)]
        for room, states in zip(self.room, (key_states, value_states), strict=True):
            room[..., old:new, :] = states
        self.keys, self.values = (room[..., :new, :] for room in self.room)
        return self.keys, self.values

    def _pairs(self, key_states: Tensor, value_states: Tensor) -> tuple[tuple[Tensor, Tensor], ...]:
        return (key_states, self.keys), (value_states, self.values)

    @staticmethod
    def _grow(states: Tensor, held: Tensor, needed: int) -> Tensor:
        room = states.new_empty(*states.shape[:-2], max(2 * needed, 256), states.shape[-1])
        if held.numel():
            room[..., : held.shape[-2], :] = held
        return room


class TargetCache(Cache):
    """A transformers cache that keeps every token of every layer, sliding-window layers too: their mask limits what
    is read, and nothing that a rollback needs is ever dropped."""

    def __init__(self) -> None:
        super().__init__(layer_class_to_replicate=GrowingLayer)

    def rollback(self, length: int) -> None:
        """Forgets everything after the first `length` tokens."""
        extra = self.get_seq_length() - length
        assert extra >= 0, (extra, length)
        if extra:
            self.crop(-extra)

    @torch.inference_mode()
    def keep(self, length: int, path: Sequence[int]) -> None:
        """Of what follows the first `length` tokens keeps these, ascending, in the places of the first of them."""
        if list(path) != list(range(len(path))):
            for layer in self.layers:
                at = torch.tensor(path, device=layer.keys.device) + length
                for room in layer.room:
                    room[..., length : length + len(path), :] = room.index_select(-2, at)
        self.rollback(length + len(path))
