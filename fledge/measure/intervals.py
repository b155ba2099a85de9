"""95 % intervals of the figures of an evaluation, from the differences between requests.

A request is an entry of a record's `requests` (docs/measuring.md). The requests are the sample, not the rounds, since
the rounds of a request resemble each other. Every figure is a quotient of sums over requests. The standard error comes
from leaving out each request in turn (jackknife; Tukey, 1958), and the interval is the figure ± the standard error
times the 97.5th percentile of Student's t. The effective sample size is (Σ w)² / Σ w², where the weight w is a
request's part of the divisor (Kish, 1965), since a few long requests may decide the figure; the degrees of freedom are
the effective sample size minus 1, and at least 1.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

ENOUGH = 3  # fewest requests of an interval
# the 97.5th percentiles of Student's t by 1 / degrees of freedom; linear interpolation lies above the true percentiles
INVERSE_DEGREES = (0.0, 1 / 30, 1 / 10, 1 / 5, 1 / 4, 1 / 3, 1 / 2, 1.0)
STUDENT_T = (1.960, 2.042, 2.228, 2.571, 2.776, 3.182, 4.303, 12.706)

Interval = tuple[float, float]


def tau_interval(requests: Sequence[Mapping[str, Any]]) -> Interval | None:
    """The interval of τ, the tokens committed per round (at least 1); None if fewer than ENOUGH requests have a
    round."""
    rows = [[r["committed"], r["rounds"]] for r in requests if r["rounds"]]
    return _interval(rows, np.divide, lowest=1.0)


def alpha_intervals(requests: Sequence[Mapping[str, Any]]) -> list[Interval]:
    """The interval of each α_k, the acceptance rate of the k-th drafted token among the rounds that reached depth k.
    (0, 1) for a depth that fewer than ENOUGH requests reached; no intervals for fewer than ENOUGH requests."""
    if len(requests) < ENOUGH:
        return []
    depth = max(len(r["reached"]) for r in requests)
    by_depth = (
        [[r["passed"][k], r["reached"][k]] for r in requests if len(r["reached"]) > k and r["reached"][k]]
        for k in range(depth)
    )
    return [_interval(rows, np.divide, highest=1.0) or (0.0, 1.0) for rows in by_depth]


def speedup_interval(requests: Sequence[Mapping[str, Any]]) -> Interval | None:
    """The interval of the speedup, the ratio of tokens per second with the draft to tokens per second without. Both
    arms decode the same requests, so a request that is slow in both arms does not widen the interval. None for fewer
    than ENOUGH requests, or without the requests' seconds, which are known only at batch 1."""
    if not all("seconds" in r and "baseline_seconds" in r for r in requests):
        return None
    rows = [[r["tokens"], r["seconds"], r.get("baseline_tokens", r["tokens"]), r["baseline_seconds"]] for r in requests]
    return _interval(rows, lambda tokens, s, baseline_tokens, baseline_s: (tokens / s) / (baseline_tokens / baseline_s))


def _interval(
    rows: list[list[float]], figure: Callable[..., Any], *, lowest: float = 0.0, highest: float = np.inf
) -> Interval | None:
    """The interval of figure(*sums), where `sums` are the sums of the columns of `rows`. A row is a request; the second
    column is the request's weight. None for fewer than ENOUGH rows."""
    n = len(rows)
    if n < ENOUGH:
        return None
    rows_NC = np.array(rows, dtype=np.float64)
    value, without_N = figure(*rows_NC.sum(0)), figure(*(rows_NC.sum(0) - rows_NC).T)
    error = np.sqrt((n - 1) * without_N.var())
    degrees = max(rows_NC[:, 1].sum() ** 2 / (rows_NC[:, 1] ** 2).sum() - 1, 1.0)
    half = np.interp(1 / degrees, INVERSE_DEGREES, STUDENT_T) * error
    return float(max(value - half, lowest)), float(min(value + half, highest))
