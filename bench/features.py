"""Measures features on disk: the bytes a token, reading and its parts, and a training step that reads them.

    python bench/features.py --device cuda   # the shape of Llama-3.1-8B; all and a quarter of the tokens supervised
    python bench/features.py --device cpu --shape tiny --tokens 4000 --row-length 512

Writes a cache of random features for each supervised share to --work (no target is needed) and deletes it afterwards. A
row of the record has, for a share and a row length:

    read_cold, read_warm   reading rows to the device, without training; "cold" drops the cache's pages from the
                           operating system's cache before
    parts                  ms a row: `read` from the page cache to host memory, `copy` to the device, `decode` on the
                           device, with the time to queue it
    step_in_memory, ..     training steps without the optimizer, on one row's features in memory and on rows read from
                           the cache by the trainer's own iterators, both twice; `wait_ms` is the main thread's time in
                           asking for a row's features
"""

import argparse
import itertools
import os
import shutil
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from common import SHAPES, random_draft, seconds, write_random_features

from fledge.config import DraftConfig
from fledge.data.documents import Document
from fledge.data.pack import Rows
from fledge.drafts.draft import Draft
from fledge.io.machine import environment
from fledge.measure.record import check_record_path, write_record
from fledge.states.cache import FeatureCache
from fledge.states.layout import PRECISIONS, Layout
from fledge.states.source import DiskFeatures
from fledge.train.objective import Implementation, Objective, ttt_queued
from fledge.train.setup.target import set_up_process
from fledge.train.trainer import with_features
from fledge.types import Features, Packed

LAYERS = (2, 16, 29)
REPEATS = 5


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="8b")
    parser.add_argument("--precision", choices=PRECISIONS, default="fp8")
    parser.add_argument("--tokens", type=int, default=100_000, help="of a cache")
    parser.add_argument("--document", type=int, default=2048, help="tokens of a document")
    parser.add_argument("--supervised", type=float, nargs="+", default=[1.0, 0.25], help="share of each document")
    parser.add_argument("--row-length", type=int, nargs="+", default=[8192])
    parser.add_argument("--depth", type=int, default=7)
    parser.add_argument("--slots", type=int, default=8192)
    parser.add_argument("--rows", type=int, default=12, help="rows that are timed")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--work", type=Path, default=Path("build/bench-features"))
    parser.add_argument("--out", type=Path, default=Path("bench/results/features.json"))
    options = parser.parse_args()
    check_record_path(options.out, "--out")
    set_up_process(options.device)
    torch.manual_seed(0)
    dtype = torch.bfloat16 if options.device != "cpu" else torch.float32
    draft, head = make_draft(options, dtype)
    record = {
        "environment": environment(options.device, str(dtype)), "shape": options.shape, "precision": options.precision,
        "document": options.document, "depth": options.depth, "slots": options.slots, "rows": [],
    }  # fmt: skip
    for share in options.supervised:
        shutil.rmtree(options.work, ignore_errors=True)
        try:
            documents = make_documents(share, options)
            layout = Layout(LAYERS, SHAPES[options.shape]["target_hidden_size"], options.precision, all_last=False)
            cache, written = write_random_features(options.work, documents, layout, options.device, dtype)
            for length in options.row_length:
                row = {"supervised": share, "row_length": length, "write_gb_per_s": written}
                row |= measure(cache, length, draft, head, options)
                record["rows"].append(row)
                write_record(options.out, record)
        finally:
            shutil.rmtree(options.work, ignore_errors=True)


def measure(
    cache: FeatureCache, length: int, draft: Draft, head: torch.Tensor, options: argparse.Namespace
) -> dict[str, Any]:
    size = sum(f.stat().st_size for f in cache.path.glob("*.safetensors"))
    found: dict[str, Any] = {"bytes_per_token": size / cache.manifest.tokens}
    rows = Rows(list(cache.documents), length, seed=0)
    source = DiskFeatures(cache, LAYERS, lambda last: last @ head.T, draft.device, draft.dtype)

    def add(name: str, value: dict[str, float]) -> None:
        found[name] = value
        rounded = {k: round(v, 3) if isinstance(v, float) else v for k, v in value.items()}
        print(f"{length} tokens, {size / cache.manifest.tokens:.0f} bytes each, {name}: {rounded}", flush=True)

    drop_pages(cache)
    add("read_cold", read_speed(source, rows, options, cache))
    add("read_warm", read_speed(source, rows, options, cache))
    add("parts", parts(source, rows[0, 0], options))
    fast = "eager" if options.device == "cpu" else "triton"
    implementation = Implementation(fast, fast, fast, slots=options.slots, prefetch=options.device != "cpu")
    for name in ("in_memory", "from_disk", "in_memory_again", "from_disk_again"):
        features = MemoryFeatures(source, rows[0, 0]) if name.startswith("in") else source
        add(f"step_{name}", step_speed(features, rows, draft, implementation, options))
    return found


def make_documents(supervised: float, options: argparse.Namespace) -> list[Document]:
    vocab, n = SHAPES[options.shape]["vocab_size"], options.document
    span = torch.where(torch.arange(n) < n - int(supervised * n), -1, 0).int().numpy()
    count = max(1, options.tokens // n)
    return [Document(torch.randint(vocab, (n,), dtype=torch.int32).numpy(), span) for _ in range(count)]


def make_draft(options: argparse.Namespace, dtype: torch.dtype) -> tuple[Draft, torch.Tensor]:
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


def read_speed(source: DiskFeatures, rows: Rows, options: argparse.Namespace, cache: FeatureCache) -> dict[str, float]:
    """Reads one epoch to the device."""
    done = 0

    def read() -> None:
        nonlocal done
        ahead = source.ahead(repeated(rows, len(rows.epoch(0))))
        for row, _ in with_features(ahead, source.features, source.device, prefetch=options.device != "cpu"):
            done += sum(b - a for a, b in row.without_filler())

    taken = seconds(read, options.device)
    per_token = sum(map(cache.bytes, cache.shards)) / cache.manifest.tokens
    return {"tokens_per_s": done / taken, "gb_per_s": done * per_token / taken / 1e9}


def parts(source: DiskFeatures, row: Packed, options: argparse.Namespace) -> dict[str, float]:
    """The parts of reading a row, each by itself: milliseconds, the median of some repeats."""
    layout = source.reader.layout(row)
    host = torch.empty(layout.bytes, dtype=torch.uint8, pin_memory=source.device.type == "cuda")

    def median_ms(work: Callable[[], object], device: str = "cpu") -> float:
        return 1e3 * statistics.median([seconds(work, device) for _ in range(1 + REPEATS)][1:])

    read = median_ms(lambda: source.reader.read(row, layout, memoryview(host.numpy())))
    copy = median_ms(lambda: host.to(source.device, non_blocking=True), options.device)
    decode = median_ms(lambda: source.features(replace(row, sources=())), options.device)
    return {"mb": layout.bytes / 1e6, "read_ms": read, "copy_ms": copy, "decode_ms": decode}


def step_speed(
    source: Any, rows: Rows, draft: Draft, implementation: Implementation, options: argparse.Namespace
) -> dict[str, float]:
    """The median of the seconds between two rows of training, without the optimizer."""
    objective, marks, waits, tokens = Objective(options.depth), [], [], 0

    def features(row: Packed) -> Features:
        start = time.perf_counter()
        found = source.features(row)
        waits.append(time.perf_counter() - start)
        return found

    given = with_features(
        source.ahead(repeated(rows, options.rows + 2)), features, draft.device, prefetch=implementation.prefetch
    )
    for row, states in given:
        ttt_queued(draft, row, states, source.logits, objective, implementation).to_host()
        del states
        draft.zero_grad()
        marks.append(time.perf_counter())
        tokens = sum(b - a for a, b in row.without_filler())
    median = statistics.median(b - a for a, b in itertools.pairwise(marks[1:]))
    return {"ms": 1e3 * median, "wait_ms": 1e3 * statistics.median(waits[2:]), "tokens_per_s": tokens / median}


if __name__ == "__main__":
    main()
