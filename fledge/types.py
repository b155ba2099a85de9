"""The objects that flow between the parts, and the legend of their shapes.

A tensor's name ends in its axes: `aux_TAD` is `[T, A, D]`.

    T tokens of a packed row    S live slots           K draft depth = TTT steps   A captured target layers
    D target hidden             E draft hidden         V target vocabulary         W draft vocabulary
    H query heads               G key-value heads      d head dimension            L cache length
    N nodes of a draft tree, its root included          B requests decoded together
    R tokens a request has accepted, the most of any    M rows of all requests, one's after the other's
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from numbers import Integral, Real
from typing import Any

import torch
from torch import Tensor


def check_type(name: str, value: Any, kind: Any, words: str) -> None:
    """Raises TypeError, in a sentence, for an argument of the wrong type."""
    if not isinstance(value, kind):
        raise TypeError(f"{name} is {words}, not a value of type {type(value).__name__}")


@dataclass(frozen=True)
class Document:
    """One conversation, text or window: `tokens` and, per token, the id of its assistant span or -1.

    Both are int32 tensors of shape [n]. Span ids are distinct within the document.
    """

    tokens: Tensor
    spans: Tensor


@dataclass(frozen=True)
class Packed:
    """A row of whole documents and a filler tail, all int32 of shape [T].

    `position_T` restarts at 0 in each document; `doc_T` numbers them; `span_T` is the id of the assistant span,
    distinct over the row, or -1. Filler is made of short documents, numbered below 0, whose spans are all -1: it is
    never live, and no target reads it.
    """

    token_T: Tensor
    span_T: Tensor
    position_T: Tensor
    doc_T: Tensor

    def live(self, steps: int) -> list[Tensor]:
        """Slots live at each of `steps` TTT steps: K ascending int64 tensors, each a subset of the one before.

        Slot t is live at step k when x_{t+1} .. x_{t+2+k} lie in one span of the document that t is in
        (SPEC: the decoder could have drafted them from here). Spans are contiguous, so their ends decide.
        """
        n = self.token_T.numel()
        starts = (self.span_T[1:] >= 0) & (self.doc_T[1:] == self.doc_T[:-1])  # slot t = 0 .. n-2, by x_{t+1}
        live = []
        for k in range(steps):
            last = self.span_T[2 + k :]  # span of x_{t+2+k} for t = 0 .. n-3-k
            m = max(n - 2 - k, 0)
            live.append((starts[:m] & (self.span_T[1 : 1 + m] == last)).nonzero().squeeze(-1))
        return live

    def documents(self) -> list[tuple[int, int]]:
        """[start, end) of every document in the row, the filler included."""
        cuts = (self.doc_T[1:] != self.doc_T[:-1]).nonzero().squeeze(-1) + 1
        edges = [0, *cuts.tolist(), self.doc_T.numel()]
        return list(itertools.pairwise(edges))

    def without_filler(self) -> list[tuple[int, int]]:
        """[start, end) of every document that a target reads: all but the filler."""
        return [(start, end) for start, end in self.documents() if self.doc_T[start] >= 0]


def group_documents(documents: Sequence[tuple[int, int]], width: int) -> list[tuple[int, int]]:
    """Joins [start, end) documents that follow one another into stretches of at most `width` tokens, or one longer
    document."""
    groups: list[tuple[int, int]] = []
    for start, end in documents:
        if groups and groups[-1][1] == start and end - groups[-1][0] <= width:
            groups[-1] = (groups[-1][0], end)
        else:
            groups.append((start, end))
    return groups


@dataclass(frozen=True)
class Features:
    """What a draft reads of its target: captured layers [T, A, D], and the final hidden state after its norm [T, D]."""

    aux_TAD: Tensor
    last_TD: Tensor


@dataclass
class Step:
    """One row's sums, divided once after they are summed over all rows and ranks.

    `loss` is Σ_k γ^k Σ_scored loss (float32 scalar); the [K] tensors count, per TTT step, live slots,
    scored slots, hits (draft argmax = teacher argmax), slots hit at every step so far, and Σ α (float32).
    `walked` is (tokens committed, rounds) of decoding the row as it stands.
    """

    loss: Tensor
    live_K: Tensor
    scored_K: Tensor
    hit_K: Tensor
    survive_K: Tensor
    accept_K: Tensor
    walked: tuple[int, int]

    def __add__(self, other: Step) -> Step:
        return Step(
            self.loss.detach() + other.loss.detach(),
            *(getattr(self, f) + getattr(other, f) for f in ("live_K", "scored_K", "hit_K", "survive_K", "accept_K")),
            walked=(self.walked[0] + other.walked[0], self.walked[1] + other.walked[1]),
        )


@dataclass(frozen=True)
class Sampling:
    """How the target chooses a token; the defaults are greedy.

    `temperature` 0 is greedy. `draft` says how a draft token is chosen where the target samples: "greedy" (its
    argmax; the output equals vanilla sampling at the same seed token for token) or "sample" (from the draft's own
    distribution at the same temperature, accepted with min(1, p/q)). `processors` are transformers LogitsProcessor
    objects, called with the ids of the whole prefix before the temperature, as `generate` calls them. Raises TypeError
    and ValueError for values of another kind or out of range.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    repetition_penalty: float = 1.0
    seed: int = 0
    draft: str = "greedy"
    processors: Sequence[Any] = ()

    def __post_init__(self) -> None:
        for name in ("temperature", "top_p", "repetition_penalty"):
            check_type(name, getattr(self, name), Real, "a number")
        check_type("top_k", self.top_k, Integral, "an integer")
        check_type("seed", self.seed, Integral, "an integer")
        check_type("processors", self.processors, Sequence, "a list of LogitsProcessor objects")
        if not 0 <= self.temperature < math.inf:
            raise ValueError(f"temperature {self.temperature} is no number of 0 or more; use 0 for greedy decoding")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p {self.top_p} is outside (0, 1]")
        if self.top_k < 0:
            raise ValueError(f"top_k {self.top_k} is negative; use 0 for no limit")
        if not 0 < self.repetition_penalty < math.inf:
            raise ValueError(f"repetition_penalty {self.repetition_penalty} must be a positive number; 1 is none")
        if self.draft not in ("greedy", "sample"):
            raise ValueError(f"draft sampling {self.draft!r} is neither 'greedy' nor 'sample'")

    @property
    def greedy(self) -> bool:
        return self.temperature == 0

    @property
    def draws(self) -> bool:
        """Whether draft tokens are drawn."""
        return self.draft == "sample" and not self.greedy


@dataclass(frozen=True)
class Tree:
    """Drafted target ids of B requests, int64 [B, N]. Node 0 is the root, the last committed token; every other node's
    parent, int64 [B, N], stands before it (the root's is -1), and siblings differ. `parent_BN` None is a chain.
    `levels` is at least the length of the longest path from the root. Where requests have fewer nodes, `count_B` says
    how many, and what is beyond them nothing reads. Chains that were drawn have their distributions, float64 [K, W]
    each."""

    token_BN: Tensor
    parent_BN: Tensor | None
    levels: int
    count_B: Sequence[int] | None = None
    q_BKW: Sequence[Tensor] | None = None

    @classmethod
    def chain(cls, token_BN: Tensor) -> Tree:
        """Each request's tokens one after the other."""
        return cls(token_BN, None, token_BN.shape[1] - 1)

    def ancestors(self) -> Tensor:
        """Which nodes stand on each node's path from the root, itself included: bool [B, N, N]."""
        B, n = self.token_BN.shape
        if self.parent_BN is None:
            return torch.ones(n, n, dtype=torch.bool, device=self.token_BN.device).tril().expand(B, n, n)
        # the root is made its own parent, so that steps up from it stay there; each product doubles their number
        up = torch.nn.functional.one_hot(self.parent_BN.clamp_min(0), n).float()
        up = (up + torch.eye(n, device=up.device)).clamp_max(1)
        for _ in range(max(self.levels - 1, 0).bit_length()):
            up = (up @ up).clamp_max(1)
        return up.bool()

    def to(self, device: torch.device) -> Tree:
        parent_BN = None if self.parent_BN is None else self.parent_BN.to(device)
        return replace(self, token_BN=self.token_BN.to(device), parent_BN=parent_BN)

    def on_host(self) -> list[tuple[list[int], list[int]]]:
        """Every request's tokens and parents; waits for the device once."""
        B, n = self.token_BN.shape
        if self.parent_BN is None:
            tokens, parents = self.token_BN.tolist(), [list(range(-1, n - 1))] * B
        else:
            tokens, parents = torch.stack([self.token_BN, self.parent_BN]).tolist()
        counts = self.count_B or [n] * B
        return [(t[:c], p[:c]) for t, p, c in zip(tokens, parents, counts, strict=True)]


@dataclass(frozen=True)
class Verdict:
    """What a verification commits to a request: the accepted nodes' `path`, the root first, and all its `tokens`: the
    accepted nodes' and after them the target's own."""

    path: Sequence[int]
    tokens: list[int]


@dataclass(frozen=True)
class TreeShape:
    """A fixed tree: every node's parent, and its rank among its siblings, the root (parent -1, rank 0) first.

    Raises ValueError where a parent does not stand before its child, or two siblings have one rank.
    """

    parents: tuple[int, ...]
    ranks: tuple[int, ...]

    def __post_init__(self) -> None:
        if len(self.parents) != len(self.ranks) or len(self.parents) < 2:
            raise ValueError("a tree needs as many ranks as parents, the root's and at least one more")
        if (self.parents[0], self.ranks[0]) != (-1, 0):
            raise ValueError("the first node is the root, whose parent is -1 and whose rank is 0")
        if any(not 0 <= p < n for n, p in enumerate(self.parents[1:], 1)) or min(self.ranks) < 0:
            raise ValueError("a node's parent stands before it, and its rank is 0 or more")
        if len(set(zip(self.parents, self.ranks, strict=True))) < len(self.parents):
            raise ValueError("two children of one node have the same rank")

    @classmethod
    def from_paths(cls, paths: Sequence[Sequence[int]]) -> TreeShape:
        """From ranks along the path to each node, as EAGLE-1's code and Medusa's write trees: [0], [1], [0, 0] .."""
        known = {(): 0} | {tuple(p): i for i, p in enumerate(sorted(paths, key=lambda p: (len(p), list(p))), start=1)}
        orphan = next((p for p in known if p and p[:-1] not in known), None)
        if orphan is not None:
            raise ValueError(f"the tree has a node at {list(orphan)} but none above it")
        if len(known) <= len(paths):
            raise ValueError("the tree has a path twice")
        nodes = [p for p in known if p]
        return cls((-1, *(known[p[:-1]] for p in nodes)), (0, *(p[-1] for p in nodes)))

    def levels(self) -> list[list[int]]:
        """The nodes of every level, the root's first."""
        level = [0]
        for p in self.parents[1:]:
            level.append(level[p] + 1)
        return [[n for n, at in enumerate(level) if at == l] for l in range(max(level) + 1)]


@dataclass
class Round:
    """One verification: the longest path drafted and the tokens accepted (the bonus is one more), and its seconds by
    part."""

    drafted: int
    accepted: int
    t_draft: float = 0.0
    t_verify: float = 0.0


@dataclass
class Trace:
    """What a generation did: one `Round` a verification, and the seconds of the prefill and of the whole."""

    rounds: list[Round] = field(default_factory=list)
    t_prefill: float = 0.0
    t_total: float = 0.0


def without_processors(sampling: Sampling) -> Sampling:
    """The same sampling as plain data, for writing to JSON."""
    return replace(sampling, processors=())
