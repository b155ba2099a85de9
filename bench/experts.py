"""Times the mixture of experts of a layer, and finds the tile sizes of its products.

    python bench/experts.py --out bench/results/experts.json
    python bench/experts.py --sweep --out bench/results/experts_sweep.json

Each time is of one of CALLS calls in a CUDA graph, which read different weights, as the layers of a network do: the
product with the router, the routing, and the experts' products and their sum. `experts` is the number of experts that
the rows choose, whose weights make up `bytes`; `gb_per_s` is their rate. `definition_us` is the time of the definition,
with torch's grouped products. The rows are random, so that they choose the experts almost independently.

`--sweep` times the experts' products alone, for each number of rows with many tile sizes for one of them and those of
the code for the other, which processes compile to Triton's cache first. It prints the best and records all.
"""

import argparse
import itertools
import multiprocessing
import os
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, replace
from pathlib import Path

import torch
from common import MIXTURES, SHAPES
from decode_kernels import seconds_per_call
from torch import Tensor

from fledge.eval.environment import environment
from fledge.eval.record import check_record_path, write_record
from fledge.kernels.experts import MOST_ROWS, Routing, experts, route
from fledge.kernels.few_rows import norm_linear
from fledge.kernels.few_rows.tiles import Tiles

CALLS, EPS = 8, 1e-6
PRODUCTS = "gate_up", "down"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("bench/results/experts.json"))
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--shape", default="30b-a3b", choices=MIXTURES)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 16, 60, 480], help="of x")
    parser.add_argument("--repeats", type=int, default=10, help="replays of each graph; the shortest counts")
    parser.add_argument("--sweep", action="store_true", help="time many tile sizes; needs a GPU")
    options = parser.parse_args()
    if options.sweep and options.device == "cpu":
        parser.error("a sweep needs a GPU")
    check_record_path(options.out, "--out")
    torch.manual_seed(0)
    torch.set_default_device(options.device)
    torch.set_default_dtype(torch.bfloat16)
    record = {"environment": environment(options.device, "bfloat16"), "shape": options.shape, "rows": []}
    layers = [Layer(options.shape) for _ in range(CALLS)]
    for M in options.rows:
        if options.sweep:
            sweep(layers, M, options, record)
        else:
            time_rows(layers, M, options, record)


class Layer:
    """The random weights of a mixture."""

    def __init__(self, shape: str):
        E, mixture = SHAPES[shape]["hidden_size"], MIXTURES[shape]
        X, F, self.chosen = mixture["num_experts"], mixture["moe_intermediate_size"], mixture["num_experts_per_tok"]
        self.gain, self.router = torch.ones(E), torch.randn(X, E) * 0.02
        self.gate_up, self.down = torch.randn(X, 2 * F, E) * 0.02, torch.randn(X, E, F) * 0.02

    def route(self, x: Tensor, impl: str | None = None) -> Routing:
        return route(norm_linear(x, self.gain, EPS, self.router, impl=impl), self.chosen, True, impl=impl)

    def __call__(self, x: Tensor, impl: str | None = None) -> Tensor:
        return experts(x, self.gain, EPS, self.route(x, impl), self.gate_up, self.down, x, impl=impl)

    def bytes_of(self, routing: Routing) -> tuple[int, int]:
        """The experts that are read, and the bytes of their weights."""
        ends = routing.end_X.tolist()
        read = sum(end > begin for begin, end in zip([0, *ends], ends, strict=False))
        return read, read * 2 * (self.gate_up[0].numel() + self.down[0].numel())


def time_rows(layers: list[Layer], M: int, options: argparse.Namespace, record: dict) -> None:
    x = torch.randn(M, layers[0].gain.numel())
    read, moved = layers[0].bytes_of(layers[0].route(x))
    us, plain_us = (
        1e6 * seconds_per_call([lambda w=w, impl=impl: w(x, impl) for w in layers], options.device, options.repeats)
        for impl in (None, "definition")
    )
    row = dict(M=M, experts=read, bytes=moved, us=us, gb_per_s=moved / us / 1e3, definition_us=plain_us)
    record["rows"].append(row)
    text = "M {M:3} {experts:3} experts {us:8.2f} us {gb_per_s:6.0f} GB/s, definition {definition_us:8.2f} us"
    print(text.format(**row), flush=True)
    write_record(options.out, record)


def candidates(rows: int) -> list[Tiles]:
    blocks = [  # outputs, inputs, warps, stages
        (16, 256, 2, 4), (16, 256, 4, 4), (16, 512, 4, 3), (32, 128, 2, 4), (32, 128, 4, 6), (32, 256, 4, 3),
        (32, 256, 4, 4), (64, 64, 2, 4), (64, 128, 2, 3), (64, 128, 2, 6), (64, 128, 4, 4), (64, 256, 4, 3),
        (128, 64, 4, 4), (128, 128, 4, 3), (128, 128, 8, 3),
    ]  # fmt: skip
    return [Tiles(rows=rows, outputs=o, inputs=i, part=min(64, i // w), warps=w, stages=s) for o, i, w, s in blocks]


def compile_one(shape: str, M: int, part: str, tiles: Tiles) -> None:
    """Runs the products once with these tiles for one of them, in a process of its own."""
    torch.set_default_device("cuda")
    torch.set_default_dtype(torch.bfloat16)
    call_with(Layer(shape), torch.ones(M, SHAPES[shape]["hidden_size"]), part, tiles)
    torch.cuda.synchronize()


def call_with(layer: Layer, x: Tensor, part: str, tiles: Tiles, routing: Routing | None = None) -> Tensor:
    from fledge.kernels.experts.triton import expert_tiles, experts_triton

    X, M = len(layer.router), len(x)
    chosen = replace(expert_tiles(M, M * layer.chosen, X, x.dtype, x.device), **{part: tiles})
    routing = layer.route(x) if routing is None else routing
    return experts_triton(x, layer.gain, EPS, routing, layer.gate_up, layer.down, x, chosen)


def sweep(layers: list[Layer], M: int, options: argparse.Namespace, record: dict) -> None:
    from fledge.kernels.experts.triton import expert_tiles

    if M > MOST_ROWS:  # grouped products
        return
    x, w = torch.randn(M, layers[0].gain.numel()), layers[0]
    routings = [layer.route(x) for layer in layers]
    read, moved = w.bytes_of(routings[0])
    usual = expert_tiles(M, M * w.chosen, len(w.router), x.dtype, x.device)
    pairs = [(p, t) for p in PRODUCTS for t in dict.fromkeys([getattr(usual, p), *candidates(usual.down.rows)])]
    with ProcessPoolExecutor(min(os.cpu_count(), 8), mp_context=multiprocessing.get_context("spawn")) as pool:
        jobs = [pool.submit(compile_one, options.shape, M, *pair) for pair in pairs]
        errors = [job.exception() for job in jobs]
    exact, rows = w(x, "definition").float(), []
    for (part, tiles), error in zip(pairs, errors, strict=True):
        row = {"M": M, "experts": read, "product": part, "tiles": asdict(tiles)}
        row["chosen"] = tiles == getattr(usual, part)
        if error is not None:
            record["rows"].append(row | {"us": None, "failed": f"{type(error).__name__}: {str(error)[:200]}"})
            continue
        off = float((call_with(w, x, part, tiles, routings[0]).float() - exact).norm() / exact.norm())
        calls = [
            lambda layer=layer, routing=routing, part=part, tiles=tiles: call_with(layer, x, part, tiles, routing)
            for layer, routing in zip(layers, routings, strict=True)
        ]
        us = 1e6 * seconds_per_call(calls, options.device, 5)
        rows.append(row | {"us": us, "gb_per_s": moved / us / 1e3, "error": off})
    record["rows"] += rows
    write_record(options.out, record)
    for part, chosen in itertools.product(PRODUCTS, (True, False)):
        found = [row for row in rows if (row["product"], row["chosen"]) == (part, chosen)]
        for row in sorted(found, key=lambda row: row["us"])[:3]:
            print("M {M} {product} chosen {chosen}: {us:.2f} us {gb_per_s:.0f} GB/s, {tiles}".format(**row), flush=True)


if __name__ == "__main__":
    main()
