"""How much memory a training step takes, found out by trying before the first."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch

from fledge.models.draft import Draft
from fledge.train.objective import Ways
from fledge.types import Packed

# from quick to small: slots in flight, and whether the MLP's activations are computed again
LADDER = ((8192, False), (4096, False), (2048, False), (2048, True), (1024, True))
CPU_SLOTS = 256  # plain attention pays for every key in reach of a run of slots, so short runs cost less
MARGIN = 0.93  # of the device's memory; the rest is for what the allocator cannot use
OPTIMIZER = 12  # bytes a parameter: the float32 master and two moments
UPDATE = 6  # and while it is updated: the gradient, and its float32 sum
SUM = 4  # which is there throughout where several rows make a step
LEAST = 512  # tokens of a row; none shorter is tried

Try = Callable[[Packed, Ways], None]  # a forward and backward pass


def needed(draft: Draft, row: Packed, step: Try, ways: Ways, rows_per_step: int = 1) -> int:
    """Bytes on the device that training on such rows takes at its peak. Tries `step`; what it finds is thrown away.
    Raises torch.OutOfMemoryError where it takes more than there is, leaving nothing behind."""
    count = sum(p.numel() for p in draft.parameters() if p.requires_grad)
    torch.cuda.reset_peak_memory_stats(draft.device)
    try:
        step(row, ways)
    finally:
        draft.zero_grad(set_to_none=True)
    peak = max(
        torch.cuda.max_memory_allocated(draft.device), torch.cuda.memory_allocated(draft.device) + UPDATE * count
    )
    return peak + OPTIMIZER * count + (SUM * count if rows_per_step > 1 else 0)


def choose(
    draft: Draft, row: Packed, step: Try, asked: Sequence[Ways], available: int, rows_per_step: int = 1
) -> tuple[Ways, int]:
    """The first of the ways asked for whose step over the row fits in so many bytes, and the bytes it takes.

    Raises ValueError with the longest row that fits where none does.
    """
    for ways in asked:
        try:
            taken = needed(draft, row, step, ways, rows_per_step)
        except torch.OutOfMemoryError:
            continue
        if taken <= MARGIN * available:
            return ways, taken
    longest = longest_row(draft, row, step, asked[-1], available, rows_per_step)
    raise ValueError(
        f"a step over a row of {row.token_T.numel():,} tokens takes more than the {available / 2**30:.1f} GiB that the "
        f"device has; make rows shorter: at most {longest:,} tokens fit (--row-length)"
    )


def longest_row(draft: Draft, row: Packed, step: Try, ways: Ways, available: int, rows_per_step: int = 1) -> int:
    """Tokens of the longest row that fits in so many bytes, in steps of 128; 0 where none does. Rows made of this one
    are tried, each twice as long as the one before, until the line through the last two says that a row twice as long
    as the last would not fit."""

    def tried(tokens: int) -> int | None:
        try:
            return needed(draft, of_length(row, tokens), step, ways, rows_per_step)
        except torch.OutOfMemoryError:
            return None

    room, tokens = MARGIN * available, row.token_T.numel()
    while (taken := tried(tokens)) is None or taken > room:
        tokens //= 2
        if tokens < LEAST:
            return 0
    while True:
        longer = tried(2 * tokens)
        if longer is None:  # that is too long, and so is whatever the line below says beyond
            below = tried(tokens // 2)
            assert below is not None, "half of what fits"
            return _crossing(tokens // 2, below, tokens, taken, room, most=2 * tokens - 1)
        if (longest := _crossing(tokens, taken, 2 * tokens, longer, room)) < 4 * tokens:
            return longest
        tokens, taken = 2 * tokens, longer


def _crossing(a: int, taken_a: int, b: int, taken_b: int, room: float, most: int | None = None) -> int:
    """Where the line through two rows' bytes meets the room, in steps of 128 tokens."""
    longest = int(b + (room - taken_b) * (b - a) / max(taken_b - taken_a, 1))
    return (longest if most is None else min(longest, most)) // 128 * 128


def of_length(row: Packed, tokens: int) -> Packed:
    """The beginning of a row, as much of it supervised as of the whole, and a little so that a step does all that it
    does; or the row said over and over."""
    times = -(-tokens // row.token_T.numel())
    token, span, position, doc = (
        x.repeat(times)[:tokens] for x in (row.token_T, row.span_T, row.position_T, row.doc_T)
    )
    again = torch.arange(times).repeat_interleave(row.token_T.numel())[:tokens]
    doc = doc + again * (1 + int(row.doc_T.max()))
    if tokens < row.token_T.numel():
        share = (row.span_T >= 0).float().mean().item()
        span = torch.where(torch.arange(tokens) < max(share * tokens, 3), doc, -1)
    else:
        span = torch.where(span >= 0, span + again * (1 + int(row.span_T.max())), -1)
    return Packed(token, span, position, doc)


def ladder(ways: Ways, *, slots: int | None, activations: str) -> list[Ways]:
    """The ways to try: those asked for, or from quick to small ("auto"). Plain torch recomputes nothing."""
    if ways.layers == "eager":
        rungs = [(n, False) for n, _ in LADDER]
    else:
        rungs = [(n, again) for n, again in LADDER if activations == "auto" or again == (activations == "recompute")]
    chosen = [(slots or n, again) for n, again in rungs]
    return [replace(ways, slots=n, recompute=again) for n, again in dict.fromkeys(chosen)]
