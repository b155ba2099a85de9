"""The data types shared by the packages, and the legend of axis names.

The suffix of a tensor's name lists its axes: `aux_TAD` has shape `[T, A, D]`.

    T tokens of a packed row    S live slots           K draft depth = TTT steps   A captured target layers
    D target hidden size        E draft hidden size    V target vocabulary         W draft vocabulary
    H query heads               G key-value heads      d head dimension            L cache length
    N nodes of a draft tree, including the root         B requests in a batch
    R accepted tokens per request (batch maximum)       M rows of all requests, concatenated

TTT is EAGLE-3's training-time test (arXiv:2503.01840): the draft is trained over K steps, and reads its own hidden
states from the second step on, as in decoding. A slot is a token position of a packed row; `Packed.live`
says at which slots the draft is trained.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from numbers import Integral, Real
from typing import Any

import torch
from torch import Tensor


def check_type(name: str, value: Any, kind: Any, expected: str) -> None:
    """Raises TypeError if `value` is not an instance of `kind`; `expected` describes `kind` in the message."""
    if not isinstance(value, kind):
        raise TypeError(f"{name} must be {expected}, not a value of type {type(value).__name__}")


LEAST_TEMPERATURE = 1e-6  # the least temperature above 0; float32 scores divided by less become infinite


@dataclass(frozen=True)
class Packed:
    """A training row of complete documents, padded at the end with filler; all tensors int32 of shape [T].

    `position_T` restarts at 0 in each document. `doc_T` is the index of the document. `span_T` is the id of the
    assistant span, distinct within the row, or -1. Filler consists of short documents with negative indices and spans
    of -1: its slots are never live, and the target does not run on it. `sources` are the indices of the row's documents
    in the training set, for features that are stored by document; empty if unknown.
    """

    token_T: Tensor
    span_T: Tensor
    position_T: Tensor
    doc_T: Tensor
    sources: tuple[int, ...] = ()

    def live(self, steps: int) -> list[Tensor]:
        """The live slots of each of `steps` TTT steps: ascending int64 tensors, each a subset of the previous one.

        Slot t is live at step k if tokens x_{t+1} .. x_{t+2+k} belong to the same span, in the document of t: a decoder
        could then have drafted x_{t+2+k} at its step k. Spans are contiguous, so only the first and last are compared.
        """
        n = self.token_T.numel()
        first_ok = (self.span_T[1:] >= 0) & (self.doc_T[1:] == self.doc_T[:-1])  # of x_{t+1}, for t = 0 .. n-2
        live = []
        for k in range(steps):
            last = self.span_T[2 + k :]  # span of x_{t+2+k} for t = 0 .. n-3-k
            m = max(n - 2 - k, 0)
            live.append((first_ok[:m] & (self.span_T[1 : 1 + m] == last)).nonzero().squeeze(-1))
        return live

    def documents(self) -> list[tuple[int, int]]:
        """The [start, end) token ranges of all documents in the row, including the filler."""
        cuts = (self.doc_T[1:] != self.doc_T[:-1]).nonzero().squeeze(-1) + 1
        edges = [0, *cuts.tolist(), self.doc_T.numel()]
        return list(itertools.pairwise(edges))

    def without_filler(self) -> list[tuple[int, int]]:
        """The [start, end) token ranges of all documents except the filler."""
        return [(start, end) for start, end in self.documents() if self.doc_T[start] >= 0]


def group_documents(documents: Sequence[tuple[int, int]], width: int) -> list[tuple[int, int]]:
    """Merges adjacent [start, end) documents into ranges of at most `width` tokens.

    A document longer than `width` is a range of its own.
    """
    groups: list[tuple[int, int]] = []
    for start, end in documents:
        if groups and groups[-1][1] == start and end - groups[-1][0] <= width:
            groups[-1] = (groups[-1][0], end)
        else:
            groups.append((start, end))
    return groups


@dataclass(frozen=True)
class Features:
    """The target's hidden states that a draft reads: captured layers [T, A, D], and the final hidden states [T, D].

    The final hidden states are the output of the target's last norm, the input of the target's head.
    """

    aux_TAD: Tensor
    last_TD: Tensor


@dataclass(frozen=True)
class Prompt:
    """What a target reads before it answers. `ids`: the token ids.

    Input that is not a token, such as an image, would be another field, which only readers and targets know.
    """

    ids: Sequence[int]

    def __len__(self) -> int:
        return len(self.ids)

    def part(self, first: int, end: int) -> Prompt:
        """The tokens from `first` to `end`."""
        return Prompt(self.ids[first:end])


@dataclass(frozen=True)
class Sampling:
    """Sampling parameters. The defaults decode greedily.

    `temperature` 0 is greedy decoding, `top_k` 0 and `top_p` 1 keep all tokens, `repetition_penalty` 1 is none.
    `draft` selects how draft tokens are drawn at temperatures above 0: "coupled" with the random numbers of the
    target's own draws (`ops.sampling.coupled`), and the output is then token for token that of decoding without a
    draft at the same seed; "sample" with numbers of their own, and accepts with probability min(1, p/q), which keeps
    the target's distribution only, and accepts more. `processors` are transformers LogitsProcessor objects, called as
    in `generate`: with the token ids of the whole prefix, before the temperature is applied. Raises TypeError for
    values of the wrong type and ValueError for values out of range.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    repetition_penalty: float = 1.0
    seed: int = 0
    draft: str = "coupled"
    processors: Sequence[Any] = ()

    def __post_init__(self) -> None:
        for name in ("temperature", "top_p", "repetition_penalty"):
            check_type(name, getattr(self, name), Real, "a number")
        check_type("top_k", self.top_k, Integral, "an integer")
        check_type("seed", self.seed, Integral, "an integer")
        check_type("processors", self.processors, Sequence, "a list of LogitsProcessor objects")
        if not 0 <= self.temperature < math.inf:
            raise ValueError(
                f"temperature {self.temperature} must be a finite number of at least 0; use 0 for greedy decoding"
            )
        if 0 < self.temperature < LEAST_TEMPERATURE:
            raise ValueError(
                f"temperature {self.temperature} is too small to divide by; use 0 for greedy decoding, or at least "
                f"{LEAST_TEMPERATURE}"
            )
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p {self.top_p} is outside (0, 1]")
        if self.top_k < 0:
            raise ValueError(f"top_k {self.top_k} is negative; use 0 for no limit")
        if not 0 < self.repetition_penalty < math.inf:
            raise ValueError(
                f"repetition_penalty {self.repetition_penalty} must be a positive number; use 1 for no penalty"
            )
        if self.draft not in ("coupled", "sample"):
            raise ValueError(f"draft sampling {self.draft!r} is neither 'coupled' nor 'sample'")

    @property
    def greedy(self) -> bool:
        """Whether decoding is greedy: the target's argmax is always chosen."""
        return self.temperature == 0

    @property
    def samples_draft(self) -> bool:
        """Whether draft tokens are drawn on their own, and accepted by rejection sampling."""
        return self.draft == "sample" and not self.greedy


@dataclass(frozen=True)
class Tree:
    """The draft trees of B requests.

    `token_BN` are target token ids, int64 [B, N]. Node 0 is the root, which is the last committed token.
    `parent_BN` is the index of each node's parent, int64 [B, N]; parents precede their children, and the root's parent
    is -1. None means that every tree is a chain. Siblings have different tokens. `levels` is an upper bound of the
    longest path from the root. `count_B` is the number of nodes of each request, int64 [B], if they differ; nodes
    beyond it are padding, and never accepted. `q_BKW` are the distributions that the K tokens below the root were drawn
    from, over the draft's vocabulary, float64 [B, K, W], if a chain was sampled.
    """

    token_BN: Tensor
    parent_BN: Tensor | None
    levels: int
    count_B: Tensor | None = None
    q_BKW: Tensor | None = None

    @classmethod
    def chain(cls, token_BN: Tensor) -> Tree:
        """The trees of chains: each request's tokens in order."""
        return cls(token_BN, None, token_BN.shape[1] - 1)

    def depths(self) -> Tensor:
        """The level of each node below the root, int64 [B, N]."""
        if self.parent_BN is None:
            return torch.arange(self.token_BN.shape[1], device=self.token_BN.device).expand_as(self.token_BN)
        return self.ancestors().sum(-1) - 1

    def ancestors(self) -> Tensor:
        """Bool [B, N, N]: entry [b, n, m] is True if node m is on the path from the root to node n, n included."""
        return self._ancestors

    @functools.cached_property
    def _ancestors(self) -> Tensor:
        B, n = self.token_BN.shape
        if self.parent_BN is None:
            return torch.ones(n, n, dtype=torch.bool, device=self.token_BN.device).tril().expand(B, n, n)
        # repeated squaring of the parent matrix; the root counts as its own parent, where paths end
        up = torch.nn.functional.one_hot(self.parent_BN.clamp_min(0), n).float()
        up = (up + torch.eye(n, device=up.device)).clamp_max(1)
        for _ in range(max(self.levels - 1, 0).bit_length()):
            up = (up @ up).clamp_max(1)
        return up.bool()

    def to(self, device: torch.device) -> Tree:
        """The same trees on another device."""
        if device == self.token_BN.device:
            return self
        values = {name: getattr(self, name) for name in ("token_BN", "parent_BN", "count_B", "q_BKW")}
        return replace(self, **{name: x.to(device) for name, x in values.items() if x is not None})


@dataclass(frozen=True)
class Verdict:
    """The result of verifying the trees of B requests, with R = `Tree.levels` + 1; all tensors int64.

    `path_BR` are the accepted nodes from the root on, padded with the last accepted node. `count_B` is the number of
    accepted nodes, from 1 to R. `token_BR` are `count_B` tokens to commit, padded with zeros: the tokens of accepted
    nodes below the root, and one token that the target chose (the bonus token, or the correction after a rejection).
    """

    path_BR: Tensor
    count_B: Tensor
    token_BR: Tensor

    @classmethod
    def of(cls, path_BR: Tensor, count_B: Tensor, token_BR: Tensor) -> Verdict:
        """A verdict of tensors with any values as padding; in `path_BR`, the padding must be indices of nodes."""
        valid_BR = torch.arange(path_BR.shape[1], device=path_BR.device) < count_B[:, None]
        path_BR = torch.where(valid_BR, path_BR, path_BR.gather(1, count_B[:, None] - 1))
        return cls(path_BR, count_B, torch.where(valid_BR, token_BR, 0))

    def to_lists(self) -> list[tuple[list[int], list[int]]]:
        """The path and the tokens of each request as Python lists, without padding. Synchronizes the device once."""
        R = self.path_BR.shape[1]
        rows = torch.cat([self.path_BR, self.token_BR, self.count_B[:, None]], dim=1).tolist()
        return [(row[: row[-1]], row[R : R + row[-1]]) for row in rows]


@dataclass(frozen=True)
class TreeShape:
    """A static draft tree, as in EAGLE-1 and Medusa.

    `parents` are the indices of the nodes' parents. `ranks` are the nodes' ranks among the draft's most likely tokens
    after the parent, from 0. Node 0 is the root, with parent -1 and rank 0. Raises ValueError if a parent does not
    precede its child, or if two siblings have the same rank.
    """

    parents: tuple[int, ...]
    ranks: tuple[int, ...]

    def __post_init__(self) -> None:
        if len(self.parents) != len(self.ranks) or len(self.parents) < 2:
            raise ValueError("a tree needs one rank for each parent, and at least one node besides the root")
        if (self.parents[0], self.ranks[0]) != (-1, 0):
            raise ValueError("the first node must be the root, with parent -1 and rank 0")
        if any(not 0 <= p < n for n, p in enumerate(self.parents[1:], 1)) or min(self.ranks) < 0:
            raise ValueError("a node's parent must precede it, and its rank must be 0 or more")
        if len(set(zip(self.parents, self.ranks, strict=True))) < len(self.parents):
            raise ValueError("two children of one node have the same rank")

    @classmethod
    def from_paths(cls, paths: Sequence[Sequence[int]]) -> TreeShape:
        """The tree with a node for each path of ranks from the root, the format of EAGLE-1's and Medusa's code.

        For example [[0], [1], [0, 0]]. Raises ValueError for an empty path (the root, which every tree has), for a
        duplicate path and for a node without its parent.
        """
        if not all(map(len, paths)):
            raise ValueError("the tree has an empty path; the root is in every tree and is not listed")
        known = {(): 0} | {tuple(p): i for i, p in enumerate(sorted(paths, key=lambda p: (len(p), list(p))), start=1)}
        orphan = next((p for p in known if p and p[:-1] not in known), None)
        if orphan is not None:
            raise ValueError(f"the tree has a node at {list(orphan)} but not its parent")
        if len(known) <= len(paths):
            raise ValueError("the tree has a duplicate path")
        nodes = [p for p in known if p]
        return cls((-1, *(known[p[:-1]] for p in nodes)), (0, *(p[-1] for p in nodes)))

    def levels(self) -> list[list[int]]:
        """The node indices of each level, starting with [0], the root."""
        level = [0]
        for p in self.parents[1:]:
            level.append(level[p] + 1)
        return [[n for n, depth in enumerate(level) if depth == l] for l in range(max(level) + 1)]


@dataclass(slots=True)  # slots make the creation of a `Round`, done in each round, faster
class Round:
    """One round of drafting and verification.

    `drafted` is the length of the longest drafted path. `accepted` is the number of accepted draft tokens, without the
    target's own token. `t_draft`, which is 0 where nothing is drafted, and `t_verify` are seconds.
    """

    drafted: int
    accepted: int
    t_draft: float = 0.0
    t_verify: float = 0.0


@dataclass
class Trace:
    """The statistics of one generation: its rounds, and the seconds of the prefill and of the whole generation."""

    rounds: list[Round] = field(default_factory=list)
    t_prefill: float = 0.0
    t_total: float = 0.0

    @property
    def tau(self) -> float:
        """τ of this generation: tokens committed per round, the target's own token included; 0 without rounds."""
        return sum(r.accepted + 1 for r in self.rounds) / max(len(self.rounds), 1)

    def __repr__(self) -> str:
        rounds = "1 round" if len(self.rounds) == 1 else f"{len(self.rounds)} rounds"
        return f"<Trace of {rounds}, τ {self.tau:.2f}, {self.t_total:.2f} s>"
