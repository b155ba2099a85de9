"""95 % intervals of the figures of an evaluation, by bootstrap over its requests.

A request is an entry of a record's `requests` (docs/measuring.md). The rounds of a request resemble each other, so that
requests are resampled, not rounds: as many as there are, with replacement, RESAMPLES times. An interval holds the
middle 95 % of the figure over the resamples (percentile bootstrap; Efron, 1979). The seed is fixed: the same requests
always have the same intervals. With few requests, such an interval is too narrow.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

RESAMPLES = 2000
TAILS = (2.5, 97.5)  # percentiles, between which 95 % of the resamples lie

Interval = tuple[float, float]


def tau_interval(requests: Sequence[Mapping[str, Any]]) -> Interval | None:
    """The interval of τ, the tokens committed per round; None with fewer than two requests that have a round."""
    requests = [r for r in requests if r["rounds"]]
    if len(requests) < 2:
        return None
    committed, rounds = _resampled([[r["committed"], r["rounds"]] for r in requests])
    return _middle(committed / rounds)


def alpha_intervals(requests: Sequence[Mapping[str, Any]]) -> list[Interval]:
    """The interval of each α_k, the acceptance rate of the k-th drafted token among the rounds that reached it. It is
    (0, 1) for a depth that at most one request reached; there are none with fewer than two requests."""
    if len(requests) < 2:
        return []
    depth = max(len(r["reached"]) for r in requests)
    return [_alpha_interval(requests, k) for k in range(depth)]


def speedup_interval(requests: Sequence[Mapping[str, Any]]) -> Interval | None:
    """The interval of the speedup: tokens per second with the draft over those without it, of the same requests, so
    that what makes a request slow in both does not widen it. None with fewer than two requests, or without their
    seconds, which are known at batch 1 only."""
    if len(requests) < 2 or not all("seconds" in r and "baseline_seconds" in r for r in requests):
        return None
    rows = [[r["tokens"], r["seconds"], r.get("baseline_tokens", r["tokens"]), r["baseline_seconds"]] for r in requests]
    tokens, seconds, baseline_tokens, baseline_seconds = _resampled(rows)
    return _middle((tokens / seconds) / (baseline_tokens / baseline_seconds))


def _alpha_interval(requests: Sequence[Mapping[str, Any]], k: int) -> Interval:
    rows = [[r["passed"][k], r["reached"][k]] for r in requests if len(r["reached"]) > k and r["reached"][k]]
    if len(rows) < 2:
        return 0.0, 1.0
    passed, reached = _resampled(rows)
    return _middle(passed / reached)


def _resampled(rows: list[list[float]]) -> np.ndarray:
    """The sums of each column of `rows`, one row a request, over each resample: float64 [columns, RESAMPLES]."""
    n = len(rows)
    drawn = np.random.default_rng(0).multinomial(n, np.full(n, 1 / n), size=RESAMPLES)  # how often each was drawn
    return (drawn @ np.array(rows, dtype=np.float64)).T


def _middle(values: np.ndarray) -> Interval:
    low, high = np.percentile(values, TAILS)
    return float(low), float(high)
