"""Times the fused loss (from the head's inputs to the gradients of inputs and head) against a separate head and loss.

    python bench/loss.py --out bench/results/loss.json
    python bench/loss.py --device cpu --width 64 --sizes 300 500      # a dry run anywhere

The sizes are those of SpecForge's benchmark: (T, W) slots and draft tokens, E = 4096, bf16, one step, every slot
scored. The teacher has the draft's vocabulary; its logits are computed from final hidden states within the measured
time.

"eager" and "triton" are fledge's loss, with `chunk` teacher rows at a time (null: the default of training) and the
head's gradient in float32. "apart" computes all logits, then a plain loss (compiled on a GPU) with autograd, and the
head's gradient is bf16. "apart32" is the same with float32 logits, which separate loss kernels take.

`ms` is the median of several calls without synchronization in between, as in training. `idle_ms` is the median of calls
that start on an idle GPU, and includes waiting for the host. Memory is the peak, including gradients, minus the inputs.
"""

import argparse
import statistics
from pathlib import Path

import torch
from common import peak_tflops, profile, queued_seconds, seconds

from fledge.eval.environment import environment
from fledge.eval.record import check_record_path, write_record
from fledge.kernels.gradients import Fp32Accumulator
from fledge.kernels.loss import LossOptions, Teacher, loss_and_gradients

SIZES = ((8192, 32_000), (16_384, 32_000), (8192, 64_000))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("bench/results/loss.json"))
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--width", type=int, default=4096)
    parser.add_argument("--chunk", type=int, default=1024, help="teacher rows at a time of the low-memory variants")
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--sizes", type=int, nargs="*", help="T W T W ...")
    options = parser.parse_args()
    check_record_path(options.out, "--out")
    if options.device == "cpu" and not options.sizes:
        parser.error("the record's sizes need a GPU; choose others with --sizes")
    sizes = list(zip(options.sizes[::2], options.sizes[1::2], strict=True)) if options.sizes else SIZES
    record = {"environment": environment(options.device, "bfloat16"), "ceiling_tflops": peak_tflops(options.device)}
    record |= {"width": options.width, "rows": []}
    variants = [("apart32", None), ("apart", None), ("eager", options.chunk)]
    if options.device != "cpu":
        variants += [("triton", options.chunk), ("triton", None)]
    for T, W in sizes:
        for impl, chunk in variants:
            row = {"T": T, "W": W, "impl": impl, "chunk": chunk, **measure(impl, T, W, chunk, options)}
            record["rows"].append(row)
            memory = "" if row["gib"] is None else f" {row['gib']:6.3f} GiB"
            say = "({T}, {W}) {impl:7} chunk {chunk!s:5}{ms:8.2f} ms ({idle_ms:.2f} from idle)"
            print(say.format(**row) + memory + f", loss {row['loss']:.4f}", flush=True)
            write_record(options.out, record)


def measure(impl: str, T: int, W: int, chunk: int | None, options: argparse.Namespace) -> dict:
    device, dtype = options.device, torch.bfloat16
    torch.manual_seed(0)
    h, last = (torch.randn(T, options.width, device=device, dtype=dtype) for _ in range(2))
    head, target_head = (torch.randn(W, options.width, device=device, dtype=dtype) * 0.02 for _ in range(2))
    h.requires_grad_(), head.requires_grad_()
    ids, rows = torch.arange(W, device=device), [torch.arange(T)]
    apart = torch.compile(plain) if device != "cpu" else plain

    def work() -> torch.Tensor:
        h.grad = head.grad = None
        if impl.startswith("apart"):
            logits = h @ head.T, last @ target_head.T
            loss = apart(*(x.float() for x in logits) if impl == "apart32" else logits)
            loss.backward()
            return loss.detach()
        teacher = Teacher(lambda s: last[s] @ target_head.T, rows, ids, W)
        options_of = LossOptions(chunk=chunk, impl=impl)
        return loss_and_gradients([h], head, teacher, [1.0], options_of, head_sum=Fp32Accumulator(head)).loss

    if options.profile and device != "cpu" and impl != "eager":
        work(), work()
        profile(work)
    held = torch.cuda.memory_allocated if device != "cpu" else lambda: 0
    before = held()
    for _ in range(3):
        loss = work()
    if device != "cpu":
        torch.cuda.reset_peak_memory_stats()
    ms = 1e3 * statistics.median(queued_seconds(work, 9, device))
    idle_ms = 1e3 * statistics.median(seconds(work, device) for _ in range(7))
    peak = torch.cuda.max_memory_allocated() if device != "cpu" else 0
    gib = (peak - before) / 2**30 if device != "cpu" else None
    return {"ms": ms, "idle_ms": idle_ms, "gib": gib, "loss": loss.item() / T}


def plain(z: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
    """The sum of the soft cross-entropies of logits [T, W] with teacher logits [T, W]."""
    return -(t.float().softmax(-1) * z.float().log_softmax(-1)).sum()


if __name__ == "__main__":
    main()
