"""Rows and their features in the order of training."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator

import torch

from fledge.types import Features, Packed


@functools.cache
def _beside(device: torch.device) -> torch.cuda.Stream:
    """One for the process: what memory and workspaces a stream has had stay its own."""
    return torch.cuda.Stream(device)


def with_features(
    rows: Iterable[Packed], features: Callable[[Packed], Features], device: torch.device, *, ahead: bool
) -> Iterator[tuple[Packed, Features]]:
    """Each row with its features. `ahead` (on a GPU) begins the next row's before it gives one away, on a stream of
    their own: the target's pass then runs beside what is done with this row, and one fills what the other leaves idle.
    It takes the memory of two rows' features; who asks for the next row while holding this one's has those of three.
    """
    if not ahead:
        for row in rows:
            yield row, features(row)
        return
    rows, stream = iter(rows), _beside(device)

    def begin() -> tuple[Packed, Features] | None:
        if (row := next(rows, None)) is None:
            return None
        # the memory of features that are gone is this stream's again, but others may still be reading it
        stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(stream):
            return row, features(row)

    upcoming = begin()
    while upcoming is not None:
        given = [upcoming]
        torch.cuda.current_stream(device).wait_stream(stream)
        upcoming = begin()
        yield given.pop()  # and holds it no longer
