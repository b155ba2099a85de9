"""The rows of data files of every format, one at a time, each with its file and line for error messages."""

from __future__ import annotations

import csv
import io
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

from fledge.data.sources import COMPRESSED, READABLE
from fledge.io.fields import first_line, parse_json

BATCH_ROWS = 256  # rows of a table that are converted at a time
LONGEST = 1 << 26  # characters of a line
LONGEST_TEXT = 1 << 30  # characters of a compressed file without lines, and of a cell
TEXT_FORMATS = (".jsonl", ".ndjson", ".json", ".txt", ".csv")  # the formats that may be compressed
SPACE = re.compile(r"[ \t\n\r]*")

Row = tuple[Any, str]


def format_of(path: Path) -> str:
    """The suffix of a file's format, ignoring the suffix of a compression: `.jsonl` for `chats.jsonl.zst`."""
    return Path(path.stem).suffix if path.suffix in COMPRESSED else path.suffix


def is_readable(path: Path) -> bool:
    """Whether fledge reads files with this name."""
    return format_of(path) in (TEXT_FORMATS if path.suffix in COMPRESSED else READABLE)


def file_rows(path: Path) -> Iterator[Row]:
    """The rows of a file, each with its location. Only a few rows are in memory at a time, except of a JSON list, whose
    whole text is.

    Raises ValueError, naming the file and the line or row, for a file that cannot be read: an unknown format, damaged,
    truncated, not UTF-8, or not JSON.
    """
    if not is_readable(path):
        compressed = " and ".join(f".jsonl{suffix}" for suffix in COMPRESSED)
        raise ValueError(f"{path}: fledge reads {', '.join(READABLE)}, and compressed text such as {compressed}")
    kind, read = format_of(path), 0
    try:
        for row, where in _READERS[kind](path):
            yield row, where
            read += 1
    except UnicodeDecodeError as e:
        raise ValueError(f"{path} is not UTF-8 text ({e}); convert it first") from e
    except (OSError, csv.Error, _Damaged) as e:
        name = (path.suffix if path.suffix in COMPRESSED else kind).removeprefix(".")
        after = f" after {read:,} rows" if read else ""
        raise ValueError(
            f"{path} cannot be read as {name}{after}: {first_line(e).rstrip('.')}; it may be truncated or damaged, or "
            "have the wrong name"
        ) from e


class _Damaged(Exception):
    """A file contains a table that pyarrow cannot read, or too long a line; the message gives the reason."""


def _open(path: Path) -> IO[str]:
    """Opens a file as a text stream, decompressing if necessary."""
    newline = "" if format_of(path) == ".csv" else None  # the cells of a CSV file keep line ends unchanged
    if path.suffix not in COMPRESSED:
        return path.open(encoding="utf-8-sig", newline=newline)
    import pyarrow  # the package zstandard does not notice that a file is truncated

    stream = pyarrow.input_stream(str(path))  # decompresses as the suffix says
    return io.TextIOWrapper(io.BufferedReader(stream), encoding="utf-8-sig", newline=newline)


def _text_lines(f: IO[str]) -> Iterator[str]:
    """The lines of a text. Raises _Damaged for a line of over LONGEST characters, as in damaged compressed data."""
    while line := f.readline(LONGEST + 1):
        if len(line) > LONGEST:
            raise _Damaged(f"it has a line of more than {LONGEST:,} characters")
        yield line


def _lines(path: Path) -> Iterator[Row]:
    with _open(path) as f:
        for number, line in enumerate(_text_lines(f), 1):
            if line.strip():
                where = f"{path}, line {number}"
                yield _parse(line, where), where


def _json(path: Path) -> Iterator[Row]:
    """The rows of a .json file: JSON lines (as in many files on the hub), a list, or a single object."""
    if _is_lines(path):
        yield from _lines(path)
        return
    text = _whole(path)
    if text.startswith("[", SPACE.match(text).end()):
        yield from _list_items(text, path)
    else:
        yield _parse(text, str(path)), f"{path}, record 1"


def _is_lines(path: Path) -> bool:
    """Whether a .json file contains JSON lines: the first line is a complete JSON object, and more lines follow."""
    with _open(path) as f:
        lines = _text_lines(f)
        first = next(lines, "").strip()
        if not (first.startswith("{") and first.endswith("}")):
            return False
        try:
            parse_json(first)
        except ValueError:
            return False
        return any(line.strip() for line in lines)


def _list_items(text: str, path: Path) -> Iterator[Row]:
    """The items of a JSON list. Raises ValueError, naming the record, for an item or a list that is not JSON."""
    number, at, parse = 0, SPACE.match(text).end(), json.JSONDecoder().raw_decode
    while text.startswith("," if number else "[", at):
        at = SPACE.match(text, at + 1).end()
        if not number and text.startswith("]", at):
            break
        number += 1
        where = f"{path}, record {number}"
        try:
            row, at = parse(text, at)
        except RecursionError as e:
            raise ValueError(f"{where} is nested too deeply to be read as JSON. Fix or remove it") from e
        except json.JSONDecodeError as e:
            raise ValueError(f"{where} is not JSON: {e.msg}. Fix or remove it; nothing was skipped") from e
        yield row, where
        at = SPACE.match(text, at).end()
    if text[at:].strip() != "]":
        raise ValueError(
            f"{path} is not JSON: after record {number}, the list neither goes on nor ends. Fix it; nothing was skipped"
        )


def _text(path: Path) -> Iterator[Row]:
    yield {"text": _whole(path)}, str(path)


def _whole(path: Path) -> str:
    """The text of a file. Raises _Damaged for more than LONGEST_TEXT characters in a compressed file, which may hold a
    thousand times as much as its size."""
    with _open(path) as f:
        text = f.read(LONGEST_TEXT + 1 if path.suffix in COMPRESSED else -1)
    if path.suffix in COMPRESSED and len(text) > LONGEST_TEXT:
        raise _Damaged(f"it has more than {LONGEST_TEXT:,} characters")
    return text


def _parse(text: str, where: str) -> Any:
    try:
        return parse_json(text)
    except ValueError as e:
        raise ValueError(f"{where} is not JSON: {e}. Fix or remove it; nothing was skipped") from e


def _csv(path: Path) -> Iterator[Row]:
    """The rows of a CSV file with a header. All values are text; an empty cell gives None."""
    csv.field_size_limit(LONGEST_TEXT)  # by default, the module refuses long texts
    with _open(path) as f:
        reader = csv.DictReader(_text_lines(f), strict=True)
        for number, row in enumerate(reader, 1):
            if None in row or None in row.values():
                raise csv.Error(
                    f"line {reader.line_num} has {'more' if None in row else 'fewer'} cells than the header has"
                )
            yield {name: value or None for name, value in row.items()}, f"{path}, row {number}"


def _batches(path: Path) -> Iterator[Any]:
    """The record batches of a Parquet file, an Arrow file, or an Arrow stream, which `datasets` writes."""
    import pyarrow.parquet

    if path.suffix == ".parquet":
        yield from pyarrow.parquet.ParquetFile(path).iter_batches(BATCH_ROWS)
        return
    with pyarrow.memory_map(str(path)) as source:
        try:
            table = pyarrow.ipc.open_file(source)
        except pyarrow.ArrowInvalid:
            source.seek(0)
            yield from pyarrow.ipc.open_stream(source)
        else:
            yield from map(table.get_batch, range(table.num_record_batches))


def _table(path: Path) -> Iterator[Row]:
    import pyarrow

    number = 0
    try:
        for batch in _batches(path):
            batch.validate(full=True)  # damaged offsets would crash the process
            for start in range(0, len(batch), BATCH_ROWS):
                for row in batch.slice(start, BATCH_ROWS).to_pylist():
                    number += 1
                    yield without_nulls(row), f"{path}, row {number}"
    except (pyarrow.ArrowException, UnicodeDecodeError) as e:
        raise _Damaged(str(e)) from e


def without_nulls(row: dict[str, Any]) -> dict[str, Any]:
    """A row of a table without the null fields of nested objects. Table formats give all objects of a column the same
    fields and set absent fields to null. A null `content` stays, since the content of a message may be null."""

    def without(value: Any) -> Any:
        if isinstance(value, dict):
            return {k: without(v) for k, v in value.items() if v is not None or k == "content"}
        return [without(v) for v in value] if isinstance(value, list) else value

    return {name: without(value) for name, value in row.items()}


_READERS = {
    ".jsonl": _lines, ".ndjson": _lines, ".json": _json, ".txt": _text, ".csv": _csv, ".parquet": _table,
    ".arrow": _table,
}  # fmt: skip
