"""Times a training step of a P-EAGLE draft, forward and backward, on long rows.

    python bench/peagle_step.py --out bench/results/peagle_step.json
    python bench/peagle_step.py --shape tiny --device cpu --tokens 512      # a dry run anywhere

The draft has the shape of train_step.py (Llama-3.1-8B), four layers, K = 8 depths and a COD rate of 0.8. A row is one
document of T tokens, all supervised, with every slot scored. Features are random inputs. Time is the median of
`--repeats` steps without synchronization in between. Memory is the peak, including gradients, minus weights and inputs.
"""

import argparse
import statistics
from dataclasses import asdict, replace
from pathlib import Path

import torch
from common import SHAPES, make_row, queued_seconds, random_draft

from fledge.config import DraftConfig
from fledge.eval.environment import environment
from fledge.eval.record import check_record_path, write_record
from fledge.train.cod import DropTokens
from fledge.train.objective import Implementation, Objective, ttt_queued


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("bench/results/peagle_step.json"))
    parser.add_argument("--shape", choices=SHAPES, default="8b")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--depth", type=int, default=8)
    parser.add_argument("--rate", type=float, default=0.8)
    parser.add_argument("--tokens", type=int, nargs="*", default=[8192, 20_480, 32_768])
    parser.add_argument("--slots", type=int, default=4096, help="slots in flight")
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args()
    check_record_path(options.out, "--out")
    if options.device != "cpu":
        torch.set_num_threads(1)
    record = {"environment": environment(options.device, "bfloat16"), "shape": SHAPES[options.shape], "rows": []}
    record |= {"layers": options.layers, "depth": options.depth, "rate": options.rate}
    for tokens in options.tokens:
        for recompute in (False, True):
            row = measure(tokens, recompute, options)
            record["rows"].append(row)
            print(row, flush=True)
            write_record(options.out, record)


def measure(tokens: int, recompute: bool, options: argparse.Namespace) -> dict:
    device, dtype = options.device, torch.bfloat16
    impl = "eager" if device == "cpu" else "triton"
    implementation = Implementation(impl, impl, impl, options.slots, recompute and impl == "triton", 512)
    torch.manual_seed(0)
    config = DraftConfig(**SHAPES[options.shape], num_hidden_layers=options.layers, method="peagle", mask_token_id=0)
    config = replace(config, vocab_size=config.draft_vocab_size)  # a target with the draft's vocabulary
    draft, features, head = random_draft(config, tokens, device, dtype)
    packed, drop = make_row(tokens, 1.0, config.vocab_size), DropTokens(options.rate, 0.2)

    objective = Objective(depth=options.depth, gamma=1.0, keep_out_of_vocab=True, drop=drop)

    def step():
        draft.zero_grad(set_to_none=True)
        return ttt_queued(draft, packed, features, lambda x: x @ head.T, objective, implementation, "0")

    gpu = device != "cpu"
    row = {"T": tokens, "ways": asdict(implementation)}
    before = torch.cuda.memory_allocated() if gpu else 0
    try:
        if gpu:
            torch.cuda.reset_peak_memory_stats()
        for _ in range(2):
            first = step().to_host()
        took = statistics.median(queued_seconds(step, options.repeats, device))
    except torch.OutOfMemoryError:
        return row | {"error": "out of memory"}
    gib = (torch.cuda.max_memory_allocated() - before) / 2**30 if gpu else None
    return row | {"ms": took * 1e3, "gib": gib, "slots": first.live_K.tolist(), "loss": first.loss.item()}


if __name__ == "__main__":
    main()
