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
from fledge.decode.sampling import BatchSampling, see, seen_tokens
from fledge.decode.verify import verify
from fledge.kernels.transfer import to_device
from fledge.targets.interface import Cache, DecodingTarget
from fledge.types import Round, Tree, Verdict

PREFILL_TOKENS = 8192  # maximum tokens, padding included, of a prefill pass with several prompts
SMALL_BATCH_SLOTS = 8192  # a batch with at most this many cache slots, padding included, may have any lengths


class NoDrafter:
    """A proposer for decoding without a draft: trees of a root only, so that a round commits one token. The baseline
    thus has the same sampler, cache and loop."""

    draft = None

    def admit(self, given: Any) -> None:
        """Does nothing."""

    dismiss = set_sampling = admit

    def propose(self, tokens: Sequence[Sequence[int]], aux: Sequence[None], paths: Sequence[Sequence[int]]) -> Tree:
        """Trees of the root only: each request's last committed token."""
        return Tree(torch.tensor([new[-1:] for new in tokens]), None, 0)


class Batch:
    """The `running` requests of a batch and their caches. `layers` are the target layers that the draft reads; None
    without a draft. `sampling` are the running requests' options, and `seen_BV` their tokens, if some penalize them."""

    def __init__(self, target: DecodingTarget, proposer: Proposer | NoDrafter, layers: Sequence[int] | None):
        self.target, self.proposer, self.layers = target, proposer, layers
        self.drafts = proposer.draft is not None
        self.cache: Cache | None = None
        self.running: list[Request] = []
        self.vocabulary = 0  # tokens of the target's logits, known after a prefill
        self.sampling: BatchSampling | None = None
        self.seen_BV: Tensor | None = None
        self.target_ids_W = self.proposer.draft.target_ids().to(target.device) if self.drafts else None

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
                self._set_sampling()
            requests = requests[count:]

    @staticmethod
    def _prefill_count(requests: Sequence[Request]) -> int:
        """The number of requests, from the first on, whose padded prompts fit in a prefill pass; at least one."""
        longest = itertools.accumulate((len(r.prefix) for r in requests), max)
        return max(1, sum(n * length <= PREFILL_TOKENS for n, length in enumerate(longest, start=1)))

    def _prefill(self, requests: Sequence[Request]) -> tuple[Cache, list[tuple[list[int], Tensor] | None]]:
        """Prefills requests and commits their first tokens. Returns the cache, and the arguments of `Proposer.admit`
        (None without a draft), which have all slots of each prompt but the last one: that one is new in the first
        round."""
        start = time.perf_counter()
        prefixes = [r.prefix for r in requests]
        logits_BV, features, cache = self.target.prefill(prefixes, self.layers)
        self.target.check_numbers(logits_BV)
        slots: list[tuple[list[int], Tensor] | None] = [None] * len(requests)
        if self.drafts:
            states = map(self.proposer.draft.select_states, features)
            for i, (request, aux_RAD) in enumerate(zip(requests, states, strict=True)):
                slots[i] = (request.prefix[1:], aux_RAD[:-1])
                request.aux_RAD = aux_RAD[-1:]
        self.vocabulary = logits_BV.shape[1]
        roots = Tree(torch.tensor([prefix[-1:] for prefix in prefixes]), None, 0).to(self.target.device)
        first = self._verify(requests, roots, logits_BV[:, None], *self._sampling_of(requests))
        for request, (_, tokens) in zip(requests, first.to_lists(), strict=True):
            request.began = start
            request.commit(tokens)
            request.done.trace.t_prefill = time.perf_counter() - start
        return cache, slots

    def round(self) -> None:
        """One round: drafts, verifies, and commits to each request its accepted tokens and the target's own token."""
        target, running = self.target, self.running
        lengths = [len(r.prefix) - 1 for r in running]  # without the last committed token, which is the tree's root
        fresh, aux, paths = zip(*((r.fresh, r.aux_RAD, r.path) for r in running), strict=True)
        timer = RoundTimer(target.device)
        tree = self.proposer.propose(fresh, aux, paths).to(target.device)
        timer.mark()
        logits_BNV, features = target.verify(tree, self.cache, self.layers)
        verdict = self._verify(running, tree, logits_BNV, self.sampling, self.seen_BV)
        if self.seen_BV is not None:
            see(self.seen_BV, verdict)
        paths, tokens = zip(*verdict.to_lists(), strict=True)
        self.cache.keep(lengths, paths)
        for request, committed in zip(running, tokens, strict=True):
            request.commit(committed)
        if self.drafts:
            self._store_states(self.proposer.draft.select_states(features), paths)
            times = timer.finish()
            counts = [tree.levels + 1] * len(running) if tree.count_B is None else tree.count_B.tolist()
            for request, committed, count in zip(running, tokens, counts, strict=True):
                request.done.trace.rounds.append(Round(count - 1, len(committed) - 1, *times))

    def _verify(
        self, requests: Sequence[Request], tree: Tree, logits_BNV: Tensor, sampling: BatchSampling,
        seen_BV: Tensor | None,
    ) -> Verdict:  # fmt: skip
        lengths = torch.tensor([len(r.prefix) - 1 for r in requests])
        length_B = to_device([lengths], logits_BNV.device)[0]
        processing = [r.processing for r in requests]
        return verify(tree, logits_BNV, length_B, sampling, self.target_ids_W, seen_BV, processing)

    def _sampling_of(self, requests: Sequence[Request]) -> tuple[BatchSampling, Tensor | None]:
        """The requests' sampling options, and the tokens of their prefixes, bool [B, V], if some penalize them."""
        device = self.target.device
        sampling = BatchSampling.of([r.sampling for r in requests], [r.number for r in requests], device)
        prefixes = [r.prefix for r in requests]
        return sampling, seen_tokens(prefixes, self.vocabulary, device) if sampling.penalizes else None

    def _set_sampling(self) -> None:
        """Takes the sampling options of the running requests, after these have changed."""
        self.sampling, self.seen_BV = self._sampling_of(self.running)
        self.proposer.set_sampling(self.sampling)

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
            self.proposer.dismiss(unfinished)
            if unfinished:
                self.cache.select(unfinished)
                self._set_sampling()


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
