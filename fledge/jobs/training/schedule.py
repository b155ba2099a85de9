"""The trainer's objective and schedule, from a recipe."""

from __future__ import annotations

import math

from fledge.data.dataset import Rows
from fledge.jobs.training.recipe import ObjectiveRecipe, Recipe
from fledge.train.cod import DropTokens
from fledge.train.objective import Objective
from fledge.train.trainer import Schedule


def make_schedule(recipe: Recipe, rows: Rows, width: int) -> Schedule:
    """The schedule for a draft `width` wide on these rows: the number of steps, from the passes asked for, and the
    learning rate (0.5 / width where none was given)."""
    asked = recipe.schedule
    return Schedule(
        steps=asked.steps or math.ceil(asked.epochs * len(rows.epoch(0)) / asked.rows_per_step),
        lr=asked.lr or 0.5 / width,
        objective=_objective(recipe.objective),
        rows_per_step=asked.rows_per_step,
        warmup=asked.warmup,
        weight_decay=asked.weight_decay,
        clip=asked.clip,
        seed=recipe.seed,
        eval_every=recipe.evaluation.every,
        save_every=asked.save_every,
    )


def _objective(asked: ObjectiveRecipe) -> Objective:
    return Objective(
        depth=asked.depth,
        gamma=asked.gamma,
        loss=asked.loss,
        keep_out_of_vocab=asked.keep_out_of_vocab,
        feature_noise=asked.feature_noise,
        drop=DropTokens(*asked.drop) if asked.drop else None,
    )
