"""Reads records from files and hub data sets, with file and line for error messages; selects the records to train on,
the order of the records, and the held-out records."""

from __future__ import annotations

import functools
import glob
import hashlib
import os
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from fledge.data.record import LAYOUTS, Record, check_columns, map_columns, parse_columns, parse_record
from fledge.data.rows import file_rows, is_readable, without_nulls
from fledge.data.sources import Source, find_hub_data, is_local, is_preset
from fledge.io.fields import read_json

AnySource = str | Mapping[str, Any] | Source  # the forms that `Source.parse` takes


class SourceReader:
    """Reads the records of a source, any number of times.

    `files` are the files of a `local` source; a source that is not `local` is a data set of the hub. With `prompts`,
    the hub's split for prompts is read. `columns` maps names of fledge's layouts to the source's columns. Raises
    ValueError for files that do not exist or are empty, and for a mapping of unknown names.
    """

    def __init__(self, source: AnySource, *, prompts: bool = False):
        self.source = Source.parse(source)
        self.name, self.share = self.source.path, self.source.share
        self.local = is_local(self.name)
        self.files = _paths(self.name) if self.local else []
        self.hub = None if self.local else find_hub_data(self.name, prompts=prompts)
        given = self.source.columns or (self.hub.columns if self.hub else None) or {}
        self.columns = check_columns(dict(given), f"`columns` of {self.name}")

    @functools.cached_property
    def hub_data(self) -> Any:
        """The data set of a hub id, a `datasets.Dataset`."""
        return self.hub.load()

    def records(self, skip: Callable[[str], None] | None = None) -> Iterator[Record]:
        """The records of the source in order, each once. Raises ValueError, naming file and line, for files that cannot
        be parsed and for records without a supported layout. With `skip`, records without a supported layout are left
        out and `skip` is called with the reason; files that cannot be parsed still raise."""
        kwargs = self.source.template_kwargs
        if self.local:
            rows = (row for path in self.files for row in file_rows(path))
        else:
            rows = ((without_nulls(row), f"{self.name}, row {i}") for i, row in enumerate(self.hub_data, 1))
        for row, where in rows:
            try:
                record = self._record(row, where)
            except ValueError as e:
                if skip is None:
                    raise
                skip(str(e))
            else:
                own = record.template_kwargs or {}
                yield replace(record, template_kwargs={**kwargs, **own}) if kwargs else record

    def spread(self, count: int) -> list[Record]:
        """At most `count` records of a data set of the hub, evenly spaced; every call returns the same records."""
        rows = self.hub_data
        taken = min(count, len(rows))
        indices = [i * len(rows) // taken for i in range(taken)]
        return [self._record(without_nulls(rows[i]), f"{self.name}, row {i + 1}") for i in indices]

    def _record(self, row: Any, where: str) -> Record:
        return parse_record(map_columns(row, self.columns, where) if self.columns else row, where)

    def passes(self, read: int, refused: Sequence[str], seed: int) -> list[np.ndarray]:
        """The passes over the source's `read` readable records that its share takes: for each pass, whether each record
        is taken, bool [read]. `@0.5` is one pass, which takes a random half (drawn by `seed`), and `@2` two passes,
        which take every record. `refused` are the reasons of unreadable records. Raises ValueError if the share takes
        no record."""
        if refused and not read:
            raise ValueError(f"every record of {self.name} was refused, the first because: {refused[0]}")
        if not read:
            raise ValueError(f"{self.name} contains no records; give a file with {LAYOUTS}")
        copies, fraction = divmod(self.share, 1)
        if not copies and not round(fraction * read):
            raise ValueError(f"{self.source} takes none of its {read:,} records; take a larger share")
        passes = [np.ones(read, dtype=bool) for _ in range(int(copies))]
        if sampled := random.Random(seed).sample(range(read), round(fraction * read)):
            passes.append(np.zeros(read, dtype=bool))
            passes[-1][sampled] = True
        return passes


def read_records(
    sources: Sequence[AnySource], seed: int = 0, skip: Callable[[str], None] | None = None
) -> list[Record]:
    """The records of all sources in order, sampled or repeated by each source's share; `seed` draws the samples. `skip`
    and the exceptions are documented at `SourceReader.records`."""
    records: list[Record] = []
    for source in sources:
        reader = SourceReader(source)
        refused: list[str] = []  # collected first, since `passes` names the first
        parsed = list(reader.records(refused.append if skip else None))
        for reason in refused:
            skip(reason)
        for taken in reader.passes(len(parsed), refused, seed):
            records += [record for record, used in zip(parsed, taken, strict=True) if used]
    return records


def with_columns(sources: Sequence[AnySource], columns: str | None) -> list[AnySource]:
    """The sources with the mapping of --columns added, except to presets and to sources that have `columns`."""
    if columns is None:
        return list(sources)
    mapping = parse_columns(columns)
    parsed = [Source.parse(source) for source in sources]
    return [str(s if s.columns or is_preset(s.path) else replace(s, columns=mapping)) for s in parsed]


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
    """The source; a local source has an absolute path, so a process in another working directory can read the files."""
    parsed = Source.parse(source)
    path = os.path.abspath(parsed.path) if is_local(parsed.path) else parsed.path
    return str(replace(parsed, path=path))


def _paths(name: str) -> list[Path]:
    """The files of a source: the path itself, the files in a directory (see `_files_of`), or the matches of a glob.

    An existing path or parent is never a glob, even with `*` or `[` in the name. Raises ValueError for missing and
    empty files.
    """
    path = Path(name)
    if path.exists():
        found = [path]
    else:
        root = next(p for p in path.parents if p.exists())
        matches = glob.glob(str(path.relative_to(root)), root_dir=root, recursive=True)
        found = [root / match for match in sorted(matches)] or [path]
    files = [f for p in found for f in (_files_of(p) if p.is_dir() else [p])]
    for file in files:
        if not file.is_file():
            raise ValueError(f"{file} does not exist; give files, globs or hub ids like owner/name")
        if file.stat().st_size == 0:
            raise ValueError(f"{file} is empty")
    return files


def _files_of(directory: Path) -> list[Path]:
    """The files in a directory that fledge reads, in the order of their names.

    In a directory that `save_to_disk` of `datasets` wrote, only the files of rows are read, and of several splits only
    `train`. Raises ValueError for several splits without `train`.
    """
    if (splits := _saved(directory / "dataset_dict.json", "splits")) is not None:
        if len(splits) > 1 and "train" not in splits:
            shown = ", ".join(splits)
            raise ValueError(f"{directory} has the splits {shown}; give one of them, such as {directory / splits[0]}")
        return [file for name in splits if name == "train" or len(splits) == 1 for file in _files_of(directory / name)]
    if (files := _saved(directory / "state.json", "_data_files")) is not None:
        return [directory / file["filename"] for file in files]
    files = []
    for path in sorted(directory.iterdir()):
        if path.is_dir() and not path.is_symlink():
            files += _files_of(path)
        elif is_readable(path):
            files.append(path)
    return files


def _saved(file: Path, key: str) -> list[Any] | None:
    """A list in a JSON file that `save_to_disk` of `datasets` writes; None if there is no file with that list."""
    try:
        found = read_json(file)
    except (OSError, ValueError):
        return None
    listed = found.get(key) if isinstance(found, dict) else None
    return listed if isinstance(listed, list) else None


MIN_RECORDS_PER_HELD_OUT = 10  # data with fewer records for each record to hold out is used for training only


@dataclass(frozen=True)
class Selection:
    """The records to train on and the held-out records. Records have indices: the readable records of all sources are
    numbered in order.

    `passes` are the passes over sources that read the records to train on: the source, the index of the source's first
    record, and whether each of its records is taken, bool. `held_out` are the indices of the held-out records, int64.
    `records` counts the records before any are held out. `copies` counts the records with the same content as a
    held-out record; copies are left out of training. `refused` are the reasons of unreadable records.
    """

    passes: list[tuple[SourceReader, int, np.ndarray]]
    held_out: np.ndarray
    records: int
    copies: int
    refused: list[str]

    @property
    def trained(self) -> int:
        """The number of records to train on; a record that several passes take counts as often."""
        return sum(int(taken.sum()) for _, _, taken in self.passes)

    def read(self, held_out: dict[int, Record]) -> Iterator[Record]:
        """Reads the sources again and yields the records to train on. Puts the held-out records into `held_out`, by
        index."""
        kept = set(self.held_out.tolist())
        skip = (lambda reason: None) if self.refused else None
        for source, first, taken in self.passes:
            for i, (record, used) in enumerate(zip(source.records(skip), taken, strict=False), first):
                if i in kept:
                    held_out[i] = record
                if used:
                    yield record


def select(
    sources: Sequence[SourceReader], seed: int, *, skip_bad: bool, hold_out: int,
    advance: Callable[[], None] = lambda: None,
) -> Selection:  # fmt: skip
    """Reads all sources and selects the records to train on. Records are not kept; `Selection.read` reads the sources
    again. `advance` is called after each record.

    With at least MIN_RECORDS_PER_HELD_OUT * `hold_out` records, `hold_out` records are drawn by `seed` and held out,
    unless no record would be left to train on. Raises ValueError like `read_records`.
    """
    refused: list[str] = []
    passes, contents, first = [], bytearray(), 0
    for source in sources:
        reasons: list[str] = []
        count = 0
        for record in source.records(reasons.append if skip_bad else None):
            count += 1
            if hold_out:
                contents += hashlib.blake2b(record.content_key().encode(), digest_size=16).digest()
            advance()
        passes += [(source, first, taken) for taken in source.passes(count, reasons, seed)]
        refused += reasons
        first += count
    order = np.concatenate([start + np.flatnonzero(taken) for _, start, taken in passes])
    everything = Selection(passes, order[:0], len(order), 0, refused)
    if not hold_out or len(order) < MIN_RECORDS_PER_HELD_OUT * hold_out:
        return everything
    chosen = sorted(random.Random(seed).sample(range(len(order)), hold_out))
    held_out = order[chosen]
    content = np.frombuffer(contents, dtype=np.int64).reshape(-1, 2)  # a row of two numbers for each record
    same = np.zeros(first, dtype=bool)
    for i in held_out:
        same |= (content == content[i]).all(1)
    if same[order].all():
        return everything
    others = [(source, start, taken & ~same[start : start + len(taken)]) for source, start, taken in passes]
    return Selection(others, held_out, len(order), int(same[order].sum()) - len(held_out), refused)
