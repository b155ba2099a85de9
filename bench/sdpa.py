"""Times attention at lengths that are new in each call, with torch's choice of backend and without cuDNN's.

    python bench/sdpa.py --out bench/results/sdpa.json

One bf16 query with 32 heads of dimension 128 attends to keys that grow by one per call, as in decoding. Keys are
repeated for the heads that share them, as transformers does with a mask. Three cases: batch 1 without mask, batch 16
with a mask, batch 1 with a mask. Records milliseconds per call, including host time, over 60 new lengths and over the
same lengths again.
"""

import argparse
import time
from pathlib import Path

import torch
from torch.nn import functional as F
from torch.nn.attention import sdpa_kernel

from fledge.eval.environment import environment
from fledge.eval.record import check_record_path, write_record
from fledge.kernels.sdpa import BACKENDS


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("bench/results/sdpa.json"))
    options = parser.parse_args()
    check_record_path(options.out, "--out")
    record = {"environment": environment("cuda", "bfloat16"), "rows": []}
    for batch, masked, start in ((1, False, 200), (16, True, 400), (1, True, 600)):
        own = {"batch": batch, "masked": masked, "torch's choice_ms": measure(batch, masked, start)}
        with sdpa_kernel(BACKENDS):
            own["without cuDNN_ms"] = measure(batch, masked, start)
        record["rows"].append(own)
        print(own, flush=True)
    write_record(options.out, record)


def measure(batch: int, masked: bool, start: int) -> dict[str, float]:
    q = torch.randn(batch, 32, 1, 128, device="cuda", dtype=torch.bfloat16)
    keys = torch.randn(batch, 32, 1000, 128, device="cuda", dtype=torch.bfloat16)

    def over(lengths: range) -> float:
        torch.cuda.synchronize()
        began = time.perf_counter()
        for n in lengths:
            mask = torch.zeros(batch, 1, 1, n, device="cuda", dtype=torch.bfloat16) if masked else None
            F.scaled_dot_product_attention(q, keys[:, :, :n], keys[:, :, :n], attn_mask=mask)
        torch.cuda.synchronize()
        return 1e3 * (time.perf_counter() - began) / len(lengths)

    over(range(10, 13))
    lengths = range(start, start + 60)
    return {"first": over(lengths), "again": over(lengths)}


if __name__ == "__main__":
    main()
