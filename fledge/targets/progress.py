"""The progress of loading a target's weights, for whoever shows it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from typing import Any

# as `ProgressDisplay.count`: a context manager for a label and a total, which yields a function to call after each item
Counter = Callable[[str, int], AbstractContextManager[Callable[[], None]]]

_counter: ContextVar[Counter | None] = ContextVar("counter of loaded tensors", default=None)


def show_loading(counter: Counter) -> None:
    """Lets `counter` show how many tensors are loaded, in the current context (`contextvars`) from now on."""
    _counter.set(counter)


@contextmanager
def counting_tensors(label: str) -> Iterator[None]:
    """Context manager: transformers' loading of weights is counted, if `show_loading` was called."""
    from transformers.utils.logging import set_tqdm_hook

    if (counter := _counter.get()) is None:
        yield
        return

    def bar(make: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if kwargs.get("desc") != "Loading weights" or not args:
            return make(*args, **kwargs)
        return _counted(args[0], label, counter)

    before = set_tqdm_hook(bar)
    try:
        yield
    finally:
        set_tqdm_hook(before)


def _counted(items: Iterable[Any], label: str, counter: Counter) -> Iterator[Any]:
    items = list(items)
    with counter(label, len(items)) as advance:
        for item in items:
            yield item
            advance()
