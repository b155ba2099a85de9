"""The draft's key-value cache, with exact rollback, and what caches of several sequences share.

Each sequence has a room of its own: slots for its keys and values, of which the first `length` are in use. The others
hold zeros or forgotten values, never uninitialised memory: masks hide them, and a mask cannot hide NaN or infinity.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from fledge.config import DraftConfig
from fledge.kernels.attention import grouped_attention, prepare_mask
from fledge.kernels.sdpa import without_cudnn_sdpa
from fledge.kernels.transfer import to_device

LEAST = 256  # slots of a new room


def room_slots(needed: int) -> int:
    """Slots of a room that is to hold `needed`: twice as many, so that growing it is rare."""
    return max(2 * needed, LEAST)


def join_rooms(rooms: Sequence[Tensor], needed: int) -> Tensor:
    """Rooms [.., B, G, C, d] of several caches as one tensor, with twice the `needed` slots, so that memory taken for a
    long sequence is given back after it."""
    *lead, _, G, _, d = rooms[0].shape
    whole = rooms[0].new_zeros(*lead, sum(r.shape[-4] for r in rooms), G, room_slots(needed), d)
    at = 0
    for room in rooms:
        slots = min(room.shape[-2], whole.shape[-2])
        whole[..., at : at + room.shape[-4], :, :slots, :] = room[..., :slots, :]
        at += room.shape[-4]
    return whole


def select_rooms(room: Tensor, at: Tensor, needed: int) -> Tensor:
    """The rooms numbered `at` (int64) of [.., B, G, C, d], with at most twice the `needed` slots."""
    return room[..., : room_slots(needed), :].index_select(-4, at)


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
        self.heads_per_key = config.num_attention_heads // config.num_key_value_heads
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

    def select(self, sequences: Sequence[int]) -> None:
        """Keeps only these sequences, in this order."""
        at = torch.tensor(sequences, device=self.buffer.device)
        self.set_lengths([self.lengths[b] for b in sequences])
        self.buffer = select_rooms(self.buffer, at, self.longest + self.reserved)

    def append(self, others: Sequence[DraftCache]) -> None:
        """Adds the sequences of other caches after its own."""
        self.set_lengths([*self.lengths, *(n for o in others for n in o.lengths)])
        self.buffer = join_rooms([self.buffer, *(o.buffer for o in others)], self.longest + self.reserved)

    def open(self, n: int, asked_BS: Tensor | None = None, seen_BSJ: Tensor | None = None) -> Tensor:
        """Says where the next `n` slots of each sequence go, beyond the scratch, and what they see: the past, or of the
        scratch and the new what `seen_BSJ` says. Where `attend` is asked about fewer rows they are `asked_BS`, int64,
        on the device. Returns the slots, int64 [B, n]. The caller adds `n` to `scratch`, or sets the lengths, once all
        layers have been through."""
        new = torch.arange(self.scratch, self.scratch + n, device=self.buffer.device)
        self.slot_Bn, self.asked_BS, self.seen_BSJ = self.length_B[:, None] + new, asked_BS, seen_BSJ
        self.end = self.longest + self.scratch + n
        self.masks: dict[int, Tensor | None] = {}  # by the number of rows that ask; of all layers
        return self.slot_Bn

    def _mask(self, S: int) -> Tensor | None:
        """What S rows of each sequence see, prepared for `grouped_attention`; None where they see all."""
        seen_B1SL = self._seen(S)
        return None if seen_B1SL is None else prepare_mask(seen_B1SL, self.heads_per_key, self.buffer.dtype)

    def _seen(self, S: int) -> Tensor | None:
        """What S rows of each sequence see, bool [B, 1, S, end]; None where they see all."""
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
