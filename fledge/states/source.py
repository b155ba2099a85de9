"""Features read from the disk, as a source for training."""

from __future__ import annotations

import functools
import itertools
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from dataclasses import dataclass
from queue import SimpleQueue

import torch
from torch import Tensor

from fledge.ops.transfer import to_device
from fledge.states.cache import FeatureCache
from fledge.states.layout import LAST, LAYERS, SCALES, decode_layers, place, views
from fledge.states.reader import Extent, RowLayout, RowReader, Slot, Uploader, tensors_read
from fledge.targets.source import RowIterator, all_finite
from fledge.types import Features, Packed

ROWS_AHEAD = 2  # rows that are read before they are asked for
# Threads that read pieces of rows. One reads several times as fast as a training step needs; more of them are faster
# still, but take Python's lock from the thread that queues the step's kernels.
READERS = 1


@dataclass(frozen=True)
class StagedRow:
    """A row whose stored features are read into a slot by `reads`."""

    row: Packed
    layout: RowLayout
    slot: Slot
    reads: Sequence[Future[None]]


class DiskFeatures:
    """Features of the given layers from a cache, which is a `FeatureSource`. `logits` computes the teacher's logits;
    `device` and `dtype` are those of the features.

    Final states are zeros for tokens whose final state is not stored. Raises ValueError for layers that the cache does
    not have.

    Rows go through ROWS_AHEAD slots of device memory, as stored (fp8 takes half of what the features take): READERS
    threads fill a slot piece by piece while the draft trains on the rows before, and `features` only decodes it. A slot
    is filled again after it was decoded.
    """

    def __init__(
        self, cache: FeatureCache, layers: Sequence[int], logits: Callable[[Tensor], Tensor], device: torch.device,
        dtype: torch.dtype,
    ):  # fmt: skip
        self.cache, self.logits, self.device, self.dtype = cache, logits, device, dtype
        known = cache.layout.layers
        if missing := [i for i in layers if i not in known]:
            raise ValueError(
                f"{cache.path} has the hidden states of layers {list(known)}, and the draft also reads {missing}; "
                "choose among the former by --aux-layers, or write features of these layers"
            )
        self.columns = [known.index(i) for i in layers]
        self.reader = RowReader(cache, tensors_read(cache.layout, self.columns))
        self._slots: list[Slot] = []
        self._free: SimpleQueue[Slot | None] = SimpleQueue()  # those of `_slots` that no row is read into
        self._ahead: dict[int, Future[StagedRow]] = {}  # by the id of the row, in the order of the rows

    def ahead(self, rows: RowIterator) -> RowIterator:
        """The same rows, all of one length. The next ROWS_AHEAD are read from the disk by threads before they are asked
        for. Their features have to be asked for in this order; those of some rows may be left out. The threads end when
        the generator is closed."""
        if (first := next(rows, None)) is None:
            return
        self._free = SimpleQueue()
        for slot in self._slots_for(first.token_T.numel()):
            self._free.put(slot)
        with ThreadPoolExecutor(READERS) as readers, ThreadPoolExecutor(1) as planner:
            upcoming: deque[Packed] = deque()
            try:
                for row in itertools.chain([first], rows):
                    self._ahead[id(row)] = planner.submit(self._read_when_free, row, readers)
                    upcoming.append(row)
                    if len(upcoming) > ROWS_AHEAD:
                        yield upcoming.popleft()
                yield from upcoming
            finally:
                self._free.put(None)  # so that the planner waits no more
                self._ahead.clear()
                planner.shutdown(wait=True, cancel_futures=True)
                readers.shutdown(wait=True, cancel_futures=True)

    def features(self, row: Packed) -> Features:
        """The features of a packed row whose `sources` are documents of the cache. A row without sources, as it is used
        to measure the memory of a training step, gets zeros, through the same steps and in as much memory. Raises
        ValueError for shards that are missing, truncated, damaged or of other features."""
        if not row.sources:
            slot = self._slots_for(row.token_T.numel())[0]
            slot.bytes.zero_()
            return self._decode(StagedRow(row, self.reader.layout(row), slot, ()))
        if (staged := self._read_ahead(row)) is not None:
            features = self._decode(staged)
            self._give_back(staged)
            return features
        with ThreadPoolExecutor(READERS) as readers:
            slot = Slot(self._slot_bytes(row.token_T.numel()), self.device)
            self._uploader.after_current_stream()
            return self._decode(self._read(row, slot, readers))

    def _decode(self, staged: StagedRow) -> Features:
        """The features of a row, once all of it is read. Nothing here waits for the device."""
        for read in staged.reads:
            read.result()
        tensors = views(staged.layout.tensors, staged.slot.bytes)
        T, D = staged.row.token_T.numel(), self.cache.layout.width
        aux_TAD = torch.empty(T, len(self.columns), D, dtype=self.dtype, device=self.device)
        tokens = staged.layout.ranges[-1][1]
        if self.columns:
            decode_layers(tensors[LAYERS], tensors.get(SCALES), aux_TAD[:tokens], self.columns)
        aux_TAD[tokens:] = 0
        last_TD = torch.zeros(T, D, dtype=self.dtype, device=self.device)
        last_TD[to_device([staged.layout.last_P], self.device)[0]] = tensors[LAST].to(self.dtype)
        return Features(aux_TAD, last_TD)

    def finite(self, row: Packed) -> bool:
        """See `FeatureSource.finite`."""
        return bool(all_finite(self.features(row)))

    # -- reading --------------------------------------------------------------------------------------------------

    def _read(self, row: Packed, slot: Slot, readers: ThreadPoolExecutor) -> StagedRow:
        """Starts to read a row into a slot."""
        layout = self.reader.layout(row)
        assert layout.bytes <= slot.bytes.numel(), "rows have one length"
        pieces = list(self.reader.pieces(row, layout))

        def fill(piece: Sequence[Extent]) -> None:
            start, end = piece[0].start, piece[-1].start + piece[-1].size
            self._uploader.fill(slot.bytes[start:end], functools.partial(self.reader.read, piece))

        reads = [readers.submit(fill, piece) for piece in pieces]
        self.reader.announce(pieces)
        return StagedRow(row, layout, slot, reads)

    def _read_when_free(self, row: Packed, readers: ThreadPoolExecutor) -> StagedRow:
        """Starts to read a row as soon as there is a slot for it."""
        if (slot := self._free.get()) is None:
            raise CancelledError
        slot.wait_for_use()
        return self._read(row, slot, readers)

    def _read_ahead(self, row: Packed) -> StagedRow | None:
        """The row, if it is read ahead. The slots of rows before it, which were not asked for, become free."""
        if id(row) in self._ahead:
            for key in list(self._ahead):
                staged = self._ahead.pop(key).result()
                if staged.row is row:
                    return staged
                self._give_back(staged)
        return None

    def _give_back(self, staged: StagedRow) -> None:
        staged.slot.end_use()
        self._free.put(staged.slot)

    # -- device memory ----------------------------------------------------------------------------------------------

    def _slot_bytes(self, tokens: int) -> int:
        """The most bytes that a row of this length takes."""
        return place(self.cache.layout, self.reader.names, tokens, tokens)[1]

    def _slots_for(self, tokens: int) -> list[Slot]:
        """The slots for rows of this length. They stay in memory until rows of another length are read."""
        size = self._slot_bytes(tokens)
        if not self._slots or self._slots[0].bytes.numel() != size:
            self._slots.clear()  # frees them first
            self._slots += [Slot(size, self.device) for _ in range(ROWS_AHEAD)]
            self._uploader.after_current_stream()
        return self._slots

    @functools.cached_property
    def _uploader(self) -> Uploader:
        return Uploader(self.device, READERS)
