"""Times a training step of an EAGLE-3 draft, forward and backward, for each implementation.

    python bench/train_step.py --out bench/results/train_step.json
    python bench/train_step.py --shape tiny --device cpu --tokens 1024     # a dry run anywhere

The default shape is that of a draft for Llama-3.1-8B: hidden size 4096, MLP 14336, 32 query and 8 key-value heads,
V 128,256, W 32,000, K = 7, bf16. A row is one document of T tokens, with evenly spaced supervised spans of 256 tokens,
or one span if all tokens are supervised. Features are random inputs, embeddings are frozen, and every slot is scored.
Time is the median of `--repeats` steps without synchronization in between; eager attention on the longest row takes
about a minute and is timed once. Memory is the peak, including gradients, minus weights and inputs. `tflops` counts the
work of scored slots, of the keys and values of step 0, and of fc.

Without --tokens, the cases of the record are measured. --supervised and --teachers apply to those of --tokens. With
--online, complete optimizer steps of the trainer are measured too, with a target of the same shape, random weights and
32 layers: the target's forward pass, teacher logits over the whole vocabulary, the draft's step and AdamW, in tokens/s,
with and without prefetching the next row's features on a side stream.
"""

import argparse
import itertools
import statistics
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
from common import SHAPES, make_row, peak_tflops, profile, queued_seconds, random_draft, seconds

from fledge.config import DraftConfig
from fledge.drafts.registry import new_draft
from fledge.io.machine import environment
from fledge.measure.record import check_record_path, write_record
from fledge.train.objective import ttt_queued
from fledge.train.row_pass import Implementation, Objective
from fledge.train.setup.run import SMALL_CHUNK
from fledge.train.trainer import with_features
from fledge.types import Packed

LONG = 100_000  # rows from this number of tokens on take about a minute with eager attention
LONGER = ((8192, 1.0, "V"), (32_768, 0.25, "W"), (131_072, 0.25, "W"))  # T, supervised, teacher


@dataclass(frozen=True)
class Case:
    """One row of the record: the tokens of the training row, the supervised share of them, the implementation, and the
    teacher's vocabulary: the draft's W tokens or the target's V."""

    tokens: int
    supervised: float
    implementation: Implementation
    teacher: str = "W"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("bench/results/train_step.json"))
    parser.add_argument("--shape", choices=SHAPES, default="8b")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--depth", type=int, default=7)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--tokens", type=int, nargs="*", help="lengths of rows (default: the record's cases)")
    parser.add_argument("--supervised", type=float, nargs="*", help="shares of the tokens (default: 1 0.25)")
    parser.add_argument("--impls", nargs="*", choices=["eager", "flex", "triton"], help="default: all the device has")
    parser.add_argument("--slots", type=int, default=4096, help="slots in flight, except with eager")
    parser.add_argument("--recompute", action="store_true", help="recompute the MLP's activations in the backward pass")
    parser.add_argument("--chunk", type=int, help="teacher rows of the loss at a time (default: the loss's own)")
    parser.add_argument("--teachers", nargs="*", choices=["W", "V"], help="default: W")
    parser.add_argument(
        "--online", action="store_true", help="also measure optimizer steps, with 4,096 tokens or the first of --tokens"
    )
    parser.add_argument("--target-layers", type=int, default=32)
    parser.add_argument(
        "--profile", action="store_true", help="print the kernels with the largest GPU time, except for eager"
    )
    options = parser.parse_args()
    check_record_path(options.out, "--out")
    cpu = options.device == "cpu"
    if not options.tokens and (cpu or options.supervised or options.teachers):
        parser.error("the record's cases need a GPU, and are fixed; choose others with --tokens")
    options.impls = options.impls or (["eager"] if cpu else ["eager", "flex", "triton"])
    if cpu and options.impls != ["eager"]:
        parser.error("flex and triton need a GPU")

    if not cpu:
        torch.set_num_threads(1)  # as in `fledge train`: the host only queues work
    implementations = {
        "eager": Implementation(chunk=options.chunk),
        "flex": Implementation("flex", "triton", "triton", options.slots, options.recompute, options.chunk),
        "triton": Implementation("triton", "triton", "triton", options.slots, options.recompute, options.chunk),
    }
    record_cases = [c for c in recorded(implementations) if c.implementation.attention in options.impls]
    cases = record_cases if not options.tokens else [
        Case(T, share, implementations[impl], teacher)
        for T in options.tokens for share in options.supervised or (1.0, 0.25)
        for teacher in options.teachers or ("W",) for impl in options.impls
    ]  # fmt: skip
    for case in cases:
        try:
            make_row(case.tokens, case.supervised, 1)
        except ValueError as e:
            parser.error(str(e))
    record = {
        "environment": environment(options.device, "bfloat16"),
        "shape": SHAPES[options.shape],
        "depth": options.depth,
        "ceiling_tflops": peak_tflops(options.device),
        "rows": [],
    }
    if not cpu:
        print(f"ceiling {record['ceiling_tflops']:.0f} TFLOP/s")
    for case in cases:
        row = measure(case, options)
        record["rows"].append(row)
        show(row, record["ceiling_tflops"])
        write_record(options.out, record)
    if options.online:
        record["online"] = online(Case((options.tokens or [4096])[0], 1.0, implementations[options.impls[-1]]), options)
        line = "T {T}: {ms:.1f} ms a whole step, {tokens_per_s:,.0f} tokens/s; {one_stream_ms:.1f} ms on one stream"
        print(line.format(**record["online"]), flush=True)
        write_record(options.out, record)


def recorded(implementations: dict[str, Implementation]) -> list[Case]:
    """The cases of bench/results/train_step.json."""
    fast = implementations["triton"]
    beside = [
        Case(T, share, implementations[i]) for T in (2048, 8192) for share in (1.0, 0.25) for i in implementations
    ]
    less = replace(fast, slots=1024, chunk=300), replace(fast, recompute=True, chunk=SMALL_CHUNK)
    small = [Case(2048, 1.0, implementation) for implementation in less]
    plain = replace(implementations["eager"], slots=256)  # small chunks, so that eager fits in memory with long rows
    more = [
        Case(T, share, w, t) for T, share, t in LONGER for w in (replace(plain, slots=256 if T < LONG else 64), fast)
    ]
    return [*beside, *small, Case(8192, 1.0, plain), *more]


def show(row: dict, ceiling: float | None) -> None:
    line = f"T {row['T']:7} {row['supervised']:5.0%} {row['impl']:7} teacher {row['teacher']}: "
    if "error" in row:
        print(line + row["error"], flush=True)
        return
    line += f"{row['ms']:8.1f} ms"
    if ceiling:
        line += f" {row['gib']:6.2f} GiB {row['tflops']:5.0f} TFLOP/s, {row['tflops'] / ceiling:.0%} of the ceiling"
    print(line, flush=True)


def useful_flops(c: DraftConfig, row: Packed, depth: int) -> float:
    """The FLOPs of forward and backward pass: products and attention of scored slots; K0, V0 and fc of every token."""
    E, d, H, G = c.hidden_size, c.head_dim, c.num_attention_heads, c.num_key_value_heads
    live = row.live(depth)
    n = [t.numel() for t in live]
    T = row.token_T.numel()
    slot = 2 * (2 * E * H * d + H * d * E + 3 * E * c.intermediate_size + E * c.draft_vocab_size)
    keys = 2 * 2 * E * 2 * G * d
    past = sum(float((row.position_T[t] + 1 + k).sum()) for k, t in enumerate(live))
    return 3 * (slot * sum(n) + keys * (T + sum(n[1:])) + 2 * 3 * E * E * T) + 3.5 * 4 * past * H * d


def measure(case: Case, options: argparse.Namespace) -> dict:
    row = {
        "T": case.tokens,
        "supervised": case.supervised,
        "impl": case.implementation.attention,
        "teacher": case.teacher,
    }
    row["ways"] = asdict(case.implementation)
    try:
        return row | run(case, options)
    except torch.OutOfMemoryError:
        return row | {"ms": None, "gib": None, "tflops": None, "error": "out of memory"}
    finally:
        if options.device != "cpu":
            torch.cuda.empty_cache()


def run(case: Case, options: argparse.Namespace) -> dict:
    device, dtype = options.device, torch.bfloat16
    torch.manual_seed(0)
    config = DraftConfig(**SHAPES[options.shape])
    if case.teacher == "W":  # a target with the draft's vocabulary
        config = replace(config, vocab_size=config.draft_vocab_size)
    draft, features, head = random_draft(config, case.tokens, device, dtype)
    packed = make_row(case.tokens, case.supervised, config.vocab_size)

    objective = Objective(depth=options.depth, keep_out_of_vocab=True)

    def step():
        draft.zero_grad(set_to_none=True)
        return ttt_queued(draft, packed, features, lambda x: x @ head.T, objective, case.implementation)

    def held() -> int:
        return torch.cuda.memory_allocated() if device != "cpu" else 0

    before, found = held(), []
    if device != "cpu":
        torch.cuda.reset_peak_memory_stats()
    if case.implementation.attention == "eager" and case.tokens >= LONG:
        took = seconds(lambda: found.append(step().to_host()), device)
    else:
        found += [step().to_host() for _ in range(2)]
        took = statistics.median(queued_seconds(step, options.repeats, device))
    if options.profile and device != "cpu" and case.implementation.attention != "eager":
        profile(step)
    return {
        "ms": took * 1e3,
        "gib": (torch.cuda.max_memory_allocated() - before) / 2**30 if device != "cpu" else None,
        "tflops": useful_flops(config, packed, options.depth) / took / 1e12,
        "slots": found[0].live_K.tolist(),
        "scored": found[0].scored_K.tolist(),
        "loss": found[0].loss.item(),
    }


class OneRow:
    """Stands in for `Rows`, with one row that is repeated."""

    def __init__(self, row: Packed):
        self.row, self.row_length = row, row.token_T.numel()

    def __getitem__(self, address: tuple[int, int]) -> Packed:
        return self.row

    def tokens(self, address: tuple[int, int]) -> int:
        return self.row.token_T.numel()

    def supervised(self, address: tuple[int, int]) -> int:
        return int((self.row.span_T >= 0).sum())

    def next(self, address: tuple[int, int]) -> tuple[int, int]:
        return address


def online(case: Case, options: argparse.Namespace) -> dict:
    """The tokens per second of the trainer's optimizer step, including the target's forward pass."""
    from transformers import LlamaConfig, LlamaForCausalLM

    from fledge.targets.compatibility import connect_draft
    from fledge.targets.source import LiveFeatures
    from fledge.targets.transformers import TransformersTarget
    from fledge.train.trainer import Progress, Run, Schedule, optimizer_step

    device, dtype = options.device, torch.bfloat16
    torch.manual_seed(0)
    shape = {k: v for k, v in SHAPES[options.shape].items() if k not in ("draft_vocab_size", "target_hidden_size")}
    hf = LlamaConfig(**shape, num_hidden_layers=options.target_layers, max_position_embeddings=1 << 17)
    with torch.device(device):
        model = LlamaForCausalLM._from_config(hf, dtype=dtype)
    target = TransformersTarget(model, None, name="random")
    config = DraftConfig.for_target(
        target.shape, max_length=case.tokens, draft_vocab_size=SHAPES[options.shape]["draft_vocab_size"]
    )
    W = config.draft_vocab_size
    draft = new_draft(config).to(device, dtype)
    draft.set_vocabulary(torch.arange(W) * (config.vocab_size // W))
    layers = connect_draft(draft, target)
    objective = Objective(depth=options.depth, keep_out_of_vocab=True)
    schedule = Schedule(steps=100, lr=1e-4, objective=objective, implementation=case.implementation, optimizer="adamw")
    rows, source = (
        OneRow(make_row(case.tokens, case.supervised, config.vocab_size)),
        LiveFeatures(target, layers),
    )

    run = Run(draft, rows, source, schedule)
    run.prepare()

    def mean(prefetch: bool, repeats: int = max(options.repeats, 10)) -> float:
        upcoming = with_features(itertools.repeat(rows.row), source.features, draft.device, prefetch=prefetch)

        def step() -> None:
            run.progress = Progress()
            optimizer_step(run, upcoming)

        for _ in range(3):
            step()
        if options.profile:
            profile(step)
        synchronize = torch.cuda.synchronize if device != "cpu" else lambda: None
        synchronize()
        began = time.perf_counter()
        for _ in range(repeats):
            step()
        synchronize()
        return (time.perf_counter() - began) / repeats

    took = {prefetch: mean(prefetch) for prefetch in ((False, True) if device != "cpu" else (False,))}
    forward = statistics.median(seconds(lambda: source.features(rows.row), device) for _ in range(5))
    return {
        "T": case.tokens, "supervised": case.supervised, "impl": case.implementation.attention, "teacher": "V",
        "ways": asdict(replace(case.implementation, prefetch=device != "cpu")), "ms": took[device != "cpu"] * 1e3,
        "target_ms": forward * 1e3, "tokens_per_s": case.tokens / took[device != "cpu"],
        "one_stream_ms": took[False] * 1e3,
    }  # fmt: skip


if __name__ == "__main__":
    main()
