"""Times the kernels of decoding: attention to a cache and a tree, the small operations of a layer, the likeliest tokens
of logits, sampling from logits, and what drafting and verifying a tree take between the passes.

    python bench/decode_kernels.py --out bench/results/decode_kernels.json
    python bench/decode_kernels.py --sweep attention --lengths 16384 --out bench/results/attention_sweep.json

Each time is of one of 32 calls in a CUDA graph, which read 32 different pools or rows, as the layers of a network do.
`bytes` counts what a call has to move: for attention the keys, values, queries and results. `move_us` is the time in
which this GPU copies as many (read and written) bytes of a large tensor. B is the number of sequences, S that of new
rows of each, and M = B S. The new rows are a chain ("attention") or a random tree ("tree"), whose mask is packed once a
pass ("mask"). "level" and "best" are the growth of dynamic trees that are LIKELIEST wide and LEVELS deep, "ranked" and
"prefixes" that of trees of one pass, of the S - 1 likeliest tokens of LEVELS levels or, for BLOCK_TREES, of BLOCK
levels, "fresh" the rows of the draft's first pass, "place" and "accept" where S nodes of trees go and which are
accepted. On a CPU, the definitions run, without a graph. "expert" is the mixture of a --shape that has one;
its calls read the weights of CALLS / 4 layers.

`--sweep attention` times chains and trees with many tiles (`fledge/ops/attention_tree_triton.py`), which processes
compile to Triton's cache first. It prints the best of each case beside those that the code chooses, and records all.
`error` is the relative distance from the result of the chosen ones; tiles that the compiler refuses have no time.
"""

import argparse
import functools
import itertools
import multiprocessing
import os
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, replace
from pathlib import Path

import torch
from common import MIXTURES, SHAPES, seconds
from torch import Tensor

from fledge.decode.sampling import BatchSampling
from fledge.io.machine import environment
from fledge.measure.record import check_record_path, write_record
from fledge.ops.attention_tree import COUNTERS, Visible, VisibleChain, pack_bits, tree_attention
from fledge.ops.attention_tree_triton import LARGE, WORD, AttentionTiles, tiles_for
from fledge.ops.device import computed_by
from fledge.ops.experts import experts, route
from fledge.ops.layer import add_rms_norm, rope_to_cache, silu_mul_fused
from fledge.ops.products import norm_linear
from fledge.ops.sampling import TOKEN, filter_top, gumbel_argmax, hash_keys
from fledge.ops.topk import likeliest
from fledge.ops.trees import (
    Candidates,
    accept_own,
    add_level,
    best_nodes,
    fresh_rows,
    likeliest_prefixes,
    place_trees,
)
from fledge.types import Sampling, Tree

CALLS = 32
MOST_SHARED = 227 * 1024  # bytes of shared memory of a block on an H200
CHAINS, TREES = ((1, 1), (1, 8), (8, 8)), ((1, 60), (8, 60))  # (B, S)
BLOCK_TREES, BLOCK = ((1, 64), (1, 256), (16, 32)), 15  # (B, S) of trees of block drafts, and their levels
ROWS = 1, 8, 60
LIKELIEST, LEVELS, EPS = 10, 8, 1e-5


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("bench/results/decode_kernels.json"))
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--shape", default="8b", choices=SHAPES)
    parser.add_argument("--lengths", type=int, nargs="+", default=[512, 16384], help="of the prefixes, in slots")
    parser.add_argument("--repeats", type=int, default=20, help="replays of each graph; the shortest counts")
    parser.add_argument("--sweep", choices=("attention",), help="time many tiles; needs a GPU")
    options = parser.parse_args()
    if options.sweep and options.device == "cpu":
        parser.error("a sweep needs a GPU")
    check_record_path(options.out, "--out")
    torch.manual_seed(0)
    torch.set_default_device(options.device)
    torch.set_default_dtype(torch.bfloat16)
    rate = copied_bytes_per_second(options.device)
    record = {"environment": environment(options.device, "bfloat16"), "copy_gb_per_s": rate / 1e9, "rows": []}
    if options.sweep:
        sweep_attention(SHAPES[options.shape], options, rate, record)
        return
    cases = [(attention_calls, B, S, n) for n in options.lengths for B, S in CHAINS]
    cases += [(tree_calls, B, S, n) for n in options.lengths for B, S in TREES]
    cases += [(mask_calls, B, S, None) for B, S in TREES]
    rows = norm_calls, rope_calls, activation_calls, likeliest_calls, draw_calls, filter_calls, peaked_calls, sort_calls
    cases += [(make, 1, M, None) for make in rows for M in ROWS]
    of_trees = level_calls, best_calls, ranked_calls, prefixes_calls, place_calls, accept_calls
    cases += [(make, B, S, None) for make in of_trees for B, S in TREES]
    cases += [(make, B, S, None) for make in (ranked_calls, prefixes_calls) for B, S in BLOCK_TREES]
    cases += [(fresh_calls, B, LEVELS, None) for B in (1, 8)]
    cases += [(expert_calls, 1, M, None) for M in ROWS if options.shape in MIXTURES]
    shape = SHAPES[options.shape] | MIXTURES.get(options.shape, {})
    for make, B, S, length in cases:
        calls, moved = make(shape, B, S, length)
        us = 1e6 * seconds_per_call(calls, options.device, options.repeats)
        row = {"kernel": make.__name__.removesuffix("_calls"), "B": B, "S": S, "length": length}
        row |= {"us": us, "bytes": moved, "move_us": 1e6 * moved / rate}
        record["rows"].append(row)
        print(
            "{kernel:10} B {B} S {S:2} length {length!s:5} {us:8.2f} us, move {move_us:8.2f} us".format(**row),
            flush=True,
        )
        write_record(options.out, record)
        del calls  # before the next pools are made


def attention_calls(shape: dict, B: int, S: int, length: int) -> tuple[list[Callable[[], Tensor]], int]:
    """Attention of B sequences with `length` slots and S new rows, a causal chain."""
    return attention(shape, VisibleChain(torch.arange(S).expand(B, S), S), length)


def tree_calls(shape: dict, B: int, S: int, length: int) -> tuple[list[Callable[[], Tensor]], int]:
    """The same for a random tree of S nodes."""
    return attention(shape, Visible(random_trees(B, S).ancestors()), length)


def attention(shape: dict, visible: Visible | VisibleChain, length: int) -> tuple[list[Callable[[], Tensor]], int]:
    given, moved = attention_inputs(shape, visible, length, CALLS)
    counters = torch.zeros(COUNTERS, dtype=torch.int32)
    return [lambda a=a: tree_attention(*a, visible, counters=counters) for a in given], moved


def attention_inputs(
    shape: dict, visible: Visible | VisibleChain, length: int, calls: int
) -> tuple[list[tuple[Tensor, ...]], int]:
    """Queries, keys, values, starts and lengths of each call, and the bytes that a call has to move."""
    H, G, d = (shape[name] for name in ("num_attention_heads", "num_key_value_heads", "head_dim"))
    B, S, _ = visible.shape
    room = length + S
    start, lengths = torch.arange(B, dtype=torch.int64) * room, torch.full((B,), length, dtype=torch.int64)
    given = [
        (torch.randn(B, S, H, d), torch.randn(G, B * room, d), torch.randn(G, B * room, d), start, lengths)
        for _ in range(calls)
    ]
    return given, 2 * (2 * B * room * G * d + 2 * B * S * H * d)


def attention_tiles(rows: int, tree: bool) -> list[AttentionTiles]:
    """Tiles for `rows` query rows of a key head that fit into the shared memory of an H200 with heads of 128."""
    few = rows <= 32
    block = min(max(1 << (rows - 1).bit_length(), 16), 128)
    if few:  # (slots, warps)
        shapes = [(block, n, w) for n, w in ((32, 4), (64, 4), (64, 8), (128, 4), (128, 8))]
        depths, programs, sums = (3, 4, 6), (1, 2), (4, 16)
    else:
        shapes = [(64, 32, 4), (64, 64, 4), (64, 64, 8), (128, 32, 8), (128, 64, 8), (128, 128, 8)]
        depths, programs, sums = (2, 3, 4), (1, 2), (2,)
    found = []
    for (m, n, w), stages, per_processor, at_once in itertools.product(shapes, depths, programs, sums):
        shared = 2 * 128 * (2 * n * stages + m)
        if m <= max(block, 64) and shared * per_processor <= MOST_SHARED:
            if tree and n > WORD:
                continue
            apart = (True,) if not few else (False, True) if per_processor == 1 and at_once == 4 else (False,)
            found += [AttentionTiles(m, n, w, stages, per_processor, mask, at_once) for mask in apart]
    return found


def sweep_visible(B: int, S: int, tree: bool) -> Visible | VisibleChain:
    if tree:
        return Visible(random_trees(B, S).ancestors())
    return VisibleChain(torch.arange(S).expand(B, S), S)


def compile_attention(shape: dict, B: int, S: int, tree: bool, tiles: AttentionTiles) -> None:
    """Runs attention once with these tiles, in a process of its own."""
    from fledge.ops.attention_tree_triton import tree_attention_triton

    torch.set_default_device("cuda")
    torch.set_default_dtype(torch.bfloat16)
    visible = sweep_visible(B, S, tree)
    ((q, *more),), _ = attention_inputs(shape, visible, 8192, 1)
    counters = torch.zeros(COUNTERS, dtype=torch.int32)
    tree_attention_triton(q, *more, visible, q.shape[-1] ** -0.5, None, None, counters, tiles)
    torch.cuda.synchronize()


def sweep_attention(shape: dict, options: argparse.Namespace, rate: float, record: dict) -> None:
    """Times chains and trees with all `attention_tiles`."""
    from fledge.ops.attention_tree_triton import tree_attention_triton

    group, d = shape["num_attention_heads"] // shape["num_key_value_heads"], shape["head_dim"]
    cases = [(*c, False) for c in CHAINS] + [(*c, True) for c in TREES]
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(min(os.cpu_count(), 16), mp_context=context) as pool:
        jobs = {
            (S, tree, t): pool.submit(compile_attention, shape, 1, S, tree, t)
            for S, tree in dict.fromkeys((S, tree) for _, S, tree in cases)
            # those with more programs per processor are the same kernels
            for t in dict.fromkeys(replace(t, per_processor=1) for t in attention_tiles(S * group, tree))
        }
        errors = {key: job.exception() for key, job in jobs.items()}
    for (B, S, tree), length in itertools.product(cases, options.lengths):
        visible, counters = sweep_visible(B, S, tree), torch.zeros(COUNTERS, dtype=torch.int32)
        given, moved = attention_inputs(shape, visible, length, CALLS)
        chosen = tiles_for(S * group, d, torch.bfloat16, LARGE, length, B * shape["num_key_value_heads"], not tree)

        def call(a: tuple[Tensor, ...], t: AttentionTiles, visible=visible, counters=counters) -> Tensor:
            return tree_attention_triton(*a, visible, d**-0.5, None, None, counters, t)

        exact, rows = call(given[0], chosen).float(), []
        for t in dict.fromkeys([chosen, *attention_tiles(S * group, tree)]):
            row = {"B": B, "S": S, "tree": tree, "length": length, "tiles": asdict(t), "chosen": t == chosen}
            if (error := errors.get((S, tree, replace(t, per_processor=1)))) is not None:
                record["rows"].append(row | {"us": None, "failed": f"{type(error).__name__}: {str(error)[:200]}"})
                continue
            off = float((call(given[0], t).float() - exact).norm() / exact.norm())
            us = 1e6 * seconds_per_call([lambda a=a, t=t: call(a, t) for a in given], options.device, 5)
            rows.append(row | {"us": us, "move_us": 1e6 * moved / rate, "error": off})
        record["rows"] += rows
        write_record(options.out, record)
        print(f"B {B} S {S} tree {tree} length {length}: move {rows[0]['move_us']:.1f}, chosen {rows[0]['us']:.1f} us")
        for row in sorted(rows, key=lambda r: r["us"])[:4]:
            print(f"    {row['us']:8.2f} us, error {row['error']:.4f}, {row['tiles']}", flush=True)
        del given  # before the next pools are made


def random_trees(B: int, S: int) -> Tree:
    """Trees in which each node's parent is any node before it."""
    parents = [torch.randint(s, (B,)) if s else torch.full((B,), -1) for s in range(S)]
    return Tree(torch.zeros(B, S, dtype=torch.int64), torch.stack(parents, 1), S - 1)


def mask_calls(shape: dict, B: int, S: int, length: None) -> tuple[list[Callable[[], Tensor]], int]:
    """Packing of the masks of trees."""
    calls = [lambda mask=random_trees(B, S).ancestors(): pack_bits(mask) for _ in range(CALLS)]
    return calls, B * S * (S + 8 * (-(-S // 64)))


def norm_calls(shape: dict, B: int, S: int, length: None) -> tuple[list[Callable[[], object]], int]:
    M, E = B * S, shape["hidden_size"]
    calls = []
    for _ in range(CALLS):
        x, residual, weight = torch.randn(M, E), torch.randn(M, E), torch.ones(E)
        calls.append(lambda x=x, residual=residual, weight=weight: add_rms_norm(x, residual, weight, EPS))
    return calls, 2 * (4 * M * E + E)


def rope_calls(shape: dict, B: int, S: int, length: None) -> tuple[list[Callable[[], Tensor]], int]:
    H, G, d = (shape[name] for name in ("num_attention_heads", "num_key_value_heads", "head_dim"))
    M, O = B * S, (H + 2 * G) * d
    cos, sin, slot = torch.rand(M, d), torch.rand(M, d), torch.arange(M, dtype=torch.int64) + 100
    calls = []
    for _ in range(CALLS):
        qkv, keys, values = torch.randn(M, O), torch.zeros(G, 4096, d), torch.zeros(G, 4096, d)
        calls.append(lambda x=qkv, k=keys, v=values: rope_to_cache(x, cos, sin, H, k, v, slot))
    return calls, 2 * (2 * M * O + M * d)  # of cos and sin, half each


def activation_calls(shape: dict, B: int, S: int, length: None) -> tuple[list[Callable[[], Tensor]], int]:
    M, F = B * S, shape["intermediate_size"]
    return [lambda x=torch.randn(M, 2 * F): silu_mul_fused(x) for _ in range(CALLS)], 2 * 3 * M * F


def expert_calls(shape: dict, B: int, S: int, length: None) -> tuple[list[Callable[[], Tensor]], int]:
    """A mixture of experts: router, choice, products and sum. The bytes are those of the experts that rows choose."""
    M, E, X, F = B * S, shape["hidden_size"], shape["num_experts"], shape["moe_intermediate_size"]
    x, gain, chosen, calls = torch.randn(M, E), torch.ones(E), shape["num_experts_per_tok"], []
    for _ in range(CALLS // 4):  # of Qwen3-30B-A3B, a layer has 1.2 GB
        router, gate_up, down = (torch.randn(*size) * 0.02 for size in ((X, E), (X, 2 * F, E), (X, E, F)))

        def call(router: Tensor = router, gate_up: Tensor = gate_up, down: Tensor = down) -> Tensor:
            routing = route(norm_linear(x, gain, EPS, router), chosen, True)
            return experts(x, gain, EPS, routing, gate_up, down, x)

        calls.append(call)
    ends = route(norm_linear(x, gain, EPS, router), chosen, True).end_X.tolist()
    read = sum(end > begin for begin, end in zip([0, *ends], ends, strict=False))
    return calls, read * 2 * 3 * E * F


def likeliest_calls(shape: dict, B: int, S: int, length: None) -> tuple[list[Callable[[], object]], int]:
    """The LIKELIEST likeliest tokens of a draft's vocabulary, as a level of a dynamic tree takes."""
    M, W = B * S, shape["draft_vocab_size"]
    calls = [lambda x=torch.randn(M, W): likeliest(x, LIKELIEST) for _ in range(CALLS)]
    return calls, M * (2 * W + 12 * LIKELIEST)


def draw_calls(shape: dict, B: int, S: int, length: None) -> tuple[list[Callable[[], object]], int]:
    """A draw from each of M rows of the target's logits, in float32, and the keys of its noise."""
    M, V = B * S, shape["vocab_size"]
    seed, position = torch.zeros(M, dtype=torch.int64), torch.arange(M)

    def draw(x: Tensor) -> Tensor:
        return gumbel_argmax(x, hash_keys(seed, seed, position, TOKEN))

    calls = [lambda x=torch.randn(M, V, dtype=torch.float32): draw(x) for _ in range(CALLS)]
    return calls, M * 4 * V


def filter_calls(shape: dict, B: int, S: int, length: None) -> tuple[list[Callable[[], object]], int]:
    """Top-k and top-p of M rows of the target's logits, normal ones, by the kernels on a GPU."""
    return filters(shape, B * S, filter_top, normal)


def peaked_calls(shape: dict, B: int, S: int, length: None) -> tuple[list[Callable[[], object]], int]:
    """The same of logits of which few tokens are likely."""
    return filters(shape, B * S, filter_top, peaked)


def sort_calls(shape: dict, B: int, S: int, length: None) -> tuple[list[Callable[[], object]], int]:
    """The same of normal logits by the definition, which sorts."""
    return filters(shape, B * S, computed_by("definition")(filter_top), normal)


def normal(M: int, V: int) -> Tensor:
    return torch.randn(1, M, V, dtype=torch.float32)


def peaked(M: int, V: int) -> Tensor:
    """Logits with probabilities as 1 / rank^2, in random order: the likeliest has 0.61, the ten likeliest 0.94."""
    return -2 * torch.rand(1, M, V, dtype=torch.float32).argsort(-1).add(1).float().log()


def filters(
    shape: dict, M: int, keep: Callable[..., Tensor], logits: Callable[[int, int], Tensor]
) -> tuple[list[Callable[[], object]], int]:
    V = shape["vocab_size"]
    sampling = BatchSampling.of([Sampling(temperature=0.8, top_k=40, top_p=0.9)], [0], torch.get_default_device())
    scores = [sampling.temper(logits(M, V)) for _ in range(CALLS)]
    calls = [lambda x=x: keep(x, sampling.top_k_B, sampling.top_p_B) for x in scores]
    return calls, M * 8 * V


def candidates(B: int) -> tuple[Candidates, Tensor, Tensor]:
    """The scored nodes of grown trees, and the log-probabilities and ids of the children of a level."""
    found = Candidates.empty(B, LEVELS, LIKELIEST, torch.get_default_device())
    logp = -torch.rand(B, LIKELIEST, LIKELIEST, dtype=torch.float32)
    token = torch.arange(LIKELIEST).expand(B, LIKELIEST, LIKELIEST).contiguous()
    for level in range(LEVELS):
        rows = LIKELIEST if level else 1
        add_level(found, level, logp[:, :rows].contiguous(), token[:, :rows].contiguous(), torch.arange(LIKELIEST))
    return found, logp, token


def level_calls(shape: dict, B: int, S: int, length: None) -> tuple[list[Callable[[], object]], int]:
    """The children of a level are scored, and the next level's nodes chosen."""
    calls, ids = [], torch.arange(LIKELIEST)
    for _ in range(CALLS):
        found, logp, token = candidates(B)
        calls.append(lambda found=found, logp=logp, token=token: add_level(found, 1, logp, token, ids))
    return calls, B * LIKELIEST * (LIKELIEST * (4 + 8 + 4 + 8) + 8 * 6)


def best_calls(shape: dict, B: int, S: int, length: None) -> tuple[list[Callable[[], object]], int]:
    """The best S nodes make the tree."""
    calls, root, ids = [], torch.zeros(B, dtype=torch.int64), torch.arange(LIKELIEST)
    for _ in range(CALLS):
        found, *_ = candidates(B)
        calls.append(lambda found=found: best_nodes(found, S, root, ids))
    return calls, B * (4 * found.score_BP.shape[1] + 8 * found.place_BX.shape[1] + 5 * 8 * S)


def ranked_calls(shape: dict, B: int, S: int, length: None) -> tuple[list[Callable[[], object]], int]:
    """The S - 1 likeliest tokens of each level, as a tree of one pass takes; of a block, over the whole vocabulary."""
    block = (B, S) in BLOCK_TREES
    M, W = B * (BLOCK if block else LEVELS), shape["vocab_size" if block else "draft_vocab_size"]
    calls = [lambda x=torch.randn(M, W): likeliest(x, S - 1) for _ in range(CALLS)]
    return calls, M * (2 * W + 12 * (S - 1))


def prefixes_calls(shape: dict, B: int, S: int, length: None) -> tuple[list[Callable[[], object]], int]:
    """The S - 1 likeliest prefixes of all levels make the tree."""
    levels = BLOCK if (B, S) in BLOCK_TREES else LEVELS
    calls, root, ids = [], torch.zeros(B, dtype=torch.int64), torch.arange(shape["draft_vocab_size"])
    for _ in range(CALLS):
        found = likeliest(4 * torch.randn(B, levels, len(ids)), min(S - 1, len(ids)))
        calls.append(lambda found=found: likeliest_prefixes(*found, S, root, ids))
    return calls, B * (12 * levels * (S - 1) + 8 * 3 * S)


def place_calls(shape: dict, B: int, S: int, length: None) -> tuple[list[Callable[[], object]], int]:
    """The positions, slots and visibility of S nodes."""
    start, lengths = torch.zeros(2, B, dtype=torch.int64)
    trees = [grown_tree(B, S) for _ in range(CALLS)]
    return [lambda tree=tree: place_trees(tree, start, lengths) for tree in trees], B * S * (8 + 8 + 8 + 8)


def accept_calls(shape: dict, B: int, S: int, length: None) -> tuple[list[Callable[[], object]], int]:
    """The accepted ones of S nodes."""
    trees = [grown_tree(B, S) for _ in range(CALLS)]
    return [lambda tree=tree: accept_own(tree, tree.token_BN) for tree in trees], B * S * (8 + 8 + 8)


def grown_tree(B: int, S: int) -> Tree:
    """Trees of S nodes that are LEVELS deep."""
    found, *_ = candidates(B)
    token, parent, _ = best_nodes(found, S, torch.zeros(B, dtype=torch.int64), torch.arange(LIKELIEST))
    return Tree(token, parent, LEVELS)


def fresh_calls(shape: dict, B: int, S: int, length: None) -> tuple[list[Callable[[], object]], int]:
    """The rows of up to S fresh tokens, before a dynamic tree is drafted."""
    token, (start, lengths, count) = torch.zeros(B, S, dtype=torch.int64), torch.ones(3, B, dtype=torch.int64)
    nodes = (LEVELS - 1) * LIKELIEST
    call = functools.partial(fresh_rows, token, count, start, lengths, levels=LEVELS - 1, expanded=nodes)
    return [call] * CALLS, 8 * B * (3 * S + nodes + LEVELS)


def seconds_per_call(calls: list[Callable[[], object]], device: str, repeats: int) -> float:
    """The shortest of several times of all calls, divided by their number; on a GPU, of one CUDA graph."""

    def work() -> None:
        for call in calls:
            call()

    if device == "cpu":
        return min(seconds(work, device) for _ in range(repeats)) / len(calls)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):  # compiles the kernels before the capture
        work()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    for _ in range(3):
        graph.replay()
    return min(seconds(graph.replay, device) for _ in range(repeats)) / len(calls)


def copied_bytes_per_second(device: str) -> float:
    """Bytes read and written per second by a copy of a large tensor."""
    n = 2**31 if device == "cuda" else 2**24
    source, target = torch.zeros(n, dtype=torch.uint8), torch.empty(n, dtype=torch.uint8)
    target.copy_(source)
    return 2 * n / min(seconds(lambda: target.copy_(source), device) for _ in range(10))


if __name__ == "__main__":
    main()
