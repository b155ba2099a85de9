"""Tokenized documents, their windows, and a table of documents that holds arrays, in memory or in files, and no Python
object per document. Torch is not imported here, so that tokenizing processes start fast."""

from __future__ import annotations

import hashlib
import io
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, TypeVar

import numpy as np

T = TypeVar("T")


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


class DocumentTable(Sequence[Document]):
    """Documents, concatenated: `tokens` and `spans` hold the tokens and the spans of all documents, one document after
    the other. Document i has `lengths[i]` tokens, of which `supervised[i]` are in spans; both are int32 [D]."""

    def __init__(self, tokens: np.ndarray, spans: np.ndarray, lengths: np.ndarray, supervised: np.ndarray):
        self.tokens, self.spans = tokens, spans
        self.lengths, self.supervised = lengths, supervised
        self.starts = np.cumsum(lengths, dtype=np.int64) - lengths

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, i: int | slice) -> Document | list[Document]:
        if isinstance(i, slice):
            return [self[j] for j in range(*i.indices(len(self)))]
        a = int(self.starts[i])
        b = a + int(self.lengths[i])
        return Document(self.tokens[a:b].copy(), self.spans[a:b].copy())


def grouped(items: Iterable[T], size: Callable[[T], int], enough: int, most: int | None = None) -> Iterator[list[T]]:
    """Successive items in groups. A group ends when the sizes of its items are `enough` together, or with `most` items
    (None: any number)."""
    group: list[T] = []
    total = 0
    for item in items:
        group.append(item)
        total += size(item)
        if total >= enough or len(group) == most:
            yield group
            group, total = [], 0
    if group:
        yield group


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
    digest = hashlib.sha256()
    for d in documents:
        digest.update(d.tokens.tobytes() + d.spans.tobytes())
    return digest.hexdigest()


TOKENS, SPANS = "tokens.bin", "spans.bin"


class TokenStore:
    """Tokens and spans of documents, appended batch by batch to two files in a directory (None: to memory)."""

    def __init__(self, directory: Path | None = None):
        self.directory = directory
        self._files: list[BinaryIO] = [
            (directory / name).open("wb") if directory else io.BytesIO() for name in (TOKENS, SPANS)
        ]

    def append(self, tokens: np.ndarray, spans: np.ndarray) -> None:
        """Appends int32 values of equal length."""
        for file, values in zip(self._files, (tokens, spans), strict=True):
            file.write(values)

    def finish(self) -> tuple[np.ndarray, np.ndarray]:
        """The tokens and the spans. Nothing can be appended afterwards."""
        if self.directory:
            self.close()
            return read_tokens(self.directory)
        tokens, spans = (np.frombuffer(file.getbuffer(), dtype=np.int32) for file in self._files)
        return tokens, spans

    def close(self) -> None:
        for file in self._files:
            file.close()


def read_tokens(directory: Path) -> tuple[np.ndarray, np.ndarray]:
    """The tokens and the spans in a directory that a `TokenStore` has written, mapped into memory."""
    tokens, spans = (np.asarray(np.memmap(directory / name, dtype=np.int32, mode="r")) for name in (TOKENS, SPANS))
    return tokens, spans
