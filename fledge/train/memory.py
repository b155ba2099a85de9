"""How much memory a training step takes, found out on short rows before the first."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch

from fledge.models.draft import Draft
from fledge.train.objective import Ways
from fledge.types import Packed

# from quick to small: slots in flight, and whether the MLP's activations are computed again
LADDER = ((8192, False), (4096, False), (2048, False), (2048, True), (1024, True))
MARGIN = 0.93  # of the device's memory; the rest is for what the allocator cannot use
OPTIMIZER = 12  # bytes a parameter: the float32 master and two moments
UPDATE = 6  # and while it is updated: the gradient, and its float32 sum
SUM = 4  # which is there throughout where several rows make a step


@dataclass(frozen=True)
class Memory:
    """Bytes that training takes on the device: `held` whatever the row, and a line through the peaks of short rows."""

    ways: Ways
    held: int
    fixed: float
    per_token: float
    update: int

    def at(self, tokens: int) -> int:
        """Peak bytes with rows of so many tokens."""
        return self.held + max(round(self.fixed + self.per_token * tokens), self.update)

    def longest(self, available: int) -> int:
        """Tokens of the longest row that fits in so many bytes, in steps of 128."""
        if available < self.held + self.update:
            return 0
        return max(int((available - self.held - self.fixed) / self.per_token), 0) // 128 * 128


def row_to_measure(row: Packed, tokens: int, supervised: float) -> Packed:
    """The beginning of a row, with a share of it supervised, whatever was: the row that takes most is meant. At least
    as much as makes a slot live, so that a step does all that it does."""
    span = torch.where(torch.arange(tokens) < max(supervised * tokens, 3), row.doc_T[:tokens], -1)
    return Packed(row.token_T[:tokens], span, row.position_T[:tokens], row.doc_T[:tokens])


def measure(
    draft: Draft,
    row: Packed,
    supervised: float,
    step: Callable[[Packed, Ways], None],
    ways: Ways,
    rows_per_step: int = 1,
) -> Memory:
    """Runs `step`, a forward and backward pass, on a half and a quarter of the row; what it finds is thrown away."""
    parameters = [p for p in draft.parameters() if p.requires_grad]
    count = sum(p.numel() for p in parameters)
    before = torch.cuda.memory_allocated(draft.device)
    lengths = [row.token_T.numel() // 2, row.token_T.numel() // 4]
    peaks = []
    for tokens in (min(256, lengths[1]), *lengths):  # the first takes what a process takes once
        torch.cuda.reset_peak_memory_stats(draft.device)
        step(row_to_measure(row, tokens, supervised), ways)
        draft.zero_grad(set_to_none=True)
        peaks.append(torch.cuda.max_memory_allocated(draft.device) - before)
    _, half, quarter = peaks
    slope = max((half - quarter) / (lengths[0] - lengths[1]), 1.0)
    held = before + OPTIMIZER * count + (SUM * count if rows_per_step > 1 else 0)
    return Memory(ways, held, half - slope * lengths[0], slope, UPDATE * count)


def choose(
    draft: Draft,
    row: Packed,
    supervised: float,
    step: Callable[[Packed, Ways], None],
    asked: Sequence[Ways],
    available: int,
    rows_per_step: int = 1,
) -> Memory:
    """The first of the ways asked for whose step fits in so many bytes.

    Raises ValueError with the longest row that fits where none does.
    """
    tokens, memory = row.token_T.numel(), None
    for ways in asked:
        try:
            memory = measure(draft, row, supervised, step, ways, rows_per_step)
        except torch.OutOfMemoryError:
            draft.zero_grad(set_to_none=True)
            torch.cuda.empty_cache()
            continue
        if memory.at(tokens) <= MARGIN * available:
            return memory
    if memory is None:
        raise ValueError(
            f"not even half a row of {tokens:,} tokens fits on the device; make rows shorter (--row-length)"
        )
    raise ValueError(
        f"a step over a row of {tokens:,} tokens takes about {memory.at(tokens) / 2**30:.1f} GiB, and the device has "
        f"{available / 2**30:.1f}; rows of at most {memory.longest(round(MARGIN * available)):,} tokens fit "
        "(--row-length)"
    )


def ladder(ways: Ways, *, slots: int | None, activations: str) -> list[Ways]:
    """The ways to try: those asked for, or from quick to small ("auto"). Plain torch recomputes nothing."""
    if ways.layers == "eager":
        rungs = [(n, False) for n, _ in LADDER]
    else:
        rungs = [(n, again) for n, again in LADDER if activations == "auto" or again == (activations == "recompute")]
    chosen = [(slots or n, again) for n, again in rungs]
    return [replace(ways, slots=n, recompute=again) for n, again in dict.fromkeys(chosen)]
