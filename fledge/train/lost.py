"""Finds out which rank a failed communication is to blame on, so that all ranks say the same sentence."""

from __future__ import annotations

import contextlib
import os
import re
import socket
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist

PATIENCE = timedelta(seconds=5)  # for another rank to answer, or to say what it found, once a communication has failed
REAPING_SECONDS = 1.0  # until the process that started a rank notices that it ended
POLL_SECONDS = 0.05
SENTENCE = "what was lost"  # the key of the store; the first sentence stays


@dataclass(frozen=True)
class Process:
    """Where a rank runs. `parent` tells its siblings apart from processes of another container with the same host."""

    host: str
    parent: int
    id: int

    @classmethod
    def current(cls) -> Process:
        return cls(socket.gethostname(), os.getppid(), os.getpid())

    def has_ended(self) -> bool:
        """Whether it has ended; False if it cannot be known, as for those of another host."""
        ours = Process.current()
        if (self.host, self.parent) != (ours.host, ours.parent):
            return False
        with contextlib.suppress(OSError):  # a process that has ended is a zombie until its parent asks for its status
            return Path(f"/proc/{self.id}/stat").read_text().rpartition(")")[2].split()[0] in "ZX"
        try:
            os.kill(self.id, 0)
        except ProcessLookupError:
            return True
        except PermissionError:
            pass
        return False


def is_communication_error(error: BaseException) -> bool:
    """Whether torch.distributed raised an error because of another rank. gloo raises a plain RuntimeError."""
    return isinstance(error, dist.DistError) or "gloo" in str(error).lower()


def lost_sentence(
    error: BaseException, where: str, seconds: float, rank: int, processes: Sequence[Process], host: Any, store: Any,
    awaited: int | None = None,
) -> str:  # fmt: skip
    """What to say of a communication of this `rank` that failed after `seconds` seconds: which ranks ended, or did not
    answer. All ranks get the sentence of the first of them, through the `store`, if it still answers.

    `host` is the gloo group of all ranks. `awaited` is the rank that was communicated with, if it was one. Takes up to
    twice PATIENCE.
    """
    total = len(processes)
    with contextlib.suppress(RuntimeError):  # the process that had the store has ended
        if store.check([SENTENCE]):  # this rank comes late, and others may have ended because of that
            return str(store.get(SENTENCE).decode())
    if ended := _ended(processes):
        found = f"{_named(ended, total)} ended {where}; see {'its' if len(ended) == 1 else 'their'} log"
        return _agreed(store, found)
    missing = _missing(error) if awaited is None else [awaited]
    if missing is None:
        try:
            dist.monitored_barrier(host, PATIENCE, wait_all_ranks=True)
        except RuntimeError as e:
            missing = _missing(e)
    if not missing and rank:  # rank 0 alone hears of the others
        with contextlib.suppress(RuntimeError):
            store.wait([SENTENCE], PATIENCE)
            return str(store.get(SENTENCE).decode())
        missing = [0]
    subject = _named(missing, total) if missing else "another rank"
    return _agreed(store, f"{subject} did not answer for {duration(seconds)} {where}; see the log")


def duration(seconds: float) -> str:
    """A time in seconds, or from two minutes on in minutes."""
    count, unit = (round(seconds), "second") if seconds < 120 else (round(seconds / 60), "minute")
    return f"{count:,} {unit}{'s' * (count != 1)}"


def _ended(processes: Sequence[Process]) -> list[int]:
    """The ranks that have ended; waits a little for one, as its connection is closed before it has ended."""
    until = time.monotonic() + REAPING_SECONDS
    while True:
        ended = [rank for rank, process in enumerate(processes) if process.has_ended()]
        if ended or time.monotonic() > until:
            return ended
        time.sleep(POLL_SECONDS)


def _missing(error: BaseException) -> list[int] | None:
    """The ranks that a monitored barrier names on rank 0; None for other errors."""
    match = re.search(r"Ranks ([\d, ]+) failed to pass", str(error))
    return [int(rank) for rank in match[1].split(",")] if match else None


def _named(ranks: Sequence[int], total: int) -> str:
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))} of {total}"


def _agreed(store: Any, sentence: str) -> str:
    """The sentence, or that of another rank, if one was first."""
    try:
        return str(store.compare_set(SENTENCE, "", sentence).decode()) or sentence
    except RuntimeError:
        return sentence
