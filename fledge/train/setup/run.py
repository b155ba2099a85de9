"""Plans the steps of a training run and how they are computed, runs the trainer, displays its progress, and prints how
it ended and how to continue. On a GPU, the heaviest rows are tried to find settings that fit in memory."""

from __future__ import annotations

import math
import shutil
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from fledge.data.pack import Rows
from fledge.drafts.draft import Draft
from fledge.io.display import format_bytes
from fledge.io.files import existing_parent
from fledge.targets.source import FeatureSource
from fledge.train.checkpoint import RunDirectory
from fledge.train.memory import CPU_SLOTS, MIN_TOKENS, USABLE_FRACTION, Trial, candidates, choose, resize_row
from fledge.train.objective import Implementation, ttt
from fledge.train.optim import state_bytes
from fledge.train.ranks import LostRankError, Ranks
from fledge.train.setup.options import ComputeOptions
from fledge.train.setup.recipe import Recipe
from fledge.train.trainer import Attach, Schedule, feed_draft, train, with_features

SAVE_DTYPE = torch.bfloat16  # of the drafts that are written

Say = Callable[[str], None]
Logger = Callable[[dict[str, Any]], None]


def make_schedule(recipe: Recipe, rows: Rows, width: int, ranks: Ranks, lockstep: bool, say: Say) -> Schedule:
    """The schedule for a draft with hidden size `width` on these rows. The number of steps follows from the epochs, the
    default learning rate is 0.5 / width, and by default a step has one row for each rank. With `lockstep`, every rank
    must have as many rows; raises ValueError if the rows of a step cannot be shared equally."""
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


def choose_implementation(
    compute: ComputeOptions, draft: Draft, rows: Rows, source: FeatureSource, schedule: Schedule, ranks: Ranks, say: Say
) -> Implementation:
    """The requested implementation, with as many slots in flight as fit in GPU memory. Raises ValueError if none fits.
    A target rank tries nothing.
    """
    asked = implementations(compute)
    if not compute.gpu or not ranks.trains:
        return asked[0]
    trial = _trial(draft, rows, source, schedule, ranks)
    # a small step first: the trials then do not measure the memory of lazy initialization
    trial.step(resize_row(trial.rows[0], MIN_TOKENS), asked[-1])
    draft.zero_grad(set_to_none=True)
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
    # without sources, a trial reads no features on disk, which may not exist yet (see `DiskFeatures`)
    heaviest = [replace(row, sources=()) for row in rows.heaviest()]
    return Trial(draft, heaviest, step, own_rows, ranks.size if ranks.shards else 1, schedule.optimizer)


def _choice_message(chosen: Implementation, taken: int, available: int, rows: Rows) -> str:
    return (
        f"rows of {rows.row_length:,} tokens take about {taken / 2**30:.1f} of {available / 2**30:.1f} GiB with "
        f"--impl {chosen.attention} and {chosen.slots:,} slots in flight"
        + (", recomputing the MLP's activations" if chosen.recompute else "")
        + (", preparing the features of the next row meanwhile" if chosen.prefetch else "")
    )


def trial_message(tokens: int, taken: int | None, available: int) -> str:
    """A message about a tried row. `taken` are the bytes of the row's step (None: out of memory)."""
    if taken is None:
        return f"a row of {tokens:,} tokens does not fit in GPU memory"
    too_much = taken > USABLE_FRACTION * available
    over = f", which is too much: {1 - USABLE_FRACTION:.0%} must stay free" if too_much else ""
    return f"a row of {tokens:,} tokens takes {taken / 2**30:.1f} of {available / 2**30:.1f} GiB{over}"


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
    """Trains to the last step and returns the last step's metrics. `progress` displays each step.

    Raises KeyboardInterrupt if the training was interrupted, after a message with the command that continues it, and
    ValueError, with a remedy, if the GPU runs out of memory. The message of a LostRankError has the same command.
    """
    try:
        return _run(run, say, progress) if run.ranks.trains else _feed(run)
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
    """`run_training` in a training rank."""
    say(_start_message(run))
    metrics: dict[str, Any] = {}
    name, leads = run.recipe.options.log, run.ranks.leads
    log = {"tensorboard": _tensorboard, "wandb": _wandb}[name](run.directory.path) if name and leads else None

    def report(step_metrics: dict[str, Any]) -> None:
        metrics.update(step_metrics)
        if leads:
            progress.step(run.schedule.steps, step_metrics)
        if log:
            log(step_metrics)

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
    several = run.schedule.eval_every and state.best_step  # drafts were measured
    best = f", of step {state.best_step:,} (decoded τ {state.best_tau:.3f})" if several else ""
    say(f"{result}; the draft is {run.directory.draft}{best}")
    if run.ranks.leads:
        run.report_run(run.directory.path, say)
    return metrics


def _feed(run: TrainingRun) -> dict[str, Any]:
    """`run_training` in a target rank, which holds only the target."""
    lockstep = run.source.target.sharded
    state = feed_draft(
        run.draft, run.rows, run.source, run.schedule, run.ranks, lockstep=lockstep, evaluate=run.evaluate
    )
    if state.step < run.schedule.steps:
        raise KeyboardInterrupt
    return {}


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


def _tensorboard(run: Path) -> Logger:
    """A function that logs the metrics of a step, in the run's directory."""
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
