"""Runs the trainer, displays its progress, and prints how it ended and how to continue."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from fledge.data.pack import Rows
from fledge.drafts.draft import Draft
from fledge.io.display import format_bytes
from fledge.io.files import existing_parent
from fledge.targets.source import FeatureSource
from fledge.train.checkpoint import RunDirectory
from fledge.train.optim import state_bytes
from fledge.train.ranks import LostRankError, Ranks
from fledge.train.setup.recipe import Recipe
from fledge.train.trainer import Attach, Progress, Schedule, feed_draft, train

SAVE_DTYPE = torch.bfloat16  # of the drafts that are written

Say = Callable[[str], None]
Logger = Callable[[dict[str, Any]], None]


@dataclass(frozen=True)
class TrainingRun:
    """The components of a training run. `evaluate` measures the τ of a draft, or is None. `attach` makes the files that
    are written together with a draft. `report_run` draws the report of a complete run. `resumed` tells
    whether the directory holds a run to continue."""

    recipe: Recipe
    draft: Draft
    rows: Rows
    source: FeatureSource
    schedule: Schedule
    evaluate: Callable[[Draft], dict[str, Any]] | None
    attach: Attach
    report_run: Callable[[Path, Say], None]
    directory: RunDirectory
    resumed: bool
    ranks: Ranks


def run_training(run: TrainingRun, say: Say, progress: Any) -> dict[str, Any]:
    """Trains to the last step and returns its metrics. `progress` displays each step.

    Raises KeyboardInterrupt if the training was interrupted, after a message with the command that continues it, and
    ValueError, with a remedy, if the GPU runs out of memory. An error about a rank that was lost has that command, too.
    """
    with _naming_command(run):
        return _run(run, say, progress) if run.ranks.trains else _feed(run)


@contextmanager
def _naming_command(run: TrainingRun) -> Iterator[None]:
    """Context manager: an error about a rank that was lost gets the command that continues the run."""
    try:
        yield
    except LostRankError as e:
        raise LostRankError(_stop_message(run, str(e))) from e


def disk_space(directory: RunDirectory, draft: Draft, optimizer: str) -> tuple[int, int]:
    """The bytes that a run still writes to its directory, and the free bytes of the directory's disk.

    `optimizer` is the optimizer's `kind`. Draft and checkpoint count twice, since a new copy is complete before the old
    copy is removed.
    """
    weights = SAVE_DTYPE.itemsize * sum(p.numel() for p in draft.parameters())
    files = (file for path in (directory.draft, directory.checkpoint) for file in path.rglob("*") if file.is_file())
    needed = 2 * (2 * weights + state_bytes(draft, optimizer)) - sum(file.stat().st_size for file in files)
    return max(needed, 0), shutil.disk_usage(existing_parent(directory.path)).free


def check_disk(directory: RunDirectory, draft: Draft, optimizer: str) -> None:
    """Raises ValueError if what a run still writes to its directory is more than the disk has free."""
    needed, free = disk_space(directory, draft, optimizer)
    if needed > free:
        raise ValueError(
            f"the disk has too little space to save the run in {directory.path}: its draft and its checkpoint, each "
            f"twice while a new one replaces it, need {format_bytes(needed)}, and {format_bytes(free)} are free; free "
            "some disk space, or choose another --out"
        )


def _run(run: TrainingRun, say: Say, progress: Any) -> dict[str, Any]:
    """`run_training` in a rank that trains."""
    say(_start_message(run))
    metrics: dict[str, Any] = {}
    report = _reporter(run, metrics, progress) if run.ranks.leads else metrics.update
    progress.start_training("training", run.schedule.steps)
    try:
        state = train(
            run.draft, run.rows, run.source, run.schedule, run.directory,
            save_dtype=SAVE_DTYPE, evaluate=run.evaluate, attach=run.attach, resume=run.resumed,
            report=report, say=say, stop=lambda: progress.stderr_closed, ranks=run.ranks,
        )  # fmt: skip
    except KeyboardInterrupt:
        progress.close()
        say(_stop_message(run, "stopped at once"))
        raise
    except torch.OutOfMemoryError as e:
        raise ValueError(f"the GPU ran out of memory; {_out_of_memory_advice(run)}") from e
    finally:
        progress.close()
    if state.step < run.schedule.steps:
        say(_stop_message(run, f"stopped after step {state.step}"))
        raise KeyboardInterrupt
    result = f"trained in {state.seconds:.0f} s" if metrics else "this run was already finished"
    say(f"{result}; the draft is {run.directory.draft}{_best_step_note(state, run.schedule)}")
    if run.ranks.leads:
        run.report_run(run.directory.path, say)
    return metrics


def _feed(run: TrainingRun) -> dict[str, Any]:
    """`run_training` in a rank that holds only the target."""
    lockstep = run.source.target.sharded
    state = feed_draft(
        run.draft, run.rows, run.source, run.schedule, run.ranks, lockstep=lockstep, evaluate=run.evaluate
    )
    if state.step < run.schedule.steps:
        raise KeyboardInterrupt
    return {}


def _reporter(run: TrainingRun, metrics: dict[str, Any], progress: Any) -> Callable[[dict[str, Any]], None]:
    """A function that displays and logs the metrics of a step, and stores them in `metrics`."""
    log = make_logger(run.recipe.options.log, run.directory.path)

    def report(step_metrics: dict[str, Any]) -> None:
        metrics.update(step_metrics)
        progress.step(run.schedule.steps, step_metrics)
        log(step_metrics)

    return report


def _start_message(run: TrainingRun) -> str:
    trained = sum(p.numel() for p in run.draft.parameters() if p.requires_grad)
    schedule = run.schedule
    ranks = run.ranks
    devices = run.recipe.options.device if ranks.total == 1 else f"{ranks.size} rank{'s' * (ranks.size > 1)}"
    if ranks.target_ranks:
        devices += f", fed by {ranks.target_ranks} with the target"
    return (
        f"training {trained:,} parameters on {devices}, {schedule.steps:,} steps of "
        f"{schedule.rows_per_step} x {run.rows.row_length:,} tokens, lr {schedule.lr:.2g}"
    )


def _stop_message(run: TrainingRun, event: str) -> str:
    trust = " --trust-remote-code" if run.recipe.options.trust_remote_code else ""
    command = f"fledge train --resume {run.directory.path}{trust}"
    if not run.directory.checkpoint.exists():
        return f"{event}, before the first checkpoint; start again with: {command}"
    return f"{event}; continue with: {command}"


def _out_of_memory_advice(run: TrainingRun) -> str:
    saved = run.directory.checkpoint
    restart = f"continue from its weights (--init-from {saved})" if saved.exists() else "start again"
    slots = run.schedule.implementation.slots
    return f"{restart} in another --out, with fewer than {slots:,} --slots or a smaller --row-length"


def _best_step_note(state: Progress, schedule: Schedule) -> str:
    """The step of the saved draft, if several drafts were measured."""
    several = schedule.eval_every and state.best_step
    return f", of step {state.best_step:,} (decoded τ {state.best_tau:.3f})" if several else ""


def make_logger(name: str | None, run: Path) -> Logger:
    """A function that logs the metrics of a step to 'tensorboard' or 'wandb', in the run's directory. With None, it
    does nothing."""
    return {"tensorboard": _tensorboard, "wandb": _wandb}[name](run) if name else lambda metrics: None


def _tensorboard(run: Path) -> Logger:
    from torch.utils.tensorboard import SummaryWriter

    writer = SummaryWriter(str(run / "tensorboard"))

    def log(metrics: dict[str, Any]) -> None:
        for name, value in _scalars(metrics).items():
            writer.add_scalar(name, value, metrics["step"])

    return log


def _wandb(run: Path) -> Logger:
    import wandb

    board = wandb.init(project="fledge", dir=str(run))
    return lambda metrics: board.log(_scalars(metrics), step=metrics["step"])


def _scalars(metrics: dict[str, Any]) -> dict[str, float]:
    """The metrics, with each list split into scalars by draft step, `hit/0`, `hit/1`, .., and each dict by its keys."""
    found: dict[str, float] = {}
    for name, value in metrics.items():
        split = dict(enumerate(value)) if isinstance(value, list) else value
        found |= {f"{name}/{key}": x for key, x in split.items()} if isinstance(split, dict) else {name: value}
    return found
