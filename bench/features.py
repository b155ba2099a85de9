"""Measures features on disk: the bytes a token, the speed of reading, and a training step that reads them.

    python bench/features.py --device cuda                      # the shape of Llama-3.1-8B, a cache of --tokens tokens
    python bench/features.py --device cpu --shape tiny --tokens 4000 --row-length 512

Writes a cache of random features (no target is needed) to --work and deletes it afterwards. Then it trains a random
draft on rows with features that are in memory, and on the same rows read from the cache by the trainer's own iterators,
and reads the rows without training. "cold" drops the cache's pages from the operating system's cache before.
"""

import argparse
import itertools
import os
import shutil
import statistics
import time
from collections.abc import Iterator
from pathlib import Path

import torch
from common import SHAPES, random_draft, seconds

from fledge.config import DraftConfig
from fledge.data.dataset import Rows
from fledge.data.documents import fingerprint
from fledge.eval.environment import environment
from fledge.eval.record import check_record_path, write_record
from fledge.features.budget import shard_bytes
from fledge.features.cache import FORMAT, FeatureCache, Manifest
from fledge.features.codec import PRECISIONS
from fledge.features.layout import Layout, Sizes, split_shards
from fledge.features.source import DiskFeatures
from fledge.features.writer import FeatureWriter
from fledge.train.objective import Implementation, Objective, ttt_queued
from fledge.train.prefetch import with_features
from fledge.types import Document, Features, Packed

LAYERS = (2, 16, 29)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="8b")
    parser.add_argument("--precision", choices=PRECISIONS, default="fp8")
    parser.add_argument("--tokens", type=int, default=400_000)
    parser.add_argument("--document", type=int, default=2048, help="tokens of a document")
    parser.add_argument("--supervised", type=float, default=1.0, help="supervised share of each document")
    parser.add_argument("--row-length", type=int, default=8192)
    parser.add_argument("--depth", type=int, default=7)
    parser.add_argument("--slots", type=int, default=8192)
    parser.add_argument("--rows", type=int, default=20, help="rows that are timed")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--work", type=Path, default=Path("build/bench-features"))
    parser.add_argument("--out", type=Path, default=Path("bench/results/features.json"))
    options = parser.parse_args()
    check_record_path(options.out, "--out")
    torch.manual_seed(0)
    shutil.rmtree(options.work, ignore_errors=True)
    try:
        record = measure(options)
    finally:
        shutil.rmtree(options.work, ignore_errors=True)
    write_record(options.out, record)


def measure(options: argparse.Namespace) -> dict:
    dtype = torch.bfloat16 if options.device != "cpu" else torch.float32
    cache, written = write_cache(options, dtype)
    size = sum(f.stat().st_size for f in cache.path.glob("*.safetensors"))
    record = {
        "environment": environment(options.device, str(dtype)), "shape": options.shape, "precision": options.precision,
        "supervised": options.supervised, "tokens": cache.manifest.tokens, "row_length": options.row_length,
        "bytes_per_token": size / cache.manifest.tokens, "shards": len(cache.shards), "write_gb_per_s": written,
    }  # fmt: skip
    rows = Rows(list(cache.documents), options.row_length, seed=0)
    draft, head = make_draft(options, dtype)
    source = DiskFeatures(cache, LAYERS, lambda last: last @ head.T, draft.device, dtype)
    for name in ("cold", "warm"):
        if name == "cold":
            drop_pages(cache)
        record[f"read_{name}"] = read_speed(source, rows, options, cache)
        print(f"reading, {name}: {record[f'read_{name}']}", flush=True)
    fast = "eager" if options.device == "cpu" else "triton"
    implementation = Implementation(fast, fast, fast, slots=options.slots, prefetch=options.device != "cpu")
    for name in ("in_memory", "from_disk", "in_memory_again", "from_disk_again"):
        features = MemoryFeatures(source, rows[0, 0]) if name.startswith("in") else source
        record[f"step_{name}"] = step_speed(features, rows, draft, implementation, options)
        print(f"training, {name}: {record[f'step_{name}']}", flush=True)
    return record


def write_cache(options: argparse.Namespace, dtype: torch.dtype) -> tuple[FeatureCache, float]:
    """A cache of random features, and the GB/s of writing it, of which the rounding and the disk are a part."""
    shape = SHAPES[options.shape]
    n = options.document
    span = torch.where(torch.arange(n) < n - int(options.supervised * n), -1, 0).int()
    count = max(1, options.tokens // n)
    documents = [Document(torch.randint(shape["vocab_size"], (n,), dtype=torch.int32), span) for _ in range(count)]
    layout = Layout(LAYERS, shape["target_hidden_size"], options.precision, all_last=False)
    sizes = Sizes.of(documents, layout)
    size = shard_bytes(layout.bytes(sum(sizes.tokens), sum(sizes.last)), None)
    manifest = Manifest(
        format=FORMAT, fledge_version="", target="random", target_sha256="", target_layers=32, tokenizer_sha256="",
        template_sha256=None, template_kwargs=None, data=[], data_sha256=fingerprint(documents), max_length=n,
        documents=count, tokens=sum(sizes.tokens), last_states=sum(sizes.last), layers=list(LAYERS),
        width=layout.width, precision=options.precision, all_last=False, dtype=str(dtype),
        shards=[list(s) for s in split_shards(sizes, layout, size)], stream=False, budget=None,
    )  # fmt: skip
    options.work.mkdir(parents=True)
    cache = FeatureCache(options.work, manifest, documents)
    cache.create([])
    states = random_features(options, 1 << 15, dtype)

    def compute(row: Packed) -> Features:
        return Features(*(x[: row.token_T.numel()] for x in (states.aux_TAD, states.last_TD)))

    start = time.perf_counter()
    FeatureWriter(cache, compute, 1 << 60, 0, print, lambda tokens: None).write()
    taken = time.perf_counter() - start
    return cache, sum(map(cache.bytes, cache.shards)) / taken / 1e9


def random_features(options: argparse.Namespace, tokens: int, dtype: torch.dtype) -> Features:
    D = SHAPES[options.shape]["target_hidden_size"]
    with torch.device(options.device):
        return Features(torch.randn(tokens, len(LAYERS), D, dtype=dtype), torch.randn(tokens, D, dtype=dtype))


def make_draft(options: argparse.Namespace, dtype: torch.dtype):
    config = DraftConfig(**SHAPES[options.shape], rms_norm_eps=1e-5, max_position_embeddings=1 << 17)
    draft, _, head = random_draft(config, 1, options.device, dtype)
    return draft, head


class MemoryFeatures:
    """The features of one row, in memory, for every row: a source that costs nothing."""

    def __init__(self, source: DiskFeatures, row: Packed):
        self.kept, self.logits = source.features(row), source.logits

    def features(self, row: Packed) -> Features:
        return self.kept

    def ahead(self, rows: Iterator[Packed]) -> Iterator[Packed]:
        return rows


def drop_pages(cache: FeatureCache) -> None:
    """Removes the cache's files from the operating system's page cache."""
    for i in cache.shards:
        with cache.file(i).open("rb") as f:
            os.posix_fadvise(f.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def repeated(rows: Rows, count: int) -> Iterator[Packed]:
    """`count` rows, from the first one on."""
    address = (0, 0)
    for _ in range(count):
        yield rows[address]
        address = rows.next(address)


def read_speed(source: DiskFeatures, rows: Rows, options: argparse.Namespace, cache: FeatureCache) -> dict:
    """Reads one epoch, at most `--rows` rows, to the device."""
    count, done = min(options.rows, len(rows.epoch(0))), 0

    def read() -> None:
        nonlocal done
        prefetch = options.device != "cpu"
        ahead = source.ahead(repeated(rows, count))
        for row, _ in with_features(ahead, source.features, source.device, prefetch=prefetch):
            done += sum(b - a for a, b in row.without_filler())

    taken = seconds(read, options.device)
    per_token = sum(map(cache.bytes, cache.shards)) / cache.manifest.tokens
    return {"tokens_per_s": done / taken, "gb_per_s": done * per_token / taken / 1e9}


def step_speed(source, rows: Rows, draft, implementation: Implementation, options: argparse.Namespace) -> dict:
    """The median of the seconds between two rows of training, without the optimizer."""
    objective, marks, tokens = Objective(options.depth), [], 0
    given = with_features(
        source.ahead(repeated(rows, options.rows + 2)), source.features, draft.device,
        prefetch=implementation.prefetch,
    )  # fmt: skip
    for row, features in given:
        ttt_queued(draft, row, features, source.logits, objective, implementation).to_host()
        del features
        draft.zero_grad()
        marks.append(time.perf_counter())
        tokens = sum(b - a for a, b in row.without_filler())
    median = statistics.median(b - a for a, b in itertools.pairwise(marks[1:]))
    return {"ms": 1e3 * median, "tokens_per_s": tokens / median}


if __name__ == "__main__":
    main()
