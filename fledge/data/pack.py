"""Packing complete documents into rows of a fixed length."""

from __future__ import annotations

import random
from bisect import bisect_left, insort
from collections.abc import Sequence

import numpy as np
import torch

from fledge.data.documents import Document, lengths_of
from fledge.types import Packed


def pack(documents: Sequence[Document], row_length: int, seed: int, open_rows: int = 64) -> list[list[int]]:
    """Assigns document indices to rows of at most `row_length` tokens. Deterministic for a seed.

    The documents are shuffled by `seed` and then placed by best fit: into the row with the least room that suffices, of
    equal ones the row that has not been changed for longest. At most `open_rows` rows are candidates at a time, so that
    a row's content stays random. Raises ValueError for a document longer than a row.
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


def make_row(
    documents: list[Document], row_length: int, pad_id: int = 0, sources: Sequence[int] = ()
) -> Packed:  # fmt: skip
    """Concatenates documents and fills the rest of the row with filler tokens `pad_id` (see `Packed`).

    All tensors of the result are int32 [row_length].
    """
    token = np.full(row_length, pad_id, dtype=np.int32)
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
