"""How the slots of all steps are cut into tiles: the slots that a chunk of teacher rows teaches."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from fledge.kernels.transfer import to_device

PRODUCT = 2048  # slots whose part of the head's gradient is computed in one product


@dataclass(frozen=True)
class Tile:
    """The slots that some teacher rows teach.

    `start` is the first of those rows, `spans` every step's [start, end) of slots, `place_M` the slots' places among
    all steps' slots, `row_M` their teacher rows within the tile (both int64, on the device).
    """

    start: int
    spans: tuple[tuple[int, int], ...]
    place_M: Tensor
    row_M: Tensor


@dataclass
class SlotSums:
    """Where the tiles leave what they find; the slots of all steps stand one after the other."""

    loss_S: Tensor
    accept_S: Tensor
    scored_S: Tensor
    hit_S: Tensor


def tiles_of(rows: list[Tensor], chunk: int, device: torch.device) -> Iterator[Tile]:
    """A tile for each run of `chunk` teacher rows; `rows` are the ascending teacher rows of each step's slots."""
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


def groups_of(tiles: Iterator[Tile]) -> Iterator[list[Tile]]:
    """Tiles that hold PRODUCT slots together, so that the head's gradient is added to a few times only."""
    group: list[Tile] = []
    for tile in tiles:
        if tile.place_M.numel():
            group.append(tile)
        if sum(t.place_M.numel() for t in group) >= PRODUCT:
            yield group
            group = []
    if group:
        yield group
