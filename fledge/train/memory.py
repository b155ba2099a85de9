"""How much memory a training step takes, found out by trying before the first."""

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
    """Bytes that training takes on the device: `held` whatever the row, and a line through the peaks of two rows."""

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
    """The beginning of a row, said over and over where it is shorter, with a share of it supervised, whatever was: the
    row that takes most is meant. At least as much as makes a slot live, so that a step does all that it does."""
    times = -(-tokens // row.token_T.numel())
    token, position, doc = (x.repeat(times)[:tokens] for x in (row.token_T, row.position_T, row.doc_T))
    doc = doc + torch.arange(times).repeat_interleave(row.doc_T.numel())[:tokens] * (1 + int(row.doc_T.max()))
    return Packed(token, torch.where(torch.arange(tokens) < max(supervised * tokens, 3), doc, -1), position, doc)


def measure(
    draft: Draft,
    row: Packed,
    supervised: float,
    step: Callable[[Packed, Ways], None],
    ways: Ways,
    rows_per_step: int = 1,
    tokens: int | None = None,
) -> Memory:
    """Runs `step`, a forward and backward pass, on a row of so many tokens (None: the row's own) and on its half; what
    it finds is thrown away. Raises torch.OutOfMemoryError where that is too much, leaving nothing behind."""
    tokens = tokens or row.token_T.numel()
    parameters = [p for p in draft.parameters() if p.requires_grad]
    count = sum(p.numel() for p in parameters)
    before = torch.cuda.memory_allocated(draft.device)
    half, peaks = tokens // 2, []
    for n in (min(256, half), half, tokens):  # the first takes what a process takes once
        torch.cuda.reset_peak_memory_stats(draft.device)
        try:
            step(row_to_measure(row, n, supervised), ways)
        except torch.OutOfMemoryError:
            draft.zero_grad(set_to_none=True)
            torch.cuda.empty_cache()
            raise
        draft.zero_grad(set_to_none=True)
        peaks.append(torch.cuda.max_memory_allocated(draft.device) - before)
    slope = max((peaks[2] - peaks[1]) / (tokens - half), 1.0)
    held = before + OPTIMIZER * count + (SUM * count if rows_per_step > 1 else 0)
    return Memory(ways, held, peaks[2] - slope * tokens, slope, UPDATE * count)


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
    tokens = row.token_T.numel()
    for ways in asked:
        try:
            memory = measure(draft, row, supervised, step, ways, rows_per_step)
        except torch.OutOfMemoryError:
            continue
        if memory.at(tokens) <= MARGIN * available:
            return memory
    longest = longest_row(draft, row, supervised, step, asked[-1], available, rows_per_step)
    raise ValueError(
        f"a step over a row of {tokens:,} tokens takes more than the {available / 2**30:.1f} GiB that the device has; "
        f"make rows shorter: at most {longest:,} tokens fit (--row-length)"
    )


def longest_row(
    draft: Draft,
    row: Packed,
    supervised: float,
    step: Callable[[Packed, Ways], None],
    ways: Ways,
    available: int,
    rows_per_step: int = 1,
) -> int:
    """Tokens of the longest row that fits in so many bytes, 0 where not even one of 512 does. Rows made of this one are
    tried, each twice as long as the one before, until one that fits is at least half the longest."""
    room = round(MARGIN * available)

    def tried(tokens: int) -> Memory | None:
        try:
            return measure(draft, row, supervised, step, ways, rows_per_step, tokens)
        except torch.OutOfMemoryError:
            return None

    tokens = row.token_T.numel()
    while (memory := tried(tokens)) is None:
        tokens //= 2
        if tokens < 512:
            return 0
    while memory is not None and memory.longest(room) >= 2 * tokens:
        tokens *= 2
        memory = tried(tokens)
    return tokens // 2 if memory is None else memory.longest(room)


def ladder(ways: Ways, *, slots: int | None, activations: str) -> list[Ways]:
    """The ways to try: those asked for, or from quick to small ("auto"). Plain torch recomputes nothing."""
    if ways.layers == "eager":
        rungs = [(n, False) for n, _ in LADDER]
    else:
        rungs = [(n, again) for n, again in LADDER if activations == "auto" or again == (activations == "recompute")]
    chosen = [(slots or n, again) for n, again in rungs]
    return [replace(ways, slots=n, recompute=again) for n, again in dict.fromkeys(chosen)]
