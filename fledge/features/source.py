"""Features read from the disk, as a source for training."""

from __future__ import annotations

import functools
import itertools
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
from fledge.types import Features, Packed

ROWS_AHEAD = 2  # rows that are read before they are asked for


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
        self._read_ahead: dict[int, tuple[Packed, Future[StoredRow]]] = {}  # by the id of the row

    def ahead(self, rows: Iterator[Packed]) -> Iterator[Packed]:
        """The same rows. The next ROWS_AHEAD are read from the disk by threads before they are asked for."""
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
                self._read_ahead.clear()
                executor.shutdown(wait=True, cancel_futures=True)

    def features(self, row: Packed) -> Features:
        """The features of a packed row whose `sources` are documents of the cache. A document that is cut off gets the
        features of its first tokens."""
        _, reading = self._read_ahead.pop(id(row), (None, None))
        stored = self.read(row) if reading is None else reading.result()
        tensors = {name: x.to(self.device, non_blocking=True) for name, x in stored.tensors.items()}
        T, N, D = row.token_T.numel(), tensors[LAYERS].shape[0], self.cache.layout.width
        layers, scales = tensors[LAYERS][:, self.columns], tensors.get(SCALES)
        aux_TAD = torch.zeros(T, len(self.columns), D, dtype=self.dtype, device=self.device)
        decode_layers(layers, None if scales is None else scales[:, self.columns], aux_TAD[:N])
        last_TD = torch.zeros(T, D, dtype=self.dtype, device=self.device)
        last_TD[stored.last_P.to(self.device, non_blocking=True)] = tensors[LAST].to(self.dtype)
        return Features(aux_TAD, last_TD)

    def read(self, row: Packed) -> StoredRow:
        """Reads a row's features into pinned memory, if the device is a GPU. Raises ValueError for shards that are
        missing, truncated, damaged or of other features."""
        cache, layout = self.cache, self.cache.layout
        ranges = row.without_filler()
        assert len(row.sources) == len(ranges), "features on disk need the sources of a row's documents"
        kept = []
        for source, (start, end) in zip(row.sources, ranges, strict=True):
            tokens = layout.last_tokens(cache.documents[source])
            kept.append(tokens[tokens < end - start] + start)
        last_P, N = torch.cat(kept), ranges[-1][1]
        pin = self.device.type == "cuda"
        tensors = {
            name: torch.empty(shape, dtype=dtype, pin_memory=pin)
            for name, (dtype, shape) in layout.tensors(N, last_P.numel()).items()
        }
        at = 0
        for source, (start, end), tokens in zip(row.sources, ranges, kept, strict=True):
            slices = {LAYERS: slice(start, end), SCALES: slice(start, end), LAST: slice(at, at + tokens.numel())}
            self._read_document(source, {name: x[slices[name]] for name, x in tensors.items()})
            at += tokens.numel()
        return StoredRow(tensors, last_P.pin_memory() if pin else last_P)

    def _read_document(self, document: int, parts: dict[str, Tensor]) -> None:
        """Reads the beginning of a document's features into `parts`, as many as they have rows."""
        shard, tokens, last = self._places[document]
        first = {LAYERS: tokens, SCALES: tokens, LAST: last}
        offsets = self._offsets(shard)
        with self.cache.file(shard).open("rb", buffering=0) as f:
            for name, part in parts.items():
                row_bytes = part[0].nbytes if len(part) else 0
                f.seek(offsets[name] + first[name] * row_bytes)
                _fill(f, part)

    @functools.cache  # noqa: B019 (a source lives as long as its training)
    def _offsets(self, shard: int) -> dict[str, int]:
        return self.cache.offsets(shard)

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
