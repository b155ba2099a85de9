"""Documents and packed rows of random tokens, and the definition of their live slots."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import torch
from hypothesis import strategies as st
from torch import Tensor

from fledge.data.documents import Document
from fledge.data.pack import make_row
from fledge.ops.attention_ttt import Queries
from fledge.types import Packed


def document(length: int, *spans: tuple[int, int], seed: int = 0, vocab: int = 400) -> Document:
    """A document of random tokens with the given supervised spans, each [start, end)."""
    tokens = torch.randint(vocab, (length,), generator=torch.Generator().manual_seed(seed), dtype=torch.int32)
    marks = np.full(length, -1, dtype=np.int32)
    for i, (a, b) in enumerate(spans):
        marks[a:b] = i
    return Document(tokens.numpy(), marks)


DOCUMENTS = [
    document(1, seed=2),
    document(21, (5, 11), (13, 21), seed=3),
    document(1, (0, 1), seed=4),
    document(2, (0, 2), seed=5),
    document(13, (1, 13), seed=6),
    document(7, seed=7),
    document(9, (0, 4), (4, 9), seed=8),
]


def row_of(documents: list[Document], filler: int = 0) -> Packed:
    return make_row(documents, sum(len(d.tokens) for d in documents) + filler)


@st.composite
def layouts(draw) -> tuple[list[Document], int]:
    """A Hypothesis strategy: one to four documents of random lengths and spans, and a number of filler tokens."""
    documents = []
    for i in range(draw(st.integers(1, 4))):
        n = draw(st.integers(1, 18))
        cuts = sorted(draw(st.lists(st.integers(0, n), max_size=4)))
        spans = [(a, b) for a, b in pairwise(cuts) if draw(st.booleans())]
        documents.append(document(n, *spans, seed=draw(st.integers(0, 1000)) + i))
    return documents, draw(st.integers(0, 5))


def live_by_definition(d: Document, steps: int) -> set[tuple[int, int]]:
    """The live pairs (slot t, step k): those for which x_{t+1} .. x_{t+2+k} lie in one span."""
    n, spans = len(d.tokens), d.spans.tolist()
    return {
        (t, k)
        for t in range(n)
        for k in range(steps)
        if t + 2 + k < n and spans[t + 1] >= 0 and len(set(spans[t + 1 : t + 3 + k])) == 1
    }


def queries_of(row: Packed, slots: Tensor, steps: int, blocks: Sequence[tuple[int, int, int, int]] = ()) -> Queries:
    """Queries of `slots` that attend to their own keys of `steps` earlier steps."""
    begins = torch.tensor([a for a, _ in row.documents()])
    first = begins[torch.searchsorted(begins, slots, right=True) - 1]
    return Queries(slots.int(), first.int(), torch.arange(slots.numel()).int().expand(steps, -1), blocks)
