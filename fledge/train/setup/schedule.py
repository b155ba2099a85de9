"""Makes the trainer's schedule from a recipe."""

from __future__ import annotations

import math
from collections.abc import Callable

from fledge.data.pack import Rows
from fledge.train.ranks import Ranks
from fledge.train.setup.recipe import Recipe
from fledge.train.trainer import Schedule


def make_schedule(
    recipe: Recipe, rows: Rows, width: int, ranks: Ranks, lockstep: bool, say: Callable[[str], None]
) -> Schedule:
    """The schedule for a draft with hidden size `width` on these rows. The number of steps follows from the epochs, the
    default learning rate is 0.5 / width, and by default a step has one row for each rank. With `lockstep`, every rank
    must have as many rows; raises ValueError if they cannot."""
    requested = recipe.options
    rows_per_step = requested.rows_per_step or ranks.size
    if rows_per_step % ranks.size and lockstep:
        raise ValueError(
            f"--rows-per-step {rows_per_step} with --shard-target on {ranks.size} GPUs: every GPU must have as many "
            f"rows; give {ranks.size}, {2 * ranks.size}, .."
        )
    if rows_per_step % ranks.size:
        idle = "some ranks wait in every step" if rows_per_step > ranks.size else "some ranks have nothing to do"
        say(f"{rows_per_step} rows a step for {ranks.size} ranks: {idle}; --rows-per-step should be a multiple")
    epoch = len(rows.epoch(0))
    if requested.rows_per_step and rows_per_step > epoch:
        say(
            f"--rows-per-step {rows_per_step}, but an epoch has {epoch} rows: a step takes each of them up to "
            f"{math.ceil(rows_per_step / epoch)} times; give at most {epoch}"
        )
    return Schedule(
        steps=requested.steps or math.ceil(requested.epochs * epoch / rows_per_step),
        lr=requested.lr or 0.5 / width,
        objective=recipe.objective,
        rows_per_step=rows_per_step,
        warmup=requested.warmup,
        optimizer=requested.optimizer,
        weight_decay=requested.weight_decay,
        clip=requested.clip,
        seed=requested.seed,
        eval_every=requested.eval_every,
        save_every=requested.save_every,
    )
