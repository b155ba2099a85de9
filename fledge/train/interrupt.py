"""Signals that ask a run to stop. Training stops after the current step."""

from __future__ import annotations

import queue
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import TracebackType

from fledge.io.machine import is_assembler_error
from fledge.train.ranks import LostRankError

STOPPING = "stopping after this step; a second Ctrl-C stops immediately and loses the steps since the last checkpoint"
SAVING = "a checkpoint is being saved; stopping when it is complete"


class Interruption:
    """A context manager in which SIGINT (Ctrl-C), SIGTERM and SIGHUP set `requested` instead of ending the process.

    A second SIGINT raises KeyboardInterrupt, unless it arrives within `saving`. A second SIGTERM or SIGHUP has no
    effect, since process managers often send a signal twice. If the first signal also ended Triton's assembler, the
    block raises KeyboardInterrupt in place of Triton's error. SIGHUP stays ignored if SIGHUP was ignored before, as
    under nohup. After a block that raised LostRankError, SIGTERM is ignored: torchrun sends SIGTERM before this rank
    has named the lost rank. `say` is called with a message for each handled signal, from a thread: a signal handler may
    run in the middle of a print.
    """

    def __init__(self, say: Callable[[str], None]):
        self.requested = False
        self._saving = False
        self._lines: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        self._printer = threading.Thread(target=self._print_lines, args=(say,), daemon=True)

    @contextmanager
    def saving(self) -> Iterator[None]:
        """Within this block, a second Ctrl-C does not raise."""
        self._saving = True
        try:
            yield
        finally:
            self._saving = False

    def __enter__(self) -> Interruption:
        self._printer.start()
        caught = [signal.SIGINT, signal.SIGTERM]
        if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
            caught.append(signal.SIGHUP)
        self._previous = {s: signal.signal(s, self._handle) for s in caught}
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        for s, handler in self._previous.items():
            if s == signal.SIGTERM and isinstance(error, LostRankError):
                handler = signal.SIG_IGN
            # None: the handler was not installed from Python, and cannot be put back
            signal.signal(s, signal.SIG_DFL if handler is None else handler)
        self._lines.put(None)
        self._printer.join()
        if self.requested and is_assembler_error(error):
            raise KeyboardInterrupt from error

    def _handle(self, number: int, _frame: object) -> None:
        if not self.requested:
            self.requested = True
            self._lines.put(STOPPING)
        elif number == signal.SIGINT and self._saving:
            self._lines.put(SAVING)
        elif number == signal.SIGINT:
            raise KeyboardInterrupt

    def _print_lines(self, say: Callable[[str], None]) -> None:
        for line in iter(self._lines.get, None):
            say(line)
