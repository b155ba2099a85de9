"""Drafting for several requests at once: a chain of tokens for each, or a tree of them, with the draft's own cache.

A stable cache is rebuilt from the target's features where tokens were accepted, which is what training saw. An
unstable one keeps what the draft itself made of them, which costs fewer rows and drifts.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from fledge.kernels.sampling import DRAFT, gumbel_argmax
from fledge.kernels.transfer import to_device
from fledge.models.draft import Draft
from fledge.models.kv_cache import DraftCache
from fledge.types import Sampling, Tree, TreeShape


class Drafter:
    """A draft and its cache for the requests that are decoded together; what the ways of drafting share.

    `numbers` are the requests' own, in the order of the cache's rooms. `drafted_BN` says of the last trees' nodes which
    scratch slot of the cache each was drafted in, -1 for none.
    """

    def __init__(self, draft: Draft, stable: bool = True):
        self.draft, self.stable = draft, stable
        self.cache: DraftCache | None = None
        self.numbers: list[int] = []
        self.drafted_BN = torch.empty(0, 1, dtype=torch.int64)

    @torch.inference_mode()
    def admit(self, requests: Sequence[tuple[int, Sequence[int], Tensor]]) -> None:
        """Adds requests, each its number and its first slots: the token after each, and its target features
        [R, A, D]; there may be none."""
        if not requests:
            return
        numbers, tokens, aux = zip(*requests, strict=True)
        cache = DraftCache(self.draft.config, self.draft.device, self.draft.dtype, len(requests))
        if any(tokens):
            self._take(cache, tokens, aux, 0)
        if self.cache is None:
            self.cache = cache
        else:
            self.cache.append([cache])
        self.numbers += numbers
        nothing = self.drafted_BN.new_full((len(requests), self.drafted_BN.shape[1]), -1)
        self.drafted_BN = torch.cat([self.drafted_BN, nothing])

    @torch.inference_mode()
    def dismiss(self, rooms: Sequence[int]) -> None:
        """Keeps the requests of these rooms alone."""
        if rooms:
            self.cache.select(rooms)
        else:
            self.cache = None
        self.numbers = [self.numbers[b] for b in rooms]
        self.drafted_BN = self.drafted_BN[list(rooms)]

    def extend_cache(
        self, tokens: Sequence[Sequence[int]], aux: Sequence[Tensor], paths: Sequence[Sequence[int]], room: int
    ) -> tuple[Tensor, Tensor]:
        """Adds each request's R new slots to the cache, with room for some more to be drafted; or, unstable, what was
        drafted of the accepted `paths`. Returns the last ones' tokens, int64 [B], and outputs [B, E]."""
        if not self.stable:
            drafted = [d[list(path[1:])].tolist() for d, path in zip(self.drafted_BN.cpu(), paths, strict=True)]
            kept = [list(itertools.takewhile(lambda slot: slot >= 0, slots)) for slots in drafted]
            self.cache.keep(kept)
            tokens = [t[len(k) :] for t, k in zip(tokens, kept, strict=True)]
            aux = [a[len(k) :] for a, k in zip(aux, kept, strict=True)]
        return self._take(self.cache, tokens, aux, room)

    def _take(
        self, cache: DraftCache, tokens: Sequence[Sequence[int]], aux: Sequence[Tensor], room: int
    ) -> tuple[Tensor, Tensor]:
        draft, counts = self.draft, [len(t) for t in tokens]
        B, most = len(counts), max(counts)
        rows = torch.tensor([[*t, *[0] * (most - len(t))] for t in tokens])
        last = torch.tensor(counts)[:, None].clamp_min(1) - 1  # where there are none, what comes out is not looked at
        token_BR, last_B1 = to_device([rows, last], draft.device)
        aux = [a.to(draft.device, draft.dtype) for a in aux]
        aux_MAD = aux[0] if B == 1 else pad_sequence(aux, batch_first=True).flatten(0, 1)
        cache.reserve(most + room)
        slot_BR = cache.open(most, last_B1)
        asked = (last_B1 + torch.arange(0, B * most, most, device=draft.device)[:, None]).flatten()
        out = draft.step(token_BR.flatten(), draft.fuse(aux_MAD), slot_BR.flatten(), cache.attend, rows=asked)
        cache.set_lengths([n + r for n, r in zip(cache.lengths, counts, strict=True)])
        return token_BR.gather(1, last_B1)[:, 0], out


class ChainProposer(Drafter):
    """Drafts chains: EAGLE-3's linear drafting with a stable draft cache.

    With `confidence` above 0 it drafts on only while the draft's own probability of the chain so far is at least
    that, up to `depth`. The token that brings it below is kept: whether a place is drafted depends on what stands
    before it alone, so that verification stays lossless. Each step then waits for the device.
    """

    def __init__(
        self, draft: Draft, depth: int, sampling: Sampling, confidence: float = 0.0, *, stable: bool = True
    ):  # fmt: skip
        super().__init__(draft, stable)
        self.depth, self.sampling, self.confidence = depth, sampling, confidence

    @torch.inference_mode()
    def propose(
        self, tokens: Sequence[Sequence[int]], aux: Sequence[Tensor], paths: Sequence[Sequence[int]] = ()
    ) -> Tree:
        """Takes in each request's R new slots (the token after each, and its target features [R, A, D]) and drafts on
        from the last. `paths` are what was accepted of the last trees: their nodes from the root on.

        The slots' keys stay in the cache; those of the drafted steps are forgotten.
        """
        draft, cache = self.draft, self.cache
        root_B, out = self.extend_cache(tokens, aux, paths, self.depth)
        lengths, chosen = cache.lengths, [root_B]
        qs: list[list[Tensor]] = [[] for _ in lengths]
        chance_B = torch.ones(len(lengths), device=draft.device)
        count_B = [0] * len(lengths)  # nodes of the chains that have ended
        for k in range(self.depth):
            fed_back, normed = draft.read(out)
            logits_BW = draft.logits(normed)
            choice_B = self._choose(logits_BW, [n + 1 + k for n in lengths], qs)
            chosen.append(draft.to_target(choice_B))
            if self.confidence:
                chance_B = chance_B * logits_BW.softmax(-1).gather(1, choice_B[:, None])[:, 0]
                ended = [chance < self.confidence for chance in chance_B.tolist()]
                count_B = [n or (k + 2) * over for n, over in zip(count_B, ended, strict=True)]
            if k + 1 == self.depth or all(count_B):
                break
            slot_B1 = cache.open(1)
            out = draft.step(chosen[-1], fed_back, slot_B1.flatten(), cache.attend)
            cache.scratch += 1
        cache.scratch = 0
        token_BN = torch.stack(chosen, dim=1)
        N = token_BN.shape[1]
        count_B = [n or N for n in count_B]
        self.drafted_BN = torch.tensor([[-1, *range(n - 2), *[-1] * (N - n + 1)] for n in count_B])
        drawn = [torch.stack(q[: n - 1]) for q, n in zip(qs, count_B, strict=True)] if self.sampling.draws else None
        return Tree(token_BN, None, N - 1, count_B, drawn)

    def _choose(self, logits_BW: Tensor, positions: Sequence[int], qs: list[list[Tensor]]) -> Tensor:
        """The next draft ids, int64 [B]; where they are drawn, their distributions are added to `qs`."""
        if not self.sampling.draws:
            return logits_BW.argmax(-1)
        drawn = []
        for number, logits_W, position, q in zip(self.numbers, logits_BW, positions, qs, strict=True):
            scores = logits_W.double() / self.sampling.temperature
            q.append(scores.softmax(-1))
            drawn.append(gumbel_argmax(scores, (self.sampling.seed, number, position, DRAFT)))
        return torch.tensor(drawn, device=logits_BW.device)


def best_of(
    draft: Draft, root_B: Tensor, scores: Sequence[Tensor], tokens: Sequence[Tensor], parents: Sequence[Tensor],
    nodes: int, levels: int,
) -> tuple[Tree, Tensor]:  # fmt: skip
    """The trees of the best `nodes` - 1 of all that was scored, and their places there, int64 [B, N] (the root's -1).

    Every level's scores, draft ids and parents (places among all, -1 the root) come as [B, P]. Of equals the earlier
    level and place goes first, so that parents stand before their children. Nothing waits for the device.
    """
    score_BP, token_BP, parent_BP = (torch.cat(list(x), dim=1) for x in (scores, tokens, parents))
    order = score_BP.sort(dim=1, descending=True, stable=True).indices
    best = order[:, : nodes - 1].sort(dim=1).values
    node = torch.zeros_like(order)
    node.scatter_(1, best, torch.arange(1, best.shape[1] + 1, device=best.device).expand_as(best))
    none = best.new_full((best.shape[0], 1), -1)
    parent = parent_BP.gather(1, best)
    parent = torch.where(parent < 0, 0, node.gather(1, parent.clamp_min(0)))
    token_BN = torch.cat([root_B[:, None], draft.to_target(token_BP.gather(1, best))], dim=1)
    return Tree(token_BN, torch.cat([none, parent], dim=1), levels), torch.cat([none, best], dim=1)


class TreeProposer(Drafter):
    """Drafts EAGLE-2's dynamic trees (Li et al. 2024, arXiv:2406.16858, section 4).

    The first pass scores the root's `width` likeliest children; each further pass, up to `depth` in all, takes the
    `width` nodes of the last level that are likeliest by cumulative probability and scores as many children of each.
    Of all that were scored, the best `nodes` - 1 make the tree. Nothing waits for the device.
    """

    def __init__(self, draft: Draft, depth: int, nodes: int, width: int, *, stable: bool = True):
        super().__init__(draft, stable)
        self.depth, self.nodes, self.width = depth, nodes, min(width, draft.config.draft_vocab_size)

    @torch.inference_mode()
    def propose(
        self, tokens: Sequence[Sequence[int]], aux: Sequence[Tensor], paths: Sequence[Sequence[int]] = ()
    ) -> Tree:
        """As `ChainProposer.propose`."""
        draft, cache, w = self.draft, self.cache, self.width
        root_B, out = self.extend_cache(tokens, aux, paths, (self.depth - 1) * w)
        B, device = root_B.numel(), draft.device
        fed_back, score, token = self._children(out, torch.zeros(B, 1, device=device))
        scored, drawn, parents = [score], [token], [token.new_full((B, w), -1)]
        # the front: its places among all that were scored and within the last level, its parents within the last front
        kept = front = torch.arange(w, device=device).expand(B, w)
        above = torch.zeros_like(front)
        passed: list[Tensor] = []  # those that were drafted on from, in the order of their slots
        seen = torch.zeros(B, w, 0, dtype=torch.bool, device=device)  # which drafted slots a node sees
        own = torch.eye(w, dtype=torch.bool, device=device).expand(B, w, w)
        for level in range(1, self.depth):
            seen = torch.cat([_rows(seen, above), own], dim=2)
            cache.open(w, seen_BSJ=seen)
            position = (cache.length_B - 1 + level)[:, None].expand(B, w)
            token = draft.to_target(drawn[-1].gather(1, front))
            hidden = _rows(fed_back.unflatten(0, (B, -1)), above)
            out = draft.step(token.flatten(), hidden.flatten(0, 1), position.flatten(), cache.attend)
            cache.scratch += w
            passed.append(kept)
            fed_back, score, token = self._children(out, scored[-1].gather(1, front))
            parents.append(kept.repeat_interleave(w, dim=1))
            before = sum(s.shape[1] for s in scored)
            scored.append(score)
            drawn.append(token)
            front = score.topk(w).indices
            kept, above = before + front, front // w
        cache.scratch = 0
        tree, place_BN = best_of(draft, root_B, scored, drawn, parents, self.nodes, self.depth)
        slot_BP = torch.full((B, sum(s.shape[1] for s in scored) + 1), -1, device=device)  # the last is the root's
        if passed:
            slots = torch.arange(len(passed) * w, device=device).expand(B, -1)
            slot_BP.scatter_(1, torch.cat(passed, dim=1), slots)
        self.drafted_BN = slot_BP.gather(1, place_BN % slot_BP.shape[1])
        return tree

    def _children(self, out_ME: Tensor, score_BM: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """What is fed back of B x M nodes [.., E], and of each one's likeliest children, one parent's after the other,
        scores float32 and draft ids [B, M width]."""
        fed_back, normed = self.draft.read(out_ME)
        logp, token = self.draft.logits(normed).float().log_softmax(-1).topk(self.width)
        score = score_BM.flatten()[:, None] + logp
        return fed_back, *(x.reshape(score_BM.shape[0], -1) for x in (score, token))


def _rows(x_BMJ: Tensor, at_BS: Tensor) -> Tensor:
    """Of each request's rows those asked for, [B, S, J]."""
    return x_BMJ.gather(1, at_BS[..., None].expand(-1, -1, x_BMJ.shape[2]))


def checked_shape(draft: Draft, shape: TreeShape) -> TreeShape:
    """Raises ValueError for a tree that the draft has not words enough for."""
    if max(shape.ranks) >= draft.config.draft_vocab_size:
        raise ValueError(f"the tree has a child of rank {max(shape.ranks)}, beyond the draft's vocabulary")
    return shape


@dataclass(frozen=True)
class _Pass:
    """A pass of a fixed tree, its indices on the device: the F nodes it drafts on from, the places of their parents
    in the pass before and what they see of the nodes drafted on from so far [F, J]; and the nodes it gives, their
    parents' places in it, and their ranks, at most `most` - 1. Nothing is above the first pass, which is the root's."""

    front: Tensor
    above: Tensor
    seen_FJ: Tensor
    nodes: Tensor
    parent: Tensor
    rank: Tensor
    most: int


def _passes(shape: TreeShape, device: torch.device) -> list[_Pass]:
    parents, ranks, levels = shape.parents, shape.ranks, shape.levels()
    paths: list[set[int]] = []
    for n, parent in enumerate(parents):
        paths.append({n} | (paths[parent] if n else set()))
    passes, before, drafted = [], [-1], []
    for level in levels[1:]:
        front = sorted({parents[n] for n in level})
        drafted += front if passes else []  # the root's slot is none of the scratch
        made = [front, [before.index(parents[n]) for n in front], [[m in paths[n] for m in drafted] for n in front]]
        made += [level, [front.index(parents[n]) for n in level], [ranks[n] for n in level]]
        passes.append(_Pass(*(torch.tensor(x, device=device) for x in made), max(ranks[n] for n in level) + 1))
        before = front
    return passes


class FixedTreeProposer(Drafter):
    """Drafts trees of a given shape, as EAGLE-1 does (Li et al. 2024, arXiv:2401.15077, section 3.1): a child of rank
    r is its parent's r-th likeliest token. Nothing waits for the device."""

    def __init__(self, draft: Draft, shape: TreeShape, *, stable: bool = True):
        super().__init__(draft, stable)
        self.passes = _passes(checked_shape(draft, shape), draft.device)
        self.parent_N = torch.tensor(shape.parents, device=draft.device)
        expanded = [n for p in self.passes[1:] for n in p.front.tolist()]  # they have slots in the cache, in this order
        self.slot_N = torch.full((self.parent_N.numel(),), -1)
        self.slot_N[expanded] = torch.arange(len(expanded))
        self.room = len(expanded)

    @torch.inference_mode()
    def propose(
        self, tokens: Sequence[Sequence[int]], aux: Sequence[Tensor], paths: Sequence[Sequence[int]] = ()
    ) -> Tree:
        """As `ChainProposer.propose`."""
        draft, cache = self.draft, self.cache
        root_B, out = self.extend_cache(tokens, aux, paths, self.room)
        B = root_B.numel()
        token_BN = root_B[:, None].repeat(1, self.parent_N.numel())
        fed_back, normed = draft.read(out)
        for depth, p in enumerate(self.passes):
            if depth:
                F = p.front.numel()
                cache.open(F, seen_BSJ=p.seen_FJ.expand(B, -1, -1))
                position = (cache.length_B - 1 + depth)[:, None].expand(B, F)
                hidden = fed_back.unflatten(0, (B, -1))[:, p.above]
                out = draft.step(
                    token_BN[:, p.front].flatten(), hidden.flatten(0, 1), position.flatten(), cache.attend
                )  # fmt: skip
                fed_back, normed = draft.read(out)
                cache.scratch += F
            likeliest = draft.logits(normed).topk(p.most).indices.unflatten(0, (B, -1))
            token_BN[:, p.nodes] = draft.to_target(likeliest[:, p.parent, p.rank])
        cache.scratch = 0
        self.drafted_BN = self.slot_N.expand(B, -1)
        return Tree(token_BN, self.parent_N.expand(B, -1), len(self.passes))
