"""Iterates over rows with their target features; the next row's are computed while the draft trains on this one."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator

import torch

from fledge.types import Features, Packed


@functools.cache
def _stream(device: torch.device) -> torch.cuda.Stream:
    """A side stream, one per process and device: every further stream would hold memory and workspaces of its own."""
    return torch.cuda.Stream(device)


def with_features(
    rows: Iterable[Packed], features: Callable[[Packed], Features], device: torch.device, *, prefetch: bool
) -> Iterator[tuple[Packed, Features]]:
    """Yields each row with its features.

    With `prefetch` (CUDA only), the next row's features are started on a side stream before a row is yielded, so that
    the target's forward pass overlaps with the draft's training step. This needs memory for the features of two rows,
    or of three if the caller still holds a row's features when it asks for the next row.
    """
    if not prefetch:
        for row in rows:
            yield row, features(row)
        return
    rows, stream = iter(rows), _stream(device)

    def start_next() -> tuple[Packed, Features] | None:
        if (row := next(rows, None)) is None:
            return None
        # memory of freed features returns to this stream's pool while the main stream may still read it
        stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(stream):
            return row, features(row)

    upcoming = start_next()
    while upcoming is not None:
        current = [upcoming]
        torch.cuda.current_stream(device).wait_stream(stream)
        upcoming = start_next()
        yield current.pop()  # so that no reference is left here
