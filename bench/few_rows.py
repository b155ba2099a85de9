"""Times the products of few rows of a decoder, and finds their tile sizes.

    python bench/few_rows.py --out bench/results/few_rows.json
    python bench/few_rows.py --sweep --rows 1 8 --out bench/results/few_rows_sweep.json
    python bench/few_rows.py --sweep --rows 16 32 64 --out bench/results/many_rows_sweep.json

Each time is of one of several calls in a CUDA graph, which read different weights, 512 MB of them or more, as the
layers of a network do. `us` is that of the product with what is fused into it, `definition_us` that of the definition
(the same work by several kernels), and `linear_us` that of F.linear alone. `gb_per_s` counts the bytes of the weights.
A norm is fused into the product that reads it for up to FEW_ROWS rows, and with more into the product before it, after
the sum. Where a sum is fused, `sum_apart_us` is F.linear and a sum. On a CPU, only the definitions run, without a
graph.

`--sweep` times each matrix with many tile sizes, and the best of them again with smaller parts and as dependent
launches. Processes compile the kernels to Triton's cache first. It prints the best three of each matrix and number of
rows, and records all; of the best three with a norm inside, `norm_apart_us` is the time with the norm as a kernel of
its own. `same_bits` tells whether the result equals that of the tiles of fledge/ops/products_triton.py. A sweep that
reaches `--seconds` leaves out the rest; `left_out` counts the tile sizes that were not timed.
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
from unittest import mock

import torch
from common import SHAPES, seconds
from torch import Tensor
from torch.nn import functional as F

from fledge.io.machine import environment
from fledge.measure.record import check_record_path, write_record
from fledge.ops import products
from fledge.ops.device import computed_by
from fledge.ops.layer import add_rms_norm
from fledge.ops.products import FEW_ROWS, linear_add_norm, norm_linear, norm_swiglu, plain_linear
from fledge.ops.products_triton import ProductTiles, tiles_for

PARTS_ROWS = 8  # the most rows of the sweep for which programs have 8 rows and the columns of a step are in parts
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
        Matrix("draft qkv", heads + 2 * kv_heads, 2 * E, "plain"),
        Matrix("draft fc", E, 3 * D, "plain"),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("bench/results/few_rows.json"))
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--shape", default="8b", choices=SHAPES)
    parser.add_argument("--only", nargs="+", metavar="NAME", help="of the matrices; all unless given")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 16, 32, 64], help="of x")
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
        for M in options.rows:
            row = library_times(matrix, weights, M, options)
            row["us"] = call_us(matrix, weights, M, options, fused)
            row["gb_per_s"] = bytes_of(matrix) / row["us"] / 1e3
            row["tiles"] = asdict(default_tiles(matrix, M))
            record["rows"].append(row)
            print(
                "{matrix:10} M {M:2} {us:8.2f} us {gb_per_s:6.0f} GB/s, definition {definition_us:8.2f} us, "
                "F.linear {linear_us:8.2f} us".format(**row),
                flush=True,
            )
            write_record(options.out, record)
        del weights  # before the next are made


def bytes_of(matrix: Matrix) -> int:
    return 2 * matrix.O * matrix.I


def default_tiles(matrix: Matrix, M: int) -> ProductTiles:
    return tiles_for(matrix.O, matrix.I, torch.bfloat16, M)


def random_weights(matrix: Matrix, device: str) -> list[Tensor]:
    """Different weights, enough that no cache holds them."""
    calls = max(LEAST_CALLS, math.ceil(LEAST_BYTES / bytes_of(matrix))) if device == "cuda" else 2
    return [torch.empty(matrix.O, matrix.I).normal_(std=0.02) for _ in range(calls)]


def arguments(matrix: Matrix, M: int) -> dict[str, Tensor]:
    """Random rows, gains of the norms before and after the product, and a residual."""
    generator = torch.Generator(torch.get_default_device()).manual_seed(0)
    x, residual = torch.randn(M, matrix.I, generator=generator), torch.randn(M, matrix.O, generator=generator)
    return {"x": x, "gain": torch.ones(matrix.I), "next_gain": torch.ones(matrix.O), "residual": residual}


def norm_inside(matrix: Matrix, M: int) -> bool:
    """Whether the product computes the norm of its rows."""
    return matrix.kind in ("norm", "swiglu") and M <= FEW_ROWS


def by_definition(matrix: Matrix, a: dict[str, Tensor], weight: Tensor) -> Tensor:
    """`fused` by the library's product, and by other kernels before and after it."""
    with mock.patch.object(products, "most_rows", lambda *_: -1):
        return fused(matrix, a, weight)


def fused(matrix: Matrix, a: dict[str, Tensor], weight: Tensor) -> Tensor:
    normed = None if norm_inside(matrix, len(a["x"])) else a["x"]
    if matrix.kind == "norm":
        return norm_linear(a["x"], a["gain"], EPS, weight, normed_ME=normed)
    if matrix.kind == "swiglu":
        return norm_swiglu(a["x"], a["gain"], EPS, weight, normed_ME=normed)
    if matrix.kind == "add":
        return linear_add_norm(a["x"], weight, a["residual"], a["next_gain"], EPS)[0]
    return plain_linear(a["x"], weight)


def tiled(matrix: Matrix, a: dict[str, Tensor], weight: Tensor, tiles: ProductTiles) -> Tensor:
    """`fused` with these tiles."""
    from fledge.ops.products_triton import product, product_norm

    if matrix.kind == "add" and len(a["x"]) <= FEW_ROWS:
        return product(a["x"], weight, residual_MO=a["residual"], tiles=tiles)
    if matrix.kind == "add":
        return product_norm(a["x"], weight, None, a["residual"], a["next_gain"], EPS, tiles)[0]
    norm = {"gain_I": a["gain"], "eps": EPS} if norm_inside(matrix, len(a["x"])) else {}
    return product(a["x"], weight, gated=matrix.kind == "swiglu", tiles=tiles, **norm)


def tiled_after_norm(matrix: Matrix, a: dict[str, Tensor], weight: Tensor, tiles: ProductTiles) -> Tensor:
    """`tiled` with the norm as a kernel of its own."""
    from fledge.ops.products_triton import product

    return product(add_rms_norm(a["x"], None, a["gain"], EPS)[0], weight, gated=matrix.kind == "swiglu", tiles=tiles)


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
    """A row of the record with the times of the definition, of F.linear, and of F.linear and a sum."""
    row = {"matrix": matrix.name, "O": matrix.O, "I": matrix.I, "kind": matrix.kind, "M": M}
    row["linear_us"] = call_us(matrix, weights, M, options, lambda m, a, w: F.linear(a["x"], w))
    row["definition_us"] = call_us(matrix, weights, M, options, by_definition)
    if matrix.kind == "add":
        row["sum_apart_us"] = call_us(matrix, weights, M, options, lambda m, a, w: F.linear(a["x"], w) + a["residual"])
    return row


def candidates(matrix: Matrix, M: int) -> list[ProductTiles]:
    """Tile sizes for M rows whose buffers fit into shared memory, with the default first."""
    default = default_tiles(matrix, M)
    if M <= PARTS_ROWS:
        return list(dict.fromkeys([default, *candidates_in_parts(matrix)]))
    rows = 1 << (M - 1).bit_length()
    return list(dict.fromkeys([default, *candidates_of_many(matrix, min(rows, 64))]))


def candidates_in_parts(matrix: Matrix) -> list[ProductTiles]:
    blocks = [  # outputs, inputs, warps
        (16, 128, 2), (16, 256, 2), (16, 256, 4), (16, 512, 4), (16, 512, 8), (16, 1024, 8),
        (32, 64, 1), (32, 128, 2), (32, 128, 4), (32, 256, 4), (32, 256, 8), (32, 512, 8),
        (64, 64, 1), (64, 64, 2), (64, 128, 2), (64, 128, 4), (64, 256, 4), (64, 256, 8),
        (128, 64, 2), (128, 128, 2), (128, 128, 4), (128, 128, 8),
    ]  # fmt: skip
    found = []
    for (outputs, inputs, warps), stages in itertools.product(blocks, (3, 4, 6, 8, 12)):
        part = min(64, inputs // warps)
        tiles = ProductTiles(outputs=outputs, inputs=inputs, part=part, warps=warps, stages=stages)
        shared = 2 * inputs * (outputs + tiles.rows) * (stages - 1)
        programs = math.ceil(matrix.O / outputs)
        if shared > MOST_SHARED or shared < 24 * 1024:
            continue
        if programs >= 64 and min(programs / 132, MOST_SHARED // shared) * shared >= 48 * 1024:
            found.append(tiles)
        if matrix.O <= 6144 and outputs >= 32 and stages == 4:
            found += [replace(tiles, splits=n) for n in (2, 4, 8) if 128 <= programs * n <= 528]
    return found


def candidates_of_many(matrix: Matrix, rows: int) -> list[ProductTiles]:
    """Tiles of one part, and a few of several. Of those whose programs share columns, the ones with the fewest and
    with the most programs that run at the same time."""
    blocks = [  # outputs, inputs, warps, stages
        (64, 64, 4, 4), (64, 64, 4, 6), (64, 128, 4, 3), (64, 128, 4, 4), (128, 64, 4, 3), (128, 64, 4, 4),
        (64, 64, 4, 8), (64, 128, 4, 6), (128, 64, 4, 6), (128, 64, 8, 4), (128, 128, 8, 3), (128, 128, 8, 4),
        (256, 64, 8, 4), (256, 64, 8, 5),
    ]  # fmt: skip
    tiles = [ProductTiles(rows=rows, outputs=o, inputs=i, part=i, warps=w, stages=s) for o, i, w, s in blocks]
    if rows <= 32:
        tiles += [
            ProductTiles(rows=rows, outputs=o, inputs=i, part=i // 4, warps=4, stages=s)
            for o, i, s in ((32, 256, 4), (64, 128, 4))
        ]
    found = []
    for t in tiles:
        shared = 2 * t.inputs * (t.outputs + rows) * t.stages
        programs, places = math.ceil(matrix.O / t.outputs), 132 * min(3, MOST_SHARED // shared)
        if shared > MOST_SHARED:
            continue
        shares = [n for n in range(1, 9) if programs * n >= 96 and not matrix.I % (n * t.inputs)]
        fitting = [n for n in shares if programs * n <= places] or shares[:1]
        found += [replace(t, splits=n) for n in dict.fromkeys((*fitting[:1], *fitting[-1:]))]
    return found


def compile_one(matrix: Matrix, M: int, tiles: ProductTiles, device: str, dtype: torch.dtype) -> str | None:
    """Runs a product once, on weights whose rows are one row, and returns its error; in a process of its own."""
    torch.set_default_device(device)
    torch.set_default_dtype(dtype)
    try:
        tiled(matrix, arguments(matrix, M), torch.ones(1, matrix.I).expand(matrix.O, -1), tiles)
        if device == "cuda":
            torch.cuda.synchronize()
    except Exception as e:  # of any kind: a tile size that the compiler or the GPU refuses is left out
        return f"{type(e).__name__}: {str(e)[:200]}"
    return None


def submit(pool: ProcessPoolExecutor, matrix: Matrix, M: int, tiles: ProductTiles, options) -> Future | None:
    """`compile_one` in the pool; None if a process of it has died, and the caller compiles."""
    try:
        return pool.submit(compile_one, matrix, M, tiles, options.device, torch.get_default_dtype())
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
        jobs = {
            (m, M): [(t, submit(pool, m, M, t, options)) for t in candidates(m, M)]
            for m in chosen
            for M in options.rows
        }
        wait([future for of_one in jobs.values() for _, future in of_one if future])  # they would disturb the times
        print(f"compiled after {time.perf_counter() - start:.0f} s", flush=True)
        for place, matrix in enumerate(chosen):
            torch.cuda.empty_cache()
            weights = random_weights(matrix, options.device)
            for i, M in enumerate(options.rows):
                begun = time.perf_counter()
                share = (deadline - begun) / ((len(chosen) - place) * len(options.rows) - i)
                sweep_one(matrix, M, weights, jobs[matrix, M], record, options, begun + share, pool)
                write_record(options.out, record)
            del weights  # before the next are made
    print(f"{len(record['rows'])} times, {len(record['failed'])} failed, {record['left_out']} left out", flush=True)


def sweep_one(
    matrix: Matrix, M: int, weights: list[Tensor], jobs: list, record: dict, options, deadline: float,
    pool: ProcessPoolExecutor,
) -> None:  # fmt: skip
    """Times all tile sizes of a matrix and number of rows, and the best with dependent launches, until the deadline."""
    best_row = library_times(matrix, weights, M, options)
    a, default = arguments(matrix, M), default_tiles(matrix, M)
    exact = by_definition(matrix, a, weights[0]).float()
    with computed_by("triton"):
        usual = fused(matrix, a, weights[0])
    times: dict[ProductTiles, float] = {}

    def time_all(jobs: list, reserve: float) -> None:
        for tiles, compiled in jobs:
            if time.perf_counter() > deadline - reserve:
                record["left_out"] += 1
                continue
            error = result(compiled)
            if error is None:
                found = tiled(matrix, a, weights[0], tiles)
                off = float((found.float() - exact).norm() / exact.norm())
                error = None if off < 0.02 else f"results differ by {off:.3f}"
            if error is not None:
                record["failed"].append({"matrix": matrix.name, "M": M, "tiles": asdict(tiles), "error": error})
                continue
            times[tiles] = call_us(matrix, weights, M, options, lambda m, a, w, t=tiles: tiled(m, a, w, t), repeats=6)
            record["rows"].append(
                {"matrix": matrix.name, "M": M, "us": times[tiles], "same_bits": torch.equal(found, usual)}
                | {"tiles": asdict(tiles)}
            )

    time_all(jobs, reserve=1.0)
    best = sorted(times, key=times.get)[: 5 if M <= PARTS_ROWS else 3]
    more = [replace(t, dependent=True, ahead=n) for t in best for n in (256, 1024)]
    more += [replace(t, part=n) for t in best[:3] for n in (16, 32) if n < t.part < t.inputs]
    more = [t for t in dict.fromkeys(more) if t not in times]
    jobs = [(tiles, submit(pool, matrix, M, tiles, options)) for tiles in more]
    wait([future for _, future in jobs if future])
    time_all(jobs, reserve=0.0)
    texts = []
    for tiles in sorted(times, key=times.get)[:3]:
        us = call_us(matrix, weights, M, options, lambda m, a, w, t=tiles: tiled(m, a, w, t))
        rate = bytes_of(matrix) / us / 1e3
        row = {"us": us, "gb_per_s": rate, "tiles": asdict(tiles)}
        texts.append(f"{us:.2f} us {rate:.0f} GB/s {name(tiles)}")
        if norm_inside(matrix, M):
            apart = call_us(matrix, weights, M, options, lambda m, a, w, t=tiles: tiled_after_norm(m, a, w, t))
            row["norm_apart_us"] = apart
            texts[-1] += f" (norm apart {apart:.2f})"
        best_row.setdefault("best", []).append(row)
    best_row["default_us"] = times.get(default)
    not_dependent = min((us for t, us in times.items() if not t.dependent), default=math.nan)
    summed = f", with a sum {best_row['sum_apart_us']:.2f}" if matrix.kind == "add" else ""
    print(
        f"{matrix.name} M {M}: F.linear {best_row['linear_us']:.2f}{summed}, definition "
        f"{best_row['definition_us']:.2f}, default {times.get(default, math.nan):.2f}, not dependent "
        f"{not_dependent:.2f} us | {' | '.join(texts)}",
        flush=True,
    )
    record["best"].append(best_row)


def name(t: ProductTiles) -> str:
    """Rows, outputs x inputs, columns of a part, warps, stages, splits and columns fetched ahead."""
    ahead = f" pdl{t.ahead}" if t.dependent else ""
    return (
        f"m{t.rows} {t.outputs}x{t.inputs} p{t.part} w{t.warps} s{t.stages}"
        + (f" k{t.splits}" if t.splits > 1 else "")
        + ahead
    )


if __name__ == "__main__":
    main()
