"""Tokenized documents, their windows, and a table of documents that holds arrays, in memory or in files, and no Python
object per document. Torch is not imported here, so that tokenizing processes start fast."""

from __future__ import annotations

import hashlib
import mmap
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

import numpy as np

from fledge.io.files import disk_full_errno

T = TypeVar("T")

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
    """`supervised_V` is the number of supervised occurrences of each token id, int64; `seen_V` is True for ids that
    occur at all, bool. Both arrays end with the highest id that occurs."""

    supervised_V: np.ndarray
    seen_V: np.ndarray


class DocumentTable(Sequence[Document]):
    """Documents, concatenated: `tokens` and `spans` hold the tokens and the spans of all documents.

    Document i is the `lengths[i]` values from `starts[i]` on; `supervised[i]` tokens of document i are in spans. Two
    documents may share values. `starts` is int64 [D], `lengths` and `supervised` are int32 [D]. `sha256` (the
    `fingerprint`) and `counts` are None unless an earlier run made the documents.
    """

    def __init__(
        self, tokens: TokenFile | np.ndarray, spans: TokenFile | np.ndarray, starts: np.ndarray, lengths: np.ndarray,
        supervised: np.ndarray, sha256: str | None = None, counts: TokenCounts | None = None,
    ):  # fmt: skip
        self.tokens, self.spans = tokens, spans
        self.starts, self.lengths, self.supervised = starts, lengths, supervised
        self.sha256, self.counts = sha256, counts

    def __len__(self) -> int:
        return len(self.starts)

    def __getitem__(self, i: int | slice) -> Document | list[Document]:
        if isinstance(i, slice):
            return [self[j] for j in range(*i.indices(len(self)))]
        a = int(self.starts[i])
        b = a + int(self.lengths[i])
        return Document(self.tokens[a:b], self.spans[a:b])


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
    if isinstance(documents, DocumentTable) and documents.sha256 is not None:
        return documents.sha256
    digest = hashlib.sha256()
    for d in documents:
        digest.update(d.tokens.tobytes() + d.spans.tobytes())
    return digest.hexdigest()


# -- documents that are being made --------------------------------------------------------------------------------

TOKENS, SPANS = "tokens.bin", "spans.bin"


class TokenStore:
    """Tokens and spans of documents, appended batch by batch to two files in a directory, or kept in memory.

    When the disk is full, the store reads the files back into memory, empties the files, and calls `say` with a
    message; `in_memory` is True from then on.
    """

    def __init__(self, directory: Path | None = None, say: Callable[[str], None] = lambda line: None):
        self.directory, self.say, self.count = directory, say, 0
        self._memory = [bytearray(), bytearray()]  # for tokens, and for spans
        # unbuffered: when the disk is full, `count` tokens are in the files
        self._files: list[BinaryIO] = (
            [(directory / name).open("w+b", buffering=0) for name in (TOKENS, SPANS)] if directory else []
        )

    @property
    def in_memory(self) -> bool:
        return not self._files

    def append(self, tokens: np.ndarray, spans: np.ndarray) -> None:
        """Appends int32 values of equal length. Raises OSError if a file cannot be written for other reasons than a
        full disk."""
        if self._files:
            try:
                for file, values in zip(self._files, (tokens, spans), strict=True):
                    _write(file, memoryview(values).cast("B"))
            except OSError as e:
                if disk_full_errno(e) is None:
                    raise
                self._move_to_memory(e)
        if self.in_memory:
            for memory, values in zip(self._memory, (tokens, spans), strict=True):
                memory += values.tobytes()
        self.count += len(tokens)

    def finish(self) -> tuple[TokenFile | np.ndarray, TokenFile | np.ndarray]:
        """The tokens and the spans. Nothing can be appended afterwards."""
        if self.in_memory:
            tokens, spans = (np.frombuffer(memory, dtype=np.int32) for memory in self._memory)
            return tokens, spans
        self.close()
        return TokenFile(self.directory / TOKENS, self.count), TokenFile(self.directory / SPANS, self.count)

    def close(self) -> None:
        for file in self._files:
            file.close()

    def _move_to_memory(self, error: OSError) -> None:
        self.say(
            f"no space for the data cache in {self.directory.parent} ({error.strerror}): the tokens are kept in "
            "memory, and the next run makes them again; fledge train --data-cache names another directory"
        )
        size = self.count * ITEM_BYTES
        for file, memory in zip(self._files, self._memory, strict=True):
            file.seek(0)
            while len(memory) < size:
                memory += file.read(min(size - len(memory), 1 << 24))
            file.truncate(0)
        self.close()
        self._files = []


def _write(file: BinaryIO, data: memoryview) -> None:
    while data:
        data = data[file.write(data) :]
