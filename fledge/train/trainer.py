"""The training loop. A run can be stopped after any step; a resumed run gives bit-identical results.

Several ranks train one draft by the same loop: each computes some rows of a step, the gradients are summed, and the
update equals the update of a single process on all rows (`fledge.train.ranks`).
"""

from __future__ import annotations

import contextlib
import functools
import json
import math
import operator
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fledge.data.pack import Rows
from fledge.drafts.draft import Draft
from fledge.ops.device import to_device
from fledge.targets.source import FeatureSource, LiveFeatures, RowIterator
from fledge.train.checkpoint import RunDirectory
from fledge.train.feed import AFTER, BEFORE, Deliveries, Delivery, ReceivedFeatures, deliveries_of_step, feed
from fledge.train.interrupt import Interruption
from fledge.train.objective import ttt_queued
from fledge.train.optim import MasterOptimizer, learning_rate
from fledge.train.ranks import ALONE, Ranks
from fledge.train.row_pass import Implementation, Objective
from fledge.train.stopwatch import DRAFT, OPTIMIZER, TARGET, Stopwatch
from fledge.types import Features, Packed, RowSums

# files that are written together with a draft, by path, made of the draft and its metrics
Attach = Callable[[Draft, dict[str, Any]], Mapping[str, bytes]]


@dataclass(frozen=True)
class Schedule:
    """The hyperparameters of a run. Counts are optimizer steps, unless named otherwise. `rows_per_step` counts the rows
    of all ranks together.

    `lr` is the peak learning rate, `warmup` the share of `steps` in which it rises, `optimizer` the `kind` of
    `MasterOptimizer`, `clip` the largest gradient norm.
    `eval_every` 0 evaluates after the last step only.
    """

    steps: int
    lr: float
    objective: Objective = Objective()
    implementation: Implementation = Implementation()
    rows_per_step: int = 1
    warmup: float = 0.05
    optimizer: str = "muon"
    weight_decay: float = 0.01
    betas: tuple[float, float] = (0.9, 0.95)
    clip: float = 1.0
    seed: int = 0
    eval_every: int = 0
    save_every: int = 100

    def evaluates_after(self, step: int) -> bool:
        """Whether τ is measured after a number of steps."""
        return step == self.steps or bool(self.eval_every and step % self.eval_every == 0)


@dataclass
class Progress:
    """The progress of a run. Resuming needs only the progress and the optimizer's state.

    `step` is the number of optimizer steps done, and `address` the address of the next row (epoch, index of the row
    within the epoch). `best_tau` and `best_step` belong to the draft with the best evaluation. `seconds` is the time
    spent in optimizer steps.
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
    evaluate: Callable[[Draft], dict[str, Any]] | None = None,
    attach: Attach = lambda draft, metrics: {},
    resume: bool = False,
    report: Callable[[dict[str, Any]], None] = lambda metrics: None,
    say: Callable[[str], None] = lambda line: None,
    stop: Callable[[], bool] = lambda: False,
    ranks: Ranks = ALONE,
) -> Progress:
    """Trains until `schedule.steps`, or until interrupted. Saves a checkpoint in either case, and returns the progress.

    The draft with the best τ of `evaluate` is written to `run.draft`, or the last draft if no τ was measured, together
    with the files, by path, that `attach` makes of the draft and the metrics. `report` is called with each step's
    metrics, which are also written to metrics.jsonl, and `say` with a message on an interruption. A run is interrupted
    by signals (see `Interruption`), or if `stop`, called after each step, returns True. Raises ValueError if `resume`
    is given and the checkpoint does not belong to this run, and FloatingPointError if a gradient is not finite.

    Of several `ranks`, each training rank calls `train` with the same arguments; `evaluate` may share prompts among
    ranks, and all training ranks call `attach`. Rank 0 alone writes and reports. All ranks stop after the same step. An
    error in one rank ends all ranks, with a message that names the error (`Ranks.meet`). Target ranks call `feed_draft`
    instead; `source` is then `ReceivedFeatures` in the training ranks.
    """
    with ranks.collective(BEFORE):
        ranks.copy_from_first([*draft.parameters(), *draft.buffers()])
    given = schedule.betas, schedule.weight_decay, ranks, schedule.optimizer
    optimizer = MasterOptimizer(draft.named_parameters(), *given)
    with ranks.together(BEFORE) if ranks.target_ranks else contextlib.nullcontext():
        progress = (_resumed(run, optimizer, schedule, rows, ranks) if resume else None) or Progress()
        if ranks.leads:
            run.truncate_metrics(progress.step)

    if draft.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(draft.device)

    def save() -> None:
        run.save_checkpoint(draft, save_dtype, optimizer.state(), vars(progress), ranks)

    def publish(metrics: dict[str, Any]) -> None:
        # target ranks do not meet here
        with nullcontext() if ranks.target_ranks else ranks.together("while the draft was written"):
            more = attach(draft, metrics)
            if ranks.leads:
                run.publish(draft, save_dtype, more)

    with ranks.collective(BEFORE):
        ranks.from_first(progress)  # for the target ranks
    watch, saving_seconds = Stopwatch(draft.device), 0.0  # since the last line of metrics
    upcoming_features = upcoming_rows(rows, progress, schedule, source, draft.device, ranks, watch)
    with (
        Interruption(say) as interruption, upcoming_features as upcoming, run.saving(),
        _metrics_log(run, ranks) as log,
    ):  # fmt: skip

        def stopping() -> bool:
            return interruption.requested or stop()

        while progress.step < schedule.steps:
            start = time.perf_counter()
            try:
                done = optimizer_step(
                    draft, rows, upcoming, source, schedule, optimizer, progress, ranks, stopping, watch
                )
            except FloatingPointError as e:
                if ranks.target_ranks:
                    next_is_tau = bool(evaluate) and schedule.evaluates_after(progress.step + 1)
                    _tell(e, source, progress.step, ranks, evaluates=next_is_tau)
                raise
            seconds = time.perf_counter() - start
            progress.step += 1
            progress.seconds += seconds
            last = progress.step == schedule.steps
            metrics = _metrics(done, schedule, progress.step)
            metrics |= {"room": schedule.rows_per_step * rows.row_length, "parts": watch.read()}
            metrics |= {"seconds": seconds, "tokens_per_s": done.tokens / seconds}
            if draft.device.type == "cuda":
                metrics["peak_gib"] = torch.cuda.max_memory_allocated(draft.device) / 2**30
            if evaluate and schedule.evaluates_after(progress.step):
                if ranks.target_ranks:
                    source.receive_sent(progress.step)
                draft.eval()
                start = time.perf_counter()
                metrics |= {f"eval_{k}": v for k, v in evaluate(draft).items()}
                metrics["parts"]["eval"] = time.perf_counter() - start
                if metrics.get("eval_tau", -1.0) > progress.best_tau:
                    progress.best_tau, progress.best_step = metrics["eval_tau"], progress.step
                    start = time.perf_counter()
                    publish(metrics)
                    saving_seconds += time.perf_counter() - start
            if saving_seconds:
                metrics["parts"]["save"], saving_seconds = saving_seconds, 0.0
            log(metrics)
            report(metrics)
            stops = done.stops or (ranks.total == 1 and stopping())
            if last or progress.step % schedule.save_every == 0 or stops:
                with interruption.saving():
                    start = time.perf_counter()
                    save()
                    saving_seconds += time.perf_counter() - start
                    # again, since a request may have come during the save
                    stops = stops or (ranks.total == 1 and stopping())
                    if last or stops:
                        run.finish_saving()
                if stops:
                    break
    if ranks.target_ranks:
        source.finish(progress.step)
        ranks.meet(AFTER, None)
    if progress.best_step == 0 and progress.step == schedule.steps:  # τ was never measured
        draft.eval()
        publish({"step": progress.step})
    return progress


@contextmanager
def _metrics_log(run: RunDirectory, ranks: Ranks) -> Iterator[Callable[[dict[str, Any]], None]]:
    """Context manager: a function that appends a step's metrics to metrics.jsonl, and writes in rank 0 only."""
    if not ranks.leads:
        yield lambda metrics: None
        return
    with run.metrics.open("a") as file:

        def write(metrics: dict[str, Any]) -> None:
            file.write(json.dumps(metrics) + "\n")
            file.flush()

        yield write


def _resumed(
    run: RunDirectory, optimizer: MasterOptimizer, schedule: Schedule, rows: Rows, ranks: Ranks
) -> Progress | None:
    """Restores the optimizer from the last checkpoint. Returns the checkpoint's progress; None without a checkpoint."""
    saved = run.load_progress()
    if saved is None:
        return None
    try:
        progress = _progress_of(saved, schedule.steps, rows)
    except (LookupError, TypeError, ValueError) as e:
        raise run.damage_error(f"it is not the state of this run, {type(e).__name__}: {e}") from e
    run.load_tensors(optimizer.state(), ranks)
    optimizer.restored()
    return progress


def _progress_of(saved: dict[str, Any], steps: int, rows: Rows) -> Progress:
    """The progress in a checkpoint. Raises LookupError, TypeError or ValueError for the progress of another run."""
    epoch, row = saved["address"]
    progress = Progress(**saved | {"address": (epoch, row)})  # JSON has no tuples
    if progress.step > steps or row >= len(rows.epoch(epoch)):
        raise ValueError(f"step {progress.step} of {steps} at row {progress.address}")
    return progress


def feed_draft(
    draft: Draft, rows: Rows, source: LiveFeatures, schedule: Schedule, ranks: Ranks, *, lockstep: bool,
    evaluate: Callable[[Draft], dict[str, Any]] | None = None,
) -> Progress:  # fmt: skip
    """The work of a target rank while the training ranks `train`. Returns the progress, of which only `step` is kept up
    to date. `lockstep` tells whether the target is sharded; `evaluate` is as in `feed`."""
    with ranks.together(BEFORE):
        pass
    with ranks.collective(BEFORE):
        progress = ranks.from_first(Progress())
    with Interruption(lambda line: None) as interruption:
        feed(
            source, rows, draft, schedule, progress, ranks, lockstep=lockstep, until=schedule.steps, evaluate=evaluate,
            stopping=lambda: interruption.requested,
        )  # fmt: skip
    return progress


def _tell(error: Exception, source: ReceivedFeatures, step: int, ranks: Ranks, *, evaluates: bool) -> None:
    """Raises an error that occurred after a step's meeting. Raises at the next meeting, where the target ranks learn of
    the error. Before the next meeting, the target ranks send the rows of the next step, unless τ `evaluates` first."""
    if not evaluates:
        source.finish(step + 2)
    ranks.meet(f"in step {step + 1}", None, error)


def own_rows(rows: Rows, progress: Progress, schedule: Schedule, ranks: Ranks) -> RowIterator:
    """The rows that this rank computes, from the progress to the end of the schedule."""
    return (rows[d.address] for d in Deliveries.of(rows, progress, schedule, ranks) if d.rank == ranks.rank)


@contextmanager
def upcoming_rows(
    rows: Rows, progress: Progress, schedule: Schedule, source: FeatureSource, device: torch.device, ranks: Ranks,
    watch: Stopwatch | None = None,
) -> Iterator[Iterator[tuple[Packed, Features]]]:  # fmt: skip
    """Context manager: `own_rows` with the rows' features. Reading ahead ends with the block. A `watch` measures the
    wait for rows."""
    if ranks.target_ranks:
        source.begin(Deliveries.of(rows, progress, schedule, ranks))
    with closing(source.ahead(own_rows(rows, progress, schedule, ranks))) as ahead:
        timed = watch.rows(ahead) if watch else ahead
        yield with_features(timed, source.features, device, prefetch=schedule.implementation.prefetch)


@dataclass(frozen=True)
class StepResult:
    """The result of an optimizer step over all ranks: the rows' summed metrics, the rows' tokens without filler, the
    learning rate, the gradient norm, and whether a rank asked to stop after the step."""

    total: RowSums
    tokens: int
    lr: float
    norm: float
    stops: bool


def optimizer_step(
    draft: Draft, rows: Rows, upcoming: Iterator[tuple[Packed, Features]], source: FeatureSource, schedule: Schedule,
    optimizer: MasterOptimizer, progress: Progress, ranks: Ranks = ALONE, stopping: Callable[[], bool] = lambda: False,
    watch: Stopwatch | None = None,
) -> StepResult:  # fmt: skip
    """One optimizer step over the next `rows_per_step` rows; advances `progress.address`. `upcoming` yields this rank's
    rows with features. `watch` measures the parts of the step on this rank.

    The gradient is Σ_k γ^k Σ_scored ∇loss / Σ_k γ^k scored_k, over all rows of all ranks. Raises FloatingPointError,
    with the probable cause, if the gradient's norm is not finite; the draft must not be saved then. Raises RankError if
    another rank fails, ends or does not answer.
    """
    draft.train()
    watch = watch or Stopwatch(draft.device)
    where = f"in step {progress.step + 1}"
    shared = list(deliveries_of_step(rows, progress.step, progress.address, schedule.rows_per_step, ranks))
    own = [d for d in shared if d.rank == ranks.rank]
    results, tokens, failure, left = [], 0, None, len(own)
    try:
        for d in own:
            left -= 1
            watch.begin(TARGET)
            row, features = next(upcoming)
            watch.begin(DRAFT)
            key = f"{schedule.seed} {progress.step} {d.index}"
            result = ttt_queued(draft, row, features, source.logits, schedule.objective, schedule.implementation, key)
            results.append(result)
            del features  # frees the memory before `upcoming` starts the row after the next
            optimizer.accumulate()
    except Exception as e:  # the meeting reports the error to all ranks
        failure = e
        if ranks.target_ranks or (isinstance(source, LiveFeatures) and source.target.sharded):
            _drop(upcoming, left)
    watch.begin(OPTIMIZER)
    stops = any(ranks.meet(where, stopping() if ranks.total > 1 else False, failure))
    for _ in range(schedule.rows_per_step):
        tokens += rows.tokens(progress.address)
        progress.address = rows.next(progress.address)
    objective = schedule.objective
    discounts = torch.tensor([objective.gamma**k for k in range(objective.depth)], dtype=torch.float64)
    discounts = to_device([discounts], draft.device)[0]
    lr = learning_rate(progress.step, schedule.steps, schedule.lr, max(1, round(schedule.warmup * schedule.steps)))
    with ranks.collective(where):
        scored = ranks.sum(sum(((r.scored_K() * discounts).sum() for r in results), torch.zeros_like(discounts[0])))
        norm = optimizer.step(lr, 1.0 / scored.clamp_min(1e-9), schedule.clip)
        total = functools.reduce(operator.add, [r.to_host() for r in results], RowSums.zero(objective.depth))
        if ranks.size > 1:
            total = RowSums.unpacked(ranks.sum(total.packed()))
        watch.end()
        norm = norm.item()
        if not math.isfinite(norm):
            flags = torch.zeros(len(shared))
            for d in own:  # all rows: the ranks of a sharded target run on rows together
                flags[d.index] = not source.finite(rows[d.address])
            flags = ranks.sum(flags).tolist()
            cause = _nonfinite_cause([d for d in shared if flags[d.index]], draft, progress.step)
            raise FloatingPointError(f"the gradient of step {progress.step + 1} is {norm}: {cause}")
    return StepResult(total, tokens, lr, norm, stops)


def _drop(upcoming: Iterator[tuple[Packed, Features]], count: int) -> None:
    """Takes the features of a step's remaining rows after an error, since other ranks may wait to send or to compute
    the features. Suppresses further errors: the first error is reported."""
    with contextlib.suppress(Exception):
        for _ in range(count):
            next(upcoming)


def _nonfinite_cause(damaged: Sequence[Delivery], draft: Draft, steps_done: int) -> str:
    """The probable cause of a gradient that is not finite, and the remedy. The cause is the target if hidden states of
    rows are not finite (`damaged`), else in the first step the initial draft, else the learning rate."""
    dtype = str(draft.dtype).split(".")[-1]
    if damaged:
        places = " and ".join(f"row {d.index + 1} (rank {d.rank})" for d in damaged)
        return (
            f"the target computes NaN or infinite hidden states in {dtype} for {places} of the step; train with "
            "another --dtype (float32 has the widest range), or copy the target again"
        )
    if steps_done == 0:
        return (
            f"this is the first step, so the initial draft overflows in {dtype}; train with --dtype float32, or start "
            "from another draft"
        )
    return (
        "train again with a lower --lr and another --out, from the last checkpoint's weights (--init-from "
        "RUN/checkpoint) if there is one"
    )


def _discounted(counts_K: Tensor, gamma: float) -> float:
    """Σ_k γ^k counts_k."""
    return sum(gamma**k * n for k, n in enumerate(counts_K.tolist()))


def _metrics(done: StepResult, schedule: Schedule, step: int) -> dict[str, Any]:
    """A step's metrics as they are written to metrics.jsonl."""
    total = done.total
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
        "lr": done.lr,
        "grad_norm": done.norm,
        "tokens": done.tokens,
        "supervised": total.live_K[0].item(),
    }


@functools.cache
def _stream(device: torch.device) -> torch.cuda.Stream:
    """A side stream, one per process and device: every further stream would hold memory and workspaces of its own."""
    return torch.cuda.Stream(device)


def with_features(
    rows: Iterable[Packed], features: Callable[[Packed], Features], device: torch.device, *, prefetch: bool
) -> Iterator[tuple[Packed, Features]]:
    """Yields each row with the row's features.

    With `prefetch` (CUDA only), the next row's features are started on a side stream before a row is yielded, so that
    the target's forward pass overlaps with the draft's training step. This needs memory for the features of two rows,
    or of three if the caller still holds a row's features when asking for the next row.
    """
    if not prefetch:
        for row in rows:
            yield row, features(row)
        return
    rows, stream = iter(rows), _stream(device)

    def start_next() -> tuple[Packed, Features] | None:
        if (row := next(rows, None)) is None:
            return None
        # memory of freed features returns to this stream's pool while the main stream may still read it
        stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(stream):
            return row, features(row)

    upcoming = start_next()
    while upcoming is not None:
        current = [upcoming]
        torch.cuda.current_stream(device).wait_stream(stream)
        upcoming = start_next()
        yield current.pop()  # `pop` leaves no reference to the features here
