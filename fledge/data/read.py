"""Records from files and hub data sets, each with its place for error messages."""

from __future__ import annotations

import glob
import json
import os
import random
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from fledge.data.record import LAYOUTS, Record, record_of

READABLE = (".jsonl", ".ndjson", ".json", ".txt", ".parquet", ".arrow", ".csv")
MOST_SHARE = 100
HUB_ID = re.compile(r"(?P<name>[\w.-]+(/[\w.-]+)?)(@(?P<revision>[\w./-]+))?(:(?P<split>.+))?")


def read_records(sources: list[str], seed: int = 0, skip: Callable[[str], None] | None = None) -> list[Record]:
    """All records of all sources, in their order.

    A source is a file, a directory, a glob, or a hub data set `owner/name[@revision][:split]`; `@0.5` behind it takes
    half (drawn by `seed`), `@2` takes it twice. Raises ValueError naming file and line for what cannot be read. With
    `skip`, records that fledge has no use for are left out, and `skip` is told why; a file that cannot be read as what
    its name says is an error all the same.
    """
    records: list[Record] = []
    for source in sources:
        name, share = _split_share(source)
        refused: list[str] = []
        own = list(_records(name, refused.append if skip else None))
        for why in refused:
            skip(why)
        if refused and not own:
            raise ValueError(f"every record of {name} was refused, the first for this: {refused[0]}")
        if not own:
            raise ValueError(f"{name} holds no records; give a file with {LAYOUTS}")
        whole, part = divmod(share, 1)
        if not whole and not round(part * len(own)):
            raise ValueError(f"{source} takes none of its {len(own):,} records; take a larger share")
        chosen = sorted(random.Random(seed).sample(range(len(own)), round(part * len(own))))
        records += own * int(whole) + [own[i] for i in chosen]
    return records


def check_source(source: str, flag: str) -> None:
    """Raises ValueError, naming the flag, for a source that is named as a file and is not there. Reads nothing."""
    try:
        name, _ = _split_share(source)
        if _is_local(name):
            _paths(name)
    except ValueError as e:
        raise ValueError(f"{flag} {e}") from e


def whole_path(source: str) -> str:
    """The source, from whatever directory it is read."""
    name, _ = _split_share(source)
    return os.path.abspath(name) + source[len(name) :] if _is_local(name) else source


def _split_share(source: str) -> tuple[str, float]:
    """`name@0.5` to name and share. An @ in a directory's name, or in that of a file that is there, is no share, and
    behind a hub id only a number is: anything else is a revision."""
    name, at, share = source.rpartition("@")
    if not at or "/" in share or Path(source).exists():
        return source, 1.0
    if not re.fullmatch(r"\d+(\.\d+)?", share):
        if not _is_local(name):
            return source, 1.0
        raise ValueError(f"{source}: what follows @ is the share to take, such as @0.5 or @2")
    if not 0 < float(share) <= MOST_SHARE:
        raise ValueError(f"{source}: the share behind @ is above 0 and at most {MOST_SHARE}")
    return name, float(share)


def _is_local(name: str) -> bool:
    """Whether a source is there, is named as a file, or cannot be a hub id such as `owner/name-2.5:train[:100]`."""
    return Path(name).exists() or Path(name).suffix in READABLE or not HUB_ID.fullmatch(name)


def _paths(name: str) -> list[Path]:
    """The files of a source. What exists is itself, whatever a glob makes of its name; so are leading directories."""
    path = Path(name)
    if path.exists():
        found = [path]
    else:
        there = next(p for p in path.parents if p.exists())
        matches = glob.glob(str(path.relative_to(there)), root_dir=there, recursive=True)
        found = [there / match for match in sorted(matches)] or [path]
    files = [f for p in found for f in (_inside(p) if p.is_dir() else [p])]
    for file in files:
        if not file.is_file():
            raise ValueError(f"{file} does not exist; give files, globs or hub ids like owner/name")
        if file.stat().st_size == 0:
            raise ValueError(f"{file} is empty")
    return files


def _inside(directory: Path) -> list[Path]:
    return sorted(p for p in directory.rglob("*") if p.suffix in READABLE)


def _records(name: str, skip: Callable[[str], None] | None) -> Iterator[Record]:
    rows = (row for path in _paths(name) for row in _file_rows(path)) if _is_local(name) else _hub_rows(name)
    for row, where in rows:
        try:
            yield record_of(row, where)
        except ValueError as e:
            if skip is None:
                raise
            skip(str(e))


def _file_rows(path: Path) -> Iterator[tuple[Any, str]]:
    """Rows and their places. JSON and JSON lines are read here, for errors that name the line; other formats by
    `datasets`."""
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
    except Exception as e:  # whatever the reader of the format raises, wrapped by datasets in its own
        raise ValueError(f"{path} cannot be read as {kind}: {e.__cause__ or e}") from e
    return _numbered(rows, str(path))


def _hub_rows(name: str) -> Iterator[tuple[Any, str]]:
    import datasets

    parts = HUB_ID.fullmatch(name)
    split, revision = parts["split"] or "train", parts["revision"]
    try:
        rows = datasets.load_dataset(parts["name"], split=split, revision=revision, trust_remote_code=False)
    except Exception as e:
        raise ValueError(f"{name} is no file here, and as a hub data set it cannot be loaded: {e}") from e
    return _numbered(rows, name)


def _numbered(rows: Any, name: str) -> Iterator[tuple[Any, str]]:
    return ((row, f"{name}, row {i}") for i, row in enumerate(rows, 1))


def _is_lines(path: Path) -> bool:
    """Whether a .json file holds JSON lines, as many on the hub do: its first line is a whole object, and not alone."""
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
        raise ValueError(f"{where} is not JSON: {e}. Mend or remove it; nothing was skipped") from e
    except RecursionError as e:
        raise ValueError(f"{where} is nested too deeply to be read as JSON. Mend or remove it") from e
