"""The plan of a training run: memory of each rank, disk, options with which the run would fit, and steps."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass, replace

from fledge.data.dataset import Rows
from fledge.data.documents import lengths_of
from fledge.jobs.display import ResultPrinter
from fledge.jobs.training.recipe import Recipe
from fledge.jobs.training.run import disk_space
from fledge.train.checkpoint import RunDirectory
from fledge.train.estimate import Machine, Sizes, Work, memory_parts, target_memory_parts
from fledge.train.memory import CANDIDATES, MIN_TOKENS, USABLE_FRACTION
from fledge.train.objective import Implementation
from fledge.train.trainer import Schedule

GIB = 2**30
MORE_GPUS = (2, 4, 8, 16)  # that a cure may name
FEW_SLOTS = 64  # on a CPU


@dataclass(frozen=True)
class Plan:
    """A planned run. `asked` are the implementations to choose from, from fast to small. `resumed` says whether the
    directory holds a run to continue, of which `done` steps are done."""

    machine: Machine
    recipe: Recipe
    rows: Rows
    schedule: Schedule
    sizes: Sizes
    work: Work
    asked: tuple[Implementation, ...]
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
        return next((impl for impl in self.asked if self._taken(impl) <= self.machine.usable), self.asked[-1])

    @functools.cached_property
    def memory(self) -> dict[str, int]:
        """The bytes of each part of the memory of a rank that trains."""
        return memory_parts(self.sizes, self.work, self.implementation, self.machine)

    @functools.cached_property
    def target_memory(self) -> dict[str, int]:
        """The bytes of each part of the memory of a rank that holds only the target; empty without such ranks."""
        return target_memory_parts(self.sizes, self.work, self.machine) if self.machine.apart else {}

    @functools.cached_property
    def disk(self) -> tuple[int, int]:
        """The bytes that the run still writes, and the free bytes of its disk."""
        return disk_space(self.directory, self.sizes.draft, self.schedule.optimizer)

    @property
    def fits_memory(self) -> bool:
        return max(sum(self.memory.values()), sum(self.target_memory.values())) <= self.machine.usable

    @property
    def fits(self) -> bool:
        return self.fits_memory and self.disk[0] <= self.disk[1]

    def _taken(self, impl: Implementation) -> int:
        return sum(memory_parts(self.sizes, self.work, impl, self.machine).values())

    def cures(self) -> list[str]:
        """Options with which the run fits in memory, each by itself; empty if none of them is enough."""
        firsts = (next((words for words, plan in ways if plan.fits_memory), None) for ways in self._changes())
        return [words for words in firsts if words]

    def _changes(self) -> Iterator[Iterator[tuple[str, Plan]]]:
        """Options to try, and the plan with them. Of each group, the first options that fit are the cure."""
        machine, smallest = self.machine, self.asked[-1]
        fewest = min(n for n, *_ in CANDIDATES) if machine.device == "cuda" else FEW_SLOTS
        if not self.resumed and smallest.slots > fewest:  # a resumed run keeps its slots and rows
            yield iter([(f"--slots {fewest}", replace(self, asked=(replace(smallest, slots=fewest),)))])
        if not self.resumed:
            halves = (self.work.tokens >> i for i in range(1, self.work.tokens.bit_length()))
            yield (
                (f"--row-length {n} (and --max-length no longer)", replace(self, work=self.work.resized(n)))
                for n in halves
                if n >= MIN_TOKENS
            )
        if machine.apart:
            yield (
                (f"--target-gpus {n} --shard-target", replace(self, machine=replace(machine, apart=n, split=True)))
                for n in range(max(machine.apart, 2), machine.ranks)
            )
        elif machine.device == "cuda":
            yield (
                (
                    "--shard-target" if n == machine.ranks else f"--gpus {n} --shard-target",
                    replace(self, machine=replace(machine, ranks=n, split=True)),
                )
                for n in (machine.ranks, *MORE_GPUS)
                if n >= max(machine.ranks, 2)
            )


def make_work(rows: Rows, schedule: Schedule, trains: int) -> Work:
    """What one of a number of ranks that train computes in a step, by the rows of the first epoch that need the most
    memory."""
    objective, trained = schedule.objective, []
    for row in rows.heaviest():
        live = row.live(objective.depth)
        slots = objective.drop.keep(row, live, "") if objective.drop else live
        trained.append(tuple(t.numel() for t in slots))
    return Work(rows.row_length, max(trained, key=sum), rows.longest(), -(-schedule.rows_per_step // trains))


def print_plan(plan: Plan, printer: ResultPrinter) -> None:
    """Prints what each rank would hold, whether memory and disk suffice, and the steps."""
    machine, sizes = plan.machine, plan.sizes
    parameters = sum(p.numel() for p in sizes.draft.parameters())
    frozen = f", of which {sizes.trained:,} are trained" if sizes.trained < parameters else ""
    dtype = str(sizes.target.dtype).removeprefix("torch.")
    printer.print(f"The draft has {parameters:,} parameters{frozen}, in {dtype}.")
    _print_memory(_each(machine, machine.trains) + " training the draft" * (machine.apart > 0), plan.memory, printer)
    if machine.apart:
        _print_memory(f"{_each(machine, machine.apart)} holding only the target", plan.target_memory, printer)
    printer.print(_memory_verdict(plan))
    if machine.target_shares > 1:
        reader = machine.trains if machine.apart else 0
        whole = format_size(sizes.weights.whole)
        printer.print(f"Rank {reader} reads the whole target into host memory before it is split: {whole}.")
    needed, free = plan.disk
    printer.print(
        f"Disk: {'fits' if needed <= free else 'does not fit'}, {format_size(needed)} of the {format_size(free)} that "
        f"are free where {plan.directory.path} is, for the draft and the checkpoint, each twice while a new one "
        f"replaces it{'.' if needed <= free else '; choose another --out.'}"
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
    amounts = [(name, format_size(count)) for name, count in parts.items()]
    printer.amounts(f"memory of {where}", [*amounts, ("together", format_size(sum(parts.values())))])


def _memory_verdict(plan: Plan) -> str:
    impl, machine = plan.implementation, plan.machine
    how = f"--impl {impl.attention} and {impl.slots:,} slots in flight" + (
        ", recomputing the MLP's activations" if impl.recompute else ""
    )
    reserve = f" ({1 - USABLE_FRACTION:.0%} must stay free)" if machine.usable < machine.memory else ""
    taken = format_size(sum(plan.memory.values()))
    if plan.target_memory:
        taken += f", and {format_size(sum(plan.target_memory.values()))} with the target,"
    text = f"with {how}, {taken} of {format_size(machine.memory)}{reserve}"
    if plan.fits_memory:
        return f"Memory: fits {text}."
    cures = plan.cures()
    cure = "it would fit with " + ", or with ".join(cures)
    if not cures:
        cure = "choose a machine with more memory, a smaller target, or a smaller --draft-vocab"
    return f"Memory: does not fit {text}; {cure}."


def _steps(plan: Plan) -> str:
    rows, schedule, n = plan.rows, plan.schedule, plan.machine.trains
    each = f", {-(-schedule.rows_per_step // n)} on each rank" if n > 1 else ""
    left = f"; {plan.left:,} of them are left" if plan.done else ""
    return (
        f"Steps: {format_count(len(rows.epoch(0)), 'row')} of {rows.row_length:,} tokens for the {plan.tokens:,} "
        f"tokens of the data; {format_count(schedule.steps, 'step')} of "
        f"{format_count(schedule.rows_per_step, 'row')}{each}, lr {schedule.lr:.2g}{left}."
    )


def format_size(count: int) -> str:
    """A number of bytes in GiB, or in MiB if it is small."""
    return f"{count / GIB:,.1f} GiB" if count >= GIB / 10 else f"{count / 2**20:,.1f} MiB"


def format_count(n: int, what: str) -> str:
    """A number and its noun, such as "2 rows"."""
    return f"{n:,} {what}{'s' * (n != 1)}"
