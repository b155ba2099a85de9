"""Series over training steps: smoothed, and short enough for a page."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

POINTS = 600  # of a line on the page; more cannot be told apart


def smoothing_window(steps: int) -> int:
    """The number of steps that a smoothed line is the mean of."""
    return max(1, steps // 20)


def smoothed(y: Sequence[float]) -> list[float]:
    """The mean of the `smoothing_window` values up to each one; of fewer at the start."""
    sums = np.concatenate([[0.0], np.cumsum(y)])
    ends = np.arange(1, len(y) + 1)
    starts = np.maximum(0, ends - smoothing_window(len(y)))
    return ((sums[ends] - sums[starts]) / (ends - starts)).tolist()


def thinned(x: Sequence[float], y: Sequence[float], points: int = POINTS) -> tuple[list[float], list[float]]:
    """At most about `points` of a series: the smallest and the largest of each of points / 2 equal parts."""
    if len(x) <= points:
        return list(x), list(y)
    kept: set[int] = {0, len(x) - 1}
    values = np.asarray(y)
    for part in np.array_split(np.arange(len(x)), points // 2):
        kept |= {int(part[values[part].argmin()]), int(part[values[part].argmax()])}
    order = sorted(kept)
    return [x[i] for i in order], [float(y[i]) for i in order]


def sampled_rows(n: int, rows: int = 40) -> list[int]:
    """The indices of at most `rows` of n entries, evenly spaced, for a table; the first and the last among them."""
    return sorted({round(i) for i in np.linspace(0, n - 1, min(n, rows))}) if n else []
