"""Writes hidden states of documents to a directory, continues an unfinished directory, and verifies a finished one.

Several processes may write one directory: a process claims a shard by the shard's lock.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import re
import shutil
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fledge.data.documents import Document
from fledge.data.pack import make_row
from fledge.data.record import Record
from fledge.io.display import format_bytes
from fledge.io.files import InUse, exclusive_lock, existing_parent
from fledge.states.cache import DOCUMENTS, HELD_OUT, MANIFEST, FeatureCache, Manifest
from fledge.states.layout import ALIGNMENT, DOCUMENT_BYTES, LAST, LAYERS, SCALES, encode_layers, place, split, views
from fledge.targets.source import FeatureSource
from fledge.types import Features, Packed

PASS_TOKENS = 8192  # tokens whose features are on the device at a time
POLL_SECONDS = 0.5
UNITS = {"B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
UNITS |= {"KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40}
RESERVE, RESERVED_SHARE = 10**10, 0.05  # the default budget leaves the smaller: bytes, or a share of the free space
# A shard has at most MAX_SHARD bytes. Small caches have smaller shards, so that several processes share the work, and a
# killed process loses little.
MAX_SHARD, MIN_SHARD, SHARDS = 512 * 2**20, 2**20, 64

Compute = Callable[[Packed], Features]
Say = Callable[[str], None]


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

    `compute` gives the features of a packed row, with the layers of the manifest. `advance` is called with the tokens
    of each pass.
    """

    def __init__(self, cache: FeatureCache, compute: Compute, say: Say, advance: Callable[[int], None]):
        self.cache, self.compute, self.say, self.advance = cache, compute, say, advance
        self._saving: Future[None] | None = None  # of the shard that is written while the next shard is computed
        self._written = 0  # shards

    def write(self) -> None:
        """Writes the missing shards, and returns when every shard is written. Waits for shards that other processes
        are writing, and takes over abandoned shards.

        Raises OSError if the disk is full. Finished shards stay.
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
        for i in self.cache.shards:  # left by processes that were killed
            self.cache.lock(i).unlink(missing_ok=True)

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
            # while the shard before is saved from the other buffer
            tensors = self._tensors(shard, self._buffers[self._written % 2])
            self._finish_saving()
            self._saving = executor.submit(self._save, shard, tensors, claim.pop_all())
            self._written += 1
        return True

    def _save(self, shard: int, tensors: dict[str, Tensor], claim: contextlib.ExitStack) -> None:
        with claim:
            self.cache.save(shard, tensors)

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


def verify_features(directory: str, say: Say, progress: Any) -> None:
    """Compares all features in a directory with the hashes that were written. Raises ValueError if shards are damaged
    or missing, after a message for each shard."""
    cache = FeatureCache.open(directory)
    shards, problems = cache.shards, []
    with progress.count("tokens", sum(map(cache.tokens, shards)), unit="tokens") as advance:
        for shard in shards:
            try:
                cache.verify(shard)
            except ValueError as e:
                problems.append(str(e))
            advance(cache.tokens(shard))
    for problem in problems[:-1]:
        say(problem)
    if problems:
        more = f" ({len(problems):,} of {len(shards):,} shards)" if len(problems) > 1 else ""
        raise ValueError(problems[-1] + more)
    say(f"{directory}: {len(shards):,} shards are as they were written")


def write_features(
    out: Path, new: Manifest, source: FeatureSource, documents: list[Document], held_out: list[Record],
    budget: int | None, say: Say, progress: Any,
) -> None:  # fmt: skip
    """Writes the features of documents that are missing in the directory `out`. `new` is the manifest that the
    directory is to have, and `budget` the maximum of bytes on the disk; None: the free space.

    Raises ValueError before anything is written if the features do not fit, or if the directory holds other features;
    and for features that are not finite.
    """
    cache = _open(out, new, documents)
    cache.check_written()
    check_space(cache, budget, say)
    if not (missing := [i for i in cache.shards if not cache.is_written(i)]):
        say(f"{out} is complete")
        return

    def compute(row: Packed) -> Features:
        features = source.features(row)
        for states in (features.aux_TAD, features.last_TD):
            source.target.check_numbers(states.abs())  # `abs`: refuses -inf too, which is valid in logits only
        return features

    tokens, left = (sum(map(cache.tokens, shards)) for shards in (cache.shards, missing))
    if left < tokens:
        say(f"continuing {out}: {len(cache.shards) - len(missing):,} of {len(cache.shards):,} shards are there")
    cache = _create(cache, held_out, say)
    try:
        with progress.count("tokens", tokens, tokens - left, unit="tokens") as advance:
            FeatureWriter(cache, compute, say, advance).write()
    except (KeyboardInterrupt, OSError):  # such as a full disk
        say(f"stopped; the finished shards are kept, and the same command continues {out}")
        raise
    say(f"wrote {out}; train with: fledge train --features {out}")


def _open(out: Path, new: Manifest, documents: list[Document]) -> FeatureCache:
    """The features in a directory, or new features that are not written yet. Raises ValueError if the directory holds
    features that differ from `new`, or unrelated files."""
    if not (out / MANIFEST).exists():
        names = [f.name for f in out.iterdir()] if out.exists() else []
        left = (DOCUMENTS, HELD_OUT) if DOCUMENTS in names else ()  # left by a killed process, in this order
        if other := next((n for n in sorted(names) if n not in left and not n.startswith(".")), None):
            raise ValueError(f"{out} holds other files, such as {other}; choose another --out")
        return FeatureCache(out, new, documents)
    cache = FeatureCache.open(out, documents)
    if difference := cache.manifest.difference(new):
        raise ValueError(f"{out} holds features of {difference}; choose another --out")
    return cache


def _create(cache: FeatureCache, held_out: list[Record], say: Say) -> FeatureCache:
    """Writes the directory's manifest and documents, unless another process has written manifest and documents in the
    meantime. Waits while another process does so."""
    while True:
        try:
            with exclusive_lock(cache.path / ".fledge-lock", str(cache.path), say):
                there = _open(cache.path, cache.manifest, list(cache.documents))
                if there.manifest is cache.manifest:
                    cache.create(held_out)
                return there
        except InUse:
            time.sleep(POLL_SECONDS / 10)


def parse_bytes(text: str) -> int:
    """A number of bytes such as 500GB, 1.5TB or 200GiB. Raises ValueError for other texts."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-zA-Z]+)\s*", text)
    if not match or match[2].upper() not in UNITS:
        raise ValueError(f"--disk-budget {text} is not a size such as 500GB or 1.5TB")
    return int(float(match[1]) * UNITS[match[2].upper()])


def shard_bytes(total: int) -> int:
    """The size of a shard, for features of `total` bytes."""
    return min(MAX_SHARD, max(total // SHARDS, MIN_SHARD))


def disk_space(cache: FeatureCache) -> tuple[int, int]:
    """The bytes of all files of a cache, at most, and the bytes of the files already written."""
    documents = DOCUMENT_BYTES * cache.manifest.tokens
    taken = sum(file.stat().st_size for file in map(cache.file, cache.shards) if file.exists())
    taken += documents if (cache.path / DOCUMENTS).exists() else 0
    return sum(map(cache.bytes, cache.shards)) + documents, taken


def check_space(cache: FeatureCache, budget: int | None, say: Say) -> None:
    """Says how much disk space a cache takes. Raises ValueError if the features do not fit in `budget` bytes (None: the
    free space less a reserve), or on the disk."""
    known, (total, taken) = cache.manifest, disk_space(cache)
    free = shutil.disk_usage(existing_parent(cache.path)).free
    if budget is None:
        budget = free + taken - min(RESERVE, int(RESERVED_SHARE * free))
    states = f"final states of {known.last_states / known.tokens:.0%}"
    shards = "1 shard" if len(cache.shards) == 1 else f"{len(cache.shards):,} shards"
    say(
        f"{known.tokens:,} tokens ({states}) take {total / known.tokens:,.0f} bytes a token in {known.precision}, "
        f"{format_bytes(total)} in {shards}; the disk budget is {format_bytes(budget)}, and {format_bytes(free)} are "
        "free"
    )
    advice = "use a share of the data (@0.5)"
    advice = advice if known.precision == "fp8" else f"store fp8 (--precision fp8), or {advice}"
    if total > budget:
        raise ValueError(
            f"the features take {format_bytes(total)}, more than the disk budget of {format_bytes(budget)}; {advice}"
        )
    if total - taken > free:
        missing = f"{format_bytes(total - taken)}{' more' if taken else ''}"
        raise ValueError(f"the features take {missing}, more than the {format_bytes(free)} free; {advice}")
