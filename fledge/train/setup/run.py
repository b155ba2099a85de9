"""Joins the ranks of a training run, plans the steps and how they are computed, runs the trainer with hooks that show
the progress, and prints how it ended. On a GPU, the heaviest rows are tried to find settings that fit in memory."""

from __future__ import annotations

import math
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any

import torch

from fledge.data.pack import Rows
from fledge.drafts.draft import Draft
from fledge.io.display import ProgressBar, format_bytes
from fledge.io.files import existing_parent
from fledge.io.machine import resolve_device
from fledge.targets.source import FeatureSource
from fledge.train.checkpoint import RunDirectory
from fledge.train.feed import BEFORE, feed
from fledge.train.hooks import Attach, Checkpoints, Drafts, Evaluate, MetricsFile, Signals
from fledge.train.objective import Implementation, ttt
from fledge.train.optim import state_bytes
from fledge.train.ranks import LostRankError, Ranks, connected, local_rank, started_by_torchrun
from fledge.train.setup.options import ComputeOptions, TrainOptions
from fledge.train.setup.recipe import Recipe
from fledge.train.trainer import Hook, Run, Schedule, StepResult, train, with_features
from fledge.types import Packed

SAVE_DTYPE = torch.bfloat16  # of the drafts that are written
# (rows of slots in flight, recompute the MLP's activations, prefetch the next row's features), from fast to small
CANDIDATES = (
    (8192, False, True), (4096, False, True), (2048, False, True), (2048, False, False), (2048, True, False),
    (1024, True, False),
)  # fmt: skip
SMALL_CHUNK = 512  # teacher rows of the loss at a time, if activations are recomputed
CPU_SLOTS = 256  # their rows: eager attention reads all keys visible to any slot of a chunk, so small chunks cost less
USABLE_FRACTION = 0.93  # of the device's memory; the rest is left for fragmentation in the allocator
UPDATE_BYTES = 6  # per parameter during the update: the 16-bit gradient and its float32 sum
GRADIENT_SUM_BYTES = 4  # per parameter during the whole step, if a step has several rows
WARM_UP_TOKENS = 128  # of the row that is run before memory is measured

# runs a forward and backward pass; returns an object that holds all tensors which are alive when the draft is updated
RunStep = Callable[[Packed, Implementation], Any]

Say = Callable[[str], None]


@contextmanager
def run_ranks(options: TrainOptions) -> Iterator[Ranks]:
    """Context manager: the ranks of this run. Raises ValueError for a device that all ranks would share."""
    device = torch.device(resolve_device(options.device))
    here = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    if options.gpus not in (None, here):
        cure = f"torchrun has started {here} processes here" if started_by_torchrun() else "start it with torchrun"
        raise ValueError(f"--gpus {options.gpus} starts processes from the command line only: {cure}; leave it out")
    check_ranks(options, int(os.environ["WORLD_SIZE"]) if started_by_torchrun() else 1)
    if started_by_torchrun():
        if device.index is not None:
            raise ValueError(
                f"--device {options.device} with several processes, of which each has a GPU of its own; leave it out"
            )
        if device.type == "cuda":
            device = torch.device("cuda", local_rank())
            resolve_device(str(device))  # there may be fewer GPUs than processes
    limit = timedelta(minutes=options.rank_timeout)
    with connected(device, limit, options.target_gpus or 0) as ranks:
        yield ranks


def check_ranks(options: TrainOptions, ranks: int) -> None:
    """Raises ValueError if --target-gpus or --shard-target do not make sense for a number of ranks."""
    apart = options.target_gpus
    if apart and ranks == 1:
        raise ValueError(
            "--target-gpus sets some of several GPUs apart for the target; give --gpus, or start with torchrun"
        )
    if apart and apart >= ranks:
        raise ValueError(
            f"--target-gpus {apart} of {ranks} GPUs leaves none to train the draft; give {ranks - 1} or fewer"
        )
    if options.shard_target and ranks == 1:
        raise ValueError("--shard-target splits the target over several GPUs; give --gpus, or start with torchrun")
    if options.shard_target and apart == 1:
        raise ValueError(
            "--shard-target splits the target, and --target-gpus 1 leaves it whole on one GPU; give --target-gpus 2 or "
            "more, or leave one of them out"
        )


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


class DoesNotFit(ValueError):
    """A training step needs more memory than the device has, however it is computed. The message names a cure."""


@dataclass(frozen=True)
class Trial:
    """A training step to try on the `rows` that need the most memory. An optimizer step has `rows_per_step` rows, and
    `shards` ranks share the state of the optimizer, whose `kind` is `optimizer`."""

    draft: Draft
    rows: Sequence[Packed]
    step: RunStep
    rows_per_step: int = 1
    shards: int = 1
    optimizer: str = "muon"

    def measure(self, impl: Implementation) -> tuple[int, int]:
        """Runs the step on each row, and discards its gradients.

        Returns the peak of the bytes allocated on the device, the optimizer's included, and that peak plus the bytes
        that are free in one stream's pool but unusable for the other stream. Raises torch.OutOfMemoryError if the step
        does not fit, after freeing everything.
        """
        measured = [self._measure_row(row, impl) for row in self.rows]
        return max(peak for peak, _ in measured), max(peak + unusable for peak, unusable in measured)

    def _measure_row(self, row: Packed, impl: Implementation) -> tuple[int, int]:
        """The peak of a row, and the bytes unusable for the other stream."""
        device, count = self.draft.device, sum(p.numel() for p in self.draft.parameters() if p.requires_grad)
        if impl.prefetch:
            torch.cuda.empty_cache()  # the reserved memory is then the step's alone
        torch.cuda.reset_peak_memory_stats(device)
        try:
            alive = self.step(row, impl)
        finally:
            self.draft.zero_grad(set_to_none=True)
        peak = torch.cuda.max_memory_allocated(device)
        update = torch.cuda.memory_allocated(device) + UPDATE_BYTES * count
        unusable = torch.cuda.max_memory_reserved(device) - peak if impl.prefetch else 0
        del alive
        sums = GRADIENT_SUM_BYTES * count if self.rows_per_step > 1 else 0
        return max(peak + sums, update) + -(-state_bytes(self.draft, self.optimizer) // self.shards), unusable


def choose(trial: Trial, candidates: Sequence[Implementation], available: int) -> tuple[Implementation, int]:
    """Returns the first candidate whose step fits in `available` bytes, and the step's bytes. Raises DoesNotFit if none
    fits."""
    for impl in candidates:
        try:
            taken, with_unusable = trial.measure(impl)
        except torch.OutOfMemoryError:
            continue
        if with_unusable <= USABLE_FRACTION * available:
            return impl, taken
    raise DoesNotFit(
        f"a training step over a row of {trial.rows[0].token_T.numel():,} tokens needs more than the "
        f"{available / 2**30:.1f} GiB that the device has; use fewer --slots, a smaller --row-length or a smaller "
        "--draft-vocab"
    )


def warm_up_row(row: Packed) -> Packed:
    """The first WARM_UP_TOKENS tokens of a row, all supervised: a training step over them runs every kernel."""
    token, position, doc = (x[:WARM_UP_TOKENS] for x in (row.token_T, row.position_T, row.doc_T))
    return Packed(token, doc, position, doc)


def candidates(
    impl: Implementation, *, slots: int | None, activations: str, rows_per_slot: int = 1
) -> list[Implementation]:
    """The implementations to try, from fast to small: CANDIDATES restricted to the options given.

    `slots` None leaves the number of slots in flight open. `activations` is "auto", "recompute" or "keep". Eager layers
    never recompute. `rows_per_slot` is `Draft.rows_per_slot`.
    """
    chosen = [(slots or max(n // rows_per_slot, 1), again, prefetch) for n, again, prefetch in CANDIDATES]
    if impl.layers == "eager":
        chosen = [(n, False, prefetch) for n, _, prefetch in chosen]
    elif activations == "recompute":
        chosen = [(n, True, prefetch) for n, _, prefetch in chosen]
    elif activations == "keep":
        chosen = [c for c in chosen if not c[1]]
    return [
        replace(impl, slots=n, recompute=again, prefetch=prefetch, chunk=SMALL_CHUNK if again else impl.chunk)
        for n, again, prefetch in dict.fromkeys(chosen)
    ]


def choose_implementation(
    compute: ComputeOptions, draft: Draft, rows: Rows, source: FeatureSource, schedule: Schedule, ranks: Ranks, say: Say
) -> Implementation:
    """The requested implementation, with as many slots in flight as fit in GPU memory. Raises ValueError if none fits.
    A target rank tries nothing.
    """
    asked = implementations(compute, draft.rows_per_slot(schedule.objective.depth))
    if not compute.gpu or not ranks.trains:
        return asked[0]
    trial = _trial(draft, rows, source, schedule, ranks)
    # a small step first: the trials then do not measure the memory of lazy initialization
    trial.step(warm_up_row(trial.rows[0]), asked[-1])
    draft.zero_grad(set_to_none=True)
    free, _ = torch.cuda.mem_get_info(draft.device)
    available = free + torch.cuda.memory_reserved(draft.device)
    chosen, taken = choose(trial, asked, available)
    say(_choice_message(chosen, taken, available, rows))
    return chosen


def implementations(compute: ComputeOptions, rows_per_slot: int = 1) -> list[Implementation]:
    """The requested implementations to choose from, from fast to small; a single one on a CPU. `rows_per_slot` is
    `Draft.rows_per_slot`."""
    fast = "eager" if compute.impl == "eager" else "triton"
    implementation = Implementation(attention=compute.impl, loss=fast, layers=fast)
    if not compute.gpu:
        return [replace(implementation, slots=compute.slots or max(CPU_SLOTS // rows_per_slot, 1))]
    return candidates(implementation, slots=compute.slots, activations=compute.activations, rows_per_slot=rows_per_slot)


def _trial(draft: Draft, rows: Rows, source: FeatureSource, schedule: Schedule, ranks: Ranks) -> Trial:
    """A training step of one rank, to try on the rows that need the most memory."""

    def step(row: Packed, implementation: Implementation) -> Any:
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


class Display(Hook):
    """Shows the training on a `ProgressDisplay`, and prints the result at the end. Stops the run if the reader of
    standard error has closed it."""

    def __init__(self, progress: Any, say: Say):
        self.progress, self.say = progress, say

    @contextmanager
    def around(self, run: Run) -> Iterator[None]:
        with closing(ProgressBar(self.progress, "training", run.schedule.steps)) as self._bar:
            yield

    def after(self, run: Run, result: StepResult) -> None:
        if run.ranks.leads:
            metrics, step = result.metrics, result.step
            tau = f"τ {metrics['tau']:.2f}" if "tau" in metrics else f"τ over all slots {metrics['tau_slots']:.2f}"
            speed = f"{metrics['tokens_per_s']:,.0f} tokens/s"
            self._bar.update(step, f"loss {_loss(metrics)}  {tau}", speed)
            if "eval_tau" in metrics:
                self.say(f"step {step:,}: decoded τ {metrics['eval_tau']:.3f} on held-out prompts")
            if step == run.schedule.steps:
                self._bar.close()  # later messages then appear below the bar
        if self.progress.stderr_closed:
            run.stop()

    def finished(self, run: Run) -> None:
        done = run.progress
        result = f"trained in {done.seconds:.0f} s" if run.metrics else "this run was already finished"
        result += f"; the draft is {run.directory.draft}"
        if run.schedule.eval_every and done.best_step:  # several drafts were measured
            result += f", of step {done.best_step:,} (decoded τ {done.best_tau:.3f})"
        self.say(result)


def _loss(metrics: dict[str, Any]) -> str:
    """The loss of a step as text. A loss that would round to 0.000 is shown as "under 0.001", and a step in which no
    token was scored has no loss."""
    if not any(metrics["scored"]):
        return "- (no token in the draft vocabulary)"
    return f"{metrics['loss']:.3f}" if metrics["loss"] >= 0.001 else "under 0.001"


class Tensorboard(Hook):
    """Logs the metrics for TensorBoard, in the run's directory."""

    @contextmanager
    def around(self, run: Run) -> Iterator[None]:
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(run.directory.path / "tensorboard"))
        yield

    def after(self, run: Run, result: StepResult) -> None:
        for name, value in _scalars(result.metrics).items():
            if isinstance(value, int | float):
                self._writer.add_scalar(name, value, result.step)


class Wandb(Hook):
    """Logs the metrics to Weights & Biases."""

    @contextmanager
    def around(self, run: Run) -> Iterator[None]:
        import wandb

        self._board = wandb.init(project="fledge", dir=str(run.directory.path))
        yield

    def after(self, run: Run, result: StepResult) -> None:
        self._board.log(_scalars(result.metrics), step=result.step)


LOGS = {"tensorboard": Tensorboard, "wandb": Wandb}  # the hooks of --log


def run_training(
    run: Run, recipe: Recipe, evaluate: Evaluate | None, attach: Sequence[Attach], hooks: Sequence[Hook], say: Say,
    progress: Any,
) -> None:  # fmt: skip
    """Trains to the last step. A target rank feeds the training ranks instead. `hooks` are called after τ is measured
    (`evaluate`) and the draft is written (`attach`), and before the step's metrics are written.

    Raises KeyboardInterrupt if the training was interrupted, after a message with the command that continues it, and
    ValueError, with a remedy, if the GPU runs out of memory. The message of a LostRankError has the same command.
    """
    trust = " --trust-remote-code" if recipe.options.trust_remote_code else ""
    signals, log = Signals(say), recipe.options.log if run.ranks.leads else None
    # a step's metrics are complete before they are written, and written before the step's checkpoint
    all_hooks: list[Hook] = [signals, Drafts(evaluate, attach), *hooks, MetricsFile(), *([LOGS[log]()] if log else [])]
    all_hooks += [Display(progress, say), Checkpoints(signals.saving)]
    try:
        if run.ranks.trains:
            say(_start_message(run, recipe.options.device))
            train(run, all_hooks)
        else:
            feed_draft(run, evaluate)
    except KeyboardInterrupt:
        say(_stop_message(run, "stopped at once", trust))
        raise
    except LostRankError as e:
        raise LostRankError(_stop_message(run, str(e), trust)) from e
    except torch.OutOfMemoryError as e:
        if not run.ranks.trains:
            raise
        raise ValueError(f"the GPU ran out of memory; {_out_of_memory_advice(run)}") from e
    if run.progress.step < run.schedule.steps:
        say(_stop_message(run, f"stopped after step {run.progress.step}", trust))
        raise KeyboardInterrupt


def feed_draft(run: Run, evaluate: Evaluate | None = None) -> None:
    """The work of a target rank while the others `train`; advances `progress.step`. `evaluate` is as in `feed`."""
    run.ranks.meet(BEFORE, None)
    with run.ranks.collective(BEFORE):
        run.progress = run.ranks.from_first(run.progress)
    with Signals(lambda line: None).around(run):
        feed(run, run.schedule.steps, evaluate)


def _start_message(run: Run, device: str) -> str:
    trained = sum(p.numel() for p in run.draft.parameters() if p.requires_grad)
    schedule, ranks = run.schedule, run.ranks
    devices = device if ranks.total == 1 else f"{ranks.size} rank{'s' * (ranks.size > 1)}"
    if ranks.target_ranks:
        devices += f", fed by {ranks.target_ranks} with the target"
    return (
        f"training {trained:,} parameters on {devices}, {schedule.steps:,} steps of "
        f"{schedule.rows_per_step} x {run.rows.row_length:,} tokens, lr {schedule.lr:.2g}"
    )


def _stop_message(run: Run, event: str, trust: str) -> str:
    command = f"fledge train --resume {run.directory.path}{trust}"
    if not run.directory.checkpoint.exists():
        return f"{event}, before the first checkpoint; start again with: {command}"
    return f"{event}; continue with: {command}"


def _out_of_memory_advice(run: Run) -> str:
    saved = run.directory.checkpoint
    restart = f"continue from its weights (--init-from {saved})" if saved.exists() else "start again"
    slots = run.schedule.implementation.slots
    return f"{restart} in another --out, with fewer than {slots:,} --slots or a smaller --row-length"


def _scalars(metrics: dict[str, Any]) -> dict[str, Any]:
    """The metrics, with each list split into scalars by draft step, `hit/0`, `hit/1`, .., and each dict by its keys."""
    found: dict[str, Any] = {}
    for name, value in metrics.items():
        split = dict(enumerate(value)) if isinstance(value, list) else value
        found |= {f"{name}/{key}": x for key, x in split.items()} if isinstance(split, dict) else {name: value}
    return found
