"""Verification by its definition: one request, node by node, on Python lists and with transformers' own processors."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
from torch import Tensor
from transformers import (
    LogitsProcessorList,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from fledge.ops.sampling import ACCEPT, RESIDUAL, TOKEN
from fledge.types import Sampling

MASK, GOLDEN = (1 << 64) - 1, 0x9E3779B97F4A7C15


def mix(x: int) -> int:
    """SplitMix64's finaliser on a Python integer."""
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & MASK
    return x ^ (x >> 31)


def uniforms_of(key: Sequence[int], n: int) -> Tensor:
    """The first n uniforms of (seed, request, position, purpose), float64 [n]."""
    state = functools.reduce(lambda state, part: mix((state + GOLDEN + part) & MASK), key, 0)
    bits = [mix((state + i * GOLDEN) & MASK) >> 12 for i in range(1, n + 1)]
    return torch.tensor([(b + 0.5) * 2.0**-52 for b in bits], dtype=torch.float64)


def draw(scores_V: Tensor, key: Sequence[int]) -> int:
    """A sample of softmax(scores) by the Gumbel-max trick."""
    return int((scores_V.double() - (-uniforms_of(key, scores_V.numel()).log()).log()).argmax())


def scores_of(sampling: Sampling, prefix: Sequence[int], logits_V: Tensor) -> Tensor:
    """The processed scores [V] of the token after a prefix, in the order of transformers' generate."""
    processors = LogitsProcessorList()
    if sampling.repetition_penalty != 1:
        processors.append(RepetitionPenaltyLogitsProcessor(sampling.repetition_penalty))
    processors.extend(sampling.processors)
    if not sampling.greedy:
        processors.append(TemperatureLogitsWarper(float(sampling.temperature)))
        if sampling.top_k:
            processors.append(TopKLogitsWarper(sampling.top_k))
        if sampling.top_p < 1:
            processors.append(TopPLogitsWarper(sampling.top_p))
    scores = logits_V[None] if logits_V.dtype == torch.float64 else logits_V[None].float()
    return processors(torch.tensor([list(prefix)]), scores.clone())[0]


def choice_of(sampling: Sampling, request: int, prefix: Sequence[int], logits_V: Tensor) -> int:
    """The target's own token after a prefix."""
    scores_V = scores_of(sampling, prefix, logits_V)
    return int(scores_V.argmax()) if sampling.greedy else draw(scores_V, (sampling.seed, request, len(prefix), TOKEN))


def match_by_definition(
    sampling: Sampling, request: int, prefix: Sequence[int], tokens: Sequence[int], parents: Sequence[int],
    logits_NV: Tensor,
) -> tuple[list[int], list[int]]:  # fmt: skip
    """The accepted nodes and the tokens to commit: the target chooses, as long as the tree has what it chose."""
    path, text = [0], list(prefix)
    while True:
        text.append(choice_of(sampling, request, text, logits_NV[path[-1]]))
        children = [n for n, parent in enumerate(parents) if parent == path[-1] and tokens[n] == text[-1]]
        if not children:
            return path, text[len(prefix) :]
        path.append(children[0])


def rejection_by_definition(
    sampling: Sampling, request: int, prefix: Sequence[int], tokens: Sequence[int], q_KV: Tensor, logits_NV: Tensor
) -> tuple[list[int], list[int]]:
    """The accepted nodes of a chain and the tokens to commit (Leviathan et al. 2023, algorithm 1). q is over the
    target's tokens."""
    text = list(prefix)
    for k, token in enumerate(tokens[1:]):
        p_V, at = scores_of(sampling, text, logits_NV[k]).double().softmax(-1), (sampling.seed, request, len(text))
        if float(uniforms_of((*at, ACCEPT), 1)) * float(q_KV[k, token]) >= float(p_V[token]):
            left_V = (p_V - q_KV[k]).clamp_min(0)
            text.append(draw((left_V if float(left_V.sum()) > 0 else p_V).log(), (*at, RESIDUAL)))
            return list(range(k + 1)), text[len(prefix) :]
        text.append(token)
    text.append(choice_of(sampling, request, text, logits_NV[len(tokens) - 1]))
    return list(range(len(tokens))), text[len(prefix) :]
