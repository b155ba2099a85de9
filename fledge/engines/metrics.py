"""Acceptance from the counters of serving engines, in the terms of `fledge.measure.metrics`.

vLLM counts in /metrics: drafts (verifications), drafted and accepted tokens, and accepted tokens by position. SGLang
counts for each request (`meta_info` of /generate): verifications, accepted tokens, and a histogram of the accepted
tokens of a verification; and in /metrics, with --enable-metrics, verifications and tokens. For every source,
τ = 1 + accepted / verifications, and α_k = (rounds that accepted k tokens) / (rounds that accepted k - 1 tokens).
"""

from __future__ import annotations

import itertools
import re
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from fledge.io.fields import format_value

COUNTED = ("spec_verify_ct", "completion_tokens", "spec_num_correct_drafts", "spec_num_proposed_drafts")
SAMPLE = re.compile(
    r"(?P<name>[a-zA-Z_:][\w:]*)(\{(?P<labels>.*)\})?\s+(?P<value>[-+]?\d+(\.\d*)?([eE][-+]?\d+)?)(\s+\d+)?"
)
MOST = 2.0**53  # larger values are no counts
MOST_POSITIONS = 1024  # most drafted tokens of a round
MOST_LINE = 10_000  # characters; a longer line is no sample
LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')


@dataclass(frozen=True)
class Acceptance:
    """Sums over verification rounds.

    `by_position[k]` is the number of rounds that accepted more than k tokens; empty without counts by position.
    `drafted` is the number of drafted tokens; None without a count. `source` names the source of the figures.
    """

    rounds: float
    accepted: float
    drafted: float | None
    by_position: tuple[float, ...]
    source: str

    @property
    def tau(self) -> float | None:
        """The tokens committed per round, the target's own token included; None without rounds."""
        return 1 + self.accepted / self.rounds if self.rounds else None

    @property
    def alpha(self) -> list[float | None] | None:
        """The acceptance rate of each drafted token among the rounds that accepted all earlier tokens; a rate is None
        if no round did. None without counts by position."""
        if not self.by_position:
            return None
        reached = [self.rounds, *self.by_position]
        return [after / before if before else None for before, after in itertools.pairwise(reached)]

    @property
    def depth(self) -> float | None:
        """The drafted tokens per round; None if unknown."""
        return self.drafted / self.rounds if self.rounds and self.drafted is not None else None


@dataclass(frozen=True)
class Counters:
    """An engine's counters since its start.

    `acceptance` is None if the engine does not speculate or does not count acceptance. `tokens` counts the generated
    tokens of all requests, and `requests` the requests; `running` is the number of requests that are being decoded or
    wait. A number is None if the engine does not count it.
    """

    acceptance: Acceptance | None = None
    tokens: float | None = None
    requests: float | None = None
    running: float | None = None

    def since(self, before: Counters) -> Counters:
        """The counts since `before`, an earlier reading of the same engine."""
        spent = self.acceptance
        if spent is not None and before.acceptance is not None:
            past = before.acceptance
            spent = replace(
                spent, rounds=spent.rounds - past.rounds, accepted=spent.accepted - past.accepted,
                drafted=_difference(spent.drafted, past.drafted),
                by_position=tuple(
                    a - b for a, b in itertools.zip_longest(spent.by_position, past.by_position, fillvalue=0.0)
                ),
            )  # fmt: skip
        return Counters(
            spent, _difference(self.tokens, before.tokens), _difference(self.requests, before.requests), self.running
        )


def _difference(after: float | None, before: float | None) -> float | None:
    return None if after is None else after - (before or 0.0)


class Samples:
    """The samples of a text in Prometheus' exposition format. Series with equal names are added up."""

    def __init__(self, text: str):
        self._values: dict[str, float] = {}
        self._by_position: dict[str, dict[int, float]] = defaultdict(dict)
        for line in text.split("\n"):
            match = None if line.startswith("#") or len(line) > MOST_LINE else SAMPLE.fullmatch(line.strip())
            if match is None or abs(value := float(match["value"])) > MOST:
                continue
            name = match["name"]
            self._values[name] = self._values.get(name, 0.0) + value
            position = dict(LABEL.findall(match["labels"] or "")).get("position", "")
            if position.isdecimal() and len(position) <= 4 and (k := int(position)) < MOST_POSITIONS:
                counts = self._by_position[name]
                counts[k] = counts.get(k, 0.0) + value

    def get(self, *names: str) -> float | None:
        """The sum of the series with the given names; None if no series exists."""
        known = [self._values[name] for name in names if name in self._values]
        return sum(known) if known else None

    def by_position(self, name: str) -> tuple[float, ...]:
        """The values of a series by its label `position`, from 0 on."""
        counts = self._by_position.get(name, {})
        return tuple(counts.get(k, 0.0) for k in range(max(counts, default=-1) + 1))


def vllm_counters(text: str) -> Counters:
    """The counters in vLLM's /metrics."""
    samples = Samples(text)
    rounds = samples.get("vllm:spec_decode_num_drafts_total")
    accepted = samples.get("vllm:spec_decode_num_accepted_tokens_total")
    acceptance = None
    if rounds is not None and accepted is not None:
        acceptance = Acceptance(
            rounds, accepted, samples.get("vllm:spec_decode_num_draft_tokens_total"),
            samples.by_position("vllm:spec_decode_num_accepted_tokens_per_pos_total"), "vLLM's counters in /metrics",
        )  # fmt: skip
    running = samples.get("vllm:num_requests_running", "vllm:num_requests_waiting")
    return Counters(acceptance, samples.get("vllm:generation_tokens_total"), None, running)


def sglang_counters(text: str) -> Counters:
    """The counters in SGLang's /metrics.

    SGLang does not count the tokens of verifications. Verifications generate all tokens except the first token of each
    request, which the prefill generates. Tokens cut at the end of a request are missing.
    """
    samples = Samples(text)
    rounds, tokens = samples.get("sglang:spec_verify_calls_total"), samples.get("sglang:generation_tokens_total")
    requests = samples.get("sglang:num_requests_total")
    acceptance = None
    if rounds is not None and tokens is not None and requests is not None:
        acceptance = Acceptance(rounds, tokens - requests - rounds, None, (), "SGLang's counters in /metrics")
    running = samples.get("sglang:num_running_reqs", "sglang:num_queue_reqs")
    return Counters(acceptance, tokens, requests, running)


def of_requests(metas: Iterable[dict[str, Any]]) -> Acceptance | None:
    """The acceptance of requests to SGLang's /generate, from the meta_info of the answers. None if an answer lacks the
    count of verifications. Raises ValueError for counts that are no numbers.

    Without a count of accepted tokens, the number follows from the answer's length: all tokens, minus 1 for the
    prefill, minus 1 for each verification.
    """
    rounds = accepted = drafted = 0.0
    histogram: list[float] = []
    counted = complete = True
    for meta in metas:
        verified, tokens, correct, proposed = (_count(meta, name) for name in COUNTED)
        if verified is None:
            if tokens is not None and tokens <= 1:  # only the prefill's token, without a verification
                continue
            return None
        rounds += verified
        accepted += (tokens or 0) - 1 - verified if correct is None else correct
        drafted, counted = drafted + (proposed or 0.0), counted and proposed is not None
        lengths = _histogram(meta.get("spec_correct_drafts_histogram") or meta.get("spec_accept_histogram") or [])
        complete = complete and sum(lengths) == verified
        histogram = [a + b for a, b in itertools.zip_longest(histogram, lengths, fillvalue=0.0)]
    if not rounds:
        return None
    by_position = [sum(histogram[k:]) for k in range(1, len(histogram))] if complete else []
    return Acceptance(
        rounds, accepted, drafted if counted else None, tuple(by_position), "the requests' own counts by SGLang"
    )


def _count(meta: dict[str, Any], name: str) -> float | None:
    """A count in SGLang's meta_info; None if meta_info lacks the count."""
    value = meta.get(name)
    if value is not None and not _is_count(value):
        raise ValueError(f"SGLang's meta_info counts {format_value(value)} as {name}, which is no number")
    return value


def _histogram(value: Any) -> Sequence[float]:
    if not isinstance(value, list) or len(value) > MOST_POSITIONS or not all(map(_is_count, value)):
        raise ValueError(f"SGLang's meta_info has {format_value(value)} as its histogram of accepted tokens")
    return value


def _is_count(value: Any) -> bool:
    return isinstance(value, int | float) and 0 <= value <= MOST
