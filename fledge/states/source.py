"""Features read from the disk, as a source for training.

Files are read with plain reads instead of a memory map: a truncated file is then an error instead of a signal, and
large reads need no page faults.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import math
import os
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
from fledge.targets.source import RowIterator
from fledge.types import Features, Packed

ROWS_AHEAD = 2  # rows that are read in advance


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
    """A row whose stored features are in host memory."""

    row: Packed
    layout: RowLayout
    buffer: HostBuffer


class DiskFeatures:
    """A `FeatureSource` of the given layers, from a cache. `logits` computes the teacher's logits; `device` and `dtype`
    are the device and dtype of the features.

    Final states are zeros for tokens whose final state is not stored. Raises ValueError for layers that the cache does
    not have.

    Rows go through ROWS_AHEAD buffers in host memory, in stored form (fp8 takes half of the features' memory): a thread
    fills a buffer while the draft trains on earlier rows, and `features` copies the buffer to the device, decodes the
    copy, and lets the thread fill the buffer again. One thread reads several times as fast as a training step needs;
    more threads are faster still, but take Python's lock from the thread that queues the step's kernels.
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
        self._free: SimpleQueue[HostBuffer | None] = SimpleQueue()  # buffers that no row is read into
        self._ahead: dict[int, Future[StagedRow]] = {}  # by the id of the row, in the order of the rows

    def ahead(self, rows: RowIterator) -> RowIterator:
        """Yields rows unchanged; all rows must have the same length. A thread reads the next ROWS_AHEAD rows from the
        disk in advance. Ask for the features of rows in the order of the rows; rows may be left out. The thread ends
        when the generator is closed."""
        if (first := next(rows, None)) is None:
            return
        self._free = SimpleQueue()
        for _ in range(ROWS_AHEAD):
            self._free.put(self._buffer(first))
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
        if (staged := self._read_ahead(row)) is not None:
            features = self._decode(row, staged.layout, staged.buffer.on(self.device, staged.layout.bytes))
            self._free.put(staged.buffer)
            return features
        if row.sources:
            _, layout, buffer = self._read(row, self._buffer(row))
            return self._decode(row, layout, buffer.on(self.device, layout.bytes))
        layout = self.reader.layout(row)
        return self._decode(row, layout, torch.zeros(layout.bytes, dtype=torch.uint8, device=self.device))

    def _decode(self, row: Packed, layout: RowLayout, stored: Tensor) -> Features:
        """The features of a row from the stored bytes on the device. Nothing here waits for the device."""
        tensors = views(layout.tensors, stored)
        T, D, tokens = row.token_T.numel(), self.cache.layout.width, layout.ranges[-1][1]
        aux_TAD = torch.empty(T, len(self.columns), D, dtype=self.dtype, device=self.device)
        if self.columns:
            decode_layers(tensors[LAYERS], tensors.get(SCALES), aux_TAD[:tokens], self.columns)
        aux_TAD[tokens:] = 0
        last_TD = torch.zeros(T, D, dtype=self.dtype, device=self.device)
        last_TD[to_device([layout.last_P], self.device)[0]] = tensors[LAST].to(self.dtype)
        return Features(aux_TAD, last_TD)

    def _buffer(self, row: Packed) -> HostBuffer:
        """A buffer for rows of the length of `row`."""
        tokens = row.token_T.numel()
        return HostBuffer(place(self.cache.layout, self.reader.names, tokens, tokens)[1], self.device)

    def _read(self, row: Packed, buffer: HostBuffer) -> StagedRow:
        """Reads a row into a buffer."""
        layout = self.reader.layout(row)
        assert layout.bytes <= buffer.bytes.numel(), "rows have one length"
        self.reader.read(row, layout, memoryview(buffer.bytes.numpy()))
        return StagedRow(row, layout, buffer)

    def _read_when_free(self, row: Packed) -> StagedRow:
        """Reads a row as soon as a buffer is free."""
        if (buffer := self._free.get()) is None:
            raise CancelledError
        buffer.wait_for_copy()
        return self._read(row, buffer)

    def _read_ahead(self, row: Packed) -> StagedRow | None:
        """The staged row, if the row was read ahead, else None. Frees the buffers of earlier rows, which were
        skipped."""
        if id(row) in self._ahead:
            for key in list(self._ahead):
                staged = self._ahead.pop(key).result()
                if staged.row is row:
                    return staged
                self._free.put(staged.buffer)
        return None


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

    def read(self, row: Packed, layout: RowLayout, into: memoryview) -> None:
        """Reads the stored features of a row. Raises ValueError for shards that are missing, truncated, damaged or of
        other features."""
        extents = list(self._extents(row, layout))
        with contextlib.ExitStack() as stack:
            files = {shard: stack.enter_context(self._open(shard)) for shard in {e.shard for e in extents}}
            if hasattr(os, "posix_fadvise"):  # announces all reads, so that a disk gets many requests at a time
                for _, size, shard, offset in extents:
                    os.posix_fadvise(files[shard].fileno(), offset, size, os.POSIX_FADV_WILLNEED)
            for start, size, shard, offset in extents:
                files[shard].seek(offset)
                _fill(files[shard], into[start : start + size])

    def _extents(self, row: Packed, layout: RowLayout) -> Iterator[Extent]:
        places = [self._places[document] for document in row.sources]
        starts = list(itertools.accumulate(layout.kept, initial=0))
        for name, (first, dtype, shape) in layout.tensors.items():
            width = dtype.itemsize * math.prod(shape[1:])
            for (shard, tokens, last), (a, b), p, kept in zip(
                places, layout.ranges, starts[:-1], layout.kept, strict=True
            ):
                before, at, count = (last, p, kept) if name == LAST else (tokens, a, b - a)
                offset = self._offsets(shard)[name] + before * width
                yield Extent(first + at * width, count * width, shard, offset)

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


def _fill(f: BinaryIO, into: memoryview) -> None:
    """Fills memory with the next bytes of a file. Raises ValueError if the file ends before."""
    while len(into):
        if not (count := f.readinto(into)):
            raise ValueError(f"{f.name} is truncated: it was changed while it was read; write it again")
        into = into[count:]


class HostBuffer:
    """Memory of the host for the bytes of a row, uint8 [size]; pinned if the device is a GPU, for copies that do not
    wait."""

    def __init__(self, size: int, device: torch.device):
        gpu = device.type == "cuda"
        with current_device(device):  # pinning would initialize the first GPU
            self.bytes = torch.empty(size, dtype=torch.uint8, pin_memory=gpu)
            self._copied = torch.cuda.Event(blocking=True) if gpu else None

    def on(self, device: torch.device, size: int) -> Tensor:
        """The first `size` bytes on a device. The copy is queued on the current stream; the CPU needs no copy."""
        copy = self.bytes[:size].to(device, non_blocking=True)
        if self._copied:
            self._copied.record(torch.cuda.current_stream(device))
        return copy

    def wait_for_copy(self) -> None:
        """Waits until the last copy is done. The bytes may be overwritten afterwards."""
        if self._copied:
            self._copied.synchronize()
