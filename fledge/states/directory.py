"""Writes hidden states of documents to a directory, continues an unfinished one, and verifies a finished one."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from fledge.data.documents import Document
from fledge.data.record import Record
from fledge.io.display import format_duration
from fledge.states.cache import DOCUMENTS, HELD_OUT, MANIFEST, FeatureCache, Manifest
from fledge.states.writer import Compute, DiskPlan, FeatureWriter, compute_pass, passes, waiting_lock
from fledge.targets.source import FeatureSource
from fledge.types import Features, Packed

Say = Callable[[str], None]


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
    plan = DiskPlan.of(cache, budget)
    say(plan.describe(cache))
    plan.check(cache)
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
    _say_time(cache, missing[0], compute, left, say)
    cache = _create(cache, held_out, say)
    try:
        with progress.count("tokens", tokens, tokens - left, unit="tokens") as advance:
            FeatureWriter(cache, compute, plan.shard_budget(cache), plan.reserve, say, advance).write()
    except KeyboardInterrupt:
        say(f"stopped; run the same command again to continue {out}")
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
    meantime."""
    with waiting_lock(cache.path, say):
        there = _open(cache.path, cache.manifest, list(cache.documents))
        if there.manifest is cache.manifest:
            cache.create(held_out)
    return there


def _say_time(cache: FeatureCache, shard: int, compute: Compute, tokens: int, say: Say) -> None:
    """Measures two passes of at most PASS_TOKENS tokens each, the first of which also initializes the device, and says
    how long `tokens` tokens will take. Nothing is written."""
    first, end = next(passes(cache, *cache.manifest.shards[shard]))
    for _ in range(2):
        start = time.perf_counter()
        for x in compute_pass(cache, compute, first, end).values():
            x.cpu()
        seconds = time.perf_counter() - start
    speed = sum(cache.sizes.tokens[first:end]) / seconds
    say(f"about {format_duration(tokens / speed)} for {tokens:,} tokens, at {speed:,.0f} tokens/s")
