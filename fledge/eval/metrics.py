"""Figures from traces: sums over a stated population, divided once."""

from __future__ import annotations

from collections.abc import Sequence

from fledge.types import Trace


def tau(traces: Sequence[Trace]) -> float:
    """Tokens committed per round, bonus included, before cutting at a stop; 0 without a round."""
    rounds = [r for t in traces for r in t.rounds]
    return sum(r.accepted + 1 for r in rounds) / len(rounds) if rounds else 0.0


def alpha(traces: Sequence[Trace]) -> list[float]:
    """α_k: share of rounds whose k-th drafted token was accepted among those whose first k - 1 were; of trees, the
    share of accepted paths that went on to depth k."""
    rounds = [r for t in traces for r in t.rounds]
    reached = [sum(r.accepted >= k and r.drafted > k for r in rounds) for k in range(_depth(rounds))]
    passed = [sum(r.accepted > k for r in rounds) for k in range(_depth(rounds))]
    return [p / n if n else 0.0 for p, n in zip(passed, reached, strict=True)]


def _depth(rounds: Sequence) -> int:
    return max((r.drafted for r in rounds), default=0)


def repeated_ngrams(tokens: Sequence[int], n: int = 8) -> tuple[int, int]:
    """(n-grams that the sequence holds already, n-grams in all): how much a generation loops."""
    seen: set[tuple[int, ...]] = set()
    repeated = 0
    total = max(len(tokens) - n + 1, 0)
    for i in range(total):
        gram = tuple(tokens[i : i + n])
        repeated += gram in seen
        seen.add(gram)
    return repeated, total
