"""Metrics of traces, each a sum over all rounds of all traces, divided once; and 95 % intervals of these metrics.

The requests are the entries of a record's `requests` (docs/measuring.md). The rounds of a request resemble each other,
so that the sample of an interval is the requests, not the rounds. Every figure is a quotient of sums over requests. The
standard error comes from leaving out one request after the other (jackknife; Tukey, 1958), and the interval is the
figure ± that error times the 97.5th percentile of Student's t. The requests count as (Σ w)² / Σ w² equal ones, where
the weight w is a request's part of the divisor (effective sample size; Kish, 1965), since a few long requests may
decide the figure; the degrees of freedom are one less, and at least 1.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate
from operator import mul
from typing import Any

import numpy as np

from fledge.types import Trace

ENOUGH = 3  # requests; the difference between two tells too little
# the 97.5th percentiles of Student's t by 1 / degrees of freedom, between which lines lie above the curve
INVERSE_DEGREES = (0.0, 1 / 30, 1 / 10, 1 / 5, 1 / 4, 1 / 3, 1 / 2, 1.0)
STUDENT_T = (1.960, 2.042, 2.228, 2.571, 2.776, 3.182, 4.303, 12.706)

Interval = tuple[float, float]


def tau(traces: Sequence[Trace]) -> float:
    """The tokens committed per round, including the target's own token, before the text is cut at a stop; 0 if there
    are no rounds."""
    committed, rounds = committed_per_round(traces)
    return committed / rounds if rounds else 0.0


def committed_per_round(traces: Sequence[Trace]) -> tuple[int, int]:
    """The tokens committed in all rounds, and the number of rounds: the two sums of which `tau` is the quotient."""
    rounds = [r for t in traces for r in t.rounds]
    return sum(r.accepted + 1 for r in rounds), len(rounds)


def alpha(traces: Sequence[Trace]) -> list[float | None]:
    """α_k, the acceptance rate of the k-th drafted token, among the rounds that drafted it and accepted the k - 1
    tokens before it; None if there are none. For trees, the share of accepted paths of length k - 1 that continue to
    depth k."""
    return quotients(*drafted_and_accepted(traces))


def quotients(reached: Sequence[float], passed: Sequence[float]) -> list[float | None]:
    """Each α_k of the sums of `drafted_and_accepted`; None for a position that no round reached."""
    return [p / n if n else None for n, p in zip(reached, passed, strict=True)]


def chain_gains(alpha: Sequence[float | None], depth: int, draft: float, others: float) -> dict[int, float]:
    """The speed of drafting chains of each length up to `depth` + 2, relative to `depth`, computed from a measurement.

    `draft` and `others` are the measured times of a mean round in any unit; drafting takes time in proportion to the
    length, and the others the same for every length. Beyond `depth`, α is taken to stay as at the last position.
    """
    rates = [a or 0.0 for a in alpha[:depth]]
    reached = list(accumulate([*rates, *rates[-1:] * 2], mul))
    speeds = {k: (1 + sum(reached[:k])) / (draft * k / depth + others) for k in range(1, len(reached) + 1)}
    return {k: speed / speeds[depth] for k, speed in speeds.items()} if len(rates) == depth else {}


def alpha_text(alpha: Sequence[float | None]) -> str:
    """Each α_k with two digits, "-" where it is unknown."""
    return " ".join("-" if a is None else f"{a:.2f}" for a in alpha)


def drafted_and_accepted(traces: Sequence[Trace]) -> tuple[list[int], list[int]]:
    """The two sums of which each α_k is the quotient: the rounds that drafted a k-th token after k - 1 accepted ones,
    and those among them that accepted it."""
    rounds = [r for t in traces for r in t.rounds]
    depth = max((r.drafted for r in rounds), default=0)
    reached = [sum(r.accepted >= k and r.drafted > k for r in rounds) for k in range(depth)]
    passed = [sum(r.accepted > k for r in rounds) for k in range(depth)]
    return reached, passed


def paused(traces: Sequence[Trace]) -> float:
    """The share of rounds that drafted nothing."""
    rounds = [r for t in traces for r in t.rounds]
    return sum(not r.drafted for r in rounds) / len(rounds) if rounds else 0.0


def pause_line(share: float, reason: str) -> str:
    """A sentence on the share of rounds that drafted nothing, with the reason if the engine knows one."""
    return f"Speculation paused in {share:.0%} of the rounds{': ' * bool(reason)}{reason}."


def bytes_per_round(traces: Sequence[Trace]) -> float:
    """The mean bytes that a round copied between the devices of draft and target; 0 if there are no rounds."""
    rounds = [r for t in traces for r in t.rounds]
    return sum(r.copied_bytes for r in rounds) / len(rounds) if rounds else 0.0


def repeated_ngrams(tokens: Sequence[int], n: int = 8) -> tuple[int, int]:
    """(n-grams that occurred earlier in the sequence, all n-grams), a measure of how much a generation loops."""
    seen: set[tuple[int, ...]] = set()
    repeated = 0
    total = max(len(tokens) - n + 1, 0)
    for i in range(total):
        gram = tuple(tokens[i : i + n])
        repeated += gram in seen
        seen.add(gram)
    return repeated, total


def tau_interval(requests: Sequence[Mapping[str, Any]]) -> Interval | None:
    """The interval of τ, the tokens committed per round, which is never below 1; None with fewer than ENOUGH requests
    that have a round."""
    rows = [[r["committed"], r["rounds"]] for r in requests if r["rounds"]]
    return _interval(rows, np.divide, lowest=1.0)


def alpha_intervals(requests: Sequence[Mapping[str, Any]]) -> list[Interval]:
    """The interval of each α_k, the acceptance rate of the k-th drafted token among the rounds that reached it. It is
    (0, 1) for a depth that fewer than ENOUGH requests reached; there are none with fewer than ENOUGH requests."""
    if len(requests) < ENOUGH:
        return []
    depth = max(len(r["reached"]) for r in requests)
    by_depth = (
        [[r["passed"][k], r["reached"][k]] for r in requests if len(r["reached"]) > k and r["reached"][k]]
        for k in range(depth)
    )
    return [_interval(rows, np.divide, highest=1.0) or (0.0, 1.0) for rows in by_depth]


def speedup_interval(requests: Sequence[Mapping[str, Any]]) -> Interval | None:
    """The interval of the speedup: tokens per second with the draft over those without it, of the same requests, so
    that what makes a request slow in both does not widen it. None with fewer than ENOUGH requests, or without their
    seconds, which are known at batch 1 only."""
    if not all("seconds" in r and "baseline_seconds" in r for r in requests):
        return None
    rows = [[r["tokens"], r["seconds"], r.get("baseline_tokens", r["tokens"]), r["baseline_seconds"]] for r in requests]
    return _interval(rows, lambda tokens, s, baseline_tokens, baseline_s: (tokens / s) / (baseline_tokens / baseline_s))


def _interval(
    rows: list[list[float]], figure: Callable[..., Any], *, lowest: float = 0.0, highest: float = np.inf
) -> Interval | None:
    """The interval of figure(*sums), where `sums` are those of each column of `rows`, one row a request. The second
    column has the requests' weights. None with fewer than ENOUGH rows."""
    n = len(rows)
    if n < ENOUGH:
        return None
    rows_NC = np.array(rows, dtype=np.float64)
    value, without_N = figure(*rows_NC.sum(0)), figure(*(rows_NC.sum(0) - rows_NC).T)
    error = np.sqrt((n - 1) * without_N.var())
    degrees = max(rows_NC[:, 1].sum() ** 2 / (rows_NC[:, 1] ** 2).sum() - 1, 1.0)
    half = np.interp(1 / degrees, INVERSE_DEGREES, STUDENT_T) * error
    return float(max(value - half, lowest)), float(min(value + half, highest))
