"""The progress of loading a target's weights."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from fledge.io.hub import Counter, progress_counter


@contextmanager
def counting_tensors(label: str) -> Iterator[None]:
    """Context manager: transformers' loading of weights is counted, if progress is shown (`fledge.io.hub`)."""
    from transformers.utils.logging import set_tqdm_hook

    if (counter := progress_counter()) is None:
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
    with counter(label, len(items), unit="tensors") as advance:
        for item in items:
            yield item
            advance(1)
