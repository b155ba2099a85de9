"""How much memory a training step takes, found out by trying before the first."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from fledge.models.draft import Draft
from fledge.train.objective import Implementation
from fledge.types import Packed

# from quick to small: slots in flight, whether the MLP's activations are computed again, and whether the next row's
# features are made beside a row's step
LADDER = (
    (8192, False, True), (4096, False, True), (2048, False, True), (2048, False, False), (2048, True, False),
    (1024, True, False),
)  # fmt: skip
SMALL_CHUNK = 512  # teacher rows of the loss at a time, where activations are computed again
CPU_SLOTS = 256  # plain attention pays for every key in reach of a run of slots, so short runs cost less
MARGIN = 0.93  # of the device's memory; the rest is for what the allocator cannot use
OPTIMIZER = 12  # bytes a parameter: the float32 master and two moments
UPDATE = 6  # and while it is updated: the gradient, and its float32 sum
SUM = 4  # which is there throughout where several rows make a step
LEAST = 128  # tokens of a row; none shorter is tried
NEAR = 0.1  # the longest row that fits is found to within so much of it
FARTHEST = 8  # times the longest row tried is the next, however much memory is left

# a forward and backward pass; returns what is held until the draft is updated
Try = Callable[[Packed, Implementation], Any]
Report = Callable[[int, "int | None"], None]  # tokens of a row that was tried, and the bytes it takes


@dataclass(frozen=True)
class Trial:
    """A run's `step` over the `rows` that ask most of it, of which `rows_per_step` make an update."""

    draft: Draft
    rows: Sequence[Packed]
    step: Try
    rows_per_step: int = 1

    @property
    def length(self) -> int:
        return self.rows[0].token_T.numel()

    def needed(self, impl: Implementation, tokens: int | None = None) -> tuple[int, int]:
        """Bytes on the device that training on such rows takes at its peak, of rows of `tokens` made of them if said;
        and with what a stream frees and another cannot use. Tries the step; what it finds is thrown away. Raises
        torch.OutOfMemoryError where it takes more than there is, leaving nothing behind."""
        rows = [row if tokens is None else of_length(row, tokens) for row in self.rows]
        found = [self._needed(row, impl) for row in rows]
        return max(taken for taken, _ in found), max(taken + apart for taken, apart in found)

    def _needed(self, row: Packed, impl: Implementation) -> tuple[int, int]:
        device, count = self.draft.device, sum(p.numel() for p in self.draft.parameters() if p.requires_grad)
        if impl.prefetch:
            torch.cuda.empty_cache()  # what is reserved then is of this step
        torch.cuda.reset_peak_memory_stats(device)
        try:
            held = self.step(row, impl)
        finally:
            self.draft.zero_grad(set_to_none=True)
        peak, update = torch.cuda.max_memory_allocated(device), torch.cuda.memory_allocated(device) + UPDATE * count
        apart = torch.cuda.max_memory_reserved(device) - peak if impl.prefetch else 0
        del held
        return max(peak + (SUM * count if self.rows_per_step > 1 else 0), update) + OPTIMIZER * count, apart


def choose(
    trial: Trial, asked: Sequence[Implementation], available: int, report: Report = lambda *_: None
) -> tuple[Implementation, int]:
    """The first of the implementations asked for whose step fits in so many bytes, and the bytes it takes.

    Raises ValueError with the longest row that fits where none does; `report` hears of its search.
    """
    for impl in asked:
        try:
            taken, with_apart = trial.needed(impl)
        except torch.OutOfMemoryError:
            continue
        if with_apart <= MARGIN * available:
            return impl, taken
    longest = longest_row(trial, asked[-1], available, report)
    raise ValueError(
        f"a step over a row of {trial.length:,} tokens takes more than the {available / 2**30:.1f} GiB that the "
        f"device has; make rows shorter: at most {longest:,} tokens fit (--row-length)"
    )


def longest_row(trial: Trial, impl: Implementation, available: int, report: Report = lambda *_: None) -> int:
    """Tokens of the longest row that fits in so many bytes, less a tenth at most: one that fits, and a tenth more does
    not. Rows made of the trial's are tried, and `report` hears of each its tokens and the bytes it takes, None where
    the device ran out. Raises ValueError where not even one of LEAST tokens fits."""
    limit = MARGIN * available
    bytes_of: dict[int, int | None] = {}
    tokens = max(trial.length, LEAST)
    while True:
        try:
            _, bytes_of[tokens] = trial.needed(impl, tokens)
        except torch.OutOfMemoryError:
            bytes_of[tokens] = None
        report(tokens, bytes_of[tokens])
        fit = [n for n, taken in bytes_of.items() if taken is not None and taken <= limit]
        too_long = min(bytes_of.keys() - fit, default=None)
        if too_long == LEAST:
            raise ValueError(
                f"not even a row of {LEAST} tokens fits in the {available / 2**30:.1f} GiB that the device has; fewer "
                "--slots or a smaller --draft-vocab take less"
            )
        if fit and too_long is not None and too_long <= (1 + NEAR) * max(fit):
            return max(fit)
        tokens = _next_length(bytes_of, max(fit), too_long, limit) if fit else max(too_long // 2, LEAST)


def _next_length(bytes_of: dict[int, int | None], fits: int, too_long: int | None, limit: float) -> int:
    """The length to try after the longest that fits, and the shortest that is too long if there is one: where the line
    through them, or through the two longest, meets the limit. Few are to be tried, for long rows take minutes. So first
    one that should just fit, then one that is longer by as little as proves it."""
    other = too_long if bytes_of.get(too_long) else max((n for n in bytes_of if n < fits), default=0)
    each = (bytes_of[fits] - bytes_of.get(other, 0)) / (fits - other)
    foretold = fits + (limit - bytes_of[fits]) / max(each, 1)
    length = min(max(int(foretold / (1 + NEAR / 3)), int((1 + NEAR) * fits)), FARTHEST * fits)
    return length if too_long is None or length < too_long else (fits + too_long) // 2


def of_length(row: Packed, tokens: int) -> Packed:
    """The beginning of a row, as much of it supervised as of the whole, and a little so that a step does all that it
    does; or the row said over and over."""
    times = -(-tokens // row.token_T.numel())
    token, span, position, doc = (
        x.repeat(times)[:tokens] for x in (row.token_T, row.span_T, row.position_T, row.doc_T)
    )
    again = torch.arange(times, dtype=torch.int32).repeat_interleave(row.token_T.numel())[:tokens]
    doc = torch.where(doc >= 0, doc + again * (1 + int(row.doc_T.max())), doc)
    if tokens < row.token_T.numel():
        share = (row.span_T >= 0).float().mean().item()
        span = torch.where(torch.arange(tokens) < max(share * tokens, 3), doc, -1)
    else:
        span = torch.where(span >= 0, span + again * (1 + int(row.span_T.max())), -1)
    return Packed(token, span, position, doc)


def ladder(impl: Implementation, *, slots: int | None, activations: str) -> list[Implementation]:
    """The implementations to try: those asked for, or from fast to small ("auto"). Plain torch recomputes nothing."""
    rungs = [(slots or n, again, prefetch) for n, again, prefetch in LADDER]
    if impl.layers == "eager":
        rungs = [(n, False, prefetch) for n, _, prefetch in rungs]
    elif activations == "recompute":
        rungs = [(n, True, prefetch) for n, _, prefetch in rungs]
    elif activations == "keep":
        rungs = [rung for rung in rungs if not rung[1]]
    return [
        replace(impl, slots=n, recompute=again, prefetch=prefetch, chunk=SMALL_CHUNK if again else impl.chunk)
        for n, again, prefetch in dict.fromkeys(rungs)
    ]
