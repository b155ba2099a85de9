"""Key-value caches with exact rollback, as contiguous segments of one pool of token slots, for drafts and targets, and
the attention of new rows to them."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn import functional as F

from fledge.ops.attention_prompt import PackedAttention
from fledge.ops.attention_tree import (
    COUNTERS,
    Visible,
    VisibleChain,
    attend_to_slots,
    slots_and_masks,
    tree_attention,
)
from fledge.ops.device import use_triton
from fledge.ops.layer import rope_to_cache

if TYPE_CHECKING:
    from fledge.drafts.decode_layer import LayerWeights, Rotation

MIN_SLOTS = 256  # slots of a new pool


class SlotPool:
    """The keys and values of P token slots in all layers, `buffer` [layers, 2, G, P, d].

    `layers` are views of `buffer`: the keys and the values of each layer, [G, P, d].

    A sequence gets a contiguous segment of slots for its whole life: the sequence's keys are a view, and requests come
    and go without copies. Slots hold zeros or old values, never uninitialized memory, because a mask does not remove
    NaN or infinite values. A pool where segments do not fit grows, and gets a new buffer. The buffer is freed with the
    last segment. After `make_room`, segments have a common minimum size where possible, so that the segment of a
    finished short request also fits a long request.

    An exception at any moment, for example by Ctrl-C, can at most lose slots: no slot is marked free while in use or
    outside the buffer.

    `counters` are the counters of `tree_attention`, shared by the passes of the pool, which never run at the same time.
    """

    def __init__(self, layers: int, kv_heads: int, head_dim: int, device: torch.device, dtype: torch.dtype):
        self._shape = layers, 2, kv_heads, 0, head_dim
        self._set_buffer(torch.zeros(self._shape, device=device, dtype=dtype))
        self.counters = torch.zeros(COUNTERS, dtype=torch.int32, device=device)
        self._free: list[tuple[int, int]] = []  # (first, end) of the free ranges of slots, ascending
        self._least = 0  # the slots of a segment, where they fit

    @property
    def slots(self) -> int:
        return self.buffer.shape[3]

    def _set_buffer(self, buffer: Tensor) -> None:
        layers = [layer.unbind() for layer in buffer]  # once, not in each pass
        self.buffer, self.layers = buffer, layers

    @torch.inference_mode()
    def reserve(self, slots: int) -> None:
        """Grows the pool to at least this number of slots."""
        if (more := slots - self.slots) > 0:
            free = _merged([*self._free, (self.slots, slots)])
            self._set_buffer(F.pad(self.buffer, (0, 0, 0, more)))
            self._free = free

    def make_room(self, segments: int, size: int) -> None:
        """Grows a pool, which must have a segment, to hold `segments` more segments of at most `size` slots each, in
        whatever order segments come and go, without growing again."""
        assert self.slots, "the memory would be freed with the last segment"
        self._least = max(self._least, size)
        for first, given in self._allocate([self._least] * segments):
            self.release(first, given)

    def allocate(self, sizes: Sequence[int]) -> list[tuple[int, int]]:
        """Takes a segment (first slot, size) of at least each of `sizes` from the free slots. The pool grows if the
        segments do not fit."""
        return self._fit([max(size, self._least) for size in sizes]) or self._allocate(sizes)

    def _allocate(self, sizes: Sequence[int]) -> list[tuple[int, int]]:
        """Takes segments of exactly `sizes` slots. The pool grows if the segments do not fit."""
        if (segments := self._fit(sizes)) is None:
            # by a quarter at least, since growing copies all slots, and graphs are captured again
            self.reserve(max(self.slots + max(sum(sizes), self.slots // 4), MIN_SLOTS))
            segments = self._fit(sizes)
        return segments

    def _fit(self, sizes: Sequence[int]) -> list[tuple[int, int]] | None:
        """Takes segments of `sizes` slots from the free slots; None if the segments do not fit."""
        free, segments = list(self._free), []
        for size in sizes:
            at = next((i for i, (first, end) in enumerate(free) if end - first >= size), None)
            if at is None:
                return None
            first, end = free[at]
            free[at] = (first + size, end)
            segments.append((first, size))
        self._free = free
        return segments

    def release(self, first: int, size: int) -> None:
        """Makes a segment free again."""
        free = _merged([*self._free, (first, first + size)])
        if free == [(0, self.slots)]:
            self._free = []
            self._set_buffer(self.buffer.new_zeros(self._shape))
        else:
            self._free = free


def _merged(ranges: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """[first, end) ranges in ascending order, with adjacent ranges joined and empty ranges left out."""
    merged: list[tuple[int, int]] = []
    for first, end in sorted(r for r in ranges if r[0] < r[1]):
        if merged and merged[-1][1] == first:
            first = merged.pop()[0]
        merged.append((first, end))
    return merged


class KVCache:
    """The cache of B sequences, each a segment of a pool.

    Sequence b has the slots from `start_B[b]` on; the first `length_B[b]` slots hold committed tokens (both int64 on
    the device). The remaining slots of the segment are for the rows of the next passes.
    """

    def __init__(self, pool: SlotPool, sizes: Sequence[int] = ()):
        self.pool = pool
        self.segments = pool.allocate(sizes)
        device = pool.buffer.device
        self.start_B = torch.tensor([first for first, _ in self.segments], dtype=torch.int64).to(device)
        self.length_B = torch.zeros(len(self.segments), dtype=torch.int64, device=device)
        self.known_lengths: list[int] | None = [0] * len(self.segments)  # `lengths`, where the host knows them

    @property
    def lengths(self) -> list[int]:
        """The number of committed tokens of each sequence. Synchronizes unless the host knows the lengths."""
        return self.length_B.tolist() if self.known_lengths is None else self.known_lengths

    def next_slots(self, n: int) -> Tensor:
        """The n slots after the committed tokens of each sequence, int64 [B, n]."""
        first_B1 = (self.start_B + self.length_B)[:, None]
        return first_B1 + torch.arange(n, device=first_B1.device)

    @torch.inference_mode()
    def keep(self, path_BR: Tensor | None, count_B: Tensor) -> None:
        """Commits `count_B[b]` of the rows that were written after the committed slots of sequence b: the first rows,
        or with `path_BR` the rows at the first `count_B[b]` indices of `path_BR[b]` (ascending), which are moved to the
        front. Does not synchronize."""
        if path_BR is not None:
            first = (self.start_B + self.length_B)[:, None]
            to_BR = first + torch.arange(path_BR.shape[1], device=first.device)
            moved = self.pool.buffer.index_select(3, (first + path_BR).flatten())
            self.pool.buffer.index_copy_(3, to_BR.flatten(), moved)
        self.length_B += count_B
        self.known_lengths = None

    @torch.inference_mode()
    def select(self, sequences: Sequence[int]) -> None:
        """Keeps only the sequences with these indices, in this order, and frees the others' segments."""
        dropped = [self.segments[b] for b in set(range(len(self.segments))) - set(sequences)]
        self.segments = [self.segments[b] for b in sequences]  # first, or an exception could free a segment twice
        for segment in dropped:
            self.pool.release(*segment)
        index = torch.tensor(sequences, dtype=torch.int64).to(self.start_B.device)
        self.start_B, self.length_B = self.start_B[index], self.length_B[index]
        if self.known_lengths is not None:
            self.known_lengths = [self.known_lengths[b] for b in sequences]

    def repeated(self, times: int) -> KVCache:
        """A cache of `times` sequences that share the slots of this cache's only sequence. The new cache owns no
        segment, and frees none."""
        other = KVCache(self.pool)
        other.start_B, other.length_B = self.start_B.repeat(times), self.length_B.repeat(times)
        other.known_lengths = None
        return other

    def tensors(self) -> list[Tensor]:
        """The tensors with one entry for each sequence."""
        return [self.start_B, self.length_B]

    @torch.inference_mode()
    def append(self, other: KVCache) -> None:
        """Appends the sequences of another cache of the same pool."""
        self.segments = [*self.segments, *other.segments]
        self.start_B = torch.cat([self.start_B, other.start_B])
        self.length_B = torch.cat([self.length_B, other.length_B])
        self.known_lengths = None


class CacheRows:
    """M rows of a pass over the sequences of a cache, grouped by sequence, and their attention.

    `slot_M` are the slots for the rows' keys and values. The queries are all rows, or only the rows at the indices
    `asked_Q` (int64). A subclass says what each query sees.
    """

    cache: KVCache
    slot_M: Tensor
    asked_Q: Tensor | None = None

    def __call__(self, layer: int, qkv_MO: Tensor, weights: LayerWeights, rotation: Rotation) -> Tensor:
        """The heads' outputs [Q, H d] of the queries, from the fused projections of a layer, [M, (H + 2 G) d], before
        RoPE and before the norms of queries and keys. Writes the rows' keys and values to the cache."""
        q_QHd = self.asked(self.write(layer, qkv_MO, weights, rotation))
        return self.read(layer, q_QHd, scale=weights.shape.scale, window=weights.window).flatten(1)

    def write(self, layer: int, qkv_MO: Tensor, weights: LayerWeights, rotation: Rotation) -> Tensor:
        """Writes the rows' keys and values to the cache, and returns the queries of all rows, [M, H, d]."""
        return queries(qkv_MO, weights, rotation, *self.cache.pool.layers[layer], self.slot_M)

    def asked(self, x_M: Tensor) -> Tensor:
        """The queries' rows of a tensor [M, ..]."""
        return x_M if self.asked_Q is None else x_M[self.asked_Q]

    def read(
        self, layer: int, q_QHd: Tensor, *, scale: float | None = None, window: int | None = None
    ) -> Tensor:  # fmt: skip
        """The attention of Q queries to their visible slots, [Q, H, d]. `scale` None is d^-1/2. The slots already hold
        the rows' keys and values."""
        raise NotImplementedError


class TreeRows(CacheRows):
    """n rows of each sequence after its committed tokens. Does not synchronize.

    Each query sees the committed tokens, and of the J slots after them the slots that `visible` [B, S, J] says. The S
    queries of a sequence are its n rows, or fewer with `asked_Q`. `position_BS` are the queries' positions, for windows
    only. `slot_Bn` are the rows' slots (int64); None for the slots after the committed tokens. Tree nodes that follow
    the nodes of earlier passes need `slot_Bn`.
    """

    def __init__(
        self, cache: KVCache, n: int, visible: Visible | VisibleChain, position_BS: Tensor | None = None,
        slot_Bn: Tensor | None = None, asked_Q: Tensor | None = None,
    ):  # fmt: skip
        self.cache, self.visible, self.position_BS, self.asked_Q = cache, visible, position_BS, asked_Q
        self.slot_M = (cache.next_slots(n) if slot_Bn is None else slot_Bn).flatten()
        self._in_window: dict[int, Visible] = {}  # `visible` without the rows before a window
        self._slots: dict[int | None, list[tuple[Sequence[Tensor], Tensor | None]]] = {}  # read with each window

    def read(
        self, layer: int, q_QHd: Tensor, *, scale: float | None = None, window: int | None = None
    ) -> Tensor:  # fmt: skip
        """See `CacheRows.read`."""
        if not use_triton(q_QHd):
            return self._read_with_torch(layer, q_QHd, scale, window)
        cache, visible = self.cache, self._visible_in(window)
        out = tree_attention(
            q_QHd.view(*visible.shape[:2], *q_QHd.shape[1:]), *cache.pool.layers[layer], cache.start_B,
            cache.length_B, visible, scale=scale, window=window, position_BS=self.position_BS,
            counters=cache.pool.counters,
        )  # fmt: skip
        return out.flatten(0, 1)

    def _read_with_torch(self, layer: int, q_QHd: Tensor, scale: float | None, window: int | None) -> Tensor:
        """`read` by `attend_to_slots`. Masks and views of the slots are made once for all layers, not in each."""
        if window not in self._slots:
            cache = self.cache
            buffer, (H, G) = cache.pool.buffer, (q_QHd.shape[1], cache.pool.buffer.shape[2])
            visible, position_BS = self._visible_in(window), self.position_BS
            reads = slots_and_masks(cache.start_B, cache.length_B, visible, window, position_BS, H // G, q_QHd.dtype)
            both = buffer.flatten(0, 1)[:, None]  # the keys of a layer, then its values
            self._slots[window] = [(both[:, :, :, slots].unbind(), mask) for slots, mask in reads]
        read = [(both[2 * layer], both[2 * layer + 1], mask) for both, mask in self._slots[window]]
        return attend_to_slots(q_QHd, read, scale)

    def _visible_in(self, window: int | None) -> Visible | VisibleChain:
        """`visible` without the rows before a window. Only a path longer than the window has rows before it, and all
        rows must then be queries."""
        if window is None or self.visible.shape[2] <= window:
            return self.visible
        if window not in self._in_window:
            position_BS = self.position_BS
            recent_BSS = position_BS[:, None] > position_BS[..., None] - window
            self._in_window[window] = Visible(self.visible.mask_BSJ & recent_BSS)
        return self._in_window[window]


class PromptRows(CacheRows):
    """The next `counts[b]` tokens (0 or more) of each sequence of a cache, one sequence after the other. Each row sees
    the tokens of its sequence up to and including the row's token. `position_M` are the rows' positions. Synchronizes
    unless the host knows the cache's lengths; the host knows the lengths while only prompts were added."""

    def __init__(self, cache: KVCache, counts: Sequence[int]):
        self.cache, self.counts, self.lengths = cache, list(counts), cache.lengths
        starts = [first for first, _ in cache.segments]
        self.attention = PackedAttention(self.counts, self.lengths, starts, cache.start_B.device)
        self.slot_M, self.position_M = self.attention.slot_M, self.attention.position_M

    def read(
        self, layer: int, q_QHd: Tensor, *, scale: float | None = None, window: int | None = None
    ) -> Tensor:  # fmt: skip
        """See `CacheRows.read`."""
        return self.attention(q_QHd, *self.cache.pool.layers[layer], scale, window)

    def commit(self, count_B: Tensor) -> None:
        """Commits all rows; `count_B` are the `counts` on the cache's device."""
        self.cache.keep(None, count_B)
        self.cache.known_lengths = [n + count for n, count in zip(self.lengths, self.counts, strict=True)]

    def last(self, count_B: Tensor, asked_B: Tensor) -> TreeRows:
        """The same rows with a single query for each sequence: its last row, of index `asked_B` (int64). `count_B` are
        the `counts` on the cache's device. A sequence without rows has a query too, with a meaningless result."""
        before = copy.copy(self.cache)  # as if all tokens except the last were committed
        before.length_B = (before.length_B + count_B - 1).clamp_min(0)
        itself = VisibleChain(torch.zeros_like(count_B)[:, None], 1, sees_all=True)
        last = TreeRows(before, 1, itself, before.length_B[:, None], asked_Q=asked_B)
        last.slot_M = self.slot_M
        return last


def queries(
    qkv_MO: Tensor, weights: LayerWeights, rotation: Rotation, keys_GPd: Tensor, values_GPd: Tensor, slot_M: Tensor
) -> Tensor:
    """The queries [M, H, d] of fused projections, after RoPE. Writes keys and values to the slots `slot_M`."""
    shape = weights.shape
    return rope_to_cache(
        qkv_MO, *rotation, shape.heads, keys_GPd, values_GPd, slot_M, weights.q_norm, weights.k_norm, shape.eps
    )  # fmt: skip
