"""The plan of a training run: the machine, what each rank has to compute, and whether it fits there."""

from __future__ import annotations

import functools
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, replace

from fledge.data.dataset import Rows
from fledge.features.budget import existing_parent, format_bytes
from fledge.jobs.training.recipe import Recipe
from fledge.models.draft import Draft
from fledge.train.checkpoint import RunDirectory
from fledge.train.estimate import (
    Part,
    Placement,
    Sizes,
    Work,
    disk_parts,
    memory_parts,
    target_memory_parts,
    total,
)
from fledge.train.memory import CANDIDATES, MIN_TOKENS, USABLE_FRACTION
from fledge.train.objective import Implementation
from fledge.train.trainer import Schedule

MORE_GPUS = (2, 4, 8, 16)  # that a cure may name
FEW_SLOTS = 64  # on a CPU


@dataclass(frozen=True)
class Machine:
    """The ranks of a run and their devices' type, "cuda" or "cpu". `memory` are the bytes that each may have, and
    `there` tells whether this machine is that machine."""

    ranks: int
    device: str
    memory: int
    there: bool

    @property
    def usable(self) -> int:
        """The bytes of a device that training uses; a GPU's allocator is left the rest."""
        return int(self.memory * (USABLE_FRACTION if self.device == "cuda" else 1))


@dataclass(frozen=True)
class Plan:
    """A planned run. `asked` are the implementations to choose from, from fast to small. `resumed` tells whether the
    directory holds a run to continue, of which `done` steps are done."""

    machine: Machine
    recipe: Recipe
    rows: Rows
    schedule: Schedule
    sizes: Sizes
    work: Work
    placed: Placement
    asked: tuple[Implementation, ...]
    directory: RunDirectory
    resumed: bool = False
    done: int = 0

    @property
    def left(self) -> int:
        """The number of steps to do."""
        return self.schedule.steps - self.done

    @functools.cached_property
    def implementation(self) -> Implementation:
        """The first implementation that fits, or else the smallest."""
        return next((impl for impl in self.asked if self._fits_memory(impl)), self.asked[-1])

    @functools.cached_property
    def memory(self) -> list[Part]:
        """What takes memory on a rank that trains."""
        return memory_parts(self.sizes, self.work, self.implementation, self.placed)

    @functools.cached_property
    def target_memory(self) -> list[Part]:
        """What takes memory on a rank that holds only the target; nothing if there is none."""
        if not self.placed.apart:
            return []
        return target_memory_parts(self.sizes, self.work, self.placed, self.trains)

    @property
    def trains(self) -> int:
        """The number of ranks that train."""
        return self.machine.ranks - self.placed.apart

    @functools.cached_property
    def disk(self) -> list[Part]:
        """What the run writes to its directory."""
        return disk_parts(self.sizes.draft, self.schedule.steps, self.schedule.optimizer)

    @functools.cached_property
    def free_disk(self) -> int:
        """The free bytes of the file system of the run's directory."""
        return shutil.disk_usage(existing_parent(self.directory.path)).free

    @property
    def fits_memory(self) -> bool:
        return self._fits_memory(self.implementation) and total(self.target_memory) <= self.machine.usable

    @property
    def fits_disk(self) -> bool:
        return total(self.disk) <= self.free_disk + written_bytes(self.directory)

    @property
    def fits(self) -> bool:
        return self.fits_memory and self.fits_disk

    def _fits_memory(self, impl: Implementation) -> bool:
        return total(memory_parts(self.sizes, self.work, impl, self.placed)) <= self.machine.usable

    def cures(self) -> Iterator[str]:
        """Changes of the options with which the run fits in memory, each by itself; none if it takes more."""
        ranks, gpu = self.machine.ranks, self.machine.device == "cuda"
        if not self.resumed:  # a resumed run keeps its slots and rows
            yield from self._less_work()
        if self.placed.apart:
            yield from self._more_for_the_target()
            return
        if gpu and 1 == self.placed.target < ranks and self._sharded(ranks).fits_memory:
            yield "--shard-target"
        if gpu and (ranks == 1 or not self._sharded(ranks).fits_memory):
            more = (n for n in MORE_GPUS if n > ranks and self._sharded(n).fits_memory)
            if (gpus := next(more, None)) is not None:
                yield f"--gpus {gpus} --shard-target"

    def _more_for_the_target(self) -> Iterator[str]:
        """Those of `cures` that split the target over the ranks that hold only it, or over more of them."""
        for apart in range(max(self.placed.apart, 2), self.machine.ranks):
            trains = self.machine.ranks - apart
            if replace(self, placed=Placement(apart, trains, apart)).fits_memory:
                yield f"--target-gpus {apart} --shard-target"
                return

    def _less_work(self) -> Iterator[str]:
        """Those of `cures` that change what a rank computes at a time."""
        fewest = min(n for n, *_ in CANDIDATES) if self.machine.device == "cuda" else FEW_SLOTS
        fewer = replace(self, asked=(replace(self.asked[-1], slots=fewest),))
        if self.asked[-1].slots > fewest and fewer.fits_memory:
            yield f"--slots {fewest}"
        if tokens := self._shorter_row():
            yield f"--row-length {tokens} (and --max-length no longer)"

    def _sharded(self, ranks: int) -> Plan:
        """The same on a number of GPUs that share the target's layers."""
        return replace(self, machine=replace(self.machine, ranks=ranks), placed=Placement(ranks, ranks))

    def _shorter_row(self) -> int | None:
        """The longest row that fits, in tokens, of halves of the planned one; None if no row does."""
        tokens = self.work.tokens // 2
        while tokens >= MIN_TOKENS:
            if replace(self, work=self.work.resized(tokens)).fits_memory:
                return tokens
            tokens //= 2
        return None


def written_bytes(directory: RunDirectory) -> int:
    """The bytes of the draft and the checkpoint that a run has written."""
    files = (file for path in (directory.draft, directory.checkpoint) for file in path.rglob("*") if file.is_file())
    return sum(file.stat().st_size for file in files)


def check_disk(directory: RunDirectory, draft: Draft, schedule: Schedule) -> None:
    """Raises ValueError if what a run still writes to its directory is more than the disk has free."""
    needed = total(disk_parts(draft, schedule.steps, schedule.optimizer)) - written_bytes(directory)
    free = shutil.disk_usage(existing_parent(directory.path)).free
    if needed > free:
        raise ValueError(
            f"the disk has too little space to save the run in {directory.path}: its draft and its checkpoint, each "
            f"twice while a new one replaces it, need {format_bytes(needed)}, and {format_bytes(free)} are free; free "
            "some disk space, or choose another --out"
        )


def work_of(rows: Rows, schedule: Schedule, machine: Machine, trains: int) -> Work:
    """What one of a number of ranks that train computes in a step, by the rows of the first epoch that need the most
    memory."""
    objective, heaviest = schedule.objective, rows.heaviest()
    trained = []
    for row in heaviest:
        live = row.live(objective.depth)
        slots = objective.drop.keep(row, live, "") if objective.drop else live
        trained.append(tuple(t.numel() for t in slots))
    return Work(
        tokens=rows.row_length,
        slots=max(trained, key=sum),
        document=rows.longest(),
        rows=-(-schedule.rows_per_step // trains),
        device=machine.device,
    )
