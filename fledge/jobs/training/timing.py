"""Times a few optimizer steps of a run that is not begun. What they train is thrown away."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch

from fledge.data.dataset import Rows
from fledge.models.draft import Draft
from fledge.targets.source import FeatureSource
from fledge.train.feed import AFTER, BEFORE, feed
from fledge.train.optim import MasterOptimizer
from fledge.train.ranks import Ranks
from fledge.train.trainer import Progress, Schedule, optimizer_step, upcoming_rows

WARM_UP, TIMED = 2, 3  # steps; the first ones compile kernels


@dataclass(frozen=True)
class Timing:
    """The seconds of the timed steps together, their tokens without filler, and the peak of the bytes allocated on this
    rank's GPU; None on a CPU."""

    seconds: float
    tokens: int
    peak: int | None


def time_steps(
    draft: Draft, rows: Rows, source: FeatureSource, schedule: Schedule, ranks: Ranks, progress: Any
) -> Timing:
    """Times TIMED optimizer steps on the first rows, after WARM_UP steps; the draft is trained by all of them.

    Every rank calls this; one that holds only the target times nothing. Raises FloatingPointError as `optimizer_step`
    does."""
    gpu = draft.device.type == "cuda"
    synchronize: Callable[[], Any] = (lambda: torch.cuda.synchronize(draft.device)) if gpu else (lambda: None)
    schedule = replace(schedule, steps=WARM_UP + TIMED + 1)  # the last step too computes the next row's features
    state = Progress()
    if not ranks.trains:
        lockstep, done = source.target.sharded, WARM_UP + TIMED
        feed(source, rows, draft, schedule, state, ranks, lockstep=lockstep, until=done)
        return Timing(0.0, 0, None)
    with ranks.collective(BEFORE):
        ranks.copy_from_first([*draft.parameters(), *draft.buffers()])
    given = schedule.betas, schedule.weight_decay, ranks, schedule.optimizer
    optimizer = MasterOptimizer(draft.named_parameters(), *given)
    tokens, began = 0, 0.0
    with (
        upcoming_rows(rows, state, schedule, source, draft.device, ranks) as upcoming,
        progress.count("timing steps", WARM_UP + TIMED) as advance,
    ):
        for step in range(WARM_UP + TIMED):
            if step == WARM_UP:
                if gpu:
                    torch.cuda.reset_peak_memory_stats(draft.device)
                synchronize()
                ranks.sum(torch.zeros(()))  # so that all begin together
                tokens, began = 0, time.perf_counter()
            tokens += optimizer_step(draft, rows, upcoming, source, schedule, optimizer, state, ranks).tokens
            state.step += 1
            advance()
    synchronize()
    seconds = time.perf_counter() - began
    if ranks.target_ranks:
        source.finish(state.step)
        ranks.meet(AFTER, None)
    return Timing(seconds, tokens, torch.cuda.max_memory_allocated(draft.device) if gpu else None)
