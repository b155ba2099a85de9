"""How steps are computed on this device: on a GPU, so that they fit, which is found by trying the heaviest rows."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from fledge.data.dataset import Rows
from fledge.jobs.training.recipe import ComputeRecipe
from fledge.models.draft import Draft
from fledge.targets.source import FeatureSource
from fledge.train.memory import (
    CPU_SLOTS,
    MIN_TOKENS,
    USABLE_FRACTION,
    Trial,
    candidates,
    choose,
    longest_row,
    resize_row,
)
from fledge.train.objective import Implementation, ttt
from fledge.train.prefetch import with_features
from fledge.train.trainer import Schedule

Say = Callable[[str], None]


def choose_implementation(
    compute: ComputeRecipe, draft: Draft, rows: Rows, source: FeatureSource, schedule: Schedule, say: Say
) -> Implementation:
    """The implementation that was asked for, with as many slots in flight as fit. Raises ValueError where none fits.

    On a GPU, with `compute.longest_row`, the longest row that fits is looked for and said instead.
    """
    fast = "eager" if compute.impl == "eager" else "triton"
    implementation = Implementation(attention=compute.impl, loss=fast, layers=fast)
    if not compute.gpu:
        return replace(implementation, slots=compute.slots or CPU_SLOTS)
    asked = candidates(implementation, slots=compute.slots, activations=compute.activations)
    trial = _trial(draft, rows, source, schedule)
    _warm_up(trial, asked[-1])
    free, _ = torch.cuda.mem_get_info(draft.device)
    available = free + torch.cuda.memory_reserved(draft.device)

    def tried(tokens: int, taken: int | None) -> None:
        say(row_tried(tokens, taken, available))

    if compute.longest_row:
        say(_longest(longest_row(trial, asked[-1], available, tried), asked[-1], rows))
        return asked[-1]
    chosen, taken = choose(trial, asked, available, tried)
    say(_chosen(chosen, taken, available, rows))
    return chosen


def _trial(draft: Draft, rows: Rows, source: FeatureSource, schedule: Schedule) -> Trial:
    """A step to try on the rows that ask most of it."""

    def step(row: Any, implementation: Implementation) -> Any:
        upcoming = with_features([row, row], source.features, draft.device, prefetch=implementation.prefetch)
        row, features = next(upcoming)
        ttt(draft, row, features, source.logits, schedule.objective, implementation)
        return upcoming  # which holds the next row's features

    return Trial(draft, rows.heaviest(), step, schedule.rows_per_step)


def _warm_up(trial: Trial, implementation: Implementation) -> None:
    """Runs lazy initialisation before memory is measured."""
    trial.step(resize_row(trial.rows[0], MIN_TOKENS), implementation)
    trial.draft.zero_grad(set_to_none=True)


def _longest(tokens: int, implementation: Implementation, rows: Rows) -> str:
    return (
        f"with {implementation.slots:,} slots in flight a row of {tokens:,} tokens fits, of documents of at most "
        f"{max(d.tokens.numel() for d in rows.documents):,}, and none that is a tenth longer"
    )


def _chosen(chosen: Implementation, taken: int, available: int, rows: Rows) -> str:
    return (
        f"about {taken / 2**30:.1f} of {available / 2**30:.1f} GiB for rows of {rows.row_length:,} tokens, computed by "
        f"{chosen.attention}, {chosen.slots:,} slots in flight"
        + (", the MLP's activations computed again" if chosen.recompute else "")
        + (", the target one row ahead" if chosen.prefetch else "")
    )


def row_tried(tokens: int, taken: int | None, available: int) -> str:
    """What a row of so many tokens takes of the available bytes; `taken` None: more than those."""
    if taken is None:
        return f"a row of {tokens:,} tokens is too much"
    over = f", too much: {1 - USABLE_FRACTION:.0%} must stay free" if taken > USABLE_FRACTION * available else ""
    return f"a row of {tokens:,} tokens takes {taken / 2**30:.1f} of {available / 2**30:.1f} GiB{over}"
