"""P-EAGLE's drafting (Hui et al. 2026, arXiv:2602.01469): what a draft says of several places in one pass, as chains
and as trees."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch
from torch import Tensor

from fledge.decode.propose import Drafter, best_of, checked_shape
from fledge.kernels.sampling import DRAFT, gumbel_argmax
from fledge.kernels.transfer import to_device
from fledge.models.draft import Draft
from fledge.types import Sampling, Tree, TreeShape


class ParallelDrafter(Drafter):
    """P-EAGLE's one pass: after the new slots go as many as are to be drafted, but one, in which a mask stands for what
    is not known yet. The words of a chain, or of a tree, are chosen from what all of them say at once."""

    def __init__(self, draft: Draft, depth: int):
        super().__init__(draft)
        self.depth = depth

    @torch.inference_mode()
    def pass_over(self, tokens: Sequence[Sequence[int]], aux: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        """Takes in each request's R new slots. Returns the last ones' tokens, int64 [B], and logits [B, K, W]."""
        draft, cache, K = self.draft, self.cache, self.depth
        counts = [len(t) for t in tokens]
        B, rows = len(counts), sum(counts)
        n = max(counts) + K - 1
        mask_token, mask_state = draft.masked()
        known = [torch.arange(rows)[a - r : a] for a, r in zip(itertools.accumulate(counts), counts, strict=True)]
        # which row of states each slot reads: its own, or the mask's, which stands after all of them
        read_Bn = torch.stack([torch.cat([k, k.new_full((n - k.numel(),), rows)]) for k in known])
        asked_BK = torch.tensor(counts)[:, None] - 1 + torch.arange(K)
        flat = torch.tensor([t for mine in tokens for t in mine])
        read_Bn, asked_BK, flat = to_device([read_Bn, asked_BK, flat], draft.device)
        word = torch.cat([flat, mask_token])[read_Bn]
        fused = draft.fuse(torch.cat([a.to(draft.device, draft.dtype) for a in aux]))
        state = torch.cat([fused, mask_state])[read_Bn]
        cache.reserve(n)
        slot_Bn = cache.open(n, asked_BK)
        asked = (asked_BK + torch.arange(0, B * n, n, device=draft.device)[:, None]).flatten()
        out = draft.step(word.flatten(), state.flatten(0, 1), slot_Bn.flatten(), cache.attend, rows=asked)
        cache.set_lengths([length + r for length, r in zip(cache.lengths, counts, strict=True)])
        return word.gather(1, asked_BK[:, :1])[:, 0], draft.logits(draft.read(out)[1]).unflatten(0, (B, K))


class ParallelProposer(ParallelDrafter):
    """Chains from one pass. With `confidence` above 0 a chain ends where the product of its words' probabilities falls
    below it."""

    def __init__(self, draft: Draft, depth: int, sampling: Sampling, confidence: float = 0.0):
        super().__init__(draft, depth)
        self.sampling, self.confidence = sampling, confidence

    @torch.inference_mode()
    def propose(
        self, tokens: Sequence[Sequence[int]], aux: Sequence[Tensor], paths: Sequence[Sequence[int]] = ()
    ) -> Tree:
        """As `ChainProposer.propose`."""
        root_B, logits_BKW = self.pass_over(tokens, aux)
        q_BKW = None
        if self.sampling.draws:
            scores = logits_BKW.double() / self.sampling.temperature
            drawn = [
                [gumbel_argmax(row, (self.sampling.seed, number, length + 1 + k, DRAFT)) for k, row in enumerate(mine)]
                for number, length, mine in zip(self.numbers, self.cache.lengths, scores, strict=True)
            ]
            choice_BK, q_BKW = torch.tensor(drawn, device=root_B.device), list(scores.softmax(-1))
        else:
            choice_BK = logits_BKW.argmax(-1)
        count_B = [self.depth + 1] * len(self.numbers)
        if self.confidence:
            chance = logits_BKW.softmax(-1).gather(2, choice_BK[..., None])[..., 0].cumprod(-1)
            sure = (chance[:, :-1] >= self.confidence).sum(-1).tolist()  # each of these is drafted on from
            count_B = [n + 2 for n in sure]
            q_BKW = q_BKW and [q[: n - 1] for q, n in zip(q_BKW, count_B, strict=True)]
        token_BN = torch.cat([root_B[:, None], self.draft.to_target(choice_BK)], dim=1)
        return Tree(token_BN, None, self.depth, count_B, q_BKW)


class ParallelTreeProposer(ParallelDrafter):
    """Trees from one pass: EAGLE-2's, but that all nodes of a level have the same likeliest children, since the pass
    knew of no choice between them."""

    def __init__(self, draft: Draft, depth: int, nodes: int, width: int):
        super().__init__(draft, depth)
        self.nodes, self.width = nodes, min(width, draft.config.draft_vocab_size)

    @torch.inference_mode()
    def propose(
        self, tokens: Sequence[Sequence[int]], aux: Sequence[Tensor], paths: Sequence[Sequence[int]] = ()
    ) -> Tree:
        """As `ChainProposer.propose`."""
        root_B, logits_BKW = self.pass_over(tokens, aux)
        B, w = root_B.numel(), self.width
        logp_BKw, token_BKw = logits_BKW.float().log_softmax(-1).topk(w)
        scored, drawn = [logp_BKw[:, 0]], [token_BKw[:, 0]]
        parents = [token_BKw.new_full((B, w), -1)]
        for level in range(1, self.depth):
            score, front = scored[-1].topk(w)
            before = sum(s.shape[1] for s in scored[:-1])
            parents.append((before + front).repeat_interleave(w, dim=1))
            scored.append((score[..., None] + logp_BKw[:, level, None]).flatten(1))
            drawn.append(token_BKw[:, level].repeat(1, w))
        return best_of(self.draft, root_B, scored, drawn, parents, self.nodes, self.depth)[0]


class ParallelFixedProposer(ParallelDrafter):
    """Trees of a given shape from one pass: a child of rank r is its level's r-th likeliest token."""

    def __init__(self, draft: Draft, shape: TreeShape):
        super().__init__(draft, len(shape.levels()) - 1)
        self.shape = checked_shape(draft, shape)
        level = {n: depth for depth, nodes in enumerate(shape.levels()) for n in nodes}
        made = [level[n] - 1 for n in range(1, len(level))], shape.ranks[1:], shape.parents
        self.depth_N, self.rank_N, self.parent_N = (torch.tensor(x, device=draft.device) for x in made)

    @torch.inference_mode()
    def propose(
        self, tokens: Sequence[Sequence[int]], aux: Sequence[Tensor], paths: Sequence[Sequence[int]] = ()
    ) -> Tree:
        """As `ChainProposer.propose`."""
        root_B, logits_BKW = self.pass_over(tokens, aux)
        chosen = logits_BKW.topk(max(self.shape.ranks) + 1).indices[:, self.depth_N, self.rank_N]
        token_BN = torch.cat([root_B[:, None], self.draft.to_target(chosen)], dim=1)
        return Tree(token_BN, self.parent_N.expand_as(token_BN), self.depth)
