"""Requests decoded together: a round drafts for all of them, verifies all in one pass, and commits to each its own."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from fledge.decode.propose import Drafter
from fledge.decode.request import Request
from fledge.decode.verify import accept_rejection, accept_walk, accepted_path
from fledge.kernels.transfer import to_device
from fledge.models.kv_cache import TargetCache
from fledge.models.target import Target
from fledge.types import Round, Tree


class Batch:
    """The requests that are `running`, and the caches they share. Without a proposer a round is one token, by the same
    chooser, cache and loop: the baseline. `layers` are those that the proposer's draft reads."""

    def __init__(self, target: Target, proposer: Drafter | None, layers: Sequence[int] | None):
        self.target, self.proposer, self.layers = target, proposer, layers
        self.cache: TargetCache | None = None
        self.running: list[Request] = []

    def enter(self, requests: Sequence[Request]) -> Iterator[Request]:
        """Reads each prompt alone and yields its request with the first token committed, which is no round. Those that
        are not over then run with the others."""
        entering, caches, slots = [], [self.cache] if self.running else [], []
        for request in requests:
            cache, first = self._prefill(request)
            yield request
            if not request.over:
                entering.append(request)
                caches.append(cache)
                slots.append(first)
        if self.proposer is not None:
            self.proposer.admit(slots)
        if entering:
            self.running += entering
            self.cache = caches[0]
            self.cache.append(caches[1:])

    def _prefill(self, request: Request) -> tuple[TargetCache, tuple[int, list[int], Tensor] | None]:
        """The prompt's cache, and what the proposer is to take in of it: all but the last slot, which the first round
        begins with."""
        request.began = time.perf_counter()
        cache, ids = TargetCache(), torch.tensor([request.prefix], device=self.target.device)
        drafts = self.proposer is not None
        logits, features = self.target.forward(ids, cache, features=drafts, layers=self.layers, last_only=True)
        first = None
        if drafts:
            aux_RAD = self.proposer.draft.reads(features)
            first, request.aux_RAD = (request.number, request.prefix[1:], aux_RAD[:-1]), aux_RAD[-1:]
        request.commit(accept_walk([request.chooser], [request.prefix], [()], logits)[0])
        request.done.trace.t_prefill = time.perf_counter() - request.began
        return cache, first

    def round(self) -> None:
        """One verification: commits to every request what it accepts of its draft, and the target's own next token."""
        target, running = self.target, self.running
        lengths = [len(r.prefix) - 1 for r in running]  # the last token committed is the root
        clock = Clock(target.device)
        tree = self._draft()
        clock.tick()
        logits_BNV, features = target.forward(
            tree.token_BN, self.cache, tree=tree, features=self.proposer is not None, layers=self.layers
        )
        nodes = tree.on_host() if self.proposer is not None else [([r.prefix[-1]], [-1]) for r in running]
        drafted, parents = [tokens[1:] for tokens, _ in nodes], [p[1:] for _, p in nodes]
        committed = self._accept(tree, drafted, logits_BNV, parents)
        paths = [accepted_path(*of) for of in zip(committed, drafted, parents, strict=True)]
        self.cache.keep(lengths, paths)
        if self.proposer is not None:
            self._remember(self.proposer.draft.reads(features), paths)
        times = clock.read() if self.proposer is not None else ()
        for request, tokens, mine in zip(running, committed, drafted, strict=True):
            request.commit(tokens)
            if self.proposer is not None:
                longest = len(mine) if tree.parent_BN is None else tree.levels
                request.done.trace.rounds.append(Round(longest, len(tokens) - 1, *times))

    def _draft(self) -> Tree:
        running = self.running
        if self.proposer is None:
            return Tree(torch.tensor([[r.prefix[-1]] for r in running], device=self.target.device), None, 0)
        fresh, aux, paths = zip(*((r.fresh, r.aux_RAD, r.path) for r in running), strict=True)
        return self.proposer.propose(fresh, aux, paths).to(self.target.device)

    def _accept(
        self, tree: Tree, drafted: Sequence[Sequence[int]], logits_BNV: Tensor, parents: Sequence[Sequence[int]]
    ) -> list[list[int]]:
        choosers, prefixes = [r.chooser for r in self.running], [r.prefix for r in self.running]
        if tree.q_BKW is None:
            return accept_walk(choosers, prefixes, drafted, logits_BNV, parents)
        q_BKV = [self._scatter(q_KW) for q_KW in tree.q_BKW]
        return [accept_rejection(*of) for of in zip(choosers, prefixes, drafted, q_BKV, logits_BNV, strict=True)]

    def _scatter(self, q_KW: Tensor) -> Tensor:
        """Draft distributions over the target's vocabulary: zeros outside the draft's."""
        draft = self.proposer.draft
        q_KV = q_KW.new_zeros(q_KW.shape[0], draft.config.vocab_size)
        q_KV[:, draft.target_ids()] = q_KW
        return q_KV

    def _remember(self, states_MAD: Tensor, paths: Sequence[Sequence[int]]) -> None:
        """Gives each request the states of its accepted nodes, of those of B x N."""
        B, longest = len(paths), max(map(len, paths))
        N = states_MAD.shape[0] // B
        nodes = torch.tensor([[*path, *[0] * (longest - len(path))] for path in paths])
        rows = to_device([(nodes + N * torch.arange(B)[:, None]).flatten()], states_MAD.device)[0]
        picked = states_MAD.index_select(0, rows).unflatten(0, (B, longest))
        for request, path, aux_RAD in zip(self.running, paths, picked, strict=True):
            request.path, request.aux_RAD = path, aux_RAD[: len(path)]

    def dismiss(self) -> None:
        """Lets go of the requests that are over."""
        staying = [b for b, request in enumerate(self.running) if not request.over]
        if len(staying) < len(self.running):
            self.running = [self.running[b] for b in staying]
            if staying:
                self.cache.select(staying)
            if self.proposer is not None:
                self.proposer.dismiss(staying)


class Clock:
    """Seconds of drafting and of verification, by device events where there are any."""

    def __init__(self, device: torch.device):
        self.cuda = device.type == "cuda"
        self.marks: list[Any] = []
        self.tick()

    def tick(self) -> None:
        if self.cuda:
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            self.marks.append(event)
        else:
            self.marks.append(time.perf_counter())

    def read(self) -> tuple[float, float]:
        self.tick()
        a, b, c = self.marks
        if not self.cuda:
            return b - a, c - b
        c.synchronize()
        return a.elapsed_time(b) / 1e3, b.elapsed_time(c) / 1e3
