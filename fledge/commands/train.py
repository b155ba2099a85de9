"""`fledge train`: trains a draft for a target on chats or plain text."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from fledge.train.setup.launch import restarted_options, run_ranks
from fledge.train.setup.options import TrainOptions

if TYPE_CHECKING:
    from fledge.train.checkpoint import RunDirectory
    from fledge.train.ranks import Ranks
    from fledge.train.setup.recipe import Recipe


def run(options: TrainOptions, say: Callable[[str], None], progress: Any) -> dict[str, Any]:
    """Trains, or continues a run, and returns the metrics of the last step.

    `say` prints a message, `progress` is a `ProgressDisplay`. In a process that torchrun started, the run is shared
    with the other ranks; one that torchrun started again continues the run in --out.

    Raises KeyboardInterrupt if the training was interrupted, after a message with the command that continues it. Raises
    ValueError for options that contradict each other and for a directory that another process writes to, and
    ConnectionError if another rank failed.
    """
    options = restarted_options(options)
    with run_ranks(options) as ranks:
        return _run_as_rank(options, ranks, say if ranks.leads else lambda line: None, progress)


def _run_as_rank(options: TrainOptions, ranks: Ranks, say: Callable[[str], None], progress: Any) -> dict[str, Any]:
    from fledge.train.setup.recipe_file import complete_options, resolve_recipe

    with contextlib.ExitStack() as stack:
        with ranks.together("while the run was prepared"):
            options, recorded, directory = complete_options(options, ranks.leads, say)
            if ranks.leads:
                stack.enter_context(directory.locked(say))
            recipe = resolve_recipe(options, directory)
        return _train(options, recipe, recorded, directory, ranks, say, progress)


def _train(
    options: TrainOptions, recipe: Recipe, recorded: dict[str, Any] | None, directory: RunDirectory, ranks: Ranks,
    say: Callable[[str], None], progress: Any,
) -> dict[str, Any]:  # fmt: skip
    """Trains by a resolved recipe, in a directory that rank 0 has locked. `recorded` are the settled values of the run
    that is resumed; None for a new run."""
    from fledge.check.make_probe import make_probe
    from fledge.measure.evaluator import make_evaluator
    from fledge.publish.card import with_card
    from fledge.report.page import report_run
    from fledge.states.vllm_source import VllmFeatures
    from fledge.train.setup.data import check_files, make_rows, training_data
    from fledge.train.setup.draft import check_shape, make_draft
    from fledge.train.setup.implementation import choose_implementation
    from fledge.train.setup.recipe_file import check_settled, recipe_text
    from fledge.train.setup.run import SAVE_DTYPE, TrainingRun, check_disk, run_training
    from fledge.train.setup.schedule import make_schedule
    from fledge.train.setup.settle import settle
    from fledge.train.setup.summary import summarize
    from fledge.train.setup.target import prepare_shared_target

    with ranks.together("while target and data were loaded"):
        if recorded is not None and ranks.leads:
            check_files(recipe.data, directory)
        target = prepare_shared_target(recipe, ranks, options.shard_target, say)
        check_shape(recipe, target)
        documents, held_out = training_data(recipe, target, say, progress)
        if isinstance(target.source, VllmFeatures):
            target.source.check(documents)
        draft = make_draft(recipe, target, documents, say)
        rows = make_rows(recipe, target, documents, say)
        lockstep = target.target.sharded and not ranks.target_ranks
        schedule = make_schedule(recipe, rows, draft.config.hidden_size, ranks, lockstep, say)
        implementation = choose_implementation(recipe.options, draft, rows, target.source, schedule, ranks, say)
    where = "before the first step"
    with ranks.collective(where):
        schedule = replace(schedule, implementation=ranks.from_first(implementation))
    with ranks.together(where):
        evaluate = make_evaluator(recipe, target, held_out, ranks, say)
        settled = settle(recipe, target, draft, rows, schedule)
        attach = make_probe(recipe, target, draft, rows, SAVE_DTYPE, ranks, say)
        attach = with_card(attach, recipe, target, rows, schedule, ranks, say)
        if ranks.leads:
            check_disk(directory, draft, schedule.optimizer)
        if recorded is not None:
            check_settled(recorded, settled, directory)
            if ranks.leads and not directory.summary.exists():  # the run was killed as it started
                directory.write_summary(summarize(recipe, target, draft, documents, ranks))
        elif ranks.leads:
            summary = summarize(recipe, target, draft, documents, ranks)
            directory.start(recipe_text(replace(options, method=recipe.choice), settled), summary)
    training = TrainingRun(
        recipe, draft, rows, target.source, schedule, evaluate, attach, report_run, directory,
        resumed=recorded is not None, ranks=ranks,
    )  # fmt: skip
    return run_training(training, say, progress)
