"""How much is drafted in a round, chosen while decoding ("auto").

The best amount is the one with the most tokens per second: the tokens that a round is expected to commit, by the
acceptance measured lately, divided by the seconds that such a round takes. Nothing at all is one of the amounts: where
drafting does not pay, speculation pauses. The draft then reads the committed tokens now and then, and its guesses for
them tell when drafting would pay again. Where it does not pay when new requests begin, these rest: they are decoded as
without a draft to the end. The draft then guesses one complete answer in many (`decode/probe.py`), and requests are
decoded with it again when that tells that it would pay, or after a number of them, to measure what rounds take.
"""

from __future__ import annotations

import bisect
import statistics
from collections import defaultdict, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from fledge.decode.rounds import graph_size

TIMED = 3  # the fewest rounds that the cost of an amount is known from
LATEST = 16  # the most
MEMORY = 64  # rounds over which a measured acceptance loses most of its weight
NEARLY = 0.9  # how fast drafting must be, relative to decoding without it, to time a large amount
GAIN = 1.02  # how much faster another amount must promise to be
GAIN_OF_DRAFTING = 1.06  # the same after a pause, when the acceptance is known less well
REST, MOST_REST = 32, 128  # batches of requests that rest while the draft does not pay: at first, and at most
PROBE = 8  # batches of resting requests of which the draft guesses one answer
WORTH = 4  # batches of requests that must wait to let the running ones end first, so that others rest, or no longer
PRIOR, PRIOR_ROUNDS = 0.6, 4  # an acceptance to begin with, and the rounds that it counts for
FALL = 0.95  # acceptance at a depth never drafted, relative to that at the depth above it
AGAIN, SELDOM = 256, 2048  # rounds until the costs are measured again, doubled each time up to the second number
GROWTH = 0.2  # assumed: accepted tokens grow with this power of a tree's nodes, from those of the trees used lately


@dataclass(frozen=True, order=True)
class Amount:
    """What a round drafts: paths of at most `depth` tokens, in trees of at most `nodes` nodes, the root included."""

    depth: int
    nodes: int


NOTHING = Amount(0, 1)


class AcceptanceRates:
    """How often a token at each depth is accepted where those above it were, over the latest rounds. A token that was
    not drafted, because its chain had ended (`confidence`), counts as not accepted."""

    def __init__(self, depth: int):
        self.tried, self.accepted = [0.0] * depth, [0.0] * depth

    def add(self, depth: int, accepted: Iterable[int]) -> None:
        """Adds the numbers of accepted tokens of one round of each request, of at most `depth` drafted ones."""
        self._fade()
        for n in accepted:
            for k in range(min(depth, n + 1)):
                self.tried[k] += 1
                self.accepted[k] += k < n

    def add_first(self, right: int, guesses: int, rounds: int) -> None:
        """Adds guesses of a first token, made in as many rounds, of which some were right."""
        for _ in range(rounds):
            self._fade()
        self.tried[0] += guesses
        self.accepted[0] += right

    def _fade(self) -> None:
        keep = 1 - 1 / MEMORY
        self.tried, self.accepted = [x * keep for x in self.tried], [x * keep for x in self.accepted]

    def tokens(self, depth: int) -> float:
        """The tokens that a round of drafting `depth` tokens is expected to commit, the target's own included."""
        total = survives = 1.0
        rate = PRIOR / FALL
        for tried, accepted in zip(self.tried[:depth], self.accepted[:depth], strict=True):
            rate = (accepted + PRIOR_ROUNDS * FALL * rate) / (tried + PRIOR_ROUNDS)
            survives *= rate
            total += survives
        return total


class RoundCosts:
    """The seconds of a round by the number of requests and the amount: means of the latest ones."""

    def __init__(self) -> None:
        self.times: dict[int, dict[Amount, deque[float]]] = defaultdict(dict)
        self.means: dict[int, dict[Amount, float]] = defaultdict(dict)  # of the amounts with enough of them
        self._known: dict[int, dict[Amount, float]] = {}  # see `_known_at`

    def add(self, requests: int, amount: Amount, seconds: float) -> None:
        """Adds a round of so many requests."""
        size = graph_size(requests)
        times = self.times[size].setdefault(amount, deque(maxlen=LATEST))
        times.append(seconds)
        if len(times) >= TIMED:
            self.means[size][amount] = _mean(times)
            self._known.clear()

    def forget_all_but(self, amount: Amount) -> None:
        """Forgets the rounds of all other amounts."""
        for values in (self.times, self.means):
            for size, of_size in values.items():
                values[size] = {a: of_amount for a, of_amount in of_size.items() if a == amount}
        self._known.clear()

    def timed(self, amount: Amount) -> bool:
        """Whether enough rounds of this amount were timed, for any number of requests."""
        return any(amount in of_size for of_size in self.means.values())

    def seconds(self, requests: int, amount: Amount) -> float:
        """The seconds of a round, interpolated between other amounts if no such round was timed."""
        known = self._known_at(graph_size(requests))
        if amount in known:
            return known[amount]
        places = sorted(known, key=_place)
        if len(places) == 1:
            return known[places[0]]
        i = min(max(bisect.bisect([_place(a) for a in places], _place(amount)), 1), len(places) - 1)
        low, high = places[i - 1], places[i]
        slope = (known[high] - known[low]) / (_place(high) - _place(low))
        return known[high] + max(slope, 0.0) * (_place(amount) - _place(high))

    def _known_at(self, size: int) -> dict[Amount, float]:
        """The mean seconds of amounts at a number of requests. Amounts that were timed only at other numbers have the
        time at the nearest one, scaled by what both have in common."""
        if size not in self._known:
            here = dict(self.means.get(size, {}))
            for other in sorted(self.means, key=lambda s: abs(s - size)):
                there = self.means[other]
                common = [here[a] / there[a] for a in here if a in there]
                scale = statistics.median(common) if common else 1.0
                here = {a: scale * t for a, t in there.items()} | here
            self._known[size] = here
        return self._known[size]


class AmountChooser:
    """Chooses how much is drafted, for all batches of an engine."""

    def __init__(self, amounts: Sequence[Amount], start: Amount, tree: bool):
        """`amounts` are the choices beside NOTHING, of which `start` is tried first."""
        self.amounts = (NOTHING, *sorted(amounts))
        self.tree = tree
        self.rates = AcceptanceRates(max(a.depth for a in amounts))
        self.costs = RoundCosts()
        self.settled = False  # whether the costs that the choice depends on were measured when it was made last
        self.resting, self.rested = REST, 0  # batches of requests that rest in a row, and requests that have rested
        self.probed = 0  # how many had rested when the draft guessed the last answer
        self.rounds, self.again = 0, AGAIN  # since the costs were measured; until they will be
        self.nodes = float(start.nodes)  # of the trees that `rates` were measured with
        smaller = [a for a in self.amounts[1:] if a < start]
        self.start, self.smaller = start, smaller[len(smaller) // 2] if smaller else start

    def next(self, requests: int, current: Amount) -> Amount:
        """The amount of the next rounds of so many requests, after rounds that drafted `current`."""
        if self.rounds >= self.again:  # other work on the machine and longer texts change the costs
            self.rounds, self.again = 0, min(2 * self.again, SELDOM)
            self.costs.forget_all_but(current)
        self.settled = False
        if not self.costs.timed(current):
            return current
        if untimed := self._untimed(requests):
            return untimed
        self.settled = True
        speeds = {a: self._speed(requests, a) for a in self.amounts}
        best = max(self.amounts, key=speeds.get)
        gain = GAIN if current != NOTHING else GAIN_OF_DRAFTING
        return best if speeds[best] > gain * speeds[current] else current

    def rests(self, batch: int) -> bool:
        """Whether the next requests, of which so many are decoded together, are decoded without the draft, as it does
        not pay. After some that rest, others are decoded with it; the longer it has not paid, the more rest."""
        if not self._pauses(batch):
            self.resting, self.rested, self.probed = REST, 0, 0
            return False
        if self.rested < self.resting * batch:
            return True
        self.resting, self.rested, self.probed = min(2 * self.resting, MOST_REST), 0, 0
        return False

    def changes(self, rests: bool, batch: int, waiting: int) -> bool:
        """Whether requests should start to rest, or no longer, once the running ones are complete. Not if few are
        waiting, since the places of the running ones are then empty one after the other."""
        if waiting < WORTH * batch:
            return False
        pauses = self._pauses(batch)
        return self.rested >= self.resting * batch or not pauses if rests else pauses

    def probes(self, batch: int) -> bool:
        """Whether the draft should guess the next complete answer of those that rest."""
        if due := self.rested - self.probed >= PROBE * batch:
            self.probed = self.rested
        return due

    def _pauses(self, batch: int) -> bool:
        measured = self.costs.timed(NOTHING) and self.costs.timed(self.smaller)
        return measured and max(self.amounts, key=lambda a: self._speed(batch, a)) == NOTHING

    def _untimed(self, requests: int) -> Amount | None:
        """The next amount to time, if the costs of others cannot be interpolated yet; a large one only where drafting
        nearly pays."""
        for amount in (NOTHING, self.smaller):
            if not self.costs.timed(amount):
                return amount
        pays = self._speed(requests, self.smaller) > NEARLY * self._speed(requests, NOTHING)
        return self.start if pays and not self.costs.timed(self.start) else None

    def add(self, amount: Amount, accepted: Sequence[int], seconds: float | None) -> None:
        """Adds a round: the number of accepted tokens of each request, and its seconds, or None if they do not say what
        such a round takes."""
        self.rounds += 1
        if seconds is not None:
            self.costs.add(len(accepted), amount, seconds)
        if amount != NOTHING:
            self.rates.add(amount.depth, accepted)
            self.nodes += (amount.nodes - self.nodes) / MEMORY

    def add_guesses(self, right: int, guesses: int, rounds: int) -> None:
        """Adds the draft's guesses of tokens that were committed without it."""
        self.rates.add_first(right, guesses, rounds)

    def tokens(self, amount: Amount) -> float:
        """The tokens that a round is expected to commit for each request."""
        more = self.rates.tokens(amount.depth) - 1
        return 1 + more * (amount.nodes / self.nodes) ** GROWTH if self.tree else 1 + more

    def _speed(self, requests: int, amount: Amount) -> float:
        return self.tokens(amount) / self.costs.seconds(requests, amount)

    def reason(self, requests: int) -> str:
        """Why speculation pauses for so many requests; empty if it would not, or is not known yet."""
        if not self._pauses(requests):
            return ""
        rival = max(self.amounts[1:], key=lambda a: self._speed(requests, a))
        cost = self.costs.seconds(requests, rival) / self.costs.seconds(requests, NOTHING)
        return (
            f"a round that drafts {rival.depth} token{'s' * (rival.depth > 1)} takes {cost:.2f} times as long as one "
            f"without drafting, and would commit {self.tokens(rival):.2f} times the tokens"
        )


def _mean(times: Iterable[float]) -> float:
    """The mean without the longest quarter, which something else may have delayed."""
    ordered = sorted(times)
    counted = ordered[: len(ordered) - len(ordered) // 4]
    return sum(counted) / len(counted)


def _place(amount: Amount) -> int:
    """A measure of the work of a round, to interpolate by: the passes of the draft and the nodes that are verified."""
    return amount.depth + amount.nodes
