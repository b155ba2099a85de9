"""Distributes requests over batches."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from fledge.decode.batch import Batch
from fledge.decode.request import Request

SMALL_BATCH_SLOTS = 8192  # a batch with at most this many cache slots, padding included, may have any lengths


class BatchScheduler:
    """Distributes requests over batches.

    If the target's cache `pads`, a batch has as many slots for each request as its longest request needs. A request
    that is much longer than the others therefore gets another batch, created by `new_batch`. Otherwise there is one
    batch. A round is one round of each batch.
    """

    def __init__(self, new_batch: Callable[[], Batch], pads: bool):
        self.new_batch, self.pads = new_batch, pads
        self.batches: list[Batch] = []

    @property
    def running(self) -> int:
        """The number of requests that are not complete."""
        return sum(len(batch.running) for batch in self.batches)

    def add(self, requests: Sequence[Request]) -> Iterator[list[Request]]:
        """Adds each request to the first batch that it fits in, or to a new one; prefills and yields as `Batch.add`."""
        assigned: list[tuple[Batch, list[Request]]] = [(batch, []) for batch in self.batches]
        for request in requests:
            fitting = (new for batch, new in assigned if self._fit([*batch.running, *new, request]))
            if (new := next(fitting, None)) is None:
                new = []
                assigned.append((self.new_batch(), new))
            new.append(request)
        self.batches = [batch for batch, _ in assigned]
        for batch, new in assigned:
            yield from batch.add(new)

    def round(self) -> Iterator[list[Request]]:
        """Runs a round of every batch. Yields the requests that tokens were committed to, then removes complete
        ones."""
        for batch in self.batches:
            if batch.running:
                yield batch.round()
        self.batches = self.batches[:1] + [batch for batch in self.batches[1:] if batch.running]

    def _fit(self, requests: Sequence[Request]) -> bool:
        """Whether requests can share a batch: its cache has at most twice the slots that they need, or is small."""
        needed = [r.longest for r in requests]
        return not self.pads or len(needed) * max(needed) <= max(2 * sum(needed), SMALL_BATCH_SLOTS)
