"""Lossless verification of chains and trees: what is committed is distributed as the target alone would have it.

Two rules. Walking (greedy targets, and sampled ones with greedy drafts): the target draws its own token at each
node, and goes on while the draft had guessed it. Rejection (sampled drafts; Leviathan et al. 2023, Chen et al.
2023): a draft token x ~ q is kept with min(1, p(x)/q(x)), and the first one rejected is redrawn from (p - q)+.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

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
        return rankings([self], [prefix], logits_V[None])[0]

    def key(self, position: int, purpose: int) -> tuple[int, int, int, int]:
        return (self.sampling.seed, self.request, position, purpose)


def processed(choosers: Sequence[Chooser], prefixes: Sequence[Sequence[int]], logits_BV: Tensor) -> Tensor:
    """Scores [B, V] of several requests that sample alike, each processed on its own prefix; see `Chooser.scores`."""
    if len(choosers) == 1 or choosers[0].by_prefix:
        return torch.stack([c.scores(*of) for c, *of in zip(choosers, prefixes, logits_BV, strict=True)])
    return choosers[0].by_score(None, logits_BV.clone())


def rankings(choosers: Sequence[Chooser], prefixes: Sequence[Sequence[int]], logits_BV: Tensor) -> Tensor:
    """What each request's chosen token is the argmax of, [B, V]; see `Chooser.ranking`."""
    scores = processed(choosers, prefixes, logits_BV)
    if choosers[0].sampling.greedy:
        return scores
    keys = [c.key(len(prefix), TOKEN) for c, prefix in zip(choosers, prefixes, strict=True)]
    return scores.double() + gumbel(keys, scores.shape[1], scores.device)


def accept_walk(
    choosers: Sequence[Chooser],
    prefixes: Sequence[Sequence[int]],
    drafted: Sequence[Sequence[int]],
    logits_BNV: Tensor,
    parents: Sequence[Sequence[int]] | None = None,
    last: Sequence[Callable[[int], bool]] | None = None,
) -> list[list[int]]:
    """Commits each request's target's own tokens for as long as its draft had them; the last one is the bonus (never
    redrawn).

    `prefixes` are all that is committed, `logits_BNV` the target's after it (node 0) and after each of the drafted
    (nodes 1 to N - 1), whose `parents` are earlier nodes (None: each the one before, a chain). `last`, where it is
    given, is told each request's tokens one by one and says whether one is its answer's last: processors are asked for
    none after that, since token by token they would not be.
    """
    following = [children(d, p) for d, p in zip(drafted, parents or [range(len(d)) for d in drafted], strict=True)]
    own = logits_BNV.argmax(-1).tolist() if choosers[0].plain else None
    paths, at = [list(prefix) for prefix in prefixes], {b: 0 for b in range(len(prefixes))}  # the node each stands at
    while at:
        if own is not None:
            chosen = [own[b][node] for b, node in at.items()]
        else:
            here = logits_BNV[0, at[0]][None] if len(prefixes) == 1 else logits_BNV[list(at), list(at.values())]
            chosen = rankings([choosers[b] for b in at], [paths[b] for b in at], here).argmax(-1).tolist()
        for b, token in zip(list(at), chosen, strict=True):
            paths[b].append(token)
            node = following[b][at.pop(b)].get(token)
            if not (last and last[b](token)) and node is not None:
                at[b] = node
    return [path[len(prefix) :] for path, prefix in zip(paths, prefixes, strict=True)]


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
    chooser: Chooser, prefix: Sequence[int], drafted: Sequence[int], q_KV: Tensor, logits_NV: Tensor,
    last: Callable[[int], bool] | None = None,
) -> list[int]:  # fmt: skip
    """Commits drafted tokens by min(1, p/q); a rejected one is redrawn from the residual, else a bonus is drawn.

    q_KV holds exactly the distributions the tokens were drawn from, zero outside the draft's vocabulary; logits_NV the
    target's before each of them and after the last. `last` is as in `accept_walk`.
    """
    path = list(prefix)
    for j, token in enumerate(drafted):
        scores = chooser.scores(path, logits_NV[j]).double()
        p, q = scores.softmax(-1), q_KV[j].to(scores.device)
        if float(uniforms(chooser.key(len(path), ACCEPT), 1)) * float(q[token]) < float(p[token]):
            path.append(token)
            if last and last(token):
                return path[len(prefix) :]
            continue
        path.append(gumbel_argmax(residual(p, q).log(), chooser.key(len(path), RESIDUAL)))
        return path[len(prefix) :]
    path.append(chooser.choose(path, logits_NV[len(drafted)]))
    return path[len(prefix) :]


def residual(p_V: Tensor, q_V: Tensor) -> Tensor:
    """(p - q)+ up to its sum, or p where that sum rounds to zero."""
    left = (p_V - q_V).clamp_min(0)
    return left if float(left.sum()) > 0 else p_V
