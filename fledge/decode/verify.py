"""Lossless verification of chains and trees: committed tokens have the distribution of the target's own decoding.

There are two rules. By match (greedy decoding, and sampling with greedy drafts): the target chooses its own token at
each node, and verification continues at the child with this token, if there is one. By rejection (sampled drafts;
Leviathan et al. 2023, Chen et al. 2023): a drafted token x ~ q is accepted with probability min(1, p(x)/q(x)), and the
first rejected one is replaced by a draw from (p - q)+.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from fledge.kernels.sampling import ACCEPT, RESIDUAL, TOKEN, gumbel, gumbel_argmax, uniforms
from fledge.types import Sampling, Verdict

Nodes = tuple[Sequence[int], Sequence[int]]  # tokens and parents of a tree's nodes, the root (parent -1) first
IsLast = Callable[[int], bool]  # called with a request's tokens in order: whether it is the answer's last token


class TargetSampler:
    """How the target chooses tokens for one request: logits processors, then the argmax or a keyed draw."""

    def __init__(self, sampling: Sampling, request: int = 0):
        from transformers import (
            LogitsProcessorList,
            RepetitionPenaltyLogitsProcessor,
            TemperatureLogitsWarper,
            TopKLogitsWarper,
            TopPLogitsWarper,
        )

        self.sampling, self.request = sampling, request
        self.by_prefix = LogitsProcessorList()  # they read the prefix, so each node is processed by itself
        if sampling.repetition_penalty != 1.0:
            self.by_prefix.append(RepetitionPenaltyLogitsProcessor(sampling.repetition_penalty))
        self.by_prefix.extend(sampling.processors)
        self.by_score = LogitsProcessorList()
        if not sampling.greedy:
            if sampling.temperature != 1.0:
                self.by_score.append(TemperatureLogitsWarper(sampling.temperature))
            if sampling.top_k:
                self.by_score.append(TopKLogitsWarper(sampling.top_k))
            if sampling.top_p < 1.0:
                self.by_score.append(TopPLogitsWarper(sampling.top_p))

    @property
    def plain(self) -> bool:
        """Whether the chosen token is the argmax of the unprocessed logits."""
        return self.sampling.greedy and not self.by_prefix

    def scores(self, prefix: Sequence[int], logits_V: Tensor) -> Tensor:
        """Processed scores [V] of the token after `prefix`. Called once per node, in order along one path, so that
        stateful processors see what token-by-token decoding would show them."""
        scores = logits_V[None].clone()
        if self.by_prefix or self.by_score:
            ids = torch.tensor([list(prefix)], device=logits_V.device)
            scores = self.by_score(ids, self.by_prefix(ids, scores))
        return scores[0]

    def choose(self, prefix: Sequence[int], logits_V: Tensor) -> int:
        """The target's own token after `prefix`. Sampling draws by a key of the absolute position."""
        return int(self.ranking(prefix, logits_V).argmax())

    def ranking(self, prefix: Sequence[int], logits_V: Tensor) -> Tensor:
        """The values [V] whose argmax is the chosen token: the scores, plus Gumbel noise where it samples."""
        return rankings([self], [prefix], logits_V[None])[0]

    def key(self, position: int, purpose: int) -> tuple[int, int, int, int]:
        return (self.sampling.seed, self.request, position, purpose)


def processed(samplers: Sequence[TargetSampler], prefixes: Sequence[Sequence[int]], logits_BV: Tensor) -> Tensor:
    """`TargetSampler.scores` [B, V] of requests with equal sampling options, each processed on its own prefix."""
    if len(samplers) == 1 or samplers[0].by_prefix:
        return torch.stack([s.scores(*of) for s, *of in zip(samplers, prefixes, logits_BV, strict=True)])
    return samplers[0].by_score(None, logits_BV.clone())


def rankings(samplers: Sequence[TargetSampler], prefixes: Sequence[Sequence[int]], logits_BV: Tensor) -> Tensor:
    """`TargetSampler.ranking` of each request, [B, V]."""
    scores = processed(samplers, prefixes, logits_BV)
    if samplers[0].sampling.greedy:
        return scores
    keys = [s.key(len(prefix), TOKEN) for s, prefix in zip(samplers, prefixes, strict=True)]
    return scores.double() + gumbel(keys, scores.shape[1], scores.device)


def verify_by_match(
    samplers: Sequence[TargetSampler], prefixes: Sequence[Sequence[int]], nodes: Sequence[Nodes], logits_BNV: Tensor,
    is_last: Sequence[IsLast] | None = None,
) -> list[Verdict]:  # fmt: skip
    """Commits the target's own tokens: those that each request's tree contains, and the first that it does not.

    `prefixes` are the committed tokens, the root's included; `logits_BNV` are the target's logits after each node. With
    `is_last`, verification of a request stops after its answer's last token, where token-by-token decoding would stop
    calling processors.
    """
    following = [children(*of) for of in nodes]
    own = logits_BNV.argmax(-1).tolist() if samplers[0].plain else None
    texts, paths = [list(prefix) for prefix in prefixes], [[0] for _ in prefixes]
    going = list(range(len(prefixes)))
    while going:
        if own is not None:
            chosen = [own[b][paths[b][-1]] for b in going]
        else:
            at = [paths[b][-1] for b in going]
            here = logits_BNV[0, at[0]][None] if len(prefixes) == 1 else logits_BNV[going, at]
            chosen = rankings([samplers[b] for b in going], [texts[b] for b in going], here).argmax(-1).tolist()
        still = []
        for b, token in zip(going, chosen, strict=True):
            texts[b].append(token)
            node = following[b][paths[b][-1]].get(token)
            if not (is_last and is_last[b](token)) and node is not None:
                paths[b].append(node)
                still.append(b)
        going = still
    return [Verdict(path, text[len(prefix) :]) for path, text, prefix in zip(paths, texts, prefixes, strict=True)]


def children(tokens: Sequence[int], parents: Sequence[int]) -> list[dict[int, int]]:
    """For each node of a tree, its children by token."""
    following: list[dict[int, int]] = [{} for _ in tokens]
    for node in range(1, len(tokens)):
        following[parents[node]][tokens[node]] = node
    return following


def verify_by_rejection(
    sampler: TargetSampler, prefix: Sequence[int], tokens: Sequence[int], q_KV: Tensor, logits_NV: Tensor,
    is_last: IsLast | None = None,
) -> Verdict:  # fmt: skip
    """Accepts each drafted token of a chain with probability min(1, p/q). The first rejected token is replaced by a
    draw from the residual; if all are accepted, the next token is drawn from the target.

    `tokens` are the chain's, the root first. `q_KV` are the distributions that the drafted tokens were drawn from, zero
    outside the draft's vocabulary; `logits_NV` are the target's logits after each node. `is_last` is as in
    `verify_by_match`. (Leviathan et al. 2023, algorithm 1.)
    """
    text = list(prefix)

    def verdict(accepted: int) -> Verdict:
        return Verdict(list(range(accepted + 1)), text[len(prefix) :])

    for j, token in enumerate(tokens[1:]):
        scores = sampler.scores(text, logits_NV[j]).double()
        p, q = scores.softmax(-1), q_KV[j].to(scores.device)
        if float(uniforms(sampler.key(len(text), ACCEPT), 1)) * float(q[token]) >= float(p[token]):
            text.append(gumbel_argmax(residual(p, q).log(), sampler.key(len(text), RESIDUAL)))
            return verdict(j)
        text.append(token)
        if is_last and is_last(token):
            return verdict(j)
    text.append(sampler.choose(text, logits_NV[len(tokens) - 1]))
    return verdict(len(tokens) - 1)


def residual(p_V: Tensor, q_V: Tensor) -> Tensor:
    """(p - q)+, not normalised, or p where its sum rounds to zero."""
    left = (p_V - q_V).clamp_min(0)
    return left if float(left.sum()) > 0 else p_V
