"""The training loop: packed rows in, a draft out; stoppable at any step and resumable to the same bits."""

from __future__ import annotations

import functools
import json
import math
import operator
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fledge.data.dataset import Rows
from fledge.kernels.transfer import to_device
from fledge.models.draft import Draft
from fledge.train.ahead import with_features
from fledge.train.checkpoint import RunDirectory
from fledge.train.cod import DropTokens
from fledge.train.objective import Ways, ttt_queued
from fledge.train.optim import MasterAdamW, learning_rate
from fledge.types import Features, Packed, Step


@dataclass(frozen=True)
class Schedule:
    """How long and how fast to train. `lr` is the peak; counts are optimizer steps."""

    steps: int
    lr: float
    depth: int = 5
    gamma: float = 0.8
    rows_per_step: int = 1
    warmup: float = 0.05
    weight_decay: float = 0.01
    betas: tuple[float, float] = (0.9, 0.95)
    clip: float = 1.0
    keep_unseen: bool = False
    kind: str = "ce"
    noise: float = 0.0
    drop: tuple[float, float] | None = None
    seed: int = 0
    ways: Ways = Ways()
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


@dataclass(frozen=True)
class Source:
    """Where features and the teacher's logits come from: the live target, or anything that answers the same."""

    features: Callable[[Packed], Features]
    logits: Callable[[Tensor], Tensor]


def train(
    draft: Draft,
    rows: Rows,
    source: Source,
    schedule: Schedule,
    run: RunDirectory,
    *,
    save_dtype: torch.dtype,
    evaluate: Callable[[Draft], dict[str, float]] | None = None,
    resume: bool = False,
    report: Callable[[dict[str, Any]], None] = lambda metrics: None,
    say: Callable[[str], None] = lambda line: None,
) -> Progress:
    """Trains to `schedule.steps`, or until interrupted, when it saves and returns where it stands.

    `run.draft` ends as the draft with the best τ of `evaluate`, or the last one where that measured none. `report` gets
    each step's metrics, as metrics.jsonl does; `say` a line where it is interrupted.
    """
    optimizer = MasterAdamW(draft.parameters(), schedule.betas, schedule.weight_decay)
    progress = Progress()
    saved = run.load_checkpoint() if resume else None
    if saved is not None:
        optimizer.load_state_dict(saved["optimizer"])
        progress = Progress(**saved["progress"])
    run.truncate_metrics(progress.step)

    if draft.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(draft.device)

    def save() -> None:
        state = {"optimizer": optimizer.state_dict(), "progress": vars(progress)}
        run.save_checkpoint(draft, save_dtype, state)

    left = (schedule.steps - progress.step) * schedule.rows_per_step
    upcoming = with_features(
        _from(rows, progress.place, left), source.features, draft.device, ahead=schedule.ways.ahead
    )  # fmt: skip
    told = "stopping after this step; once more stops at once, and what is not in a checkpoint is lost"
    with _interruptible(lambda: say(told)) as interrupted, run.metrics.open("a") as log:
        while progress.step < schedule.steps:
            began = time.perf_counter()
            total, tokens, lr, norm = _step(draft, rows, upcoming, source, schedule, optimizer, progress)
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
            if last or progress.step % schedule.save_every == 0 or interrupted():
                save()
            if interrupted():
                break
    if progress.best_step == 0 and progress.step == schedule.steps:  # τ was never measured
        run.publish(draft, save_dtype)
    return progress


def _from(rows: Rows, place: tuple[int, int], count: int) -> Iterator[Packed]:
    for _ in range(count):
        yield rows[place]
        place = rows.next(place)


def _step(
    draft: Draft, rows: Rows, upcoming: Iterator[tuple[Packed, Features]], source: Source, schedule: Schedule,
    optimizer: MasterAdamW, progress: Progress,
) -> tuple[Step, int, float, float]:  # fmt: skip
    """One optimizer step over the next `rows_per_step` rows. Returns their sums, token count, learning rate, gradient
    norm."""
    draft.train()
    found, tokens = [], 0
    for i in range(schedule.rows_per_step):
        row, features = next(upcoming)
        tokens += rows.tokens(progress.place)
        progress.place = rows.next(progress.place)
        found.append(
            ttt_queued(
                draft,
                row,
                features,
                source.logits,
                steps=schedule.depth,
                gamma=schedule.gamma,
                kind=schedule.kind,
                keep_unseen=schedule.keep_unseen,
                noise=(schedule.noise, key := f"{schedule.seed} {progress.step} {i}"),
                drop=DropTokens(*schedule.drop, key) if schedule.drop else None,
                ways=schedule.ways,
            )
        )
        del features  # before the row after the next is begun
        optimizer.accumulate()
    discounts = to_device([torch.tensor([schedule.gamma**k for k in range(schedule.depth)])], draft.device)[0]
    scored = sum((f.scored_K() * discounts).sum() for f in found)
    lr = learning_rate(progress.step, schedule.steps, schedule.lr, max(1, round(schedule.warmup * schedule.steps)))
    norm = optimizer.step(lr, 1.0 / scored.clamp_min(1e-9), schedule.clip)
    total = functools.reduce(operator.add, [f.count() for f in found])  # the first thing that waits for the device
    norm = norm.item()
    if not math.isfinite(norm):  # nothing is saved after this
        raise FloatingPointError(
            f"the gradient of step {progress.step + 1} is {norm}; train anew with a lower --lr and another --out, from "
            "the last checkpoint's weights (--init-from RUN/checkpoint) if there is one"
        )
    return total, tokens, lr, norm


def _discounted(counts_K: Tensor, gamma: float) -> float:
    return sum(gamma**k * n for k, n in enumerate(counts_K.tolist()))


def _metrics(total: Step, schedule: Schedule, step: int, lr: float, norm: float) -> dict[str, Any]:
    live = total.live_K.clamp_min(1)
    committed, rounds = total.walked
    tau = {"tau": committed / max(rounds, 1)}
    if schedule.drop:  # too few slots are trained to walk along: the mean over all, which reads higher
        tau = {"tau_slots": 1 + float((total.survive_K / live).sum())}
    return {
        "step": step,
        "loss": total.loss.item() / max(_discounted(total.scored_K, schedule.gamma), 1e-9),
        **tau,
        "hit": (total.hit_K / live).tolist(),
        "accept": (total.accept_K / live).tolist(),
        "survive": (total.survive_K / live).tolist(),
        "live": total.live_K.tolist(),
        "scored": total.scored_K.tolist(),
        "lr": lr,
        "grad_norm": norm,
    }


@contextmanager
def _interruptible(tell: Callable[[], None]) -> Iterator[Callable[[], bool]]:
    """Turns the first Ctrl-C or termination request into a flag that is read between steps, and tells of it; a second
    one raises."""
    asked: list[int] = []

    def note(number, _frame):
        if asked:
            raise KeyboardInterrupt
        asked.append(number)
        tell()

    before = {s: signal.signal(s, note) for s in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield lambda: bool(asked)
    finally:
        for s, handler in before.items():
            signal.signal(s, handler)
