"""Requests decoded together: a round drafts for all of them, verifies all in one pass, and commits to each its own."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from fledge.decode.propose import Proposer
from fledge.decode.request import Request
from fledge.decode.verify import Nodes, verify_by_match, verify_by_rejection
from fledge.kernels.transfer import to_device
from fledge.targets.interface import Cache, DecodingTarget
from fledge.types import Round, Tree, Verdict

PREFILL = 8192  # most tokens, filling included, of several prompts that are read in one pass
ROOMS = 8192  # slots of a batch's rooms up to which no request is too long for it


class NoDrafter:
    """Takes a proposer's place where nothing is drafted: a round is then one token. This is the baseline, with the same
    sampler, cache and loop."""

    draft = None

    def admit(self, requests: Sequence[Any]) -> None:
        """There is nothing to remember."""

    dismiss = admit

    def propose(self, tokens: Sequence[Sequence[int]], aux: Sequence[None], paths: Sequence[Sequence[int]]) -> Tree:
        """Roots alone."""
        return Tree(torch.tensor([mine[-1:] for mine in tokens]), None, 0)


class Batch:
    """The requests that are `running`, and the caches they share. `layers` are those that the proposer's draft reads,
    None where nothing is drafted."""

    def __init__(self, target: DecodingTarget, proposer: Proposer | NoDrafter, layers: Sequence[int] | None):
        self.target, self.proposer, self.layers = target, proposer, layers
        self.drafts = proposer.draft is not None
        self.cache: Cache | None = None
        self.running: list[Request] = []

    def enter(self, requests: Sequence[Request]) -> Iterator[Request]:
        """Reads prompts, several in a pass, and yields each request with its first token committed, which is no round.
        Those that are not over then run with the others."""
        while requests:
            together = self._fit(requests)
            cache, slots = self._prefill(requests[:together])
            yield from requests[:together]
            staying = [i for i, request in enumerate(requests[:together]) if not request.over]
            if staying:
                if len(staying) < together:
                    cache.select(staying)
                self.proposer.admit([slots[i] for i in staying])
                if self.running:
                    self.cache.append([cache])
                else:
                    self.cache = cache
                self.running += [requests[i] for i in staying]
            requests = requests[together:]

    @staticmethod
    def _fit(requests: Sequence[Request]) -> int:
        """How many of the first are read in one pass: at least one."""
        longest = itertools.accumulate((len(r.prefix) for r in requests), max)
        return max(1, sum(n * most <= PREFILL for n, most in enumerate(longest, start=1)))

    def _prefill(self, requests: Sequence[Request]) -> tuple[Cache, list[tuple[int, list[int], Tensor] | None]]:
        """The prompts' cache, and what the proposer is to take in of each: all but the last slot, which the first round
        begins with."""
        began = time.perf_counter()
        prefixes = [r.prefix for r in requests]
        logits_BV, features, cache = self.target.prefill(prefixes, self.layers)
        self.target.check_numbers(logits_BV)
        slots: list[tuple[int, list[int], Tensor] | None] = [None] * len(requests)
        if self.drafts:
            states = map(self.proposer.draft.select_states, features)
            for i, (request, aux_RAD) in enumerate(zip(requests, states, strict=True)):
                slots[i] = (request.number, request.prefix[1:], aux_RAD[:-1])
                request.aux_RAD = aux_RAD[-1:]
        roots = [([prefix[-1]], [-1]) for prefix in prefixes]
        first = verify_by_match([r.sampler for r in requests], prefixes, roots, logits_BV[:, None])
        for request, verdict in zip(requests, first, strict=True):
            request.began = began
            request.commit(verdict.tokens)
            request.done.trace.t_prefill = time.perf_counter() - began
        return cache, slots

    def round(self) -> None:
        """One verification: commits to every request what it accepts of its draft, and the target's own next token."""
        target, running = self.target, self.running
        lengths = [len(r.prefix) - 1 for r in running]  # the last token committed is the root
        fresh, aux, paths = zip(*((r.fresh, r.aux_RAD, r.path) for r in running), strict=True)
        clock = Clock(target.device)
        proposed = self.proposer.propose(fresh, aux, paths)
        tree = proposed.to(target.device)
        clock.tick()
        logits_BNV, features = target.verify(tree, self.cache, self.layers)
        nodes = proposed.to_lists()
        verdicts = self._verify(tree, nodes, logits_BNV)
        paths = [v.path for v in verdicts]
        self.cache.keep(lengths, paths)
        for request, verdict in zip(running, verdicts, strict=True):
            request.commit(verdict.tokens)
        if self.drafts:
            self._remember(self.proposer.draft.select_states(features), paths)
            times = clock.read()
            for request, verdict, (tokens, _) in zip(running, verdicts, nodes, strict=True):
                longest = len(tokens) - 1 if tree.parent_BN is None else tree.levels
                request.done.trace.rounds.append(Round(longest, len(verdict.tokens) - 1, *times))

    def _verify(self, tree: Tree, nodes: Sequence[Nodes], logits_BNV: Tensor) -> list[Verdict]:
        samplers, prefixes = [r.sampler for r in self.running], [r.prefix for r in self.running]
        is_last = [r.is_last() if r.sampler.by_prefix else None for r in self.running]
        if tree.q_BKW is None:
            return verify_by_match(samplers, prefixes, nodes, logits_BNV, is_last if all(is_last) else None)
        chains, q_BKV = [tokens for tokens, _ in nodes], [self._scatter(q_KW) for q_KW in tree.q_BKW]
        return [
            verify_by_rejection(*of) for of in zip(samplers, prefixes, chains, q_BKV, logits_BNV, is_last, strict=True)
        ]

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
            self.proposer.dismiss(staying)


class Lanes:
    """Batches that run side by side. Requests of a batch have rooms as long as its longest one's, so one that is much
    longer than the others gets a batch of its own, made by `make`; a round is then one verification of each batch."""

    def __init__(self, make: Callable[[], Batch]):
        self.make = make
        self.lanes: list[Batch] = []

    @property
    def running(self) -> int:
        """Requests that are not over."""
        return sum(len(lane.running) for lane in self.lanes)

    def enter(self, requests: Sequence[Request]) -> Iterator[Request]:
        """As `Batch.enter`, each request in the first batch where its room fits."""
        entering: list[tuple[Batch, list[Request]]] = [(lane, []) for lane in self.lanes]
        for request in requests:
            beside = (new for lane, new in entering if _share_rooms([*lane.running, *new, request]))
            if (new := next(beside, None)) is None:
                new = []
                entering.append((self.make(), new))
            new.append(request)
        self.lanes = [lane for lane, _ in entering]
        for lane, new in entering:
            yield from lane.enter(new)

    def round(self) -> Iterator[Request]:
        """A round of every batch: yields the requests that it committed to, and lets go of those that are over."""
        for lane in self.lanes:
            if lane.running:
                lane.round()
                yield from lane.running
                lane.dismiss()
        self.lanes = [lane for lane in self.lanes if lane.running]


def _share_rooms(requests: Sequence[Request]) -> bool:
    """Whether rooms for all of them, each as long as the longest needs it, are few slots, or at most twice those that
    are needed."""
    needed = [r.longest for r in requests]
    return len(needed) * max(needed) <= max(2 * sum(needed), ROOMS)


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
