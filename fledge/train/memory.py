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
        return max(int((available - self.held - self.fixed) / self.per_token), 0) // 128 * 128


def first_tokens(row: Packed, tokens: int) -> Packed:
    """The beginning of a row."""
    return Packed(row.token_T[:tokens], row.span_T[:tokens], row.position_T[:tokens], row.doc_T[:tokens])


def measure(draft: Draft, row: Packed, step: Callable[[Packed, Ways], None], ways: Ways) -> Memory:
    """Runs `step`, a forward and backward pass, on a half and a quarter of the row; what it finds is thrown away."""
    parameters = [p for p in draft.parameters() if p.requires_grad]
    count = sum(p.numel() for p in parameters)
    before = torch.cuda.memory_allocated(draft.device)
    peaks = []
    lengths = [row.token_T.numel() // 2, row.token_T.numel() // 4]
    for tokens in lengths:
        torch.cuda.reset_peak_memory_stats(draft.device)
        step(first_tokens(row, tokens), ways)
        draft.zero_grad(set_to_none=True)
        peaks.append(torch.cuda.max_memory_allocated(draft.device) - before)
    slope = max((peaks[0] - peaks[1]) / (lengths[0] - lengths[1]), 1.0)
    return Memory(ways, before + OPTIMIZER * count, peaks[0] - slope * lengths[0], slope, UPDATE * count)


def choose(
    draft: Draft, row: Packed, step: Callable[[Packed, Ways], None], asked: Sequence[Ways], available: int
) -> Memory:
    """The first of the ways asked for whose step fits in so many bytes.

    Raises ValueError with the longest row that fits where none does.
    """
    tokens = row.token_T.numel()
    for ways in asked:
        memory = measure(draft, row, step, ways)
        if memory.at(tokens) <= MARGIN * available:
            return memory
    raise ValueError(
        f"a step over a row of {tokens:,} tokens takes about {memory.at(tokens) / 2**30:.1f} GiB, and the device has "
        f"{available / 2**30:.1f}; rows of at most {memory.longest(MARGIN * available):,} tokens fit (--row-length)"
    )


def ladder(ways: Ways, *, slots: int | None, activations: str) -> list[Ways]:
    """The ways to try: those asked for, or from quick to small ("auto")."""
    rungs = [(n, again) for n, again in LADDER if activations == "auto" or again == (activations == "recompute")]
    chosen = [(slots or n, again) for n, again in rungs]
    return [replace(ways, slots=n, recompute=again) for n, again in dict.fromkeys(chosen)]
