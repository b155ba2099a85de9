"""Intervals of the figures of an evaluation: they cover the truth, are paired by request, and need three requests."""

import random

import numpy as np
import pytest

from fledge.measure.record import alpha_intervals, speedup_interval, tau_interval


def request(committed, rounds, reached=(), passed=(), **more):
    return dict(
        tokens=committed + 1, rounds=rounds, committed=committed, drafted=0, reached=[*reached], passed=[*passed]
    ) | more  # fmt: skip


@pytest.fixture(scope="module")
def answers() -> np.ndarray:
    """(committed, rounds) of many answers, whose lengths and acceptance rates differ much."""
    draw = np.random.default_rng(1)

    def answer() -> tuple[int, int]:
        length, rate = np.clip(draw.lognormal(4, 1), 2, 512), draw.beta(6, 3)
        accepted = np.minimum(draw.geometric(1 - rate, 512) - 1, 5)
        rounds = int(np.searchsorted(np.cumsum(accepted + 1), length)) + 1
        return int((accepted[:rounds] + 1).sum()), rounds

    return np.array([answer() for _ in range(4000)])


@pytest.mark.parametrize("count, widest", [(3, 3.5), (5, 2.0), (10, 1.4), (20, 1.2)])
def test_the_interval_of_tau_covers_the_truth_in_95_percent_of_evaluations(
    count: int, widest: float, answers: np.ndarray
) -> None:
    """Of 3 to 20 requests. Half the interval is at most `widest` times the error exceeded by one evaluation of 20."""
    draw = np.random.default_rng(0)
    truth = answers[:, 0].sum() / answers[:, 1].sum()
    errors, halves = [], []
    for _ in range(400):
        chosen = answers[draw.integers(len(answers), size=count)].tolist()
        low, high = tau_interval([request(*each) for each in chosen])
        tau = sum(c for c, _ in chosen) / sum(r for _, r in chosen)
        errors.append(abs(tau - truth))
        halves.append(high - tau)
        assert low == pytest.approx(max(1.0, 2 * tau - high))
    covered = np.mean(np.array(errors) <= np.array(halves))
    assert covered >= 0.92, covered
    assert np.median(halves) <= widest * np.percentile(errors, 95)


def test_the_sample_is_the_requests_and_not_the_rounds():
    alike = [request(20, 10) for _ in range(20)]  # each has τ 2
    apart = [request(10 if i % 2 else 30, 10) for i in range(20)]  # the same mean, of τ 1 and 3
    assert tau_interval(alike) == (2.0, 2.0)
    low, high = tau_interval(apart)
    assert low < 1.8 and high > 2.2


def test_a_long_request_counts_by_its_rounds():
    low, high = tau_interval([request(3000, 1000)] * 30 + [request(1, 1)] * 30)
    assert 2.9 < low <= high < 3.01
    low, high = tau_interval([request(3000, 1000)] + [request(1, 1)] * 30)
    assert low <= 2.9 and high > 3.01, "one long request among many says little"


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
    requests = [request(5, 4, (4, 2), (2, 1))] * 2 + [request(5, 4, (4,), (2,))]
    first, second = alpha_intervals(requests)
    assert first == (0.5, 0.5) and second == (0.0, 1.0)


def test_an_interval_has_possible_values_only():
    accepted = [request(n, 4, (4,), (k,)) for n, k in ((4, 0), (4, 0), (8, 4))]
    assert tau_interval(accepted)[0] == 1.0 and alpha_intervals(accepted) == [(0.0, 1.0)]


def test_intervals_need_three_requests_and_the_speedup_their_seconds():
    two = [request(n, 4, (4,), (2,), seconds=1.0, baseline_seconds=2.0) for n in (5, 6)]
    for few in ([], two[:1], two):
        assert (tau_interval(few), alpha_intervals(few), speedup_interval(few)) == (None, [], None)
    assert speedup_interval([request(5, 4)] * 3) is None
    assert tau_interval([*two, request(0, 0)]) is None  # an answer of one token has no round
    assert None not in (tau_interval([*two, *two]), speedup_interval([*two, *two]))


def test_the_same_requests_have_the_same_intervals():
    requests = [request(i + 5, i + 2, (3,), (i % 3,)) for i in range(9)]
    assert tau_interval(requests) == tau_interval(requests)
    assert alpha_intervals(requests) == alpha_intervals(requests)
