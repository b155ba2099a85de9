"""What training-time-test attention takes: the queries of a step, and the keys that slots made at their own steps."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fledge.types import group_documents

# keys of a dense block of the eager implementation: a block costs its square, and each block its launches
BLOCK = {"cpu": 512, "cuda": 2048}


class OwnSteps(list[tuple[Tensor, Tensor]]):
    """The keys and values [P_j, G, d] that slots made at their own steps, in order.

    One list serves all steps of some slots: each step appends its own before it attends, so that the backward pass can
    sum the gradients of a key in one place. That needs a single backward pass that reaches all steps, and no checkpoint
    around any of them.
    """

    def __init__(self, steps: Iterable[tuple[Tensor, Tensor]] = ()):
        super().__init__(steps)
        self.gradients = OwnGradients()


class OwnGradients:
    """Gradients of own keys and values, summed over the steps that read them; the last reader's backward pass returns
    the sums. Keeps no keys, avoiding a reference cycle with what autograd saves."""

    def __init__(self) -> None:
        self.readers: Counter[int] = Counter()
        self.sums: dict[int, tuple[Tensor, Tensor]] = {}

    def read(self, steps: int) -> None:
        """Counts a reader of the first so many steps."""
        self.readers.update(range(steps))

    def place(self, step: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Where a step's gradients are summed."""
        assert self.readers[step], "a backward pass came twice; the sums of the first are gone"
        if step not in self.sums:
            self.sums[step] = torch.zeros_like(keys), torch.zeros_like(values)
        return self.sums[step]

    def done(self, step: int) -> tuple[Tensor | None, Tensor | None]:
        """Counts a reader that has added its share; of the last, the sums."""
        self.readers[step] -= 1
        return (None, None) if self.readers[step] else self.sums.pop(step)


@dataclass(frozen=True)
class Queries:
    """The queries of a step and what each may read; int32 tensors on the device.

    `slot_S` is the key a query stands at and `first_S` the first key of its document, both ascending; `at_JS` is its
    row among the own keys of steps 1 .. J. `blocks` (first query, end query, first key, end key), on the host, cover
    every query with all that it may read (`document_blocks`).
    """

    slot_S: Tensor
    first_S: Tensor
    at_JS: Tensor
    blocks: Sequence[tuple[int, int, int, int]]


def document_blocks(
    slots: Tensor, documents: Sequence[tuple[int, int]], width: int = 512
) -> list[tuple[int, int, int, int]]:
    """Cuts a row into blocks of whole documents of at most `width` tokens, a longer one into stretches of `width`
    queries that read its keys so far. Each block names its queries and keys; one without queries is left out.

    `slots` is ascending and on the CPU.
    """
    groups = group_documents(documents, width)
    cuts = torch.searchsorted(slots, torch.tensor([e for _, e in groups], dtype=slots.dtype)).tolist()
    blocks = []
    for q0, q1, (n0, n1) in zip([0, *cuts][: len(cuts)], cuts, groups, strict=True):
        if n1 - n0 <= width:
            blocks += [(q0, q1, n0, n1)] if q1 > q0 else []
        else:
            ends = [min(q + width, q1) for q in range(q0, q1, width)]
            blocks += [(q, e, n0, int(slots[e - 1]) + 1) for q, e in zip(range(q0, q1, width), ends, strict=True)]
    return blocks
