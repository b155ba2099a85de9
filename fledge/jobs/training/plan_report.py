"""Prints the plan of a training run."""

from __future__ import annotations

from fledge.data.documents import lengths_of
from fledge.jobs.display import ResultPrinter
from fledge.jobs.training.plan import Plan
from fledge.jobs.training.timing import TIMED, Timing
from fledge.train.estimate import Part, total
from fledge.train.memory import USABLE_FRACTION

GIB = 2**30


def print_plan(plan: Plan, printer: ResultPrinter) -> None:
    """Prints what would run where, its memory and disk, whether they suffice, and the steps."""
    printer.print(_placement(plan))
    _print_parts(f"memory of {_each(plan)}", plan.memory, printer)
    if plan.target_memory:
        _print_parts("memory of each rank that holds only the target", plan.target_memory, printer)
    printer.print(_memory_verdict(plan))
    if plan.placed.target > 1:
        reader, size = plan.trains if plan.placed.apart else 0, _size(plan.sizes.weights.whole)
        printer.print(f"Rank {reader} reads the whole target into host memory before it is split: {size}.")
    _print_parts("disk", plan.disk, printer)
    printer.print(_disk_verdict(plan))
    printer.print(_steps(plan))
    if not plan.machine.there:
        printer.print("The hours are not estimated, as these GPUs are not there.")


def print_timing(plan: Plan, timing: Timing, printer: ResultPrinter) -> None:
    """Prints the speed of the timed steps, and the hours of the steps to do."""
    peak = "" if timing.peak is None else f"; their peak on a GPU was {_size(timing.peak)}"
    tokens = _tokens(plan) / len(plan.rows.epoch(0)) * plan.schedule.rows_per_step * plan.left
    seconds = tokens * timing.seconds / max(timing.tokens, 1)
    printer.print(
        f"{TIMED} steps took {timing.seconds / TIMED:.2f} s each, {timing.tokens / timing.seconds:,.0f} tokens/s{peak}."
    )
    printer.print(
        f"{_count(plan.left, 'step')} would take about {_duration(seconds)}, without the start, checkpoints and "
        "measurements of τ."
    )


def _placement(plan: Plan) -> str:
    trains, placed, sizes = plan.trains, plan.placed, plan.sizes
    held = "the whole target"
    if placed.target > 1:
        held = f"1/{placed.target} of the target's {sizes.weights.n} layers, its whole embedding and head"
    target = held if sizes.runs and not placed.apart else "the target's embedding, head and last layer"
    state = "the whole optimizer state" if placed.optimizer == 1 else f"1/{trains} of the optimizer's state"
    parameters = sum(p.numel() for p in sizes.draft.parameters())
    dtype = str(sizes.target.dtype).removeprefix("torch.")
    frozen = f", of which {sizes.trained:,} are trained" if sizes.trained < parameters else ""
    others = f"{_have(plan, placed.apart)} {held}, and no part in the training. " if placed.apart else ""
    return (
        f"{_have(plan, trains)} {target}, the whole draft and {state}. {others}The draft has {parameters:,} parameters"
        f"{frozen}, in {dtype}."
    )


def _have(plan: Plan, n: int) -> str:
    """The beginning of a sentence about what n of the ranks have."""
    gpu = plan.machine.device == "cuda"
    if plan.machine.ranks == 1:
        return f"One {'GPU' if gpu else 'process on CPUs'} has"
    if n == 1:
        return f"One rank on {'a GPU' if gpu else 'CPUs'} has"
    return f"{n} GPUs with a rank each, and each rank has" if gpu else f"{n} ranks on CPUs, and each has"


def _each(plan: Plan) -> str:
    if plan.placed.apart:
        return "each rank that trains"
    if plan.machine.ranks > 1:
        return "each rank"
    return "the GPU" if plan.machine.device == "cuda" else "the process"


def _memory_verdict(plan: Plan) -> str:
    impl, machine = plan.implementation, plan.machine
    how = f"--impl {impl.attention} and {impl.slots:,} slots in flight" + (
        ", recomputing the MLP's activations" if impl.recompute else ""
    )
    reserve = f" ({1 - USABLE_FRACTION:.0%} must stay free)" if machine.usable < machine.memory else ""
    taken = _size(total(plan.memory))
    if plan.target_memory:
        taken += f", and {_size(total(plan.target_memory))} with the target,"
    text = f"with {how}, {taken} of {_size(machine.memory)}{reserve}"
    if plan.fits_memory:
        return f"Memory: fits {text}."
    cures = list(plan.cures())
    cure = "it would fit with " + ", or with ".join(cures)
    if not cures:
        cure = "choose a machine with more memory, a smaller target, or a smaller --draft-vocab"
    return f"Memory: does not fit {text}; {cure}."


def _disk_verdict(plan: Plan) -> str:
    amounts = f"{_size(total(plan.disk))} of the {_size(plan.free_disk)} that are free where {plan.directory.path} is"
    return f"Disk: fits, {amounts}." if plan.fits_disk else f"Disk: does not fit, {amounts}; choose another --out."


def _steps(plan: Plan) -> str:
    rows, schedule, n = plan.rows, plan.schedule, plan.trains
    count, tokens = len(rows.epoch(0)), _tokens(plan)
    each = f", {-(-schedule.rows_per_step // n)} on each rank" if n > 1 else ""
    left = f"; {plan.left:,} of them are left" if plan.done else ""
    return (
        f"Steps: {_count(count, 'row')} of {rows.row_length:,} tokens for the {tokens:,} tokens of the data; "
        f"{_count(schedule.steps, 'step')} of {_count(schedule.rows_per_step, 'row')}{each}, lr "
        f"{schedule.lr:.2g}{left}."
    )


def _tokens(plan: Plan) -> int:
    """The tokens of the data."""
    return int(lengths_of(plan.rows.documents).sum())


def _print_parts(heading: str, parts: list[Part], printer: ResultPrinter) -> None:
    rows = [(part.name, _size(part.bytes)) for part in parts]
    printer.amounts(heading, [*rows, ("together", _size(total(parts)))])


def _size(count: int) -> str:
    return f"{count / GIB:,.1f} GiB" if count >= GIB / 10 else f"{count / 2**20:,.1f} MiB"


def _count(n: int, what: str) -> str:
    return f"{n:,} {what}{'s' * (n != 1)}"


def _duration(seconds: float) -> str:
    if seconds < 60:
        return f"{seconds:.1f} seconds"
    return f"{seconds / 3600:,.1f} hours" if seconds >= 3600 else f"{seconds / 60:,.1f} minutes"
