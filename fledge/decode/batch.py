"""Batches of requests that are decoded together: requests join a batch, advance by rounds, and leave."""

from __future__ import annotations

import itertools
import time
import weakref
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from fledge.decode.draft_size import HELD, NOTHING, SETTLED, DraftSize, SizeChooser, fitting
from fledge.decode.request import Request
from fledge.decode.rounds import (
    CapturedRounds,
    Rounds,
    RoundState,
    Timer,
    can_capture,
    copy_to_host,
    current_stream,
    graph_memory,
    graph_size,
)
from fledge.decode.sampling import BatchSampling, seen_tokens
from fledge.decode.verify import verify
from fledge.ops.device import current_device, to_device
from fledge.targets.interface import DecodingTarget
from fledge.types import Prompt, Round, Tree

if TYPE_CHECKING:
    from fledge.decode.propose import NoDrafter, Proposer

PREFILL_TOKENS = 8192  # maximum tokens of a prefill pass, with padding where the target pads
# On a GPU, the seconds for which a prefill pass may stall running requests: longer prompts are read in parts, and a
# round is run between two parts. The first part has FIRST_PART tokens, since the speed is not known yet.
STALL, FIRST_PART, LEAST_PART = 0.05, 512, 64


@dataclass
class Launched:
    """A round that was launched for `requests`: the `size` drafted, the host tensor `results` (`Rounds.verify_trees`),
    and the times."""

    requests: Sequence[Request]
    size: DraftSize
    results: Tensor
    timer: Timer


class Batch:
    """The `running` requests of a batch.

    Where rounds can be captured as CUDA graphs, a round is launched before the results of the previous round are read,
    so that the device does not wait for the host. A request that ends then runs for one extra round, and the results of
    the extra round are dropped. `layers` are the target layers that the draft reads; None without a draft. `chooser`
    chooses the size of drafts; None: always the same size. When the chooser decides to draft nothing, `rests` becomes
    true. `drafts`: whether the batch has a draft.
    """

    def __init__(self, target: DecodingTarget, proposer: Proposer | NoDrafter, layers: Sequence[int] | None):
        self.target, self.proposer, self.layers = target, proposer, layers
        self.drafts = proposer.draft is not None
        self.kind = (self.drafts, False)  # whether the batch's requests ask for a draft, and draw drafted tokens
        self.chooser: SizeChooser | None = None
        self.due = 0  # rounds until another size is considered
        self.rests = False  # whether the requests should go on without the draft
        self.prefill_speed = 0.0  # tokens per second of the latest part of a prompt; 0: not known
        self.weights_at: tuple[Any, ...] = ()  # see `Engine._weights_at`
        self.cache = target.new_cache([])
        self.running: list[Request] = []
        self.holds = False  # whether the caches may have sequences, also those of requests that could not be added
        self.processes = False  # whether some running requests have logits processors
        self.rounds: Rounds | None = None  # of the running requests
        self.launched: list[Launched] = []
        self.timers: list[Timer] = []  # of rounds that are committed
        self.stream: torch.cuda.Stream | None = None  # of the last round, on a GPU
        self.captures = can_capture(target, proposer)
        self.graphs: dict[Any, CapturedRounds] = {}
        self.loaded: CapturedRounds | None = None  # the graphs that have the requests' state at present
        self.memory: Any = None  # the graphs' memory pool
        if self.captures:  # slots of places without a request come first, so that the pools do not fragment
            self.spare = (
                target.new_cache([proposer.most_nodes + proposer.most_levels + 1]),
                proposer.new_cache([proposer.scratch]),
            )
            weakref.finalize(self, self.spare[0].select, []).atexit = False

    def slots(self, longest: int) -> tuple[int, int]:
        """The numbers of slots in the caches of target and draft for a request of at most `longest` tokens, with room
        for the extra round that a complete request may run."""
        p = self.proposer
        return longest + p.most_nodes + 2 * p.most_levels + 1, longest + p.scratch + p.most_levels + 1

    def make_room(self, requests: int, longest: int) -> None:
        """Grows the caches to hold `requests` requests of at most `longest` tokens each without growing again."""
        of_target, of_draft = self.slots(longest)
        self.cache.pool.make_room(requests, of_target)
        if self.proposer.draft is not None:
            self.proposer.pool.make_room(requests, of_draft)

    def prepare(self, request: Request, sizes: Sequence[int], advance: Callable[[], None]) -> int:
        """Captures all rounds of batches of up to `sizes` requests with the sampling options of `request`. Prefills the
        request, but does not answer it. Calls `advance` for each kind of round; returns the number of new captures."""
        captured, used = 0, self.proposer.size
        joining = Joining(self, [request])
        for _ in joining.prefill():
            pass
        self._join(joining)
        try:
            # the largest first, as smaller graphs use the same memory again
            for size in sorted(sizes, reverse=True):
                of_batch = fitting(self.proposer.shapes, size)
                for other in sorted(of_batch, key=lambda s: s.nodes, reverse=True):
                    self.proposer.use(other)
                    if self._graph_key(size) not in self.graphs:
                        self._capture(size)
                        captured += 1
                    advance()
        finally:
            self.proposer.use(used)
            self.close()
        return captured

    def add(self, requests: Sequence[Request], running: bool = False) -> Iterator[list[Request]]:
        """Prefills requests, several in a pass, and starts to run the requests that do not end with the first token.
        Yields the requests that got tokens. The first token does not count as a round.

        `running`: whether requests are running, in this batch or another; a pass then takes about STALL seconds on a
        GPU. Between two parts of a prompt, an empty list is yielded, and the caller may run rounds.
        """
        if updated := self.settle():
            yield updated
        while requests:
            most = self._part_tokens() if running else PREFILL_TOKENS
            joining = Joining(self, requests[: self._prefill_count(requests, most)])
            for _ in joining.prefill(most):
                yield []
            if updated := self.settle():
                yield updated
            self._join(joining)
            yield list(joining.requests)
            requests = requests[len(joining.requests) :]

    def settle(self) -> list[Request]:
        """Commits all launched rounds and removes requests that are over. Returns the requests that got tokens."""
        updated = self._finish_launched()
        self._dismiss()
        return updated

    def _part_tokens(self) -> int:
        """The most tokens of a prefill pass while requests are running."""
        if self.target.device.type == "cpu" or not self.target.prefills_in_parts:
            return PREFILL_TOKENS
        if not self.prefill_speed:
            return FIRST_PART
        return min(max(int(STALL * self.prefill_speed), LEAST_PART), PREFILL_TOKENS)

    def _prefill_count(self, requests: Sequence[Request], most: int) -> int:
        """The number of leading requests whose prompts fit in a prefill pass of `most` tokens; at least 1."""
        lengths = [len(r.prefix) for r in requests]
        if self.target.pads:
            passes = (n * longest for n, longest in enumerate(itertools.accumulate(lengths, max), start=1))
        else:
            passes = itertools.accumulate(lengths)
        return max(1, sum(tokens <= most for tokens in passes))

    def _join(self, joining: Joining) -> None:
        """Adds the prefilled requests that are not complete to the running requests."""
        going = [i for i, request in enumerate(joining.requests) if not request.over]
        joining.select(going)
        if not going:
            return
        self._unload()
        self.holds = True
        self.cache.append(joining.cache)
        self.proposer.append(joining.draft_cache)
        states = [joining.state] if self.rounds is None else [self.rounds.state, joining.state]
        self.running += [joining.requests[i] for i in going]
        self._set_rounds(RoundState.concatenate([state.rows(self.proposer.rows) for state in states]))

    def _dismiss(self) -> None:
        """Removes complete requests from the batch and its caches."""
        going = [b for b, request in enumerate(self.running) if not request.over]
        if len(going) == len(self.running):
            return
        if going:
            self._unload()
        else:  # the state of complete requests is not read again
            self.loaded = None
        self._select(going)

    def take_over(self, other: Batch) -> list[Request]:
        """Takes the requests of a batch with a draft, and decodes them without a draft. Returns the requests that got
        tokens."""
        updated = other._finish_launched()
        other._dismiss()
        if other.running:
            other._unload()
            empty, taken, running, state = other.target.new_cache([]), other.cache, other.running, other.rounds.state
            other.cache, other.running, other.rounds = empty, [], None  # first, or a segment could be freed twice
            self.holds = True
            self.cache.append(taken)
            self.running = running
            other.proposer.select([])
            self._set_rounds(state.plain())
        other.close()
        return updated

    def _select(self, going: Sequence[int]) -> None:
        """Keeps only the requests with these indices."""
        self.running = [self.running[b] for b in going]
        self.cache.select(going)
        self.proposer.select(going)
        if going:
            index_B = to_device([torch.tensor(going)], self.target.device)[0]
            self._set_rounds(self.rounds.state.select(index_B))
        else:
            self.rounds, self.holds = None, False

    def _set_rounds(self, state: RoundState) -> None:
        """Sets `rounds` for the next rounds, after the running requests have changed."""
        sampling, seen_BV = self.sampling_of(self.running)
        self.processes = any(r.sampling.processors for r in self.running)
        self.proposer.set_sampling(sampling)
        self.rounds = Rounds(self.target, self.proposer, self.layers, self.cache, state, sampling, seen_BV)

    def sampling_of(self, requests: Sequence[Request]) -> tuple[BatchSampling, Tensor | None]:
        """The requests' sampling options, and the tokens of the prefixes, bool [B, V] (None without penalties)."""
        device, vocabulary = self.target.device, self.target.embedding.shape[0]
        sampling = BatchSampling.of([r.sampling for r in requests], [r.number for r in requests], device)
        prefixes = [r.prefix for r in requests]
        return sampling, seen_tokens(prefixes, vocabulary, device) if sampling.penalizes else None

    def close(self) -> None:
        """Removes all requests, complete or not."""
        self.launched, self.loaded, self.rests = [], None, False
        if self.holds:
            self._select([])

    def round(self) -> list[Request]:
        """Runs a round, and removes complete requests. Returns the requests that got tokens."""
        updated: dict[Request, None] = {}  # in order, without repetition
        if self.chooser is not None and self.drafts and self.running:
            self._adapt()
        if self.running and not self.rests:
            ahead = 2 if self._replays() else 1
            while len(self.launched) < ahead and self._needs_rounds():
                self._launch()
            updated.update(dict.fromkeys(self._commit()))
            complete = [request.over for request in self.running]
            if all(complete):
                self.launched.clear()
            elif any(complete):
                updated.update(dict.fromkeys(self._finish_launched()))
            if any(complete):
                self._dismiss()
        return list(updated)

    def _adapt(self) -> None:
        """Changes the draft size if another size is faster."""
        self.due -= 1
        if self.due > 0 and self.proposer.size in fitting(self.proposer.shapes, len(self.running)):
            return
        size = self.chooser.choose(len(self.running), self.proposer.size)
        self.due, self.rests = SETTLED if self.chooser.settled else HELD, size == NOTHING
        if size not in (NOTHING, self.proposer.size):
            self._unload()
            self.proposer.use(size)

    def _replays(self) -> bool:
        """Whether the next round is replayed. Logits processors need the tokens before a round on the host."""
        return self.captures and not self.processes

    def _needs_rounds(self) -> bool:
        """Whether a request may need more tokens than the launched rounds commit, at least one token per round."""
        return any(r.limit - len(r.done.tokens) > len(self.launched) for r in self.running)

    def _launch(self) -> None:
        """Starts a round of all running requests."""
        timer = self._timer()
        self.follow(timer.stream)
        if self._replays():
            host = self._replay(timer)
        else:
            self._unload()
            processing = [r.processing for r in self.running]
            rows = max(len(r.fresh) for r in self.running) if self.proposer.levels else None
            tree = self.rounds.draft_trees(rows)
            if self.proposer.levels:
                timer.mark()
            host = copy_to_host(self.rounds.verify_trees(tree, processing))
        timer.mark()
        self.launched.append(Launched(self.running, self.proposer.size, host, timer))

    def follow(self, stream: torch.cuda.Stream | None) -> None:
        """Lets the current stream (None on a CPU) wait for the last round if that round was launched in another stream:
        a caller may ask for each round in any stream, and a round is launched ahead."""
        if stream is not None and self.stream not in (None, stream):
            stream.wait_stream(self.stream)
        self.stream = stream

    def _timer(self) -> Timer:
        """A timer that has started."""
        if not self.timers:
            return Timer(self.target.device)
        timer = self.timers.pop()
        timer.start()
        return timer

    def _replay(self, timer: Timer) -> Tensor:
        """Launches the graphs of a round, and captures the graphs first if this kind of round is new. Returns the host
        tensor that will receive the results."""
        B = len(self.running)
        if self.loaded is not None and self.loaded.buffers != self._buffers():
            self._unload()  # another batch, or a check of the target, made a pool grow
        if self.loaded is None:
            size, self.rounds.state = graph_size(B), self.rounds.state.rows(self.proposer.rows)
            if (key := self._graph_key(size)) not in self.graphs:
                self._capture(size)
            self.loaded = self.graphs[key]
            self.loaded.load(self.rounds)
        self.loaded.draft()
        if self.proposer.levels:
            timer.mark()
        return self.loaded.verify()[:B]

    def _graph_key(self, size: int) -> tuple[Any, ...]:
        """The properties that rounds must have in common to share graphs: the number of places, the draft size, the
        sampling flags, and the buffers of the caches."""
        return size, self.proposer.size, self.rounds.sampling.flags, self._buffers()

    def _buffers(self) -> tuple[Any, ...]:
        """The addresses and shapes of the buffers of the caches. A pool that grows gets a new buffer."""
        return tuple((x.data_ptr(), x.shape) for x in (self.cache.pool.buffer, *self.proposer.buffers()))

    def _capture(self, size: int) -> None:
        """Captures the graphs of rounds of up to `size` requests, and drops graphs of buffers that no longer exist."""
        buffers = self._buffers()
        for old in [key for key in self.graphs if key[-1] != buffers]:
            del self.graphs[old]
        if not self.graphs:  # a memory pool ends with its last graph
            self.memory = graph_memory()
        self.graphs[self._graph_key(size)] = CapturedRounds(self.rounds, size, self.spare, self.memory, buffers)

    def _unload(self) -> None:
        """Takes the requests' state back from the graphs, before it is changed otherwise."""
        if self.loaded is not None:
            self.loaded.store(self.rounds)
            self.loaded = None

    def _commit(self) -> list[Request]:
        """Commits the results of the oldest launched round. Returns the round's requests that were not yet complete."""
        launched = self.launched.pop(0)
        *drafting, verifying = launched.timer.seconds()  # waits for the device
        self.timers.append(launched.timer)
        seconds, results = (sum(drafting, 0.0), verifying), launched.results.tolist()
        if self.chooser is not None:
            R = len(results[0]) // 2 - 1  # see `Rounds.verify_trees`
            paths = [row[R + 1 : R + row[-2]] for row in results]
            self.chooser.add(launched.size, [len(path) for path in paths], seconds, paths)
        updated = []
        for request, row in zip(launched.requests, results, strict=True):
            if request.over:
                continue
            count, drafted = row[-2:]
            request.commit(row[:count])
            if self.kind[0]:
                request.done.trace.rounds.append(Round(drafted, count - 1, *seconds))
            updated.append(request)
        return updated

    def _finish_launched(self) -> list[Request]:
        """Commits the results of all launched rounds. Returns the requests that got tokens."""
        updated: dict[Request, None] = {}
        while self.launched:
            updated.update(dict.fromkeys(self._commit()))
        return list(updated)


class Joining:
    """Requests that join a batch. `prefill` fills the requests' caches, commits the first tokens, and sets `state`."""

    def __init__(self, batch: Batch, requests: Sequence[Request]):
        self.batch, self.requests, self.start = batch, requests, time.perf_counter()

    @torch.inference_mode()
    def prefill(self, most: int = PREFILL_TOKENS) -> Iterator[None]:
        """Runs target and draft over the prompts, and commits the first tokens. Where the target can, a single prompt
        of more than `most` tokens is read in parts; yields between two parts. Frees the caches if the prefill fails or
        is not continued."""
        batch, target = self.batch, self.batch.target
        batch.follow(current_stream(target.device))
        of_target, of_draft = zip(*(batch.slots(r.longest) for r in self.requests), strict=True)
        self.cache, self.draft_cache = target.new_cache(of_target), None
        try:
            self.draft_cache = batch.proposer.new_cache(of_draft)
            logits_BV, aux_BAD = yield from self._read([r.prompt for r in self.requests], most)
            with current_device(target.device):
                self._begin(logits_BV, aux_BAD)
        except BaseException:
            self.cache.select([])
            if self.draft_cache is not None:
                self.draft_cache.select([])
            raise

    def _begin(self, logits_BV: Tensor, aux_BAD: Tensor) -> None:
        """Commits the first tokens."""
        requests, target = self.requests, self.batch.target
        target.check_numbers(logits_BV)
        token_B = self._first_tokens(logits_BV)
        length_B = to_device([torch.tensor([len(r.prefix) for r in requests])], target.device)[0]
        self.state = RoundState.first(token_B, aux_BAD, length_B)
        for request, token in zip(requests, token_B.tolist(), strict=True):
            request.began = self.start
            request.commit([token])
            request.done.trace.t_prefill = time.perf_counter() - self.start

    def _read(self, prompts: Sequence[Prompt], most: int) -> Generator[None, None, tuple[Tensor, Tensor]]:
        """Runs target and draft over the prompts. Returns the target's logits after each prompt, [B, V], and the
        target's hidden states at the last tokens, [B, A, D]; the draft reads the last tokens in the first round."""
        batch, draft = self.batch, self.batch.proposer.draft
        final = draft is not None and not draft.family.reads_layers  # whether the draft reads the final states
        longest = max(map(len, prompts))
        step = most if len(prompts) == 1 and batch.target.prefills_in_parts else longest
        for first in range(0, longest, step):
            parts = [prompt.part(first, first + step) for prompt in prompts]
            timer = Timer(batch.target.device)
            with current_device(batch.target.device):
                logits_BV, features = batch.target.prefill(parts, self.cache, batch.layers, final)
            if draft is not None:
                states = [draft.select_states(f) for f in features]
                following = [
                    prompt.ids[first + 1 : first + 1 + len(part)] for prompt, part in zip(prompts, parts, strict=True)
                ]
                read = [aux_RAD[: len(tokens)] for aux_RAD, tokens in zip(states, following, strict=True)]
                with current_device(draft.device):
                    batch.proposer.read(self.draft_cache, following, read)
            if first + step < longest:
                timer.mark()
                batch.prefill_speed = step / timer.seconds()[0]
                yield
        if draft is None:
            return logits_BV, logits_BV.new_empty(len(prompts), 0, 0)
        return logits_BV, torch.stack([aux_RAD[-1] for aux_RAD in states])

    def _first_tokens(self, logits_BV: Tensor) -> Tensor:
        """The tokens after the prompts, int64 [B]."""
        requests, batch = self.requests, self.batch
        root_B1 = torch.tensor([r.prefix[-1:] for r in requests])
        length_B = torch.tensor([len(r.prefix) - 1 for r in requests])
        root_B1, length_B = to_device([root_B1, length_B], batch.target.device)
        sampling, seen_BV = batch.sampling_of(requests)
        processing = [r.processing for r in requests]
        tree = Tree(root_B1, None, 0)
        verdict = verify(tree, logits_BV[:, None], length_B, sampling, None, seen_BV, processing)
        return verdict.token_BR[:, 0]

    def select(self, sequences: Sequence[int]) -> None:
        """Keeps only the requests with these indices."""
        if len(sequences) == len(self.requests):
            return
        self.cache.select(sequences)
        if self.draft_cache is not None:
            self.draft_cache.select(sequences)
        self.state = self.state.select(torch.tensor(sequences, dtype=torch.int64).to(self.state.length_B.device))
