"""A cache on disk of the tokenized data of earlier runs, keyed by a hash of the sources, settings and code.

Each data set is a directory `tokens/HASH` of the cache, written once, by one process, and either complete or absent.
The directory contains the tokens and spans of all documents as int32 (tokens.bin, spans.bin), the start of each
document and the count of each token (documents.npz), a manifest (manifest.json), and the hashes of all files
(SHA256SUMS), which are compared whenever the data is read.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import tempfile
import time
import zipfile
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any, NoReturn

import numpy as np

from fledge.data.documents import SPANS, TOKENS, DocumentTable, TokenCounts, TokenFile, TokenStore, fingerprint
from fledge.data.read import SourceReader, select
from fledge.data.record import Record
from fledge.data.rows import format_of
from fledge.data.sources import Source, is_local
from fledge.data.template import ChatTemplate
from fledge.data.tokenize import DataReport, default_workers, make_documents
from fledge.data.vocab import count_tokens
from fledge.io.fields import read_json
from fledge.io.files import (
    InUse,
    disk_full_errno,
    exclusive_lock,
    replace_directory,
    replace_text,
    sha256_of,
    sibling_path,
)

MANIFEST, TABLE = "manifest.json", "documents.npz"
SUMS = "SHA256SUMS"
FILES = (MANIFEST, TABLE, TOKENS, SPANS)
POLL_SECONDS = 0.2  # between two looks at whether another process has made the data
SETTLED_NS = 2_000_000_000  # a younger file may change again within one tick of the file system's clock

Say = Callable[[str], None]
Count = Callable[[str, int | None], AbstractContextManager[Callable[[], None]]]


@dataclass(frozen=True)
class DataRequest:
    """The training data of a run: the sources, and all settings that determine the documents made from the sources.

    `max_length` is the length of a window in tokens, and `hold_out` the number of records to hold out (see `select`).
    """

    sources: tuple[str, ...]
    seed: int
    template: ChatTemplate
    max_length: int
    skip_bad: bool
    hold_out: int


@dataclass(frozen=True)
class TrainingData:
    """The documents to train on and the held-out records. `records` and `copies` are counts of `Selection`."""

    documents: DocumentTable
    report: DataReport
    held_out: list[Record]
    records: int
    copies: int


def data_files(sources: Sequence[str], cache: Path) -> dict[str, str]:
    """The absolute path and the SHA-256 of each local file of data sources."""
    files = (file for source in sources if is_local(Source.parse(source).path) for file in SourceReader(source).files)
    return {os.path.abspath(file): content_sha256(file, cache) for file in files}


def load_data(request: DataRequest, cache: Path, workers: int | None, say: Say, count: Count) -> TrainingData:
    """The training data, read from the cache, or made and put into the cache; `say` is told the directory.

    Of several processes that ask for the same data at the same time, one process makes the data while the others wait.
    `workers` is the number of processes that tokenize (None: see `default_workers`), and `count` shows the progress, as
    `ProgressDisplay.count` does. If the cache cannot be written, the data is kept in memory, after a message. Raises
    ValueError for sources that cannot be read or used, and for a source file that changes meanwhile.
    """
    sources = [SourceReader(source) for source in request.sources]
    job = _Job(request, sources, workers, say, count)
    stamps = job.stamps()
    entry = cache / "tokens" / _key(request, sources, cache)
    told = False
    while True:
        if (known := job.read(entry)) is not None:
            say(f"the tokenized data is read from {entry}")
            return known
        if (reason := _write_problem(entry.parent)) is not None:
            return job.make_in_memory(cache, reason)
        try:
            with exclusive_lock(sibling_path(entry, "lock"), f"the tokenized data in {entry}", _refuse_to_share):
                if job.read(entry, report_damage=True) is None:
                    return job.make(entry, stamps)
        except InUse as e:
            if not told:
                say(f"waiting, because {e}")
                told = True
            time.sleep(POLL_SECONDS)
        except _NoLocks as e:
            return job.make_in_memory(cache, str(e))


class _NoLocks(Exception):
    """The cache's file system has no locks, so two processes could write the same files; the message is the reason."""


def _refuse_to_share(problem: str) -> NoReturn:
    raise _NoLocks(problem.partition(":")[0])


class _DiskFull(Exception):
    """The disk got full while the data was made; `data` is in memory."""

    def __init__(self, data: TrainingData):
        super().__init__()
        self.data = data


@dataclass(frozen=True)
class _Job:
    """One request for training data, with the readers of the requested sources."""

    request: DataRequest
    sources: Sequence[SourceReader]
    workers: int | None
    say: Say
    count: Count

    @property
    def names(self) -> list[str]:
        return [name for source in self.sources for name in source.names]

    def stamps(self) -> dict[Path, tuple[int, int]]:
        """Size and time of the last change of each file."""
        return {file: stamp(file)[:2] for source in self.sources for file in source.files}

    def make(self, entry: Path, stamps: dict[Path, tuple[int, int]]) -> TrainingData:
        """Makes the data and puts the data into the cache. The process must hold the entry's lock."""
        try:
            with replace_directory(entry) as new:
                with contextlib.closing(TokenStore(new, self.say)) as store:
                    data = self.tokenize(store)
                for file, before in stamps.items():
                    if stamp(file)[:2] != before:
                        raise ValueError(f"{file} changed while it was read; start again when it is complete")
                if store.in_memory:
                    raise _DiskFull(data)
                _save(new, data, self.names)
        except _DiskFull as e:
            return e.data
        except OSError as e:
            if (full := disk_full_errno(e)) is None:
                raise
            message = f"no space for the tokenized data in {entry}; fledge train --data-cache names another directory"
            raise OSError(full, message) from e
        size = sum(file.stat().st_size for file in entry.iterdir())
        self.say(f"the tokenized data is kept for later runs in {entry} ({size / 1e6:,.1f} MB)")
        return _load(entry, self.names)

    def make_in_memory(self, cache: Path, reason: str) -> TrainingData:
        self.say(
            f"the data cache {cache} cannot be used ({reason}): the tokens are kept in memory, and the next run makes "
            "them again; fledge train --data-cache names another directory"
        )
        return self.tokenize(TokenStore())

    def tokenize(self, store: TokenStore) -> TrainingData:
        request = self.request
        with self.count("counting chats", None) as advance:
            chosen = select(
                self.sources, request.seed, skip_bad=request.skip_bad, hold_out=request.hold_out, advance=advance
            )
        distinct, order = chosen.distinct()
        held_out: dict[int, Record] = {}
        with self.count("reading chats", len(distinct)) as advance:
            documents, report = make_documents(
                chosen.read(held_out), request.template, request.max_length, skip_bad=request.skip_bad,
                skipped=chosen.refused, advance=advance, order=order, store=store,
                workers=self.workers or default_workers(len(distinct)),
            )  # fmt: skip
        return TrainingData(
            documents, report, [held_out[i] for i in chosen.held_out.tolist()], chosen.records, chosen.copies
        )

    def read(self, entry: Path, *, report_damage: bool = False) -> TrainingData | None:
        """The data of a cache entry; None if the entry is absent, or if the entry's files changed after writing."""
        if not entry.exists():
            return None
        try:
            return _load(entry, self.names)
        except (OSError, ValueError, LookupError, TypeError, AttributeError, zipfile.BadZipFile) as e:
            if report_damage:
                reason = f"{MANIFEST} lacks {e}" if isinstance(e, LookupError) else e
                self.say(f"the tokenized data in {entry} is damaged ({reason}), so it is made again")
            return None


# -- what the data depends on -----------------------------------------------------------------------------------------


def _key(request: DataRequest, sources: Sequence[SourceReader], cache: Path) -> str:
    """A hash of all inputs that determine the documents and the held-out records."""
    drawn = request.hold_out or any(source.share % 1 for source in sources)  # whether the seed matters
    content = {
        # the code that makes and stores the documents: changed code must not read documents of the old code
        "code": [hashlib.sha256(file.read_bytes()).hexdigest() for file in sorted(Path(__file__).parent.glob("*.py"))],
        "libraries": {name: version(name) for name in ("transformers", "tokenizers", "jinja2")},
        "sources": [[_identity(source, cache), source.share, source.source.template_kwargs] for source in sources],
        "seed": request.seed if drawn else None,
        "tokenizer": _tokenizer_state(request.template.tokenizer),
        "template_kwargs": request.template.kwargs,
        "stop_ids": sorted(request.template.stop_ids),
        "max_length": request.max_length,
        "skip_bad": request.skip_bad,
        "hold_out": request.hold_out,
    }
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:32]


def _identity(source: SourceReader, cache: Path) -> Any:
    """A source's content, independent of file names: format, size and hash of each file, or the fingerprint of a hub
    data set, which changes with revision and split; and the mapping of the source's columns."""
    if not source.local:
        return [source.hub_data._fingerprint, source.columns]
    files = [[format_of(file), file.stat().st_size, content_sha256(file, cache)] for file in source.files]
    return [files, source.columns]


def _tokenizer_state(tokenizer: Any) -> list[Any]:
    state = json.loads(tokenizer.backend_tokenizer.to_str())
    state = {name: part for name, part in state.items() if name not in ("truncation", "padding")}  # set by each call
    kind = type(tokenizer)
    special = {name: str(token) for name, token in tokenizer.special_tokens_map.items()}
    return [kind.__module__, kind.__qualname__, state, special, tokenizer.split_special_tokens, tokenizer.chat_template]


# -- the files --------------------------------------------------------------------------------------------------------


def _write_problem(directory: Path) -> str | None:
    """The reason why no file can be written to a directory, which is created if necessary; None if writing works."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=directory):
            return None
    except OSError as e:
        return e.strerror or str(e)


def _save(directory: Path, data: TrainingData, names: Sequence[str]) -> None:
    """Adds the table, the manifest and the hashes to the files of a `TokenStore`."""
    documents, counts = data.documents, count_tokens(data.documents)
    np.savez(
        directory / TABLE,
        starts=documents.starts, lengths=documents.lengths, supervised=documents.supervised,
        supervised_V=counts.supervised_V, seen_V=counts.seen_V,
    )  # fmt: skip
    manifest = {
        "tokens": documents.tokens.count,
        "sha256": fingerprint(documents),
        "report": asdict(data.report) | {"first_refusal": _without_name(data.report.first_refusal, names)},
        "held_out": [asdict(r) | {"where": _without_name(r.where, names)} for r in data.held_out],
        "records": data.records,
        "copies": data.copies,
    }
    (directory / MANIFEST).write_text(json.dumps(manifest), encoding="utf-8")
    (directory / SUMS).write_text("".join(f"{sha256_of(directory / name)}  {name}\n" for name in FILES))


def _load(entry: Path, names: Sequence[str]) -> TrainingData:
    """Reads an entry of the cache. Raises an exception if the entry's files changed after writing."""
    recorded = (entry / SUMS).read_text(errors="replace").splitlines()
    for name in FILES:
        if f"{content_sha256(entry / name, entry.parent.parent)}  {name}" not in recorded:
            raise ValueError(f"the SHA-256 of {name} is not the one in {SUMS}")
    manifest = read_json(entry / MANIFEST)
    with np.load(entry / TABLE) as table:
        documents = DocumentTable(
            *(TokenFile(entry / name, manifest["tokens"]) for name in (TOKENS, SPANS)),
            *(table[name] for name in ("starts", "lengths", "supervised")),
            sha256=manifest["sha256"], counts=TokenCounts(table["supervised_V"], table["seen_V"]),
        )  # fmt: skip
    report = DataReport(**manifest["report"])
    return TrainingData(
        documents=documents,
        report=replace(report, first_refusal=_with_name(report.first_refusal, names)),
        held_out=[
            Record(**r | {"where": _with_name(r["where"], names), "turns": tuple(r["turns"])})
            for r in manifest["held_out"]
        ],
        records=manifest["records"],
        copies=manifest["copies"],
    )


def _without_name(text: str, names: Sequence[str]) -> tuple[int, str]:
    """Splits a text that starts with the name of a file or data set into the name's index and the rest, since the same
    content may have a different name in a later run. The index is -1 for a text that starts with no name."""
    found = [i for i, name in enumerate(names) if text.startswith(name)]
    i = max(found, key=lambda i: len(names[i]), default=-1)
    return i, text[len(names[i]) :] if found else text


def _with_name(split: tuple[int, str], names: Sequence[str]) -> str:
    i, rest = split
    return names[i] + rest if i >= 0 else rest


# -- hashes of data files ---------------------------------------------------------------------------------------------


def stamp(file: Path) -> tuple[int, int, int]:
    """Size and times (in nanoseconds) of the last change of a file's content and metadata."""
    stat = file.stat()
    return stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns


def content_sha256(file: Path, cache: Path) -> str:
    """SHA-256 of a file's content, in hexadecimal.

    The hash is stored in the directory `hashes` of the cache, and used again as long as the file's `stamp` is the same.
    If the directory cannot be written, the hash is computed each time.
    """
    path = os.path.realpath(file)
    note = cache / "hashes" / f"{hashlib.sha256(os.fsencode(path)).hexdigest()[:32]}.json"
    now = stamp(file)
    with contextlib.suppress(OSError, ValueError, LookupError, TypeError):
        known = read_json(note)
        if (known["path"], tuple(known["stamp"])) == (path, now):
            return known["sha256"]
    sha256 = sha256_of(file)
    if stamp(file) == now and time.time_ns() - max(now[1:]) > SETTLED_NS:
        with contextlib.suppress(OSError):
            note.parent.mkdir(parents=True, exist_ok=True)
            replace_text(note, json.dumps({"path": path, "stamp": now, "sha256": sha256}) + "\n")
    return sha256
