"""Metrics of traces. Each metric is a quotient of two sums over all rounds of all traces."""

from __future__ import annotations

from collections.abc import Sequence

from fledge.types import Trace


def tau(traces: Sequence[Trace]) -> float:
    """The tokens committed per round, including the target's own token, before the text is cut at a stop; 0 if there
    are no rounds."""
    committed, rounds = committed_per_round(traces)
    return committed / rounds if rounds else 0.0


def committed_per_round(traces: Sequence[Trace]) -> tuple[int, int]:
    """The tokens committed in all rounds, and the number of rounds; `tau` is the quotient."""
    rounds = [r for t in traces for r in t.rounds]
    return sum(r.accepted + 1 for r in rounds), len(rounds)


def alpha(traces: Sequence[Trace]) -> list[float | None]:
    """α_k, the acceptance rate of the k-th drafted token among the rounds that drafted a k-th token and accepted the
    first k - 1 tokens; None if no round did. For trees, the share of accepted paths of length k - 1 that continue to
    depth k."""
    return quotients(*drafted_and_accepted(traces))


def quotients(reached: Sequence[float], passed: Sequence[float]) -> list[float | None]:
    """Each α_k, from the two lists of `drafted_and_accepted`; None for a position that no round reached."""
    return [p / n if n else None for n, p in zip(reached, passed, strict=True)]


def alpha_text(alpha: Sequence[float | None]) -> str:
    """Each α_k as text with two decimals, "-" for None."""
    return " ".join("-" if a is None else f"{a:.2f}" for a in alpha)


def drafted_and_accepted(traces: Sequence[Trace]) -> tuple[list[int], list[int]]:
    """For each depth k, from 1 on: the number of rounds that drafted a k-th token after k - 1 accepted tokens, and the
    number of rounds that accepted the k-th token. α_k is the quotient."""
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
    """A sentence on the share of rounds that drafted nothing, with the reason if the engine knows a reason."""
    return f"Speculation paused in {share:.0%} of the rounds{': ' * bool(reason)}{reason}."
