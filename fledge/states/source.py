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
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import BinaryIO

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


class DiskFeatures:
    """A `FeatureSource` of the given layers, from a cache. `logits` computes the teacher's logits; `device` and `dtype`
    are the device and dtype of the features.

    Final states are zeros for tokens whose final state is not stored. Raises ValueError for layers that the cache does
    not have.

    A thread reads the next ROWS_AHEAD rows into host memory, in stored form (fp8 takes half of the features' memory),
    while the draft trains on earlier rows, and `features` copies a row to the device and decodes the copy. One thread
    reads several times as fast as a training step needs; more threads are faster still, but take Python's lock from the
    thread that queues the step's kernels.
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
        self._ahead: dict[int, tuple[Packed, Future[StoredRow]]] = {}  # by the id of the row

    def ahead(self, rows: RowIterator) -> RowIterator:
        """Yields the same rows. A thread reads the next ROWS_AHEAD rows from the disk in advance, and keeps a row in
        memory until its features are asked for or the generator is closed, which ends the thread."""
        with ThreadPoolExecutor(1) as reader:

            def read(row: Packed) -> None:
                self._ahead[id(row)] = row, reader.submit(self._read, row)

            try:
                yield from rows_ahead(rows, ROWS_AHEAD, read)
            finally:
                self._ahead.clear()
                reader.shutdown(wait=True, cancel_futures=True)

    def features(self, row: Packed) -> Features:
        """The features of a packed row whose `sources` are documents of the cache. A row without sources (a trial row,
        to measure the memory of a training step) gets zeros, through the same steps and in as much memory. Raises
        ValueError for shards that are missing, truncated, damaged or of other features."""
        if not row.sources:
            layout = self.reader.layout(row)
            return self._decode(row, layout, torch.zeros(layout.bytes, dtype=torch.uint8, device=self.device))
        _, read = self._ahead.pop(id(row), (row, None))
        layout, stored = read.result() if read else self._read(row)
        # torch gives pinned memory to another row only after this copy
        return self._decode(row, layout, stored.to(self.device, non_blocking=True))

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

    def _read(self, row: Packed) -> StoredRow:
        """Reads a row into host memory; pinned memory if the device is a GPU, for a copy that does not wait."""
        layout, tokens = self.reader.layout(row), row.token_T.numel()
        # as much for all rows of a length, so that torch can use the memory of earlier rows again
        _, size = place(self.cache.layout, self.reader.names, tokens, tokens)
        with current_device(self.device):  # pinning would initialize the first GPU
            memory = torch.empty(size, dtype=torch.uint8, pin_memory=self.device.type == "cuda")
        self.reader.read(row, layout, memoryview(memory.numpy()))
        return layout, memory[: layout.bytes]


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


StoredRow = tuple[RowLayout, Tensor]  # the layout, and the stored bytes in host memory, uint8 [bytes]


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
            files = {shard: stack.enter_context(self._open(shard)) for shard in {shard for _, _, shard, _ in extents}}
            if hasattr(os, "posix_fadvise"):  # announces all reads, so that a disk gets many requests at a time
                for _, size, shard, offset in extents:
                    os.posix_fadvise(files[shard].fileno(), offset, size, os.POSIX_FADV_WILLNEED)
            for start, size, shard, offset in extents:
                files[shard].seek(offset)
                _fill(files[shard], into[start : start + size])

    def _extents(self, row: Packed, layout: RowLayout) -> Iterator[tuple[int, int, int, int]]:
        """(start, size, shard, offset): `size` bytes of a row, from the row's byte `start` on, are stored in a shard's
        file from byte `offset` on."""
        places = [self._places[document] for document in row.sources]
        starts = list(itertools.accumulate(layout.kept, initial=0))
        for name, (first, dtype, shape) in layout.tensors.items():
            width = dtype.itemsize * math.prod(shape[1:])
            for (shard, tokens, last), (a, b), p, kept in zip(
                places, layout.ranges, starts[:-1], layout.kept, strict=True
            ):
                before, at, count = (last, p, kept) if name == LAST else (tokens, a, b - a)
                offset = self._offsets(shard)[name] + before * width
                yield first + at * width, count * width, shard, offset

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
