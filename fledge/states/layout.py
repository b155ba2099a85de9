"""What is stored of each document, how hidden states are rounded on disk, and how many bytes they take.

`float32`, `bfloat16` and `float16` are those dtypes. `fp8` is for the captured layers only: with s = max_d |x_d| / 448
for each token and layer (float32; 1 if all x are 0), it keeps x / s as float8_e4m3fn, whose largest value is 448, and
s. The final hidden states, whose products with the head are the soft targets, are then bfloat16.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from fledge.data.documents import Document

LAYERS, SCALES, LAST = "layers", "scales", "last"  # the tensors of a shard
HEADER_BYTES = 1024  # upper bound of a shard's header
ALIGNMENT = 256  # bytes, of a tensor's start in a buffer
DOCUMENT_BYTES = 4 + 4  # bytes of a token's id and span, int32
FP8 = torch.float8_e4m3fn
FP8_MAX = torch.finfo(FP8).max


@dataclass(frozen=True)
class Precision:
    """The dtypes on disk of the captured layers' states and of the final states."""

    layers: torch.dtype
    last: torch.dtype

    @property
    def scaled(self) -> bool:
        """Whether the layers' states have a scale for each token and layer."""
        return self.layers == FP8


PRECISIONS = {
    "float32": Precision(torch.float32, torch.float32),
    "bfloat16": Precision(torch.bfloat16, torch.bfloat16),
    "float16": Precision(torch.float16, torch.float16),
    "fp8": Precision(FP8, torch.bfloat16),
}


def encode_layers(states_TAD: Tensor, precision: Precision) -> tuple[Tensor, Tensor | None]:
    """Finite states in stored form: [T, A, D] in `precision.layers`, and scales, float32 [T, A] (None: no scales).

    States beyond the range of float16 become infinite; the other precisions have the range of float32.
    """
    if not precision.scaled:
        return states_TAD.to(precision.layers), None
    states_TAD = states_TAD.float()
    scale_TA = states_TAD.abs().amax(-1) * (1 / FP8_MAX)  # GPUs would round the quotient otherwise than CPUs
    # also where the largest state is so small that its scale is zero: the states then become zeros
    scale_TA = torch.where(scale_TA > 0, scale_TA, 1.0)
    return (states_TAD / scale_TA[..., None]).clamp(-FP8_MAX, FP8_MAX).to(FP8), scale_TA


def decode_layers(
    stored_TLD: Tensor, scale_TL: Tensor | None, out_TAD: Tensor, columns: Sequence[int] | None = None
) -> None:  # fmt: skip
    """Writes the stored states of all L layers, or of A layers (`columns`), into `out_TAD`, whose dtype is the dtype of
    computation. Products with scales are float32, computed one layer at a time to save memory."""
    for i, column in enumerate(range(stored_TLD.shape[1]) if columns is None else columns):
        states_TD = stored_TLD[:, column]
        if scale_TL is None:
            out_TAD[:, i] = states_TD
        else:  # `out` rounds the products without another pass over them
            torch.mul(states_TD.float(), scale_TL[:, column, None], out=out_TAD[:, i])


def teacher_tokens(document: Document) -> Tensor:
    """The tokens of a document after which the loss reads the target's distribution, ascending int64.

    The loss reads the distribution after the tokens x_{t+1+k} of all live slots t and steps k (see `Packed.live`). Step
    0 alone gives the same tokens: where slot t is live at step k, slot t + k is live at step 0. The result is therefore
    independent of the number of steps: all tokens but the first whose successor belongs to the same span.
    """
    span = document.spans
    return torch.from_numpy(np.flatnonzero((span[1:-1] >= 0) & (span[1:-1] == span[2:])) + 1)


def needed_tokens(document: Document) -> int:
    """The number of a document's first tokens whose states the loss needs: all up to the last teacher token."""
    return int(teacher_tokens(document).max()) + 1


@dataclass(frozen=True)
class Layout:
    """The stored states of a token: the states of `layers` (ids as in `TrainingTarget.features`), each of `width`
    numbers, and the final state. With `all_last`, final states are stored of every token, otherwise of
    `teacher_tokens`. `precision` is a key of PRECISIONS."""

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
    """Places the tensors `names` of `Layout.tensors` in a buffer, one after the other. Returns the tensors' places and
    the number of bytes."""
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

    def total(self, first: int, end: int) -> tuple[int, int]:
        """The numbers of tokens and of stored final states of the documents [first, end)."""
        return sum(self.tokens[first:end]), sum(self.last[first:end])


def split(sizes: Sequence[int], most: int, first: int = 0) -> Iterator[tuple[int, int]]:
    """Divides items, which are numbered from `first` on, into consecutive parts [start, end) whose sizes are `most`
    together at most; a larger item is a part."""
    start, taken = first, 0
    for i, size in enumerate(sizes, first):
        if i > start and taken + size > most:
            yield start, i
            start, taken = i, 0
        taken += size
    yield start, first + len(sizes)


def split_shards(sizes: Sizes, layout: Layout, shard_bytes: int) -> list[tuple[int, int]]:
    """Divides the documents into shards, [first, end), of about `shard_bytes` bytes; a longer document is a shard."""
    return list(split([*map(layout.bytes, sizes.tokens, sizes.last)], shard_bytes))
