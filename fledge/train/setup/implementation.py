"""Chooses how training steps are computed. On a GPU, tries the heaviest rows to find settings that fit in memory."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from fledge.data.pack import Rows
from fledge.drafts.draft import Draft
from fledge.targets.source import FeatureSource
from fledge.train.memory import (
    CPU_SLOTS,
    MIN_TOKENS,
    USABLE_FRACTION,
    Trial,
    candidates,
    choose,
    resize_row,
)
from fledge.train.objective import ttt
from fledge.train.ranks import Ranks
from fledge.train.row_pass import Implementation
from fledge.train.setup.options import ComputeOptions
from fledge.train.trainer import Schedule, with_features

Say = Callable[[str], None]


def choose_implementation(
    compute: ComputeOptions, draft: Draft, rows: Rows, source: FeatureSource, schedule: Schedule, ranks: Ranks, say: Say
) -> Implementation:
    """The requested implementation, with as many slots in flight as fit in GPU memory. Raises ValueError if none fits.
    A rank that holds only the target tries nothing.
    """
    asked = implementations(compute)
    if not compute.gpu or not ranks.trains:
        return asked[0]
    trial = _trial(draft, rows, source, schedule, ranks)
    _warm_up(trial, asked[-1])
    free, _ = torch.cuda.mem_get_info(draft.device)
    available = free + torch.cuda.memory_reserved(draft.device)

    def report(tokens: int, taken: int | None) -> None:
        say(trial_message(tokens, taken, available))

    chosen, taken = choose(trial, asked, available, report)
    say(_choice_message(chosen, taken, available, rows))
    return chosen


def implementations(compute: ComputeOptions) -> list[Implementation]:
    """The requested implementations to choose from, from fast to small; a single one on a CPU."""
    fast = "eager" if compute.impl == "eager" else "triton"
    implementation = Implementation(attention=compute.impl, loss=fast, layers=fast)
    if not compute.gpu:
        return [replace(implementation, slots=compute.slots or CPU_SLOTS)]
    return candidates(implementation, slots=compute.slots, activations=compute.activations)


def _trial(draft: Draft, rows: Rows, source: FeatureSource, schedule: Schedule, ranks: Ranks) -> Trial:
    """A training step of one rank, to try on the rows that need the most memory."""

    def step(row: Any, implementation: Implementation) -> Any:
        upcoming = with_features([row, row], source.features, draft.device, prefetch=implementation.prefetch)
        row, features = next(upcoming)
        ttt(draft, row, features, source.logits, schedule.objective, implementation)
        return upcoming  # the iterator holds the features of the next row, which count too

    own_rows = -(-schedule.rows_per_step // ranks.size)
    # without sources, so that features on disk are not read, which may not exist yet (see `DiskFeatures`)
    heaviest = [replace(row, sources=()) for row in rows.heaviest()]
    return Trial(draft, heaviest, step, own_rows, ranks.size if ranks.shards else 1, schedule.optimizer)


def _warm_up(trial: Trial, implementation: Implementation) -> None:
    """Runs one small step, so that memory of lazy initialization is not measured with the trials."""
    trial.step(resize_row(trial.rows[0], MIN_TOKENS), implementation)
    trial.draft.zero_grad(set_to_none=True)


def _choice_message(chosen: Implementation, taken: int, available: int, rows: Rows) -> str:
    return (
        f"rows of {rows.row_length:,} tokens take about {taken / 2**30:.1f} of {available / 2**30:.1f} GiB with "
        f"--impl {chosen.attention} and {chosen.slots:,} slots in flight"
        + (", recomputing the MLP's activations" if chosen.recompute else "")
        + (", preparing the features of the next row meanwhile" if chosen.prefetch else "")
    )


def trial_message(tokens: int, taken: int | None, available: int) -> str:
    """A message about a tried row: the bytes it takes, or None if it needs more than the available bytes."""
    if taken is None:
        return f"a row of {tokens:,} tokens does not fit in GPU memory"
    too_much = taken > USABLE_FRACTION * available
    over = f", which is too much: {1 - USABLE_FRACTION:.0%} must stay free" if too_much else ""
    return f"a row of {tokens:,} tokens takes {taken / 2**30:.1f} of {available / 2**30:.1f} GiB{over}"
