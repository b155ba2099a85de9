"""Batched decoding: a round drafts for all requests of a batch and verifies all drafts in one pass of the target."""

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

PREFILL_TOKENS = 8192  # maximum tokens, padding included, of a prefill pass with several prompts
SMALL_BATCH_SLOTS = 8192  # a batch with at most this many cache slots, padding included, may have any lengths


class NoDrafter:
    """A proposer for decoding without a draft: trees of a root only, so that a round commits one token. The baseline
    thus has the same sampler, cache and loop."""

    draft = None

    def admit(self, requests: Sequence[Any]) -> None:
        """Does nothing."""

    dismiss = admit

    def propose(self, tokens: Sequence[Sequence[int]], aux: Sequence[None], paths: Sequence[Sequence[int]]) -> Tree:
        """Trees of the root only: each request's last committed token."""
        return Tree(torch.tensor([new[-1:] for new in tokens]), None, 0)


class Batch:
    """The `running` requests of a batch and their caches. `layers` are the target layers that the draft reads; None
    without a draft."""

    def __init__(self, target: DecodingTarget, proposer: Proposer | NoDrafter, layers: Sequence[int] | None):
        self.target, self.proposer, self.layers = target, proposer, layers
        self.drafts = proposer.draft is not None
        self.cache: Cache | None = None
        self.running: list[Request] = []

    def add(self, requests: Sequence[Request]) -> Iterator[Request]:
        """Prefills requests, several in a pass, and yields each with its first token committed. Adds those that are not
        complete to the running ones. The first token does not count as a round."""
        while requests:
            count = self._prefill_count(requests)
            cache, slots = self._prefill(requests[:count])
            yield from requests[:count]
            unfinished = [i for i, request in enumerate(requests[:count]) if not request.over]
            if unfinished:
                if len(unfinished) < count:
                    cache.select(unfinished)
                self.proposer.admit([slots[i] for i in unfinished])
                if self.running:
                    self.cache.append([cache])
                else:
                    self.cache = cache
                self.running += [requests[i] for i in unfinished]
            requests = requests[count:]

    @staticmethod
    def _prefill_count(requests: Sequence[Request]) -> int:
        """The number of requests, from the first on, whose padded prompts fit in a prefill pass; at least one."""
        longest = itertools.accumulate((len(r.prefix) for r in requests), max)
        return max(1, sum(n * length <= PREFILL_TOKENS for n, length in enumerate(longest, start=1)))

    def _prefill(self, requests: Sequence[Request]) -> tuple[Cache, list[tuple[int, list[int], Tensor] | None]]:
        """Prefills requests and commits their first tokens. Returns the cache, and the arguments of `Proposer.admit`
        (None without a draft), which have all slots of each prompt but the last one: that one is new in the first
        round."""
        start = time.perf_counter()
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
            request.began = start
            request.commit(verdict.tokens)
            request.done.trace.t_prefill = time.perf_counter() - start
        return cache, slots

    def round(self) -> None:
        """One round: drafts, verifies, and commits to each request its accepted tokens and the target's own token."""
        target, running = self.target, self.running
        lengths = [len(r.prefix) - 1 for r in running]  # without the last committed token, which is the tree's root
        fresh, aux, paths = zip(*((r.fresh, r.aux_RAD, r.path) for r in running), strict=True)
        timer = RoundTimer(target.device)
        proposed = self.proposer.propose(fresh, aux, paths)
        tree = proposed.to(target.device)
        timer.mark()
        logits_BNV, features = target.verify(tree, self.cache, self.layers)
        nodes = proposed.to_lists()
        verdicts = self._verify(tree, nodes, logits_BNV)
        paths = [v.path for v in verdicts]
        self.cache.keep(lengths, paths)
        for request, verdict in zip(running, verdicts, strict=True):
            request.commit(verdict.tokens)
        if self.drafts:
            self._store_states(self.proposer.draft.select_states(features), paths)
            times = timer.finish()
            for request, verdict, (tokens, _) in zip(running, verdicts, nodes, strict=True):
                drafted = len(tokens) - 1 if tree.parent_BN is None else tree.levels
                request.done.trace.rounds.append(Round(drafted, len(verdict.tokens) - 1, *times))

    def _verify(self, tree: Tree, nodes: Sequence[Nodes], logits_BNV: Tensor) -> list[Verdict]:
        samplers, prefixes = [r.sampler for r in self.running], [r.prefix for r in self.running]
        is_last = [r.is_last() if r.sampler.by_prefix else None for r in self.running]
        if tree.q_BKW is None:
            return verify_by_match(samplers, prefixes, nodes, logits_BNV, is_last if all(is_last) else None)
        chains, q_BKV = [tokens for tokens, _ in nodes], [self._scatter(q_KW) for q_KW in tree.q_BKW]
        return [
            verify_by_rejection(*arguments)
            for arguments in zip(samplers, prefixes, chains, q_BKV, logits_BNV, is_last, strict=True)
        ]

    def _scatter(self, q_KW: Tensor) -> Tensor:
        """The draft's distributions [K, W] over the target's vocabulary, [K, V], with zeros outside the draft's."""
        draft = self.proposer.draft
        q_KV = q_KW.new_zeros(q_KW.shape[0], draft.config.vocab_size)
        q_KV[:, draft.target_ids()] = q_KW
        return q_KV

    def _store_states(self, states_MAD: Tensor, paths: Sequence[Sequence[int]]) -> None:
        """Stores in each request the target's hidden states of its accepted nodes. M = B N; `paths` are their node
        indices."""
        B, longest = len(paths), max(map(len, paths))
        N = states_MAD.shape[0] // B
        nodes = torch.tensor([[*path, *[0] * (longest - len(path))] for path in paths])
        rows = to_device([(nodes + N * torch.arange(B)[:, None]).flatten()], states_MAD.device)[0]
        picked = states_MAD.index_select(0, rows).unflatten(0, (B, longest))
        for request, path, aux_RAD in zip(self.running, paths, picked, strict=True):
            request.path, request.aux_RAD = path, aux_RAD[: len(path)]

    def dismiss(self) -> None:
        """Removes complete requests from the batch and its caches."""
        unfinished = [b for b, request in enumerate(self.running) if not request.over]
        if len(unfinished) < len(self.running):
            self.running = [self.running[b] for b in unfinished]
            if unfinished:
                self.cache.select(unfinished)
            self.proposer.dismiss(unfinished)


class BatchScheduler:
    """Distributes requests over batches by length.

    The cache of a batch has as many slots for each request as its longest request needs. A request that is much longer
    than the others therefore gets another batch, created by `new_batch`. A round is one round of each batch.
    """

    def __init__(self, new_batch: Callable[[], Batch]):
        self.new_batch = new_batch
        self.batches: list[Batch] = []

    @property
    def running(self) -> int:
        """The number of requests that are not complete."""
        return sum(len(batch.running) for batch in self.batches)

    def add(self, requests: Sequence[Request]) -> Iterator[Request]:
        """Adds each request to the first batch that it fits in, or to a new one; prefills and yields as `Batch.add`."""
        assigned: list[tuple[Batch, list[Request]]] = [(batch, []) for batch in self.batches]
        for request in requests:
            fitting = (new for batch, new in assigned if _fit_together([*batch.running, *new, request]))
            if (new := next(fitting, None)) is None:
                new = []
                assigned.append((self.new_batch(), new))
            new.append(request)
        self.batches = [batch for batch, _ in assigned]
        for batch, new in assigned:
            yield from batch.add(new)

    def round(self) -> Iterator[Request]:
        """Runs a round of every batch. Yields the requests that tokens were committed to, then removes complete
        ones."""
        for batch in self.batches:
            if batch.running:
                batch.round()
                yield from batch.running
                batch.dismiss()
        self.batches = [batch for batch in self.batches if batch.running]


def _fit_together(requests: Sequence[Request]) -> bool:
    """Whether requests can share a batch: its cache has at most twice the slots that they need, or is small."""
    needed = [r.longest for r in requests]
    return len(needed) * max(needed) <= max(2 * sum(needed), SMALL_BATCH_SLOTS)


class RoundTimer:
    """Measures the seconds of drafting and of verification, with CUDA events on a GPU. Drafting starts when the timer
    is created, and ends at `mark`."""

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

    def finish(self) -> tuple[float, float]:
        """Ends the verification. Returns the seconds of drafting and of verification."""
        self.mark()
        a, b, c = self.marks
        if not self.cuda:
            return b - a, c - b
        c.synchronize()
        return a.elapsed_time(b) / 1e3, b.elapsed_time(c) / 1e3
