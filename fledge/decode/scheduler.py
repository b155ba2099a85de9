"""When waiting requests begin, and in which batches."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence

from fledge.decode.batch import Batch
from fledge.decode.request import Request

SMALL_BATCH_SLOTS = 8192  # a batch with at most this many cache slots, padding included, may have any lengths
BEGINNING = 0.005  # seconds for which a beginning stops the running requests, besides its work for each that begins


class Beginning:
    """When requests begin, of which at most `batch` are decoded together.

    Each beginning stops the running requests for a prefill, which takes some time however few begin. So a free place is
    left empty, in the hope that others become free, until with the next round the free places would have lost as much
    time as a beginning takes from all running requests. No place is left empty if nothing runs, or if all waiting
    requests have a place.
    """

    def __init__(self, batch: int, clock: Callable[[], float] = time.perf_counter):
        """`clock` returns seconds."""
        self.batch, self.clock = batch, clock
        self.free, self.since = 0, clock()  # the places that are left empty, and since when
        self.lost = 0.0  # the seconds that places were left empty, added up

    def count(self, running: int, waiting: int) -> int:
        """How many of the waiting requests begin now. Called before each round."""
        now, places = self.clock(), min(self.batch - running, waiting)
        round_ = now - self.since
        self.lost += self.free * round_
        self.free, self.since = places, now
        if running and 0 < places < waiting and self.lost + places * round_ < BEGINNING * running:
            return 0
        self.free, self.lost = 0, 0.0
        return places


class BatchScheduler:
    """Distributes requests over batches.

    If the target's cache `pads`, a batch has as many slots for each request as its longest request needs. A request
    that is much longer than the others therefore gets another batch. Otherwise there is one batch. A round is one round
    of each batch. While no request runs, `drafts` may be changed: whether requests are decoded with the draft.
    """

    def __init__(self, take: Callable[[bool], Batch], put_back: Callable[[Batch], None], pads: bool, drafts: bool):
        """`take` returns a batch without requests, with a draft or without one, and `put_back` takes it back."""
        self.take, self.put_back, self.pads, self.drafts = take, put_back, pads, drafts
        self.batches: list[Batch] = []

    @property
    def running(self) -> int:
        """The number of requests that are not complete."""
        return sum(len(batch.running) for batch in self.batches)

    def add(self, requests: Sequence[Request]) -> Iterator[list[Request]]:
        """Adds each request to the first batch that it fits in, or to a new one; prefills and yields as `Batch.add`."""
        if not self.running and any(batch.drafts != self.drafts for batch in self.batches):
            self.close()
        new: dict[Batch, list[Request]] = {batch: [] for batch in self.batches}
        for request in requests:
            fitting = (batch for batch in new if self._fit([*batch.running, *new[batch], request]))
            if (batch := next(fitting, None)) is None:
                batch = self._open()
                new[batch] = []
            new[batch].append(request)
        for batch, added in new.items():
            yield from batch.add(added)

    def round(self) -> Iterator[list[Request]]:
        """Runs a round of every batch. Yields the requests that tokens were committed to, then removes complete ones.
        The requests of a batch that rests go on in a batch without a draft."""
        for batch in self.batches[:]:
            if batch.running:
                yield batch.round()
            if batch.rests:
                self.drafts = False
                plain = self._open()
                yield plain.take_over(batch)
            if not batch.running and len(self.batches) > 1:
                self.batches.remove(batch)
                self.put_back(batch)

    def close(self) -> None:
        """Gives all batches back, with their requests, complete or not."""
        while self.batches:
            self.put_back(self.batches.pop())

    def _open(self) -> Batch:
        """Another batch."""
        self.batches.append(batch := self.take(self.drafts))
        return batch

    def _fit(self, requests: Sequence[Request]) -> bool:
        """Whether requests can share a batch: its cache has at most twice the slots that they need, or is small."""
        needed = [r.longest for r in requests]
        return not self.pads or len(needed) * max(needed) <= max(2 * sum(needed), SMALL_BATCH_SLOTS)
