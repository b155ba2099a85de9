"""Features read from the disk, as a source for training."""

from __future__ import annotations

import functools
import itertools
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import BinaryIO

import torch
from torch import Tensor

from fledge.features.cache import FeatureCache
from fledge.features.codec import decode_layers
from fledge.features.layout import LAST, LAYERS, SCALES
from fledge.kernels.implementations import current_device
from fledge.targets.source import all_finite
from fledge.types import Document, Features, Packed

ROWS_AHEAD = 2  # rows that are read before they are asked for
POLL_SECONDS = 0.2
PATIENCE_SECONDS = 30  # how long a shard of a stream is waited for without a message


@dataclass(frozen=True)
class StoredRow:
    """The stored features of a packed row in host memory, those of its documents one after the other: tensors as in a
    shard, and `last_P`, the tokens of the row that the final states belong to (int64)."""

    tensors: dict[str, Tensor]
    last_P: Tensor


class DiskFeatures:
    """Features of the given layers from a cache, which is a `FeatureSource`. `logits` computes the teacher's logits;
    `device` and `dtype` are those of the features.

    Final states are zeros for tokens whose final state is not stored. Files are read with plain reads instead of a
    memory map: a truncated file is then an error instead of a signal, and large reads need no page faults. Raises
    ValueError for layers that the cache does not have.
    """

    def __init__(
        self, cache: FeatureCache, layers: Sequence[int], logits: Callable[[Tensor], Tensor], device: torch.device,
        dtype: torch.dtype, say: Callable[[str], None] = lambda line: None,
    ):  # fmt: skip
        self.cache, self.logits, self.device, self.dtype, self.say = cache, logits, device, dtype, say
        known = cache.layout.layers
        if missing := [i for i in layers if i not in known]:
            raise ValueError(
                f"{cache.path} has the hidden states of layers {list(known)}, and the draft also reads {missing}; "
                "choose among the former by --aux-layers, or write features of these layers"
            )
        self.columns = [known.index(i) for i in layers]
        self._read_ahead: dict[int, tuple[Packed, Future[StoredRow]]] = {}  # by the id of the row
        self._closed = threading.Event()  # set when reading ahead ends, so that no thread waits for a shard any more

    def ahead(self, rows: Iterator[Packed]) -> Iterator[Packed]:
        """The same rows. The next ROWS_AHEAD are read from the disk by threads before they are asked for."""
        self._closed.clear()
        with ThreadPoolExecutor(ROWS_AHEAD) as executor:
            upcoming: deque[Packed] = deque()
            try:
                for row in itertools.chain(rows, [None] * ROWS_AHEAD):
                    if row is not None:
                        self._read_ahead[id(row)] = row, executor.submit(self.read, row)
                        upcoming.append(row)
                    if upcoming and (row is None or len(upcoming) > ROWS_AHEAD):
                        yield upcoming.popleft()
            finally:
                self._closed.set()
                self._read_ahead.clear()
                executor.shutdown(wait=True, cancel_futures=True)

    def features(self, row: Packed) -> Features:
        """The features of a packed row whose `sources` are documents of the cache. A row without sources, as it is used
        to measure the memory of a training step, gets zeros, through the same steps and in as much memory."""
        _, reading = self._read_ahead.pop(id(row), (None, None))
        stored = self.read(row) if reading is None else reading.result()
        tensors = {name: x.to(self.device, non_blocking=True) for name, x in stored.tensors.items()}
        T, D = row.token_T.numel(), self.cache.layout.width
        aux_TAD = torch.zeros(T, len(self.columns), D, dtype=self.dtype, device=self.device)
        if self.columns:
            layers = tensors[LAYERS]
            decode_layers(layers, tensors.get(SCALES), aux_TAD[: layers.shape[0]], self.columns)
        last_TD = torch.zeros(T, D, dtype=self.dtype, device=self.device)
        last_TD[stored.last_P.to(self.device, non_blocking=True)] = tensors[LAST].to(self.dtype)
        return Features(aux_TAD, last_TD)

    def finite(self, row: Packed) -> bool:
        """See `FeatureSource.finite`."""
        return bool(all_finite(self.features(row)))

    def read(self, row: Packed) -> StoredRow:
        """Reads a row's features into pinned memory, if the device is a GPU. Raises ValueError for shards that are
        missing, truncated, damaged or of other features."""
        layout, pin = self.cache.layout, self.device.type == "cuda"
        ranges = row.without_filler()
        kept = [layout.last_tokens(Document(row.token_T[a:b], row.span_T[a:b])) for a, b in ranges]
        shapes = layout.tensors(ranges[-1][1], sum(tokens.numel() for tokens in kept))
        names = [LAST, *(name for name in (LAYERS, SCALES) if name in shapes and self.columns)]
        make = torch.empty if row.sources else torch.zeros
        with current_device(self.device):  # in a thread it would be the first GPU, which pinning would initialize
            tensors = {name: make(shapes[name][1], dtype=shapes[name][0], pin_memory=pin) for name in names}
        last = 0
        for document, (start, end), tokens in zip(row.sources, ranges, kept, strict=bool(row.sources)):
            slices = {LAYERS: slice(start, end), SCALES: slice(start, end), LAST: slice(last, last + tokens.numel())}
            self._read_document(document, {name: x[slices[name]] for name, x in tensors.items()})
            last += tokens.numel()
        last_P = torch.cat([tokens + start for tokens, (start, _) in zip(kept, ranges, strict=True)])
        with current_device(self.device):
            return StoredRow(tensors, last_P.pin_memory() if pin else last_P)

    def _read_document(self, document: int, parts: dict[str, Tensor]) -> None:
        """Reads a document's features into `parts`, tensors by name."""
        shard, tokens, last = self._places[document]
        first = {LAYERS: tokens, SCALES: tokens, LAST: last}
        offsets = self._offsets(shard)  # also checks the file
        try:
            with self.cache.file(shard).open("rb", buffering=0) as f:
                for name, part in parts.items():
                    row_bytes = part[0].nbytes if len(part) else 0
                    f.seek(offsets[name] + first[name] * row_bytes)
                    _fill(f, part)
        except FileNotFoundError:
            self.cache.offsets(shard)  # says what is missing, and the remedy
            raise

    @functools.cache  # noqa: B019 (a source lives as long as its training)
    def _offsets(self, shard: int) -> dict[str, int]:
        if self.cache.manifest.stream:
            self._wait_for(shard)
        return self.cache.offsets(shard)

    def _wait_for(self, shard: int) -> None:
        """Waits until a shard of a stream is written. Says so if it takes long."""
        began, said = time.monotonic(), False
        while not self.cache.is_written(shard) and not self._closed.wait(POLL_SECONDS):
            if not said and time.monotonic() - began > PATIENCE_SECONDS:
                self.say(f"waiting for {self.cache.file(shard)}, which `fledge features` has to write")
                said = True

    @functools.cached_property
    def _places(self) -> list[tuple[int, int, int]]:
        """For each document, its shard, and the numbers of tokens and of final states before it in the shard."""
        found, sizes = [], self.cache.sizes
        for shard, (first, end) in enumerate(self.cache.manifest.shards):
            tokens = itertools.accumulate(sizes.tokens[first:end], initial=0)
            last = itertools.accumulate(sizes.last[first:end], initial=0)
            found += [(shard, t, p) for t, p, _ in zip(tokens, last, range(first, end), strict=False)]
        return found


def _fill(f: BinaryIO, part: Tensor) -> None:
    """Reads the bytes of a contiguous tensor from a file. Raises ValueError if the file ends before."""
    rest = memoryview(part.view(torch.uint8).numpy()).cast("B") if part.numel() else memoryview(b"")
    while len(rest):
        if not (count := f.readinto(rest)):
            raise ValueError(f"{f.name} is truncated: it was changed while it was read; write it again")
        rest = rest[count:]
