"""The requests of an engine: the time of admission, the batch of each request, and the work of a step."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

from fledge.decode.batch import Batch
from fledge.decode.request import Request

if TYPE_CHECKING:
    from fledge.decode.engine import Engine

SMALL_BATCH_SLOTS = 8192  # a batch with at most this many cache slots, padding included, may have any lengths
BEGINNING = 0.005  # seconds for which an admission stops the running requests, besides the work per admitted request


class Beginning:
    """The admission of requests to a batch of at most `batch` requests.

    Each admission stops the running requests for a prefill, at a fixed cost however few requests are admitted. A free
    place is therefore left empty, in the hope that more places become free, until the next round would raise the time
    lost by free places to the time that an admission takes from all running requests. No place is left empty if no
    request runs, or if all waiting requests have a place.
    """

    def __init__(self, batch: int, clock: Callable[[], float] = time.perf_counter):
        """`clock` returns seconds."""
        self.batch, self.clock = batch, clock
        self.free, self.since = 0, clock()  # the number of places left empty, and the time since when
        self.lost = 0.0  # the seconds that places were left empty, added up

    def count(self, running: int, waiting: int) -> int:
        """The number of waiting requests to admit now. Called before each round."""
        now, places = self.clock(), min(self.batch - running, waiting)
        round_ = now - self.since
        self.lost += self.free * round_
        self.free, self.since = places, now
        if running and 0 < places < waiting and self.lost + places * round_ < BEGINNING * running:
            return 0
        self.free, self.lost = 0, 0.0
        return places


class DecodeLoop:
    """Decodes requests that come and go, at most `places` together.

    Requests with and without the draft are in different batches, and so are requests with drawn and with greedily
    chosen drafted tokens. If the target's cache `pads`, a batch has as many slots for each request as the longest
    request needs; a much longer request therefore gets a batch of its own. A round is one round of each batch. After an
    exception in `step`, only `close` may be called.
    """

    def __init__(self, engine: Engine, places: int):
        self.engine, self.chooser, self.pads = engine, engine.chooser, engine.target.pads
        self.waiting: deque[Request] = deque()
        self.beginning = Beginning(places)
        self.prefills: Iterator[list[Request]] | None = None  # of the requests that begin
        self.batches: list[Batch] = []
        self.rests = False  # whether requests that ask for a draft are decoded without it

    @property
    def running(self) -> int:
        """The number of requests that have begun and are not complete."""
        return sum(len(batch.running) for batch in self.batches)

    def step(self) -> list[Request]:
        """Runs a prefill of admitted requests, or a round. Returns the requests that got tokens; an empty list if all
        requests are complete."""
        updated: list[Request] = []
        while not updated and (self.waiting or self.running or self.prefills is not None):
            if self.prefills is None and (count := self.beginning.count(self.running, len(self.waiting))):
                self.prefills = self._begin([self.waiting.popleft() for _ in range(count)])
            if self.prefills is None:
                updated = self._round()
            elif (prefilled := next(self.prefills, None)) is None:
                self.prefills, updated = None, self._round()
            else:  # `prefilled` is empty between two parts of a prompt
                updated = prefilled or self._round()
        return updated

    def abort(self, request: Request) -> None:
        """Ends a request and frees its memory at once."""
        request.over = True
        if request in self.waiting:
            self.waiting.remove(request)
        for batch in self.batches:
            if request in batch.running:
                batch.dismiss()

    def close(self) -> None:
        """Gives all batches back to the engine, with their requests, complete or not."""
        self.prefills = None
        while self.batches:
            self.engine.put_back(self.batches.pop())

    def _begin(self, requests: Sequence[Request]) -> Iterator[list[Request]]:
        """Adds each request to the first batch with room, or to a new batch. Prefills and yields as `Batch.add`."""
        drafting = [r for r in requests if r.drafts]
        if drafting and self.chooser is not None and not any(b.running and b.kind[0] for b in self.batches):
            self.rests = self.chooser.rests(len(drafting))
        for batch in [b for b in self.batches if not b.running and b.drafts != (b.kind[0] and not self.rests)]:
            self._remove(batch)
        new: dict[Batch, list[Request]] = {batch: [] for batch in self.batches}
        for request in requests:
            kind = request.drafts, request.sampling.samples_draft
            fitting = (b for b in new if b.kind == kind and self._fit([*b.running, *new[b], request]))
            if (batch := next(fitting, None)) is None:
                batch = self._open(kind)
                new[batch] = []
            new[batch].append(request)
        running = self.running > 0
        return (updated for batch, added in new.items() for updated in batch.add(added, running))

    def _round(self) -> list[Request]:
        """Runs a round of every batch. The requests of a batch that rests go on in a batch without a draft."""
        updated: list[Request] = []
        for batch in self.batches[:]:
            if batch.running:
                updated += batch.round()
            if batch.rests:
                self.rests = True
                updated += self._open(batch.kind).take_over(batch)
            if not batch.running and len(self.batches) > 1 and self.prefills is None:  # a prefill may be for the batch
                self._remove(batch)
        return updated

    def _open(self, kind: tuple[bool, bool]) -> Batch:
        """Opens a batch. `kind` tells whether the batch's requests (1) ask for a draft and (2) draw drafted tokens."""
        batch = self.engine.take_batch(kind[0] and not self.rests)
        batch.kind, batch.records, batch.chooser = kind, kind[0], self.chooser if kind[0] else None
        self.batches.append(batch)
        return batch

    def _remove(self, batch: Batch) -> None:
        self.batches.remove(batch)
        self.engine.put_back(batch)

    def _fit(self, requests: Sequence[Request]) -> bool:
        """Whether requests can share a batch: the batch's cache has at most twice the needed slots, or is small."""
        needed = [r.longest for r in requests]
        return not self.pads or len(needed) * max(needed) <= max(2 * sum(needed), SMALL_BATCH_SLOTS)
