"""Tokenized documents, their windows, and a table of documents that holds arrays, in memory or in files, and no Python
object per document. Torch is not imported here, for tokenizing processes to start fast."""

from __future__ import annotations

import hashlib
import mmap
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

ITEM_BYTES = 4  # tokens and spans are int32
RELEASE_BYTES = 1 << 26  # when so many bytes may have been mapped, a `TokenFile` gives its pages back
FAULT_BYTES = 1 << 21  # Linux maps up to so many bytes around a page that is read


@dataclass(frozen=True)
class Document:
    """A tokenized conversation, text, or window of one.

    `tokens` are the token ids. `spans` has for each token the id of its assistant turn (distinct within the document),
    or -1 for tokens that are not supervised. Both are int32 arrays of shape [n].
    """

    tokens: np.ndarray
    spans: np.ndarray


def windows(document: Document, max_length: int) -> list[Document]:
    """Splits a document into windows of at most `max_length` tokens, each a document of its own.

    Windows without a slot that is live at step 0 are dropped, because they contribute nothing to the loss.
    """
    starts = range(0, len(document.tokens), max_length)
    parts = [Document(document.tokens[a : a + max_length], document.spans[a : a + max_length]) for a in starts]
    return [d for d in parts if ((d.spans[1:-1] >= 0) & (d.spans[1:-1] == d.spans[2:])).any()]


class TokenFile:
    """A file of `count` int32 values that is mapped into memory; slices are read as copies.

    Pages that were read count as memory of the process until they are given back, which happens about every
    RELEASE_BYTES. The process's memory therefore does not grow with the file; the operating system keeps the pages
    while it has room, once for all processes. A copy that is sent to another process maps the file again.
    """

    def __init__(self, path: Path, count: int):
        self.path, self.count, self._mapped = path, count, 0
        with path.open("rb") as f:
            self._map = mmap.mmap(f.fileno(), count * ITEM_BYTES, access=mmap.ACCESS_READ)
        self._values = np.frombuffer(self._map, dtype=np.int32)

    def __getitem__(self, part: slice) -> np.ndarray:
        found = self._values[part].copy()
        self._mapped += found.nbytes + FAULT_BYTES
        if self._mapped >= RELEASE_BYTES:
            self.release()
        return found

    def release(self) -> None:
        """Gives the pages that were read back to the operating system."""
        self._map.madvise(mmap.MADV_DONTNEED)
        self._mapped = 0

    def __reduce__(self) -> tuple[Any, ...]:
        return TokenFile, (self.path, self.count)


@dataclass(frozen=True)
class TokenCounts:
    """`supervised_V` is the number of supervised occurrences of each token id, int64; `seen_V` says which ids occur at
    all, bool. Both end with the highest id that occurs."""

    supervised_V: np.ndarray
    seen_V: np.ndarray


@dataclass(frozen=True)
class Summary:
    """What training asks about all documents together: their `fingerprint`, and how often each token occurs."""

    sha256: str
    counts: TokenCounts


class DocumentTable(Sequence[Document]):
    """Documents in `tokens` and `spans`, which hold those of all documents one after the other.

    Document i is the `lengths[i]` values from `starts[i]` on, `supervised[i]` of them in spans; two documents may be
    the same values. `starts` is int64 [D], `lengths` and `supervised` are int32 [D]. `summary` is known for documents
    that were made by an earlier run.
    """

    def __init__(
        self, tokens: TokenFile | np.ndarray, spans: TokenFile | np.ndarray, starts: np.ndarray, lengths: np.ndarray,
        supervised: np.ndarray, summary: Summary | None = None,
    ):  # fmt: skip
        self.tokens, self.spans = tokens, spans
        self.starts, self.lengths, self.supervised = starts, lengths, supervised
        self.summary = summary

    def __len__(self) -> int:
        return len(self.starts)

    def __getitem__(self, i: int | slice) -> Document | list[Document]:
        if isinstance(i, slice):
            return [self[j] for j in range(*i.indices(len(self)))]
        a = int(self.starts[i])
        b = a + int(self.lengths[i])
        return Document(self.tokens[a:b], self.spans[a:b])


def lengths_of(documents: Sequence[Document]) -> np.ndarray:
    """The number of tokens of each document, int64 [D]."""
    if isinstance(documents, DocumentTable):
        return documents.lengths.astype(np.int64)
    return np.array([len(d.tokens) for d in documents], dtype=np.int64)


def supervised_of(documents: Sequence[Document]) -> np.ndarray:
    """The number of supervised tokens of each document, int64 [D]."""
    if isinstance(documents, DocumentTable):
        return documents.supervised.astype(np.int64)
    return np.array([int((d.spans >= 0).sum()) for d in documents], dtype=np.int64)


def fingerprint(documents: Sequence[Document]) -> str:
    """SHA-256 of the tokens and spans of all documents, in hexadecimal."""
    if isinstance(documents, DocumentTable) and documents.summary is not None:
        return documents.summary.sha256
    digest = hashlib.sha256()
    for d in documents:
        digest.update(d.tokens.tobytes() + d.spans.tobytes())
    return digest.hexdigest()
