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
WARM_UP_TOKENS = 128  # of the row that is run before memory is measured

# runs a forward and backward pass; returns an object that holds all tensors which are alive when the draft is updated
RunStep = Callable[[Packed, Implementation], Any]


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

    def measure(self, impl: Implementation) -> tuple[int, int]:
        """Runs the step on each row, and discards its gradients.

        Returns the peak of the bytes allocated on the device, the optimizer's included, and that peak plus the bytes
        that are free in one stream's pool but unusable for the other stream. Raises torch.OutOfMemoryError if the step
        does not fit, after freeing everything.
        """
        measured = [self._measure_row(row, impl) for row in self.rows]
        return max(peak for peak, _ in measured), max(peak + unusable for peak, unusable in measured)

    def _measure_row(self, row: Packed, impl: Implementation) -> tuple[int, int]:
        """The peak of a row, and the bytes unusable for the other stream."""
        device, count = self.draft.device, sum(p.numel() for p in self.draft.parameters() if p.requires_grad)
        if impl.prefetch:
            torch.cuda.empty_cache()  # the reserved memory is then the step's alone
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


def choose(trial: Trial, candidates: Sequence[Implementation], available: int) -> tuple[Implementation, int]:
    """Returns the first candidate whose step fits in `available` bytes, and the step's bytes. Raises DoesNotFit if none
    fits."""
    for impl in candidates:
        try:
            taken, with_unusable = trial.measure(impl)
        except torch.OutOfMemoryError:
            continue
        if with_unusable <= USABLE_FRACTION * available:
            return impl, taken
    raise DoesNotFit(
        f"a training step over a row of {trial.rows[0].token_T.numel():,} tokens needs more than the "
        f"{available / 2**30:.1f} GiB that the device has; use fewer --slots, a smaller --row-length or a smaller "
        "--draft-vocab"
    )


def warm_up_row(row: Packed) -> Packed:
    """The first WARM_UP_TOKENS tokens of a row, all supervised, so that a step on them does all its work."""
    token, position, doc = (x[:WARM_UP_TOKENS] for x in (row.token_T, row.position_T, row.doc_T))
    return Packed(token, doc, position, doc)


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
