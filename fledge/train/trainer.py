"""The training loop: packed rows in, a draft out; stoppable at any step and resumable to the same bits."""

from __future__ import annotations

import functools
import json
import math
import operator
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor

from fledge.data.dataset import Rows
from fledge.kernels.transfer import to_device
from fledge.models.draft import Draft
from fledge.targets.source import FeatureSource
from fledge.train.checkpoint import RunDirectory
from fledge.train.interrupt import Interruption
from fledge.train.objective import Implementation, Objective, ttt_queued
from fledge.train.optim import MasterAdamW, learning_rate
from fledge.train.prefetch import with_features
from fledge.types import Features, Packed, Step


@dataclass(frozen=True)
class Schedule:
    """How long and how fast to train. `lr` is the peak; counts are optimizer steps."""

    steps: int
    lr: float
    objective: Objective = Objective()
    implementation: Implementation = Implementation()
    rows_per_step: int = 1
    warmup: float = 0.05
    weight_decay: float = 0.01
    betas: tuple[float, float] = (0.9, 0.95)
    clip: float = 1.0
    seed: int = 0
    eval_every: int = 0
    save_every: int = 100


@dataclass
class Progress:
    """Where a run stands; all that is needed, with the optimizer, to go on."""

    step: int = 0
    place: tuple[int, int] = (0, 0)
    best_tau: float = -1.0
    best_step: int = 0
    seconds: float = 0.0


def train(
    draft: Draft,
    rows: Rows,
    source: FeatureSource,
    schedule: Schedule,
    run: RunDirectory,
    *,
    save_dtype: torch.dtype,
    evaluate: Callable[[Draft], dict[str, float]] | None = None,
    resume: bool = False,
    report: Callable[[dict[str, Any]], None] = lambda metrics: None,
    say: Callable[[str], None] = lambda line: None,
    stop: Callable[[], bool] = lambda: False,
) -> Progress:
    """Trains to `schedule.steps`, or until interrupted, when it saves and returns where it stands.

    `run.draft` ends as the draft with the best τ of `evaluate`, or the last one where that measured none. `report` gets
    each step's metrics, as metrics.jsonl does; `say` a line where it is interrupted. A signal interrupts (see
    `Interruption`), and `stop`, asked after each step. Raises ValueError where the checkpoint to resume from is not
    of such a run.
    """
    optimizer = MasterAdamW(draft.parameters(), schedule.betas, schedule.weight_decay)
    progress = Progress()
    saved = run.load_checkpoint() if resume else None
    if saved is not None:
        try:
            optimizer.load_state_dict(saved["optimizer"])
            progress = _progress_of(saved["progress"], schedule.steps, rows)
        except (LookupError, TypeError, AttributeError, ValueError) as e:
            raise run.damaged(f"it is not the state of this run, {type(e).__name__}: {e}") from e
    run.truncate_metrics(progress.step)

    if draft.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(draft.device)

    def save() -> None:
        state = {"optimizer": optimizer.state_dict(), "progress": vars(progress)}
        run.save_checkpoint(draft, save_dtype, state)

    left = (schedule.steps - progress.step) * schedule.rows_per_step
    upcoming = with_features(
        _from(rows, progress.place, left), source.features, draft.device, prefetch=schedule.implementation.prefetch
    )  # fmt: skip
    with Interruption(say) as interruption, run.metrics.open("a") as log:
        while progress.step < schedule.steps:
            began = time.perf_counter()
            total, tokens, lr, norm = optimizer_step(draft, rows, upcoming, source, schedule, optimizer, progress)
            seconds = time.perf_counter() - began
            progress.step += 1
            progress.seconds += seconds
            last = progress.step == schedule.steps
            metrics = _metrics(total, schedule, progress.step, lr, norm)
            metrics |= {"seconds": seconds, "tokens_per_s": tokens / seconds}
            if draft.device.type == "cuda":
                metrics["peak_gib"] = torch.cuda.max_memory_allocated(draft.device) / 2**30
            if evaluate and (last or (schedule.eval_every and progress.step % schedule.eval_every == 0)):
                draft.eval()
                metrics |= {f"eval_{k}": v for k, v in evaluate(draft).items()}
                if metrics.get("eval_tau", -1.0) > progress.best_tau:
                    progress.best_tau, progress.best_step = metrics["eval_tau"], progress.step
                    run.publish(draft, save_dtype)
            log.write(json.dumps(metrics) + "\n")
            log.flush()
            report(metrics)
            if last or progress.step % schedule.save_every == 0 or interruption.asked or stop():
                with interruption.saving():
                    save()
                if interruption.asked or stop():  # also while it saved
                    break
    if progress.best_step == 0 and progress.step == schedule.steps:  # τ was never measured
        run.publish(draft, save_dtype)
    return progress


def _progress_of(saved: dict[str, Any], steps: int, rows: Rows) -> Progress:
    """Where a checkpoint stands. Raises TypeError or ValueError for what training did not write."""
    progress = Progress(**saved)
    for f in fields(Progress):
        value = getattr(progress, f.name)
        if type(value) not in ((int, float) if isinstance(f.default, float) else (type(f.default),)):
            raise TypeError(f"{f.name} is {value!r}")
    epoch, row = progress.place
    inside = 0 <= progress.step <= steps and epoch >= 0 and 0 <= row < len(rows.epoch(int(epoch)))
    if not inside or (type(epoch), type(row)) != (int, int):
        raise ValueError(f"step {progress.step} of {steps} at {progress.place}")
    return progress


def _from(rows: Rows, place: tuple[int, int], count: int) -> Iterator[Packed]:
    for _ in range(count):
        yield rows[place]
        place = rows.next(place)


def optimizer_step(
    draft: Draft, rows: Rows, upcoming: Iterator[tuple[Packed, Features]], source: FeatureSource, schedule: Schedule,
    optimizer: MasterAdamW, progress: Progress,
) -> tuple[Step, int, float, float]:  # fmt: skip
    """One optimizer step over the next `rows_per_step` rows. Returns their sums, token count, learning rate, gradient
    norm."""
    draft.train()
    found, tokens, begun = [], 0, progress.place
    for i in range(schedule.rows_per_step):
        row, features = next(upcoming)
        tokens += rows.tokens(progress.place)
        progress.place = rows.next(progress.place)
        key = f"{schedule.seed} {progress.step} {i}"
        found.append(ttt_queued(draft, row, features, source.logits, schedule.objective, schedule.implementation, key))
        del features  # before the row after the next is begun
        optimizer.accumulate()
    objective = schedule.objective
    discounts = to_device([torch.tensor([objective.gamma**k for k in range(objective.depth)])], draft.device)[0]
    scored = sum((f.scored_K() * discounts).sum() for f in found)
    lr = learning_rate(progress.step, schedule.steps, schedule.lr, max(1, round(schedule.warmup * schedule.steps)))
    norm = optimizer.step(lr, 1.0 / scored.clamp_min(1e-9), schedule.clip)
    total = functools.reduce(operator.add, [f.to_step() for f in found])  # the first thing that waits for the device
    norm = norm.item()
    if not math.isfinite(norm):  # nothing is saved after this
        rows_read = _from(rows, begun, schedule.rows_per_step)
        raise FloatingPointError(
            f"the gradient of step {progress.step + 1} is {norm}: {_why(rows_read, source, draft, progress.step)}"
        )
    return total, tokens, lr, norm


def _why(rows: Iterator[Packed], source: FeatureSource, draft: Draft, steps_done: int) -> str:
    """What made a step's gradient infinite or NaN, and the cure: the target, the draft before it learnt anything, or
    the learning rate."""
    for row in rows:
        features = source.features(row)
        states = (features.last_TD, draft.reads(features))
        if not all(bool(x.isfinite().all()) for x in states):
            return (
                f"the target computes NaN or infinite hidden states in {str(features.last_TD.dtype).split('.')[-1]}; "
                "train with another --dtype (float32 has the widest range), or copy the target again"
            )
    if steps_done == 0:
        return (
            f"nothing has been learnt yet, so the draft that was begun with overflows in "
            f"{str(draft.dtype).split('.')[-1]}; train with --dtype float32, or begin with another draft"
        )
    return (
        "train anew with a lower --lr and another --out, from the last checkpoint's weights (--init-from "
        "RUN/checkpoint) if there is one"
    )


def _discounted(counts_K: Tensor, gamma: float) -> float:
    return sum(gamma**k * n for k, n in enumerate(counts_K.tolist()))


def _metrics(total: Step, schedule: Schedule, step: int, lr: float, norm: float) -> dict[str, Any]:
    live = total.live_K.clamp_min(1)
    committed, rounds = total.walked
    tau = {"tau": committed / max(rounds, 1)}
    if schedule.objective.drop:  # too few slots are trained to walk along: the mean over all, which reads higher
        tau = {"tau_slots": 1 + float((total.survive_K / live).sum())}
    return {
        "step": step,
        "loss": total.loss.item() / max(_discounted(total.scored_K, schedule.objective.gamma), 1e-9),
        **tau,
        "hit": (total.hit_K / live).tolist(),
        "accept": (total.accept_K / live).tolist(),
        "survive": (total.survive_K / live).tolist(),
        "live": total.live_K.tolist(),
        "scored": total.scored_K.tolist(),
        "lr": lr,
        "grad_norm": norm,
    }
