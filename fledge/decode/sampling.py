"""The sampling options of the requests of a batch as tensors, and the processing of logits by them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.utils.rnn import pad_sequence

from fledge.ops.device import at_least_float32, to_device
from fledge.ops.sampling import filter_top, filtered_argmax, gumbel_argmax, hash_keys
from fledge.types import Sampling, Tree, Verdict

LARGEST = 2**63 - 1  # int64


@dataclass(frozen=True)
class BatchSampling:
    """The sampling options of B requests, which may differ.

    The tensors are on one device: `temperature_B` (0 is greedy), `top_p_B` (1 keeps all) and `repetition_penalty_B`
    (1 is none) are float64, `top_k_B` (0 keeps all), `seed_B` and `request_B` int64. Greedy requests have no filters.
    The flags decide which code runs; the host knows the flags without asking the device. `samples` and `greedy`: some
    requests sample, some are greedy. `filters`: some have top-k or top-p. `penalizes`: some have a repetition penalty.
    `samples_draft`: drafted tokens of the whole batch are drawn independently of the target's draws; the tokens of a
    greedy request are then drawn from a distribution with a single token.
    """

    temperature_B: Tensor
    top_k_B: Tensor
    top_p_B: Tensor
    repetition_penalty_B: Tensor
    seed_B: Tensor
    request_B: Tensor
    samples: bool
    greedy: bool
    filters: bool
    penalizes: bool
    samples_draft: bool

    @classmethod
    def of(cls, samplings: Sequence[Sampling], requests: Sequence[int], device: torch.device | str) -> BatchSampling:
        """The options of requests with the numbers `requests`, without the logits processors."""
        top_k = [0 if s.greedy else min(int(s.top_k), LARGEST) for s in samplings]
        top_p = [1.0 if s.greedy else s.top_p for s in samplings]
        penalty = [s.repetition_penalty for s in samplings]
        host = torch.device("cpu")  # whatever the default device
        reals = torch.tensor([[s.temperature for s in samplings], top_p, penalty], dtype=torch.float64, device=host)
        seeds, numbers = ([_int64(x) for x in values] for values in ([s.seed for s in samplings], requests))
        whole = torch.tensor([top_k, seeds, numbers], dtype=torch.int64, device=host)
        temperature_B, top_p_B, repetition_penalty_B = to_device([reals], torch.device(device))[0]
        top_k_B, seed_B, request_B = to_device([whole], torch.device(device))[0]
        return cls(
            temperature_B, top_k_B, top_p_B, repetition_penalty_B, seed_B, request_B,
            samples=not all(s.greedy for s in samplings),
            greedy=any(s.greedy for s in samplings),
            filters=any(top_k) or min(top_p) < 1,
            penalizes=any(p != 1 for p in penalty),
            samples_draft=any(s.samples_draft for s in samplings),
        )  # fmt: skip

    @property
    def couples(self) -> bool:
        """Whether drafted tokens are drawn with the random numbers of the target's own draws, where requests sample."""
        return self.samples and not self.samples_draft

    @property
    def flags(self) -> tuple[bool, ...]:
        """The five flags, which decide the code that runs."""
        return self.samples, self.greedy, self.filters, self.penalizes, self.samples_draft

    def select(self, index_B: Tensor) -> BatchSampling:
        """The options of the requests with these indices (int64), with the flags of all."""
        return self._map(lambda x: x[index_B])

    def idle(self, size: int) -> BatchSampling:
        """Greedy options of `size` requests, with the same flags."""
        greedy = BatchSampling.of([Sampling()] * size, [0] * size, self.seed_B.device)
        return replace(greedy, **{f.name: getattr(self, f.name) for f in fields(self) if f.type == "bool"})

    def to(self, device: torch.device) -> BatchSampling:
        """The same options on another device."""
        return self._map(lambda x: x.to(device))

    def _map(self, change: Callable[[Tensor], Tensor]) -> BatchSampling:
        return replace(self, **{name: change(x) for name, x in vars(self).items() if isinstance(x, Tensor)})

    def keys(self, position_BX: Tensor, purpose: int) -> Tensor:
        """The states (`ops.sampling`) of each request's draws at some positions (int64), int64 [B, X]."""
        return hash_keys(self.seed_B[:, None], self.request_B[:, None], position_BX, purpose)

    def process(self, logits_BNV: Tensor, seen_BNV: Tensor | None = None) -> Tensor:
        """Scores [B, N, V] whose softmax each request samples from, in the order of transformers' generate.

        `seen_BNV` are the tokens before each node, its own included (bool; needed with `penalizes` only). Greedy
        requests are penalized alone. Computed in float32 at least; returns the logits where nothing changes them.
        """
        return self.warp(self.penalize(logits_BNV, seen_BNV))

    def penalize(self, logits_BNV: Tensor, seen_BNV: Tensor | None = None) -> Tensor:
        """The first part of `process`: the repetition penalty, as RepetitionPenaltyLogitsProcessor."""
        if not self.penalizes:
            return logits_BNV
        scores = at_least_float32(logits_BNV)
        penalty_B11 = _column(self.repetition_penalty_B, scores)
        return torch.where(seen_BNV, torch.where(scores < 0, scores * penalty_B11, scores / penalty_B11), scores)

    def warp(self, scores_BNV: Tensor) -> Tensor:
        """The second part of `process`: TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper."""
        if not self.samples:
            return scores_BNV
        scores_BNV = self.temper(at_least_float32(scores_BNV))
        return filter_top(scores_BNV, self.top_k_B, self.top_p_B) if self.filters else scores_BNV

    def temper(self, scores: Tensor) -> Tensor:
        """Scores [B, .., V] divided by the temperatures; scores of greedy requests are unchanged."""
        return scores / _column(self.temperature_B.where(self.temperature_B > 0, 1.0), scores)

    def draw(self, scores_BV: Tensor, state_B: Tensor) -> list[int]:
        """The tokens that the states draw from penalized scores on a CPU: the same as `gumbel_argmax` of `settle` of
        `warp`, without sorting the vocabulary where the filters leave few tokens."""
        scores_BV = self.temper(at_least_float32(scores_BV))
        if not self.filters:
            return gumbel_argmax(self.settle(scores_BV), state_B).tolist()
        drawn = filtered_argmax(scores_BV, self.top_k_B.tolist(), self.top_p_B.tolist(), state_B)
        if left := [b for b, token in enumerate(drawn) if token is None]:
            index_b = torch.tensor(left)
            own = self.select(index_b)
            scores_bV = own.settle(filter_top(scores_BV[index_b][:, None], own.top_k_B, own.top_p_B))[:, 0]
            for b, token in zip(left, gumbel_argmax(scores_bV, state_B[index_b]).tolist(), strict=True):
                drawn[b] = token
        return drawn

    def settle(self, scores: Tensor) -> Tensor:
        """Scores [B, .., V] to draw from; of greedy requests, 0 at the argmax and -inf elsewhere."""
        if not self.greedy:
            return scores
        certain = torch.full_like(scores, -torch.inf).scatter(-1, scores.argmax(-1, keepdim=True), 0.0)
        return torch.where(_column(self.temperature_B, scores) > 0, scores, certain)


def _int64(x: int) -> int:
    """An integer modulo 2^64, as int64."""
    return (int(x) + (1 << 63)) % (1 << 64) - (1 << 63)


def _column(x_B: Tensor, scores: Tensor) -> Tensor:
    """One value per request, to broadcast with scores [B, .., V], in their dtype."""
    return x_B.to(scores.dtype).view(-1, *[1] * (scores.dim() - 1))


def seen_tokens(prefixes: Sequence[Sequence[int]], vocabulary: int, device: torch.device) -> Tensor:
    """Which of the target's tokens each prefix has, bool [B, V]. Ids beyond the vocabulary are left out."""
    ids = pad_sequence([torch.tensor(p) for p in prefixes], batch_first=True, padding_value=vocabulary)
    seen = torch.zeros(len(prefixes), vocabulary + 1, dtype=torch.bool, device=device)
    return seen.scatter(1, to_device([ids.clamp_max(vocabulary)], seen.device)[0], True)[:, :vocabulary]


def seen_by_node(tree: Tree, seen_BV: Tensor | None) -> Tensor | None:
    """The tokens before each node and the node's own token, bool [B, N, V]: the tokens of the committed prefix
    (`seen_BV`, bool [B, V], with the root's token) and of the node's path. None if `seen_BV` is None."""
    if seen_BV is None:
        return None
    N, V = tree.token_BN.shape[1], seen_BV.shape[1]
    # nodes outside the path repeat the root's token, which is in the prefix
    path_BNN = torch.where(tree.ancestors(), tree.token_BN[:, None], tree.token_BN[:, :1, None])
    seen_BNV = F.pad(seen_BV, (0, 1))[:, None].repeat(1, N, 1)  # with a place for ids beyond the vocabulary
    return seen_BNV.scatter(2, path_BNN.clamp_max(V), True)[..., :V]


def see(seen_BV: Tensor, verdict: Verdict) -> None:
    """Adds the tokens of a verdict to `seen_BV`, in place."""
    valid_BR = torch.arange(verdict.token_BR.shape[1], device=seen_BV.device) < verdict.count_B[:, None]
    # the padding repeats the first token
    seen_BV.scatter_(1, torch.where(valid_BR, verdict.token_BR, verdict.token_BR[:, :1]), True)
