"""Features read from the disk, as a source for training.

Files are read with plain reads instead of a memory map: a truncated file is then an error instead of a signal, and
large reads need no page faults.
"""

from __future__ import annotations

import functools
import itertools
import math
import os
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from dataclasses import dataclass
from queue import SimpleQueue
from typing import BinaryIO, NamedTuple

import torch
from torch import Tensor

from fledge.data.documents import Document
from fledge.ops.device import current_device, to_device
from fledge.states.cache import FeatureCache
from fledge.states.layout import LAST, LAYERS, SCALES, Places, decode_layers, place, views
from fledge.targets.source import RowIterator, all_finite
from fledge.types import Features, Packed

ROWS_AHEAD = 2  # rows that are read in advance
PIECE_BYTES = 4 * 2**20  # bytes that are read at a time


def rows_ahead(rows: RowIterator, count: int, ask: Callable[[Packed], None]) -> RowIterator:
    """Yields the same rows; `ask` gets each row `count` rows in advance."""
    upcoming: deque[Packed] = deque()
    for row in rows:
        ask(row)
        upcoming.append(row)
        if len(upcoming) > count:
            yield upcoming.popleft()
    yield from upcoming


class StagedRow(NamedTuple):
    """A row whose stored features are in a slot."""

    row: Packed
    layout: RowLayout
    slot: Slot


class DiskFeatures:
    """A `FeatureSource` of the given layers, from a cache. `logits` computes the teacher's logits; `device` and `dtype`
    are the device and dtype of the features.

    Final states are zeros for tokens whose final state is not stored. Raises ValueError for layers that the cache does
    not have.

    Rows go through ROWS_AHEAD slots of device memory, in stored form (fp8 takes half of the features' memory): a thread
    fills a slot piece by piece while the draft trains on earlier rows, and `features` only decodes the slot. A decoded
    slot is filled again. One thread reads several times as fast as a training step needs; more threads are faster
    still, but take Python's lock from the thread that queues the step's kernels.
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
        read = [name for name in cache.layout.tensors(0, 0) if self.columns or name == LAST]
        self.reader = RowReader(cache, read)
        self._slots: list[Slot] = []
        self._free: SimpleQueue[Slot | None] = SimpleQueue()  # the slots of `_slots` that no row is read into
        self._ahead: dict[int, Future[StagedRow]] = {}  # by the id of the row, in the order of the rows

    def ahead(self, rows: RowIterator) -> RowIterator:
        """Yields rows unchanged; all rows must have the same length. A thread reads the next ROWS_AHEAD rows from the
        disk in advance. Ask for the features of rows in the order of the rows; rows may be left out. The thread ends
        when the generator is closed."""
        if (first := next(rows, None)) is None:
            return
        self._free = SimpleQueue()
        for slot in self._slots_for(first.token_T.numel()):
            self._free.put(slot)
        with ThreadPoolExecutor(1) as reader:

            def read(row: Packed) -> None:
                self._ahead[id(row)] = reader.submit(self._read_when_free, row)

            try:
                yield from rows_ahead(itertools.chain([first], rows), ROWS_AHEAD, read)
            finally:
                self._free.put(None)  # ends the wait of the thread
                self._ahead.clear()
                reader.shutdown(wait=True, cancel_futures=True)

    def features(self, row: Packed) -> Features:
        """The features of a packed row whose `sources` are documents of the cache. A row without sources (a trial row,
        to measure the memory of a training step) gets zeros, through the same steps and in as much memory. Raises
        ValueError for shards that are missing, truncated, damaged or of other features."""
        if not row.sources:
            slot = self._slots_for(row.token_T.numel())[0]
            slot.bytes.zero_()
            return self._decode(StagedRow(row, self.reader.layout(row), slot))
        if (staged := self._read_ahead(row)) is not None:
            features = self._decode(staged)
            self._give_back(staged.slot)
            return features
        slot = Slot(self._slot_bytes(row.token_T.numel()), self.device)
        self._uploader.after_current_stream()
        return self._decode(self._read(row, slot))

    def _decode(self, staged: StagedRow) -> Features:
        """The features of a row that was read. Nothing here waits for the device."""
        row, layout, slot = staged
        tensors = views(layout.tensors, slot.bytes)
        T, D, tokens = row.token_T.numel(), self.cache.layout.width, layout.ranges[-1][1]
        aux_TAD = torch.empty(T, len(self.columns), D, dtype=self.dtype, device=self.device)
        if self.columns:
            decode_layers(tensors[LAYERS], tensors.get(SCALES), aux_TAD[:tokens], self.columns)
        aux_TAD[tokens:] = 0
        last_TD = torch.zeros(T, D, dtype=self.dtype, device=self.device)
        last_TD[to_device([layout.last_P], self.device)[0]] = tensors[LAST].to(self.dtype)
        return Features(aux_TAD, last_TD)

    def finite(self, row: Packed) -> bool:
        """See `FeatureSource.finite`."""
        return bool(all_finite(self.features(row)))

    def _read(self, row: Packed, slot: Slot) -> StagedRow:
        """Reads a row into a slot."""
        layout = self.reader.layout(row)
        assert layout.bytes <= slot.bytes.numel(), "rows have one length"
        pieces = list(self.reader.pieces(row, layout))
        self.reader.announce(pieces)
        for piece in pieces:
            start, end = piece[0].start, piece[-1].start + piece[-1].size
            self._uploader.fill(slot.bytes[start:end], functools.partial(self.reader.read, piece))
        return StagedRow(row, layout, slot)

    def _read_when_free(self, row: Packed) -> StagedRow:
        """Reads a row as soon as a slot is free."""
        if (slot := self._free.get()) is None:
            raise CancelledError
        slot.wait_for_use()
        return self._read(row, slot)

    def _read_ahead(self, row: Packed) -> StagedRow | None:
        """The staged row, if the row was read ahead, else None. Frees the slots of earlier rows, which were skipped."""
        if id(row) in self._ahead:
            for key in list(self._ahead):
                staged = self._ahead.pop(key).result()
                if staged.row is row:
                    return staged
                self._give_back(staged.slot)
        return None

    def _give_back(self, slot: Slot) -> None:
        slot.end_use()
        self._free.put(slot)

    def _slot_bytes(self, tokens: int) -> int:
        """The most bytes of a row of `tokens` tokens."""
        return place(self.cache.layout, self.reader.names, tokens, tokens)[1]

    def _slots_for(self, tokens: int) -> list[Slot]:
        """The slots for rows of `tokens` tokens. The slots stay in memory until rows of another length are read."""
        size = self._slot_bytes(tokens)
        if not self._slots or self._slots[0].bytes.numel() != size:
            self._slots.clear()  # frees the old slots first
            self._slots += [Slot(size, self.device) for _ in range(ROWS_AHEAD)]
            self._uploader.after_current_stream()
        return self._slots

    @functools.cached_property
    def _uploader(self) -> Uploader:
        return Uploader(self.device)


class Extent(NamedTuple):
    """`size` bytes of a row, from the row's byte `start` on, stored in a shard's file from byte `offset` on."""

    start: int
    size: int
    shard: int
    offset: int


@dataclass(frozen=True)
class RowLayout:
    """How the stored features of a row lie in its `bytes` bytes (`place`): `tensors`, as in a shard. `last_P` are the
    tokens of the row that the final states belong to (int64), `kept` their number in each document, and `ranges` the
    tokens of each document."""

    tensors: Places
    bytes: int
    last_P: Tensor
    kept: Sequence[int]
    ranges: Sequence[tuple[int, int]]


class RowReader:
    """Finds and reads the stored features of rows whose `sources` are documents of the cache. `names` are the tensors
    to read."""

    def __init__(self, cache: FeatureCache, names: Sequence[str]):
        self.cache, self.names = cache, names

    def layout(self, row: Packed) -> RowLayout:
        ranges, last = row.without_filler(), self.cache.layout.last_tokens
        kept = [last(Document(row.token_T[a:b].numpy(), row.span_T[a:b].numpy())) for a, b in ranges]
        last_P = torch.cat([tokens + a for tokens, (a, _) in zip(kept, ranges, strict=True)])
        tensors, end = place(self.cache.layout, self.names, ranges[-1][1], last_P.numel())
        return RowLayout(tensors, end, last_P, [tokens.numel() for tokens in kept], ranges)

    def pieces(self, row: Packed, layout: RowLayout) -> Iterator[list[Extent]]:
        """The stored features of a row in pieces of at most PIECE_BYTES consecutive bytes of the row. Raises ValueError
        for shards that are missing, truncated, damaged or of other features."""
        places = [self._places[document] for document in row.sources]
        starts = list(itertools.accumulate(layout.kept, initial=0))
        for name, (first, dtype, shape) in layout.tensors.items():
            width = dtype.itemsize * math.prod(shape[1:])
            extents = []
            for (shard, tokens, last), (a, b), p, kept in zip(
                places, layout.ranges, starts[:-1], layout.kept, strict=True
            ):
                before, at, count = (last, p, kept) if name == LAST else (tokens, a, b - a)
                offset = self._offsets(shard)[name] + before * width
                extents.append(Extent(first + at * width, count * width, shard, offset))
            yield from cut(extents, PIECE_BYTES)

    def announce(self, pieces: Sequence[Sequence[Extent]]) -> None:
        """Announces the reads of pieces to the operating system, so that a disk gets many requests at a time."""
        if hasattr(os, "posix_fadvise"):
            for extent in itertools.chain.from_iterable(pieces):
                with self._open(extent.shard) as f:
                    os.posix_fadvise(f.fileno(), extent.offset, extent.size, os.POSIX_FADV_WILLNEED)

    def read(self, piece: Sequence[Extent], into: memoryview) -> None:
        """Reads a piece's bytes. Raises ValueError if a file is missing or ends before."""
        for extent in piece:
            at = extent.start - piece[0].start
            with self._open(extent.shard) as f:
                f.seek(extent.offset)
                _fill(f, into[at : at + extent.size])

    def _open(self, shard: int) -> BinaryIO:
        try:
            return self.cache.file(shard).open("rb", buffering=0)
        except FileNotFoundError:
            self.cache.offsets(shard)  # says what is missing, and the remedy
            raise

    @functools.cache  # noqa: B019 (a reader lives as long as its training)
    def _offsets(self, shard: int) -> dict[str, int]:
        return self.cache.offsets(shard)  # also checks the file

    @functools.cached_property
    def _places(self) -> list[tuple[int, int, int]]:
        """For each document, its shard, and the numbers of tokens and of final states before it in the shard."""
        found, sizes = [], self.cache.sizes
        for shard, (first, end) in enumerate(self.cache.manifest.shards):
            tokens = itertools.accumulate(sizes.tokens[first:end], initial=0)
            last = itertools.accumulate(sizes.last[first:end], initial=0)
            found += [(shard, t, p) for t, p, _ in zip(tokens, last, range(first, end), strict=False)]
        return found


def cut(extents: Sequence[Extent], most: int) -> Iterator[list[Extent]]:
    """Divides extents, of consecutive bytes of a row, into pieces of `most` bytes; the last one may have fewer."""
    piece, room = [], most
    for start, size, shard, offset in extents:
        done = 0
        while done < size:
            count = min(size - done, room)
            piece.append(Extent(start + done, count, shard, offset + done))
            done, room = done + count, room - count
            if not room:
                yield piece
                piece, room = [], most
    if piece:
        yield piece


def _fill(f: BinaryIO, into: memoryview) -> None:
    """Fills memory with the next bytes of a file. Raises ValueError if the file ends before."""
    while len(into):
        if not (count := f.readinto(into)):
            raise ValueError(f"{f.name} is truncated: it was changed while it was read; write it again")
        into = into[count:]


class Slot:
    """Memory on the device for the bytes of a row, uint8 [size], zeros at first."""

    def __init__(self, size: int, device: torch.device):
        self.bytes = torch.zeros(size, dtype=torch.uint8, device=device)
        self._used = torch.cuda.Event(blocking=True) if device.type == "cuda" else None

    def end_use(self) -> None:
        """Marks the work queued on the current stream as the last reader of the slot's bytes."""
        if self._used:
            self._used.record(torch.cuda.current_stream(self.bytes.device))

    def wait_for_use(self) -> None:
        """Waits until the work before the last `end_use` is done. The bytes may be overwritten afterwards."""
        if self._used:
            self._used.synchronize()


class Uploader:
    """Fills parts of device memory with bytes that a function reads, at most PIECE_BYTES at a time.

    On a CPU, bytes are read in place. On a GPU, bytes are read into a pinned buffer, and copied from the buffer on a
    separate stream. A thread copies only one piece at a time, and waits for the copy: a GPU executes copies from host
    memory one after the other, whatever the streams, so a small copy of a training step waits for a piece at most
    instead of a row.
    """

    def __init__(self, device: torch.device):
        self.device, self._copying = device, threading.Lock()
        if device.type == "cuda":
            with current_device(device):  # pinning would initialize the first GPU
                self._stream = torch.cuda.Stream(device)
                self._pinned = torch.empty(PIECE_BYTES, dtype=torch.uint8, pin_memory=True)

    def after_current_stream(self) -> None:
        """Lets copies wait for the work that is queued on the current stream, in whose pool memory was allocated."""
        if self.device.type == "cuda":
            self._stream.wait_stream(torch.cuda.current_stream(self.device))

    def fill(self, part: Tensor, read: Callable[[memoryview], None]) -> None:
        """Fills a part of a slot, uint8 [n], by `read`, and waits until it has its bytes. For several threads."""
        if self.device.type != "cuda":
            read(memoryview(part.numpy()))
            return
        # without `current_device`, leaving the stream would initialize the first GPU
        with self._copying, current_device(self.device), torch.cuda.stream(self._stream):
            read(memoryview(self._pinned.numpy())[: part.numel()])
            part.copy_(self._pinned[: part.numel()], non_blocking=True)
            copied = torch.cuda.Event(blocking=True)
            copied.record(self._stream)
            copied.synchronize()
