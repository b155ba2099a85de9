"""How much is drafted in a round, chosen while decoding ("auto").

The best amount is the one with the most tokens per second: the tokens that a round is expected to commit, by the
acceptance measured lately, divided by the seconds that such a round takes on the host's clock. Nothing at all is one of
the amounts. Where drafting does not pay, speculation pauses: the running requests give up their draft
(`Batch.take_over`), and the next ones are decoded as without a draft, to the end. The draft then guesses complete
answers now and then (`decode/probe.py`), and requests are decoded with it again when that tells that it would pay, or
after some guesses, to measure what rounds take. All of this is paid for by a `Budget`. Where drafting pays little, some
requests are decoded without the draft, to find out what rounds take then (`Relief`). Whether the next requests
draft also depends on what else the draft costs a request: reading its prompt.
"""

from __future__ import annotations

import bisect
import itertools
import statistics
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from fledge.decode.budget import Budget
from fledge.decode.relief import ATTEMPTS, LEAST_RELIEF, Relief
from fledge.decode.rounds import graph_size

TIMED = 3  # the fewest rounds that the cost of an amount is known from
LATEST = 16  # the most
LATEST_OF_LENGTH = 4  # the most of each length of chains that end early
MEMORY = 128  # rounds over which a measured acceptance loses most of its weight
LARGE = 1e9  # a weight from which on all sums are divided by it
NEARLY = 0.9  # how fast drafting must be, relative to decoding without it, to time a large amount
GAIN = 1.02  # how much faster another amount must promise to be
WORTH_DRAFTING = 1.05  # how much faster than without it drafting must be to go on, as costs are not known exactly
GAIN_OF_DRAFTING = 1.06  # the same after a pause, when the acceptance is known less well
EVIDENCE = 32  # drafted first tokens whose acceptance must be known before a pause or a choice for long
CHECKS = 1  # how often the costs are measured again before a pause, since something else may have delayed rounds
PROBES = 8  # guesses of complete answers in a pause, until drafting is tried whatever they tell
TRIES = 4  # the most runs of requests that such a try lasts
WORTH = 4  # batches of requests that must wait to let the running ones end first, so that others draft again
WORTH_COMPARING = 16  # the same to let some rest, several together, to find out what a round takes then
ANSWERS = 16  # answers over which the measured length of one loses most of its weight
LAST = 1  # the rounds of a request that its answer needs no more: one is launched ahead, or its tokens are too many
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
    not drafted, because its chain had ended (`confidence`), counts as not accepted.

    Older rounds count less and less. Instead of making all sums smaller with each round, each round has a larger weight
    than the one before.
    """

    def __init__(self, depth: int):
        self._tried, self._accepted = [0.0] * depth, [0.0] * depth  # times `_weight`
        self._weight = 1.0  # of the latest round

    def add(self, depth: int, accepted: Sequence[int]) -> None:
        """Adds the numbers of accepted tokens of one round of each request, of at most `depth` drafted ones."""
        self._begin_rounds(1)
        for n in accepted:
            for k in range(n):
                self._accepted[k] += self._weight
            for k in range(min(n + 1, depth)):
                self._tried[k] += self._weight

    def add_first(self, right: int, guesses: int, rounds: int) -> None:
        """Adds guesses of a first token, made in as many rounds, of which some were right."""
        self._begin_rounds(rounds)
        self._tried[0] += self._weight * guesses
        self._accepted[0] += self._weight * right

    def _begin_rounds(self, rounds: int) -> None:
        self._weight *= (1 - 1 / MEMORY) ** -rounds
        if self._weight > LARGE:
            for sums in (self._tried, self._accepted):
                sums[:] = [x / self._weight for x in sums]
            self._weight = 1.0

    @property
    def known(self) -> float:
        """The number of drafted first tokens whose acceptance is known."""
        return self._tried[0] / self._weight

    def tokens(self, depth: int) -> float:
        """The tokens that a round of drafting `depth` tokens is expected to commit, the target's own included."""
        total = survives = 1.0
        rate, prior = PRIOR / FALL, PRIOR_ROUNDS * self._weight
        for tried, accepted in zip(self._tried[:depth], self._accepted[:depth], strict=True):
            rate = (accepted + prior * FALL * rate) / (tried + prior)
            survives *= rate
            total += survives
        return total


class RoundCosts:
    """The seconds of a round by the number of requests and the amount: means of the latest ones.

    With `ends_early`, what a round takes depends on how long its chain became, not on how long it could become. A line
    through the latest rounds of each length then tells it for all lengths (`_line`), as some lengths are rare.
    """

    def __init__(self, ends_early: bool = False) -> None:
        self.ends_early = ends_early
        self.times: dict[int, dict[Amount, deque[float]]] = defaultdict(dict)
        # of chains that end early: the seconds by their length, and the longest that they could have become
        self.chains: dict[int, dict[int, deque[float]]] = defaultdict(dict)
        self.limits: dict[int, int] = defaultdict(int)
        self._known: dict[int, dict[Amount, float]] = {}  # see `_known_at`

    def add(self, requests: int, amount: Amount, seconds: float, drafted: int) -> None:
        """Adds a round of so many requests, whose longest path had `drafted` tokens."""
        size = graph_size(requests)
        if self.ends_early and amount.depth:
            if drafted not in (lengths := self.chains[size]):
                lengths[drafted] = deque(maxlen=LATEST_OF_LENGTH)
            lengths[drafted].append(seconds)
            self.limits[size] = max(self.limits[size], amount.depth)
        else:
            if amount not in (of_size := self.times[size]):
                of_size[amount] = deque(maxlen=LATEST)
            of_size[amount].append(seconds)
        self._known.clear()

    def forget(self) -> None:
        """Forgets all rounds."""
        self.times.clear()
        self.chains.clear()
        self.limits.clear()
        self._known.clear()

    def forget_all_but(self, amount: Amount) -> None:
        """Forgets the rounds of all other amounts. Where chains end early, the lengths that this amount can have are
        kept."""
        for size, of_size in self.times.items():
            self.times[size] = {a: times for a, times in of_size.items() if a == amount}
        for size, lengths in self.chains.items():
            self.chains[size] = {n: times for n, times in lengths.items() if n <= amount.depth}
            self.limits[size] = min(self.limits[size], amount.depth)
        self._known.clear()

    def scale(self, requests: int, amount: Amount, factor: float) -> None:
        """Multiplies the seconds of the rounds so far of so many requests and an amount."""
        of_size = self.times.get(graph_size(requests), {})
        if factor != 1 and amount in of_size:
            of_size[amount] = deque((factor * seconds for seconds in of_size[amount]), maxlen=LATEST)
            self._known.clear()

    def timed(self, amount: Amount) -> bool:
        """Whether enough rounds of this amount were timed, for any number of requests. Where chains end early, rounds
        of two lengths are enough, as they tell what each token takes, and so are rounds that could have been as long.
        """
        if not self.ends_early or amount == NOTHING:
            return any(len(of_size.get(amount, ())) >= TIMED for of_size in self.times.values())
        return any(
            sum(map(len, chains.values())) >= TIMED and (len(chains) > 1 or self.limits[size] >= amount.depth)
            for size, chains in self.chains.items()
        )

    def seconds(self, requests: int, amount: Amount, drafted: float | None = None) -> float:
        """The seconds of a round, interpolated between other amounts if no such round was timed. With `drafted`, they
        are those of a chain of that length, which may be a mean, whatever the amount is. Drafting has a fixed cost too,
        so NOTHING is left out if two other amounts were timed."""
        known = self._known_at(graph_size(requests))
        if drafted is None and amount in known:
            return known[amount]
        places = sorted(known, key=_place)
        if len(places) > 2:
            places = [a for a in places if a != NOTHING]
        if len(places) == 1:
            return known[places[0]]
        at = _place(amount) if drafted is None else 2 * drafted + 1
        i = min(max(bisect.bisect([_place(a) for a in places], at), 1), len(places) - 1)
        low, high = places[i - 1], places[i]
        slope = (known[high] - known[low]) / (_place(high) - _place(low))
        return known[high] + max(slope, 0.0) * (at - _place(high))

    def _known_at(self, size: int) -> dict[Amount, float]:
        """The mean seconds of amounts at a number of requests. Amounts that were timed only at other numbers have the
        time at the nearest one, scaled by what both have in common."""
        if size not in self._known:
            longest = max(itertools.chain.from_iterable(self.chains.values()), default=0)
            means = {
                of: {a: _mean(times) for a, times in self.times.get(of, {}).items() if len(times) >= TIMED}
                | _line(self.chains.get(of, {}), longest)
                for of in self.times.keys() | self.chains.keys()
            }
            here = means.get(size, {})
            for other in sorted(means, key=lambda s: abs(s - size)):
                there = means[other]
                common = [here[a] / there[a] for a in here if a in there]
                scale = statistics.median(common) if common else 1.0
                here = {a: scale * t for a, t in there.items()} | here
            self._known[size] = here
        return self._known[size]


class AmountChooser:
    """Chooses how much is drafted, for all batches of an engine."""

    def __init__(
        self, amounts: Sequence[Amount], start: Amount, *, tree: bool = False, ends_early: bool = False,
        clock: Callable[[], float] = time.perf_counter,
    ):  # fmt: skip
        """`amounts` are the choices beside NOTHING, of which `start` is tried first. With `ends_early`, they are chains
        of which each pass of the draft tells whether there is another. `clock` returns seconds."""
        self.amounts = (NOTHING, *sorted(amounts))
        self.tree = tree
        self.rates = AcceptanceRates(max(a.depth for a in amounts))
        self.ends_early = ends_early
        self.lengths: dict[int, AcceptanceRates] = {}  # of chains that end early, by `graph_size`, see `_drafted`
        self.costs = RoundCosts(ends_early)
        self.budget = Budget(clock)
        self.settled = False  # whether what the choice depends on was known when it was made last
        self.checks = 0  # since drafting was last found to pay, how often the costs were measured again
        self.relief = Relief()
        self.comparing = False  # whether the last requests that were asked for rest to find that out
        self.paused: set[int] = set()  # the numbers of requests (`graph_size`) for which speculation pauses
        self.last_reason = ""  # why speculation paused, the last time that it did
        self.pausing = False  # whether the running requests should go on without the draft
        self.trying, self.runs = False, 0  # whether drafting is tried after a pause, and in how many runs of requests
        self.probed = 0  # guesses of complete answers since it was tried last
        self.guessed = False  # whether the last of them may lead to a try at once
        self.reading: deque[float] = deque(maxlen=LATEST)  # seconds in which the draft read a request's prompt
        self.answer: float | None = None  # the tokens of an answer
        self.rounds, self.again = 0, AGAIN  # since the costs were measured; until they will be
        self.nodes = float(start.nodes)  # of the trees that `rates` were measured with
        self.start, self.least = start, self.amounts[1]

    # -- of running requests ------------------------------------------------------------------------------------

    def next(self, requests: int, current: Amount) -> Amount:
        """The amount of the next rounds of so many requests, after rounds that drafted `current`. Where drafting does
        not pay, `pausing` is set."""
        if self.rounds >= self.again and self.budget.allows:  # other work and longer texts change the costs
            self.rounds, self.again = 0, min(2 * self.again, SELDOM)
            self.costs.forget_all_but(current)
            self.relief.forget_idle()
            self.budget.begin()
        self.settled = False
        if not self.costs.timed(current):
            return current
        if untimed := self._untimed(requests):
            return untimed
        self.settled = self.rates.known >= EVIDENCE
        speeds = {a: self._speed(requests, a) for a in self.amounts}
        best = max(self.amounts[1:], key=speeds.get)
        if speeds[best] < WORTH_DRAFTING * speeds[NOTHING]:
            if self._checked():
                self._pause(requests)
            elif current == NOTHING:
                return self.least  # which tells the acceptance
            return current
        self.checks = 0
        self._end_try()
        self.paused.discard(graph_size(requests))
        return best if current == NOTHING or speeds[best] > GAIN * speeds[current] else current

    def stops(self, requests: int, waiting: int = 0) -> bool:
        """Whether the next requests, of which so many are decoded together, should be decoded without the draft, so
        that the running ones should give it up too: drafting does not pay for them, or it is to be found out what
        rounds take then (`comparing`). `waiting` requests have not begun."""
        self.comparing = False
        if self.trying or self.pausing:
            return self.pausing
        if self._pauses(requests) and self._checked():
            self._pause(requests)
        elif self._compares(requests, waiting):
            self.pausing = True
        return self.pausing

    def _compares(self, requests: int, waiting: int) -> bool:
        """Whether the next requests rest to find out what a round takes then: where it may change the choice, until it
        is known for this number of requests or a few attempts failed. Of several requests, only while so many are
        waiting that the places that are empty until others draft cost little."""
        size, relief = graph_size(requests), self.relief
        if size in relief.known or relief.attempts[size] == ATTEMPTS:
            return False
        if requests > 1 and waiting < WORTH_COMPARING * requests:
            return False
        known = self.rates.known >= EVIDENCE and self._measured and relief.is_measured(size)
        if not known or LEAST_RELIEF * self._gain(requests) >= WORTH_DRAFTING:
            return False
        if self.rounds >= AGAIN:
            self.rounds = self.again  # the costs are measured again first, which the budget pays
            return False
        self.budget.end()  # the last requests may have ended meanwhile
        relief.attempts[size] += 1
        self.comparing = True
        return True

    def _checked(self) -> bool:
        """Whether it is certain that drafting does not pay, which was found just now. If not, drafting goes on, and the
        costs are measured again."""
        if self.rates.known < EVIDENCE:
            return False
        if self.checks == CHECKS:
            return True
        self.checks += 1
        self.costs.forget()
        self.relief.forget_idle()
        self.settled = False
        return False

    def _pause(self, requests: int) -> None:
        self.pausing = True
        self._rest(requests)

    def _rest(self, requests: int) -> None:
        self.paused.add(graph_size(requests))
        self.last_reason = self._comparison(requests)

    def gave_up(self) -> None:
        """The running requests go on without the draft."""
        self.pausing = self.settled = False
        self._end_try()

    def _end_try(self) -> None:
        self.trying = False
        self.budget.end()

    # -- of requests in a pause ---------------------------------------------------------------------------------

    def rests(self, requests: int, waiting: int = 0) -> bool:
        """Whether the next requests, of which so many are decoded together, are decoded without the draft, as it does
        not pay, or to find out what rounds take then (`comparing`). Some are decoded with it where what pays may have
        changed. `waiting` requests have not begun."""
        self.comparing = False
        if self.pausing:  # the last ones ended before that
            self.gave_up()
        if self.trying:
            self.runs += 1
            if self.runs <= TRIES:
                return False
            self._end_try()  # answers are too short to measure rounds
        if graph_size(requests) not in self.paused:
            if not self._pauses(requests) or not self._checked():
                return self._compares(requests, waiting)
            self._rest(requests)
        self.budget.end()  # the last requests may have ended while the costs were measured again
        return not self._tries(requests)

    def returns(self, requests: int, waiting: int) -> bool:
        """Whether the running requests, which rest, should end before others begin, which then draft. Not if few are
        waiting, since the places of the running ones are then empty one after the other."""
        return self.trying or (waiting >= WORTH * requests and self._tries(requests))

    def _tries(self, requests: int) -> bool:
        """Begins a try if it is worth it. Where a guess has just told that drafting would pay, the try does not wait
        until the guess is paid off, since waiting costs more."""
        guessed, self.guessed = self.guessed, False
        allowed = (guessed and self._promises(requests)) or self.budget.allows
        if not allowed or not self._wants_try(requests):
            return False
        self.trying, self.runs, self.probed = True, 0, 0
        self.costs.forget_all_but(NOTHING)
        self.budget.begin()
        return True

    def _wants_try(self, requests: int) -> bool:
        return self.probed >= PROBES or self._promises(requests)

    def _promises(self, requests: int) -> bool:
        """Whether drafting promises to pay."""
        return self._measured and self._gain(requests) > GAIN_OF_DRAFTING

    def probes(self, requests: int) -> bool:
        """Whether the draft should guess the latest answers, one of which was completed just now. Not if a try is next,
        since both are paid for by the same budget."""
        if due := not self.trying and self.budget.allows and not self._wants_try(requests):
            self.probed += 1
            self.guessed = True
        return due

    def _pauses(self, requests: int) -> bool:
        return self._measured and self._gain(requests) < WORTH_DRAFTING

    @property
    def _measured(self) -> bool:
        return self.costs.timed(NOTHING) and self.costs.timed(self.least)

    def _gain(self, requests: int) -> float:
        """How much faster than without the draft whole answers are decoded with it."""
        return max(self._answer_speed(requests, a) for a in self.amounts[1:]) / self._answer_speed(requests, NOTHING)

    # -- what is known ------------------------------------------------------------------------------------------

    def _untimed(self, requests: int) -> Amount | None:
        """The next amount to time, if the costs of others cannot be interpolated yet; a large one only where drafting
        nearly pays."""
        for amount in (NOTHING, self.least):
            if not self.costs.timed(amount):
                return amount
        pays = self._speed(requests, self.least) > NEARLY * self._speed(requests, NOTHING)
        return self.start if pays and not self.costs.timed(self.start) else None

    def add(self, amount: Amount, accepted: Sequence[int], seconds: float | None, drafted: int) -> None:
        """Adds a round: the number of accepted tokens of each request, and its seconds, or None if they do not say what
        such a round takes. `drafted` is the number of tokens of the longest path that was drafted."""
        self.rounds += 1
        if seconds is not None:
            if amount == NOTHING:
                size = graph_size(len(accepted))
                self.relief.add_idle(size, seconds)
                seconds *= self.relief.of(size)
            self.costs.add(len(accepted), amount, seconds, drafted)
        if amount.depth:
            self.rates.add(amount.depth, accepted)
            if self.ends_early:
                if (size := graph_size(len(accepted))) not in self.lengths:
                    self.lengths[size] = AcceptanceRates(self.amounts[-1].depth)
                self.lengths[size].add(amount.depth - 1, [drafted - 1])
            self.nodes += (amount.nodes - self.nodes) / MEMORY

    def add_plain(self, requests: int, seconds: float, rounds: int) -> None:
        """Adds the mean seconds of the rounds, so many, of requests that rest."""
        size = graph_size(requests)
        before = self.relief.of(size)
        self.relief.add_resting(size, seconds, rounds)
        self.costs.scale(requests, NOTHING, self.relief.of(size) / before)
        self.costs.add(requests, NOTHING, seconds, 0)

    def add_reading(self, requests: int, seconds: float) -> None:
        """Adds the seconds in which the draft read the prompts of so many requests, while none was decoded."""
        self.reading.append(seconds / requests)

    def add_answer(self, tokens: int) -> None:
        """Adds the tokens of a complete answer."""
        self.answer = tokens if self.answer is None else self.answer + (tokens - self.answer) / ANSWERS

    def add_guesses(self, right: int, guesses: int, rounds: int) -> None:
        """Adds the draft's guesses of tokens that were committed without it."""
        self.rates.add_first(right, guesses, rounds)

    def tokens(self, amount: Amount) -> float:
        """The tokens that a round is expected to commit for each request."""
        more = self.rates.tokens(amount.depth) - 1
        return 1 + more * (amount.nodes / self.nodes) ** GROWTH if self.tree else 1 + more

    def _seconds(self, requests: int, amount: Amount) -> float:
        """The seconds that a round is expected to take."""
        return self.costs.seconds(requests, amount, self._drafted(requests, amount))

    def _drafted(self, requests: int, amount: Amount) -> float | None:
        """The expected length of the longest chain of a round, where chains end early; else None. `lengths` count how
        often one goes on after each token, as `rates` count how often a token is accepted. Where none was drafted by so
        many requests, the nearest number tells."""
        if not self.ends_early or amount == NOTHING or not self.lengths:
            return None
        nearest = min(self.lengths, key=lambda size: abs(size - graph_size(requests)))
        return self.lengths[nearest].tokens(amount.depth - 1)

    def _speed(self, requests: int, amount: Amount) -> float:
        """The tokens per second of each request's rounds."""
        return self.tokens(amount) / self._seconds(requests, amount)

    def _answer_speed(self, requests: int, amount: Amount) -> float:
        """The same for a request of the mean length, which waits while the draft reads its prompt and those of all that
        begin during its rounds, which are as many as run together."""
        if self.answer is None:
            return self._speed(requests, amount)
        rounds = self.answer / self.tokens(amount) + LAST
        reading = 0.0 if amount == NOTHING else requests * self._reading
        return self.answer / (rounds * self._seconds(requests, amount) + reading)

    @property
    def _reading(self) -> float:
        """The seconds in which the draft reads a request's prompt; 0 if it is not known well yet."""
        return _mean(self.reading) if len(self.reading) > TIMED else 0.0

    def reason(self, requests: int) -> str:
        """Why speculation pauses for so many requests; empty if it would not, or is not known yet."""
        return self._comparison(requests) if self._pauses(requests) else ""

    def _comparison(self, requests: int) -> str:
        """The cost and the tokens of a round with the best amount, beside those of a round without drafting."""
        rival = max(self.amounts[1:], key=lambda a: self._answer_speed(requests, a))
        cost = self._seconds(requests, rival) / self._seconds(requests, NOTHING)
        reading = f"; it also reads each prompt, in {1e3 * self._reading:.1f} ms" if self._reading else ""
        return (
            f"a round that drafts {rival.depth} token{'s' * (rival.depth > 1)} takes {cost:.2f} times as long as one "
            f"without drafting, and would commit {self.tokens(rival):.2f} times the tokens{reading}"
        )


def _mean(times: Iterable[float]) -> float:
    """The mean without the longest quarter, which something else may have delayed."""
    ordered = sorted(times)
    counted = ordered[: len(ordered) - len(ordered) // 4]
    return sum(counted) / len(counted)


def _line(chains: Mapping[int, Sequence[float]], longest: int) -> dict[Amount, float]:
    """The seconds of chains of one token and of `longest` tokens, on a line through the seconds of chains by length.
    Its slope is the median of all pairs' (Sen 1968), and it passes through the mean of what is left (`_mean`), but not
    below the shortest seconds of any. Of chains of one length only, the seconds of that length; of fewer than TIMED
    chains, nothing."""
    rounds = [(n, s) for n, times in chains.items() for s in times]
    if len(rounds) < TIMED:
        return {}
    slopes = [(t - s) / (m - n) for (n, s), (m, t) in itertools.combinations(rounds, 2) if m != n]
    slope = max(statistics.median(slopes), 0.0) if slopes else 0.0
    fixed, least = _mean(s - slope * n for n, s in rounds), min(s for _, s in rounds)
    return {Amount(n, n + 1): max(fixed + slope * n, least) for n in ((1, longest) if slopes else chains)}


def _place(amount: Amount) -> int:
    """A measure of the work of a round, to interpolate by: the passes of the draft and the nodes that are verified."""
    return amount.depth + amount.nodes
