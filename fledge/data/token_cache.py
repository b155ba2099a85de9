"""A cache on disk of the tokenized data of earlier runs, keyed by a hash of the sources, settings and code.

Each data set is a directory `tokens/HASH` of the cache, written once, by one process, and either complete or absent.
The directory contains the tokens and spans of all documents as int32 (tokens.bin, spans.bin), the numbers of tokens of
each document (documents.npz), a manifest (manifest.json), and the hashes of all files (SHA256SUMS), which are compared
whenever the data is read.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import time
import zipfile
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any, NoReturn

import numpy as np

from fledge.data.documents import SPANS, TOKENS, DocumentTable, TokenStore, read_tokens
from fledge.data.read import SourceReader, select
from fledge.data.record import Record
from fledge.data.rows import format_of
from fledge.data.sources import Source, is_local
from fledge.data.template import ChatTemplate
from fledge.data.tokenize import DataReport, default_workers, make_documents
from fledge.io.fields import read_json
from fledge.io.files import InUse, disk_full_errno, exclusive_lock, replace_directory, sha256_of, sibling_path

MANIFEST, TABLE = "manifest.json", "documents.npz"
SUMS = "SHA256SUMS"
FILES = (MANIFEST, TABLE, TOKENS, SPANS)
POLL_SECONDS = 0.2  # between two looks at whether another process has made the data

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


def data_files(sources: Sequence[str]) -> dict[str, str]:
    """The absolute path and the SHA-256 of each local file of data sources."""
    files = (file for source in sources if is_local(Source.parse(source).path) for file in SourceReader(source).files)
    return {os.path.abspath(file): sha256_of(file) for file in files}


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
    entry = cache / "tokens" / _key(request, sources)
    told = False
    while True:
        if (known := job.read(entry)) is not None:
            say(f"the tokenized data is read from {entry}")
            return known
        with contextlib.ExitStack() as held:
            try:
                entry.parent.mkdir(parents=True, exist_ok=True)
                name = f"the tokenized data in {entry}"
                held.enter_context(exclusive_lock(sibling_path(entry, "lock"), name, _refuse_to_share))
            except InUse as e:
                if not told:
                    say(f"waiting, because {e}")
                    told = True
                time.sleep(POLL_SECONDS)
                continue
            except (OSError, ValueError) as e:
                return job.make_in_memory(cache, getattr(e, "strerror", None) or str(e))
            if job.read(entry, report_damage=True) is None:
                return job.make(entry, stamps)


def _refuse_to_share(problem: str) -> NoReturn:
    """Without locks, two processes could write the same files."""
    raise OSError(problem.partition(":")[0])


@dataclass(frozen=True)
class _Job:
    """One request for training data, with the readers of the requested sources."""

    request: DataRequest
    sources: Sequence[SourceReader]
    workers: int | None
    say: Say
    count: Count

    def stamps(self) -> dict[Path, tuple[int, int]]:
        """Size and time of the last change of each file."""
        files = {file: file.stat() for source in self.sources for file in source.files}
        return {file: (stat.st_size, stat.st_mtime_ns) for file, stat in files.items()}

    def make(self, entry: Path, stamps: dict[Path, tuple[int, int]]) -> TrainingData:
        """Makes the data and puts the data into the cache. The process must hold the entry's lock."""
        try:
            with replace_directory(entry) as new:
                with contextlib.closing(TokenStore(new)) as store:
                    data = self.tokenize(store)
                now = self.stamps()
                if changed := next((file for file in stamps if now[file] != stamps[file]), None):
                    raise ValueError(f"{changed} changed while it was read; start again when it is complete")
                _save(new, data)
        except OSError as e:
            if (full := disk_full_errno(e)) is None:
                raise
            message = f"no space for the tokenized data in {entry}; fledge train --data-cache names another directory"
            raise OSError(full, message) from e
        size = sum(file.stat().st_size for file in entry.iterdir())
        self.say(f"the tokenized data is kept for later runs in {entry} ({size / 1e6:,.1f} MB)")
        return _load(entry)

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
        held_out: dict[int, Record] = {}
        with self.count("reading chats", chosen.trained) as advance:
            documents, report = make_documents(
                chosen.read(held_out), request.template, request.max_length, skip_bad=request.skip_bad,
                skipped=chosen.refused, advance=advance, store=store,
                workers=self.workers or default_workers(chosen.trained),
            )  # fmt: skip
        return TrainingData(
            documents, report, [held_out[i] for i in chosen.held_out.tolist()], chosen.records, chosen.copies
        )

    def read(self, entry: Path, *, report_damage: bool = False) -> TrainingData | None:
        """The data of a cache entry; None if the entry is absent, or if the entry's files changed after writing."""
        if not entry.exists():
            return None
        try:
            return _load(entry)
        except (OSError, ValueError, LookupError, TypeError, AttributeError, zipfile.BadZipFile) as e:
            if report_damage:
                reason = f"{MANIFEST} lacks {e}" if isinstance(e, LookupError) else e
                self.say(f"the tokenized data in {entry} is damaged ({reason}), so it is made again")
            return None


def _key(request: DataRequest, sources: Sequence[SourceReader]) -> str:
    """A hash of all inputs that determine the documents and the held-out records."""
    drawn = request.hold_out or any(source.share % 1 for source in sources)  # whether the seed matters
    content = {
        # the code that makes and stores the documents: changed code must not read documents of the old code
        "code": [hashlib.sha256(file.read_bytes()).hexdigest() for file in sorted(Path(__file__).parent.glob("*.py"))],
        "libraries": {name: version(name) for name in ("transformers", "tokenizers", "jinja2")},
        "sources": [[_identity(source), source.share, source.source.template_kwargs] for source in sources],
        "seed": request.seed if drawn else None,
        "tokenizer": _tokenizer_state(request.template.tokenizer),
        "template_kwargs": request.template.kwargs,
        "stop_ids": sorted(request.template.stop_ids),
        "max_length": request.max_length,
        "skip_bad": request.skip_bad,
        "hold_out": request.hold_out,
    }
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:32]


def _identity(source: SourceReader) -> Any:
    """A source's content, independent of file names: format, size and hash of each file, or the fingerprint of a hub
    data set, which changes with revision and split; and the mapping of the source's columns."""
    if not source.local:
        return [source.hub_data._fingerprint, source.columns]
    files = [[format_of(file), file.stat().st_size, sha256_of(file)] for file in source.files]
    return [files, source.columns]


def _tokenizer_state(tokenizer: Any) -> list[Any]:
    state = json.loads(tokenizer.backend_tokenizer.to_str())
    state = {name: part for name, part in state.items() if name not in ("truncation", "padding")}  # set by each call
    kind = type(tokenizer)
    special = {name: str(token) for name, token in tokenizer.special_tokens_map.items()}
    return [kind.__module__, kind.__qualname__, state, special, tokenizer.split_special_tokens, tokenizer.chat_template]


def _save(directory: Path, data: TrainingData) -> None:
    """Adds the table, the manifest and the hashes to the files of a `TokenStore`."""
    np.savez(directory / TABLE, lengths=data.documents.lengths, supervised=data.documents.supervised)
    manifest = {
        "report": asdict(data.report),
        "held_out": [asdict(r) for r in data.held_out],
        "records": data.records,
        "copies": data.copies,
    }
    (directory / MANIFEST).write_text(json.dumps(manifest), encoding="utf-8")
    (directory / SUMS).write_text("".join(f"{sha256_of(directory / name)}  {name}\n" for name in FILES))


def _load(entry: Path) -> TrainingData:
    """Reads an entry of the cache. Raises an exception if the entry's files changed after writing."""
    recorded = (entry / SUMS).read_text(errors="replace").splitlines()
    for name in FILES:
        if f"{sha256_of(entry / name)}  {name}" not in recorded:
            raise ValueError(f"the SHA-256 of {name} is not the one in {SUMS}")
    manifest = read_json(entry / MANIFEST)
    with np.load(entry / TABLE) as table:
        documents = DocumentTable(*read_tokens(entry), table["lengths"], table["supervised"])
    return TrainingData(
        documents=documents,
        report=DataReport(**manifest["report"]),
        held_out=[Record(**r | {"turns": tuple(r["turns"])}) for r in manifest["held_out"]],
        records=manifest["records"],
        copies=manifest["copies"],
    )
