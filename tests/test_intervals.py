"""Intervals of the figures of an evaluation: they cover the truth, are paired by request, and need two requests."""

import random

import pytest

from fledge.eval.intervals import alpha_intervals, speedup_interval, tau_interval


def request(committed, rounds, reached=(), passed=(), **more):
    return dict(
        tokens=committed + 1, rounds=rounds, committed=committed, drafted=0, reached=[*reached], passed=[*passed]
    ) | more  # fmt: skip


def test_the_interval_of_tau_covers_the_truth_in_about_95_percent_of_evaluations():
    draw, covered = random.Random(0), 0
    for _ in range(200):
        rounds = [[1 + sum(draw.random() < 0.5 for _ in range(4)) for _ in range(20)] for _ in range(40)]
        low, high = tau_interval([request(sum(r), len(r)) for r in rounds])
        covered += low <= 3.0 <= high
    assert 0.88 <= covered / 200 <= 0.99


def test_requests_are_resampled_and_not_rounds():
    alike = [request(20, 10) for _ in range(20)]  # each has τ 2
    apart = [request(10 if i % 2 else 30, 10) for i in range(20)]  # the same mean, of τ 1 and 3
    assert tau_interval(alike) == (2.0, 2.0)
    low, high = tau_interval(apart)
    assert low < 1.8 and high > 2.2


def test_a_long_request_counts_by_its_rounds():
    low, high = tau_interval([request(3000, 1000)] * 30 + [request(1, 1)] * 30)
    assert 2.9 < low <= high < 3.01


def test_the_speedup_is_paired_by_request():
    """The requests' lengths differ much and their speedups do not: the interval is narrow."""
    draw = random.Random(1)
    requests = [request(n, n, seconds=n * 0.01, baseline_seconds=n * 0.02) for n in draw.sample(range(10, 900), 30)]
    low, high = speedup_interval(requests)
    assert low == pytest.approx(2.0) and high == pytest.approx(2.0)


def test_the_baseline_has_its_own_number_of_tokens():
    """Where sampled drafts change the tokens drawn, the answers have different lengths."""
    requests = [request(99, 50, seconds=1.0, baseline_seconds=1.0, baseline_tokens=50) for _ in range(3)]
    assert speedup_interval(requests) == (2.0, 2.0)


def test_a_depth_that_few_requests_reached_is_unknown():
    requests = [request(5, 4, (4, 2), (2, 1)), request(5, 4, (4,), (2,))]
    first, second = alpha_intervals(requests)
    assert first == (0.5, 0.5) and second == (0.0, 1.0)


def test_intervals_need_two_requests_and_the_speedup_their_seconds():
    one = [request(5, 4, (4,), (2,), seconds=1.0, baseline_seconds=2.0)]
    assert (tau_interval(one), alpha_intervals(one), speedup_interval(one)) == (None, [], None)
    assert (tau_interval([]), alpha_intervals([]), speedup_interval([])) == (None, [], None)
    assert speedup_interval([request(5, 4), request(5, 4)]) is None
    assert tau_interval([request(0, 0), request(5, 4)]) is None  # an answer of one token has no round


def test_the_same_requests_have_the_same_intervals():
    requests = [request(i + 5, i + 2, (3,), (i % 3,)) for i in range(9)]
    assert tau_interval(requests) == tau_interval(requests)
    assert alpha_intervals(requests) == alpha_intervals(requests)
