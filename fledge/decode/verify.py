"""Lossless verification of chains and trees: committed tokens have the distribution of the target's own decoding.

There are two rules. By match (greedy decoding, and sampling with coupled drafts): the target chooses its own token at
each node, and a node is accepted if its parent is and its token is the parent's own. By rejection (sampled drafts;
Leviathan et al. 2023, Chen et al. 2023): a drafted token x ~ q is accepted with probability min(1, p(x)/q(x)), and the
first rejected one is replaced by a draw from (p - q)+.

Both rules are functions of tensors for all requests and nodes at once. They wait for no device, and their shapes do not
depend on values. Only logits processors, which are Python objects with a state, are called node by node; and sampling
by match on a CPU draws along the accepted path, since most nodes are not on it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fledge.decode.sampling import BatchSampling, seen_by_node
from fledge.ops.device import at_least_float32, indices
from fledge.ops.sampling import ACCEPT, RESIDUAL, TOKEN, gumbel_argmax, uniforms
from fledge.ops.topk import argmax_rows
from fledge.ops.trees import accept_own
from fledge.types import Tree, Verdict

FEW = 2**15  # logits; on a CPU, drawing at all nodes of so many is faster than one level after the other
IsLast = Callable[[int], bool]  # called with a request's tokens in order: whether it is the answer's last token


@dataclass(frozen=True)
class Processing:
    """How a request's logits are processed by transformers LogitsProcessor objects. The processors are called with the
    `prefix`, the root's token included, and not after the answer's last token."""

    processors: Sequence[Any]
    prefix: Sequence[int]
    is_last: IsLast | None = None


def verify(
    tree: Tree, logits_BNV: Tensor, length_B: Tensor, sampling: BatchSampling, target_ids_W: Tensor | None = None,
    seen_BV: Tensor | None = None, processing: Sequence[Processing | None] = (),
) -> Verdict:  # fmt: skip
    """Verifies by rejection where the tree has distributions (`q_BKW`), else by match.

    `logits_BNV` are the target's logits after each node. `length_B` (int64) are the numbers of committed tokens without
    the root. `target_ids_W` (int64) are the target's ids of the draft's tokens, for rejection. `seen_BV` (bool) are the
    tokens of the committed prefixes, the root's included, for repetition penalties. `processing` has an entry for each
    request if some have logits processors. Greedy decoding without penalties costs one argmax over the logits.
    """

    def rule(scores_BNV: Tensor) -> Verdict:
        given = tree, scores_BNV, length_B, sampling
        return accept_by_match(*given) if tree.q_BKW is None else accept_by_rejection(*given, target_ids_W)

    seen_BNV = seen_by_node(tree, seen_BV)
    if any(processing):
        return verify_with_processors(rule, tree, logits_BNV, sampling, processing, seen_BNV)
    dear = sampling.filters or logits_BNV.numel() > FEW
    if tree.q_BKW is None and sampling.samples and dear and logits_BNV.device.type == "cpu":
        return draw_along_the_path(tree, logits_BNV, length_B, sampling, seen_BNV)
    return rule(sampling.process(logits_BNV, seen_BNV))


def accept_by_match(tree: Tree, scores_BNV: Tensor, length_B: Tensor, sampling: BatchSampling) -> Verdict:
    """Commits the target's own tokens, up to and including the first token that the request's tree does not contain.
    `scores_BNV` are processed logits (`BatchSampling.process`)."""
    return accept_own(tree, choose(tree, scores_BNV, length_B, sampling))


def choose(tree: Tree, scores_BNV: Tensor, length_B: Tensor, sampling: BatchSampling) -> Tensor:
    """The target's own token after each node, int64 [B, N]: the argmax, or a draw by the key of its position."""
    if not sampling.samples:
        return argmax_rows(scores_BNV)
    state_BN = sampling.keys(_positions(length_B, tree.levels + 1), TOKEN)
    if tree.parent_BN is not None:  # the nodes of a level share a position
        state_BN = state_BN.gather(1, tree.depths())
    return gumbel_argmax(sampling.settle(scores_BNV), state_BN)


def draw_along_the_path(
    tree: Tree, logits_BNV: Tensor, length_B: Tensor, sampling: BatchSampling, seen_BNV: Tensor | None
) -> Verdict:  # fmt: skip
    """The verdict of `accept_by_match` for sampling, with scores and draws of the accepted nodes only. `seen_BNV` are
    the tokens before each node (bool), if some requests penalize them. Reads the drawn tokens after each level."""
    B, N = tree.token_BN.shape
    drafted, counts = tree.token_BN.tolist(), [N] * B if tree.count_B is None else tree.count_B.tolist()
    parents = [[*range(-1, N - 1)]] * B if tree.parent_BN is None else tree.parent_BN.tolist()
    state_BR = sampling.keys(_positions(length_B, tree.levels + 1), TOKEN)
    paths: list[list[int]] = [[0] for _ in range(B)]
    tokens: list[list[int]] = [[] for _ in range(B)]
    going = list(range(B))
    while going:
        level, nodes = len(tokens[going[0]]), [paths[b][-1] for b in going]
        if len(going) == B and len({*nodes}) == 1:  # without copies
            own, at = sampling, (slice(None), slice(nodes[0], nodes[0] + 1))
        else:
            index_b = torch.tensor(going)
            own, at = sampling.select(index_b), (index_b[:, None], torch.tensor(nodes)[:, None])
        scores_b1V = own.penalize(logits_BNV[at], None if seen_BNV is None else seen_BNV[at])
        drawn = own.draw(scores_b1V[:, 0], state_BR[going, level])
        still = []
        for b, token in zip(going, drawn, strict=True):
            node = paths[b][-1]
            tokens[b].append(token)
            of_node = (i for i in range(node + 1, counts[b]) if parents[b][i] == node and drafted[b][i] == token)
            if (child := next(of_node, None)) is not None:
                paths[b].append(child)
                still.append(b)
        going = still
    R = tree.levels + 1
    path_BR = torch.tensor([path + path[-1:] * (R - len(path)) for path in paths])
    token_BR = torch.tensor([own + [0] * (R - len(own)) for own in tokens])
    return Verdict(path_BR, torch.tensor([len(path) for path in paths]), token_BR)


def accept_by_rejection(
    tree: Tree, scores_BNV: Tensor, length_B: Tensor, sampling: BatchSampling, target_ids_W: Tensor
) -> Verdict:
    """Accepts each drafted token of a chain with probability min(1, p/q). The first rejected token is replaced by a
    draw from the residual; if all are accepted, the next token is drawn from the target. `scores_BNV` are processed
    logits. (Leviathan et al. 2023, algorithm 1, for all positions at once.)"""
    B, N, V = scores_BNV.shape
    scores_BNV = sampling.settle(scores_BNV.double())
    p_BNV = scores_BNV.softmax(-1)
    q_BKV = p_BNV.new_zeros(B, N - 1, V).index_copy(2, target_ids_W, tree.q_BKW)  # zero outside the draft's tokens
    position_BN, node_N = _positions(length_B, N), torch.arange(N, device=p_BNV.device)
    u_BK = uniforms(sampling.keys(position_BN[:, :-1], ACCEPT), 1)[..., 0]
    drafted_BK1 = tree.token_BN[:, 1:, None]
    accepted_BK = u_BK * q_BKV.gather(2, drafted_BK1)[..., 0] < p_BNV[:, :-1].gather(2, drafted_BK1)[..., 0]
    last_B1 = (node_N[-1:] if tree.count_B is None else tree.count_B - 1).expand(B)[:, None]
    node_B1 = (accepted_BK & (node_N[:-1] < last_B1)).cumprod(1).sum(1, keepdim=True)  # the last accepted
    # the token after it: from the target if no drafted one follows, else from what rejection leaves
    left_BV = residual(_at(p_BNV, node_B1), _at(q_BKV, node_B1.clamp_max(N - 2)))
    state_BN = torch.where(node_N == last_B1, sampling.keys(position_BN, TOKEN), sampling.keys(position_BN, RESIDUAL))
    values_BV = torch.where(node_B1 == last_B1, _at(scores_BNV, node_B1), left_BV.log())
    chosen_B = gumbel_argmax(values_BV, state_BN.gather(1, node_B1)[:, 0])
    token_BN = torch.where(node_N < node_B1, tree.token_BN.roll(-1, 1), chosen_B[:, None])
    return Verdict.of(node_N.expand(B, N), node_B1[:, 0] + 1, token_BN)


def residual(p_BV: Tensor, q_BV: Tensor) -> Tensor:
    """(p - q)+, not normalised, or p where its sum rounds to zero."""
    left_BV = (p_BV - q_BV).clamp_min(0)
    return torch.where(left_BV.sum(-1, keepdim=True) > 0, left_BV, p_BV)


def verify_with_processors(
    rule: Callable[[Tensor], Verdict], tree: Tree, logits_BNV: Tensor, sampling: BatchSampling,
    processing: Sequence[Processing | None], seen_BNV: Tensor | None,
) -> Verdict:  # fmt: skip
    """Verifies by `rule`, which makes a verdict of scores [B, N, V], with each request's logits processors.

    They are called once for each node of the accepted path, in order, as token-by-token decoding calls them: after the
    repetition penalty and before the temperature, with the whole prefix, and not after the answer's last token. The
    rule's verdict on a node depends on the scores of its path alone. So each level's nodes are processed, and the
    rule, called with all scores so far, finds those of the next level. Synchronizes the device once a level.
    """
    B, levels = logits_BNV.shape[0], tree.levels + 1
    logits_BNV = at_least_float32(sampling.penalize(logits_BNV, seen_BNV)).clone()
    scores_BNV = sampling.warp(logits_BNV).clone()
    going = [b for b, of_request in enumerate(processing) if of_request]
    texts = {b: list(processing[b].prefix) for b in going}
    nodes, ends = [0] * B, [levels] * B
    for level in range(levels):
        for b in going:
            ids, row = torch.tensor([texts[b]], device=logits_BNV.device), logits_BNV[b, nodes[b]][None]
            for processor in processing[b].processors:
                row = processor(ids, row)
            logits_BNV[b, nodes[b]] = row[0]
        at = torch.arange(B), torch.tensor(nodes)
        scores_BNV[at] = sampling.warp(logits_BNV[at][:, None])[:, 0]
        verdict = rule(scores_BNV)
        still = []
        for b, (path, tokens) in enumerate(verdict.to_lists()):
            if b not in going:
                continue
            texts[b].append(tokens[level])
            is_last = processing[b].is_last
            if (is_last and is_last(tokens[level])) or level + 1 == len(path):
                ends[b] = level + 1
            else:
                nodes[b] = path[level + 1]
                still.append(b)
        if not (going := still):
            break
    count_B = torch.minimum(verdict.count_B, torch.tensor(ends, device=verdict.count_B.device))
    return Verdict.of(verdict.path_BR, count_B, verdict.token_BR)


def _positions(length_B: Tensor, n: int) -> Tensor:
    """The positions of the first n tokens after the root, int64 [B, n]."""
    return length_B[:, None] + 1 + indices(n, length_B.device)


def _at(x_BMV: Tensor, row_B1: Tensor) -> Tensor:
    """One row of each request, [B, V]."""
    return x_BMV.gather(1, row_B1[..., None].expand(-1, -1, x_BMV.shape[2]))[:, 0]
