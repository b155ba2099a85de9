"""The signals that stop a command: SIGINT (Ctrl-C), SIGTERM, and SIGHUP when the terminal is closed."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager


def stopping_signals() -> list[signal.Signals]:
    """The three signals without those that are ignored, as SIGHUP is under nohup; none outside the main thread, which
    alone may set handlers."""
    if threading.current_thread() is not threading.main_thread():
        return []
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    return [n for n in numbers if signal.getsignal(n) is not signal.SIG_IGN]


def is_assembler_error(error: BaseException | None) -> bool:
    """Whether the error is Triton's PTXASError: its assembler, ptxas, failed. Triton runs it as a process of its own,
    which a terminal's Ctrl-C ends too. The class is known by name, as Triton need not be installed."""
    return type(error).__name__ == "PTXASError"


def ignore_signals() -> None:
    for number in stopping_signals():
        signal.signal(number, signal.SIG_IGN)


@contextmanager
def restoring_signals() -> Iterator[Callable[[], None]]:
    """Context manager: yields `ignore_signals`, for code that must not be interrupted again, such as the rest of the
    block after a KeyboardInterrupt. When the block ends, the signals are handled as before."""
    before = {number: signal.getsignal(number) for number in stopping_signals()}
    try:
        yield ignore_signals
    finally:
        for number, handler in before.items():
            if signal.getsignal(number) is signal.SIG_IGN:
                # None: the handler was not installed from Python, and cannot be put back
                signal.signal(number, signal.SIG_DFL if handler is None else handler)
