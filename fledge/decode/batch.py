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
from fledge.decode.state import RoundState
from fledge.decode.verify import verify
from fledge.kernels.transfer import to_device
from fledge.targets.interface import Cache, DecodingTarget
from fledge.types import Features, Round, Tree, Verdict

PREFILL_TOKENS = 8192  # maximum tokens, padding included, of a prefill pass
SMALL_BATCH_SLOTS = 8192  # a batch with at most this many cache slots, padding included, may have any lengths


class NoDrafter:
    """A proposer for decoding without a draft: trees of a root only, so that a round commits one token. The baseline
    thus has the same sampler, cache and loop."""

    draft = None
    levels = scratch = 0
    nodes = 1

    def nothing(self, *given: Any) -> None:
        """Does nothing."""

    new_cache = read = append = select = set_sampling = nothing

    def propose(self, state: RoundState) -> Tree:
        """Trees of the root only: each request's last committed token."""
        return Tree(state.token_BR, None, 0)


class Batch:
    """The `running` requests of a batch, their caches, and the state that the next round reads.

    `layers` are the target layers that the draft reads; None without a draft. `sampling` are the requests' options, and
    `seen_BV` are the tokens of each prefix (bool), if some options penalize them; both on the target's device.
    """

    def __init__(self, target: DecodingTarget, proposer: Proposer | NoDrafter, layers: Sequence[int] | None):
        self.target, self.proposer, self.layers = target, proposer, layers
        draft = self.draft = proposer.draft
        self.target_ids_W = None if draft is None else draft.target_ids().to(target.device)
        self.running: list[Request] = []
        self.cache: Cache = target.new_cache([])
        self.state: RoundState | None = None
        self.sampling: BatchSampling | None = None
        self.seen_BV: Tensor | None = None

    # -- requests come and go -----------------------------------------------------------------------------------

    def add(self, requests: Sequence[Request]) -> Iterator[Request]:
        """Prefills requests, several in a pass, and yields each with its first token committed. Adds those that are not
        complete to the running ones. The first token does not count as a round."""
        while requests:
            count = self._prefill_count(requests)
            joining = Joining(self, requests[:count])
            yield from joining.requests
            self._join(joining)
            requests = requests[count:]

    @staticmethod
    def _prefill_count(requests: Sequence[Request]) -> int:
        """The number of requests, from the first on, whose padded prompts fit in a prefill pass; at least one."""
        longest = itertools.accumulate((len(r.prefix) for r in requests), max)
        return max(1, sum(n * length <= PREFILL_TOKENS for n, length in enumerate(longest, start=1)))

    def _join(self, joining: Joining) -> None:
        """Adds prefilled requests that are not complete."""
        going = [i for i, request in enumerate(joining.requests) if not request.over]
        joining.select(going)
        if not going:
            return
        states = [joining.state] if self.state is None else [self.state, joining.state]
        self.cache.append(joining.cache)
        self.proposer.append(joining.draft_cache)
        self.state = RoundState.concatenate([state.rows(self.proposer.levels + 1) for state in states])
        self.running += [joining.requests[i] for i in going]
        self._set_sampling()

    def dismiss(self) -> None:
        """Removes complete requests from the batch and its caches."""
        going = [b for b, request in enumerate(self.running) if not request.over]
        if len(going) < len(self.running):
            self.running = [self.running[b] for b in going]
            self.cache.select(going)
            self.proposer.select(going)
            self.state = self.state.select(torch.tensor(going, dtype=torch.int64).to(self.target.device))
            self._set_sampling()

    def close(self) -> None:
        """Frees the caches of all requests."""
        self.cache.select([])
        self.proposer.select([])

    def sampling_of(self, requests: Sequence[Request]) -> tuple[BatchSampling, Tensor | None]:
        """The requests' sampling options, and the tokens of their prefixes, bool [B, V], if some penalize them."""
        device, vocabulary = self.target.device, self.target.embedding.shape[0]
        sampling = BatchSampling.of([r.sampling for r in requests], [r.number for r in requests], device)
        prefixes = [r.prefix for r in requests]
        return sampling, seen_tokens(prefixes, vocabulary, device) if sampling.penalizes else None

    def _set_sampling(self) -> None:
        """Takes the sampling options of the running requests, after these have changed."""
        if self.running:
            self.sampling, self.seen_BV = self.sampling_of(self.running)
            self.proposer.set_sampling(self.sampling)

    # -- rounds -------------------------------------------------------------------------------------------------

    def round(self) -> None:
        """One round: drafts, verifies, and commits to each request its accepted tokens and the target's own token."""
        timer = RoundTimer(self.target.device)
        tree, verdict = self._advance(timer)
        for request, (_, tokens) in zip(self.running, verdict.to_lists(), strict=True):
            request.commit(tokens)
        if self.draft is not None:
            times = timer.finish()
            drafted = [tree.levels + 1] * len(self.running) if tree.count_B is None else tree.count_B.tolist()
            for request, count in zip(self.running, drafted, strict=True):
                request.done.trace.rounds.append(Round(count - 1, len(request.fresh) - 1, *times))

    @torch.inference_mode()
    def _advance(self, timer: RoundTimer) -> tuple[Tree, Verdict]:
        """Drafts and verifies. Returns the trees and the verdict, with which state and caches were advanced."""
        rows = max(len(r.fresh) for r in self.running)
        tree = self.proposer.propose(self.state.rows(rows)).to(self.target.device)
        timer.mark()
        logits_BNV, features = self.target.verify(tree, self.cache, self.layers)
        verdict = self._verify(tree, logits_BNV)
        self.cache.keep(None if tree.parent_BN is None else verdict.path_BR, verdict.count_B)
        self.state = self.state.after(verdict, self._states(features, tree))
        if self.seen_BV is not None:
            see(self.seen_BV, verdict)
        return tree, verdict

    def _verify(self, tree: Tree, logits_BNV: Tensor) -> Verdict:
        processing = [r.processing for r in self.running]
        return verify(tree, logits_BNV, self.state.length_B, self.sampling, self.target_ids_W, self.seen_BV, processing)

    def _states(self, features: Features | None, tree: Tree) -> Tensor:
        """The target's hidden states that the draft reads, at all nodes, [B, N, A, D]; without a draft [B, N, 0, 0]."""
        if features is None:
            return torch.empty(*tree.token_BN.shape, 0, 0, device=tree.token_BN.device)
        return self.draft.select_states(features).unflatten(0, tree.token_BN.shape)


class Joining:
    """Requests that join a batch: their prefilled caches, their first tokens, and the state after these."""

    @torch.inference_mode()
    def __init__(self, batch: Batch, requests: Sequence[Request]):
        self.batch, self.requests = batch, requests
        start, target, proposer = time.perf_counter(), batch.target, batch.proposer
        sizes = [r.longest for r in requests]
        self.cache = target.new_cache([n + proposer.nodes + proposer.levels for n in sizes])
        self.draft_cache = proposer.new_cache([n + proposer.scratch for n in sizes])
        logits_BV, aux_BAD = self._read([r.prefix for r in requests])
        target.check_numbers(logits_BV)
        token_B = self._first_tokens(logits_BV)
        length_B = to_device([torch.tensor([len(r.prefix) for r in requests])], target.device)[0]
        self.state = RoundState.first(token_B, aux_BAD, length_B)
        for request, token in zip(requests, token_B.tolist(), strict=True):
            request.began = start
            request.commit([token])
            request.done.trace.t_prefill = time.perf_counter() - start

    def _read(self, prefixes: Sequence[Sequence[int]]) -> tuple[Tensor, Tensor]:
        """Runs target and draft over the prompts. Returns the target's logits after each, [B, V], and its hidden states
        at the last tokens, [B, A, D], whose slots the draft reads in the first round."""
        batch = self.batch
        step = PREFILL_TOKENS if len(prefixes) == 1 and batch.target.prefills_in_parts else max(map(len, prefixes))
        for first in range(0, max(map(len, prefixes)), step):
            parts = [prefix[first : first + step] for prefix in prefixes]
            logits_BV, features = batch.target.prefill(parts, self.cache, batch.layers)
            if batch.draft is None:
                continue
            states = [batch.draft.select_states(f) for f in features]
            following = [
                prefix[first + 1 : first + 1 + len(part)] for prefix, part in zip(prefixes, parts, strict=True)
            ]
            read = [aux_RAD[: len(tokens)] for aux_RAD, tokens in zip(states, following, strict=True)]
            batch.proposer.read(self.draft_cache, following, read)
        if batch.draft is None:
            return logits_BV, logits_BV.new_empty(len(prefixes), 0, 0)
        return logits_BV, torch.stack([aux_RAD[-1] for aux_RAD in states])

    def _first_tokens(self, logits_BV: Tensor) -> Tensor:
        """The tokens after the prompts, int64 [B]."""
        requests, batch = self.requests, self.batch
        last, length = ([f(r) for r in requests] for f in (lambda r: r.prefix[-1:], lambda r: len(r.prefix) - 1))
        root_B1, length_B = to_device([torch.tensor(last), torch.tensor(length)], batch.target.device)
        sampling, seen_BV = batch.sampling_of(requests)
        processing = [r.processing for r in requests]
        tree = Tree(root_B1, None, 0)
        verdict = verify(tree, logits_BV[:, None], length_B, sampling, batch.target_ids_W, seen_BV, processing)
        return verdict.token_BR[:, 0]

    def select(self, sequences: Sequence[int]) -> None:
        """Keeps only the requests with these indices."""
        self.cache.select(sequences)
        if self.draft_cache is not None:
            self.draft_cache.select(sequences)
        self.state = self.state.select(torch.tensor(sequences, dtype=torch.int64).to(self.state.length_B.device))


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
