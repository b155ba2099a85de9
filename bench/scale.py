"""Times complete training steps over several GPUs of one host: target forward, draft step, reduction, and update.

    python bench/scale.py --gpus 1 2 --tokens 4096 8192 --out bench/results/scale.json
    python bench/scale.py --gpus 2 --shape 70b --shard-target --tokens 4096
    python bench/scale.py --gpus 1 2 --tokens 256 --shape tiny --device cpu --out /tmp/scale.json    # anywhere, gloo

Each rank has a target of the given shape with random weights and trains on a packed row of `--tokens` tokens a step
(documents of `--document` tokens, all supervised, EAGLE-3 with K = 7): the optimizer step of `fledge train`, through
its own ranks. With `--source disk`, the target's hidden states are random numbers in fp8 that rank 0 has written to
--work, and of the target only what training then needs is in memory. `tokens_per_s` are those of all ranks.
`gemm_tokens_per_s` is what the ranks would reach if they did nothing but the matrix products of a step, at the rate of
a large product measured in the same run. `gib` is the peak memory of a rank. Every number of GPUs is a run of torchrun
of its own. All rows go to one record: those that --out has already are kept if they are of the same commit, device and
packages, but for those that are measured again.

`--shard-target` splits the target's layers over the ranks, as `fledge train --shard-target` does; a step then includes
gathering them. Of experts, `gemm_tokens_per_s` counts those that a token chooses.
"""

import argparse
import contextlib
import json
import os
import shutil
import subprocess
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from common import SHAPES, peak_tflops, profile, write_random_features
from decode import random_target

from fledge.data.documents import Document
from fledge.data.pack import Rows
from fledge.io.machine import environment
from fledge.measure.record import check_record_path, write_record
from fledge.states.cache import FeatureCache
from fledge.states.layout import Layout
from fledge.states.source import DiskFeatures
from fledge.targets.compatibility import connect_draft, resolve_layers
from fledge.train.ranks import Ranks, connected, local_rank
from fledge.train.row_pass import Implementation, Objective

WARM_UP = 4  # steps
SOURCES = {"online": "online", "disk": "from disk"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("bench/results/scale.json"))
    parser.add_argument("--gpus", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--tokens", type=int, nargs="+", default=[4096, 8192])
    parser.add_argument("--source", nargs="+", default=["online"], choices=SOURCES, help="of hidden states")
    parser.add_argument("--work", type=Path, default=Path("build/bench-scale"), help="a directory for --source disk")
    parser.add_argument("--shard-target", action="store_true", help="split the target's layers over the GPUs")
    parser.add_argument("--document", type=int, default=1024)
    parser.add_argument("--depth", type=int, default=7)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--shape", default="8b", choices=SHAPES)
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--profile", action="store_true", help="print the kernels of a step of rank 0")
    options = parser.parse_args()
    if options.shard_target and 1 in options.gpus:
        parser.error("--shard-target splits the target over several GPUs; leave 1 out of --gpus")
    if "LOCAL_RANK" in os.environ:
        measure(options)
        return
    check_record_path(options.out, "--out")
    here = environment("cuda" if options.device == "cuda" else "cpu", "bfloat16")
    record = {"environment": here, "rows": rows_of(options.out, here)}
    for gpus in options.gpus:
        part = options.out.with_suffix(f".{gpus}.json")
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(gpus)]
        subprocess.run([*torchrun, __file__, *sys.argv[1:], "--out", str(part)], check=True)
        record["rows"] = merged(record["rows"], json.loads(part.read_text()))
        part.unlink()
        write_record(options.out, record)


def rows_of(file: Path, here: dict[str, Any]) -> list[dict[str, Any]]:
    """The rows of an earlier record in a file, if they were measured in the same environment; the host's number of
    cores may differ, as it does between machines with few and many GPUs."""
    if not file.exists() or not file.stat().st_size:
        return []
    record = json.loads(file.read_text())
    differs = {name for name, value in here.items() if record["environment"].get(name) != value}
    return [] if differs - {"cores", "threads"} else record["rows"]


def merged(known: list[dict[str, Any]], new: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The known rows with the new ones, which replace those of the same case."""

    def case(row: dict[str, Any]) -> tuple[str, int, int]:
        return row["what"], row["gpus"], row["T"]

    return list(({case(row): row for row in known} | {case(row): row for row in new}).values())


def measure(options: argparse.Namespace) -> None:
    """Times every case in this rank; rank 0 writes and prints the rows."""
    cpu = options.device == "cpu"
    torch.set_num_threads(1)
    device = torch.device("cpu") if cpu else torch.device("cuda", local_rank())
    if not cpu:
        torch.cuda.set_device(device)
    rows = []
    with connected(device, timedelta(minutes=5)) as ranks:
        torch.manual_seed(0)
        ceiling = peak_tflops(str(device))
        target = random_target(options.shape, str(device), ranks.mesh if options.shard_target else None)
        for source in sorted(options.source, key=list(SOURCES).index):  # the target runs for the first only
            if source == "disk":
                target.model.model.layers[:-1].to("meta")
                write_features(target, ranks, options)
            for tokens in options.tokens:
                row = timed(target, source, ranks, tokens, ceiling, options)
                rows.append(row)
                if ranks.leads:
                    print({k: round(v, 2) if isinstance(v, float) else v for k, v in row.items()}, flush=True)
                    options.out.write_text(json.dumps(rows))
        ranks.meet("after the last step", None)
        if ranks.leads:
            shutil.rmtree(options.work, ignore_errors=True)


def write_features(target: Any, ranks: Ranks, options: argparse.Namespace) -> None:
    """Rank 0 writes random features of documents for the longest rows, as a target's would be."""
    with ranks.together("while features were written"):
        if ranks.leads:
            shutil.rmtree(options.work, ignore_errors=True)
            layout = Layout(resolve_layers(None, target), target.embedding.shape[1], "fp8", all_last=False)
            documents = make_documents(max(options.tokens), len(target.embedding), ranks, options)
            write_random_features(options.work, documents, layout, str(target.device), target.dtype)


def make_documents(tokens: int, vocab: int, ranks: Ranks, options: argparse.Namespace) -> list[Document]:
    """Documents for four rows of each rank."""
    return [document(options.document, vocab, i) for i in range(ranks.size * 4 * tokens // options.document)]


def timed(
    target: Any, source_name: str, ranks: Ranks, tokens: int, ceiling: float | None, options: argparse.Namespace
) -> dict[str, Any]:
    from fledge.config import DraftConfig
    from fledge.drafts.registry import new_draft
    from fledge.targets.source import LiveFeatures
    from fledge.train.trainer import Run, Schedule, optimizer_step, upcoming_rows

    shape, device, cpu = SHAPES[options.shape], target.device, target.device.type == "cpu"
    config = DraftConfig.for_target(
        target.shape, max_length=options.document, draft_vocab_size=shape["draft_vocab_size"]
    )
    draft = new_draft(config).to(device, target.dtype)
    draft.set_vocabulary(torch.arange(config.draft_vocab_size) * (config.vocab_size // config.draft_vocab_size))
    layers = connect_draft(draft, target)
    if source_name == "disk":
        cache = FeatureCache.open(options.work)
        source, documents = DiskFeatures(cache, layers, target.logits, device, target.dtype), list(cache.documents)
    else:
        source = LiveFeatures(target, layers)
        documents = make_documents(tokens, config.vocab_size, ranks, options)
    rows = Rows(documents, tokens, seed=0)
    fast = Implementation("triton", "triton", "triton", 4096, prefetch=True)
    schedule = Schedule(
        WARM_UP + options.steps + 1, 1e-4, Objective(depth=options.depth, keep_out_of_vocab=True),
        Implementation(slots=256) if cpu else fast, rows_per_step=ranks.size, optimizer="adamw",
    )  # fmt: skip
    run = Run(draft, rows, source, schedule, ranks=ranks)
    run.prepare()
    reading = contextlib.ExitStack()
    upcoming = reading.enter_context(upcoming_rows(run))

    def step() -> None:
        optimizer_step(run, upcoming)

    synchronize = (lambda: None) if cpu else torch.cuda.synchronize
    for _ in range(WARM_UP):
        step()
    if options.profile and ranks.leads:
        profile(step)
    elif options.profile:
        step()
    if not cpu:
        torch.cuda.reset_peak_memory_stats()
    synchronize()
    ranks.meet("before the timing", None)
    began = time.perf_counter()
    for _ in range(options.steps - options.profile):
        step()
    synchronize()
    took = (time.perf_counter() - began) / (options.steps - options.profile)
    reading.close()
    # with the teacher's head, which is all of the target that runs if its hidden states are read
    flops = 2 * tokens * (active_elements(target) if source_name == "online" else target.head_weight.numel())
    flops += draft_flops(config, tokens, options)
    sharded = ", sharded target" if target.sharded else ""
    return {
        "what": f"{SOURCES[source_name]}, {options.shape}{sharded}, shard", "gpus": ranks.size, "T": tokens,
        "ms": 1e3 * took, "tokens_per_s": ranks.size * tokens / took,
        "gib": None if cpu else torch.cuda.max_memory_allocated() / 2**30,
        "gemm_tokens_per_s": ceiling and ranks.size * tokens / (flops / ceiling / 1e12),
    }  # fmt: skip


def active_elements(target: Any) -> float:
    """The elements of the matrices that a token is multiplied with: of the experts of a layer, a [X, ..] tensor, those
    that it chooses."""
    chosen = getattr(target.config, "num_experts_per_tok", 0)
    return sum(
        p.numel() * (chosen / p.shape[0] if p.dim() == 3 else 1) for p in target.model.parameters() if p.dim() > 1
    )


def draft_flops(c: Any, tokens: int, options: argparse.Namespace) -> float:
    """The FLOPs of the matrix products of a draft's forward and backward pass: K slots a token, and step 0's keys."""
    E, d, H, G = c.hidden_size, c.head_dim, c.num_attention_heads, c.num_key_value_heads
    slot = 2 * (2 * E * H * d + H * d * E + 3 * E * c.intermediate_size + E * c.draft_vocab_size)
    return 3 * tokens * (slot * options.depth + 2 * 2 * E * 2 * G * d * options.depth + 2 * 3 * E * E)


def document(length: int, vocab: int, seed: int) -> Document:
    """A document of random tokens, all of which are supervised."""
    tokens = torch.randint(vocab, (length,), generator=torch.Generator().manual_seed(seed), dtype=torch.int32)
    return Document(tokens.numpy(), torch.zeros(length, dtype=torch.int32).numpy())


if __name__ == "__main__":
    main()
