"""Key-value caches with exact rollback: the draft's own, and a layer for transformers' cache.

Both hold one sequence or several, each in a room of its own and of its own length. What lies in a room beyond its
length is zeros or what was forgotten, never uninitialised: masks hide it, and nothing that is not finite can be hidden.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers.cache_utils import Cache, DynamicLayer

from fledge.config import DraftConfig
from fledge.kernels.attention import grouped_attention
from fledge.kernels.sdpa import without_cudnn_sdpa
from fledge.kernels.transfer import to_device

LEAST = 256  # slots of a room


def join(rooms: Sequence[Tensor], needed: int) -> Tensor:
    """Rooms [.., B, G, C, d] of several caches in one, of twice the slots that are needed: a long sequence's room does
    not outlast it."""
    *lead, _, G, _, d = rooms[0].shape
    whole = rooms[0].new_zeros(*lead, sum(r.shape[-4] for r in rooms), G, max(2 * needed, LEAST), d)
    at = 0
    for room in rooms:
        slots = min(room.shape[-2], whole.shape[-2])
        whole[..., at : at + room.shape[-4], :, :slots, :] = room[..., :slots, :]
        at += room.shape[-4]
    return whole


def chosen(room: Tensor, at: Tensor, needed: int) -> Tensor:
    """Some of the rooms [.., B, G, C, d], of at most twice the slots that are needed."""
    return room[..., : max(2 * needed, LEAST), :].index_select(-4, at)


def move(room: Tensor, from_BR: Tensor, to_BR: Tensor) -> None:
    """Copies slots of rooms [.., B, G, C, d] to others of the same request, all read before any is written."""
    b = torch.arange(from_BR.shape[0], device=room.device)[:, None]
    by_slot = room.transpose(-3, -2)  # [.., B, C, G, d]
    by_slot[..., b, to_BR, :, :] = by_slot[..., b, from_BR, :, :]


class DraftCache:
    """Keys and values of a draft's layers for B sequences. `lengths` slots of each are kept, and `scratch` more lie
    beyond.

    Rolling back is setting `scratch` to zero: later writes overwrite.
    """

    def __init__(
        self, config: DraftConfig, device: torch.device, dtype: torch.dtype, requests: int = 1, capacity: int = LEAST
    ):
        shape = (config.num_hidden_layers, 2, requests, config.num_key_value_heads, capacity, config.head_dim)
        self.buffer = torch.zeros(shape, device=device, dtype=dtype)
        self.set_lengths([0] * requests)
        self.reserved = 0  # slots beyond the longest that may hold scratch

    @property
    def longest(self) -> int:
        return max(self.lengths)

    def reserve(self, slots: int) -> None:
        """Makes room for so many slots after the longest sequence, keeping what there is."""
        self.reserved = slots
        if (needed := self.longest + slots) > self.buffer.shape[-2]:
            self.buffer = F.pad(self.buffer, (0, 0, 0, max(needed, 2 * self.buffer.shape[-2]) - self.buffer.shape[-2]))

    def set_lengths(self, lengths: Sequence[int]) -> None:
        """Keeps so many slots of each, and no scratch."""
        self.lengths, self.scratch = list(lengths), 0
        self.length_B = to_device([torch.tensor(self.lengths)], self.buffer.device)[0]

    def keep(self, slots: Sequence[Sequence[int]]) -> None:
        """Of each one's scratch keeps these slots, ascending, and forgets the others."""
        for b, (mine, length) in enumerate(zip(slots, self.lengths, strict=True)):
            if mine:
                room = self.buffer[:, :, b]
                at = torch.tensor(mine, device=room.device) + length
                room[..., length : length + len(mine), :] = room.index_select(-2, at)
        self.set_lengths([n + len(mine) for n, mine in zip(self.lengths, slots, strict=True)])

    def select(self, rooms: Sequence[int]) -> None:
        """Keeps these sequences alone, in this order."""
        at = torch.tensor(rooms, device=self.buffer.device)
        self.set_lengths([self.lengths[b] for b in rooms])
        self.buffer = chosen(self.buffer, at, self.longest + self.reserved)

    def append(self, others: Sequence[DraftCache]) -> None:
        """Adds the sequences of others after its own."""
        self.set_lengths([*self.lengths, *(n for o in others for n in o.lengths)])
        self.buffer = join([self.buffer, *(o.buffer for o in others)], self.longest + self.reserved)

    def open(self, n: int, asked_BS: Tensor | None = None, seen_BSJ: Tensor | None = None) -> Tensor:
        """Says where the next `n` slots of each sequence go, beyond the scratch, and what they see: the past, or of the
        scratch and the new what `seen_BSJ` says. Where `attend` is asked about fewer rows they are `asked_BS`, int64,
        on the device. Returns the slots, int64 [B, n]. The caller adds `n` to `scratch`, or sets the lengths, once all
        layers have been through."""
        new = torch.arange(self.scratch, self.scratch + n, device=self.buffer.device)
        self.slot_Bn, self.asked_BS, self.seen_BSJ = self.length_B[:, None] + new, asked_BS, seen_BSJ
        self.end = self.longest + self.scratch + n
        self.masks: dict[int, Tensor | None] = {}  # by the number of rows that ask
        return self.slot_Bn

    def _mask(self, S: int) -> Tensor | None:
        """What S rows of each sequence see, bool [B, 1, S, end]; None where it is all."""
        (B, n), key = self.slot_Bn.shape, torch.arange(self.end, device=self.buffer.device)
        if self.seen_BSJ is not None:
            past = (key < self.length_B[:, None])[:, None].expand(-1, S, -1)
            own = self.length_B[:, None] + torch.arange(self.seen_BSJ.shape[2], device=key.device)
            return past.scatter(2, own[:, None].expand_as(self.seen_BSJ), self.seen_BSJ)[:, None]
        if B == 1 and S == 1:  # asked is the last
            return None
        slot_BS = self.slot_Bn if n == S else self.slot_Bn.gather(1, self.asked_BS)
        return (key <= slot_BS[..., None])[:, None]

    def attend(self, layer: int, q_MHd: Tensor, k_NGd: Tensor, v_NGd: Tensor) -> Tensor:
        """Writes B x n slots where `open` said and attends with B x S queries, the requests one after the other.
        Returns [M, H, d], M = B S."""
        (B, n), rooms = self.slot_Bn.shape, self.buffer[layer]
        for room, made in zip(rooms, (k_NGd, v_NGd), strict=True):
            made = made.view(B, n, *made.shape[1:])
            if B == 1:
                room[0, :, self.end - n : self.end] = made[0].transpose(0, 1)
            else:
                room[torch.arange(B, device=room.device)[:, None], :, self.slot_Bn] = made
        keys, values = rooms[:, :, :, : self.end]
        q_BHSd = q_MHd.view(B, -1, *q_MHd.shape[1:]).transpose(1, 2)
        S = q_BHSd.shape[2]
        if S not in self.masks:
            self.masks[S] = self._mask(S)
        with without_cudnn_sdpa(q_MHd.device):
            return grouped_attention(q_BHSd, keys, values, self.masks[S]).reshape(q_MHd.shape)


class GrowingLayer(DynamicLayer):
    """transformers' full-attention cache layer, writing in place into room that doubles instead of concatenating.

    `keys` and `values` are views of the room, so cropping them is O(1) and exact. `at_BN`, where it is set, says which
    slots of each sequence the next states go to.
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
        """Takes another room, which holds the first `length` slots, and lets go of the old one at once."""
        self.room = room
        self.show(length)

    def show(self, length: int, like: Sequence[Tensor] = ()) -> None:
        """Makes `keys` and `values` the first so many slots, in room enough for them."""
        if self.room is None:
            self.room = [x.new_zeros(*x.shape[:-2], 0, x.shape[-1]) for x in like]
        if length > (there := self.room[0].shape[-2]):
            self.room = [F.pad(room, (0, 0, 0, max(2 * length, LEAST) - there)) for room in self.room]
        self.keys, self.values = (room[..., :length, :] for room in self.room)


class TargetCache(Cache):
    """A transformers cache that keeps every token of every layer, sliding-window layers too: their mask limits what
    is read, and nothing that a rollback needs is ever dropped.

    Of one sequence, whose length transformers knows; or of B sequences, made by `select` and `append`, whose `lengths`
    are kept here and whose states go where `open` says.
    """

    def __init__(self) -> None:
        super().__init__(layer_class_to_replicate=GrowingLayer)
        self._lengths: list[int] = []  # where there are several

    @property
    def lengths(self) -> list[int]:
        """Tokens of each sequence."""
        return self._lengths or [self.get_seq_length()]

    def rollback(self, length: int) -> None:
        """Of one sequence forgets everything after the first `length` tokens."""
        extra = self.get_seq_length() - length
        assert extra >= 0, (extra, length)
        if extra:
            self.crop(-extra)

    def settle(self, lengths: Sequence[int]) -> None:
        """Of several prompts that were read side by side from their beginnings, keeps the tokens of each."""
        if len(lengths) > 1:
            self._hold(list(lengths))

    @torch.inference_mode()
    def open(self, n: int) -> Tensor:
        """Where the next `n` tokens of each of several sequences go, int64 [B, n]."""
        start = to_device([torch.tensor(self.lengths)], self.layers[0].keys.device)[0]
        at_BN = start[:, None] + torch.arange(n, device=start.device)
        for layer in self.layers:
            layer.at_BN = at_BN.to(layer.keys.device)
            layer.show(max(self.lengths) + n)
        return at_BN

    @torch.inference_mode()
    def keep(self, lengths: Sequence[int], paths: Sequence[Sequence[int]]) -> None:
        """Of what follows the first `lengths` tokens of each keeps the `paths`, ascending, in the first places."""
        if any(list(path) != list(range(len(path))) for path in paths):
            longest = max(map(len, paths))
            start = torch.tensor(lengths)[:, None]
            # a shorter path's last places take what they have
            from_BR = start + torch.tensor([[*path, *range(len(path), longest)] for path in paths])
            from_BR, to_BR = to_device([from_BR, start + torch.arange(longest)], self.layers[0].keys.device)
            for layer in self.layers:
                for room in layer.room:
                    move(room, from_BR.to(room.device), to_BR.to(room.device))
        kept = [length + len(path) for length, path in zip(lengths, paths, strict=True)]
        if len(kept) == 1:
            self.rollback(kept[0])
        else:
            self._lengths = kept

    @torch.inference_mode()
    def select(self, rooms: Sequence[int]) -> None:
        """Keeps these sequences alone, in this order."""
        lengths = [self.lengths[b] for b in rooms]
        for layer in self.layers:
            at = torch.tensor(rooms, device=layer.keys.device)
            layer.move_into([chosen(room, at, max(lengths)) for room in layer.room], max(lengths))
        self._hold(lengths)

    @torch.inference_mode()
    def append(self, others: Sequence[TargetCache]) -> None:
        """Adds the sequences of others after its own."""
        lengths = [*self.lengths, *(n for o in others for n in o.lengths)]
        for i, layer in enumerate(self.layers):
            together = zip(layer.room, *(o.layers[i].room for o in others), strict=True)
            layer.move_into([join(rooms, max(lengths)) for rooms in together], max(lengths))
        self._hold(lengths)

    def _hold(self, lengths: list[int]) -> None:
        self._lengths = lengths if len(lengths) > 1 else []
        for layer in self.layers:
            layer.at_BN = None
            layer.show(max(lengths))
