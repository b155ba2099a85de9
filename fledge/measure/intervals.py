"""95 % intervals of the figures of an evaluation, from the differences between its requests.

A request is an entry of a record's `requests` (docs/measuring.md). The rounds of a request resemble each other, so that
the sample is the requests, not the rounds. Every figure is a quotient of sums over requests. The standard error comes
from leaving out one request after the other (jackknife; Tukey, 1958), and the interval is the figure ± that error times
the 97.5th percentile of Student's t. The requests count as (Σ w)² / Σ w² equal ones, where the weight w is a request's
part of the divisor (effective sample size; Kish, 1965), since a few long requests may decide the figure; the degrees of
freedom are one less, and at least 1.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

ENOUGH = 3  # requests; the difference between two tells too little
# the 97.5th percentiles of Student's t by 1 / degrees of freedom, between which lines lie above the curve
INVERSE_DEGREES = (0.0, 1 / 30, 1 / 10, 1 / 5, 1 / 4, 1 / 3, 1 / 2, 1.0)
STUDENT_T = (1.960, 2.042, 2.228, 2.571, 2.776, 3.182, 4.303, 12.706)

Interval = tuple[float, float]


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
