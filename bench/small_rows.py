"""Times three ways of multiplying a few float32 rows by a weight matrix on a CPU: x Wᵀ; (W xᵀ)ᵀ, where a single row is
computed as two; and x Wᵀ with a packed copy of W, where this build of PyTorch has it.

    python bench/small_rows.py --out bench/results/small_rows.json

fledge/kernels/linear.py and packed_weight.py choose by the results. Weights rotate among enough copies that none stays
in a cache.
"""

import argparse
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch.nn import functional as F

from fledge.eval.environment import environment
from fledge.eval.record import check_record_path, write_record
from fledge.kernels import packed_weight

SHAPES = ((256, 256), (432, 256), (4096, 256), (1536, 512), (2048, 2048), (8192, 2048))
ROWS = (1, 2, 3, 4, 5, 6, 8, 12, 16, 32, 64, 256)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("bench/results/small_rows.json"))
    rows = []
    options = parser.parse_args()
    check_record_path(options.out, "--out")
    torch.set_grad_enabled(False)
    packed_weight.LEAST_ELEMENTS = 0
    for out, width in SHAPES:
        weights = [torch.randn(out, width) for _ in range(max(2, (1 << 26) // (out * width)))]
        packed = []
        if packed_weight.has_packed_products():
            packed = [packed_weight.packed_copy(packed_weight.pack(w), packed_weight.ROWS) for w in weights]
        for n in ROWS:
            x = torch.randn(n, width)
            few = torch.cat((x, x)) if n == 1 else x
            times = {
                "rows_first_us": microseconds(lambda w, x=x: F.linear(x, w), weights),
                "weights_first_us": microseconds(lambda w, x=few, n=n: (w @ x.T)[:, :n].T.contiguous(), weights),
            }
            if packed:
                times["packed_us"] = microseconds(lambda w, x=x: packed_weight.packed_linear(x, w, None), packed)
            rows.append({"weights": [out, width], "rows": n, **times})
            print(f"{out:5} x {width:4}, {n:3} rows: " + ", ".join(f"{k} {v:8.1f}" for k, v in times.items()))
    write_record(options.out, {"environment": environment("cpu", "float32"), "rows": rows})


def microseconds(product: Callable[[torch.Tensor], torch.Tensor], weights: list[torch.Tensor], repeats: int = 9):
    """The microseconds of a product: the median over passes through all weights."""
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
