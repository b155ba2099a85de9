"""`fledge train` and `fledge.train_draft`: train a draft for a target on chats or plain text."""

from __future__ import annotations

import contextlib
import difflib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fledge.options import names_of
from fledge.train.setup.options import OUT, TrainOptions, replace_aliases

if TYPE_CHECKING:
    from fledge.train.checkpoint import RunDirectory
    from fledge.train.ranks import Ranks
    from fledge.train.setup.recipe import Recipe
    from fledge.train.trainer import Hook


def run(options: TrainOptions, say: Callable[[str], None], progress: Any, hooks: Sequence[Hook] = ()) -> dict[str, Any]:
    """Trains, or continues a run, and returns the metrics of the last step.

    `say` prints a message, `progress` is a `ProgressDisplay`. `hooks` are called after each step, before the step's
    metrics are written. In a process started by torchrun, all ranks share the run; a process restarted by torchrun
    continues the run in --out.

    Raises KeyboardInterrupt if the training was interrupted, after a message with the command that continues it. Raises
    ValueError for options that contradict each other and for a directory that another process writes to, and
    ConnectionError if another rank failed.
    """
    from fledge.train.setup.recipe_file import complete_options, resolve_recipe, restarted_options
    from fledge.train.setup.run import run_ranks

    options = restarted_options(options)
    with run_ranks(options) as ranks, contextlib.ExitStack() as stack:
        say = say if ranks.leads else lambda line: None
        with ranks.together("while the run was prepared"):
            options, recorded, directory = complete_options(options, ranks.leads, say)
            if ranks.leads:
                stack.enter_context(directory.locked(say))
            recipe = resolve_recipe(options, directory)
        return _train(options, recipe, recorded, directory, ranks, say, progress, hooks)


def _train(
    options: TrainOptions, recipe: Recipe, recorded: dict[str, Any] | None, directory: RunDirectory, ranks: Ranks,
    say: Callable[[str], None], progress: Any, hooks: Sequence[Hook],
) -> dict[str, Any]:  # fmt: skip
    """Trains by a resolved recipe, in a directory locked by rank 0. `recorded` are the settled values of the resumed
    run; None for a new run."""
    from fledge.check.make_probe import make_probe
    from fledge.measure.evaluator import make_evaluator
    from fledge.publish.card import make_card
    from fledge.report.training import report_run
    from fledge.states.vllm import VllmFeatures
    from fledge.train.setup.data import check_files, make_rows, summarize, training_data
    from fledge.train.setup.draft import check_shape, make_draft
    from fledge.train.setup.recipe_file import check_settled, recipe_text, settle
    from fledge.train.setup.run import SAVE_DTYPE, check_disk, choose_implementation, make_schedule, run_training
    from fledge.train.setup.target import prepare_shared_target
    from fledge.train.trainer import Run

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
    training = Run(draft, rows, target.source, schedule, directory, ranks, SAVE_DTYPE, resumed=recorded is not None)
    with ranks.together(where):
        evaluate = make_evaluator(recipe, target, held_out, ranks, say)
        settled = settle(recipe, target, draft, rows, schedule)
        attach = make_probe(recipe, target, training, say), make_card(recipe, target, training, say)
        if ranks.leads:
            check_disk(directory, draft, schedule.optimizer)
        if recorded is not None:
            check_settled(recorded, settled, directory)
            if ranks.leads and not directory.summary.exists():  # the run was killed as it started
                directory.write_summary(summarize(recipe, target, draft, documents, ranks))
        elif ranks.leads:
            summary = summarize(recipe, target, draft, documents, ranks)
            directory.start(recipe_text(replace(options, method=recipe.choice), settled), summary)
    run_training(training, recipe, evaluate, attach, hooks, say, progress)
    if ranks.leads:
        report_run(directory.path, say)
    return training.metrics


@dataclass(frozen=True)
class TrainedDraft:
    """The result of `train_draft`: the directory of the draft, and the metrics of the last step."""

    draft: Path
    metrics: dict[str, Any]


def train_draft(
    *,
    target: str | Path | None = None,
    data: str | Path | Mapping[str, Any] | Sequence[str | Path | Mapping[str, Any]] = (),
    out: str | Path = OUT,
    progress: bool = False,
    hooks: Sequence[Hook] = (),
    **options: Any,
) -> TrainedDraft:
    """Trains a draft as `fledge train` does.

    `target` is a directory or hub id, `data` one or several data sources, and `out` the directory of the run. A source
    with options of its own is a dict, e.g. `{"source": "a.jsonl", "template_kwargs": {"enable_thinking": True}}`.
    Further keywords are the options of the command with underscores, e.g. `steps=1000, draft_vocab=16000`.
    `TrainOptions` lists the options, and `fledge train --help` lists aliases (`model`, `learning_rate`). An option that
    is None counts as not given. `aux_layers` may be a list and `template_kwargs` a dict. `config="recipe.yaml"` takes
    options from a file; keywords override the file's options. `resume="run"`, without other options, continues a
    stopped run. With `progress`, messages and a progress bar are printed to standard error; without, nothing is
    printed. `hooks` are called after each step (`fledge.train.trainer.Hook`). Raises TypeError for an unknown option,
    ValueError if the options or data are not valid, and KeyboardInterrupt after an interrupted run has saved the
    checkpoint.
    """
    from fledge.io.display import ProgressDisplay

    train_options = _options(target, data, out, options)
    display = ProgressDisplay(quiet=not progress)
    metrics = run(train_options, display.say, display, hooks)
    return TrainedDraft(Path(train_options.resume or train_options.out) / "draft", metrics)


def _options(target: Any, data: Any, out: Any, options: dict[str, Any]) -> TrainOptions:
    """The options as `TrainOptions`. An option counts as given unless it is None or a default of `train_draft`."""
    from fledge.train.setup.recipe_file import as_option

    named = {"target": target, "data": data or None, "out": None if out == OUT else out} | options
    options = replace_aliases({name: value for name, value in named.items() if value is not None}, str)
    known = names_of(TrainOptions)
    if unknown := options.keys() - set(known):
        name = min(unknown)
        near = difflib.get_close_matches(name, known, 1)
        cure = f"did you mean {near[0]}?" if near else "TrainOptions lists them"
        raise TypeError(f"{name} is not an option of training; {cure}")
    if options.get("dry_run"):
        raise ValueError("dry_run is an option of the command, fledge train --dry-run; leave it out")
    options = {name: as_option(name, _plain(value)) for name, value in options.items()}
    defaults = {"data": [], "out": OUT}
    given = {name for name, value in options.items() if value != defaults.get(name)}
    return TrainOptions(**options, given=frozenset(given))


def _plain(value: Any) -> Any:
    """A path, or the name of a torch dtype, as a string, and a sequence as a list of such values; other values
    unchanged."""
    import torch

    if isinstance(value, Sequence) and not isinstance(value, str):
        return [_plain(one) for one in value]
    return str(value).removeprefix("torch.") if isinstance(value, Path | torch.dtype) else value
