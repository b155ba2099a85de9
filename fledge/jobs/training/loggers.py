"""Logs training metrics to TensorBoard or wandb."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

Logger = Callable[[dict[str, Any]], None]


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
