"""What each step of training-time test feeds: slots in chunks, their tokens and positions, and what they may read."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fledge.kernels.linear import rounded
from fledge.kernels.transfer import to_device
from fledge.kernels.ttt_attention import BLOCK, Queries, document_blocks
from fledge.types import Packed


@dataclass(frozen=True)
class StepPlan:
    """The inputs of one step of S slots, on the device.

    `token_P` and `position_P` are what is fed. `kept_P` says where the slots stand among those of the step before (at
    step 0: among the row's tokens from the chunk's `start` on). `queries` says what each may read. P is S, or S rounded
    up by repeating the last slot.
    """

    token_P: Tensor
    position_P: Tensor
    queries: Queries
    kept_P: Tensor


def plan_steps(
    row: Packed, live: Sequence[Tensor], start: int, device: torch.device, *, rounds: bool = False
) -> Iterator[StepPlan]:
    """The steps of some slots (K ascending int64 CPU tensors), whose keys are the row's from `start` on. Each plan is
    made while the device computes the step before. `rounds`: round the number of rows up."""
    end = int(live[0][-1]) + 1 if live[0].numel() else start
    documents = [(a - start, min(b, end) - start) for a, b in row.documents() if start <= a < end]
    begins, ends = torch.tensor(documents, dtype=torch.int32).view(-1, 2).T
    begin_of = torch.repeat_interleave(begins, ends - begins)
    places: list[Tensor] = []  # of a step's slots among themselves, by token
    for k, slots in enumerate(live):
        at = (slots - start).int()
        places.append(torch.zeros(end - start, dtype=torch.int32))
        places[k][at] = torch.arange(slots.numel(), dtype=torch.int32)
        S = slots.numel()
        fill = torch.arange(rounded(S) if rounds else S).clamp_max(S - 1)
        kept = places[k - 1][at] if k else at
        of_rows = torch.stack([*step_inputs(row, slots, k), kept])[:, fill]
        of_slots = torch.stack([at, begin_of[at], *(p[at] for p in places[1:])])
        i, j = to_device([of_rows, of_slots], device)
        blocks = document_blocks(at, documents, BLOCK[device.type])
        yield StepPlan(i[0], i[1], Queries(j[0], j[1], j[2:], blocks), i[2])


def step_inputs(row: Packed, slots_S: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Token x_{t+1+k} and rotary position pos_t + k of each slot t.

    The row's last slot has no next token and is never live; it reads token 0, and only its own key, which nothing
    sees, depends on that.
    """
    after, n = slots_S + 1 + k, row.token_T.numel()
    token = torch.where(after < n, row.token_T[after.clamp_max(n - 1)], 0)
    return token, row.position_T[slots_S] + k


def teacher_rows(live: Sequence[Tensor], tokens: int, *, rounds: bool = False) -> tuple[Tensor, list[Tensor]]:
    """The tokens x_{t+1+k} that the slots t read at their steps k, after which the target's distribution is needed.

    Returns their places in the row of `tokens`, ascending int64 [P], and for each step the slots' rows among those.
    Rounded up, they end with at least one row that nothing reads.
    """
    wanted = torch.zeros(tokens, dtype=torch.bool)
    for k, slots in enumerate(live):
        wanted[slots + 1 + k] = True
    place, found = wanted.cumsum(0) - 1, wanted.nonzero().squeeze(-1)
    if rounds and found.numel():
        found = torch.cat([found, found[-1:].expand(rounded(found.numel() + 1) - found.numel())])
    return found, [place[slots + 1 + k] for k, slots in enumerate(live)]


def reach(slots: Tensor, begins: Tensor) -> tuple[int, int]:
    """[start, end) of the row's tokens that these slots may read: from the first one's document to the last slot."""
    if not slots.numel():
        return 0, 0
    return int(begins[torch.searchsorted(begins, slots[:1], right=True) - 1]), int(slots[-1]) + 1


def chunks_of(live: Sequence[Tensor], slots: int | None, begins: Tensor) -> list[list[Tensor]]:
    """The live slots of every step, in chunks of at most `slots` (None: one chunk); at least one chunk, maybe empty.

    A chunk ends where a document ends (they begin at `begins`) if that leaves it three quarters full, so that the next
    chunk need not read the beginning of a document that was cut.
    """
    n = live[0].numel()
    slots = slots or max(n, 1)
    firsts = torch.searchsorted(live[0], begins)  # each document's first slot, among all
    chunks, a = [], 0
    while a < n or not chunks:
        b = min(a + slots, n)
        whole = int(firsts[torch.searchsorted(firsts, b, right=True) - 1]) if n else 0
        if b < n and whole - a >= 0.75 * slots:
            b = whole
        mine = live[0][a:b]
        ends = mine[[0, -1]] + torch.tensor([0, 1]) if mine.numel() else torch.tensor([0, 0])
        cuts = [torch.searchsorted(t, ends).tolist() for t in live]
        chunks.append([t[i:j] for t, (i, j) in zip(live, cuts, strict=True)])
        a = b
    return chunks
