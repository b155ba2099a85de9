"""Tile sizes of the products of few rows, chosen by the shape of the weight."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

RESERVED = 4096  # bytes of shared memory that are not buffers of the loads


@dataclass(frozen=True)
class Tiles:
    """How a product is divided: `rows` rows of x and `outputs` rows of the weight per program, `inputs` columns a step.

    All are powers of 2. For a gated product, `outputs` counts the gate and the up rows. The columns of a step are
    divided into parts of `part` columns, 16 or more, with sums of their own, and these among the warps. `stages` - 1
    steps are in flight at a time.

    `splits` programs share the columns of a weight; a second kernel adds their sums in a fixed order. With `dependent`,
    a program starts before the kernel in front of it ends, and fetches `ahead` columns of its weights into the L2 cache
    before it waits for that kernel; the weights must not be what that kernel writes.
    """

    rows: int = 8
    outputs: int = 32
    inputs: int = 256
    part: int = 64
    warps: int = 4
    stages: int = 5
    splits: int = 1
    dependent: bool = False
    ahead: int = 512


def tiles_for(O: int, I: int, dtype: torch.dtype) -> Tiles:
    """The tiles of a weight [O, I]. They depend on nothing else, so that a row has one result with any number of rows.

    `bench/few_rows.py --sweep` times other tiles for the matrices of an 8B model; bench/results/few_rows_sweep.json has
    the best on an H200.
    """
    if dtype == torch.float32:  # the products then run outside the tensor cores, and need registers
        return Tiles(outputs=32, inputs=64, part=16, warps=4, stages=4)
    if O >= 65536:
        return Tiles(outputs=16, inputs=256, warps=4, stages=3)
    if O >= 12288:
        return Tiles(outputs=64, inputs=128, warps=2, stages=3)
    if O > 4096:
        return Tiles(outputs=64, inputs=128, warps=2, stages=6, dependent=True, ahead=256)
    return Tiles(outputs=16, inputs=512, warps=4, stages=3 if O > 2048 else 8, dependent=True, ahead=256)


def fit(tiles: Tiles, element: int, shared: int) -> Tiles:
    """The tiles with fewer stages if their buffers need more than `shared` bytes, at `element` bytes per number.

    The stages do not change any result.
    """
    step = element * tiles.inputs * (tiles.outputs + tiles.rows + 1)
    return replace(tiles, stages=max(2, min(tiles.stages, 1 + (shared - RESERVED) // step)))
