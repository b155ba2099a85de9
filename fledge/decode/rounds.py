"""Rounds of drafting and verification on the device: computed directly, or replayed as CUDA graphs.

Both run the same functions. Replayed, the host launches two graphs per round and reads the committed tokens later.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from fledge.decode.sampling import BatchSampling, see
from fledge.decode.state import RoundState
from fledge.decode.verify import Processing, verify
from fledge.kernels.implementations import best_impl
from fledge.models.draft import Draft
from fledge.targets.interface import Cache, DecodingTarget
from fledge.types import Tree

GRAPH_SIZES = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128)  # numbers of requests that graphs are captured for


def graph_size(requests: int) -> int:
    """The number of requests of the graphs that so many are run with."""
    return next((n for n in GRAPH_SIZES if n >= requests), requests)


class Drafter(Protocol):
    """What a round needs of a `Proposer`, or of its stand-in without a draft (`NoDrafter`).

    `levels` are the most tokens of a drafted path. `nodes` and `scratch` are the most slots that a round writes after
    the committed ones in the target's and in the draft's cache. `capturable`: whether drafting asks the device nothing.
    """

    draft: Draft | None
    levels: int
    nodes: int
    scratch: int
    capturable: bool

    def propose(self, state: RoundState) -> Tree:
        """The trees that are verified next."""

    def set_sampling(self, sampling: BatchSampling) -> None:
        """Sets how the drafted tokens of the requests are drawn."""

    def tensors(self) -> list[Tensor]:
        """The tensors, with one entry for each request, that a round reads and changes."""

    def lengths(self) -> list[Tensor]:
        """Those of `tensors` that are lengths of caches."""

    def bind(self, tensors: Sequence[Tensor]) -> None:
        """Replaces `tensors` by others."""

    def idle(self, spare: Any, size: int) -> Drafter:
        """A drafter of the same draft for `size` requests that do not exist, which share the segment of a cache."""


class Timer:
    """Measures the seconds of drafting and of verification, with CUDA events on a GPU. Drafting starts when the timer
    is created, and ends at the first `mark`; verification ends at the second."""

    def __init__(self, device: torch.device):
        self.cuda = device.type == "cuda"
        self.marks: list[Any] = []
        self.mark()

    def mark(self) -> None:
        """Records the current time."""
        if self.cuda:
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            self.marks.append(event)
        else:
            self.marks.append(time.perf_counter())

    def seconds(self) -> tuple[float, float]:
        """The seconds of drafting and of verification. Waits for the device to reach the last mark."""
        a, b, c = self.marks
        if not self.cuda:
            return b - a, c - b
        c.synchronize()
        return a.elapsed_time(b) / 1e3, b.elapsed_time(c) / 1e3


@dataclass
class Rounds:
    """What the rounds of B requests read and change, all on the target's device.

    `layers` are the target layers that the draft reads; None without a draft. `state` are the tokens committed last,
    `sampling` the requests' options, and `seen_BV` the tokens of each prefix (bool), if some options penalize them.
    """

    target: DecodingTarget
    drafter: Drafter
    layers: Sequence[int] | None
    cache: Cache
    state: RoundState
    sampling: BatchSampling
    seen_BV: Tensor | None = None

    def tensors(self) -> list[Tensor]:
        """All tensors with one entry for each request that a round reads and changes, or reads."""
        seen = [] if self.seen_BV is None else [self.seen_BV]
        drafter = self.drafter.tensors()
        return [*vars(self.state).values(), *self.cache.tensors(), *self.sampling.tensors(), *seen, *drafter]

    @torch.inference_mode()
    def draft_trees(self, rows: int | None = None) -> Tree:
        """The trees that are verified next. `rows` is the most tokens of a request that the draft has not read; None
        allows for all rows of the state."""
        state = self.state if rows is None else self.state.rows(rows)
        return self.drafter.propose(state).to(self.state.token_BR.device)

    @torch.inference_mode()
    def verify_trees(self, tree: Tree, processing: Sequence[Processing | None] = ()) -> Tensor:
        """Verifies trees and commits the accepted nodes. Returns the results, int64 [B, R + 2]: R tokens to commit, the
        number of valid ones, and the number of drafted ones."""
        draft, state = self.drafter.draft, self.state
        logits_BNV, features = self.target.verify(tree, self.cache, self.layers)
        ids_W = None if tree.q_BKW is None else draft.target_ids().to(logits_BNV.device)
        verdict = verify(tree, logits_BNV, state.length_B, self.sampling, ids_W, self.seen_BV, processing)
        self.cache.keep(None if tree.parent_BN is None else verdict.path_BR, verdict.count_B)
        if self.seen_BV is not None:
            see(self.seen_BV, verdict)
        if features is None:
            aux_BNAD = logits_BNV.new_empty(*tree.token_BN.shape, 0, 0)
        else:
            aux_BNAD = draft.select_states(features).unflatten(0, tree.token_BN.shape)
        unread = draft is not None and not tree.levels  # the draft has not read the state
        self.state = state.append(verdict, aux_BNAD) if unread else state.after(verdict, aux_BNAD)
        drafted_B = torch.full_like(verdict.count_B, tree.levels) if tree.count_B is None else tree.count_B - 1
        return torch.cat([verdict.token_BR, verdict.count_B[:, None], drafted_B[:, None]], dim=1)


def can_capture(target: DecodingTarget, drafter: Drafter) -> bool:
    """Whether rounds can be captured as CUDA graphs: the target is native, target and draft are on one GPU in a dtype
    that the kernels support, and drafting does not ask the device when to end."""
    native = target.implementation == "native" and best_impl(target.device, target.dtype) == "triton"
    return native and drafter.capturable and (drafter.draft is None or drafter.draft.device == target.device)


def graph_memory() -> Any:
    """A new memory pool for graphs that are replayed one after the other. It ends with its last graph."""
    return torch.cuda.graph_pool_handle()


def warm_up(work: Callable[[], Any], device: torch.device) -> None:
    """Runs what will be captured, so that kernels are compiled and libraries initialised."""
    side = torch.cuda.Stream(device)
    side.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(side):
        work()
    torch.cuda.current_stream(device).wait_stream(side)


def capture(work: Callable[[], Any], memory: Any) -> tuple[Callable[[], None], Any]:
    """Captures the kernels of `work` as a CUDA graph. Returns its replay, and what `work` returned, whose tensors each
    replay computes anew."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool=memory):
        results = work()
    return graph.replay, results


class CapturedRounds:
    """Rounds of up to `size` requests as two CUDA graphs, for drafting and for verification.

    `draft` and `verify` replay them, and `results` are those of the last replay (`Rounds.verify_trees`). The graphs
    read and change tensors of their own: `load` copies those of other rounds there, and `store` copies them back.
    Places without a request decode a sequence of no tokens, again and again, in slots that belong to nobody.
    """

    def __init__(self, rounds: Rounds, size: int, spare: tuple[Cache, Any], memory: Any):
        """`spare` are caches of the target and the draft with a segment of slots for places without a request. `memory`
        is that of the graphs (`graph_memory`)."""
        target, drafter, device = rounds.target, rounds.drafter, rounds.state.token_BR.device
        cache = spare[0].repeated(size)
        seen_BV = None if rounds.seen_BV is None else rounds.seen_BV.new_zeros(size, rounds.seen_BV.shape[1])
        state, sampling = rounds.state.idle(size), rounds.sampling.idle(size)
        self.rounds = Rounds(target, drafter.idle(spare[1], size), rounds.layers, cache, state, sampling, seen_BV)
        self.rounds.drafter.set_sampling(self.rounds.sampling)
        self.size, self.active_B = size, torch.zeros(size, dtype=torch.int64, device=device)
        self.static = self.rounds.tensors()
        self.idle = [x.clone() for x in self.static]
        for _ in range(2):
            warm_up(lambda: self._verify(self._draft()), device)
            self._reset()  # a place without a request has no slots for a second round
        if drafter.levels:
            self.draft, tree = capture(self._draft, memory)
            self.verify, self.results = capture(lambda: self._verify(tree), memory)
        else:
            self.draft = lambda: None
            self.verify, self.results = capture(lambda: self._verify(self._draft()), memory)

    @torch.inference_mode()
    def _reset(self) -> None:
        """Makes all places places without a request."""
        for mine, idle in zip(self.static, self.idle, strict=True):
            mine.copy_(idle)
        self.active_B.zero_()

    def _draft(self) -> Tree:
        return self.rounds.draft_trees()

    @torch.inference_mode()
    def _verify(self, tree: Tree) -> Tensor:
        rounds = self.rounds
        results = rounds.verify_trees(tree)
        state, drafter = rounds.state, rounds.drafter
        if self.size > 1:  # places without a request start again
            for length_B in (state.length_B, rounds.cache.length_B, *drafter.lengths()):
                length_B *= self.active_B
        for kept, changed in zip(self.static, rounds.tensors(), strict=True):
            if kept is not changed:
                kept.copy_(changed)
        n = len(vars(state))
        rounds.state = RoundState(*self.static[:n])
        drafter.bind(self.static[len(self.static) - len(drafter.tensors()) :])
        return results

    @torch.inference_mode()
    def load(self, rounds: Rounds) -> None:
        """Takes the requests of other rounds with the same flags of sampling."""
        B = rounds.state.count_B.numel()
        self._reset()
        for mine, theirs in zip(self.static, rounds.tensors(), strict=True):
            mine[:B].copy_(theirs)
        self.active_B[:B] = 1

    @torch.inference_mode()
    def store(self, rounds: Rounds) -> None:
        """Gives the requests that were loaded back to their rounds, with what changed."""
        B = rounds.state.count_B.numel()
        for mine, theirs in zip(self.static, rounds.tensors(), strict=True):
            theirs.copy_(mine[:B])
