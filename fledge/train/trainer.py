"""The training loop. A run can be stopped after any step; a resumed run gives bit-identical results."""

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
from fledge.types import Features, Packed, RowSums


@dataclass(frozen=True)
class Schedule:
    """The hyperparameters of a run. Counts are optimizer steps, unless named otherwise.

    `lr` is the peak learning rate, `warmup` the share of `steps` in which it rises, `clip` the largest gradient norm.
    `eval_every` 0 evaluates after the last step only.
    """

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
    """The progress of a run. With the optimizer's state, it is all that resuming needs.

    `step` is the number of optimizer steps done, and `address` that of the next row (epoch, index of the row within the
    epoch). `best_tau` and `best_step` belong to the draft with the best evaluation. `seconds` is the time spent in
    optimizer steps.
    """

    step: int = 0
    address: tuple[int, int] = (0, 0)
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
    """Trains until `schedule.steps`, or until interrupted. Saves a checkpoint in either case, and returns the progress.

    The draft with the best τ of `evaluate` is written to `run.draft`, or the last draft if no τ was measured. `report`
    is called with each step's metrics, which are also written to metrics.jsonl, and `say` with a message on an
    interruption. A run is interrupted by signals (see `Interruption`), or if `stop`, called after each step, returns
    True. Raises ValueError if `resume` is given and the checkpoint does not belong to this run, and FloatingPointError
    if a gradient is not finite.
    """
    optimizer = MasterAdamW(draft.parameters(), schedule.betas, schedule.weight_decay)
    progress = Progress()
    saved = run.load_checkpoint() if resume else None
    if saved is not None:
        try:
            optimizer.load_state_dict(saved["optimizer"])
            progress = _progress_of(saved["progress"], schedule.steps, rows)
        except (LookupError, TypeError, AttributeError, ValueError) as e:
            raise run.damage_error(f"it is not the state of this run, {type(e).__name__}: {e}") from e
    run.truncate_metrics(progress.step)

    if draft.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(draft.device)

    def save() -> None:
        state = {"optimizer": optimizer.state_dict(), "progress": vars(progress)}
        run.save_checkpoint(draft, save_dtype, state)

    remaining = _rows_from(rows, progress.address, (schedule.steps - progress.step) * schedule.rows_per_step)
    remaining = source.ahead(remaining)
    upcoming = with_features(
        remaining, source.features, draft.device, prefetch=schedule.implementation.prefetch
    )  # fmt: skip
    with Interruption(say) as interruption, run.metrics.open("a") as log:
        while progress.step < schedule.steps:
            start = time.perf_counter()
            total, tokens, lr, norm = optimizer_step(draft, rows, upcoming, source, schedule, optimizer, progress)
            seconds = time.perf_counter() - start
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
            if last or progress.step % schedule.save_every == 0 or interruption.requested or stop():
                with interruption.saving():
                    save()
                if interruption.requested or stop():  # again, since a request may have come during the save
                    break
    if progress.best_step == 0 and progress.step == schedule.steps:  # τ was never measured
        run.publish(draft, save_dtype)
    return progress


def _progress_of(saved: dict[str, Any], steps: int, rows: Rows) -> Progress:
    """The progress in a checkpoint. Raises TypeError or ValueError for values that training cannot have written."""
    saved = {"address" if name == "place" else name: value for name, value in saved.items()}  # of earlier versions
    progress = Progress(**saved)
    for f in fields(Progress):
        value = getattr(progress, f.name)
        if type(value) not in ((int, float) if isinstance(f.default, float) else (type(f.default),)):
            raise TypeError(f"{f.name} is {value!r}")
    epoch, row = progress.address
    in_range = 0 <= progress.step <= steps and epoch >= 0 and 0 <= row < len(rows.epoch(int(epoch)))
    if not in_range or (type(epoch), type(row)) != (int, int):
        raise ValueError(f"step {progress.step} of {steps} at row {progress.address}")
    return progress


def _rows_from(rows: Rows, address: tuple[int, int], count: int) -> Iterator[Packed]:
    """`count` successive rows from an address on."""
    for _ in range(count):
        yield rows[address]
        address = rows.next(address)


def optimizer_step(
    draft: Draft, rows: Rows, upcoming: Iterator[tuple[Packed, Features]], source: FeatureSource, schedule: Schedule,
    optimizer: MasterAdamW, progress: Progress,
) -> tuple[RowSums, int, float, float]:  # fmt: skip
    """One optimizer step over the next `rows_per_step` rows; advances `progress.address`.

    The gradient is Σ_k γ^k Σ_scored ∇loss / Σ_k γ^k scored_k, over all rows. Returns the rows' summed metrics, their
    number of tokens without filler, the learning rate and the gradient norm. Raises FloatingPointError, with the
    probable cause, if the norm is not finite; the draft must not be saved then.
    """
    draft.train()
    results, tokens, first_row = [], 0, progress.address
    for i in range(schedule.rows_per_step):
        row, features = next(upcoming)
        tokens += rows.tokens(progress.address)
        progress.address = rows.next(progress.address)
        key = f"{schedule.seed} {progress.step} {i}"
        result = ttt_queued(draft, row, features, source.logits, schedule.objective, schedule.implementation, key)
        results.append(result)
        del features  # frees their memory before `upcoming` starts the row after the next
        optimizer.accumulate()
    objective = schedule.objective
    discounts = to_device([torch.tensor([objective.gamma**k for k in range(objective.depth)])], draft.device)[0]
    scored = sum((r.scored_K() * discounts).sum() for r in results)
    lr = learning_rate(progress.step, schedule.steps, schedule.lr, max(1, round(schedule.warmup * schedule.steps)))
    norm = optimizer.step(lr, 1.0 / scored.clamp_min(1e-9), schedule.clip)
    total = functools.reduce(operator.add, [r.to_host() for r in results])  # the step's first synchronization
    norm = norm.item()
    if not math.isfinite(norm):
        step_rows = _rows_from(rows, first_row, schedule.rows_per_step)
        cause = _nonfinite_cause(step_rows, source, draft, progress.step)
        raise FloatingPointError(f"the gradient of step {progress.step + 1} is {norm}: {cause}")
    return total, tokens, lr, norm


def _nonfinite_cause(rows: Iterator[Packed], source: FeatureSource, draft: Draft, steps_done: int) -> str:
    """The probable cause of a gradient that is not finite, and the remedy. Causes are the target's hidden states, the
    initial draft, or the learning rate."""
    for row in rows:
        features = source.features(row)
        states = (features.last_TD, draft.select_states(features))
        if not all(bool(x.isfinite().all()) for x in states):
            return (
                f"the target computes NaN or infinite hidden states in {str(features.last_TD.dtype).split('.')[-1]}; "
                "train with another --dtype (float32 has the widest range), or copy the target again"
            )
    if steps_done == 0:
        return (
            f"this is the first step, so the initial draft overflows in {str(draft.dtype).split('.')[-1]}; train with "
            "--dtype float32, or start from another draft"
        )
    return (
        "train again with a lower --lr and another --out, from the last checkpoint's weights (--init-from "
        "RUN/checkpoint) if there is one"
    )


def _discounted(counts_K: Tensor, gamma: float) -> float:
    """Σ_k γ^k counts_k."""
    return sum(gamma**k * n for k, n in enumerate(counts_K.tolist()))


def _metrics(total: RowSums, schedule: Schedule, step: int, lr: float, norm: float) -> dict[str, Any]:
    """A step's metrics as they are written to metrics.jsonl."""
    live = total.live_K.clamp_min(1)
    committed, rounds = total.simulated
    tau = {"tau": committed / max(rounds, 1)}
    if schedule.objective.drop:
        # decoding cannot be simulated, since most slots are dropped; a mean over the trained slots, which is higher
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
