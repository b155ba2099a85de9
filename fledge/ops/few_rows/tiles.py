"""Tile sizes of the products of few rows, chosen by the shape of the weight."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

FEW_ROWS = 16  # up to this number, a product computes the norm of its rows itself
MOST_ROWS = 64  # for more, the products of a library cost little more than reading the weights
RESERVED = 4096  # bytes of shared memory that are not buffers of the loads


@dataclass(frozen=True)
class ProductTiles:
    """How a product is divided: `rows` rows of x and `outputs` rows of the weight per program, `inputs` columns a step.

    All are powers of 2. For a gated product, `outputs` counts the gate and the up rows. The columns of a step are
    divided into parts of `part` columns, 16 or more, with sums of their own, and these among the warps. With one part,
    the warps share the outputs, and from 64 outputs and 4 warps on, a Hopper GPU multiplies in groups of 4 warps, which
    read both operands from shared memory. `stages` - 1 steps are in flight at a time.

    `splits` programs share the columns of a weight; a second kernel adds their sums in a fixed order. With `dependent`,
    a program starts before the kernel in front of it ends, and fetches `ahead` columns of its weights into the L2 cache
    before it waits for that kernel; the weights must not be what that kernel writes. It lets the next kernel start too:
    at once, or with `late` when its sums are done. Programs of the next kernel that start early gather on the
    processors that are free first, which then finish last; `late` avoids this. The weights of the last `held` columns
    are loaded into registers before the wait, for kernels in front that leave the memory idle; but not of a product
    that computes the norm, and not where columns are shared, are in one part, or the others are no whole steps.
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
    late: bool = False
    held: int = 0


def most_rows(O: int, I: int, dtype: torch.dtype) -> int:
    """The number of rows up to which the kernels are chosen for a weight [O, I]; 0 to MOST_ROWS."""
    if dtype == torch.float32:
        return FEW_ROWS
    return FEW_ROWS if 4096 < O < 12288 else MOST_ROWS  # with more, cuBLAS is faster there


def tiles_for(O: int, I: int, dtype: torch.dtype, M: int) -> ProductTiles:
    """The tiles of M rows and a weight [O, I].

    They are the same for 1 to 8 rows, for 9 to FEW_ROWS, for 17 to 32, and for more. A row has one result with any of
    the numbers of rows that have the same tiles.

    `bench/few_rows.py --sweep` times other tiles for the matrices of an 8B model. bench/results/few_rows_sweep.json has
    the best for 1 and 8 rows on an H200, bench/results/many_rows_sweep.json those for 32 and 64, where the products
    still computed the norm.
    """
    if dtype == torch.float32:  # the products then run outside the tensor cores, and need registers
        return ProductTiles(outputs=32, inputs=64, part=16, warps=4, stages=4)
    if M > FEW_ROWS:
        return _tiles_of_many(O, I, 32 if M <= 32 else 64)
    return _tiles_of_few(O, I, 8 if M <= 8 else 16)


def _tiles_of_few(O: int, I: int, rows: int) -> ProductTiles:
    """The tiles of up to FEW_ROWS rows, in programs that have all of them, so that each weight is read once.

    Those between 4,096 and 12,288 outputs, and what is `dependent`, `late` and `held`, were chosen by the time of whole
    rounds. Columns are held of the product after attention, which leaves the memory idle.
    """
    if O >= 65536:
        return ProductTiles(rows=rows, outputs=16, inputs=256, warps=4, stages=3, dependent=True, ahead=64, late=True)
    if O >= 12288:
        outputs = 128 if rows == 8 and O >= 24576 else 64
        part = 128 if outputs == 128 else 64
        return ProductTiles(
            rows=rows, outputs=outputs, inputs=128, part=part, warps=2, stages=3, dependent=True, ahead=64, late=True
        )  # fmt: skip
    if O > 4096 and I > 4096:
        return ProductTiles(rows=rows, outputs=32, inputs=256, warps=4, stages=4, dependent=True, ahead=256)
    if O > 4096:
        return ProductTiles(rows=rows, outputs=64, inputs=128, warps=2, stages=6, dependent=True, ahead=256)
    stages = 3 if O > 2048 else 8
    held = 1024 if rows == 8 and O > 2048 and 2048 <= I <= 4096 else 0
    return ProductTiles(
        rows=rows, outputs=16, inputs=512, warps=4, stages=stages, dependent=True, ahead=256, late=True, held=held
    )  # fmt: skip


def _tiles_of_many(O: int, I: int, rows: int) -> ProductTiles:
    """The tiles of more than FEW_ROWS rows.

    Each program reads its columns of all rows of x, from the L2 cache. This costs `rows` / `outputs` of the bytes of
    the weights, so that the tiles are wide, and programs share the columns where there would be too few of them. The
    stages, and what is `dependent`, were chosen by the time of whole rounds.
    """
    if O >= 32000:
        return ProductTiles(rows=rows, outputs=128, inputs=128, part=128, warps=8, stages=4, dependent=True, ahead=256)
    if O >= 12288:
        return ProductTiles(rows=rows, outputs=128, inputs=64, part=64, warps=4, stages=3, dependent=True, ahead=256)
    tiles = ProductTiles(rows=rows, outputs=64, inputs=128, part=128, warps=4, stages=6, dependent=True, ahead=256)
    return replace(tiles, splits=1 if I % (2 * tiles.inputs) else 2)  # unequal shares need masks in every step


def fit(tiles: ProductTiles, element: int, shared: int) -> ProductTiles:
    """The tiles with fewer stages if their buffers need more than `shared` bytes, at `element` bytes per number.

    Where the warps share the outputs, products may still read the buffers of one more step. The stages do not change
    any result.
    """
    step = element * tiles.inputs * (tiles.outputs + tiles.rows + 1)
    stages = (shared - RESERVED) // step + (tiles.part < tiles.inputs)
    return replace(tiles, stages=max(2, min(tiles.stages, stages)))
