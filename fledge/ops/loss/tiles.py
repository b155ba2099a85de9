"""Splitting the slots of all steps into tiles: the slots whose soft targets are in one chunk of teacher rows."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from fledge.ops.transfer import to_device

SLOTS_PER_GROUP = 2048  # minimum number of slots per GEMM of the head's gradient


@dataclass(frozen=True)
class Tile:
    """The slots, of all steps, whose soft targets are in one chunk of teacher rows.

    `start` is the first teacher row of the chunk. `spans` are the [start, end) slots of each step. `place_M` is the
    index of each slot in the concatenation of all steps' slots, and `row_M` its teacher row relative to `start`; both
    are int64 on the device.
    """

    start: int
    spans: tuple[tuple[int, int], ...]
    place_M: Tensor
    row_M: Tensor


@dataclass
class SlotSums:
    """The results per slot, which tiles write: loss, α, whether scored, whether a hit. The steps are concatenated."""

    loss_S: Tensor
    accept_S: Tensor
    scored_S: Tensor
    hit_S: Tensor


def make_tiles(rows: list[Tensor], chunk: int, device: torch.device) -> Iterator[Tile]:
    """Yields a tile for each chunk of `chunk` teacher rows; `rows` are the ascending teacher rows of each step's slots.

    Tiles may have no slots.
    """
    last = max((int(r[-1]) for r in rows if r.numel()), default=-1)
    edges = torch.arange(0, last + 1 + chunk, chunk)
    cuts = [torch.searchsorted(r, edges).tolist() for r in rows]  # K lists of chunks + 1
    base = [0, *itertools.accumulate(r.numel() for r in rows)]
    spans = list(zip(*(itertools.pairwise(c) for c in cuts), strict=True))
    places = [torch.arange(base[k] + a, base[k] + b) for s in spans for k, (a, b) in enumerate(s)]
    within = [rows[k][a:b] - i * chunk for i, s in enumerate(spans) for k, (a, b) in enumerate(s)]
    if not spans:
        return
    place, row = to_device([torch.cat(places), torch.cat(within)], device)
    sizes = [sum(b - a for a, b in s) for s in spans]
    yield from map(Tile, edges.tolist(), spans, place.split(sizes), row.split(sizes))


def group_tiles(tiles: Iterator[Tile]) -> Iterator[list[Tile]]:
    """Groups consecutive tiles, leaving out empty ones, until a group has at least SLOTS_PER_GROUP slots.

    One GEMM for each group adds to the gradient of the head.
    """
    group: list[Tile] = []
    for tile in tiles:
        if tile.place_M.numel():
            group.append(tile)
        if sum(t.place_M.numel() for t in group) >= SLOTS_PER_GROUP:
            yield group
            group = []
    if group:
        yield group
