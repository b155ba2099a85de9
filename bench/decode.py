"""Times rounds of decoding with random weights: one token, chains, trees and one-pass drafts.

    python bench/decode.py --out bench/results/decode.json
    python bench/decode.py --shape 30b-a3b --out bench/results/decode_moe.json
    python bench/decode.py --shape qwen3-8b --case token "block of 15" "block tree of 64" --engine fledge \
        --out bench/results/decode_dflash.json
    python bench/decode.py --engine fledge transformers vllm --out bench/results/decode.json
    python bench/decode.py --device cpu --shape 1b --batch 1 --new 50 --case token "chain of 7" \
        --out bench/results/decode_cpu.json

Random weights accept nothing, so each round commits one token and the figures are times of rounds, not of text. `ms` is
the time of a round on the device, its drafting `draft_ms` and its verification `verify_ms`. `wall_ms` is the wall time
of `--new` tokens after the prompt, prefill and host included, over the number of `rounds`: the run of median length out
of REPEATS, after one that is not timed. `floor_ms` is the time to read all weights and caches of a round at the read
rate measured in the same run (`read_gbps`); `gemm_ms` that of the round's matrix products alone, with torch in one CUDA
graph on each device; `overhead_ms` is `ms` - `gemm_ms`. Of a block draft (DFlash), the products are those of the
context (`fc`, and the keys and values of all layers), for as many tokens as a round can commit, and of the block.
Before the rounds, `captured` kinds of them were captured as CUDA graphs in `capture_s`, which took `capture_gib` with
the caches.

The target of a shape with experts (`common.MIXTURES`) is a Qwen3-MoE. Its floor counts, of each layer, the experts that
the rows of a verification are expected to choose if each row chooses its C of X experts uniformly and independently of
the others, X (1 - (1 - C / X)^rows); `gemm_ms` is the time of torch's grouped products for such rows. Rows of a text
are more alike than those of random weights, and may choose fewer.

Other engines have `wall_ms` only: transformers' `generate` for one token, and vLLM, if it is installed, for one token,
chains and one-pass drafts (`bench/vllm_rounds.py`, in a process of its own after fledge's memory is freed). A row of
vLLM that failed has an `error` in place of times. `bench/prompt_sets.py` compares a trained pair with its target alone.

With `--sampling`, fledge's rows are measured for each named way to choose tokens, which is in `sampling`.

With `--joining`, a request with a prompt of that many tokens joins the running ones. `first_token_ms` is the time to
its first token, `wait_ms` the longest time between two rounds until the round after that, and `alone_ms` the longest
time between two of 50 rounds before.

With `--draft-device`, the draft is on another GPU: rows have `devices` 2, and `draft_ms` includes the copies between
them.
"""

import argparse
import copy
import gc
import importlib.util
import itertools
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import vllm_rounds
from common import MIXTURES, SHAPES, profile, randomize, randomize_weight, seconds
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn import functional as F
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedTokenizerFast, Qwen3Config, Qwen3MoeConfig

from fledge.config import DraftConfig, Provenance
from fledge.decode.engine import Engine
from fledge.decode.load import load
from fledge.decode.request import Request
from fledge.drafts.block import BlockDraft
from fledge.drafts.draft import Draft
from fledge.drafts.draft_decoder import block_decoder
from fledge.drafts.registry import new_draft
from fledge.drafts.weights import save_draft
from fledge.io.machine import environment
from fledge.measure.record import check_record_path, write_record
from fledge.methods import DFLASH, spread_taps
from fledge.targets.compatibility import connect_draft
from fledge.targets.distributed import ShardedTarget, fill_with, shard_layers
from fledge.targets.loading import target_of
from fledge.targets.transformers import TransformersTarget
from fledge.types import Sampling

REPEATS = 3
ENGINES = ("fledge", "transformers", "vllm")
LAYERS = {"1b": 16, "8b": 32, "qwen3-8b": 36, "70b": 80, "30b-a3b": 48, "tiny": 8, "tiny-moe": 8}
BLOCK = dict(method=DFLASH.name, mask_token_id=5, num_hidden_layers=5, provenance=Provenance(depth=15))
CASES: dict[str, tuple[dict[str, Any] | None, dict[str, Any]]] = {  # name -> (draft, drafting); None: without a draft
    "token": (None, {}),
    "chain of 7": ({}, dict(depth=7)),
    "tree of 60": ({}, dict(mode="tree", nodes=60, width=10, depth=8)),
    "one pass of 7": (dict(method="peagle", mask_token_id=5, num_hidden_layers=4), dict(depth=7)),
    "block of 15": (BLOCK, dict(depth=15)),
    "block tree of 64": (BLOCK, dict(mode="tree", nodes=64, depth=15)),
}

SAMPLING = {
    "greedy": Sampling(),
    "temperature": Sampling(temperature=1.0),
    "top-k and top-p": Sampling(temperature=1.0, top_k=50, top_p=0.9),
    "top-p": Sampling(temperature=1.0, top_p=0.9),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("bench/results/decode.json"))
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--draft-device", default=None, help="the draft's device (default: the target's)")
    parser.add_argument("--shape", default="8b", choices=SHAPES)
    parser.add_argument("--context", type=int, nargs="+", default=[512])
    parser.add_argument("--new", type=int, default=200, help="tokens after each prompt")
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--case", nargs="+", default=list(CASES), choices=CASES)
    parser.add_argument("--sampling", nargs="+", default=["greedy"], choices=SAMPLING)
    parser.add_argument("--engine", nargs="+", default=["fledge", "transformers"], choices=ENGINES)
    parser.add_argument("--joining", type=int, default=0, help="tokens of a prompt that joins the running requests")
    parser.add_argument("--profile", action="store_true", help="print the kernels of a few rounds of each row")
    options = parser.parse_args()
    if "vllm" in options.engine and importlib.util.find_spec("vllm") is None:
        parser.error("--engine vllm needs vLLM, which is not installed here: pip install vllm, or set PYTHONPATH to it")
    check_record_path(options.out, "--out")
    torch.manual_seed(0)
    target = random_target(options.shape, options.device)
    gbps = read_gbps(options.device)
    record = {
        "environment": environment(options.device, str(target.dtype).removeprefix("torch.")),
        "read_gbps": gbps,
        "rows": [],
    }

    def add(row: dict[str, Any]) -> None:
        record["rows"].append(row)
        print({k: round(v, 3) if isinstance(v, float) else v for k, v in row.items()}, flush=True)
        write_record(options.out, record)

    sizes = list(itertools.product(options.context, options.batch))
    with tempfile.TemporaryDirectory(prefix="fledge-decode-") as scratch:
        files = {case: Path(scratch, case.replace(" ", "-")) for case in options.case}
        for case in options.case:
            overrides, drafting = CASES[case]
            device = options.draft_device or options.device
            draft = None if overrides is None else random_draft(target, options.shape, overrides, device)
            if "fledge" in options.engine:
                engine = load(target, draft, **drafting)
                devices = 1 if draft is None or draft.device == target.device else 2
                for (context, batch), name in itertools.product(sizes, options.sampling):
                    row = {"what": case, "engine": "fledge", "batch": batch, "context": context, "devices": devices}
                    row |= {"sampling": name}
                    row |= measure(engine, SAMPLING[name], batch, context, options.new, gbps, options.profile)
                    if options.joining:
                        row |= measure_joining(engine, SAMPLING[name], batch, context, options.joining)
                    add(row)
                del engine
            if "transformers" in options.engine and draft is None:
                for context, batch in sizes:
                    row = {"what": case, "engine": "transformers", "batch": batch, "context": context, "devices": 1}
                    add(row | measure_generate(target, batch, context, options.new))
            if "vllm" in options.engine and draft is not None:
                save_draft(draft, files[case])
            del draft
            gc.collect()
        if "vllm" in options.engine:
            write_config(target, Path(scratch, "target"))
            del target  # vLLM needs the memory
            gc.collect()
            torch.cuda.empty_cache()
            for case in options.case:
                overrides, drafting = CASES[case]
                if drafting.get("mode") == "tree":  # vLLM has no trees
                    continue
                rows = vllm_rounds.run(
                    Path(scratch, "target"), None if overrides is None else files[case],
                    depth=drafting.get("depth"), method=(overrides or {}).get("method", "eagle3"),
                    contexts=options.context, batches=options.batch, new=options.new,
                )  # fmt: skip
                for row in rows:
                    add({"what": case, "engine": row["engine"], "batch": row["batch"], "devices": 1} | row)


def random_target(shape: str, device: str, mesh: DeviceMesh | None = None) -> TransformersTarget:
    """A Llama of a shape with random weights in bfloat16; a Qwen3 if the shape's name says so, and a Qwen3-MoE if the
    shape has experts. On a CPU, the weights
    are the same numbers in float32. With a mesh, its layers are sharded over the ranks, and no rank ever holds all of
    them."""
    sizes = {k: v for k, v in SHAPES[shape].items() if not k.startswith(("draft_", "target_"))}
    experts = MIXTURES.get(shape)
    dense = Qwen3Config if shape.startswith("qwen3") else LlamaConfig
    kind = dense if experts is None else Qwen3MoeConfig
    config = kind(
        **sizes, num_hidden_layers=LAYERS[shape], max_position_embeddings=131_072, rope_theta=500_000.0,
        eos_token_id=None, bos_token_id=None, tie_word_embeddings=False,
        **(dict(norm_topk_prob=True, **experts) if experts else {}),
    )  # fmt: skip
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    rotary = type(model.model.rotary_emb)(config)
    if mesh is not None:
        shard_layers(model, mesh, fill_with(torch.device(device), randomize_weight))
        model.model.rotary_emb = rotary.to(device)
        return ShardedTarget(model, one_word_tokenizer())
    model = model.to_empty(device=device)
    model.model.rotary_emb = rotary.to(device)
    randomize(model)
    return target_of(model.float() if device == "cpu" else model, one_word_tokenizer())


def weight_bytes(model: nn.Module) -> int:
    """The bytes of weights that a forward pass reads: all parameters except an embedding that is not also the head."""
    tables = {m.weight.data_ptr() for m in model.modules() if isinstance(m, nn.Embedding)}
    heads = {m.weight.data_ptr() for m in model.modules() if isinstance(m, nn.Linear)}
    return sum(p.numel() * p.element_size() for p in model.parameters() if p.data_ptr() not in tables - heads)


def one_word_tokenizer() -> PreTrainedTokenizerFast:
    """A tokenizer with one word, as prompts are ids and the text does not matter."""
    return PreTrainedTokenizerFast(tokenizer_object=Tokenizer(WordLevel({"word": 0}, unk_token="word")))


def random_draft(target: TransformersTarget, shape: str, overrides: dict[str, Any], device: str) -> Draft:
    """A draft with random weights for a target, on a device."""
    given: dict[str, Any] = dict(draft_vocab_size=SHAPES[shape]["draft_vocab_size"])
    if overrides.get("method") == DFLASH.name:  # over the target's whole vocabulary
        taps = spread_taps(LAYERS[shape], overrides["num_hidden_layers"])
        given = dict(aux_layers=taps, num_aux_hidden_states=len(taps))
    config = DraftConfig.for_target(target.shape, max_length=target.max_length, **given, **overrides)
    with torch.device(device):
        draft = new_draft(config).to(device, torch.bfloat16)
    randomize(draft)
    draft = draft.to(target.dtype)
    draft.set_vocabulary(torch.arange(config.draft_vocab_size) * (config.vocab_size // config.draft_vocab_size))
    connect_draft(draft, target)
    return draft


def read_gbps(device: str) -> float:
    """The GB/s at which a reduction reads a large tensor."""
    x = torch.ones((1 << 30 if device != "cpu" else 1 << 26) * 2, device=device, dtype=torch.float32)
    x.sum()
    best = min(seconds(lambda: x.sum(), device) for _ in range(10))
    return x.numel() * 4 / best / 1e9


def measure(
    engine: Engine, sampling: Sampling, batch: int, context: int, new: int, gbps: float, profiled: bool
) -> dict[str, Any]:
    """The times of decoding `batch` prompts of `context` tokens."""
    prompts = random_prompts(batch, context).tolist()

    def decode(tokens: int) -> list[Any]:
        return engine.generate_all(prompts, batch=batch, max_new_tokens=tokens, sampling=sampling)

    prepared = engine.prepare(batch, tokens=context + new, sampling=sampling)
    wall, done = median_run(lambda: decode(new))
    rounds = done[0].trace.rounds
    if rounds:
        draft_ms, verify_ms = (
            1e3 * sum(times) / len(rounds) for times in zip(*((r.t_draft, r.t_verify) for r in rounds), strict=True)
        )
    else:  # without a draft no rounds are recorded
        draft_ms, verify_ms = 0.0, 1e3 * (wall - max(d.trace.t_prefill for d in done)) / (new - 1)
    count = len(rounds) or new - 1
    if profiled:
        profile(lambda: decode(12))
    ms = draft_ms + verify_ms
    floor, gemm = floor_ms(engine, batch, context + new // 2, gbps), gemm_ms(engine, batch)
    return dict(
        rounds=count, ms=ms, wall_ms=1e3 * wall / count, floor_ms=floor, gemm_ms=gemm, draft_ms=draft_ms,
        verify_ms=verify_ms, overhead_ms=None if gemm is None else ms - gemm,
        tokens_per_s=sum(len(d.tokens) for d in done) / wall, prefill_ms=1e3 * done[0].trace.t_prefill,
        captured=prepared.rounds, capture_s=prepared.seconds, capture_gib=prepared.bytes / 2**30,
    )  # fmt: skip


def measure_joining(engine: Engine, sampling: Sampling, batch: int, context: int, joining: int) -> dict[str, Any]:
    """The waits of `batch` running requests while a prompt of `joining` tokens is read, in the second of two tries."""
    engine.prepare(batch + 1, tokens=joining, sampling=sampling)
    long = random_prompts(1, joining)[0].tolist()
    for _ in range(2):  # the speed of reading is known from the first
        running = [
            engine.add(prompt, max_new_tokens=joining - context - 64, sampling=sampling)
            for prompt in random_prompts(batch, context).tolist()
        ]
        while not all(request.done.tokens for request in running):
            engine.step()

        def waits(until: Callable[[int], bool], running: Sequence[Request] = running) -> list[float]:
            found, last = [], time.perf_counter()
            while not found or not until(len(found)):
                while not any(request in running for request in engine.step()):
                    assert not all(request.over for request in running), "all running requests have ended"
                found.append(time.perf_counter() - last)
                last = time.perf_counter()
            return found

        unhindered = waits(lambda rounds: rounds == 50)
        start = time.perf_counter()
        joined = engine.add(long, max_new_tokens=1, sampling=sampling)
        reading = waits(lambda _, joined=joined: bool(joined.done.tokens))
        first = time.perf_counter() - start
        for request in running:
            engine.abort(request)
        engine.step()
    waited, alone = max(reading), max(unhindered)
    return dict(joining=joining, wait_ms=1e3 * waited, alone_ms=1e3 * alone, first_token_ms=1e3 * first)


def measure_generate(target: TransformersTarget, batch: int, context: int, new: int) -> dict[str, Any]:
    """The times of decoding `batch` prompts of `context` tokens with transformers' greedy `generate`."""
    prompts = random_prompts(batch, context).to(target.device)
    target.model.set_attn_implementation("sdpa")  # transformers' own, which a target replaces

    def decode() -> list[Any]:
        options = dict(max_new_tokens=new, do_sample=False, eos_token_id=None, pad_token_id=0)
        return target.model.generate(prompts, attention_mask=torch.ones_like(prompts), **options).tolist()

    wall, made = median_run(decode)
    assert all(len(tokens) == context + new for tokens in made)
    return dict(rounds=new - 1, wall_ms=1e3 * wall / (new - 1), tokens_per_s=batch * new / wall)


def median_run(run: Callable[[], Any]) -> tuple[float, Any]:
    """The seconds and the result of the run of median length out of REPEATS, after one that is not timed."""
    run()
    timed = []
    for _ in range(REPEATS):
        start = time.perf_counter()
        made = run()
        timed.append((time.perf_counter() - start, made))
    return sorted(timed, key=lambda pair: pair[0])[REPEATS // 2]


def random_prompts(batch: int, context: int) -> torch.Tensor:
    """Token ids, [batch, context]."""
    return torch.randint(5, 500, (batch, context))


def write_config(target: TransformersTarget, directory: Path) -> None:
    """Writes the model's config.json, without weights."""
    config = copy.deepcopy(target.model.config)
    config.architectures = [type(target.model).__name__]
    config.save_pretrained(directory)


def verified_rows(engine: Engine, batch: int) -> int:
    """The rows of a verification."""
    return batch if engine.draft is None else batch * engine.drafting.verified


def draft_passes(engine: Engine, batch: int) -> list[list[tuple[torch.Tensor, int]]]:
    """The weights of the matrix products of each pass of the draft, and the products' rows."""
    draft, drafting = engine.draft, engine.drafting
    if draft is None:
        return []
    depth, head = drafting.depth, draft.head
    if isinstance(draft, BlockDraft):
        decoder, rows = block_decoder(draft), batch * draft.block_rows(depth)
        products = [(draft.fc.weight, batch * (depth + 1)), *((w.qkv, batch * (depth + 1)) for w in decoder.contexts)]
        products += [(matrix, rows) for w in decoder.layers for matrix in w.matrices()]
        return [[*products, (head, batch * depth)]]
    layers = [p.weight for block in draft.blocks for p in block.modules() if isinstance(p, nn.Linear)]
    if draft.family.one_pass:
        first, later = (2 * depth * batch, depth * batch), []
    else:
        width = drafting.width if drafting.tree else 1
        first, later = ((depth + 1) * batch, batch), [(width * batch, width * batch)] * (depth - 1)
    passes = [[*((w, rows) for w in layers), (head, asked)] for rows, asked in (first, *later)]
    return [[(draft.fc.weight, first[0]), *passes[0]], *passes[1:]]


def floor_ms(engine: Engine, batch: int, length: int, gbps: float) -> float:
    """The milliseconds to read the weights of all passes of a round, in 16 bits each, and caches of `length` tokens,
    once for each pass. Of experts, those count that are expected to be read."""
    native = engine.target.native
    shape = native.layers[0].shape
    size = engine.target.dtype.itemsize
    cache = 2 * shape.kv_heads * shape.head_dim * batch * length * size
    total = weight_bytes(engine.target.model) * 2 / size + len(native.layers) * cache
    rows = verified_rows(engine, batch)
    for layer in native.layers:
        if (e := layer.experts) is not None:
            unread = (1 - e.chosen / e.gate_up.shape[0]) ** rows  # the share of experts that no row chooses
            total -= unread * 2 * (e.gate_up.numel() + e.down.numel())
    for products in draft_passes(engine, batch):
        config = engine.draft.config
        kv = config.num_hidden_layers * 2 * config.num_key_value_heads * config.head_dim
        total += 2 * sum(w.numel() for w, _ in products) + size * kv * batch * length
    return total / gbps / 1e6


def gemm_ms(engine: Engine, batch: int) -> float | None:
    """The milliseconds of a round's matrix products in one CUDA graph on each device; None on a CPU."""
    if engine.target.device.type != "cuda":
        return None
    rows = verified_rows(engine, batch)
    native = engine.target.native
    products = []
    for layer in native.layers:
        products += [(w, rows) for w in (layer.qkv, layer.out)]
        if (e := layer.experts) is None:
            products += [(w, rows) for w in (layer.gate_up, layer.down)]
        else:
            products += [(e.router, rows), (e.gate_up, rows * e.chosen), (e.down, rows * e.chosen)]
    products.append((engine.target.head_weight, rows))
    products += [product for of_pass in draft_passes(engine, batch) for product in of_pass]
    ms = 0.0
    for device in {w.device for w, _ in products}:
        with torch.cuda.device(device):
            ms += products_ms([(w, m) for w, m in products if w.device == device])
    return ms


def products_ms(products: list[tuple[torch.Tensor, int]]) -> float:
    """The milliseconds of the products of weights with numbers of rows, in one CUDA graph on the current device. Of
    several weights [X, O, I], each row has its own, drawn uniformly."""
    inputs = {(w.shape[-1], m): torch.randn(m, w.shape[-1], device=w.device, dtype=w.dtype) for w, m in products}
    ends = {}
    for w, m in products:
        if w.dim() == 3 and (len(w), m) not in ends:
            counts = torch.bincount(torch.randint(len(w), (m,)), minlength=len(w))
            ends[len(w), m] = counts.cumsum(0).to(w.device, torch.int32)

    def run() -> None:
        for w, m in products:
            if w.dim() == 3:
                F.grouped_mm(inputs[w.shape[-1], m], w.transpose(1, 2), offs=ends[len(w), m])
            else:
                F.linear(inputs[w.shape[-1], m], w)

    with torch.inference_mode():
        run()
        graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
        with torch.cuda.graph(graph, stream=stream):
            run()
    graph.replay()
    return 1e3 * sorted(seconds(graph.replay, "cuda") for _ in range(20))[10]


if __name__ == "__main__":
    main()
