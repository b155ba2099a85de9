"""Requests to end a run, which training heeds after the step at hand."""

from __future__ import annotations

import queue
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import TracebackType

FIRST = "stopping after this step; once more stops at once, and what is not in a checkpoint is lost"
SAVING = "a checkpoint is being saved; stopping when it is whole"


class Interruption:
    """While entered, Ctrl-C, a termination request (SIGTERM) or a terminal that went away (SIGHUP) sets `asked`.

    A second Ctrl-C raises KeyboardInterrupt, unless it comes while `saving`; the other signals often come twice and
    never do. SIGHUP stays ignored where it was, as under nohup. `say` gets a line for each answer to a Ctrl-C, from a
    thread: the signal may have come in the middle of another line.
    """

    def __init__(self, say: Callable[[str], None]):
        self.asked = False
        self._saving = False
        self._lines: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        self._teller = threading.Thread(target=self._tell, args=(say,), daemon=True)

    @contextmanager
    def saving(self) -> Iterator[None]:
        """A second Ctrl-C within this block lets it end."""
        self._saving = True
        try:
            yield
        finally:
            self._saving = False

    def __enter__(self) -> Interruption:
        self._teller.start()
        caught = [signal.SIGINT, signal.SIGTERM]
        if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
            caught.append(signal.SIGHUP)
        self._before = {s: signal.signal(s, self._note) for s in caught}
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        for s, handler in self._before.items():
            signal.signal(s, handler)
        self._lines.put(None)
        self._teller.join()

    def _note(self, number: int, _frame: object) -> None:
        if not self.asked:
            self.asked = True
            self._lines.put(FIRST)
        elif number == signal.SIGINT and self._saving:
            self._lines.put(SAVING)
        elif number == signal.SIGINT:
            raise KeyboardInterrupt

    def _tell(self, say: Callable[[str], None]) -> None:
        for line in iter(self._lines.get, None):
            say(line)
