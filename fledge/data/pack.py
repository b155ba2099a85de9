"""Windows of long documents, and rows of one shape packed from whole documents."""

from __future__ import annotations

import random

import torch

from fledge.types import Document, Packed


def windows(document: Document, max_length: int) -> list[Document]:
    """Cuts a document into windows of at most `max_length` tokens, each a document of its own; none is dropped
    but those in which nothing can be drafted (no slot live at step 0)."""
    parts = zip(document.tokens.split(max_length), document.spans.split(max_length), strict=True)
    return [d for d in (Document(t, s) for t, s in parts) if _drafts(d)]


def _drafts(d: Document) -> bool:
    return bool(((d.spans[1:-1] >= 0) & (d.spans[1:-1] == d.spans[2:])).any())


def pack(documents: list[Document], row_length: int, seed: int, open_rows: int = 64) -> list[list[int]]:
    """Assigns documents (by index) to rows of at most `row_length` tokens, in an order drawn from `seed`.

    Best fit over a bounded number of open rows, so a row's content stays random. Deterministic.
    """
    order = list(range(len(documents)))
    random.Random(seed).shuffle(order)
    done: list[list[int]] = []
    rows: list[tuple[int, list[int]]] = []  # (room left, documents)
    for i in order:
        n = documents[i].tokens.numel()
        fits = [j for j, (room, _) in enumerate(rows) if room >= n]
        if fits:
            j = min(fits, key=lambda j: rows[j][0])
            room, held = rows.pop(j)
        else:
            if len(rows) == open_rows:
                done.append(rows.pop(min(range(len(rows)), key=lambda j: rows[j][0]))[1])
            room, held = row_length, []
        if n > row_length:
            raise ValueError(f"a document of {n} tokens does not fit a row of {row_length}")
        rows.append((room - n, [*held, i]))
    return done + [held for _, held in rows]


FILLER = 128  # tokens of a document of filler: attention over one long document would cost more than the row's own


def make_row(documents: list[Document], row_length: int, pad_id: int = 0) -> Packed:
    """Lays whole documents one after another and fills the tail; every tensor int32 [row_length]."""
    token = torch.full((row_length,), pad_id, dtype=torch.int32)
    span = torch.full((row_length,), -1, dtype=torch.int32)
    position = torch.zeros(row_length, dtype=torch.int32)
    doc = torch.empty(row_length, dtype=torch.int32)
    at, spans = 0, 0
    for i, d in enumerate(documents):
        n = d.tokens.numel()
        token[at : at + n] = d.tokens
        span[at : at + n] = torch.where(d.spans >= 0, d.spans + spans, -1)
        position[at : at + n] = torch.arange(n)
        doc[at : at + n] = i
        at, spans = at + n, spans + int(d.spans.max()) + 1
    rest = torch.arange(row_length - at, dtype=torch.int32)
    position[at:], doc[at:] = rest % FILLER, -1 - rest // FILLER
    return Packed(token, span, position, doc)
