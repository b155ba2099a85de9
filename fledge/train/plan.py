"""The inputs of each step of training-time test: chunks of slots, their tokens, positions and visible keys."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fledge.ops.attention_ttt import BLOCK, Queries, document_blocks
from fledge.ops.device import to_device
from fledge.ops.training import padded_rows
from fledge.types import Packed


@dataclass(frozen=True)
class StepPlan:
    """The inputs of one TTT step for S slots, on the device.

    `token_P` and `position_P` are the tokens and rotary positions. `queries` has the keys that each slot may read.
    `previous_P` is the index of each slot among the slots of the previous step; at step 0, among the row's tokens from
    the chunk's `start` on. P is S, or S rounded up by repeating the last slot.
    """

    token_P: Tensor
    position_P: Tensor
    queries: Queries
    previous_P: Tensor


def plan_steps(
    row: Packed, live: Sequence[Tensor], start: int, device: torch.device, *, pad_rows: bool = False
) -> Iterator[StepPlan]:
    """Yields the plan of each step of a chunk. A generator, so that a plan is made while the device runs the last step.

    `live` are the chunk's slots at each step, K ascending int64 CPU tensors. `start` is the row's first token whose
    keys the chunk reads. `pad_rows` rounds the number of rows up to `padded_rows`.
    """
    end = int(live[0][-1]) + 1 if live[0].numel() else start
    documents = [(a - start, min(b, end) - start) for a, b in row.documents() if start <= a < end]
    first, stop = torch.tensor(documents, dtype=torch.int32).view(-1, 2).T
    first_of = torch.repeat_interleave(first, stop - first)  # of each token: the first token of its document
    indices: list[Tensor] = []  # for each step: of each token, its index among the step's slots
    for k, slots in enumerate(live):
        at = (slots - start).int()
        indices.append(torch.zeros(end - start, dtype=torch.int32))
        indices[k][at] = torch.arange(slots.numel(), dtype=torch.int32)
        S = slots.numel()
        padded = torch.arange(padded_rows(S) if pad_rows else S).clamp_max(S - 1)
        previous = indices[k - 1][at] if k else at
        of_rows = torch.stack([*step_inputs(row, slots, k), previous])[:, padded]
        of_slots = torch.stack([at, first_of[at], *(p[at] for p in indices[1:])])
        i, j = to_device([of_rows, of_slots], device)
        blocks = document_blocks(at, documents, BLOCK[device.type])
        yield StepPlan(i[0], i[1], Queries(j[0], j[1], j[2:], blocks), i[2])


def step_inputs(row: Packed, slots_S: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Token x_{t+1+k} and rotary position pos_t + k of each slot t at step k, both [S].

    The row's last token has no successor and is never a live slot. In place of a successor, the last token reads token
    0, which affects only the last token's key, and no slot reads this key.
    """
    after, n = slots_S + 1 + k, row.token_T.numel()
    token = torch.where(after < n, row.token_T[after.clamp_max(n - 1)], 0)
    return token, row.position_T[slots_S] + k


def teacher_rows(live: Sequence[Tensor], tokens: int, *, pad_rows: bool = False) -> tuple[Tensor, list[Tensor]]:
    """The tokens x_{t+1+k} of all slots t and steps k. The teacher is the target's distribution after these tokens.

    Returns the tokens' indices in the row (of `tokens` tokens), ascending int64 [P], and for each step the position of
    each slot's token among the P indices. `pad_rows` repeats the last index, so at least one index belongs to no slot.
    """
    needed = torch.zeros(tokens, dtype=torch.bool)
    for k, slots in enumerate(live):
        needed[slots + 1 + k] = True
    row_of, needed_P = needed.cumsum(0) - 1, needed.nonzero().squeeze(-1)
    if pad_rows and needed_P.numel():
        needed_P = torch.cat([needed_P, needed_P[-1:].expand(padded_rows(needed_P.numel() + 1) - needed_P.numel())])
    return needed_P, [row_of[slots + 1 + k] for k, slots in enumerate(live)]


def key_range(slots: Tensor, document_starts: Tensor) -> tuple[int, int]:
    """[start, end) of the row's tokens whose keys these slots may read.

    The range starts with the document of the first slot and ends with the last slot.
    """
    if not slots.numel():
        return 0, 0
    document = torch.searchsorted(document_starts, slots[:1], right=True) - 1
    return int(document_starts[document]), int(slots[-1]) + 1


def chunk_slots(live: Sequence[Tensor], slots: int | None, document_starts: Tensor) -> list[list[Tensor]]:
    """Splits the slots of all steps into chunks of at most `slots` slots of step 0 (None: one chunk).

    Returns for each chunk the slots of each step; without slots, a single empty chunk. A chunk that is at least three
    quarters full at the end of a document ends with the document: a chunk that starts inside a document has to read
    the keys of the document's start again. `document_starts` are ascending token indices.
    """
    n = live[0].numel()
    slots = slots or max(n, 1)
    firsts = torch.searchsorted(live[0], document_starts)  # index of each document's first slot among all slots
    chunks, a = [], 0
    while a < n or not chunks:
        b = min(a + slots, n)
        document_end = int(firsts[torch.searchsorted(firsts, b, right=True) - 1]) if n else 0
        if b < n and document_end - a >= 0.75 * slots:
            b = document_end
        chunk = live[0][a:b]
        ends = chunk[[0, -1]] + torch.tensor([0, 1]) if chunk.numel() else torch.tensor([0, 0])
        cuts = [torch.searchsorted(t, ends).tolist() for t in live]
        chunks.append([t[i:j] for t, (i, j) in zip(live, cuts, strict=True)])
        a = b
    return chunks


@dataclass(frozen=True)
class DropTokens:
    """At depth d, a share of max(rate^d, min_rate) of each document's live slots is trained; 0 < `rate` <= 1 and
    0 <= `min_rate` <= 1."""

    rate: float = 0.8
    min_rate: float = 0.2

    def keep(self, row: Packed, live: Sequence[Tensor], key: str = "") -> list[Tensor]:
        """The slots trained at each depth: ascending int64 tensors, drawn with `key` as the seed.

        At depth 0, all live slots. At depth d, a random sample of each document's pool, of size
        min(pool, int(live · share)). The pool is the slots live at depth d; from depth 2 on, only the live slots that
        were kept at depth d - 1.
        """
        generator = _generator(key)
        documents = int(row.doc_T.max()) + 1
        kept = list(live[:1])
        for d in range(1, len(live)):
            pool = live[d]
            if d > 1:
                before = torch.zeros_like(row.token_T, dtype=torch.bool)
                before[kept[-1]] = True
                pool = pool[before[pool]]
            share = max(self.rate**d, self.min_rate)
            wanted = (torch.bincount(row.doc_T[live[d]], minlength=documents).double() * share).long()
            shuffled = pool[torch.randperm(pool.numel(), generator=generator)]
            by_document = shuffled[row.doc_T[shuffled].argsort(stable=True)]
            doc = row.doc_T[by_document]
            first = torch.searchsorted(doc, torch.arange(documents, dtype=doc.dtype))
            rank = torch.arange(doc.numel()) - first[doc]
            kept.append(by_document[rank < wanted[doc]].sort().values)
        return kept


@dataclass(frozen=True)
class DrawAnchors:
    """A row trains the blocks after at most `anchors` of its live slots, drawn evenly from all of them (DFlash, section
    4)."""

    anchors: int

    def keep(self, row: Packed, live: Sequence[Tensor], key: str = "") -> list[Tensor]:
        """The slots trained at each step, as `DropTokens.keep`: the live ones among the drawn slots."""
        drawn = live[0][torch.randperm(live[0].numel(), generator=_generator(key))[: self.anchors]]
        is_drawn = torch.zeros_like(row.token_T, dtype=torch.bool)
        is_drawn[drawn] = True
        return [slots[is_drawn[slots]] for slots in live]


def _generator(key: str) -> torch.Generator:
    """A generator on the CPU whose seed is a text."""
    return torch.Generator().manual_seed(int.from_bytes(hashlib.sha256(key.encode()).digest()[:7], "big"))
