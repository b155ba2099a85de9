"""τ estimated from a training row: the rounds of a greedy decoder that would generate exactly the row's text."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def simulate_decoding(live: Sequence[Tensor], hits: Sequence[Tensor]) -> tuple[int, int]:
    """(tokens committed, rounds) of decoding all spans of the row; arguments as in `accepted_per_round`."""
    rounds = accepted_per_round(live, hits)
    return sum(rounds) + len(rounds), len(rounds)


def accepted_per_round(live: Sequence[Tensor], hits: Sequence[Tensor]) -> list[int]:
    """The number of accepted draft tokens in each round.

    `live` are the live slots of the K steps, ascending int64 tensors; `hits` are bool tensors of the same lengths:
    whether the draft's argmax is the teacher's. A round at slot t accepts draft tokens up to the first miss, and the
    next round starts at slot t + accepted + 1. A round does not continue beyond the end of its span.
    """
    if not live or not live[0].numel():
        return []
    n = int(live[0][-1]) + 1
    run = torch.zeros(n, dtype=torch.int64)
    for slots, hit in zip(reversed(live), reversed(hits), strict=True):
        run[slots] = torch.where(hit, run[slots] + 1, 0)  # consecutive hits from step k on
    is_live = torch.zeros(n, dtype=torch.bool)
    is_live[live[0]] = True
    run, is_live = run.tolist(), is_live.tolist()
    rounds, t = [], int(live[0][0])
    while t < n:
        if is_live[t]:
            rounds.append(run[t])
            t += run[t] + 1
        else:
            t += 1
    return rounds
