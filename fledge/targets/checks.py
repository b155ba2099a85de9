"""Runs a transformers model to determine properties that training or decoding relies on."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from fledge.io.fields import first_line
from fledge.ops.attention_prompt import without_cudnn_sdpa
from fledge.targets.cache import RecurrentCache, TargetCache
from fledge.types import Prompt, Tree

if TYPE_CHECKING:
    from fledge.targets.interface import Cache, DecodingTarget
    from fledge.targets.native import NativeTarget
    from fledge.targets.transformers import TransformersTarget

LONGEST_WINDOW = 512  # tokens; `check_masks` tests windows of attention up to this size
REMEDY = {1: "draft chains", 2: "decode them one by one, in batches of 1"}


def nearly_equal(a: Tensor, b: Tensor, quantized: bool = False) -> bool:
    """Whether the tensors are equal up to the rounding differences of other batch shapes in their dtype, or in a
    `quantized` model, which may round to fewer bits."""
    tolerance = 1e-3 if a.dtype in (torch.float32, torch.float64) and not quantized else 5e-2
    return bool((a - b).float().norm() <= tolerance * b.float().norm())


def random_tokens(target: TransformersTarget, *shape: int, seed: int) -> Tensor:
    """Random token ids of the given shape, int64, on the target's device."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(target.embedding.shape[0], shape, generator=generator).to(target.device)


@torch.no_grad()
def isolates_documents(target: TransformersTarget) -> bool:
    """Whether a document has the same hidden states in every layer alone and packed after another document."""
    layers = range(target.num_layers + 1)
    one, other, two = _documents(target)
    position = torch.cat([torch.arange(9), torch.arange(7)]).to(target.device)
    alone = target.run_decoder(two, position[9:], layers)
    pairs = [target.run_decoder(torch.cat([first, two]), position, layers) for first in (one, other)]
    same = partial(nearly_equal, quantized=bool(target.quantization))
    return all(same(p.last_TD[9:], alone.last_TD) and same(p.aux_TAD[9:], alone.aux_TAD) for p in pairs)


@torch.no_grad()
def logits_problem(target: TransformersTarget) -> str:
    """The reason why the target's `logits` of the model's final hidden states differ from the model's own logits; empty
    if nearly equal. Raises ValueError if the model's logits are NaN or infinite."""
    read, written = target.embedding.shape[0], target.head_weight.shape[0]
    if read != written:
        return f"reads {read:,} tokens and predicts {written:,}, and fledge trains drafts of one vocabulary only"
    *_, tokens = _documents(target)
    last_TD = target.run_decoder(tokens, torch.arange(7, device=target.device), ()).last_TD
    own = target.model(input_ids=tokens[None], use_cache=False).logits[0].to(target.device)
    target.check_numbers(own)
    if nearly_equal(target.logits(last_TD), own, bool(target.quantization)):
        return ""
    return (
        "computes its logits in a way fledge does not know: its output head applied to the final hidden state differs "
        "from its own logits, so a draft would be trained on wrong targets"
    )


@torch.inference_mode()
def native_difference(target: NativeTarget) -> str:
    """The difference between the logits of a native target and of the transformers model, as text for a message; empty
    if small."""
    *_, tokens = _documents(target)
    own = target.model(input_ids=tokens[None], use_cache=False).logits[0, -1:]
    with _temporary_cache(target, [tokens.numel()]) as cache:
        logits, _ = target.prefill([Prompt(tokens.tolist())], cache)
    if not bool(own.isfinite().all()):
        return ""  # `check_numbers` says what is wrong
    # roundings of 16 bits add up over the layers, and choose others of nearly equal experts; another architecture gives
    # unrelated logits
    mixture = any(layer.experts is not None for layer in target.native.layers)
    tolerance = 1e-3 if own.dtype in (torch.float32, torch.float64) else 0.5 if mixture else 0.2
    error = float((logits - own).float().norm() / own.float().norm())
    return f"its logits differ from the model's by {error:.0%}" if error > tolerance else ""


@contextmanager
def _temporary_cache(target: DecodingTarget, sizes: Sequence[int]) -> Iterator[Cache]:
    """A new cache whose memory is freed after the block."""
    cache = target.separate_cache(sizes)
    try:
        yield cache
    finally:
        cache.select([])


def _window_size(target: TransformersTarget) -> int:
    """The largest window of attention in the config, in tokens; 0 without a window. Windows above LONGEST_WINDOW are
    left out, because running a text longer than the window takes long."""
    names = "sliding_window", "attention_chunk_size", "window_size"
    sizes = [getattr(target.config, name, None) for name in names]
    return max((n for n in sizes if isinstance(n, int) and n <= LONGEST_WINDOW), default=0)


def _documents(target: TransformersTarget) -> tuple[Tensor, ...]:
    """Two documents of 9 tokens and one of 7."""
    return random_tokens(target, 25, seed=0).split([9, 9, 7])


@torch.inference_mode()
def rollback_problem(target: TransformersTarget) -> str:
    """The reason why the model's cache cannot be rolled back; empty if the logits after a rollback nearly equal the
    logits of a sequence without the removed tokens."""
    tokens, cache = random_tokens(target, 1, 12, seed=1), TargetCache()
    direct = target.run(tokens[:, :8], RecurrentCache(recompute=True))[:, 6:]
    target.check_numbers(direct)
    error = ""
    try:
        target.verify(Tree.chain(tokens[:, :6]), cache)
        target.verify(Tree.chain(tokens[:, 8:]), cache)
        cache.rollback(6)
        after, _ = target.verify(Tree.chain(tokens[:, 6:8]), cache)
    except torch.OutOfMemoryError:
        raise
    except Exception as e:  # a model whose layers do not support such a cache may raise anything
        error = f" ({first_line(e).rstrip('.')})"
    else:
        if nearly_equal(after, direct, bool(target.quantization)):
            return ""
    if getattr(target.model, "_is_stateful", False):  # transformers' mark of recurrent layers
        return (
            "its state cannot be rolled back, which is so for recurrent layers (state-space models, linear attention)"
        )
    kind = type(target.model).__name__
    return f"{kind} keeps states other than the keys and values of attention, which fledge cannot roll back{error}"


@torch.inference_mode()
def cache_matches_full_pass(target: TransformersTarget) -> bool:
    """Whether token-by-token decoding with the model's own cache gives the logits of one pass over all tokens."""
    tokens, own, anew = random_tokens(target, 1, 12, seed=3), RecurrentCache(), RecurrentCache(recompute=True)
    with without_cudnn_sdpa(target.device):
        whole = target.run(tokens, anew)
        try:
            parts = [target.run(part, own) for part in tokens.split([6, *[1] * 6], dim=1)]
        except Exception:  # a model without a cache of its own may raise anything
            return False
    return own.state is not None and nearly_equal(torch.cat(parts, dim=1), whole, bool(target.quantization))


@torch.inference_mode()
def check_masks(target: TransformersTarget, requests: int = 1) -> None:
    requests = min(requests, 2)
    name, what = target.name or "the target", "trees" if requests == 1 else "several requests together"
    if target.rollback_problem:
        raise ValueError(f"{name} cannot verify {what}: {target.rollback_problem}; {REMEDY[requests]}")
    long = 7 + _window_size(target)  # beyond the window, since fledge's masks may not follow a model's window
    why, lengths = "each node of a tree must see only its own path", [long]
    if requests > 1:
        why, lengths = "each request must see only its own text", [4, long]
    tokens = random_tokens(target, requests, long + 5, seed=2)
    parents = torch.tensor([-1, 0, 0, 1, 2], device=target.device).expand(requests, -1)
    drafted = torch.stack([t[n : n + 5] for t, n in zip(tokens, lengths, strict=True)])
    with _temporary_cache(target, [long + 13] * requests) as cache:
        try:
            target.prefill([Prompt(t[:n].tolist()) for t, n in zip(tokens, lengths, strict=True)], cache)
            found, _ = target.verify(Tree(drafted, parents, 2), cache)
        except torch.OutOfMemoryError:
            raise
        except Exception as e:  # a model that does not support such a mask may raise anything
            mask = f"{type(target.model).__name__} does not take an attention mask for that ({first_line(e)})"
            raise ValueError(f"{name} cannot verify {what}: {why}, and {mask}; {REMEDY[requests]}") from e
        path = torch.tensor([0, 2, 4], device=target.device).expand(requests, -1)
        cache.keep(path, path.new_full((requests,), 3))
        after, _ = target.verify(Tree.chain(tokens[:, :1]), cache)
    for b, n in enumerate(lengths):
        line = torch.cat([tokens[b, :n], drafted[b, [0, 2, 4]], tokens[b, :1]])
        with _temporary_cache(target, [line.numel()]) as cache:
            direct, _ = target.verify(Tree.chain(line[None]), cache)
        target.check_numbers(direct)
        path_logits = torch.cat([found[b, [0, 2, 4]], after[b]])
        if not nearly_equal(path_logits, direct[0, n:], bool(target.quantization)):
            raise ValueError(f"{name} cannot verify {what}: {why}; {REMEDY[requests]}")
