"""Rows with their target features, the next row's computed while one is trained on."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator

import torch

from fledge.types import Features, Packed


@functools.cache
def _stream(device: torch.device) -> torch.cuda.Stream:
    """One stream for the process, since a stream keeps the memory and workspaces that it has had."""
    return torch.cuda.Stream(device)


def with_features(
    rows: Iterable[Packed], features: Callable[[Packed], Features], device: torch.device, *, prefetch: bool
) -> Iterator[tuple[Packed, Features]]:
    """Each row with its features.

    `prefetch` (on a GPU) begins to compute the next row's features before it yields a row, on a stream of their own:
    the target's pass then runs while this row is trained on, and each fills what the other leaves idle. That takes the
    memory of two rows' features, or of three where the caller asks for the next row while it holds this one's.
    """
    if not prefetch:
        for row in rows:
            yield row, features(row)
        return
    rows, stream = iter(rows), _stream(device)

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
