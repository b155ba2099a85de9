"""Reading records from files and hub data sets, with file and line for error messages."""

from __future__ import annotations

import functools
import glob
import json
import os
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from fledge.data.record import LAYOUTS, Record, parse_record
from fledge.data.sources import HUB_ID, READABLE, Source, is_local

AnySource = str | Mapping[str, Any] | Source  # the forms that `Source.parse` takes


class SourceReader:
    """Reads the records of a source, which can be done several times.

    `files` are its files if it is `local`. Raises ValueError for files that do not exist or are empty.
    """

    def __init__(self, source: AnySource):
        self.source = Source.parse(source)
        self.name, self.share = self.source.path, self.source.share
        self.local = is_local(self.name)
        self.files = _paths(self.name) if self.local else []

    @property
    def names(self) -> list[str]:
        """The names with which the locations of its records begin: its files, or the hub id."""
        return [str(file) for file in self.files] if self.local else [self.name]

    @functools.cached_property
    def hub_data(self) -> Any:
        """The data set of a hub id, a `datasets.Dataset`."""
        return _load_from_hub(self.name)

    def records(self, skip: Callable[[str], None] | None = None) -> Iterator[Record]:
        """The records of the source in order, each once. Raises ValueError, naming file and line, for files that cannot
        be parsed and for records without a supported layout. With `skip`, such records are left out and `skip` is
        called with the reason; files that cannot be parsed still raise."""
        kwargs = self.source.template_kwargs
        if self.local:
            rows = (row for path in self.files for row in _file_rows(path))
        else:
            rows = _numbered(self.hub_data, self.name)
        for row, where in rows:
            try:
                record = parse_record(row, where)
            except ValueError as e:
                if skip is None:
                    raise
                skip(str(e))
            else:
                yield replace(record, template_kwargs=kwargs) if kwargs else record

    def order(self, read: int, refused: Sequence[str], seed: int) -> np.ndarray:
        """The indices of the records that the share takes, int64, if `read` records could be read and others were
        refused for these reasons. `@0.5` takes a random half (drawn by `seed`), `@2` takes every record twice. Raises
        ValueError if it takes none."""
        if refused and not read:
            raise ValueError(f"every record of {self.name} was refused, the first because: {refused[0]}")
        if not read:
            raise ValueError(f"{self.name} contains no records; give a file with {LAYOUTS}")
        copies, fraction = divmod(self.share, 1)
        if not copies and not round(fraction * read):
            raise ValueError(f"{self.source} takes none of its {read:,} records; take a larger share")
        sampled = sorted(random.Random(seed).sample(range(read), round(fraction * read)))
        return np.concatenate([np.tile(np.arange(read), int(copies)), np.array(sampled, dtype=np.int64)])


def read_records(
    sources: Sequence[AnySource], seed: int = 0, skip: Callable[[str], None] | None = None
) -> list[Record]:
    """All records of all sources, in order. Raises ValueError for files that cannot be parsed and for records without a
    supported layout. With `skip`, such records are left out and `skip` is called with the reason; files that cannot be
    parsed still raise."""
    records: list[Record] = []
    for given in sources:
        source = SourceReader(given)
        refused: list[str] = []
        read = list(source.records(refused.append if skip else None))
        for reason in refused:
            skip(reason)
        records += [read[i] for i in source.order(len(read), refused, seed)]
    return records


def check_source(source: AnySource, flag: str) -> None:
    """Raises ValueError, naming the flag, if a source is a local path that does not exist, or is an empty file.

    Does not open any file.
    """
    try:
        name = Source.parse(source).path
        if is_local(name):
            _paths(name)
    except ValueError as e:
        raise ValueError(f"{flag} {e}") from e


def absolute_source(source: AnySource) -> str:
    """The source with an absolute path if it is local, so that it can be read from another working directory."""
    parsed = Source.parse(source)
    path = os.path.abspath(parsed.path) if is_local(parsed.path) else parsed.path
    return str(replace(parsed, path=path))


def _paths(name: str) -> list[Path]:
    """The files of a source: the path itself, the files in a directory, or the matches of a glob.

    An existing path is never a glob, even if its name contains `*` or `[`; the same holds for existing parents. Raises
    ValueError for missing and empty files.
    """
    path = Path(name)
    if path.exists():
        found = [path]
    else:
        root = next(p for p in path.parents if p.exists())
        matches = glob.glob(str(path.relative_to(root)), root_dir=root, recursive=True)
        found = [root / match for match in sorted(matches)] or [path]
    files = [f for p in found for f in (_readable_files(p) if p.is_dir() else [p])]
    for file in files:
        if not file.is_file():
            raise ValueError(f"{file} does not exist; give files, globs or hub ids like owner/name")
        if file.stat().st_size == 0:
            raise ValueError(f"{file} is empty")
    return files


def _readable_files(directory: Path) -> list[Path]:
    return sorted(p for p in directory.rglob("*") if p.suffix in READABLE)


def _file_rows(path: Path) -> Iterator[tuple[Any, str]]:
    """The rows of a file, each with its location for error messages.

    JSON, JSON lines and text are parsed here, so that errors name the line; `datasets` reads the other formats.
    """
    if path.suffix not in READABLE:
        raise ValueError(f"{path}: fledge reads {', '.join(READABLE)}")
    try:
        if path.suffix in (".jsonl", ".ndjson") or (path.suffix == ".json" and _is_lines(path)):
            with path.open(encoding="utf-8-sig") as f:
                for number, line in enumerate(f, 1):
                    if line.strip():
                        where = f"{path}, line {number}"
                        yield _parse(line, where), where
        elif path.suffix == ".json":
            rows = _parse(path.read_text(encoding="utf-8-sig"), str(path))
            for i, row in enumerate(rows if isinstance(rows, list) else [rows], 1):
                yield row, f"{path}, record {i}"
        elif path.suffix == ".txt":
            yield {"text": path.read_text(encoding="utf-8-sig")}, str(path)
        else:
            yield from _table_rows(path)
    except UnicodeDecodeError as e:
        raise ValueError(f"{path} is not UTF-8 text ({e}); convert it first") from e


def _table_rows(path: Path) -> Iterator[tuple[Any, str]]:
    import datasets

    kind = path.suffix.removeprefix(".")
    try:
        rows = datasets.load_dataset(kind, data_files=str(path), split="train")
    except Exception as e:  # datasets wraps the exceptions of the format's reader
        raise ValueError(f"{path} cannot be read as {kind}: {e.__cause__ or e}") from e
    return _numbered(rows, str(path))


def _load_from_hub(name: str) -> Any:
    import datasets

    parts = HUB_ID.fullmatch(name)
    split, revision = parts["split"] or "train", parts["revision"]
    try:
        return datasets.load_dataset(parts["name"], split=split, revision=revision, trust_remote_code=False)
    except Exception as e:
        raise ValueError(f"{name} is not a local file and cannot be loaded from the hub: {e}") from e


def _numbered(rows: Any, name: str) -> Iterator[tuple[Any, str]]:
    return ((row, f"{name}, row {i}") for i, row in enumerate(rows, 1))


def _is_lines(path: Path) -> bool:
    """Whether a .json file contains JSON lines, as many on the hub do.

    That is the case if its first line is a complete JSON object and more lines follow.
    """
    with path.open(encoding="utf-8-sig") as f:
        first = f.readline().strip()
        if not (first.startswith("{") and first.endswith("}")):
            return False
        try:
            json.loads(first)
        except (ValueError, RecursionError):
            return False
        return any(line.strip() for line in f)


def _parse(text: str, where: str) -> Any:
    try:
        return json.loads(text)
    except ValueError as e:
        raise ValueError(f"{where} is not JSON: {e}. Fix or remove it; nothing was skipped") from e
    except RecursionError as e:
        raise ValueError(f"{where} is nested too deeply to be read as JSON. Fix or remove it") from e
