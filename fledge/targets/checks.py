"""What is found out about a transformers model by trying, before anything relies on it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from fledge.kernels.sdpa import without_cudnn_sdpa
from fledge.targets.cache import TargetCache
from fledge.targets.running import RunningState
from fledge.types import Tree

if TYPE_CHECKING:
    from fledge.targets.transformers import TransformersTarget

CURE = {1: "draft chains", 2: "decode them one by one, in batches of 1"}


def close(a: Tensor, b: Tensor) -> bool:
    """Equal up to what another batch shape rounds differently in the tensors' own dtype."""
    tolerance = 1e-3 if a.dtype in (torch.float32, torch.float64) else 5e-2
    return bool((a - b).float().norm() <= tolerance * b.float().norm())


def random_tokens(target: TransformersTarget, *shape: int, seed: int) -> Tensor:
    """Token ids of the target's vocabulary, the same for the same seed, on its device."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(target.embedding.shape[0], shape, generator=generator).to(target.device)


@torch.no_grad()
def keeps_documents_apart(target: TransformersTarget) -> bool:
    """Whether a document's hidden states are the same alone and behind either of two others, in every layer."""
    layers = range(target.num_layers + 1)
    one, other, two = _documents(target)
    position = torch.cat([torch.arange(9), torch.arange(7)]).to(target.device)
    alone = target.run_decoder(two, position[9:], layers)
    pairs = [target.run_decoder(torch.cat([first, two]), position, layers) for first in (one, other)]
    return all(close(p.last_TD[9:], alone.last_TD) and close(p.aux_TAD[9:], alone.aux_TAD) for p in pairs)


@torch.no_grad()
def logits_problem(target: TransformersTarget) -> str:
    """Why the model's logits cannot be computed from its final hidden states; empty where they can. Raises ValueError
    where its logits are NaN or infinite."""
    *_, tokens = _documents(target)
    last_TD = target.run_decoder(tokens, torch.arange(7, device=target.device), ()).last_TD
    own = target.model(input_ids=tokens[None], use_cache=False).logits[0]
    target.check_numbers(own)
    if close(target.logits(last_TD), own):
        return ""
    return (
        "computes its logits in a way fledge does not know: its output head applied to the final hidden state differs "
        "from its own logits, so a draft would be taught wrongly"
    )


def _documents(target: TransformersTarget) -> list[Tensor]:
    """Two documents of 9 tokens and one of 7."""
    generator, vocabulary = torch.Generator().manual_seed(0), target.embedding.shape[0]
    return [torch.randint(vocabulary, (n,), generator=generator).to(target.device) for n in (9, 9, 7)]


@torch.inference_mode()
def rollback_problem(target: TransformersTarget) -> str:
    """Why tokens that the model has read cannot be forgotten; empty where it answers as if it had never read them."""
    tokens, cache = random_tokens(target, 1, 12, seed=1), TargetCache()
    direct = target.run(tokens[:, :8], RunningState(recompute=True))[:, 6:]
    target.check_numbers(direct)
    problem = "its state cannot be rolled back, as that of layers with a running summary of the past cannot"
    try:
        target.verify(Tree.chain(tokens[:, :6]), cache)
        target.verify(Tree.chain(tokens[:, 8:]), cache)
        cache.rollback(6)
        after, _ = target.verify(Tree.chain(tokens[:, 6:8]), cache)
    except torch.OutOfMemoryError:
        raise
    except Exception:  # a cache without a length, or without room for such layers, may raise anything
        return problem
    return "" if close(after, direct) else problem


@torch.inference_mode()
def steps_exactly(target: TransformersTarget) -> bool:
    """Whether the model's own cache, token by token, gives the logits that all tokens at once give."""
    tokens, own, anew = random_tokens(target, 1, 12, seed=3), RunningState(), RunningState(recompute=True)
    with without_cudnn_sdpa(target.device):
        whole = target.run(tokens, anew)
        try:
            parts = [target.run(part, own) for part in tokens.split([6, *[1] * 6], dim=1)]
        except Exception:  # a model without a cache of its own may raise anything
            return False
    return bool(own.held) and close(torch.cat(parts, dim=1), whole)


@torch.inference_mode()
def check_masks(target: TransformersTarget, requests: int) -> None:
    """See `DecodingTarget.check_masks`."""
    requests = min(requests, 2)
    name, what = target.name or "the target", "trees" if requests == 1 else "several requests together"
    if target.rollback_problem:
        raise ValueError(f"{name} cannot verify {what}: {target.rollback_problem}; {CURE[requests]}")
    why, lengths = "each node of a tree must see its own path alone", [4, 7][:requests]
    if requests > 1:
        why = "each request must see its own text alone"
    tokens = random_tokens(target, requests, 12, seed=2)
    parents = torch.tensor([-1, 0, 0, 1, 2], device=target.device).expand(requests, -1)
    drafted = torch.stack([t[n : n + 5] for t, n in zip(tokens, lengths, strict=True)])
    try:
        _, _, cache = target.prefill([t[:n].tolist() for t, n in zip(tokens, lengths, strict=True)])
        found, _ = target.verify(Tree(drafted, parents, 2), cache)
    except Exception as e:  # a model that does not take such a mask may raise anything
        raise ValueError(f"{name} cannot verify {what}: {why} ({e}); {CURE[requests]}") from e
    cache.keep(lengths, [[0, 2, 4]] * requests)
    after, _ = target.verify(Tree.chain(tokens[:, :1]), cache)
    for b, n in enumerate(lengths):
        line = torch.cat([tokens[b, :n], drafted[b, [0, 2, 4]], tokens[b, :1]])
        direct, _ = target.verify(Tree.chain(line[None]), TargetCache())
        target.check_numbers(direct)
        if not close(torch.cat([found[b, [0, 2, 4]], after[b]]), direct[0, n:]):
            raise ValueError(f"{name} cannot verify {what}: {why}; {CURE[requests]}")
