"""Packing complete documents into rows of a fixed length. Each epoch packs the documents in a new order, drawn from a
seed."""

from __future__ import annotations

import random
from bisect import bisect_left, insort
from collections.abc import Sequence

import numpy as np
import torch

from fledge.data.documents import Document, lengths_of, supervised_of
from fledge.types import Packed


def pack(documents: Sequence[Document], row_length: int, seed: int, open_rows: int = 64) -> list[list[int]]:
    """Assigns document indices to rows of at most `row_length` tokens. Deterministic for a seed.

    The documents are shuffled by `seed` and then placed by best fit: into the row with the least sufficient room; of
    rows with equal room, into the row that has been unchanged for longest. At most `open_rows` rows are candidates at a
    time, so that a row's content stays random. Raises ValueError for a document longer than a row.
    """
    lengths = lengths_of(documents).tolist()
    order = list(range(len(lengths)))
    random.Random(seed).shuffle(order)
    done: list[list[int]] = []
    rows: list[tuple[int, int, list[int]]] = []  # (free tokens, time of its last change, document indices), ascending
    for time, i in enumerate(order):
        n = lengths[i]
        if n > row_length:
            raise ValueError(f"a document of {n} tokens does not fit a row of {row_length}")
        best = bisect_left(rows, (n,))
        if best < len(rows):
            free, _, indices = rows.pop(best)
        else:
            if len(rows) == open_rows:
                done.append(rows.pop(0)[2])
            free, indices = row_length, []
        indices.append(i)
        insort(rows, (free - n, time, indices))
    return done + [indices for _, _, indices in sorted(rows, key=lambda row: row[1])]


FILLER_LENGTH = 128  # tokens of a filler document; short, because attention costs the square of a document's length


def make_row(documents: list[Document], row_length: int, sources: Sequence[int] = ()) -> Packed:
    """Concatenates documents and fills the rest of the row with filler tokens, whose id is 0 (see `Packed`).

    All tensors of the result are int32 [row_length].
    """
    token = np.zeros(row_length, dtype=np.int32)
    span = np.full(row_length, -1, dtype=np.int32)
    position = np.zeros(row_length, dtype=np.int32)
    doc = np.empty(row_length, dtype=np.int32)
    at, spans = 0, 0
    for i, d in enumerate(documents):
        n = len(d.tokens)
        token[at : at + n] = d.tokens
        span[at : at + n] = np.where(d.spans >= 0, d.spans + spans, -1)
        position[at : at + n] = np.arange(n)
        doc[at : at + n] = i
        at, spans = at + n, spans + int(d.spans.max()) + 1
    rest = np.arange(row_length - at)
    position[at:], doc[at:] = rest % FILLER_LENGTH, -1 - rest // FILLER_LENGTH
    return Packed(*map(torch.from_numpy, (token, span, position, doc)), tuple(sources))


class Rows:
    """The packed rows of all epochs, addressed by (epoch, index of the row within the epoch)."""

    def __init__(self, documents: Sequence[Document], row_length: int, seed: int):
        self.documents, self.row_length, self.seed = documents, row_length, seed
        self._lengths, self._supervised = lengths_of(documents), supervised_of(documents)
        self._epochs: dict[int, list[list[int]]] = {}  # the latest epoch and the one before it

    def epoch(self, epoch: int) -> list[list[int]]:
        """The document indices of each row of an epoch."""
        if epoch not in self._epochs:
            previous = {e: rows for e, rows in self._epochs.items() if e == epoch - 1}
            packed = pack(self.documents, self.row_length, seed=self.seed * 1_000_003 + epoch)
            self._epochs = previous | {epoch: packed}
        return self._epochs[epoch]

    def __getitem__(self, address: tuple[int, int]) -> Packed:
        epoch, i = address
        indices = self.epoch(epoch)[i]
        return make_row([self.documents[j] for j in indices], self.row_length, sources=indices)

    def tokens(self, address: tuple[int, int]) -> int:
        """The number of tokens in a row, without filler."""
        epoch, i = address
        return int(self._lengths[self.epoch(epoch)[i]].sum())

    def supervised(self, address: tuple[int, int]) -> int:
        """The number of supervised tokens in a row. The time of a training step grows with supervised tokens."""
        epoch, i = address
        return int(self._supervised[self.epoch(epoch)[i]].sum())

    def next(self, address: tuple[int, int]) -> tuple[int, int]:
        """The address of the next row: in the same epoch, or the first of the next epoch."""
        epoch, i = address
        return (epoch, i + 1) if i + 1 < len(self.epoch(epoch)) else (epoch + 1, 0)

    def longest(self) -> int:
        """The number of tokens of the longest document."""
        return int(self._lengths.max())

    def heaviest(self) -> list[Packed]:
        """The rows of the first epoch that need the most memory in a training step: one or two rows.

        The first is the row with the most supervised tokens; a row with the longest document follows, unless the first
        row has a document of that length. Rows of later epochs are packed differently and may need more memory.
        """
        rows = self.epoch(0)
        supervised = [int(self._supervised[row].sum()) for row in rows]
        longest = [int(self._lengths[row].max()) for row in rows]
        most, longest_row = supervised.index(max(supervised)), longest.index(max(longest))
        indices = [most] if longest[most] == max(longest) else [most, longest_row]
        return [self[0, i] for i in indices]
