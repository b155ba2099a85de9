"""What acceptance says while decoding: the draft size of a round (`depth="auto"`), and whether a draft is at chance.

The best size commits the most tokens per second: the tokens that a round is expected to commit, by the acceptance
measured lately, divided by the seconds of a round. Where no size pays, the engine rests: it decodes without the draft,
and tries drafting again now and then.
"""

from __future__ import annotations

import itertools
import math
import statistics
import warnings
from collections import defaultdict, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from fledge.config import DraftConfig
from fledge.decode.rounds import graph_size
from fledge.types import Sampling, Trace

HELD, SETTLED = 6, 24  # rounds between two choices: while the seconds of a round are measured, and later
TIMED, LATEST = 3, 9  # the fewest rounds of a size whose seconds count as known, and the most that are kept
AGAIN = 1024  # rounds after which the seconds of all sizes are measured again, since texts grow and machines change
MEMORY = 128  # rounds over which a measured acceptance loses most of its weight
EVIDENCE = 32  # drafted first tokens, the fewest by which an engine may decide to rest
WORTH = 1.05  # the speedup that drafting must promise: a round of an engine that rests is a little faster than assumed
GAIN = 1.02  # the speedup over the present size that another size must promise
REST, LONGEST_REST = 200, 6400  # rounds at rest before drafting is tried: at first, and after many vain tries
PRIOR, PRIOR_ROUNDS = 0.6, 4  # an acceptance to begin with, and the rounds that it counts for
FALL = 0.95  # acceptance at a depth that was never drafted, relative to the depth above
GROWTH = 0.2  # assumed: accepted tokens grow with this power of a tree's nodes
MOST_ROWS = 1024  # rows of the verification of a batch of trees: with as many, matrix products take time by the row
CHANCE_ROUNDS = 100  # the fewest rounds by which a draft is judged
AT_CHANCE = 0.08  # share of accepted first tokens; common tokens reach a few percent, a trained draft over 20 percent


@dataclass(frozen=True, order=True)
class DraftSize:
    """The draft size of a round: paths of at most `depth` tokens, in trees of at most `nodes` nodes, root included."""

    depth: int
    nodes: int


NOTHING = DraftSize(0, 1)


class AcceptanceRates:
    """The acceptance rate of drafted tokens at each of `depth` depths, given that all tokens above are accepted. Older
    rounds count exponentially less."""

    def __init__(self, depth: int):
        self.tried, self.accepted = [0.0] * depth, [0.0] * depth

    def add(self, depth: int, accepted: Sequence[int]) -> None:
        """Adds a round. `accepted` are the numbers of accepted tokens of each request, of `depth` drafted tokens."""
        keep = 1 - 1 / MEMORY
        for k in range(len(self.tried)):
            reached = sum(n >= k for n in accepted) if k < depth else 0
            self.tried[k] = keep * self.tried[k] + reached
            self.accepted[k] = keep * self.accepted[k] + sum(n > k for n in accepted)

    def tokens(self, depth: int) -> float:
        """The tokens that a round with `depth` drafted tokens is expected to commit, the target's own included."""
        total = survives = 1.0
        rate = PRIOR / FALL
        for tried, accepted in zip(self.tried[:depth], self.accepted[:depth], strict=True):
            rate = (accepted + PRIOR_ROUNDS * FALL * rate) / (tried + PRIOR_ROUNDS)
            survives *= rate
            total += survives
        return total


def fitting(sizes: Iterable[DraftSize], requests: int) -> list[DraftSize]:
    """Those of `sizes` that rounds of so many requests may have: chains, trees that have no more nodes than a chain or
    up to MOST_ROWS rows in all, and in any case the two sizes with the fewest nodes, which tell what a row costs."""
    most, sizes = MOST_ROWS // graph_size(requests), list(sizes)
    smallest = sorted(sizes, key=lambda s: (s.nodes, -s.depth))[:2]
    return [s for s in sizes if s.nodes <= max(most, s.depth + 1) or s in smallest]


class NestedTrees:
    """The tokens that trees of several numbers of nodes are accepted for, where each tree is the start of the larger
    trees (`LikeliestTree`): a round with one tree shows what the smaller trees would have been accepted for. Older
    rounds count exponentially less."""

    def __init__(self, nodes: Sequence[int]):
        self.nodes = sorted(nodes)
        self.rounds = self.least = 0.0  # rounds of all requests, and tokens that the smallest tree was accepted for
        # of each pair of neighbours, in the rounds whose trees have both: tokens of the smaller and of the larger tree
        self.smaller, self.larger = ([0.0] * (len(nodes) - 1) for _ in range(2))

    def add(self, nodes: int, paths: Sequence[Sequence[int]]) -> None:
        """Adds a round with trees of `nodes` nodes. `paths` are the accepted nodes of each request, without the
        root."""
        keep = 1 - 1 / MEMORY
        within = [sum(node < n for path in paths for node in path) for n in self.nodes if n <= nodes]
        self.rounds, self.least = keep * self.rounds + len(paths), keep * self.least + within[0]
        for i, (smaller, larger) in enumerate(itertools.pairwise(within)):
            self.smaller[i], self.larger[i] = keep * self.smaller[i] + smaller, keep * self.larger[i] + larger

    def tokens(self, nodes: int) -> float:
        """The tokens that a round with trees of `nodes` nodes is expected to commit, the target's own included. Beyond
        the trees that were tried, accepted tokens grow with the same power of the nodes as below."""
        power, accepted = GROWTH, (self.least + PRIOR_ROUNDS) / (self.rounds + PRIOR_ROUNDS)
        for (a, b), smaller, larger in zip(itertools.pairwise(self.nodes), self.smaller, self.larger, strict=True):
            if b <= nodes:
                grows = (larger + PRIOR_ROUNDS * (b / a) ** power) / (smaller + PRIOR_ROUNDS)
                power, accepted = math.log(grows) / math.log(b / a), accepted * grows
        return 1 + accepted


class SizeChooser:
    """Chooses the draft size of the rounds of an engine, among `sizes`, of which `sizes[0]` is used first. `nested`:
    whether each tree is the start of the larger ones, as with `NestedTrees`."""

    def __init__(self, sizes: Sequence[DraftSize], nested: bool = False):
        self.sizes = sizes
        self.nested = NestedTrees([s.nodes for s in sizes]) if nested else None
        self.rates = AcceptanceRates(max(s.depth for s in sizes))
        self.nodes = float(sizes[0].nodes)  # mean nodes of the trees by which `rates` were measured
        # by number of requests (`graph_size`) and size: seconds of drafting and verification of the latest rounds
        self.times: dict[int, dict[DraftSize, deque[tuple[float, float]]]] = defaultdict(dict)
        self.rounds = 0  # since `times` were measured
        self.settled = False  # whether the last choice was between known seconds
        self.rested, self.patience = 0, REST  # rounds at rest since the last try, and the rounds until the next try
        self.reason = ""  # why the engine rested last

    def add(
        self, size: DraftSize, accepted: Sequence[int], seconds: tuple[float, float],
        paths: Sequence[Sequence[int]] = (),
    ) -> None:  # fmt: skip
        """Adds a round. `accepted` are the numbers of accepted tokens of each request, and `paths` the accepted nodes,
        without the root. `seconds` are the seconds of drafting and of verification."""
        latest = self.times[graph_size(len(accepted))].setdefault(size, deque(maxlen=LATEST))
        latest.append(seconds)
        self.rounds += 1
        if size == NOTHING:
            self.rested += 1
        else:
            self.rates.add(size.depth, accepted)
            if self.nested is not None:
                self.nested.add(size.nodes, paths)
            self.nodes += (size.nodes - self.nodes) / MEMORY

    def choose(self, requests: int, current: DraftSize) -> DraftSize:
        """The size of the next rounds of `requests` requests, after rounds of the `current` size. NOTHING if the engine
        should rest."""
        self.settled = False
        if self.rounds >= AGAIN:
            self.rounds = 0
            self.times.clear()
        able = fitting(self.sizes, requests)
        if not self._timed(requests):
            here, first = self.times[graph_size(requests)], self.sizes[0] if self.sizes[0] in able else max(able)
            measured = (s for s in (first, min(able)) if len(here.get(s, ())) < TIMED)
            return next(measured, first)
        self.settled = True
        best, pays = self._best(requests)
        if self.rates.tried[0] < EVIDENCE:
            return best
        if not pays:
            self.rested, self.reason = 0, self._comparison(requests, best)
            return NOTHING
        self.patience = REST
        if current not in able:
            return best
        return best if self._speed(requests, best) > GAIN * self._speed(requests, current) else current

    def rests(self, requests: int) -> bool:
        """Whether the next `requests` requests are decoded without the draft. Called while no request runs."""
        if self.rates.tried[0] < EVIDENCE or not self._timed(requests) or self._best(requests)[1]:
            return False
        if self.rested < self.patience:
            return True
        self.rested, self.patience = 0, min(2 * self.patience, LONGEST_REST)
        self.rates = AcceptanceRates(len(self.rates.tried))
        if self.nested is not None:
            self.nested = NestedTrees(self.nested.nodes)
        return False

    def _best(self, requests: int) -> tuple[DraftSize, bool]:
        """The fastest size beside NOTHING, and whether drafting pays."""
        best = max(fitting(self.sizes, requests), key=lambda size: self._speed(requests, size))
        return best, self._speed(requests, best) >= WORTH * self._speed(requests, NOTHING)

    def _speed(self, requests: int, size: DraftSize) -> float:
        """Expected tokens per second of each request."""
        return self._tokens(size) / self._seconds(requests, size)

    def _tokens(self, size: DraftSize) -> float:
        """The tokens that a round is expected to commit for each request."""
        if self.nested is not None and size != NOTHING:
            return self.nested.tokens(size.nodes)
        grows = (size.nodes / self.nodes) ** GROWTH if size.nodes > size.depth + 1 else 1.0
        return 1 + (self.rates.tokens(size.depth) - 1) * grows

    def _seconds(self, requests: int, size: DraftSize) -> float:
        """The seconds of a round. Sizes without timed rounds lie on lines through the timed sizes: drafting by
        depth, and verification by nodes, also of a round that drafts nothing."""
        known = {s: [statistics.median(x) for x in zip(*latest, strict=True)] for s, latest in self._timed(requests)}
        if size in known:
            return sum(known[size])
        drafting = 0.0 if size == NOTHING else _line([(s.depth, known[s][0]) for s in known if s.depth], size.depth)
        return drafting + _line([(s.nodes, known[s][1]) for s in known if s.depth], size.nodes)

    def _timed(self, requests: int) -> Sequence[tuple[DraftSize, deque[tuple[float, float]]]]:
        """The sizes with known seconds, at the number of requests nearest to `requests` where two sizes are known."""
        known = {n: [(s, t) for s, t in of.items() if len(t) >= TIMED] for n, of in self.times.items()}
        enough = {n: min(2, len(fitting(self.sizes, n))) for n in known}
        able = [n for n in known if sum(s.depth > 0 for s, _ in known[n]) >= enough[n]]
        return known[min(able, key=lambda n: abs(n - graph_size(requests)))] if able else []

    def _comparison(self, requests: int, best: DraftSize) -> str:
        """The seconds and the tokens of a round of the best size, beside a round that drafts nothing."""
        cost = self._seconds(requests, best) / self._seconds(requests, NOTHING)
        return (
            f"a round that drafts {best.depth} token{'s' * (best.depth > 1)} takes {cost:.2f} times as long as one "
            f"without drafting, and would commit {self._tokens(best):.2f} times the tokens"
        )


def _line(points: Sequence[tuple[int, float]], x: int) -> float:
    """Interpolates `points` linearly at `x`, and extrapolates from the two outermost points beyond the ends.

    A single point gives a constant. A falling segment counts as flat, at the value of its right end. The result is at
    least half of the smallest value.
    """
    points = sorted(points)
    least = min(y for _, y in points) / 2
    if len(points) == 1:
        return points[0][1]
    i = min(max(sum(at < x for at, _ in points), 1), len(points) - 1)
    (a, low), (b, high) = points[i - 1], points[i]
    slope = max(high - low, 0.0) / (b - a) if b > a else 0.0
    return max(high + slope * (x - b), least)


class ChanceWarning(UserWarning):
    """The first drafted token of a round is accepted no more often than by chance."""


class ChanceWatch:
    """Counts how often the first drafted token of a round is accepted, over all that an engine decodes. Verification
    keeps the output right with any draft, so a useless draft would otherwise be noticed by its cost in time only."""

    def __init__(self) -> None:
        self.rounds = self.accepted = 0
        self.warned = False

    def add(self, traces: Sequence[Trace], samplings: Sequence[Sampling], config: DraftConfig, target: str) -> None:
        """Counts finished requests, and warns once if the draft for `target` turns out to be at chance. Requests with a
        temperature above 1 or with logits processors are not counted, since even a good draft may fail there."""
        counted = [t for t, s in zip(traces, samplings, strict=True) if s.temperature <= 1 and not s.processors]
        rounds = [r for t in counted for r in t.rounds if r.drafted]
        self.rounds += len(rounds)
        self.accepted += sum(r.accepted > 0 for r in rounds)
        if not self.warned and rounds and self.rounds >= CHANCE_ROUNDS and self.accepted < AT_CHANCE * self.rounds:
            self.warned = True
            warnings.warn(_chance_message(self.accepted, self.rounds, config, target), ChanceWarning, stacklevel=4)


def _chance_message(accepted: int, rounds: int, config: DraftConfig, target: str) -> str:
    known = config.provenance.target
    causes = []
    if not known or known != target:
        causes.append(f"it was trained for another target of the same size (its config names {known or 'none'})")
    if config.family.reads_layers:
        for name in ("norm_before_residual", "block_causal"):
            if name in config.family.options:
                causes.append(f"its config's {name} ({str(getattr(config, name)).lower()}) is wrong")
        layers = f"{', '.join(map(str, config.aux_layers))}" if config.aux_layers else "the default ones"
        causes.append(f"it was trained on other layers than its config names ({layers})")
    others = "; ".join(causes) + "; or " * bool(causes)
    return (
        f"the first drafted token was accepted in only {accepted} of {rounds} rounds, about as often as by chance, so "
        f"the draft only makes {target or 'the target'} slower. Likely causes: {others}it was "
        "trained on too little text of this kind"
    )
