"""What is stored of each document, and how many bytes that takes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from fledge.data.documents import Document
from fledge.states.codec import PRECISIONS, Precision

LAYERS, SCALES, LAST = "layers", "scales", "last"  # the tensors of a shard
HEADER_BYTES = 1024  # upper bound of a shard's header
ALIGNMENT = 256  # bytes, of a tensor's start in a buffer
DOCUMENT_BYTES = 4 + 4  # per token: its id and its span, int32


def teacher_tokens(document: Document) -> Tensor:
    """The tokens of a document after which the loss reads the target's distribution, ascending int64.

    They are the x_{t+1+k} of all live slots t and steps k (see `Packed.live`). Those of step 0 are all of them: where
    slot t is live at step k, slot t + k is live at step 0. So they do not depend on the number of steps: all tokens but
    the first whose successor belongs to the same span.
    """
    span = document.spans
    return torch.from_numpy(np.flatnonzero((span[1:-1] >= 0) & (span[1:-1] == span[2:])) + 1)


def needed_tokens(document: Document) -> int:
    """The number of a document's first tokens whose states the loss needs: all up to the last teacher token."""
    return int(teacher_tokens(document).max()) + 1


@dataclass(frozen=True)
class Layout:
    """What is stored of each token: the states of `layers` (ids as in `TrainingTarget.features`), each of `width`
    numbers, and the final state; with `all_last` of every token, otherwise of `teacher_tokens`. `precision` is a key of
    PRECISIONS."""

    layers: tuple[int, ...]
    width: int
    precision: str
    all_last: bool

    @property
    def dtypes(self) -> Precision:
        return PRECISIONS[self.precision]

    def last_tokens(self, document: Document) -> Tensor:
        """The tokens of a document whose final state is stored, ascending int64 [P]."""
        return torch.arange(len(document.tokens)) if self.all_last else teacher_tokens(document)

    def tensors(self, tokens: int, last: int) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
        """Dtype and shape of a shard's tensors, for numbers of tokens and of final states."""
        A, D = len(self.layers), self.width
        found: dict[str, tuple[torch.dtype, tuple[int, ...]]] = {LAYERS: (self.dtypes.layers, (tokens, A, D))}
        if self.dtypes.scaled:
            found[SCALES] = (torch.float32, (tokens, A))
        return found | {LAST: (self.dtypes.last, (last, D))}

    def bytes(self, tokens: int, last: int) -> int:
        """The bytes of a shard's tensors."""
        return sum(dtype.itemsize * math.prod(shape) for dtype, shape in self.tensors(tokens, last).values())


Places = dict[str, tuple[int, torch.dtype, tuple[int, ...]]]  # of tensors in a buffer: first byte, dtype and shape


def place(layout: Layout, names: Sequence[str], tokens: int, last: int) -> tuple[Places, int]:
    """Places the tensors of `Layout.tensors` that are in `names` one after the other in a buffer. Returns their places
    and the number of bytes."""
    places, end = {}, 0
    for name, (dtype, shape) in layout.tensors(tokens, last).items():
        if name in names:
            places[name] = end, dtype, shape
            end += -(-dtype.itemsize * math.prod(shape) // ALIGNMENT) * ALIGNMENT
    return places, end


def views(places: Places, buffer: Tensor) -> dict[str, Tensor]:
    """The tensors in a buffer, uint8 [bytes or more], by name."""
    return {
        name: buffer[start : start + dtype.itemsize * math.prod(shape)].view(dtype).view(shape)
        for name, (start, dtype, shape) in places.items()
    }


@dataclass(frozen=True)
class Sizes:
    """The numbers of tokens and of stored final states of each document."""

    tokens: Sequence[int]
    last: Sequence[int]

    @classmethod
    def of(cls, documents: Sequence[Document], layout: Layout) -> Sizes:
        tokens = [len(d.tokens) for d in documents]
        return cls(tokens, tokens if layout.all_last else [layout.last_tokens(d).numel() for d in documents])

    def bytes(self, layout: Layout, first: int, end: int) -> int:
        """The most bytes that a shard with the documents [first, end) takes on disk."""
        return HEADER_BYTES + layout.bytes(sum(self.tokens[first:end]), sum(self.last[first:end]))


def split_shards(sizes: Sizes, layout: Layout, shard_bytes: int) -> list[tuple[int, int]]:
    """Divides the documents into shards, [first, end), of about `shard_bytes` bytes; a longer document is a shard."""
    shards, first, taken = [], 0, 0
    for i, (tokens, last) in enumerate(zip(sizes.tokens, sizes.last, strict=True)):
        size = layout.bytes(tokens, last)
        if i > first and taken + size > shard_bytes:
            shards.append((first, i))
            first, taken = i, 0
        taken += size
    return [*shards, (first, len(sizes.tokens))]
