"""Lossless verification of chains and trees: what is committed is distributed as the target alone would have it.

Two rules. Walking (greedy targets, and sampled ones with greedy drafts): the target draws its own token at each
node, and goes on while the draft had guessed it. Rejection (sampled drafts; Leviathan et al. 2023, Chen et al.
2023): a draft token x ~ q is kept with min(1, p(x)/q(x)), and the first one rejected is redrawn from (p - q)+.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fledge.kernels.sampling import ACCEPT, RESIDUAL, TOKEN, gumbel, gumbel_argmax, uniforms
from fledge.types import Sampling


class Chooser:
    """The target's way of choosing tokens for one request: logits processors, then the argmax or a keyed draw."""

    def __init__(self, sampling: Sampling, request: int = 0):
        from transformers import (
            LogitsProcessorList,
            RepetitionPenaltyLogitsProcessor,
            TemperatureLogitsWarper,
            TopKLogitsWarper,
            TopPLogitsWarper,
        )

        self.sampling, self.request = sampling, request
        self.by_prefix = LogitsProcessorList()  # these read the prefix, so each node is processed on its own
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
        """Greedy with nothing that changes the scores: the argmax of the logits."""
        return self.sampling.greedy and not self.by_prefix

    def scores(self, prefix: Sequence[int], logits_V: Tensor) -> Tensor:
        """Processed scores [V] at the node that follows `prefix`. Called once a node, in order, along one path, so
        that processors with a memory see what token-by-token decoding would show them."""
        scores = logits_V[None].clone()
        if self.by_prefix or self.by_score:
            ids = torch.tensor([list(prefix)], device=logits_V.device)
            scores = self.by_score(ids, self.by_prefix(ids, scores))
        return scores[0]

    def choose(self, prefix: Sequence[int], logits_V: Tensor) -> int:
        """The target's own token after `prefix`; a sampled one is keyed by its absolute position."""
        return int(self.ranking(prefix, logits_V).argmax())

    def ranking(self, prefix: Sequence[int], logits_V: Tensor) -> Tensor:
        """What the chosen token is the argmax of [V]: the scores, and where it samples their Gumbel noise on top."""
        scores = self.scores(prefix, logits_V)
        if self.sampling.greedy:
            return scores
        return scores.double() + gumbel(self.key(len(prefix), TOKEN), scores.numel(), scores.device)

    def key(self, position: int, purpose: int) -> tuple[int, int, int, int]:
        return (self.sampling.seed, self.request, position, purpose)


def accept_walk(
    chooser: Chooser,
    prefix: Sequence[int],
    drafted: Sequence[int],
    logits_NV: Tensor,
    parents: Sequence[int] | None = None,
) -> list[int]:
    """Commits the target's own tokens for as long as the draft had them; the last one is the bonus (never redrawn).

    `prefix` is all that is committed, `logits_NV` the target's after it (node 0) and after each of the drafted (nodes
    1 to N - 1), whose `parents` are earlier nodes (None: each the one before, a chain).
    """
    following = children(drafted, range(len(drafted)) if parents is None else parents)
    own = logits_NV.argmax(-1).tolist() if chooser.plain else None
    path, node = list(prefix), 0
    while node is not None:
        path.append(chooser.choose(path, logits_NV[node]) if own is None else own[node])
        node = following[node].get(path[-1])
    return path[len(prefix) :]


def children(drafted: Sequence[int], parents: Sequence[int]) -> list[dict[int, int]]:
    """For each node of a tree, the nodes that follow it by their tokens."""
    following: list[dict[int, int]] = [{} for _ in range(len(drafted) + 1)]
    for node, (token, parent) in enumerate(zip(drafted, parents, strict=True), start=1):
        following[parent][token] = node
    return following


def accepted_path(committed: Sequence[int], drafted: Sequence[int], parents: Sequence[int]) -> list[int]:
    """The nodes whose tokens were committed, from the root on; the last token committed is the target's own."""
    following, path = children(drafted, parents), [0]
    for token in committed[:-1]:
        path.append(following[path[-1]][token])
    return path


def accept_rejection(
    chooser: Chooser, prefix: Sequence[int], drafted: Sequence[int], q_KV: Tensor, logits_NV: Tensor
) -> list[int]:
    """Commits drafted tokens by min(1, p/q); a rejected one is redrawn from the residual, else a bonus is drawn.

    q_KV holds exactly the distributions the tokens were drawn from, zero outside the draft's vocabulary.
    """
    path = list(prefix)
    for j, token in enumerate(drafted):
        scores = chooser.scores(path, logits_NV[j]).double()
        p, q = scores.softmax(-1), q_KV[j].to(scores.device)
        if float(uniforms(chooser.key(len(path), ACCEPT), 1)) * float(q[token]) < float(p[token]):
            path.append(token)
            continue
        path.append(gumbel_argmax(residual(p, q).log(), chooser.key(len(path), RESIDUAL)))
        return path[len(prefix) :]
    path.append(chooser.choose(path, logits_NV[-1]))
    return path[len(prefix) :]


def residual(p_V: Tensor, q_V: Tensor) -> Tensor:
    """(p - q)+ up to its sum, or p where that sum rounds to zero."""
    left = (p_V - q_V).clamp_min(0)
    return left if float(left.sum()) > 0 else p_V
