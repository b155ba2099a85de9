"""A limit on what code that came with a model may compute."""

from __future__ import annotations

import functools
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


class Unending(Exception):
    """Raised in the middle of a computation that has reached its limit."""


@contextmanager
def at_most(seconds: float) -> Iterator[None]:
    """Raises Unending inside the block once this process has computed for so many seconds in it.

    The system counts computing time alone, so a machine that was suspended or busy with others reaches no limit. Python
    takes signals in its main thread, and Windows has no such timer; elsewhere than on the main thread of Linux and
    macOS nothing is limited.
    """
    if threading.current_thread() is not threading.main_thread() or not hasattr(signal, "setitimer"):
        yield
        return
    _listen()
    signal.setitimer(signal.ITIMER_VIRTUAL, seconds, min(seconds, 1.0))  # again and again, for code that catches it
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)


@functools.cache  # a handler takes ten times as long to set as the timer
def _listen() -> None:
    signal.signal(signal.SIGVTALRM, _stop)


def _stop(*_: Any) -> None:
    raise Unending
