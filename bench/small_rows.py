"""Times five ways of multiplying a few float32 rows by a weight matrix on a CPU: x Wᵀ; (W xᵀ)ᵀ, where a single row is
computed as two; and x Wᵀ with the copies of W that fledge makes: for its own compiled products where there is a C
compiler; and where this build of PyTorch has their products, in oneDNN's layout, and in 16 bits for FBGEMM's.

    python bench/small_rows.py --out bench/results/small_rows.json

fledge/kernels/linear.py and packed_weight.py choose by the results. Weights rotate among enough copies that none stays
in a cache.
"""

import argparse
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional as F

from fledge.eval.environment import environment
from fledge.eval.record import check_record_path, write_record
from fledge.kernels import packed_weight
from fledge.kernels.compiled import CompiledWeight
from fledge.kernels.compiled.build import library

SHAPES = ((256, 256), (432, 256), (4096, 256), (1536, 512), (2048, 2048), (8192, 2048))
ROWS = (1, 2, 3, 4, 5, 6, 8, 12, 16, 32, 64, 256)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("bench/results/small_rows.json"))
    rows = []
    options = parser.parse_args()
    check_record_path(options.out, "--out")
    torch.set_grad_enabled(False)
    for out, width in SHAPES:
        number = max(2, (1 << 26) // (out * width))
        weights = [(0.02 * torch.randn(out, width)).bfloat16().float() for _ in range(number)]
        kinds = {"packed_us": packed_weight.has_onednn_products(), "half_us": packed_weight.has_half_products()}
        copies = {
            name: [packed_weight.copy_of(w, half=name == "half_us") for w in weights]
            for name, has in kinds.items()
            if has
        }
        if library() is not None:
            copies["compiled_us"] = [CompiledWeight(w) for w in weights]
        for n in ROWS:
            x = torch.randn(n, width)
            few = torch.cat((x, x)) if n == 1 else x
            times = {
                "rows_first_us": microseconds(lambda w, x=x: F.linear(x, w), weights),
                "weights_first_us": microseconds(lambda w, x=few, n=n: (w @ x.T)[:, :n].T.contiguous(), weights),
            }
            for name, copied in copies.items():
                times[name] = microseconds(lambda w, x=x: packed_weight.packed_linear(x, w, None), copied)
            rows.append({"weights": [out, width], "rows": n, **times})
            print(f"{out:5} x {width:4}, {n:3} rows: " + ", ".join(f"{k} {v:8.1f}" for k, v in times.items()))
    write_record(options.out, {"environment": environment("cpu", "float32"), "rows": rows})


def microseconds(product: Callable[[Any], torch.Tensor], weights: list[Any], repeats: int = 9) -> float:
    """The microseconds of a product: the median over passes through all weights."""
    # FBGEMM leaves the vector registers of its threads in a state in which MKL's products take much longer, until
    # another function clears them, as this one does; in a model, attention does in each layer
    torch.randn(1 << 20).exp()
    for w in weights:
        product(w)
    times = []
    for _ in range(repeats):
        began = time.perf_counter()
        for w in weights:
            product(w)
        times.append((time.perf_counter() - began) / len(weights))
    return 1e6 * statistics.median(times)


if __name__ == "__main__":
    main()
