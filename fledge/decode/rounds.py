"""Rounds of drafting and verification on the device: computed directly, or replayed as CUDA graphs.

Both run the same functions. Replayed, the host launches two graphs per round and reads the committed tokens later.

The draft may be on another device than the target. A round then copies what the target committed last (`RoundState`) to
the draft's device, and the trees back; nothing else travels. torch makes each copy wait for both devices' current
streams and these for the copy, so that the host waits for none. Per request, a round copies mainly the target's hidden
states, R x A x D numbers, and, where drafted tokens are drawn, their distributions, K x W numbers of 8 bytes.
"""

from __future__ import annotations

import functools
import itertools
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor
from torch.nn import functional as F

from fledge.decode.sampling import BatchSampling, see
from fledge.decode.verify import Processing, verify
from fledge.ops.device import current_device, has_kernels
from fledge.targets.interface import Cache, DecodingTarget
from fledge.types import Tree, Verdict

if TYPE_CHECKING:
    from fledge.decode.propose import NoDrafter, Proposer

Values = TypeVar("Values", "RoundState", BatchSampling, Tree)

LARGE = 8192  # numbers of a tensor above which a copy of its own is faster than one block of torch._foreach_copy_
GRAPH_SIZES = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128)  # numbers of requests that graphs are captured for


class EagerWarning(UserWarning):
    """Rounds are launched operation by operation, though rounds of the target alone would be CUDA graphs."""


def graph_size(requests: int) -> int:
    """The batch size of the graphs that run `requests` requests: the next of GRAPH_SIZES, and beyond the largest one a
    multiple of 32."""
    return next((n for n in GRAPH_SIZES if n >= requests), -(-requests // 32) * 32)


@dataclass(frozen=True)
class RoundState:
    """What a round passes to the next: the tokens that each of B requests committed last, which the draft has not read.

    Of R rows, the first `count_B[b]` (int64, at least 1) are valid. `token_BR` are the tokens, int64; the last valid
    token is the next tree's root. `aux_BRAD` are the target's hidden states at the token before each token. `path_BR`
    (int64) are the accepted nodes of the last tree, the root first. `length_B` (int64) are the numbers of all committed
    tokens without the root.
    """

    token_BR: Tensor
    aux_BRAD: Tensor
    count_B: Tensor
    path_BR: Tensor
    length_B: Tensor

    @classmethod
    def first(cls, token_B: Tensor, aux_BAD: Tensor, length_B: Tensor) -> RoundState:
        """The state after a prefill: one token of each request, and the hidden states at the prompt's last token."""
        token_B1, one_B = token_B[:, None], torch.ones_like(token_B)
        return cls(token_B1, aux_BAD[:, None], one_B, torch.zeros_like(token_B1), length_B)

    def after(self, verdict: Verdict, aux_BNAD: Tensor, chains: bool) -> RoundState:
        """The state after a verification; `aux_BNAD` are the target's hidden states at all nodes. `chains`: whether all
        trees are chains; the accepted nodes are then the first nodes, and nothing need be gathered."""
        aux_BRAD = aux_BNAD
        if not chains:
            aux_BRAD = aux_BNAD.gather(1, verdict.path_BR[..., None, None].expand(-1, -1, *aux_BNAD.shape[2:]))
        return RoundState(verdict.token_BR, aux_BRAD, verdict.count_B, verdict.path_BR, self.length_B + verdict.count_B)

    def plain(self) -> RoundState:
        """The state of requests that go on without a draft: the last valid tokens (R = 1), without hidden states
        (A = D = 0)."""
        token_B1 = self.token_BR.gather(1, self.count_B[:, None] - 1)
        return RoundState.first(token_B1[:, 0], self.aux_BRAD.new_empty(len(token_B1), 0, 0), self.length_B)

    def idle(self, size: int) -> RoundState:
        """The state of `size` requests that do not exist: one token of an empty text."""
        return replace(self._map(lambda x: x.new_zeros(size, *x.shape[1:])), count_B=self.count_B.new_ones(size))

    def rows(self, n: int) -> RoundState:
        """The same state with R = n rows: cut, or padded with zeros."""
        if n == self.token_BR.shape[1]:
            return self
        return self._map(lambda x: F.pad(x, (0, 0) * (x.dim() - 2) + (0, n - x.shape[1])) if x.dim() > 1 else x)

    def select(self, index_B: Tensor) -> RoundState:
        """The requests with these indices (int64)."""
        return self._map(lambda x: x[index_B])

    def to(self, device: torch.device) -> RoundState:
        """The state on another device. Only a copy to the CPU is waited for."""
        if device == self.token_BR.device:
            return self
        return self._map(lambda x: x.to(device, non_blocking=device.type != "cpu"))

    @staticmethod
    def concatenate(states: Sequence[RoundState]) -> RoundState:
        """The requests of several states with equal R; a single state itself, not a copy."""
        if len(states) == 1:
            return states[0]
        return RoundState(*(torch.cat(x) for x in zip(*(vars(s).values() for s in states), strict=True)))

    def _map(self, change: Callable[[Tensor], Tensor]) -> RoundState:
        return RoundState(*(change(x) for x in vars(self).values()))


class Timer:
    """Measures the seconds from the last start to the first `mark`, and from each mark to the next. Creating a timer
    starts it. On a GPU, the times are events of the stream that is current at the start. A round has two times on the
    target's device: of drafting, if anything is drafted, and of verification. Drafting on another device includes the
    copies to that device and back. Verification includes bringing the results to the host, which takes microseconds."""

    def __init__(self, device: torch.device):
        self.device, self.cuda = device, device.type == "cuda"
        self.events: list[torch.cuda.Event] = []  # used again after each start, as torch creates events slowly
        self.marks: list[Any] = []
        self.start()

    def start(self) -> None:
        """Starts the timer again."""
        self.stream = current_stream(self.device)
        self.marks.clear()
        self.mark()

    def mark(self) -> None:
        """Records the current time."""
        if not self.cuda:
            self.marks.append(time.perf_counter())
            return
        if len(self.marks) == len(self.events):
            self.events.append(torch.cuda.Event(enable_timing=True))
        event = self.events[len(self.marks)]
        event.record(self.stream)
        self.marks.append(event)

    def seconds(self) -> list[float]:
        """The seconds up to each mark. Waits for the device to reach the last mark."""
        if not self.cuda:
            return [b - a for a, b in itertools.pairwise(self.marks)]
        self.marks[-1].synchronize()
        return [a.elapsed_time(b) / 1e3 for a, b in itertools.pairwise(self.marks)]


def current_stream(device: torch.device) -> torch.cuda.Stream | None:
    """The current stream of a GPU, faster than by `torch.cuda.current_stream`, which takes longer than recording an
    event. None for a CPU."""
    if device.type != "cuda":
        return None
    index = torch.cuda.current_device() if device.index is None else device.index
    return stream_at(index, torch._C._cuda_getCurrentRawStream(index))


@functools.cache
def stream_at(index: int, address: int) -> torch.cuda.Stream:
    """`torch.cuda.current_stream`, cached by `address`, the address of the current stream. torch keeps streams for as
    long as the program runs."""
    return torch.cuda.current_stream(index)


def copy_to_host(results: Tensor) -> Tensor:
    """A copy of a round's results in the host's memory. The copy is complete when the current stream has passed this
    call; an event recorded after the call tells when."""
    host = torch.empty(results.shape, dtype=results.dtype, device="cpu", pin_memory=results.is_cuda)
    return host.copy_(results, non_blocking=True)


def apart(drafter: Proposer | NoDrafter, device: torch.device) -> bool:
    """Whether a draft is on another device than `device`."""
    return drafter.device not in (None, device)


def tensors_of(values: Values) -> list[Tensor]:
    """The tensors of a dataclass, in the order of its fields."""
    return [x for x in (getattr(values, f.name) for f in fields(values)) if isinstance(x, Tensor)]


def copy_to(values: Values, device: torch.device) -> Values:
    """A dataclass with contiguous copies of its tensors on a device."""
    given = {f.name: getattr(values, f.name) for f in fields(values)}
    to = dict(copy=True, memory_format=torch.contiguous_format)
    return replace(values, **{name: x.to(device, **to) for name, x in given.items() if isinstance(x, Tensor)})


def copy_into(copies: Values, values: Values) -> None:
    """Copies the tensors of a dataclass into the copies that `copy_to` returned. On GPUs, the host does not wait."""
    for copy, x in zip(tensors_of(copies), tensors_of(values), strict=True):
        copy.copy_(x, non_blocking=True)


def copy_all(copies: Sequence[Tensor], values: Sequence[Tensor]) -> None:
    """Copies `values[i]` into `copies[i]`, a tensor of the same shape and dtype. Pairs of one and the same tensor are
    skipped. One kernel copies all small tensors of a dtype."""
    small: dict[torch.dtype, tuple[list[Tensor], list[Tensor]]] = defaultdict(lambda: ([], []))
    for copy, x in zip(copies, values, strict=True):
        if x is copy:
            continue
        if copy.numel() > LARGE:
            copy.copy_(x)
        else:
            into, of = small[copy.dtype]
            into.append(copy)
            of.append(x)
    for into, of in small.values():
        torch._foreach_copy_(into, of)


@dataclass
class Rounds:
    """The data that rounds of B requests read and change: `drafter` on the draft's device, the rest on the target's.

    `layers` are the target layers that the draft reads; None without a draft. `state` are the tokens committed last,
    and `sampling` the requests' options. `seen_BV` (bool) are the tokens of each prefix; None unless a request has a
    repetition penalty.
    """

    target: DecodingTarget
    drafter: Proposer | NoDrafter
    layers: Sequence[int] | None
    cache: Cache
    state: RoundState
    sampling: BatchSampling
    seen_BV: Tensor | None = None

    def tensors(self) -> list[Tensor]:
        """All tensors with one entry for each request that a verification reads and changes, or reads."""
        seen = [] if self.seen_BV is None else [self.seen_BV]
        return [*tensors_of(self.state), *self.cache.tensors(), *tensors_of(self.sampling), *seen]

    @functools.cached_property
    def target_ids_W(self) -> Tensor:
        """The target's ids of the draft's tokens, int64, on the target's device."""
        return self.drafter.draft.target_ids().to(self.state.token_BR.device)

    @torch.inference_mode()
    def draft_trees(self, rows: int | None = None) -> Tree:
        """The trees that are verified next. `rows` is the most tokens of a request that the draft has not read; None
        allows for all rows of the state."""
        drafter, device = self.drafter, self.state.token_BR.device
        state = self.state if rows is None else self.state.rows(rows)
        with current_device(drafter.device or device):
            tree = drafter.propose(state)
        return tree.to(device) if apart(drafter, device) else tree

    @torch.inference_mode()
    def verify_trees(self, tree: Tree, processing: Sequence[Processing | None] = ()) -> Tensor:
        """Verifies trees and commits the accepted nodes. Returns the results, int64 [B, 2 R + 2]: R tokens to commit,
        their R nodes of the tree, the root first, the number of valid ones, and the number of drafted ones."""
        with current_device(self.state.token_BR.device):
            return self._verify(tree, processing)

    def _verify(self, tree: Tree, processing: Sequence[Processing | None]) -> Tensor:
        draft, state = self.drafter.draft, self.state
        logits_BNV, features = self.target.verify(tree, self.cache, self.layers)
        ids_W = None if tree.q_BKW is None else self.target_ids_W
        verdict = verify(tree, logits_BNV, state.length_B, self.sampling, ids_W, self.seen_BV, processing)
        self.cache.keep(None if tree.parent_BN is None else verdict.path_BR, verdict.count_B)
        if self.seen_BV is not None:
            see(self.seen_BV, verdict)
        if features is None:
            aux_BNAD = logits_BNV.new_empty(*tree.token_BN.shape, 0, 0)
        else:
            aux_BNAD = draft.select_states(features).unflatten(0, tree.token_BN.shape)
        self.state = state.after(verdict, aux_BNAD, chains=tree.parent_BN is None)
        drafted_B = torch.full_like(verdict.count_B, tree.levels) if tree.count_B is None else tree.count_B - 1
        numbers = verdict.count_B[:, None], drafted_B[:, None]
        return torch.cat([verdict.token_BR, verdict.path_BR, *numbers], dim=1)


def can_capture(target: DecodingTarget, drafter: Proposer | NoDrafter) -> bool:
    """Whether rounds can be captured as CUDA graphs: the target is native, target and draft are on GPUs in a dtype that
    the kernels support, and drafting does not ask the device when to end."""
    native = target.implementation == "native" and has_kernels(target.device, target.dtype)
    draft = drafter.draft
    return native and drafter.capturable and (draft is None or has_kernels(draft.device, draft.dtype))


def graph_memory() -> Any:
    """A new memory pool for graphs that are replayed one after the other, with a part on each device. The pool is freed
    with the last graph."""
    return torch.cuda.graph_pool_handle()


@functools.cache
def side_stream(device: torch.device) -> torch.cuda.Stream:
    """The stream of a GPU that all graphs are captured on: graphs share memory only if captured on one stream."""
    return torch.cuda.Stream(device)


def warm_up(work: Callable[[], Any], device: torch.device) -> Any:
    """Runs `work` on a GPU before a capture, to compile kernels and initialise libraries. Returns the results of
    `work`."""
    side, current = side_stream(device), torch.cuda.current_stream(device)
    side.wait_stream(current)
    with torch.cuda.device(device), torch.cuda.stream(side):
        results = work()
    current.wait_stream(side)
    return results


def capture(work: Callable[[], Any], memory: Any, device: torch.device) -> tuple[Callable[[], None], Any]:
    """Captures the kernels of `work`, all on one GPU, as a CUDA graph. Returns a function that replays the graph on the
    GPU's current stream, and the results of `work`. Each replay computes the tensors of the results anew."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.device(device), torch.cuda.graph(graph, pool=memory, stream=side_stream(device)):
        results = work()
    return graph.replay, results


class Places:
    """Tensors with an entry for each of `size` places, at the addresses that graphs read and write.

    Places without a request decode an empty sequence, again and again, in slots reserved for this. `lengths` are the
    members of `tensors` that count a sequence's tokens.
    """

    def __init__(self, size: int, device: torch.device, tensors: Sequence[Tensor], lengths: Sequence[Tensor]):
        self.size, self.tensors, self.lengths = size, tensors, lengths
        self.idle = [x.clone() for x in tensors]
        self.active_B = torch.zeros(size, dtype=torch.int64, device=device)

    def reset(self) -> None:
        """Makes all places places without a request."""
        copy_all(self.tensors, self.idle)
        self.active_B.zero_()

    def load(self, theirs: Sequence[Tensor], requests: int) -> None:
        """Copies the requests' tensors `theirs`, in the order of `tensors`, to the first places."""
        if requests < self.size:
            self.reset()
        copy_all([mine[:requests] for mine in self.tensors], theirs)
        self.active_B[:requests] = 1

    def store(self, theirs: Sequence[Tensor], requests: int) -> None:
        """Gives the first places' values back to their requests."""
        copy_all(theirs, [mine[:requests] for mine in self.tensors])

    def keep(self, changed: Sequence[Tensor]) -> None:
        """Copies the tensors `changed`, which a round computed as new values of `tensors`, to the places. A changed
        tensor may have fewer columns. Places without a request start again with length 0."""
        copy_all(
            [x if x.shape == new.shape else x[:, : new.shape[1]] for x, new in zip(self.tensors, changed, strict=True)],
            changed,
        )
        if self.size > 1 and self.lengths:
            torch._foreach_mul_(self.lengths, [self.active_B] * len(self.lengths))


class CapturedRounds:
    """Rounds of up to `size` requests as two CUDA graphs, for drafting and for verification, each on its own device.

    `draft` and `verify` replay the graphs. The graphs read and change separate tensors (`Places`): `load` copies the
    tensors of other rounds to the places, and `store` copies back. Where the devices differ, `draft` also copies the
    state to the draft's device first, and the trees to the target's device afterwards.
    """

    def __init__(self, rounds: Rounds, size: int, spare: tuple[Cache, Any], memory: Any, buffers: Any):
        """`spare` are caches of the target and the draft with a segment of slots for places without a request. `memory`
        is the graphs' memory pool (`graph_memory`). `buffers` identify the present buffers of the caches
        (`Batch._buffers`), which the graphs read by address."""
        self.buffers = buffers
        target, drafter, device = rounds.target, rounds.drafter.idle(spare[1], size), rounds.state.token_BR.device
        draft_device = drafter.device or device
        cache = spare[0].repeated(size)
        seen_BV = None if rounds.seen_BV is None else rounds.seen_BV.new_zeros(size, rounds.seen_BV.shape[1])
        state, sampling = rounds.state.idle(size), rounds.sampling.idle(size)
        self.apart = drafter.levels > 0 and apart(drafter, device)
        self.rounds = Rounds(target, drafter, rounds.layers, cache, state, sampling, seen_BV)
        self.state, draft_sampling = state, sampling  # as drafting reads them
        if self.apart:
            self.state, draft_sampling = copy_to(state, draft_device), copy_to(sampling, draft_device)
        drafter.set_sampling(draft_sampling)
        self.verifying = Places(size, device, self.rounds.tensors(), [state.length_B, cache.length_B])
        copied = tensors_of(draft_sampling) if self.apart else []
        self.drafting = Places(size, draft_device, [*drafter.tensors(), *copied], drafter.lengths())
        for _ in range(2):
            tree = self._to_target(warm_up(self._draft, draft_device))
            warm_up(lambda tree=tree: self._verify(tree), device)
            self._reset()  # a place without a request has no slots for a second round
        if drafter.levels:
            self.replay_draft, self.drafted = capture(self._draft, memory, draft_device)
            self.tree = self._to_target(self.drafted)
            self.replay_verify, self.results = capture(lambda: self._verify(self.tree), memory, device)
        else:  # without a draft, a tree is the root alone
            self.replay_draft = lambda: None
            self.replay_verify, self.results = capture(lambda: self._verify(self._draft()), memory, device)

    @torch.inference_mode()
    def _to_target(self, tree: Tree) -> Tree:
        """Trees on the target's device: the given trees, or copies."""
        return copy_to(tree, self.rounds.state.token_BR.device) if self.apart else tree

    @torch.inference_mode()
    def _reset(self) -> None:
        self.verifying.reset()
        self.drafting.reset()

    @torch.inference_mode()
    def _draft(self) -> Tree:
        drafter = self.rounds.drafter
        tree = drafter.propose(self.state)
        if drafter.levels:
            own, kept = drafter.tensors(), self.drafting.tensors
            self.drafting.keep([*own, *kept[len(own) :]])
            drafter.bind(kept[: len(own)])
        return tree

    @torch.inference_mode()
    def _verify(self, tree: Tree) -> Tensor:
        """Verifies trees, and copies the new state to where the graphs read it."""
        rounds = self.rounds
        results = rounds.verify_trees(tree)
        self.verifying.keep(rounds.tensors())
        rounds.state = RoundState(*self.verifying.tensors[: len(vars(rounds.state))])
        return results

    def draft(self) -> None:
        """Launches the drafting of the trees that `verify` verifies."""
        if not self.apart:
            self.replay_draft()
            return
        with torch.inference_mode():
            copy_into(self.state, self.rounds.state)
            self.replay_draft()
            copy_into(self.tree, self.drafted)

    def verify(self) -> Tensor:
        """Launches the verification. Returns the host tensor that will receive the results (`Rounds.verify_trees`), a
        row for each place."""
        self.replay_verify()
        return copy_to_host(self.results)

    @torch.inference_mode()
    def load(self, rounds: Rounds) -> None:
        """Copies the requests of other rounds, with the same sampling flags, to the places."""
        requests = rounds.state.count_B.numel()
        self.verifying.load(rounds.tensors(), requests)
        self.drafting.load(self._read_by_draft(rounds), requests)

    @torch.inference_mode()
    def store(self, rounds: Rounds) -> None:
        """Copies the tensors of the loaded requests back to their rounds."""
        requests = rounds.state.count_B.numel()
        self.verifying.store(rounds.tensors(), requests)
        self.drafting.store(self._read_by_draft(rounds), requests)

    def _read_by_draft(self, rounds: Rounds) -> list[Tensor]:
        """The tensors of rounds that `drafting` has places for."""
        return [*rounds.drafter.tensors(), *(tensors_of(rounds.sampling) if self.apart else [])]
