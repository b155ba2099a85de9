"""τ of a training row: the rounds that a decoder would take if the row's text were the target's own."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def walk(live: Sequence[Tensor], hits: Sequence[Tensor]) -> tuple[int, int]:
    """(tokens committed, rounds) of decoding the row as it stands."""
    rounds = walk_rounds(live, hits)
    return sum(rounds) + len(rounds), len(rounds)


def walk_rounds(live: Sequence[Tensor], hits: Sequence[Tensor]) -> list[int]:
    """Drafted tokens accepted in each round.

    A round at slot t accepts the run of hits (draft argmax equals teacher argmax) that starts there, and the next
    begins at t + accepted + 1. Where a span ends, its last round ends with it. `live` are K ascending int64 tensors of
    slots, `hits` their bools.
    """
    if not live or not live[0].numel():
        return []
    n = int(live[0][-1]) + 1
    run = torch.zeros(n, dtype=torch.int64)
    for slots, hit in zip(reversed(live), reversed(hits), strict=True):
        run[slots] = torch.where(hit, run[slots] + 1, 0)  # length of the run of hits from step k on
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
