"""JSON records of measurements, as `fledge eval --out` and the benchmarks write them, and intervals of their figures.

The intervals are 95 % intervals from the differences between requests, the entries of a record's `requests`
(docs/measuring.md). The requests are the sample, not the rounds, since the rounds of a request resemble each other.
Every figure is a quotient of sums over requests. The standard error comes from leaving out each request in turn
(jackknife; Tukey, 1958), and the interval is the figure ± the standard error times the 97.5th percentile of Student's
t. The effective sample size is (Σ w)² / Σ w², where the weight w is a request's part of the divisor (Kish, 1965), since
a few long requests may decide the figure; the degrees of freedom are the effective sample size minus 1, and at least 1.
"""

from __future__ import annotations

import contextlib
import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from operator import truediv
from pathlib import Path
from typing import Any

from fledge.io.fields import read_json
from fledge.io.files import check_output_path, replace_text

MAX_RECORD_BYTES = 2**26  # a larger file counts as no record, without being parsed
_SCALAR = r'(?:"(?:[^"\\]|\\.)*"|[^\s"\[\]{},]+)'
# a list without lists and objects, as indented by json.dumps; line ends within texts are escaped
_FLAT_LIST = re.compile(rf"\[\n\s+({_SCALAR}(?:,\n\s+{_SCALAR})*)\n\s+\]")
_BREAK = r",\n\s+"
ENVIRONMENT_KEYS = frozenset({"device", "dtype", "python", "torch", "transformers", "commit"})
ENOUGH = 3  # fewest requests of an interval
# the 97.5th percentiles of Student's t by 1 / degrees of freedom; linear interpolation lies above the true percentiles
INVERSE_DEGREES = (0.0, 1 / 30, 1 / 10, 1 / 5, 1 / 4, 1 / 3, 1 / 2, 1.0)
STUDENT_T = (1.960, 2.042, 2.228, 2.571, 2.776, 3.182, 4.303, 12.706)

Interval = tuple[float, float]


def check_record_path(path: str | Path, flag: str) -> Path:
    """Checks, before a job starts, that a record can be written at `path`, and returns the path.

    Only an empty file or an earlier record may be replaced. Raises ValueError, naming the option `flag`, if the path
    cannot be written or has a file that may not be replaced.
    """
    path = check_output_path(path, flag)
    earlier = not path.exists() or not path.stat().st_size
    with contextlib.suppress(ValueError):  # no JSON
        earlier = earlier or is_record(read_json(path, MAX_RECORD_BYTES))
    if not earlier:
        raise ValueError(
            f"{flag} {path} already exists and is not a record that fledge wrote, so it is not replaced; choose "
            "another name"
        )
    return path


def is_record(value: Any) -> bool:
    """Whether a JSON value is a record: an object with an `environment` as `fledge.io.machine` makes it, or an
    object whose values are all records."""
    if not isinstance(value, dict) or not value:
        return False
    environment = value.get("environment")
    if isinstance(environment, dict):
        return environment.keys() >= ENVIRONMENT_KEYS
    return all(is_record(v) for v in value.values())


def write_record(path: str | Path, record: Any) -> None:
    """Writes a record atomically. Replaces an earlier record; raises ValueError instead of replacing any other file."""
    path = check_record_path(path, "the record")
    path.parent.mkdir(parents=True, exist_ok=True)
    replace_text(path, record_text(record) + "\n")


def record_text(record: Any) -> str:
    """A record as indented JSON. A list of numbers or texts takes one line, since every request has several lists."""
    return _FLAT_LIST.sub(lambda m: f"[{re.sub(_BREAK, ', ', m[1])}]", json.dumps(record, indent=2))


def tau_interval(requests: Sequence[Mapping[str, Any]]) -> Interval | None:
    """The interval of τ, the tokens committed per round (at least 1); None if fewer than ENOUGH requests have a
    round."""
    rows = [[r["committed"], r["rounds"]] for r in requests if r["rounds"]]
    return _interval(rows, truediv, lowest=1.0)


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
    return [_interval(rows, truediv, highest=1.0) or (0.0, 1.0) for rows in by_depth]


def speedup_interval(requests: Sequence[Mapping[str, Any]]) -> Interval | None:
    """The interval of the speedup, the ratio of tokens per second with the draft to tokens per second without. Both
    arms decode the same requests, so a request that is slow in both arms does not widen the interval. None for fewer
    than ENOUGH requests, or without the requests' seconds, which are known only at batch 1."""
    if not all("seconds" in r and "baseline_seconds" in r for r in requests):
        return None
    rows = [[r["tokens"], r["seconds"], r.get("baseline_tokens", r["tokens"]), r["baseline_seconds"]] for r in requests]
    return _interval(rows, lambda tokens, s, baseline_tokens, baseline_s: (tokens / s) / (baseline_tokens / baseline_s))


def _interval(
    rows: list[list[float]], figure: Callable[..., Any], *, lowest: float = 0.0, highest: float = math.inf
) -> Interval | None:
    """The interval of figure(*sums), where `sums` are the sums of the columns of `rows`. A row is a request; the second
    column is the request's weight. None for fewer than ENOUGH rows."""
    import numpy as np  # not at the start of every command

    n = len(rows)
    if n < ENOUGH:
        return None
    rows_NC = np.array(rows, dtype=np.float64)
    value, without_N = figure(*rows_NC.sum(0)), figure(*(rows_NC.sum(0) - rows_NC).T)
    error = np.sqrt((n - 1) * without_N.var())
    degrees = max(rows_NC[:, 1].sum() ** 2 / (rows_NC[:, 1] ** 2).sum() - 1, 1.0)
    half = np.interp(1 / degrees, INVERSE_DEGREES, STUDENT_T) * error
    return float(max(value - half, lowest)), float(min(value + half, highest))
