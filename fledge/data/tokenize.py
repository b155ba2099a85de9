"""Tokenizes records: batches of records become arrays, in this process or in several worker processes, and the arrays
become a table of documents.

Workers are programs of their own (`work`). A forked worker could deadlock, as a copy of a process with threads.
Processes of `multiprocessing` or `concurrent.futures` would run the user's script again, and would outlive a training
process that is killed.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import queue
import subprocess
import sys
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from multiprocessing import Pipe
from multiprocessing.connection import Connection

import numpy as np

from fledge.data.documents import DocumentTable, TokenStore, grouped, windows
from fledge.data.record import Record
from fledge.data.spans import LOSSES, losses, training_documents
from fledge.data.template import ChatTemplate, EndlessTemplate

BATCH_RECORDS, BATCH_CHARACTERS = 64, 1 << 18  # the first limit reached ends a batch
RECORDS_PER_WORKER = 5_000  # short chats that a process tokenizes while a worker starts, which takes 1 to 2 seconds
NOTHING = np.zeros(0, dtype=np.int32)
MAX_WORKERS = 32  # one process reads the records and writes the tokens, and can't keep more workers busy


@dataclass(frozen=True)
class Settings:
    """How records are tokenized. `max_length` is the length of a window in tokens; with `skip_bad`, records that the
    template refuses are counted instead of raised."""

    template: ChatTemplate
    max_length: int
    skip_bad: bool


@dataclass(frozen=True)
class TokenizedBatch:
    """The documents of successive records. `tokens` and `spans` are the concatenation of all documents, int32 [n];
    `lengths` and `supervised` count the tokens of each document, int32 [D].

    `records` counts the records, and `windowed` the texts longer than a window. `refused` are the reasons of refused
    records, and `losses` counts the records of which the template drops a part, by the keys of LOSSES.
    """

    tokens: np.ndarray
    spans: np.ndarray
    lengths: np.ndarray
    supervised: np.ndarray
    records: int
    windowed: int
    refused: list[str]
    losses: Counter[str]


Tokenize = Callable[[Iterable[list[Record]]], Iterator[TokenizedBatch]]


def tokenize(records: list[Record], settings: Settings) -> TokenizedBatch:
    """Tokenizes a batch. Raises ValueError for a record that the template refuses, unless `skip_bad` is set,
    and EndlessTemplate for a template that does not terminate."""
    parts, windowed, refused, lost = [], 0, [], Counter()
    for record in records:
        try:
            found = training_documents(settings.template, record)
        except ValueError as e:
            if not settings.skip_bad or isinstance(e, EndlessTemplate):
                raise
            refused.append(str(e))
            continue
        lost.update(losses(settings.template, record, found))
        parts += [part for document in found for part in windows(document, settings.max_length)]
        windowed += sum(len(d.tokens) > settings.max_length for d in found)
    return TokenizedBatch(
        tokens=np.concatenate([NOTHING, *(d.tokens for d in parts)]),
        spans=np.concatenate([NOTHING, *(d.spans for d in parts)]),
        lengths=np.array([len(d.spans) for d in parts], dtype=np.int32),
        supervised=np.array([np.count_nonzero(d.spans >= 0) for d in parts], dtype=np.int32),
        records=len(records),
        windowed=windowed,
        refused=refused,
        losses=lost,
    )


def batches(records: Iterable[Record]) -> Iterator[list[Record]]:
    """Successive records in batches."""

    def characters(record: Record) -> int:
        return len(record.text or "") + sum(len(m.get("content") or "") for m in record.messages or [])

    return grouped(records, characters, BATCH_CHARACTERS, BATCH_RECORDS)


def default_workers(records: int) -> int:
    """The number of tokenizing processes: one for each core, at most MAX_WORKERS, and 1 for few records."""
    return max(1, min(_cores(), MAX_WORKERS, records // RECORDS_PER_WORKER))


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@contextlib.contextmanager
def tokenizing(settings: Settings, workers: int) -> Iterator[Tokenize]:
    """Context manager: yields a function that tokenizes batches and returns the results in the batches' order.

    With 1 worker, batches are tokenized in this process. Worker processes end with the context. Results, and the error
    of the first refused record, do not depend on the number of workers.
    """
    if workers == 1:
        yield lambda todo: (tokenize(batch, settings) for batch in todo)
        return
    try:
        startup = pickle.dumps(settings)
    except Exception as e:  # a tokenizer with code of its own may hold anything
        raise ValueError(
            f"the tokenizer cannot be sent to other processes ({e}); use fledge train --data-workers 1"
        ) from e
    started: list[_Worker] = []
    idle: queue.SimpleQueue[_Worker] = queue.SimpleQueue()
    pool = ThreadPoolExecutor(workers)  # each thread waits for the answer of one worker

    def ask(batch: list[Record]) -> TokenizedBatch:
        worker = idle.get()
        try:
            return worker.ask(batch)
        finally:
            idle.put(worker)

    def in_order(todo: Iterable[list[Record]]) -> Iterator[TokenizedBatch]:
        pending: deque[Future[TokenizedBatch]] = deque()
        for batch in todo:
            pending.append(pool.submit(ask, batch))
            if len(pending) > 3 * workers:  # bounds the memory
                yield pending.popleft().result()
        while pending:
            yield pending.popleft().result()

    try:
        for _ in range(workers):
            started.append(_Worker(startup))
            idle.put(started[-1])
        yield in_order
    finally:
        for worker in started:
            worker.stop()
        pool.shutdown(cancel_futures=True)


class _Worker:
    """A worker process, which tokenizes one batch at a time."""

    def __init__(self, startup: bytes):
        path = os.pathsep.join(os.path.abspath(entry) for entry in sys.path)
        # workers compute nothing on a GPU, and the threads of several workers would compete for the cores
        environment = {"TOKENIZERS_PARALLELISM": "false", "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
        self.connection, theirs = Pipe()
        with theirs:
            code = f"from fledge.data.tokenize import work; work({theirs.fileno()})"
            self.process = subprocess.Popen(
                [sys.executable, "-P", "-c", code], env={**os.environ, "PYTHONPATH": path, **environment},
                pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL,
                stdout=2,  # a library may print in a worker; the command's output has only results
                process_group=0,  # Ctrl-C on the terminal reaches only the training process, which stops the workers
            )  # fmt: skip
        self.startup: bytes | None = startup

    def ask(self, batch: list[Record]) -> TokenizedBatch:
        try:
            if self.startup is not None:
                self.connection.send_bytes(self.startup)
                self.startup = None
            self.connection.send(batch)
            answer = self.connection.recv()
        except (EOFError, OSError) as e:
            code = self.process.wait()
            raise ValueError(
                f"a process that tokenizes the data ended early (exit code {code}), for example for want of memory; "
                "fledge train --data-workers 1 starts no such processes"
            ) from e
        if isinstance(answer, str):
            raise ValueError(answer)
        return answer

    def stop(self) -> None:
        self.process.kill()
        self.process.wait()


def work(descriptor: int) -> None:
    """Receives the settings and then batches of records, until the other end of the connection is closed. Answers each
    batch with the result, or with the error message of a refused record."""
    connection = Connection(descriptor)
    with contextlib.suppress(EOFError, ConnectionError):
        settings: Settings = connection.recv()
        while True:
            records = connection.recv()
            answer: TokenizedBatch | str
            try:
                answer = tokenize(records, settings)
            except ValueError as e:
                answer = str(e)
            connection.send(answer)


@dataclass(frozen=True)
class DataReport:
    """Statistics of `make_documents`, shown before training.

    `windowed` documents were longer than a window, `refused` records could not be used, and `first_refusal` is the
    reason of the first refused record. `tokens` and `supervised` count the tokens of all documents. `losses` count the
    records of which the chat template drops a part, by the keys of LOSSES.
    """

    records: int
    documents: int
    windowed: int
    refused: int
    first_refusal: str
    tokens: int
    supervised: int
    losses: dict[str, int] = field(default_factory=dict)

    def __str__(self) -> str:
        text = (
            f"{self.records:,} records, {self.documents:,} documents, {self.tokens:,} tokens, "
            f"{self.supervised / max(self.tokens, 1):.0%} supervised"
        )
        text += f"; {self.windowed:,} longer than a window were split" if self.windowed else ""
        text += "".join(f"; {n:,} records {LOSSES[kind]}" for kind, n in self.losses.items())
        return text + (
            f"; {self.refused:,} refused (--skip-bad), the first because: {self.first_refusal}" if self.refused else ""
        )


def make_documents(
    records: Iterable[Record], template: ChatTemplate, max_length: int, *, skip_bad: bool = False,
    skipped: Sequence[str] = (), advance: Callable[[], None] = lambda: None, store: TokenStore | None = None,
    workers: int = 1,
) -> tuple[DocumentTable, DataReport]:  # fmt: skip
    """Tokenizes records, marks the assistant's spans, and splits documents into windows of `max_length` tokens.

    A record that the template refuses raises ValueError; with `skip_bad` the record is counted as refused instead.
    `skipped` are the error messages of unreadable records, which are counted as refused as well. `advance` is called
    after each record. `workers` processes (see `tokenizing`) put the tokens into `store` (None: memory). Raises
    ValueError if no record is usable.
    """
    store = store or TokenStore()
    count, windowed, refused, lost = len(skipped), 0, list(skipped), Counter()
    lengths, supervised = [NOTHING], [NOTHING]
    with tokenizing(Settings(template, max_length, skip_bad), workers) as tokenize:
        for batch in tokenize(batches(records)):
            store.append(batch.tokens, batch.spans)
            lengths.append(batch.lengths)
            supervised.append(batch.supervised)
            count += batch.records
            windowed += batch.windowed
            refused += batch.refused
            lost.update(batch.losses)
            for _ in range(batch.records):
                advance()
    if len(refused) == count:
        raise ValueError(f"every record was refused, the first because: {refused[0]}")
    if not any(map(len, lengths)):
        raise ValueError("no record has an assistant turn of two or more tokens, so there is nothing to train on")
    documents = DocumentTable(*store.finish(), np.concatenate(lengths), np.concatenate(supervised))
    return documents, DataReport(
        records=count,
        documents=len(documents),
        windowed=windowed,
        refused=len(refused),
        first_refusal=refused[0] if refused else "",
        tokens=int(documents.lengths.sum(dtype=np.int64)),
        supervised=int(documents.supervised.sum(dtype=np.int64)),
        losses={kind: lost[kind] for kind in LOSSES if lost[kind]},
    )
