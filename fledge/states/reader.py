"""Where the stored features of a packed row are in the shards, and plain reads of them.

Files are read with plain reads instead of a memory map: a truncated file is then an error instead of a signal, and
large reads need no page faults.
"""

from __future__ import annotations

import functools
import itertools
import math
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from queue import SimpleQueue
from typing import BinaryIO, NamedTuple

import torch
from torch import Tensor

from fledge.data.documents import Document
from fledge.ops.implementations import current_device
from fledge.states.cache import FeatureCache
from fledge.states.layout import LAST, LAYERS, SCALES, Layout, Places, place
from fledge.types import Packed

PIECE_BYTES = 4 * 2**20  # that are read at a time


class Extent(NamedTuple):
    """`size` bytes of a row, from its byte `start` on; they are stored in a shard's file, from byte `offset` on."""

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

    @classmethod
    def of(cls, row: Packed, layout: Layout, names: Sequence[str]) -> RowLayout:
        """The layout of a row's features, of which only the tensors in `names` are read."""
        ranges = row.without_filler()
        kept = [layout.last_tokens(Document(row.token_T[a:b].numpy(), row.span_T[a:b].numpy())) for a, b in ranges]
        last_P = torch.cat([tokens + a for tokens, (a, _) in zip(kept, ranges, strict=True)])
        tensors, end = place(layout, names, ranges[-1][1], last_P.numel())
        return cls(tensors, end, last_P, [tokens.numel() for tokens in kept], ranges)


class RowReader:
    """Finds and reads the stored features of rows whose `sources` are documents of the cache. `names` are the tensors
    to read."""

    def __init__(self, cache: FeatureCache, names: Sequence[str]):
        self.cache, self.names = cache, names

    def layout(self, row: Packed) -> RowLayout:
        return RowLayout.of(row, self.cache.layout, self.names)

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
        """Tells the operating system what will be read, so that a disk gets many requests at a time."""
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


def tensors_read(layout: Layout, columns: Sequence[int]) -> list[str]:
    """The tensors of a shard that a draft needs which reads some of the stored layers, or none of them."""
    return [name for name in layout.tensors(0, 0) if name == LAST or (columns and name in (LAYERS, SCALES))]


def _fill(f: BinaryIO, into: memoryview) -> None:
    """Fills memory with the next bytes of a file. Raises ValueError if the file ends before."""
    while len(into):
        if not (count := f.readinto(into)):
            raise ValueError(f"{f.name} is truncated: it was changed while it was read; write it again")
        into = into[count:]


# -- memory of a device ------------------------------------------------------------------------------------------------


class Slot:
    """Memory on the device for the bytes of a row, uint8 [size], zeros at first."""

    def __init__(self, size: int, device: torch.device):
        self.bytes = torch.zeros(size, dtype=torch.uint8, device=device)
        self._used = torch.cuda.Event(blocking=True) if device.type == "cuda" else None

    def end_use(self) -> None:
        """Marks the work that is queued on the current stream as the last that reads these bytes."""
        if self._used:
            self._used.record(torch.cuda.current_stream(self.bytes.device))

    def wait_for_use(self) -> None:
        """Waits until the work before the last `end_use` is done. The bytes may be overwritten afterwards."""
        if self._used:
            self._used.synchronize()


class Uploader:
    """Fills parts of device memory with bytes that a function reads, at most PIECE_BYTES at a time.

    On a CPU they are read in place. On a GPU they are read into one of `buffers` pinned buffers and copied from there
    on a stream of its own. Only one piece is copied at a time, whose thread waits for it: a GPU executes copies from
    host memory one after the other, whatever their streams, so that the small copies of a training step wait for a
    piece at most instead of a row.
    """

    def __init__(self, device: torch.device, buffers: int):
        self.device, self._copying = device, threading.Lock()
        self._pinned: SimpleQueue[Tensor] = SimpleQueue()
        if device.type == "cuda":
            with current_device(device):  # pinning would initialize the first GPU
                self._stream = torch.cuda.Stream(device)
                for _ in range(buffers):
                    self._pinned.put(torch.empty(PIECE_BYTES, dtype=torch.uint8, pin_memory=True))

    def after_current_stream(self) -> None:
        """Lets copies wait for the work that is queued on the current stream, in whose pool memory was allocated."""
        if self.device.type == "cuda":
            self._stream.wait_stream(torch.cuda.current_stream(self.device))

    def fill(self, part: Tensor, read: Callable[[memoryview], None]) -> None:
        """Fills a part of a slot, uint8 [n], by `read`, and waits until it has its bytes. For several threads."""
        if self.device.type != "cuda":
            read(memoryview(part.numpy()))
            return
        pinned = self._pinned.get()
        try:
            read(memoryview(pinned.numpy())[: part.numel()])
            # without `current_device`, leaving the stream would initialize the first GPU
            with self._copying, current_device(self.device), torch.cuda.stream(self._stream):
                part.copy_(pinned[: part.numel()], non_blocking=True)
                copied = torch.cuda.Event(blocking=True)
                copied.record(self._stream)
                copied.synchronize()
        finally:
            self._pinned.put(pinned)
