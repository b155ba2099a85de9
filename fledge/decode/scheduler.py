"""The requests of an engine: the time of admission, the batch of each request, and the work of a step. `prepare`
captures the rounds of engines as CUDA graphs before the first request, so that no request waits for a capture."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from fledge.decode.batch import Batch
from fledge.decode.draft_size import fitting
from fledge.decode.request import Completion, Request
from fledge.decode.rounds import graph_size
from fledge.decode.text import TextStream
from fledge.types import Prompt, Sampling

if TYPE_CHECKING:
    from fledge.decode.engine import Engine

SMALL_BATCH_SLOTS = 8192  # a batch with at most this many cache slots, padding included, may have any lengths
BEGINNING = 0.005  # seconds for which an admission stops the running requests, besides the work per admitted request
TOKENS = 2048  # default of the most tokens of a request, prompt and answer together
# Counter(label, total) is a context manager, which yields a function to call when one of `total` is done
Counter = Callable[[str, int], AbstractContextManager[Callable[[], None]]]


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
                batch.settle()

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
        batch.kind, batch.chooser = kind, self.chooser if kind[0] else None
        self.batches.append(batch)
        return batch

    def _remove(self, batch: Batch) -> None:
        self.batches.remove(batch)
        self.engine.put_back(batch)

    def _fit(self, requests: Sequence[Request]) -> bool:
        """Whether requests can share a batch: the batch's cache has at most twice the needed slots, or is small."""
        needed = [r.longest for r in requests]
        return not self.pads or len(needed) * max(needed) <= max(2 * sum(needed), SMALL_BATCH_SLOTS)


@dataclass(frozen=True)
class Prepared:
    """The result and cost of capturing: the number of kinds of `rounds`, the `seconds`, and the `bytes` of memory taken
    on the GPUs, room for the requests' caches included."""

    rounds: int = 0
    seconds: float = 0.0
    bytes: int = 0

    def __str__(self) -> str:
        rounds = f"{self.rounds} round{'s' * (self.rounds > 1)}"
        return f"captured {rounds} in {self.seconds:.1f} s, {self.bytes / 2**30:.1f} GiB"


@contextmanager
def no_count(label: str, total: int) -> Iterator[Callable[[], None]]:
    """A counter that shows nothing."""
    yield lambda: None


def prepare(
    arms: Sequence[tuple[Engine, bool]], batch: int = 1, *, tokens: int | None = None, sampling: Sampling | None = None,
    count: Counter = no_count,
) -> Prepared:  # fmt: skip
    """Captures the rounds of several engines, with the draft (True) or without (False). Engines may share a target.

    All draft sizes that an engine may choose are captured, for each number of requests up to `batch` that has
    graphs of its own. See `Engine.prepare`.
    """
    sampling = sampling or Sampling()
    for engine, speculate in arms:
        if speculate and engine.draft is not None:
            engine.drafting.check_sampling(sampling)
    kinds = {(engine, drafts): None for engine, speculate in arms for drafts in _kinds(engine, speculate)}
    taken = [(engine, engine.take_batch(drafts)) for engine, drafts in kinds]
    with ExitStack() as stack:
        for engine, used in taken:
            stack.callback(engine.put_back, used)
        able = [(engine, used) for engine, used in taken if used.captures and not sampling.processors]
        if not able:
            return Prepared()
        began, before = time.perf_counter(), _reserved_bytes(taken)
        # room in all caches first, and for the longest segments: graphs become invalid when a cache grows
        rooms = [(min(tokens or TOKENS, engine.target.context), used) for engine, used in able]
        for longest, used in sorted(rooms, key=lambda room: room[1].slots(room[0]), reverse=True):
            used.make_room(batch, longest)
        sizes = sorted({graph_size(n) for n in range(1, batch + 1)})
        total = sum(len(fitting(used.proposer.shapes, n)) for n in sizes for _, used in able)
        with count("capturing rounds", total) as advance:
            rounds = sum(used.prepare(_request(engine, sampling), sizes, advance) for engine, used in able)
        return Prepared(rounds, time.perf_counter() - began, _reserved_bytes(taken) - before)


def _kinds(engine: Engine, speculate: bool) -> list[bool]:
    """The kinds of batches that an engine uses: with the draft (True), without (False), or both where drafts rest."""
    if not speculate or engine.draft is None:
        return [False]
    return [True] if engine.chooser is None else [True, False]


def _request(engine: Engine, sampling: Sampling) -> Request:
    """A request that is never answered."""
    return Request(0, Prompt([0, 0]), sampling, TextStream(engine.target.tokenizer, ()), 2, frozenset(), Completion())


def _reserved_bytes(batches: Sequence[tuple[Engine, Batch]]) -> int:
    """The bytes that this process holds on the batches' GPUs, without memory cached for later allocations."""
    devices = {
        d for _, b in batches for d in (b.target.device, *([b.proposer.draft.device] if b.proposer.draft else []))
    }
    gpus = [device for device in devices if device.type == "cuda"]
    if gpus:
        torch.cuda.empty_cache()  # as a capture does, so that a difference of two calls is the captured memory
    return sum(torch.cuda.memory_reserved(device) for device in gpus)
