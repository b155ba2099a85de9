"""The draft's key-value cache, with exact rollback, and buffer functions that the target's cache shares.

A buffer [.., B, G, C, d] has C slots for each of B sequences, of which the first `length` hold the sequence's keys or
values. The other slots hold zeros or old values, never uninitialized memory: they are masked, and a mask does not
remove NaN or infinite values.
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


class DraftCache:
    """Keys and values of a draft's layers for B sequences.

    A sequence has `lengths[b]` committed slots, followed by `scratch` slots of drafted nodes. Setting `scratch` to 0
    discards those; they are overwritten later.
    """

    def __init__(
        self,
        config: DraftConfig,
        device: torch.device,
        dtype: torch.dtype,
        requests: int = 1,
        capacity: int = MIN_CAPACITY,
    ):
        shape = (config.num_hidden_layers, 2, requests, config.num_key_value_heads, capacity, config.head_dim)
        self.buffer = torch.zeros(shape, device=device, dtype=dtype)
        self.heads_per_key = config.num_attention_heads // config.num_key_value_heads
        self.set_lengths([0] * requests)
        self.reserved = 0  # slots of the last `reserve`, which the capacity includes from then on

    @property
    def longest(self) -> int:
        return max(self.lengths)

    def reserve(self, slots: int) -> None:
        """Grows the buffer, if needed, to a capacity of `slots` slots after the longest sequence."""
        self.reserved = slots
        if (needed := self.longest + slots) > self.buffer.shape[-2]:
            self.buffer = F.pad(self.buffer, (0, 0, 0, max(needed, 2 * self.buffer.shape[-2]) - self.buffer.shape[-2]))

    def set_lengths(self, lengths: Sequence[int]) -> None:
        """Sets the number of committed slots of each sequence, and discards scratch slots."""
        self.lengths, self.scratch = list(lengths), 0
        self.length_B = to_device([torch.tensor(self.lengths)], self.buffer.device)[0]

    def keep(self, slots: Sequence[Sequence[int]]) -> None:
        """Commits these scratch slots of each sequence (ascending indices from 0), and discards the others."""
        for b, (kept, length) in enumerate(zip(slots, self.lengths, strict=True)):
            if kept:
                buffer = self.buffer[:, :, b]
                at = torch.tensor(kept, device=buffer.device) + length
                buffer[..., length : length + len(kept), :] = buffer.index_select(-2, at)
        self.set_lengths([n + len(kept) for n, kept in zip(self.lengths, slots, strict=True)])

    def select(self, sequences: Sequence[int]) -> None:
        """Keeps only the sequences with these indices, in this order."""
        indices = torch.tensor(sequences, device=self.buffer.device)
        self.set_lengths([self.lengths[b] for b in sequences])
        self.buffer = select_sequences(self.buffer, indices, self.longest + self.reserved)

    def append(self, others: Sequence[DraftCache]) -> None:
        """Appends the sequences of other caches."""
        self.set_lengths([*self.lengths, *(n for o in others for n in o.lengths)])
        self.buffer = concatenate_buffers([self.buffer, *(o.buffer for o in others)], self.longest + self.reserved)

    def allocate(self, n: int, query_BS: Tensor | None = None, visible_BSJ: Tensor | None = None) -> Tensor:
        """Assigns the next `n` slots of each sequence, after its scratch slots, to the rows of the following `attend`
        calls. Returns the slots, int64 [B, n].

        Each row sees all earlier slots of its sequence and its own. With `visible_BSJ` (bool), it sees the committed
        slots, and those of the J scratch and new slots that are True. `query_BS` are the indices of the rows with
        queries among the n rows, int64 on the device, if `attend` is called with fewer queries than rows. After the
        last layer, the caller adds `n` to `scratch` or calls `set_lengths`.
        """
        new = torch.arange(self.scratch, self.scratch + n, device=self.buffer.device)
        self.slot_Bn, self.query_BS, self.visible_BSJ = self.length_B[:, None] + new, query_BS, visible_BSJ
        self.end = self.longest + self.scratch + n
        self.masks: dict[int, Tensor | None] = {}  # by the number of queries; the same for all layers
        return self.slot_Bn

    def _mask(self, S: int) -> Tensor | None:
        """The mask of S queries per sequence, prepared for `grouped_attention`; None if they see all slots."""
        visible_B1SL = self._visible_slots(S)
        return None if visible_B1SL is None else prepare_mask(visible_B1SL, self.heads_per_key, self.buffer.dtype)

    def _visible_slots(self, S: int) -> Tensor | None:
        """The slots that each of S queries per sequence sees, bool [B, 1, S, end]; None if they see all."""
        (B, n), key = self.slot_Bn.shape, torch.arange(self.end, device=self.buffer.device)
        if self.visible_BSJ is not None:
            past = (key < self.length_B[:, None])[:, None].expand(-1, S, -1)
            own = self.length_B[:, None] + torch.arange(self.visible_BSJ.shape[2], device=key.device)
            return past.scatter(2, own[:, None].expand_as(self.visible_BSJ), self.visible_BSJ)[:, None]
        if B == 1 and S == 1:  # the query is that of the last row
            return None
        slot_BS = self.slot_Bn if n == S else self.slot_Bn.gather(1, self.query_BS)
        return (key <= slot_BS[..., None])[:, None]

    def attend(self, layer: int, q_MHd: Tensor, k_NGd: Tensor, v_NGd: Tensor) -> Tensor:
        """Writes keys and values of N = B n rows to the slots of `allocate`, and attends with M = B S queries, both
        grouped by sequence. Returns [M, H, d]."""
        (B, n), buffers = self.slot_Bn.shape, self.buffer[layer]
        for buffer, new in zip(buffers, (k_NGd, v_NGd), strict=True):
            new = new.view(B, n, *new.shape[1:])
            if B == 1:
                buffer[0, :, self.end - n : self.end] = new[0].transpose(0, 1)
            else:
                buffer[torch.arange(B, device=buffer.device)[:, None], :, self.slot_Bn] = new
        keys, values = buffers[:, :, :, : self.end]
        q_BHSd = q_MHd.view(B, -1, *q_MHd.shape[1:]).transpose(1, 2)
        S = q_BHSd.shape[2]
        if S not in self.masks:
            self.masks[S] = self._mask(S)
        with without_cudnn_sdpa(q_MHd.device):
            return grouped_attention(q_BHSd, keys, values, self.masks[S]).reshape(q_MHd.shape)
