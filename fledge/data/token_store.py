"""Where tokens are put while documents are made: the files of a cache, or memory."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO

import numpy as np

from fledge.data.documents import TokenFile
from fledge.io.files import disk_full_errno

TOKENS, SPANS = "tokens.bin", "spans.bin"


class TokenStore:
    """Tokens and spans of documents, which are appended batch by batch to two files in a directory, or kept in memory.

    If the disk gets full, what was written is read back into memory, the files are emptied, and `say` is called with a
    message; `in_memory` is True from then on.
    """

    def __init__(self, directory: Path | None = None, say: Callable[[str], None] = lambda line: None):
        self.directory, self.say, self.count = directory, say, 0
        self._memory = [bytearray(), bytearray()]  # of tokens and of spans
        # without buffers, so that it is known what was written when a disk is full
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
        size = self.count * np.dtype(np.int32).itemsize
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
