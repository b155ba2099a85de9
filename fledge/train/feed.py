"""Target ranks: hold only the target, and send the hidden states of rows to the training ranks, which train the draft.

Every rank knows every row, so ranks exchange hidden states only: one message for each row, from the target rank that
computes the row to the training rank that uses the row. `Deliveries` gives the order of the messages. Target ranks take
rows in turn: a round is n consecutive rows for n target ranks, one row each. A sharded target computes a round in
lockstep.

Before the ranks meet in a step (`Ranks.meet`), the target ranks send the first `Deliveries.sent` rounds: the rounds
with the step's rows, the rounds with each training rank's first row of the next step (which may be received early), and
AHEAD more rounds. The target thus computes rows while the draft trains on earlier rows, and no rank waits for a message
that is sent only after the meeting.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from fledge.data.pack import Rows
from fledge.targets.source import LiveFeatures, RowIterator
from fledge.train.ranks import Ranks
from fledge.types import Features, Packed

if TYPE_CHECKING:
    from fledge.drafts.draft import Draft
    from fledge.targets.interface import TrainingTarget
    from fledge.train.trainer import Run

AHEAD = 1  # rounds sent before a meeting, beyond the rounds that training ranks may ask for
BEFORE, AFTER = "before the first step", "after the last step"  # names of the meetings outside of steps


@dataclass(frozen=True)
class Delivery:
    """A row of a step, and the `rank` that trains on the row. `address` is (epoch, index of the row within the epoch),
    and `index` counts the rows of the step."""

    step: int
    index: int
    address: tuple[int, int]
    rank: int


class Deliveries:
    """The rows of all steps from a run's current progress on (step `first`, row `address`), in the order of
    computation: step by step, and in each step the first rows of all ranks, then the second rows, and so on."""

    def __init__(self, run: Run):
        self.rows, self.ranks, self.steps = run.rows, run.ranks, run.schedule.steps
        self.first, self.address = run.progress.step, run.progress.address
        self.rows_per_step = run.schedule.rows_per_step

    def __iter__(self) -> Iterator[Delivery]:
        address = self.address
        for step in range(self.first, self.steps):
            yield from deliveries_of_step(self.rows, step, address, self.rows_per_step, self.ranks)
            for _ in range(self.rows_per_step):
                address = self.rows.next(address)

    def rounds(self) -> Iterator[tuple[Delivery, ...]]:
        """Groups of deliveries that the target ranks compute at the same time, one delivery for each target rank. The
        last round may be incomplete."""
        upcoming = iter(self)
        return iter(lambda: tuple(itertools.islice(upcoming, self.ranks.target_ranks)), ())

    def sent(self, step: int) -> int:
        """The number of rounds that the target ranks send before the ranks meet in a step."""
        asked = (step + 1 - self.first) * self.rows_per_step + min(self.rows_per_step, self.ranks.size)
        total = (self.steps - self.first) * self.rows_per_step
        return min(-(-asked // self.ranks.target_ranks) + AHEAD, -(-total // self.ranks.target_ranks))


def deliveries_of_step(rows: Rows, step: int, address: tuple[int, int], count: int, ranks: Ranks) -> Iterator[Delivery]:
    """The deliveries of a step of `count` rows; `address` is the address of the step's first row."""
    addresses = [address]
    for _ in range(count - 1):
        addresses.append(rows.next(addresses[-1]))
    shares = ranks.shares([rows.supervised(a) for a in addresses]) if ranks.size > 1 else [range(count)]
    for round_ in itertools.zip_longest(*shares):
        for rank, index in enumerate(round_):
            if index is not None:
                yield Delivery(step, index, addresses[index], rank)


class ReceivedFeatures:
    """The `FeatureSource` of a training rank: receives the features that target ranks compute. `target` has the head,
    with which `logits` computes the teacher's logits, and `layers` is the number of layers that the draft reads.

    Call `begin` first, then ask for rows in the order of the deliveries. A row without sources (a trial row, to measure
    the memory of a training step) gets zeros.
    """

    def __init__(self, target: TrainingTarget, layers: int, ranks: Ranks):
        self.target, self.layers, self.ranks = target, layers, ranks
        self._deliveries: Deliveries | None = None
        self._expected: Iterator[int] = iter(())
        self._early: deque[Features] = deque()  # received before `features` asks for them

    def begin(self, deliveries: Deliveries) -> None:
        """Registers a run's deliveries. A rank receives only the deliveries with the rank's number."""
        self._deliveries = deliveries
        self._expected = (place for place, d in enumerate(deliveries) if d.rank == self.ranks.rank)

    def features(self, row: Packed) -> Features:
        """The features of this rank's next row. Raises RankError if the features do not arrive."""
        if not row.sources:
            return self._features(self._memory(row.token_T.numel()).zero_())
        return self._early.popleft() if self._early else self._receive(next(self._expected), row.token_T.numel())

    def logits(self, last_ND: Tensor) -> Tensor:
        return self.target.logits(last_ND)

    def ahead(self, rows: RowIterator) -> RowIterator:
        return rows

    def receive_sent(self, steps_done: int) -> None:
        """Receives all rows sent so far. Must run before the target ranks decode: a target rank that waits for the
        device also waits until the sent rows are received."""
        sent = self._deliveries.sent(steps_done - 1) * self.ranks.target_ranks
        for place in self._expected:
            if place >= sent:
                self._expected = itertools.chain([place], self._expected)
                break
            self._early.append(self._receive(place, self._deliveries.rows.row_length))

    def finish(self, steps_done: int) -> None:
        """Receives the rows of later steps after a stop, so that no message stays in flight."""
        self.receive_sent(steps_done)
        self._early.clear()

    def _receive(self, place: int, tokens: int) -> Features:
        sender = place % self.ranks.target_ranks
        states = self._memory(tokens)
        giver = self.ranks.size + sender
        with self.ranks.collective("while its hidden states were awaited", giver):
            dist.irecv(states, src=giver, group=self.ranks.feeds[sender]).wait()
        return self._features(states)

    def _memory(self, tokens: int) -> Tensor:
        """Uninitialized memory for a row's features, [tokens * (layers + 1), D]: the captured layers' states of all
        tokens, then the final states."""
        width = self.target.embedding.shape[1]
        return torch.empty(tokens * (self.layers + 1) * width, dtype=self.target.dtype, device=self.target.device).view(
            -1, width
        )

    def _features(self, states: Tensor) -> Features:
        tokens = states.shape[0] // (self.layers + 1)
        return Features(states[:-tokens].view(tokens, self.layers, states.shape[1]), states[-tokens:])


class Sender:
    """Computes and sends the features of a target rank's deliveries. If the target is sharded, all target ranks compute
    every round together."""

    def __init__(self, source: LiveFeatures, deliveries: Deliveries, ranks: Ranks):
        self.source, self.deliveries, self.ranks = source, deliveries, ranks
        self.failure: Exception | None = None
        self._rounds, self._done = deliveries.rounds(), 0
        self._sending: deque[tuple[int, int, Tensor, Any]] = deque()  # step, receiving rank, sent states, and the work

    def send(self, step: int) -> None:
        """Sends the rounds that are due before the ranks meet in a step (`Deliveries.sent`).

        If a row fails, sends zeros for the failed row and all later rows, since training ranks may already wait for
        the messages. `failure` keeps the error, which the meeting reports to all ranks.
        """
        while self._done < self.deliveries.sent(step):
            self._send_round(next(self._rounds), step)
            self._done += 1

    def _send_round(self, round_: tuple[Delivery, ...], step: int) -> None:
        place = self.ranks.rank - self.ranks.size
        own = round_[place] if place < len(round_) else None
        if own is None and not self.source.target.sharded:
            return
        while len(self._sending) > AHEAD and self._sending[0][0] <= step:
            self._wait_for_oldest()
        states = self._compute(self.deliveries.rows[(own or round_[0]).address])
        if own is not None:
            group = self.ranks.feeds[place]
            self._sending.append((own.step, own.rank, states, dist.isend(states, dst=own.rank, group=group)))

    def _compute(self, row: Packed) -> Tensor:
        target = self.source.target
        if self.failure is None:
            try:
                found = self.source.features(row)
                parts = (found.aux_TAD.flatten(0, 1), found.last_TD)
                return torch.cat([x.to(target.device, target.dtype) for x in parts])
            except Exception as e:
                self.failure = e
        states, width = row.token_T.numel() * (len(self.source.layers) + 1), target.embedding.shape[1]
        return torch.zeros(states, width, dtype=target.dtype, device=target.device)

    def finish(self) -> None:
        """Waits until the training ranks have received all sent rows."""
        while self._sending:
            self._wait_for_oldest()

    def _wait_for_oldest(self) -> None:
        _, receiver, _, work = self._sending.popleft()
        with self.ranks.collective("while hidden states were sent to it", receiver):
            work.wait()


def feed(run: Run, until: int, evaluate: Callable[[Draft], Any] | None = None) -> None:
    """The loop of a target rank, while training ranks run `trainer.train`. The progress starts as the progress of the
    training ranks. Advances `progress.step` to `until`, or until a rank asks to stop.

    `evaluate` gets the run's draft, and first overwrites its weights by the trained weights. Raises the error of this
    rank's target, and RankError if another rank fails.
    """
    progress, ranks = run.progress, run.ranks
    sender = Sender(run.source, Deliveries(run), ranks)
    while progress.step < until:
        sender.send(progress.step)
        stops = any(ranks.meet(f"in step {progress.step + 1}", run.stopping, sender.failure))
        progress.step += 1
        if evaluate and run.schedule.evaluates_after(progress.step):
            evaluate(run.draft)
        if stops:
            break
    sender.finish()
    ranks.meet(AFTER, None)
