"""Chooses the implementation of a training step by its memory use, which is measured on a GPU before the first step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from fledge.drafts.draft import Draft
from fledge.train.optim import state_bytes
from fledge.train.row_pass import Implementation
from fledge.types import Packed

# (slots in flight, recompute the MLP's activations, prefetch the next row's features), from fast to small
CANDIDATES = (
    (8192, False, True), (4096, False, True), (2048, False, True), (2048, False, False), (2048, True, False),
    (1024, True, False),
)  # fmt: skip
SMALL_CHUNK = 512  # teacher rows of the loss at a time, if activations are recomputed
CPU_SLOTS = 256  # eager attention reads all keys visible to any slot of a chunk, so small chunks cost less
USABLE_FRACTION = 0.93  # of the device's memory; the rest is left for fragmentation in the allocator
UPDATE_BYTES = 6  # per parameter during the update: the 16-bit gradient and its float32 sum
GRADIENT_SUM_BYTES = 4  # per parameter during the whole step, if a step has several rows
MIN_TOKENS = 128  # the shortest row that is tried
TOLERANCE = 0.1  # relative precision of the longest row that fits
MAX_GROWTH = 8  # the next row to try is at most this many times as long as the longest that fits

# runs a forward and backward pass; returns an object that keeps alive whatever is alive when the draft is updated
RunStep = Callable[[Packed, Implementation], Any]
Report = Callable[[int, "int | None"], None]  # called with the tokens of a row that was tried, and the bytes it takes


class DoesNotFit(ValueError):
    """A training step needs more memory than the device has, however it is computed. The message names a cure."""


@dataclass(frozen=True)
class Trial:
    """A training step to try on the `rows` that need the most memory. An optimizer step has `rows_per_step` rows, and
    `shards` ranks share the state of the optimizer, whose `kind` is `optimizer`."""

    draft: Draft
    rows: Sequence[Packed]
    step: RunStep
    rows_per_step: int = 1
    shards: int = 1
    optimizer: str = "muon"

    @property
    def length(self) -> int:
        return self.rows[0].token_T.numel()

    def measure(self, impl: Implementation, tokens: int | None = None) -> tuple[int, int]:
        """Runs the step on each row, resized to `tokens` if given, and discards its gradients.

        Returns the peak of the bytes allocated on the device, the optimizer's included, and that peak plus the bytes
        that are free in one stream's pool but unusable for the other stream. Raises torch.OutOfMemoryError if the step
        does not fit, after freeing everything.
        """
        rows = [row if tokens is None else resize_row(row, tokens) for row in self.rows]
        measured = [self._measure_row(row, impl) for row in rows]
        return max(peak for peak, _ in measured), max(peak + unusable for peak, unusable in measured)

    def _measure_row(self, row: Packed, impl: Implementation) -> tuple[int, int]:
        """The peak of a row, and the bytes unusable for the other stream."""
        device, count = self.draft.device, sum(p.numel() for p in self.draft.parameters() if p.requires_grad)
        if impl.prefetch:
            torch.cuda.empty_cache()  # so that the reserved memory is this step's alone
        torch.cuda.reset_peak_memory_stats(device)
        try:
            alive = self.step(row, impl)
        finally:
            self.draft.zero_grad(set_to_none=True)
        peak = torch.cuda.max_memory_allocated(device)
        update = torch.cuda.memory_allocated(device) + UPDATE_BYTES * count
        unusable = torch.cuda.max_memory_reserved(device) - peak if impl.prefetch else 0
        del alive
        sums = GRADIENT_SUM_BYTES * count if self.rows_per_step > 1 else 0
        return max(peak + sums, update) + -(-state_bytes(self.draft, self.optimizer) // self.shards), unusable


def choose(
    trial: Trial, candidates: Sequence[Implementation], available: int, report: Report = lambda *_: None
) -> tuple[Implementation, int]:
    """Returns the first candidate whose step fits in `available` bytes, and the bytes that it takes.

    If none fits, searches for the longest row that fits (`longest_row`, with `report`) and raises DoesNotFit with it.
    """
    for impl in candidates:
        try:
            taken, with_unusable = trial.measure(impl)
        except torch.OutOfMemoryError:
            continue
        if with_unusable <= USABLE_FRACTION * available:
            return impl, taken
    longest = longest_row(trial, candidates[-1], available, report)
    raise DoesNotFit(
        f"a training step over a row of {trial.length:,} tokens needs more than the {available / 2**30:.1f} GiB that "
        f"the device has; make rows shorter: at most {longest:,} tokens fit (--row-length)"
    )


def longest_row(trial: Trial, impl: Implementation, available: int, report: Report = lambda *_: None) -> int:
    """The length in tokens of the longest row that fits in `available` bytes, to within a tenth.

    The returned length fits; a length at most a tenth above it does not. The trial's rows are resized to the lengths
    tried. `report` is called with each length and the bytes it takes, or None if the device ran out of memory. Raises
    DoesNotFit if a row of MIN_TOKENS tokens does not fit.
    """
    limit = USABLE_FRACTION * available
    bytes_of: dict[int, int | None] = {}
    tokens = max(trial.length, MIN_TOKENS)
    while True:
        try:
            _, bytes_of[tokens] = trial.measure(impl, tokens)
        except torch.OutOfMemoryError:
            bytes_of[tokens] = None
        report(tokens, bytes_of[tokens])
        fit = [n for n, taken in bytes_of.items() if taken is not None and taken <= limit]
        too_long = min(bytes_of.keys() - fit, default=None)
        if too_long == MIN_TOKENS:
            raise DoesNotFit(
                f"not even a row of {MIN_TOKENS} tokens fits in the {available / 2**30:.1f} GiB that the device has; "
                "use fewer --slots or a smaller --draft-vocab"
            )
        if fit and too_long is not None and too_long <= (1 + TOLERANCE) * max(fit):
            return max(fit)
        tokens = _next_length(bytes_of, max(fit), too_long, limit) if fit else max(too_long // 2, MIN_TOKENS)


def _next_length(bytes_of: dict[int, int | None], fits: int, too_long: int | None, limit: float) -> int:
    """The next length to try, given the longest length that fits and the shortest that does not (None: none known).

    Extrapolates the bytes linearly to the limit, from `fits` and a second measured length. Long rows take minutes, so
    the search needs few lengths: it first tries one that should just fit, then one that is longer by the tolerance.
    """
    other = too_long if bytes_of.get(too_long) else max((n for n in bytes_of if n < fits), default=0)
    bytes_per_token = (bytes_of[fits] - bytes_of.get(other, 0)) / (fits - other)
    predicted = fits + (limit - bytes_of[fits]) / max(bytes_per_token, 1)
    length = min(max(int(predicted / (1 + TOLERANCE / 3)), int((1 + TOLERANCE) * fits)), MAX_GROWTH * fits)
    return length if too_long is None or length < too_long else (fits + too_long) // 2


def resize_row(row: Packed, tokens: int) -> Packed:
    """The row cut or repeated to `tokens` tokens.

    A repeated row has distinct documents and spans. A cut row has the same share of supervised tokens, at its start,
    and at least 3 of them, so that it has a live slot.
    """
    times = -(-tokens // row.token_T.numel())
    token, span, position, doc = (
        x.repeat(times)[:tokens] for x in (row.token_T, row.span_T, row.position_T, row.doc_T)
    )
    copy = torch.arange(times, dtype=torch.int32).repeat_interleave(row.token_T.numel())[:tokens]
    doc = torch.where(doc >= 0, doc + copy * (1 + int(row.doc_T.max())), doc)
    if tokens < row.token_T.numel():
        share = (row.span_T >= 0).float().mean().item()
        span = torch.where(torch.arange(tokens) < max(share * tokens, 3), doc, -1)
    else:
        span = torch.where(span >= 0, span + copy * (1 + int(row.span_T.max())), -1)
    return Packed(token, span, position, doc)


def candidates(impl: Implementation, *, slots: int | None, activations: str) -> list[Implementation]:
    """The implementations to try, from fast to small: CANDIDATES restricted to the options given.

    `slots` None leaves the number of slots in flight open. `activations` is "auto", "recompute" or "keep". Eager layers
    never recompute.
    """
    chosen = [(slots or n, recompute, prefetch) for n, recompute, prefetch in CANDIDATES]
    if impl.layers == "eager":
        chosen = [(n, False, prefetch) for n, _, prefetch in chosen]
    elif activations == "recompute":
        chosen = [(n, True, prefetch) for n, _, prefetch in chosen]
    elif activations == "keep":
        chosen = [c for c in chosen if not c[1]]
    return [
        replace(impl, slots=n, recompute=again, prefetch=prefetch, chunk=SMALL_CHUNK if again else impl.chunk)
        for n, again, prefetch in dict.fromkeys(chosen)
    ]
