"""A limit on the CPU time that code from a model repository (a chat template) may use."""

from __future__ import annotations

import functools
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


class EndlessTemplate(ValueError):
    """A chat template was stopped because it had used up its CPU time. No other record is rendered with it."""


class ComputeTimeout(Exception):
    """Raised by `limit_compute_time` inside a block that has used up its CPU time."""


@contextmanager
def limit_compute_time(seconds: float) -> Iterator[None]:
    """Context manager: raises ComputeTimeout inside the block after this process has used `seconds` of CPU time in it.

    The timer counts user CPU time only, so a suspended or busy machine does not trigger it. Python delivers signals to
    the main thread, and Windows has no such timer: in other threads and on Windows there is no limit.
    """
    if threading.current_thread() is not threading.main_thread() or not hasattr(signal, "setitimer"):
        yield
        return
    _install_handler()
    signal.setitimer(signal.ITIMER_VIRTUAL, seconds, min(seconds, 1.0))  # repeats, in case the code catches it
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)


@functools.cache  # installing a handler takes ten times as long as setting the timer
def _install_handler() -> None:
    signal.signal(signal.SIGVTALRM, _raise_timeout)


def _raise_timeout(*_: Any) -> None:
    raise ComputeTimeout
