"""`fledge train --dry-run`: plans a run without starting the run, and times a few steps if the devices are present.

Nothing is written but the cache of tokenized data. The plan needs the target's config and tokenizer, the draft's
config, and the data.
"""

from __future__ import annotations

import functools
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from fledge.data.documents import lengths_of
from fledge.data.pack import Rows
from fledge.drafts.draft import Draft
from fledge.io.display import ProgressDisplay, format_bytes
from fledge.io.machine import resolve_device
from fledge.io.results import ResultPrinter
from fledge.states.source import ROWS_AHEAD
from fledge.targets.distributed import target_bytes
from fledge.targets.source import FeatureSource
from fledge.train.checkpoint import RunDirectory
from fledge.train.feed import AFTER, feed
from fledge.train.objective import Implementation, Objective
from fledge.train.ranks import Ranks, local_rank, started_by_torchrun
from fledge.train.setup.data import check_files, pack_rows, total_memory, training_data
from fledge.train.setup.draft import draft_sizes, make_draft
from fledge.train.setup.estimate import Machine, Work, memory_parts, target_memory_parts
from fledge.train.setup.launch import needs_processes, start_processes
from fledge.train.setup.options import TrainOptions
from fledge.train.setup.recipe import Recipe
from fledge.train.setup.recipe_file import complete_options, resolve_recipe
from fledge.train.setup.run import (
    USABLE_FRACTION,
    DoesNotFit,
    check_ranks,
    choose_implementation,
    disk_space,
    implementations,
    make_schedule,
    run_ranks,
)
from fledge.train.setup.target import plan_target, prepare_shared_target, quantization_note, reads_features_only
from fledge.train.trainer import Run, Schedule, optimizer_step, upcoming_rows

GB = 10**9
WARM_UP, TIMED = 2, 3  # steps; the first ones compile kernels

Say = Callable[[str], None]
# seconds of the timed steps, their tokens without filler, and the peak of a GPU's allocated bytes (None on a CPU)
Timed = tuple[float, int, int | None]


@dataclass(frozen=True)
class Plan:
    """A planned run. `asked` are the implementations to choose from, from fast to small. `resumed` says whether the
    directory holds a run to continue. `done` is the number of steps already done."""

    machine: Machine
    work: Work
    asked: tuple[Implementation, ...]
    recipe: Recipe
    rows: Rows
    schedule: Schedule
    directory: RunDirectory
    resumed: bool = False
    done: int = 0

    @property
    def left(self) -> int:
        """The number of steps to do."""
        return self.schedule.steps - self.done

    @property
    def tokens(self) -> int:
        """The tokens of the data."""
        return int(lengths_of(self.rows.documents).sum())

    @functools.cached_property
    def implementation(self) -> Implementation:
        """The first implementation that fits, or else the smallest."""
        taken = ((impl, sum(memory_parts(self.work, impl, self.machine).values())) for impl in self.asked)
        return next((impl for impl, count in taken if count <= self.machine.usable), self.asked[-1])

    @functools.cached_property
    def memory(self) -> dict[str, int]:
        """The bytes of each part of the memory of a training rank."""
        return memory_parts(self.work, self.implementation, self.machine)

    @functools.cached_property
    def target_memory(self) -> dict[str, int]:
        """The bytes of each part of the memory of a target rank; empty without target ranks."""
        return target_memory_parts(self.work, self.machine) if self.machine.apart else {}

    @functools.cached_property
    def disk(self) -> tuple[int, int]:
        """The bytes that the run still writes, and the free bytes of the run directory's disk."""
        return disk_space(self.directory, self.work.draft, self.schedule.optimizer)

    @property
    def fits_memory(self) -> bool:
        return max(sum(self.memory.values()), sum(self.target_memory.values())) <= self.machine.usable

    @property
    def fits_disk(self) -> bool:
        return self.disk[0] <= self.disk[1]

    def cure(self) -> str:
        """Options that take less memory."""
        ways = [] if self.resumed else ["fewer --slots", "a smaller --row-length"]  # a resumed run keeps both
        if self.machine.apart:
            ways.append("more --target-gpus with --shard-target")
        elif self.machine.device == "cuda" and not reads_features_only(self.recipe):
            ways.append("more --gpus" if self.machine.split else "--shard-target on several --gpus")
        return "use " + " or ".join(ways) if ways else "choose a machine with more memory"


def dry_run(options: TrainOptions, arguments: Sequence[str], printer: ResultPrinter, display: ProgressDisplay) -> int:
    """Prints the plan of a run and, if the devices are present, the time of a step. Returns the command's exit code: 0,
    or 1 if the run does not fit.

    `arguments` are the command's arguments; for several GPUs, a process with the same arguments starts for each GPU.
    Raises ValueError for options that a run would refuse, and for machines that cannot be planned.
    """
    if options.gpu_memory is not None and options.device not in ("auto", "cuda"):  # a recipe's device does not matter
        raise ValueError(f"--gpu-memory with --device {options.device}; leave one of them out")
    follows = started_by_torchrun() and options.gpus is not None  # the parent process printed the plan
    say: Say = (lambda line: None) if follows else display.say
    options, _, directory = complete_options(options, True, say)
    machine = find_machine(options)
    starts = machine.there and needs_processes(options)
    plan = make_plan(options, directory, machine, say, display)
    if not follows and os.environ.get("RANK", "0") == "0":
        print_plan(plan, printer)
    if not (plan.fits_memory and plan.fits_disk):
        return 1
    if not machine.there or not plan.left:
        return 0
    if starts:
        return start_processes(machine.ranks, arguments)
    with run_ranks(options) as ranks:
        try:
            timed = _time(plan, ranks, display.say if ranks.leads else lambda line: None, display)
        except (DoesNotFit, torch.OutOfMemoryError) as e:
            printer.print(f"Memory: does not fit, as steps show that were tried: {e}")
            return 1
        if ranks.leads:
            print_timing(plan, timed, printer)
    return 0


def find_machine(options: TrainOptions) -> Machine:
    """The machine that complete options name: this machine, or an absent machine to plan for. Raises ValueError if the
    options do not determine the machine."""
    started = started_by_torchrun()
    ranks = int(os.environ["WORLD_SIZE"]) if started else options.gpus or 1
    check_ranks(options, ranks)
    count, first = torch.cuda.device_count(), torch.device("cuda", 0)
    device, there = torch.device("cuda"), False
    if options.gpu_memory is not None:
        if started:
            raise ValueError("--gpu-memory plans for GPUs that are not there; start it without torchrun")
        memory = int(options.gpu_memory * GB)
    elif not started and ranks > max(count, 1):
        if not count:
            raise ValueError(
                f"--gpus {ranks}, but this machine has no GPU; give --gpu-memory, the GB of memory of each of those "
                "that the plan is for"
            )
        memory = total_memory(first)
    else:
        device, there = torch.device(resolve_device(options.device)), True
        if device.type == "cpu":
            memory = total_memory(device) // int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        elif started or ranks == 1:
            memory = torch.cuda.mem_get_info(local_rank() if started else device.index or 0)[0]
        else:
            memory = total_memory(first)
    return Machine(ranks, device.type, memory, there, options.target_gpus or 0, options.shard_target)


def make_plan(options: TrainOptions, directory: RunDirectory, machine: Machine, say: Say, progress: Any) -> Plan:
    """The plan of a run with complete options. Loads no weights. Raises ValueError for problems of the run that show
    without the weights."""
    recipe = resolve_recipe(options, directory, imagined=not machine.there)
    if options.resume:
        check_files(recipe.data, directory)
    target = plan_target(recipe)
    if target.target.quantization:
        say(quantization_note(target.target))
        say(f"the plan counts its weights in {target.target.dtype}, and they take less")
    draft = draft_sizes(recipe, target)
    documents, _ = training_data(recipe, target, say, progress)
    rows = pack_rows(recipe, target, documents, say)
    ranks = Ranks(size=machine.trains)
    lockstep = machine.split and not machine.apart
    schedule = make_schedule(recipe, rows, draft.config.hidden_size, ranks, lockstep, say)
    saved = directory.load_progress() if options.resume else None
    work = Work(
        weights=target_bytes(target.target),
        draft=draft,
        tokens=rows.row_length,
        slots=heaviest_slots(rows, schedule.objective),
        document=rows.longest(),
        rows=-(-schedule.rows_per_step // machine.trains),
        optimizer=schedule.optimizer,
        runs=not reads_features_only(recipe),
        staged=ROWS_AHEAD * recipe.features.layout.bytes(1, 1) if recipe.features else 0,
    )
    done = min(int((saved or {}).get("step", 0)), schedule.steps)
    asked = tuple(implementations(recipe.options, draft.rows_per_slot(schedule.objective.depth)))
    return Plan(machine, work, asked, recipe, rows, schedule, directory, options.resume is not None, done)


def heaviest_slots(rows: Rows, objective: Objective) -> tuple[int, ...]:
    """The number of slots trained at each step of the row of the first epoch that needs the most memory."""
    trained = []
    for row in rows.heaviest():
        live = row.live(objective.depth)
        slots = objective.drop.keep(row, live, "") if objective.drop else live
        trained.append(tuple(t.numel() for t in slots))
    return max(trained, key=sum)


def print_plan(plan: Plan, printer: ResultPrinter) -> None:
    """Prints the memory of each rank, whether memory and disk suffice, and the steps."""
    machine, work = plan.machine, plan.work
    parameters = sum(p.numel() for p in work.draft.parameters())
    frozen = f", of which {work.trained:,} are trained" if work.trained < parameters else ""
    dtype = str(work.draft.dtype).removeprefix("torch.")
    printer.print(f"The draft has {parameters:,} parameters{frozen}, in {dtype}.")
    _print_memory(_each(machine, machine.trains) + " training the draft" * (machine.apart > 0), plan.memory, printer)
    if machine.apart:
        _print_memory(f"{_each(machine, machine.apart)} holding only the target", plan.target_memory, printer)
    printer.print(_memory_verdict(plan))
    if machine.target_shares > 1:
        reader = machine.trains if machine.apart else 0
        whole = format_bytes(work.weights.whole)
        printer.print(f"Rank {reader} reads the whole target into host memory before it is split: {whole}.")
    needed, free = map(format_bytes, plan.disk)
    fits, cure = ("fits", "") if plan.fits_disk else ("does not fit", "; choose another --out")
    printer.print(
        f"Disk: {fits}, {needed} of the {free} that are free where {plan.directory.path} is, for the draft and the "
        f"checkpoint, each twice while a new one replaces it{cure}."
    )
    printer.print(_steps(plan))
    if not machine.there:
        printer.print("The hours are not estimated, as these GPUs are not there.")


def _each(machine: Machine, n: int) -> str:
    gpu = machine.device == "cuda"
    if n == 1:
        return "the GPU" if gpu else "the process on CPUs"
    return f"each of {n} GPUs" if gpu else f"each of {n} processes on CPUs"


def _print_memory(where: str, parts: dict[str, int], printer: ResultPrinter) -> None:
    amounts = [(name, format_bytes(count)) for name, count in parts.items()]
    printer.amounts(f"memory of {where}", [*amounts, ("together", format_bytes(sum(parts.values())))])


def _memory_verdict(plan: Plan) -> str:
    impl, machine = plan.implementation, plan.machine
    how = f"--impl {impl.attention} and {impl.slots:,} slots in flight" + (
        ", recomputing the MLP's activations" if impl.recompute else ""
    )
    reserve = f" ({1 - USABLE_FRACTION:.0%} must stay free)" if machine.usable < machine.memory else ""
    taken = format_bytes(sum(plan.memory.values()))
    if plan.target_memory:
        taken += f", and {format_bytes(sum(plan.target_memory.values()))} with the target,"
    text = f"with {how}, {taken} of {format_bytes(machine.memory)}{reserve}"
    if plan.fits_memory:
        return f"Memory: fits {text}."
    return f"Memory: does not fit {text}; {plan.cure()}."


def _steps(plan: Plan) -> str:
    rows, schedule, n = plan.rows, plan.schedule, plan.machine.trains
    each = f", {-(-schedule.rows_per_step // n)} on each rank" if n > 1 else ""
    left = f"; {plan.left:,} of them are left" if plan.done else ""
    return (
        f"Steps: {format_count(len(rows.epoch(0)), 'row')} of {rows.row_length:,} tokens for the {plan.tokens:,} "
        f"tokens of the data; {format_count(schedule.steps, 'step')} of "
        f"{format_count(schedule.rows_per_step, 'row')}{each}, lr {schedule.lr:.2g}{left}."
    )


def format_duration(seconds: float) -> str:
    """A duration as text in hours and minutes; in seconds below two minutes."""
    if seconds < 120:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes // 60} h {minutes % 60} min" if minutes >= 60 else f"{minutes} min"


def format_count(n: int, what: str) -> str:
    """A number and a noun, such as "2 rows"."""
    return f"{n:,} {what}{'s' * (n != 1)}"


def _time(plan: Plan, ranks: Ranks, say: Say, progress: Any) -> Timed:
    """Loads the target of a planned run, and times a few steps."""
    recipe, rows = plan.recipe, plan.rows
    with ranks.together("while the target was loaded"):
        target = prepare_shared_target(recipe, ranks, plan.machine.target_shares > 1, say)
        draft = make_draft(recipe, target, rows.documents, say)
        implementation = choose_implementation(recipe.options, draft, rows, target.source, plan.schedule, ranks, say)
    schedule = replace(plan.schedule, implementation=ranks.from_first(implementation))
    return time_steps(draft, rows, target.source, schedule, ranks, progress)


def time_steps(
    draft: Draft, rows: Rows, source: FeatureSource, schedule: Schedule, ranks: Ranks, progress: Any
) -> Timed:
    """Times TIMED optimizer steps on the first rows, after WARM_UP steps. All steps train the draft.

    Every rank calls `time_steps`; a target rank times nothing. Raises FloatingPointError like `optimizer_step`."""
    gpu = draft.device.type == "cuda"
    synchronize: Callable[[], Any] = (lambda: torch.cuda.synchronize(draft.device)) if gpu else (lambda: None)
    schedule = replace(schedule, steps=WARM_UP + TIMED + 1)  # the last step too computes the next row's features
    run = Run(draft, rows, source, schedule, ranks=ranks)
    if not ranks.trains:
        feed(run, WARM_UP + TIMED)
        return 0.0, 0, None
    run.prepare()
    tokens, began = 0, 0.0
    with (
        upcoming_rows(run) as upcoming,
        progress.count("timing steps", WARM_UP + TIMED) as advance,
    ):
        for step in range(WARM_UP + TIMED):
            if step == WARM_UP:
                if gpu:
                    torch.cuda.reset_peak_memory_stats(draft.device)
                synchronize()
                ranks.sum(torch.zeros(()))  # a meeting: all ranks begin together
                tokens, began = 0, time.perf_counter()
            tokens += optimizer_step(run, upcoming).metrics["tokens"]
            advance()
    synchronize()
    seconds = time.perf_counter() - began
    if ranks.target_ranks:
        source.finish(run.progress.step)
        ranks.meet(AFTER, None)
    return seconds, tokens, torch.cuda.max_memory_allocated(draft.device) if gpu else None


def print_timing(plan: Plan, timed: Timed, printer: ResultPrinter) -> None:
    """Prints the speed of the timed steps, and the hours of the steps to do."""
    seconds, tokens, peak = timed
    used = "" if peak is None else f"; their peak on a GPU was {format_bytes(peak)}"
    tokens_left = plan.tokens / len(plan.rows.epoch(0)) * plan.schedule.rows_per_step * plan.left
    left = format_duration(tokens_left * seconds / max(tokens, 1))
    printer.print(f"{TIMED} steps took {seconds / TIMED:.2f} s each, {tokens / seconds:,.0f} tokens/s{used}.")
    printer.print(
        f"{format_count(plan.left, 'step')} would take about {left}, without the start, checkpoints and measurements "
        "of τ."
    )
