"""How much disk space features take, and how much they may take."""

from __future__ import annotations

import re
import shutil
from dataclasses import dataclass
from pathlib import Path

from fledge.io.display import format_bytes
from fledge.io.files import existing_parent
from fledge.states.cache import DOCUMENTS, FeatureCache
from fledge.states.layout import DOCUMENT_BYTES

GB = 10**9
UNITS = {"B": 1, "KB": 10**3, "MB": 10**6, "GB": GB, "TB": 10**12}
UNITS |= {"KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40}
RESERVE, RESERVED_SHARE = 10 * GB, 0.05  # the default budget leaves the smaller of both, the latter of the free space
# A shard has at most MAX_SHARD bytes. Small caches have smaller ones, so that several processes share the work and
# little is lost when one is killed.
MAX_SHARD, MIN_SHARD, SHARDS = 512 * 2**20, 2**20, 64


def parse_bytes(text: str) -> int:
    """A number of bytes such as 500GB, 1.5TB or 200GiB. Raises ValueError for other texts."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-zA-Z]+)\s*", text)
    if not match or match[2].upper() not in UNITS:
        raise ValueError(f"--disk-budget {text} is not a size such as 500GB or 1.5TB")
    return int(float(match[1]) * UNITS[match[2].upper()])


def shard_bytes(total: int) -> int:
    """The size of a shard, for features of `total` bytes."""
    return min(MAX_SHARD, max(total // SHARDS, MIN_SHARD))


def default_budget(path: Path, taken: int = 0) -> int:
    """The bytes that features at `path` may take without a budget: the free ones less a reserve, and those `taken`."""
    free = shutil.disk_usage(existing_parent(path)).free
    return free - reserve_of(free) + taken


def reserve_of(free: int) -> int:
    """The bytes to leave free on a disk that has `free` free bytes."""
    return min(RESERVE, int(RESERVED_SHARE * free))


@dataclass(frozen=True)
class DiskPlan:
    """The disk space of a cache: `total` bytes of all its files, of which `taken` are there already, the `budget`, the
    `free` bytes of the disk and the `reserve` that stays free."""

    total: int
    taken: int
    budget: int
    free: int
    reserve: int

    @classmethod
    def of(cls, cache: FeatureCache, budget: int | None) -> DiskPlan:
        """The plan for a budget in bytes; None is the free space less the reserve."""
        free = shutil.disk_usage(existing_parent(cache.path)).free
        files = [cache.file(i) for i in cache.shards]
        taken = sum(f.stat().st_size for f in files if f.exists())
        taken += document_bytes(cache) if (cache.path / DOCUMENTS).exists() else 0
        total = sum(cache.bytes(i) for i in cache.shards) + document_bytes(cache)
        return cls(
            total, taken, default_budget(cache.path, taken) if budget is None else budget, free, reserve_of(free)
        )

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
