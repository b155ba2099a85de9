"""Captures the rounds of engines as CUDA graphs before the first request, so that no request waits for a capture."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from fledge.decode.request import Completion, Request
from fledge.decode.rounds import graph_size
from fledge.decode.text import TextStream
from fledge.types import Prompt, Sampling

if TYPE_CHECKING:
    from fledge.decode.batch import Batch
    from fledge.decode.engine import Engine

TOKENS = 2048  # default of the most tokens of a request, prompt and answer together
# Counter(label, total) is a context manager, which yields a function to call when one of `total` is done
Counter = Callable[[str, int], AbstractContextManager[Callable[[], None]]]


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
        total = len(sizes) * sum(len(used.proposer.sizes) for _, used in able)
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
