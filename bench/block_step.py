"""Times a training step of a DFlash draft, forward and backward, for each implementation, beside its matrix products.

    python bench/block_step.py --out bench/results/block_step.json
    python bench/block_step.py --shape tiny --device cpu     # a dry run anywhere

The default shape is that of a draft for Qwen3-8B: hidden size 4096, five layers, five hidden states of the target, MLP
12288, 32 query and 8 key-value heads, blocks of 16 rows (K = 15), V 151,936, bf16. A row is one supervised document of
T tokens, with N anchors; at most `--slots` of them are in flight. Features are random inputs, and embedding and head
are frozen. Time is the median of `--repeats` steps without synchronization in between. Memory is the peak, including
gradients, minus weights and inputs.

`products_ms` is the time of the step's matrix products alone, as torch's products of random matrices of these shapes:
all linear layers forward and backward, the logits of draft and teacher, and the gradient of the head's input. `ratio`
is the step's time divided by it. `attention_ms` is the time of attention alone, forward and backward, in all layers; it
is not in `products_ms`.
"""

import argparse
import statistics
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from common import make_row, peak_tflops, profile, queued_seconds, random_draft
from torch import Tensor

from fledge.config import DraftConfig
from fledge.io.machine import environment
from fledge.measure.record import check_record_path, write_record
from fledge.methods import block_gamma
from fledge.ops.attention_block import block_attention
from fledge.ops.loss import SLOTS_PER_GROUP
from fledge.train.objective import ttt_queued
from fledge.train.plan import DrawAnchors, chunk_slots, teacher_rows
from fledge.train.row_pass import Implementation, Objective
from fledge.train.setup.run import SMALL_CHUNK
from fledge.types import Packed

SHAPES = {
    "qwen3-8b": dict(
        hidden_size=4096, intermediate_size=12_288, num_attention_heads=32, num_key_value_heads=8, head_dim=128,
        vocab_size=151_936, draft_vocab_size=151_936, target_hidden_size=4096, num_hidden_layers=5,
        num_aux_hidden_states=5, aux_layers=(2, 10, 18, 26, 34), mask_token_id=151_669,
    ),
    "tiny": dict(
        hidden_size=64, intermediate_size=128, num_attention_heads=4, num_key_value_heads=2, head_dim=16,
        vocab_size=512, draft_vocab_size=512, target_hidden_size=64, num_hidden_layers=2, num_aux_hidden_states=2,
        aux_layers=(2, 4), mask_token_id=511,
    ),
}  # fmt: skip
CASES = {"qwen3-8b": ("3072:512", "32768:2048"), "tiny": ("256:32",)}  # tokens:anchors


@dataclass(frozen=True)
class Case:
    """A row of `tokens` tokens, and the trained slots of its chunks at each step."""

    row: Packed
    objective: Objective
    chunks: list[list[Tensor]]

    @property
    def tokens(self) -> int:
        return self.row.token_T.numel()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("bench/results/block_step.json"))
    parser.add_argument("--shape", choices=SHAPES, default="qwen3-8b")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--depth", type=int, default=15, help="the tokens that a block drafts")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--cases", nargs="*", metavar="TOKENS:ANCHORS", help="default: those of the shape")
    parser.add_argument("--impls", nargs="*", choices=["triton", "flex", "eager"], help="default: all the device has")
    parser.add_argument("--slots", type=int, default=512, help="anchors in flight")
    parser.add_argument("--recompute", action="store_true", help="recompute the MLP's activations in the backward pass")
    parser.add_argument(
        "--profile", action="store_true", help="print the kernels with the largest GPU time, except for eager"
    )
    options = parser.parse_args()
    check_record_path(options.out, "--out")
    cpu = options.device == "cpu"
    options.impls = options.impls or (["eager"] if cpu else ["triton", "flex", "eager"])
    if cpu and options.impls != ["eager"]:
        parser.error("flex and triton need a GPU")
    if not cpu:
        torch.set_num_threads(1)  # as in `fledge train`: the host only queues work
    torch.manual_seed(0)
    config = DraftConfig(method="dflash", **SHAPES[options.shape])
    record = {
        "environment": environment(options.device, "bfloat16"),
        "shape": SHAPES[options.shape],
        "depth": options.depth,
        "ceiling_tflops": peak_tflops(options.device),
        "rows": [],
    }
    for name in options.cases or CASES[options.shape]:
        tokens, anchors = map(int, name.split(":"))
        case = make_case(tokens, anchors, config, options)
        alone = measure_products(case, config, options)
        print("T {T}, {anchors} anchors: {products_ms:.1f} ms for {tflop:.1f} TFLOP of products".format(**alone))
        for impl in options.impls:
            row = alone | {"impl": impl} | measure(case, config, impl, alone["products_ms"], options)
            record["rows"].append(row)
            show(row)
            write_record(options.out, record)


def make_case(tokens: int, anchors: int, config: DraftConfig, options: argparse.Namespace) -> Case:
    row = make_row(tokens, 1.0, config.vocab_size)
    objective = Objective(depth=options.depth, gamma=block_gamma(options.depth), drop=DrawAnchors(anchors))
    trained = objective.drop.keep(row, row.live(options.depth))
    return Case(row, objective, chunk_slots(trained, options.slots, torch.zeros(1, dtype=torch.int64)))


def show(row: dict) -> None:
    if "error" in row:
        print(f"  {row['impl']:7} {row['error']}", flush=True)
        return
    memory = "" if row["gib"] is None else f"{row['gib']:6.2f} GiB, "
    print(
        f"  {row['impl']:7} {row['ms']:8.1f} ms, {memory}{row['ratio']:.2f} x the products, of which attention "
        f"{row['attention_ms']:.1f} ms",
        flush=True,
    )


# (rows, inputs, outputs of a weight; the products that are computed: f forward, d and w gradients of input and weight)
Product = tuple[int, int, int, str]


def products_of(case: Case, c: DraftConfig) -> list[Product]:
    """The matrix products of a step."""
    E, inner, T = c.hidden_size, c.intermediate_size, case.tokens
    heads, kv = c.num_attention_heads * c.head_dim, c.num_key_value_heads * c.head_dim
    found: list[Product] = [(T, c.num_aux_hidden_states * c.target_hidden_size, E, "fw")]
    found += [(T, E, kv, "fdw")] * 2 * c.num_hidden_layers
    for slots in case.chunks:
        rows, scored = slots[0].numel() * (len(slots) + 1), sum(t.numel() for t in slots)
        layer = [(E, heads), (E, kv), (E, kv), (heads, E), (E, inner), (E, inner), (inner, E)]
        found += [(rows, *shape, "fdw") for shape in layer] * c.num_hidden_layers
        taught = teacher_rows(slots, T)[0].numel()
        for rows, kinds in ((scored, "fd"), (taught, "f")):
            found += [(min(SLOTS_PER_GROUP, rows - n), E, c.vocab_size, kinds) for n in range(0, rows, SLOTS_PER_GROUP)]
    return found


def measure_products(case: Case, config: DraftConfig, options: argparse.Namespace) -> dict:
    """The time of the step's matrix products."""
    products = products_of(case, config)
    matrices: dict[tuple[int, int], Tensor] = {}

    def matrix(*shape: int) -> Tensor:
        if shape not in matrices:
            matrices[shape] = torch.randn(shape, device=options.device, dtype=torch.bfloat16)
        return matrices[shape]

    def multiply() -> None:
        for rows, inputs, outputs, kinds in products:
            x, weight, dy = matrix(rows, inputs), matrix(outputs, inputs), matrix(rows, outputs)
            for kind in kinds:
                _ = x @ weight.T if kind == "f" else dy @ weight if kind == "d" else dy.T @ x

    multiply()
    took = statistics.median(queued_seconds(multiply, options.repeats, options.device))
    flop = sum(2 * rows * inputs * outputs * len(kinds) for rows, inputs, outputs, kinds in products)
    return {
        "T": case.tokens, "anchors": sum(slots[0].numel() for slots in case.chunks), "products_ms": took * 1e3,
        "tflop": flop / 1e12,
    }  # fmt: skip


def measure(case: Case, config: DraftConfig, impl: str, products_ms: float, options: argparse.Namespace) -> dict:
    """The time and memory of a step, and the time of attention alone, by an implementation."""
    fast = "eager" if impl == "eager" else "triton"
    chunk = SMALL_CHUNK if options.recompute else None
    ways = Implementation(impl, fast, fast, options.slots, options.recompute and fast == "triton", chunk)
    row = {"ways": asdict(ways)}
    try:
        row |= run(case, config, ways, options)
        row["ratio"] = row["ms"] / products_ms
        return row | {"attention_ms": attention_ms(case, config, impl, options)}
    except torch.OutOfMemoryError:
        return row | {"ms": None, "gib": None, "error": "out of memory"}
    finally:
        if options.device != "cpu":
            torch.cuda.empty_cache()


def run(case: Case, config: DraftConfig, ways: Implementation, options: argparse.Namespace) -> dict:
    device, on_gpu = options.device, options.device != "cpu"
    draft, features, head = random_draft(config, case.tokens, device, torch.bfloat16)

    def step():
        draft.zero_grad(set_to_none=True)
        return ttt_queued(draft, case.row, features, lambda x: x @ head.T, case.objective, ways)

    before = torch.cuda.memory_allocated() if on_gpu else 0
    if on_gpu:
        torch.cuda.reset_peak_memory_stats()
    found = [step().to_host() for _ in range(2)]
    took = statistics.median(queued_seconds(step, options.repeats, device))
    if options.profile and on_gpu and ways.attention != "eager":
        profile(step)
    return {
        "ms": took * 1e3,
        "gib": (torch.cuda.max_memory_allocated() - before) / 2**30 if on_gpu else None,
        "slots": found[0].live_K.tolist(),
        "scored": found[0].scored_K.tolist(),
        "loss": found[0].loss.item(),
    }


def attention_ms(case: Case, c: DraftConfig, impl: str, options: argparse.Namespace) -> float:
    """The milliseconds of attention in all layers, forward and backward."""
    generator = torch.Generator(options.device).manual_seed(0)
    Q, H, G, d = options.depth + 1, c.num_attention_heads, c.num_key_value_heads, c.head_dim

    def random(*shape: int) -> Tensor:
        x = torch.randn(shape, generator=generator, device=options.device, dtype=torch.bfloat16)
        return x.requires_grad_()

    parts = []
    for slots in case.chunks:
        n, end_N = slots[0].numel(), slots[0] + 1
        context = random(int(end_N[-1]), G, d), random(int(end_N[-1]), G, d)
        parts.append((random(n, Q, H, d), random(n, Q, G, d), random(n, Q, G, d), *context, 0 * end_N, end_N))

    def attend() -> None:
        for *leaves, start_N, end_N in parts:
            out = block_attention(*leaves, start_N, end_N, causal=False, impl=impl)
            torch.autograd.grad(out, leaves, torch.ones_like(out))

    attend()
    return c.num_hidden_layers * 1e3 * statistics.median(queued_seconds(attend, options.repeats, options.device))


if __name__ == "__main__":
    main()
