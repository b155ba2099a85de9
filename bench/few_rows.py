"""Times the products of few rows of a decoder, and finds their tile sizes.

    python bench/few_rows.py --out bench/results/few_rows.json
    python bench/few_rows.py --sweep --out bench/results/few_rows_sweep.json

Each time is of one of several calls in a CUDA graph, which read different weights, 512 MB of them or more, as the
layers of a network do. `us` is that of the product with what is fused into it, `definition_us` that of the definition
(the same work by several kernels), and `linear_us` that of F.linear alone. `gb_per_s` counts the bytes of the weights.
On a CPU, only the definitions run, without a graph.

`--sweep` times each matrix with many tile sizes, and the best of them again with smaller parts and as dependent
launches. Processes compile the kernels to Triton's cache first. It prints the best three of each matrix and number of
rows, and records all. A sweep that reaches `--seconds` leaves out the rest; `left_out` counts the tile sizes that were
not timed.
"""

import argparse
import itertools
import math
import multiprocessing
import os
import time
from collections.abc import Callable
from concurrent.futures import Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
from common import SHAPES, seconds
from torch import Tensor
from torch.nn import functional as F

from fledge.eval.environment import environment
from fledge.eval.record import check_record_path, write_record
from fledge.kernels.few_rows import linear_add, norm_linear, norm_swiglu, plain_linear
from fledge.kernels.few_rows.tiles import Tiles, tiles_for

ROWS = 1, 8
LEAST_CALLS, LEAST_BYTES = 8, 512e6  # of the different weights of a graph
MOST_SHARED = 220 * 1024  # bytes of shared memory that a program may have on an H200, less a reserve
EPS = 1e-5


@dataclass(frozen=True)
class Matrix:
    """A weight [O, I] of a decoder, and the function that uses it."""

    name: str
    O: int
    I: int
    kind: str  # "norm", "add", "swiglu" or "plain"


def matrices(shape: dict) -> list[Matrix]:
    E, D, width = shape["hidden_size"], shape["target_hidden_size"], shape["intermediate_size"]
    heads, kv_heads = (shape[name] * shape["head_dim"] for name in ("num_attention_heads", "num_key_value_heads"))
    return [
        Matrix("gate_up", 2 * width, D, "swiglu"),
        Matrix("down", D, width, "add"),
        Matrix("qkv", heads + 2 * kv_heads, D, "norm"),
        Matrix("out", D, heads, "add"),
        Matrix("head", shape["vocab_size"], D, "plain"),
        Matrix("draft head", shape["draft_vocab_size"], E, "plain"),
        Matrix("draft q", heads, 2 * E, "plain"),
        Matrix("draft k", kv_heads, 2 * E, "plain"),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("bench/results/few_rows.json"))
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--shape", default="8b", choices=SHAPES)
    parser.add_argument("--only", nargs="+", metavar="NAME", help="of the matrices; all unless given")
    parser.add_argument("--repeats", type=int, default=20, help="replays of each graph; the shortest counts")
    parser.add_argument("--sweep", action="store_true", help="time many tile sizes; needs a GPU")
    parser.add_argument("--seconds", type=float, default=150.0, help="after which a sweep ends")
    parser.add_argument("--processes", type=int, default=min(os.cpu_count(), 16), help="that compile for a sweep")
    options = parser.parse_args()
    start = time.perf_counter()
    chosen = [m for m in matrices(SHAPES[options.shape]) if not options.only or m.name in options.only]
    if not chosen:
        parser.error(f"--only must name some of {', '.join(m.name for m in matrices(SHAPES[options.shape]))}")
    if options.sweep and options.device == "cpu":
        parser.error("a sweep needs a GPU")
    check_record_path(options.out, "--out")
    torch.manual_seed(0)
    torch.set_default_device(options.device)
    torch.set_default_dtype(torch.bfloat16)
    record = {"environment": environment(options.device, "bfloat16"), "rows": []}
    if options.sweep:
        sweep(chosen, record, options, start)
        return
    for matrix in chosen:
        weights = random_weights(matrix, options.device)
        for M in ROWS:
            row = library_times(matrix, weights, M, options)
            impl = None if options.device == "cuda" else "definition"
            row["us"] = call_us(matrix, weights, M, options, lambda m, a, w, impl=impl: fused(m, a, w, impl=impl))
            row["gb_per_s"] = bytes_of(matrix) / row["us"] / 1e3
            row["tiles"] = asdict(default_tiles(matrix))
            record["rows"].append(row)
            print(
                "{matrix:10} M {M} {us:8.2f} us {gb_per_s:6.0f} GB/s, definition {definition_us:8.2f} us, "
                "F.linear {linear_us:8.2f} us".format(**row),
                flush=True,
            )
            write_record(options.out, record)
        del weights  # before the next are made


def bytes_of(matrix: Matrix) -> int:
    return 2 * matrix.O * matrix.I


def default_tiles(matrix: Matrix) -> Tiles:
    return tiles_for(matrix.O, matrix.I, torch.bfloat16)


def random_weights(matrix: Matrix, device: str) -> list[Tensor]:
    """Different weights, enough that no cache holds them."""
    calls = max(LEAST_CALLS, math.ceil(LEAST_BYTES / bytes_of(matrix))) if device == "cuda" else 2
    return [torch.empty(matrix.O, matrix.I).normal_(std=0.02) for _ in range(calls)]


def arguments(matrix: Matrix, M: int) -> dict[str, Tensor]:
    """Random rows, a gain of the norm, and a residual."""
    generator = torch.Generator(torch.get_default_device()).manual_seed(0)
    x, residual = torch.randn(M, matrix.I, generator=generator), torch.randn(M, matrix.O, generator=generator)
    return {"x": x, "gain": torch.ones(matrix.I), "residual": residual}


def fused(matrix: Matrix, a: dict[str, Tensor], weight: Tensor, impl: str | None = None) -> Tensor:
    if matrix.kind == "norm":
        return norm_linear(a["x"], a["gain"], EPS, weight, impl=impl)
    if matrix.kind == "swiglu":
        return norm_swiglu(a["x"], a["gain"], EPS, weight, impl=impl)
    if matrix.kind == "add":
        return linear_add(a["x"], weight, a["residual"], impl=impl)
    return plain_linear(a["x"], weight, impl=impl)


def tiled(matrix: Matrix, a: dict[str, Tensor], weight: Tensor, tiles: Tiles) -> Tensor:
    """`fused` with these tiles."""
    from fledge.kernels.few_rows.triton import product

    norm = {"gain_I": a["gain"], "eps": EPS} if matrix.kind in ("norm", "swiglu") else {}
    residual = a["residual"] if matrix.kind == "add" else None
    return product(a["x"], weight, residual_MO=residual, gated=matrix.kind == "swiglu", tiles=tiles, **norm)


def call_us(
    matrix: Matrix, weights: list[Tensor], M: int, options, work: Callable, repeats: int | None = None
) -> float:
    """Microseconds of one call: the shortest of several times of a call for each weight, divided by their number."""
    a, repeats = arguments(matrix, M), options.repeats if repeats is None else repeats

    def calls() -> None:
        for weight in weights:
            work(matrix, a, weight)

    if options.device == "cpu":
        return 1e6 * min(seconds(calls, "cpu") for _ in range(repeats)) / len(weights)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):  # compiles before the capture
        work(matrix, a, weights[0])
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        calls()
    for _ in range(2):
        graph.replay()
    return 1e6 * min(seconds(graph.replay, "cuda") for _ in range(repeats)) / len(weights)


def library_times(matrix: Matrix, weights: list[Tensor], M: int, options) -> dict:
    """A row of the record with the times of the definition and of F.linear."""
    row = {"matrix": matrix.name, "O": matrix.O, "I": matrix.I, "kind": matrix.kind, "M": M}
    row["linear_us"] = call_us(matrix, weights, M, options, lambda m, a, w: F.linear(a["x"], w))
    row["definition_us"] = call_us(matrix, weights, M, options, lambda m, a, w: fused(m, a, w, impl="definition"))
    return row


def candidates(matrix: Matrix) -> list[Tiles]:
    """Tile sizes whose buffers fit into shared memory, with the default first."""
    blocks = [  # outputs, inputs, warps
        (16, 128, 2), (16, 256, 2), (16, 256, 4), (16, 512, 4), (16, 512, 8), (16, 1024, 8),
        (32, 64, 1), (32, 128, 2), (32, 128, 4), (32, 256, 4), (32, 256, 8), (32, 512, 8),
        (64, 64, 1), (64, 64, 2), (64, 128, 2), (64, 128, 4), (64, 256, 4), (64, 256, 8),
        (128, 64, 2), (128, 128, 2), (128, 128, 4), (128, 128, 8),
    ]  # fmt: skip
    found = [default_tiles(matrix)]
    for (outputs, inputs, warps), stages in itertools.product(blocks, (3, 4, 6, 8, 12)):
        part = min(64, inputs // warps)
        tiles = Tiles(outputs=outputs, inputs=inputs, part=part, warps=warps, stages=stages)
        shared = 2 * inputs * (outputs + tiles.rows) * (stages - 1)
        programs = math.ceil(matrix.O / outputs)
        if shared > MOST_SHARED or shared < 24 * 1024:
            continue
        if programs >= 64 and min(programs / 132, MOST_SHARED // shared) * shared >= 48 * 1024:
            found.append(tiles)
        if matrix.O <= 6144 and outputs >= 32 and stages == 4:
            found += [replace(tiles, splits=n) for n in (2, 4, 8) if 128 <= programs * n <= 528]
    return list(dict.fromkeys(found))


def compile_one(matrix: Matrix, tiles: Tiles, device: str, dtype: torch.dtype) -> str | None:
    """Runs a product once, on weights whose rows are one row, and returns its error; in a process of its own."""
    torch.set_default_device(device)
    torch.set_default_dtype(dtype)
    try:
        tiled(matrix, arguments(matrix, 1), torch.ones(1, matrix.I).expand(matrix.O, -1), tiles)
        if device == "cuda":
            torch.cuda.synchronize()
    except Exception as e:  # of any kind: a tile size that the compiler or the GPU refuses is left out
        return f"{type(e).__name__}: {str(e)[:200]}"
    return None


def submit(pool: ProcessPoolExecutor, matrix: Matrix, tiles: Tiles, options) -> Future | None:
    """`compile_one` in the pool; None if a process of it has died, and the caller compiles."""
    try:
        return pool.submit(compile_one, matrix, tiles, options.device, torch.get_default_dtype())
    except BrokenProcessPool:
        return None


def result(compiled: Future | None) -> str | None:
    """The error of `compile_one`; None if there is none, or if the process died."""
    try:
        return None if compiled is None else compiled.result()
    except BrokenProcessPool:
        return None


def sweep(chosen: list[Matrix], record: dict, options, start: float) -> None:
    deadline = start + options.seconds
    record |= {"best": [], "failed": [], "left_out": 0}
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(options.processes, mp_context=context) as pool:
        jobs = {m: [(t, submit(pool, m, t, options)) for t in candidates(m)] for m in chosen}
        wait([future for of_one in jobs.values() for _, future in of_one if future])  # they would disturb the times
        print(f"compiled after {time.perf_counter() - start:.0f} s", flush=True)
        for place, matrix in enumerate(chosen):
            begun = time.perf_counter()
            share = (deadline - begun) / (len(chosen) - place)
            sweep_one(matrix, jobs[matrix], record, options, begun + share, pool)
            write_record(options.out, record)
    print(f"{len(record['rows'])} times, {len(record['failed'])} failed, {record['left_out']} left out", flush=True)


def sweep_one(matrix: Matrix, jobs: list, record: dict, options, deadline: float, pool: ProcessPoolExecutor) -> None:
    """Times all tile sizes of a matrix, and the best with dependent launches, until the deadline."""
    torch.cuda.empty_cache()
    weights = random_weights(matrix, options.device)
    library = {M: library_times(matrix, weights, M, options) for M in ROWS}
    a = arguments(matrix, 8)
    exact = fused(matrix, a, weights[0], impl="definition").float()
    times: dict[Tiles, list[float]] = {}

    def time_all(jobs: list, reserve: float) -> None:
        for tiles, compiled in jobs:
            if time.perf_counter() > deadline - reserve:
                record["left_out"] += 1
                continue
            error = result(compiled)
            if error is None:
                off = float((tiled(matrix, a, weights[0], tiles).float() - exact).norm() / exact.norm())
                error = None if off < 0.02 else f"results differ by {off:.3f}"
            if error is not None:
                record["failed"].append({"matrix": matrix.name, "tiles": asdict(tiles), "error": error})
                continue
            times[tiles] = []
            for M in ROWS:
                us = call_us(matrix, weights, M, options, lambda m, a, w, t=tiles: tiled(m, a, w, t), repeats=6)
                times[tiles].append(us)
                record["rows"].append({"matrix": matrix.name, "M": M, "us": us, "tiles": asdict(tiles)})

    time_all(jobs, reserve=3.0)
    best = sorted(times, key=lambda t: sum(times[t]))[:5]
    more = [replace(t, dependent=True, ahead=n) for t in best for n in (256, 1024)]
    more += [replace(t, part=n) for t in best[:3] for n in (16, 32) if n < t.part]
    jobs = [(tiles, submit(pool, matrix, tiles, options)) for tiles in more]
    wait([future for _, future in jobs if future])
    time_all(jobs, reserve=0.0)
    for i, M in enumerate(ROWS):
        row, texts = dict(library[M]), []
        for tiles in sorted(times, key=lambda t: times[t][i])[:3]:
            us = call_us(matrix, weights, M, options, lambda m, a, w, t=tiles: tiled(m, a, w, t))
            rate = bytes_of(matrix) / us / 1e3
            row.setdefault("best", []).append({"us": us, "gb_per_s": rate, "tiles": asdict(tiles)})
            texts.append(f"{us:.2f} us {rate:.0f} GB/s {name(tiles)}")
        apart = min((times[t][i] for t in times if not t.dependent), default=math.nan)
        default = times.get(default_tiles(matrix), [math.nan] * len(ROWS))[i]
        print(
            f"{matrix.name} M {M}: F.linear {row['linear_us']:.2f}, definition {row['definition_us']:.2f}, default "
            f"{default:.2f}, not dependent {apart:.2f} us | {' | '.join(texts)}",
            flush=True,
        )
        record["best"].append(row)


def name(t: Tiles) -> str:
    """Outputs x inputs, columns of a part, warps, stages, splits and columns fetched ahead."""
    ahead = f" pdl{t.ahead}" if t.dependent else ""
    return (
        f"{t.outputs}x{t.inputs} p{t.part} w{t.warps} s{t.stages}" + (f" k{t.splits}" if t.splits > 1 else "") + ahead
    )


if __name__ == "__main__":
    main()
