"""Writes the shards of stored features, and plans the disk space of the features. Several processes may write one
directory: a process claims a shard by the shard's lock."""

from __future__ import annotations

import contextlib
import functools
import itertools
import os
import re
import shutil
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from fledge.data.pack import make_row
from fledge.io.display import format_bytes
from fledge.io.files import DiskFullError, InUse, disk_full_errno, exclusive_lock, existing_parent
from fledge.states.cache import DOCUMENTS, FeatureCache
from fledge.states.layout import ALIGNMENT, DOCUMENT_BYTES, LAST, LAYERS, SCALES, encode_layers, place, split, views
from fledge.types import Features, Packed

PASS_TOKENS = 8192  # tokens whose features are on the device at a time
POLL_SECONDS = 0.5
UNITS = {"B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
UNITS |= {"KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40}
RESERVE, RESERVED_SHARE = 10**10, 0.05  # the default budget leaves the smaller: bytes, or a share of the free space
# A shard has at most MAX_SHARD bytes. Small caches have smaller shards, so that several processes share the work, and a
# killed process loses little.
MAX_SHARD, MIN_SHARD, SHARDS = 512 * 2**20, 2**20, 64
CONTINUE = "the finished shards are kept; the same command continues"

Compute = Callable[[Packed], Features]


def passes(cache: FeatureCache, first: int, end: int) -> Iterator[tuple[int, int]]:
    """Divides the documents [first, end) into parts of at most PASS_TOKENS tokens; a longer document is a part."""
    return split(cache.sizes.tokens[first:end], PASS_TOKENS, first)


def compute_pass(cache: FeatureCache, compute: Compute, first: int, end: int) -> dict[str, Tensor]:
    """The features of the documents [first, end) in stored form, on the device of `compute`."""
    documents, layout = cache.documents[first:end], cache.layout
    tokens = cache.sizes.tokens[first:end]
    features = compute(make_row(documents, sum(tokens), sources=range(first, end)))
    starts = itertools.accumulate(tokens, initial=0)
    kept = torch.cat([layout.last_tokens(d) + start for d, start in zip(documents, starts, strict=False)])
    layers, scales = encode_layers(features.aux_TAD, layout.dtypes)
    last = features.last_TD[kept.to(features.last_TD.device)].to(layout.dtypes.last)
    return {LAYERS: layers, LAST: last} | ({} if scales is None else {SCALES: scales})


class FeatureWriter:
    """Writes the shards that are missing.

    `compute` gives the features of a packed row, with the layers of the manifest. `budget` is the most bytes that the
    directory may take, and `reserve` the bytes of the disk that stay free. `advance` is called with the tokens of each
    pass.
    """

    def __init__(
        self, cache: FeatureCache, compute: Compute, budget: int, reserve: int, say: Callable[[str], None],
        advance: Callable[[int], None],
    ):  # fmt: skip
        self.cache, self.compute, self.budget, self.reserve = cache, compute, budget, reserve
        self.say, self.advance = say, advance
        self._saving: Future[None] | None = None  # of the shard that is written while the next shard is computed
        self._written = 0  # shards

    def write(self) -> None:
        """Writes the missing shards, and returns when every shard is written. Waits for shards that other processes
        are writing, and takes over abandoned shards.

        Raises ValueError if a shard would exceed the budget or leave less than the reserve, and OSError if the disk is
        full. Finished shards stay.
        """
        waiting = False
        with ThreadPoolExecutor(1) as executor:
            while missing := [i for i in self.cache.shards if not self.cache.is_written(i)]:
                claimed = [self._claim(i, executor) for i in missing]
                self._finish_saving()
                if not any(claimed):
                    if not waiting:
                        self.say("the remaining shards are being written by other processes; waiting for them")
                    waiting = True
                    time.sleep(POLL_SECONDS)

    def _claim(self, shard: int, executor: ThreadPoolExecutor) -> bool:
        """Writes a shard, unless another process has written or is writing the shard. Returns whether this process
        wrote the shard."""
        with contextlib.ExitStack() as claim:
            try:
                claim.enter_context(exclusive_lock(self.cache.lock(shard), str(self.cache.file(shard))))
            except InUse:
                return False
            if self.cache.is_written(shard):
                return False
            self._allot(shard)
            try:
                # while the shard before is saved from the other buffer
                tensors = self._tensors(shard, self._buffers[self._written % 2])
                self._finish_saving()
            except BaseException:
                self.cache.temporary(shard).unlink(missing_ok=True)
                raise
            self._saving = executor.submit(self._save, shard, tensors, claim.pop_all())
            self._written += 1
        return True

    def _save(self, shard: int, tensors: dict[str, Tensor], claim: contextlib.ExitStack) -> None:
        with claim:
            try:
                self.cache.save(shard, tensors)
            except OSError as e:
                if (full := disk_full_errno(e)) is None:
                    raise
                file = self.cache.file(shard)
                raise DiskFullError(
                    full, f"no space to write {file} ({os.strerror(full)}); free some, {CONTINUE}"
                ) from e

    def _finish_saving(self) -> None:
        saving, self._saving = self._saving, None
        if saving is not None:
            saving.result()

    @functools.cached_property
    def _buffers(self) -> list[Tensor]:
        """Two buffers in host memory, each of the size of the largest shard. Allocating memory for each shard would be
        slow."""
        size = max(map(self.cache.bytes, self.cache.shards)) + ALIGNMENT * len(self.cache.layout.tensors(0, 0))
        return [torch.empty(size, dtype=torch.uint8) for _ in range(2)]

    def _tensors(self, shard: int, buffer: Tensor) -> dict[str, Tensor]:
        """The tensors of a shard, on the CPU, in a buffer."""
        first, end = self.cache.manifest.shards[shard]
        sizes, layout = self.cache.sizes, self.cache.layout
        tensors = views(place(layout, list(layout.tensors(0, 0)), *sizes.total(first, end))[0], buffer)
        filled = dict.fromkeys(tensors, 0)
        for a, b in passes(self.cache, first, end):
            for name, part in compute_pass(self.cache, self.compute, a, b).items():
                tensors[name][filled[name] : filled[name] + len(part)] = part
                filled[name] += len(part)
            self.advance(sum(sizes.tokens[a:b]))
        return tensors

    # -- disk space ---------------------------------------------------------------------------------------------

    def _allot(self, shard: int) -> None:
        """Reserves the shard's share of the budget by creating the shard's temporary file."""
        with self._accounts():
            needed = self.cache.bytes(shard)
            excess = self._taken(shard) + needed - self.budget
            if excess > 0 or shutil.disk_usage(self.cache.path).free - needed < self.reserve:
                limit = f"exceed the disk budget of {self.budget:,} bytes" if excess > 0 else "nearly fill the disk"
                raise ValueError(f"{self.cache.file(shard)} would {limit}; free some space, {CONTINUE}")
            self.cache.temporary(shard).touch()

    def _taken(self, shard: int) -> int:
        """The bytes of all shards but one; an unfinished shard counts as a whole."""
        taken = 0
        for i in self.cache.shards:
            if i != shard and self.cache.temporary(i).exists():
                taken += self.cache.bytes(i)
            else:
                with contextlib.suppress(FileNotFoundError):  # not written yet
                    taken += self.cache.file(i).stat().st_size
        return taken

    @contextlib.contextmanager
    def _accounts(self) -> Iterator[None]:
        """Excludes other writers while the taken space is counted, and removes the files of killed writers."""
        with waiting_lock(self.cache.path, self.say):
            for i in self.cache.shards:
                left = self.cache.temporary(i).exists() or self.cache.lock(i).exists()
                if left and not self._is_locked(i):
                    self.cache.temporary(i).unlink(missing_ok=True)
            yield

    def _is_locked(self, shard: int) -> bool:
        """Whether a process writes the shard. If not, removes the lock file of a killed process."""
        try:
            with exclusive_lock(self.cache.lock(shard), str(self.cache.file(shard))):
                return False
        except InUse:
            return True


@contextlib.contextmanager
def waiting_lock(directory: Path, say: Callable[[str], None]) -> Iterator[None]:
    """Context manager: holds the lock of the directory; waits while another process holds the lock."""
    lock = directory / ".fledge-lock"
    while True:
        with contextlib.ExitStack() as held:
            try:
                held.enter_context(exclusive_lock(lock, str(directory), say))
            except InUse:
                time.sleep(POLL_SECONDS / 10)
                continue
            yield
            return


# -- disk space --------------------------------------------------------------------------------------------------


def parse_bytes(text: str) -> int:
    """A number of bytes such as 500GB, 1.5TB or 200GiB. Raises ValueError for other texts."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-zA-Z]+)\s*", text)
    if not match or match[2].upper() not in UNITS:
        raise ValueError(f"--disk-budget {text} is not a size such as 500GB or 1.5TB")
    return int(float(match[1]) * UNITS[match[2].upper()])


def shard_bytes(total: int) -> int:
    """The size of a shard, for features of `total` bytes."""
    return min(MAX_SHARD, max(total // SHARDS, MIN_SHARD))


@dataclass(frozen=True)
class DiskPlan:
    """The disk space of a cache, in bytes. `total` counts all files of the cache, `taken` the files already written.
    `budget` is the most that the cache may take, `free` the free bytes of the disk, and `reserve` the bytes that stay
    free."""

    total: int
    taken: int
    budget: int
    free: int
    reserve: int

    @classmethod
    def of(cls, cache: FeatureCache, budget: int | None) -> DiskPlan:
        """The plan for a budget in bytes; None is the free space less the reserve."""
        free = shutil.disk_usage(existing_parent(cache.path)).free
        reserve = min(RESERVE, int(RESERVED_SHARE * free))
        taken = sum(file.stat().st_size for file in map(cache.file, cache.shards) if file.exists())
        taken += document_bytes(cache) if (cache.path / DOCUMENTS).exists() else 0
        total = sum(map(cache.bytes, cache.shards)) + document_bytes(cache)
        return cls(total, taken, free - reserve + taken if budget is None else budget, free, reserve)

    def shard_budget(self, cache: FeatureCache) -> int:
        """The part of the budget that is left for shards."""
        return self.budget - document_bytes(cache)

    def describe(self, cache: FeatureCache) -> str:
        known = cache.manifest
        states = f"final states of {known.last_states / known.tokens:.0%}"
        shards = "1 shard" if len(cache.shards) == 1 else f"{len(cache.shards):,} shards"
        return (
            f"{known.tokens:,} tokens ({states}) take {self.total / known.tokens:,.0f} bytes a token in "
            f"{known.precision}, {format_bytes(self.total)} in {shards}; the disk budget is "
            f"{format_bytes(self.budget)}, and {format_bytes(self.free)} are free"
        )

    def check(self, cache: FeatureCache) -> None:
        """Raises ValueError if the features do not fit in the budget or on the disk."""
        advice = "use a share of the data (@0.5)"
        if cache.manifest.precision != "fp8":
            advice = f"store fp8 (--precision fp8), or {advice}"
        if self.total > self.budget:
            raise ValueError(
                f"the features take {format_bytes(self.total)}, more than the disk budget of "
                f"{format_bytes(self.budget)}; {advice}"
            )
        if self.total - self.taken > self.free:
            raise ValueError(
                f"the features take {format_bytes(self.total - self.taken)} more, and the disk has "
                f"{format_bytes(self.free)}; {advice}"
            )


def document_bytes(cache: FeatureCache) -> int:
    """The bytes of the documents themselves."""
    return DOCUMENT_BYTES * cache.manifest.tokens
