"""The output file of `fledge regenerate`: one JSON line for each record, written as the answers come."""

from __future__ import annotations

import json
import os
from collections import defaultdict, deque
from collections.abc import Iterator, Sequence
from io import FileIO
from pathlib import Path
from typing import Any

from fledge.io.fields import parse_json
from fledge.io.files import replace_file


class AnswersFile:
    """A file with a row for each record, used as a context manager.

    `headers` are the first fields of the rows, in the order of the data: `source`, the location of the record, and
    `asked`, a hash of everything that determines its answers. Rows are appended in any order; `done` holds the indices
    of those that are complete, also of those that an interrupted job wrote. Raises ValueError, and leaves the file
    unchanged, if it has a row that none of the headers belongs to.
    """

    def __init__(self, path: Path, headers: Sequence[dict[str, str]]):
        self.path, self.headers = path, headers
        self.done: set[int] = set()
        self._places: dict[int, tuple[int, int]] = {}  # start and length of each row in the file
        self._read()

    def _read(self) -> None:
        """Finds the complete rows, and removes an incomplete last line if it is the beginning of a row."""
        if not self.path.exists():
            return
        left: dict[tuple[Any, Any], deque[int]] = defaultdict(deque)
        for index, header in enumerate(self.headers):
            left[header["source"], header["asked"]].append(index)
        end = 0
        for line in self._lines():
            if not line.endswith(b"\n"):
                if not self._begins_row(line):
                    raise ValueError(
                        f"{self.foreign}. If {self.path} is an unfinished file of this command, remove its last line, "
                        "which is incomplete"
                    )
                break
            try:
                row = parse_json(line)
                index = left[row["source"], row["asked"]].popleft()
            except (ValueError, KeyError, TypeError, IndexError) as e:
                raise ValueError(self.foreign) from e
            self._add(index, end, len(line))
            end += len(line)
        if end < self.path.stat().st_size:
            os.truncate(self.path, end)

    def _begins_row(self, line: bytes) -> bool:
        """Whether an incomplete line begins with a whole header, or follows complete rows and may be a part of one."""
        starts = (json.dumps(header, ensure_ascii=False)[:-1].encode() for header in self.headers)
        return any(line.startswith(start) or (self.done and start.startswith(line)) for start in starts)

    def _lines(self) -> Iterator[bytes]:
        with self.path.open("rb") as f:
            yield from f

    def _add(self, index: int, start: int, length: int) -> None:
        self.done.add(index)
        self._places[index] = start, length

    @property
    def foreign(self) -> str:
        """The message for a file that does not belong to the headers."""
        return f"{self.path} already exists and was not made from this --data with these options; choose another --out"

    def __enter__(self) -> AnswersFile:
        self._file: FileIO = self.path.open("ab", buffering=0)
        return self

    def __exit__(self, *error: object) -> None:
        self._file.close()

    def append(self, rows: dict[int, dict[str, Any]]) -> None:
        """Writes rows, given without their headers by their index. Raises ValueError if they cannot be written."""
        start, data = self._file.seek(0, os.SEEK_END), b""
        for index, row in rows.items():
            line = (json.dumps(self.headers[index] | row, ensure_ascii=False) + "\n").encode()
            self._places[index] = start + len(data), len(line)
            data += line
        try:
            while data:  # a buffer that cannot be written would fail again when the file is closed
                data = data[self._file.write(data) :]
        except OSError as e:
            cure = "free some disk space and run the same command again to continue"
            raise ValueError(f"{self.path} cannot be written: {e.strerror}; {cure}") from e
        self.done |= rows.keys()

    def sort(self) -> None:
        """Puts the rows into the order of the data, if they are not: writes them to another file, which then replaces
        this one. A job that is killed meanwhile leaves a complete file in the old order."""
        if list(self._places) == sorted(self._places):
            return
        with self.path.open("rb") as old:

            def row(start: int, length: int) -> bytes:
                old.seek(start)
                return old.read(length)

            replace_file(self.path, (row(*self._places[index]) for index in sorted(self._places)))
