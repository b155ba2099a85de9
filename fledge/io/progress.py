"""The progress of downloads and of loading weights, for whoever shows it."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from contextvars import ContextVar
from typing import Protocol


class Counter(Protocol):
    """As `ProgressDisplay.count`: shows how many of `total` items are finished. `unit` is the name of the items."""

    def __call__(self, label: str, total: int, *, unit: str) -> AbstractContextManager[Callable[[int], None]]:
        """A context manager, which yields a function to call with the number of items that are finished in addition."""


_counter: ContextVar[Counter | None] = ContextVar("counter of downloads and loaded tensors", default=None)


def show_progress(counter: Counter) -> None:
    """Lets `counter` show what is downloaded and loaded, in the current context (`contextvars`) from now on."""
    _counter.set(counter)


def progress_counter() -> Counter | None:
    """The counter of the current context; None if nobody shows progress."""
    return _counter.get()
