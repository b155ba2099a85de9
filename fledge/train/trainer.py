"""The training loop. A run can be stopped after any step; a resumed run gives bit-identical results.

Several ranks train one draft by the same loop: each computes some rows of a step, the gradients are summed, and the
update equals the update of a single process on all rows (`fledge.train.ranks`).
"""

from __future__ import annotations

import functools
import math
import operator
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import torch

from fledge.data.pack import Rows
from fledge.drafts.draft import Draft
from fledge.ops.device import to_device
from fledge.targets.source import FeatureSource, LiveFeatures, RowIterator
from fledge.train.feed import AFTER, BEFORE, Deliveries, deliveries_of_step
from fledge.train.objective import RowSums, ttt_queued
from fledge.train.optim import MasterOptimizer, learning_rate
from fledge.train.ranks import ALONE, Ranks
from fledge.train.row_pass import Implementation, Objective
from fledge.types import Features, Packed

if TYPE_CHECKING:
    from fledge.train.checkpoint import RunDirectory

# waiting for rows; the target's pass, or waiting for features; forward pass, loss and backward pass; the sum of
# gradients over ranks, and the update
DATA, TARGET, DRAFT, OPTIMIZER = PARTS = ("data", "target", "draft", "optimizer")


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


@dataclass
class Run:
    """A training run: what is trained, on what, and how far the training is.

    `directory` holds what hooks write, and the checkpoint of a `resumed` run. Files of the draft are written in
    `save_dtype`. `watch` measures the parts of steps, and `metrics` are the metrics of the last step.
    """

    draft: Draft
    rows: Rows
    source: FeatureSource
    schedule: Schedule
    directory: RunDirectory | None = None
    ranks: Ranks = ALONE
    save_dtype: torch.dtype = torch.bfloat16
    resumed: bool = False
    progress: Progress = field(default_factory=Progress)
    optimizer: MasterOptimizer = field(init=False)
    watch: Stopwatch = field(init=False)
    metrics: dict[str, Any] = field(default_factory=dict)
    stopping: bool = False

    def stop(self) -> None:
        """Asks to stop. A single process stops after the current step, or after the first. Several ranks agree to stop
        when they next meet in a step, and stop after that step."""
        self.stopping = True

    def prepare(self) -> None:
        """Gives the training ranks the weights of rank 0's draft, and makes the optimizer."""
        with self.ranks.collective(BEFORE):
            self.ranks.copy_from_first([*self.draft.parameters(), *self.draft.buffers()])
        given = self.schedule.weight_decay, self.ranks, self.schedule.optimizer
        self.optimizer = MasterOptimizer(self.draft.named_parameters(), *given)
        self.watch = Stopwatch(self.draft.device)

    def begin(self) -> None:
        """Prepares the run, and restores the optimizer and the progress of a resumed run. Raises ValueError if the run
        was trained before, or if the checkpoint does not belong to this run."""
        if self.progress.step:
            raise ValueError("this Run was trained before; make another, with resumed=True to go on from a checkpoint")
        self.prepare()
        with self.ranks.together(BEFORE) if self.ranks.target_ranks else nullcontext():
            if self.resumed:
                self._restore(self.directory)
        if self.draft.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.draft.device)
        with self.ranks.collective(BEFORE):
            self.ranks.from_first(self.progress)  # for the target ranks

    def _restore(self, directory: RunDirectory) -> None:
        if (saved := directory.load_progress()) is not None:
            try:
                self.progress = _progress_of(saved, self.schedule.steps, self.rows)
            except (LookupError, TypeError, ValueError) as e:
                raise directory.damage_error(f"it is not the state of this run, {type(e).__name__}: {e}") from e
            directory.load_tensors(self.optimizer.state(), self.ranks)
            self.optimizer.restored()
        if self.ranks.leads:
            directory.truncate_metrics(self.progress.step)


def _progress_of(saved: dict[str, Any], steps: int, rows: Rows) -> Progress:
    """The progress in a checkpoint. Raises LookupError, TypeError or ValueError for the progress of another run."""
    epoch, row = saved["address"]
    progress = Progress(**saved | {"address": (epoch, row)})  # JSON has no tuples
    if progress.step > steps or row >= len(rows.epoch(epoch)):
        raise ValueError(f"step {progress.step} of {steps} at row {progress.address}")
    return progress


@dataclass(frozen=True)
class StepResult:
    """The result of an optimizer step over all ranks: the number of steps done, the rows' summed metrics, whether a
    rank asked to stop before the ranks met, and the `metrics` for metrics.jsonl, to which hooks may add."""

    step: int
    sums: RowSums
    stops: bool
    metrics: dict[str, Any]


class Hook:
    """What is done besides training: `train` calls the hooks of a run in their order. A subclass overrides what it
    needs.

    Every training rank calls its hooks after the same steps. Only rank 0 may write files, and ranks may communicate in
    a hook only if all ranks do.
    """

    @contextmanager
    def around(self, run: Run) -> Iterator[None]:
        """Context manager around all steps of a run: code before `yield` runs before the first step, and code after
        `yield` after the last step or a stop, unless an error ends the run. The first hook's block is the outermost."""
        yield

    def after(self, run: Run, result: StepResult) -> None:
        """Called after each step. May add numbers, texts and lists of them to `result.metrics`, and call `run.stop`."""

    def finished(self, run: Run) -> None:
        """Called after `Schedule.steps` steps, and when a finished run is resumed, but not after a stop."""

    def meets_after(self, run: Run, step: int) -> bool:
        """Whether the ranks that hold only the target meet the training ranks in `after` of a step. True of `Drafts`
        alone, whose evaluation such ranks share (`train.feed.feed`)."""
        return False


def train(run: Run, hooks: Sequence[Hook] = ()) -> Progress:
    """Trains until `schedule.steps`, or until a hook asks to stop (`Run.stop`), and returns the progress.

    Each training rank calls `train` with the same run and hooks; target ranks call `train.setup.run.feed_draft`
    instead, and `source` is then `ReceivedFeatures`. An error in a step of one rank ends all ranks, with a message that
    names the error (`Ranks.meet`); after an error in a hook of one rank, the other ranks end by a LostRankError. Raises
    ValueError if the run was trained before, or if the checkpoint of a resumed run does not belong to the run, and
    FloatingPointError if a gradient is not finite.
    """
    run.begin()
    with ExitStack() as stack:
        upcoming = stack.enter_context(upcoming_rows(run))
        for hook in hooks:
            stack.enter_context(hook.around(run))
        while run.progress.step < run.schedule.steps:
            try:
                result = optimizer_step(run, upcoming)
            except FloatingPointError as e:
                if run.ranks.target_ranks:
                    _tell(run, e, hooks)
                raise
            for hook in hooks:
                hook.after(run, result)
            if result.stops or (run.stopping and run.ranks.total == 1):
                break
    if run.ranks.target_ranks:
        run.source.finish(run.progress.step)
        run.ranks.meet(AFTER, None)
    if run.progress.step == run.schedule.steps:
        for hook in hooks:
            hook.finished(run)
    return run.progress


def _tell(run: Run, error: Exception, hooks: Sequence[Hook]) -> None:
    """Raises an error that occurred after a step's meeting. Raises at the next meeting, where the target ranks learn of
    the error. Before the next meeting, the target ranks send the rows of the next step, unless a hook meets first."""
    step = run.progress.step + 1
    if not any(hook.meets_after(run, step) for hook in hooks):
        run.source.finish(step + 1)
    run.ranks.meet(f"in step {step}", None, error)


@contextmanager
def upcoming_rows(run: Run) -> Iterator[Iterator[tuple[Packed, Features]]]:
    """Context manager: the rows that this rank computes, from the progress to the end of the schedule, with features.
    Reading ahead ends with the block."""
    deliveries = Deliveries(run)
    if run.ranks.target_ranks:
        run.source.begin(deliveries)
    own = (run.rows[d.address] for d in deliveries if d.rank == run.ranks.rank)
    with closing(run.source.ahead(own)) as ahead:
        prefetch = run.schedule.implementation.prefetch
        yield with_features(run.watch.rows(ahead), run.source.features, run.draft.device, prefetch=prefetch)


def optimizer_step(run: Run, upcoming: Iterator[tuple[Packed, Features]]) -> StepResult:
    """One optimizer step over the next `rows_per_step` rows; advances the progress. `upcoming` yields this rank's rows
    with features.

    The gradient is Σ_k γ^k Σ_scored ∇loss / Σ_k γ^k scored_k, over all rows of all ranks; with D-PACE, each slot has a
    weight of its own in the first sum, and the divisor is the number of blocks. Raises FloatingPointError,
    with the likely causes, if the gradient's norm is not finite; the draft must not be saved then. Raises RankError if
    another rank fails, ends or does not answer.
    """
    draft, source, schedule, progress, ranks = run.draft, run.source, run.schedule, run.progress, run.ranks
    objective = schedule.objective
    start, where = time.perf_counter(), f"in step {progress.step + 1}"
    draft.train()
    shared = deliveries_of_step(run.rows, progress.step, progress.address, schedule.rows_per_step, ranks)
    own = [d for d in shared if d.rank == ranks.rank]
    results, failure = [], None
    try:
        for place, d in enumerate(own, 1):
            later = own[place:]
            run.watch.begin(TARGET)
            row, features = next(upcoming)
            run.watch.begin(DRAFT)
            key = f"{schedule.seed} {progress.step} {d.index}"
            result = ttt_queued(draft, row, features, source.logits, objective, schedule.implementation, key)
            results.append(result)
            del features  # frees the memory before `upcoming` starts the row after the next
            run.optimizer.accumulate()
    except Exception as e:  # the meeting reports the error to all ranks
        failure = e
        if ranks.target_ranks or (isinstance(source, LiveFeatures) and source.target.sharded):
            with suppress(Exception):  # the other ranks may wait to send or to compute the features of further rows
                for _ in later:
                    next(upcoming)
    run.watch.begin(OPTIMIZER)
    stops = any(ranks.meet(where, run.stopping and ranks.total > 1, failure))
    tokens = 0
    for _ in range(schedule.rows_per_step):
        tokens += run.rows.tokens(progress.address)
        progress.address = run.rows.next(progress.address)
    divisors = to_device([torch.tensor(objective.divisors(), dtype=torch.float64)], draft.device)[0]
    lr = learning_rate(progress.step, schedule.steps, schedule.lr, max(1, round(schedule.warmup * schedule.steps)))
    with ranks.collective(where):
        divisor = ranks.sum(sum(((r.scored_K() * divisors).sum() for r in results), torch.zeros_like(divisors[0])))
        norm = run.optimizer.step(lr, 1.0 / divisor.clamp_min(1e-9), schedule.clip)
        sums = functools.reduce(operator.add, [r.to_host() for r in results], RowSums.zero(objective.depth))
        if ranks.size > 1:
            sums = RowSums.unpacked(ranks.sum(sums.packed()))
        run.watch.end()
        norm = norm.item()
        if not math.isfinite(norm):
            raise FloatingPointError(f"the gradient of step {progress.step + 1} is {norm}: {_causes(run)}")
    seconds = time.perf_counter() - start
    progress.step += 1
    progress.seconds += seconds
    run.metrics = {"step": progress.step, **_metrics(sums, objective), "lr": lr, "grad_norm": norm, "tokens": tokens}
    run.metrics |= {"supervised": sums.supervised, "room": schedule.rows_per_step * run.rows.row_length}
    run.metrics |= {"parts": run.watch.read(), "seconds": seconds, "tokens_per_s": tokens / seconds}
    if draft.device.type == "cuda":
        run.metrics["peak_gib"] = torch.cuda.max_memory_allocated(draft.device) / 2**30
    return StepResult(progress.step, sums, stops, run.metrics)


def _causes(run: Run) -> str:
    """The likely causes of a gradient that is not finite, and the remedies."""
    overflow = f"the target's hidden states overflow in {str(run.draft.dtype).removeprefix('torch.')}"
    if run.progress.step == 0:
        return (
            f"{overflow}, or the initial draft does; train with --dtype float32, which has the widest range, copy the "
            "target again, or start from another draft"
        )
    return (
        f"{overflow}, or the learning rate is too high; train again with --dtype float32 or a lower --lr, in another "
        "--out, from the last checkpoint's weights (--init-from RUN/checkpoint) if there is one"
    )


def _metrics(sums: RowSums, objective: Objective) -> dict[str, Any]:
    """The metrics of a step's rows: loss, simulated τ, and lists with a number for each draft step."""
    live = sums.live_K.clamp_min(1)
    scored = sum(weight * n for weight, n in zip(objective.discounts(), sums.scored_K.tolist(), strict=True))
    committed, rounds = sums.simulated
    tau = {"tau": committed / max(rounds, 1)}
    if objective.drop:
        # decoding cannot be simulated, since most slots are dropped; a mean over the trained slots, which is higher
        tau = {"tau_slots": 1 + float((sums.survive_K / live).sum())}
    return {
        "loss": sums.loss.item() / max(scored, 1e-9),
        **tau,
        "hit": (sums.hit_K / live).tolist(),
        "accept": (sums.accept_K / live).tolist(),
        "survive": (sums.survive_K / live).tolist(),
        "live": sums.live_K.tolist(),
        "scored": sums.scored_K.tolist(),
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


class Stopwatch:
    """Measures the seconds of a step's parts on a device. A part lasts from `begin` to the next `begin` or to `end`,
    and may occur several times in a step. `others` holds the seconds of parts outside of the steps.

    On a GPU, launches are asynchronous, and only the device knows when a part began: each mark is a CUDA event on the
    stream that trains. `read` reads the events after the step, when the step has already waited for the device, so
    measuring adds no synchronization. A part is the time in which the training stream worked or waited: where the
    target runs ahead on another stream, `target` is only the draft's wait for the target, and a delay of the host
    counts in the delayed part.
    """

    def __init__(self, device: torch.device):
        self.others: dict[str, float] = {}
        self._stream = torch.cuda.current_stream(device) if device.type == "cuda" else None
        self._marks: list[tuple[str | None, torch.cuda.Event | float]] = []

    def begin(self, part: str) -> None:
        self._marks.append((part, self._now()))

    def end(self) -> None:
        """Ends the last part. Must be called before waiting for the device, and `read` after waiting."""
        self._marks.append((None, self._now()))

    def read(self) -> dict[str, float]:
        """The seconds of each of PARTS since the last `read`."""
        marks, self._marks = self._marks, []
        seconds = dict.fromkeys(PARTS, 0.0)
        for (part, start), (_, end) in pairwise(marks):
            if part is not None:
                seconds[part] += end - start if self._stream is None else start.elapsed_time(end) / 1e3
        return seconds

    @contextmanager
    def outside(self, part: str) -> Iterator[None]:
        """Context manager: adds the seconds of a block between two steps to the part in `others`."""
        start = time.perf_counter()
        yield
        self.others[part] = self.others.get(part, 0.0) + time.perf_counter() - start

    def rows(self, rows: RowIterator) -> Iterator:
        """Yields the same rows. The wait for a row counts as `data`, and the time after a row arrives as `target`."""
        while True:
            self.begin(DATA)
            row = next(rows, None)
            self.begin(TARGET)
            if row is None:
                return
            yield row

    def _now(self) -> torch.cuda.Event | float:
        if self._stream is None:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record(self._stream)
        return event
