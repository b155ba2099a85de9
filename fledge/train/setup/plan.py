"""The plan of a training run: memory of each rank, disk, options with which the run would fit, and steps."""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace

from fledge.data.documents import lengths_of
from fledge.data.pack import Rows
from fledge.io.display import ResultPrinter, format_bytes
from fledge.train.checkpoint import RunDirectory
from fledge.train.memory import (
    CANDIDATES,
    MIN_TOKENS,
    USABLE_FRACTION,
    Machine,
    Work,
    memory_parts,
    target_memory_parts,
)
from fledge.train.row_pass import Implementation, Objective
from fledge.train.setup.recipe import Recipe
from fledge.train.setup.run import disk_space
from fledge.train.trainer import Schedule

MORE_GPUS = (2, 4, 8, 16)  # that a cure may name
FEW_SLOTS = 64  # on a CPU


@dataclass(frozen=True)
class Plan:
    """A planned run. `asked` are the implementations to choose from, from fast to small. `resumed` says whether the
    directory holds a run to continue, of which `done` steps are done."""

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
        """The bytes of each part of the memory of a rank that trains."""
        return memory_parts(self.work, self.implementation, self.machine)

    @functools.cached_property
    def target_memory(self) -> dict[str, int]:
        """The bytes of each part of the memory of a rank that holds only the target; empty without such ranks."""
        return target_memory_parts(self.work, self.machine) if self.machine.apart else {}

    @functools.cached_property
    def disk(self) -> tuple[int, int]:
        """The bytes that the run still writes, and the free bytes of its disk."""
        return disk_space(self.directory, self.work.draft, self.schedule.optimizer)

    @property
    def fits_memory(self) -> bool:
        return max(sum(self.memory.values()), sum(self.target_memory.values())) <= self.machine.usable

    @property
    def fits_disk(self) -> bool:
        return self.disk[0] <= self.disk[1]

    def cures(self) -> list[str]:
        """Options with which the run fits in memory, each by itself; empty if none of them is enough."""
        machine, smallest, ways = self.machine, self.asked[-1], []  # of each way, the first change that fits is named
        if not self.resumed:  # a resumed run keeps its slots and rows
            fewest = min(n for n, *_ in CANDIDATES) if machine.device == "cuda" else FEW_SLOTS
            ways.append({f"--slots {fewest}": dict(asked=(replace(smallest, slots=min(fewest, smallest.slots)),))})
            halves = [n for i in range(1, 64) if (n := self.work.tokens >> i) >= MIN_TOKENS]
            ways.append(
                {f"--row-length {n} (and --max-length no longer)": dict(work=self.work.resized(n)) for n in halves}
            )
        if machine.apart:
            counts = range(max(machine.apart, 2), machine.ranks)
            split = {f"--target-gpus {n} --shard-target": replace(machine, apart=n, split=True) for n in counts}
        else:
            gpus = {n: f"--gpus {n} --shard-target" for n in MORE_GPUS if n > machine.ranks}
            gpus = {machine.ranks: "--shard-target"} | gpus if machine.ranks > 1 else gpus
            split = {words: replace(machine, ranks=n, split=True) for n, words in gpus.items()}
        if machine.device == "cuda" or machine.apart:
            ways.append({words: dict(machine=changed) for words, changed in split.items()})
        firsts = (next((words for words in way if replace(self, **way[words]).fits_memory), None) for way in ways)
        return [words for words in firsts if words]


def heaviest_slots(rows: Rows, objective: Objective) -> tuple[int, ...]:
    """The number of slots trained at each step of the row of the first epoch that needs the most memory."""
    trained = []
    for row in rows.heaviest():
        live = row.live(objective.depth)
        slots = objective.drop.keep(row, live, "") if objective.drop else live
        trained.append(tuple(t.numel() for t in slots))
    return max(trained, key=sum)


def print_plan(plan: Plan, printer: ResultPrinter) -> None:
    """Prints what each rank would hold, whether memory and disk suffice, and the steps."""
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


def format_count(n: int, what: str) -> str:
    """A number and its noun, such as "2 rows"."""
    return f"{n:,} {what}{'s' * (n != 1)}"
