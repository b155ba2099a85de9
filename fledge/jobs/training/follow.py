"""Runs the trainer and tells the user how it goes, how it ended and what to do next."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from fledge.data.dataset import Rows
from fledge.jobs.training.loggers import make_logger
from fledge.jobs.training.recipe import Recipe
from fledge.models.draft import Draft
from fledge.targets.source import FeatureSource
from fledge.train.checkpoint import RunDirectory
from fledge.train.trainer import Progress, Schedule, train

Say = Callable[[str], None]


@dataclass(frozen=True)
class Run:
    """Everything that a run trains with. `evaluate` measures τ of a draft, or is None; `resumed`: the directory holds
    what was trained before."""

    recipe: Recipe
    draft: Draft
    rows: Rows
    source: FeatureSource
    schedule: Schedule
    evaluate: Callable[[Draft], dict[str, float]] | None
    directory: RunDirectory
    resumed: bool


def follow(run: Run, say: Say, progress: Any) -> dict[str, Any]:
    """Trains to the last step and returns its metrics. `progress` shows each step.

    Raises KeyboardInterrupt where it was interrupted, after it said how to continue, and ValueError, with the cure,
    where the GPU runs out of memory.
    """
    say(_begun(run))
    metrics: dict[str, Any] = {}
    report = _reporter(run, metrics, progress)
    progress.begin("training", run.schedule.steps)
    try:
        where = train(
            run.draft, run.rows, run.source, run.schedule, run.directory,
            save_dtype=torch.bfloat16, evaluate=run.evaluate, resume=run.resumed,
            report=report, say=say, stop=lambda: progress.unheard,
        )  # fmt: skip
    except KeyboardInterrupt:
        progress.close()
        say(_to_continue(run, "stopped at once"))
        raise
    except torch.OutOfMemoryError as e:
        raise ValueError(f"the GPU ran out of memory; {_with_less_memory(run)}") from e
    finally:
        progress.close()
    if where.step < run.schedule.steps:
        say(_to_continue(run, f"stopped after step {where.step}"))
        raise KeyboardInterrupt
    done = f"trained in {where.seconds:.0f} s" if metrics else "this run was finished"
    say(f"{done}; the draft is {run.directory.draft}{_best(where, run.schedule)}")
    return metrics


def _reporter(run: Run, metrics: dict[str, Any], progress: Any) -> Callable[[dict[str, Any]], None]:
    """Shows and logs the metrics of each step, and keeps them in `metrics`."""
    log = make_logger(run.recipe.log, run.directory.path)

    def report(step_metrics: dict[str, Any]) -> None:
        metrics.update(step_metrics)
        progress.step(run.schedule.steps, step_metrics)
        log(step_metrics)

    return report


def _begun(run: Run) -> str:
    trained = sum(p.numel() for p in run.draft.parameters() if p.requires_grad)
    schedule = run.schedule
    return (
        f"{trained:,} parameters to train on {run.recipe.compute.device}, {schedule.steps:,} steps of "
        f"{schedule.rows_per_step} x {run.rows.row_length:,} tokens, lr {schedule.lr:.2g}"
    )


def _to_continue(run: Run, how: str) -> str:
    trust = " --trust-remote-code" if run.recipe.target.trust_remote_code else ""
    command = f"fledge train --resume {run.directory.path}{trust}"
    if not run.directory.checkpoint.exists():
        return f"{how}, before the first checkpoint; begin again with: {command}"
    return f"{how}; go on with: {command}"


def _with_less_memory(run: Run) -> str:
    saved = run.directory.checkpoint
    anew = f"train on from its weights (--init-from {saved})" if saved.exists() else "train anew"
    slots = run.schedule.implementation.slots
    return f"{anew} in another --out with fewer than {slots:,} --slots, or shorter rows"


def _best(where: Progress, schedule: Schedule) -> str:
    """Which draft it is, where several were measured."""
    several = schedule.eval_every and where.best_step
    return f", of step {where.best_step:,} (decoded τ {where.best_tau:.3f})" if several else ""
