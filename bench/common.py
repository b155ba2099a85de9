"""Functions shared by the benchmarks: model shapes, training rows, features on disk, timing, peak FLOP/s, profiles."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from fledge.config import DraftConfig
from fledge.data.documents import Document, fingerprint
from fledge.drafts.draft import Draft
from fledge.drafts.registry import new_draft
from fledge.states.cache import FORMAT, FeatureCache, Manifest
from fledge.states.layout import Layout, Sizes, split_shards
from fledge.states.writer import FeatureWriter
from fledge.types import Features, Packed

SPAN = 256
SHARD_BYTES = 128 * 2**20
MOST_TOKENS = 1 << 15  # of a pass of the features' writer
SHAPES = {
    "1b": dict(
        hidden_size=2048, intermediate_size=8192, num_attention_heads=32, num_key_value_heads=8, head_dim=64,
        vocab_size=128_256, draft_vocab_size=32_000, target_hidden_size=2048,
    ),
    "8b": dict(
        hidden_size=4096, intermediate_size=14336, num_attention_heads=32, num_key_value_heads=8, head_dim=128,
        vocab_size=128_256, draft_vocab_size=32_000, target_hidden_size=4096,
    ),
    "qwen3-8b": dict(
        hidden_size=4096, intermediate_size=12288, num_attention_heads=32, num_key_value_heads=8, head_dim=128,
        vocab_size=151_936, draft_vocab_size=32_000, target_hidden_size=4096,
    ),
    "30b-a3b": dict(  # its mixture is in MIXTURES
        hidden_size=2048, intermediate_size=6144, num_attention_heads=32, num_key_value_heads=4, head_dim=128,
        vocab_size=151_936, draft_vocab_size=32_000, target_hidden_size=2048,
    ),
    "70b": dict(
        hidden_size=8192, intermediate_size=28672, num_attention_heads=64, num_key_value_heads=8, head_dim=128,
        vocab_size=128_256, draft_vocab_size=32_000, target_hidden_size=8192,
    ),
    "tiny": dict(
        hidden_size=64, intermediate_size=128, num_attention_heads=4, num_key_value_heads=2, head_dim=16,
        vocab_size=512, draft_vocab_size=128, target_hidden_size=64,
    ),
    "tiny-moe": dict(
        hidden_size=64, intermediate_size=128, num_attention_heads=4, num_key_value_heads=2, head_dim=16,
        vocab_size=512, draft_vocab_size=128, target_hidden_size=64,
    ),
}  # fmt: skip
MIXTURES = {  # the experts of the target's layers, in Qwen3-MoE's names
    "30b-a3b": dict(num_experts=128, num_experts_per_tok=8, moe_intermediate_size=768),
    "tiny-moe": dict(num_experts=8, num_experts_per_tok=2, moe_intermediate_size=32),
}


def make_row(tokens: int, supervised: float, vocab: int) -> Packed:
    """A row of one document with random tokens. A share `supervised` of the tokens is in evenly spaced spans of SPAN
    tokens; with 1, the document is a single span. Raises ValueError if complete spans cannot have that share."""
    span = torch.zeros(tokens, dtype=torch.int32)
    if supervised < 1:
        block = torch.arange(tokens, dtype=torch.int32) // SPAN
        before = (supervised * torch.arange(block[-1] + 2) + 1e-9).floor()  # number of spans before each block
        span = torch.where((before[1:] > before[:-1])[block], block, -1)
    share = (span >= 0).float().mean().item()
    if abs(share - supervised) > 0.01:
        raise ValueError(
            f"complete spans of {SPAN} tokens cover {share:.0%} of {tokens} tokens, not {supervised:.0%}; choose other "
            "--tokens or --supervised"
        )
    token = torch.randint(vocab, (tokens,), dtype=torch.int32)
    return Packed(token, span, torch.arange(tokens, dtype=torch.int32), torch.zeros(tokens, dtype=torch.int32))


def random_draft(
    config: DraftConfig, tokens: int, device: str, dtype: torch.dtype
) -> tuple[Draft, Features, torch.Tensor]:
    """A draft with random weights, random features of `tokens` tokens, and a random target head [V, E]."""
    E, V, W = config.hidden_size, config.vocab_size, config.draft_vocab_size
    with torch.device(device):
        draft = new_draft(config).to(device, dtype)
        randomize(draft)
        table, head = (torch.randn(V, E, dtype=dtype) * 0.02 for _ in range(2))
        draft.share_target_weights(table, head)
        states = torch.randn(tokens, config.num_aux_hidden_states, E, dtype=dtype)
        features = Features(states, torch.randn(tokens, E, dtype=dtype))
    draft.set_vocabulary(torch.arange(W) * (V // W))
    return draft, features, head


def randomize(module: torch.nn.Module) -> None:
    """Draws all matrices of a module from N(0, 0.02²), and sets its vectors to ones."""
    for p in module.parameters():
        randomize_weight(p)


def randomize_weight(weight: torch.Tensor) -> None:
    torch.nn.init.normal_(weight, 0, 0.02) if weight.dim() > 1 else torch.nn.init.ones_(weight)


def write_random_features(
    path: Path, documents: Sequence[Document], layout: Layout, device: str, dtype: torch.dtype
) -> tuple[FeatureCache, float]:
    """Writes features of documents of at most MOST_TOKENS tokens to a new directory, with fledge's own writer. Returns
    them, and the GB/s of writing, of which the rounding and the disk are a part."""
    sizes = Sizes.of(documents, layout)
    manifest = Manifest(
        format=FORMAT, fledge_version="", target="random", target_sha256="", target_layers=max(layout.layers),
        tokenizer_sha256="", template_sha256=None, template_kwargs=None, data=[],
        data_sha256=fingerprint(documents), max_length=max(len(d.tokens) for d in documents),
        documents=len(documents), tokens=sum(sizes.tokens), last_states=sum(sizes.last), layers=list(layout.layers),
        width=layout.width, precision=layout.precision, all_last=layout.all_last,
        dtype=str(dtype).removeprefix("torch."), shards=[list(s) for s in split_shards(sizes, layout, SHARD_BYTES)],
    )  # fmt: skip
    path.mkdir(parents=True)
    cache = FeatureCache(path, manifest, documents)
    cache.create([])
    with torch.device(device):
        states = torch.randn(MOST_TOKENS, len(layout.layers) + 1, layout.width, dtype=dtype)

    def compute(row: Packed) -> Features:
        T = row.token_T.numel()
        return Features(states[:T, 1:], states[:T, 0])

    start = time.perf_counter()
    FeatureWriter(cache, compute, print, lambda tokens: None).write()
    taken = time.perf_counter() - start
    return cache, sum(map(cache.bytes, cache.shards)) / taken / 1e9


def peak_tflops(device: str, n: int = 8192) -> float | None:
    """The TFLOP/s of a product of random bf16 matrices [n, n]; None on a CPU."""
    if device == "cpu":
        return None
    a, b = (torch.randn(n, n, device=device, dtype=torch.bfloat16) for _ in range(2))
    for _ in range(5):
        a @ b
    return 2 * n**3 / min(seconds(lambda: a @ b, device) for _ in range(20)) / 1e12


def seconds(work: Callable[[], object], device: str) -> float:
    """The seconds of one call, measured with CUDA events on a GPU."""
    if device == "cpu":
        start = time.perf_counter()
        work()
        return time.perf_counter() - start
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    work()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / 1e3


def queued_seconds(work: Callable[[], object], repeats: int, device: str) -> list[float]:
    """The seconds of each of several calls, without synchronization between them. The host's work of a call then
    overlaps with the device's work of the previous one, as in training."""
    if device == "cpu":
        return [seconds(work, device) for _ in range(repeats)]
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(repeats + 1)]
    work()
    for mark in marks[:-1]:
        mark.record()
        work()
    marks[-1].record()
    marks[-1].synchronize()
    return [a.elapsed_time(b) / 1e3 for a, b in itertools.pairwise(marks)]


def profile(step: Callable[[], object]) -> None:
    """Prints the kernels with the largest GPU time of a step."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as p:
        step()
        torch.cuda.synchronize()
    kernels = [e for e in p.key_averages() if e.self_device_time_total]  # without host calls
    kernels.sort(key=lambda e: -e.self_device_time_total)
    for e in kernels[:28]:
        print(f"    {e.self_device_time_total / 1e3:8.2f} ms {e.count:5} x {e.key[:100]}", flush=True)
    total = sum(e.self_device_time_total for e in kernels)
    print(f"    {total / 1e3:8.2f} ms on the GPU in total, {sum(e.count for e in kernels)} kernels", flush=True)
