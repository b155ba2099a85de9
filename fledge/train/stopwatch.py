"""The seconds of a training step by part.

On a GPU, launches are asynchronous, and only the device knows when a part began: each mark is a CUDA event on the
stream that trains. `Stopwatch.read` reads the events after the step, when the step has already waited for the device,
so measuring adds no synchronization. A part is the time in which the training stream worked or waited: where the target
runs ahead on another stream, `target` is only the draft's wait for the target, and a delay of the host counts in the
delayed part.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from time import perf_counter

import torch

from fledge.targets.source import RowIterator

# waiting for rows; the target's pass, or waiting for features; forward pass, loss and backward pass; the sum of
# gradients over ranks, and the update
DATA, TARGET, DRAFT, OPTIMIZER = PARTS = ("data", "target", "draft", "optimizer")


class Stopwatch:
    """Measures the parts of a step on a device. A part lasts from `begin` to the next `begin` or to `end`, and may
    occur several times in a step. `others` holds the seconds of parts outside of the steps."""

    def __init__(self, device: torch.device):
        self.others: dict[str, float] = {}
        self._stream = torch.cuda.current_stream(device) if device.type == "cuda" else None
        self._marks: list[tuple[str | None, torch.cuda.Event | float]] = []

    def begin(self, part: str) -> None:
        self._marks.append((part, self._now()))

    def end(self) -> None:
        """Ends the last part. Must be called before waiting for the device, and `read` after waiting."""
        self._marks.append((None, self._now()))

    def read(self) -> dict[str, float]:
        """The seconds of each of PARTS since the last `read`."""
        marks, self._marks = self._marks, []
        seconds = dict.fromkeys(PARTS, 0.0)
        for (part, start), (_, end) in pairwise(marks):
            if part is not None:
                seconds[part] += end - start if self._stream is None else start.elapsed_time(end) / 1e3
        return seconds

    @contextmanager
    def outside(self, part: str) -> Iterator[None]:
        """Context manager: adds the seconds of a block between two steps to the part in `others`."""
        start = perf_counter()
        yield
        self.others[part] = self.others.get(part, 0.0) + perf_counter() - start

    def rows(self, rows: RowIterator) -> Iterator:
        """Yields the same rows. The wait for a row counts as `data`, and the time after a row arrives as `target`."""
        while True:
            self.begin(DATA)
            row = next(rows, None)
            self.begin(TARGET)
            if row is None:
                return
            yield row

    def _now(self) -> torch.cuda.Event | float:
        if self._stream is None:
            return perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record(self._stream)
        return event
