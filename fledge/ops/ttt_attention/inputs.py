"""The inputs of TTT attention: the queries of a step, and the own keys and values of earlier steps."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fledge.types import group_documents

# keys in a dense block of the eager implementation; larger blocks compute more masked scores, smaller ones launch more
BLOCK = {"cpu": 512, "cuda": 2048}


class OwnSteps(list[tuple[Tensor, Tensor]]):
    """The (keys, values) of the slots' own steps 1 .. J, each [P_j, G, d].

    All steps of a chunk of slots share one list: each step appends its keys and values and then attends. The backward
    pass can therefore sum the gradients of each step's keys in one tensor (`OwnGradients`). This requires a single
    backward pass through all steps, without activation checkpointing around a step.
    """

    def __init__(self, steps: Iterable[tuple[Tensor, Tensor]] = ()):
        super().__init__(steps)
        self.gradients = OwnGradients()


class OwnGradients:
    """Sums the gradients of own keys and values over the attention calls that read them.

    The backward pass that runs last for a step returns the sum to autograd. The keys are not stored here, which would
    be a reference cycle with the tensors that autograd saves.
    """

    def __init__(self) -> None:
        self.readers: Counter[int] = Counter()
        self.sums: dict[int, tuple[Tensor, Tensor]] = {}

    def add_reader(self, steps: int) -> None:
        """Registers an attention call that reads the first `steps` own steps."""
        self.readers.update(range(steps))

    def buffers(self, step: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """The tensors in which the gradients of a step's keys and values are summed."""
        assert self.readers[step], "the backward pass ran twice; the sums of the first one are gone"
        if step not in self.sums:
            self.sums[step] = torch.zeros_like(keys), torch.zeros_like(values)
        return self.sums[step]

    def finish_reader(self, step: int) -> tuple[Tensor | None, Tensor | None]:
        """Marks a reader's gradient as added. Returns the sums for the last reader, and (None, None) before."""
        self.readers[step] -= 1
        return (None, None) if self.readers[step] else self.sums.pop(step)


@dataclass(frozen=True)
class Queries:
    """The S queries of a step and the keys that each may read; the tensors are int32 on the device.

    Query i reads the keys first_S[i] .. slot_S[i] of the row; `first_S` is the first slot of its document. Both are
    ascending. `own_row_JS` is the row of each query in the own keys of steps 1 .. J. `blocks` are Python tuples (first
    query, end query, first key, end key) that cover every query with all keys it may read (`document_blocks`).
    """

    slot_S: Tensor
    first_S: Tensor
    own_row_JS: Tensor
    blocks: Sequence[tuple[int, int, int, int]]


def document_blocks(
    slots: Tensor, documents: Sequence[tuple[int, int]], width: int = 512
) -> list[tuple[int, int, int, int]]:
    """Splits a row into blocks (first query, end query, first key, end key) for `Queries.blocks`.

    A block has complete documents of at most `width` tokens together. A longer document is split into blocks of `width`
    queries, each with the document's keys up to its last query. Blocks without queries are left out. `slots` are the
    slots of the queries, ascending, on the CPU; `documents` are [start, end) token ranges.
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
