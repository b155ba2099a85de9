"""Products of few rows in Triton.

A program computes a tile of outputs for 8 to 64 rows of x. The weights are the left operand of the tensor cores, whose
tiles have 16 or 64 rows on the left and 8 columns on the right, so that few rows of x are padded little. Loads of the
next steps are under way meanwhile, such that each multiprocessor always waits for some 64 KiB or more.

For up to 16 rows, the columns of a step are divided into parts, the batch of a batched product with separate sums. Each
warp then multiplies different columns, and a warp's chain of dependent products is short. For more rows, the separate
sums would need too many registers and each warp would read the rows from shared memory: one product has all columns of
a step, and the warps share the outputs. Programs with 128 outputs do the same, as 128 outputs are chains enough.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace

import torch
import triton
import triton.language as tl
from torch import Tensor

from fledge.ops.device import can_wait, shared_memory, with_unit_stride
from fledge.ops.layer_triton import add_rms_norm_triton
from fledge.ops.topk_triton import wait_for_previous

RESERVED = 4096  # bytes of shared memory besides the buffers of loads
FINISH = 256  # outputs of a program of `_finish`
LINE = 128  # bytes per prefetch
MOST_ROWS = 64  # rows of x per program


@dataclass(frozen=True)
class ProductTiles:
    """How a product is divided: `rows` rows of x and `outputs` rows of the weight per program, `inputs` columns a step.

    All are powers of 2. For a gated product, `outputs` counts the gate and the up rows. The columns of a step are
    divided into parts of `part` columns, 16 or more, with separate sums, and the parts are divided among the warps.
    With one part, the warps share the outputs, and from 64 outputs and 4 warps on, a Hopper GPU multiplies in groups of
    4 warps, which read both operands from shared memory. `stages` - 1 steps are in flight at a time.

    `splits` programs share the columns of a weight; a second kernel adds the partial sums in a fixed order. With
    `dependent`, a program starts before the previous kernel ends, fetches `ahead` columns of the weights into the L2
    cache, and then waits for the previous kernel, which must not write the weights. The program also lets the next
    kernel start: at once, or with `late` when the sums are done. Early programs of the next kernel gather on the
    processors that are free first, and these processors then finish last; `late` avoids this. The weights of the last
    `held` columns are loaded into registers before the wait, for previous kernels that leave the memory idle. Columns
    cannot be held if the product computes the norm, with splits or a single part, or if the others are no whole steps.
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


def tile_rows(M: int) -> int:
    """The rows of x per program, for M rows in all."""
    return 8 if M <= 8 else 16 if M <= 16 else 32 if M <= 32 else MOST_ROWS


def tiles_for(O: int, I: int, dtype: torch.dtype, M: int) -> ProductTiles:
    """The tiles of M rows and a weight [O, I].

    All numbers of rows with the same `tile_rows` have the same tiles. The result of a row is the same for all numbers
    of rows with the same tiles.

    `bench/few_rows.py --sweep` times other tiles for the matrices of an 8B model. bench/results/few_rows_sweep.json has
    the best tiles for 1 and 8 rows on an H200. bench/results/many_rows_sweep.json has the best for 32 and 64 rows, from
    a time when the products still computed the norm.
    """
    if dtype == torch.float32:  # the products then run outside the tensor cores, and need registers
        return ProductTiles(outputs=32, inputs=64, part=16, warps=4, stages=4)
    rows = tile_rows(M)
    return _tiles_of_few(O, I, rows) if rows <= 16 else _tiles_of_many(O, I, rows)


def _tiles_of_few(O: int, I: int, rows: int) -> ProductTiles:
    """The tiles of up to 16 rows. Each program has all rows, so that each weight is read once.

    The tiles between 4,096 and 12,288 outputs, and `dependent`, `late` and `held`, were chosen by the time of whole
    rounds. The product after attention holds columns, because attention leaves the memory idle.
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
    """The tiles of more than 16 rows.

    Each program reads columns of all rows of x, from the L2 cache. The reads of x are `rows` / `outputs` of the bytes
    of the weights. Tiles are therefore wide, and where programs would be too few, programs share the columns. The
    values of `stages` and `dependent` were chosen by the time of whole rounds.
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


@triton.jit
def _epilogue(
    acc_RB, square_B, m, o, bias_ptr, residual_ptr, out_ptr, M, O, sr, eps,
    I: tl.constexpr, NORM: tl.constexpr, GATED: tl.constexpr, BIAS: tl.constexpr, RESIDUAL: tl.constexpr,
):  # fmt: skip
    """Stores outputs o of rows m from products [outputs, rows]; of a gated product, the gate's tile is first."""
    if NORM:
        acc_RB *= (1.0 / tl.sqrt(square_B / I + eps))[None, :]
    inside = (o < O)[:, None] & (m < M)[None, :]
    if GATED:
        gate, up = tl.split(tl.permute(tl.reshape(acc_RB, (2, o.shape[0], m.shape[0])), (1, 2, 0)))
        if BIAS:
            gate += tl.load(bias_ptr + o, mask=o < O, other=0.0).to(tl.float32)[:, None]
            up += tl.load(bias_ptr + O + o, mask=o < O, other=0.0).to(tl.float32)[:, None]
        out = gate * tl.sigmoid(gate) * up
    else:
        out = acc_RB
        if BIAS:
            out += tl.load(bias_ptr + o, mask=o < O, other=0.0).to(tl.float32)[:, None]
    if RESIDUAL:
        out += tl.load(residual_ptr + m.to(tl.int64)[None, :] * sr + o[:, None], mask=inside, other=0.0).to(tl.float32)
    tl.store(out_ptr + m.to(tl.int64)[None, :] * O + o[:, None], out.to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _wait(
    w_ptr, row, first, sw,
    I: tl.constexpr, DEPENDENT: tl.constexpr, LATE: tl.constexpr, AHEAD: tl.constexpr, LINE_ELEMENTS: tl.constexpr,
):  # fmt: skip
    """Fetches AHEAD columns of the weights from `first` into the L2 cache, and waits for the kernel in front. Unless
    LATE, the next kernel may start then."""
    if DEPENDENT:
        line = tl.arange(0, AHEAD // LINE_ELEMENTS) * LINE_ELEMENTS
        ahead = w_ptr + row.to(tl.int64)[:, None] * sw + (first + line)[None, :]
        ahead = tl.where((first + line)[None, :] < I, ahead, w_ptr + row.to(tl.int64)[:, None] * sw)
        tl.inline_asm_elementwise(
            "prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [ahead.to(tl.int64)], tl.int32, is_pure=False, pack=1
        )
        tl.extra.cuda.gdc_wait()
        if not LATE:
            tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def _sums(
    x_ptr, gain_ptr, w_ptr, m, row, first, M, sw,
    I: tl.constexpr, BI: tl.constexpr, STEPS: tl.constexpr, EVEN: tl.constexpr, NORM: tl.constexpr,
    DEPENDENT: tl.constexpr, LATE: tl.constexpr, AHEAD: tl.constexpr, LINE_ELEMENTS: tl.constexpr,
):  # fmt: skip
    """The sums of products [outputs, rows] over STEPS * BI columns from `first`, and the sums of squares of x [rows].

    Columns past I count as zeros; with EVEN, no column is past I.
    """
    k = first + tl.arange(0, BI)
    w_ptrs = w_ptr + row.to(tl.int64)[:, None] * sw + k[None, :]
    x_ptrs = x_ptr + m.to(tl.int64)[None, :] * I + k[:, None]
    _wait(w_ptr, row, first, sw, I, DEPENDENT, LATE, AHEAD, LINE_ELEMENTS)
    acc_RB = tl.zeros((row.shape[0], m.shape[0]), tl.float32)
    square_IB = tl.zeros((BI, m.shape[0]), tl.float32)
    for _ in range(STEPS):
        if EVEN:
            w = tl.load(w_ptrs, eviction_policy="evict_first")
            x = tl.load(x_ptrs, mask=(m < M)[None, :], other=0.0)
        else:
            w = tl.load(w_ptrs, mask=(k < I)[None, :], other=0.0, eviction_policy="evict_first")
            x = tl.load(x_ptrs, mask=(k < I)[:, None] & (m < M)[None, :], other=0.0)
        if NORM:
            gain = tl.load(gain_ptr + k) if EVEN else tl.load(gain_ptr + k, mask=k < I, other=0.0)
            wide = x.to(tl.float32)
            square_IB += wide * wide
            x = (wide * gain.to(tl.float32)[:, None]).to(x.dtype)
        acc_RB = tl.dot(w, x, acc_RB, input_precision="ieee")
        w_ptrs += BI
        x_ptrs += BI
        k += BI
    if DEPENDENT and LATE:
        tl.extra.cuda.gdc_launch_dependents()
    return acc_RB, tl.sum(square_IB, 0)


@triton.jit
def _sums_of_parts(
    x_ptr, gain_ptr, w_ptr, m, row, first, M, sw,
    I: tl.constexpr, BI: tl.constexpr, PARTS: tl.constexpr, STEPS: tl.constexpr, EVEN: tl.constexpr,
    NORM: tl.constexpr, DEPENDENT: tl.constexpr, LATE: tl.constexpr, AHEAD: tl.constexpr,
    LINE_ELEMENTS: tl.constexpr, HELD: tl.constexpr,
):  # fmt: skip
    """`_sums`, where each of PARTS parts of a step has separate sums until the end.

    HELD more columns follow as an additional step, whose weights are loaded into registers before the wait.
    """
    BP: tl.constexpr = BI // PARTS
    HP: tl.constexpr = HELD // PARTS
    if HELD > 0:
        held = first + STEPS * BI + tl.arange(0, PARTS)[:, None] * HP + tl.arange(0, HP)[None, :]
        held_w_PRI = tl.load(
            w_ptr + row.to(tl.int64)[None, :, None] * sw + held[:, None, :], eviction_policy="evict_first"
        )
    k = first + tl.arange(0, PARTS)[:, None] * BP + tl.arange(0, BP)[None, :]
    w_ptrs = w_ptr + row.to(tl.int64)[None, :, None] * sw + k[:, None, :]
    x_ptrs = x_ptr + m.to(tl.int64)[None, None, :] * I + k[:, :, None]
    _wait(w_ptr, row, first, sw, I, DEPENDENT, LATE, AHEAD, LINE_ELEMENTS)
    if HELD > 0:
        held_at = x_ptr + m.to(tl.int64)[None, None, :] * I + held[:, :, None]
        held_x_PIB = tl.load(held_at, mask=(m < M)[None, None, :], other=0.0)
    acc_PRB = tl.zeros((PARTS, row.shape[0], m.shape[0]), tl.float32)
    square_PIB = tl.zeros((PARTS, BP, m.shape[0]), tl.float32)
    for _ in range(STEPS):
        if EVEN:
            w = tl.load(w_ptrs, eviction_policy="evict_first")
            x = tl.load(x_ptrs, mask=(m < M)[None, None, :], other=0.0)
        else:
            w = tl.load(w_ptrs, mask=(k < I)[:, None, :], other=0.0, eviction_policy="evict_first")
            x = tl.load(x_ptrs, mask=(k < I)[:, :, None] & (m < M)[None, None, :], other=0.0)
        if NORM:
            gain = tl.load(gain_ptr + k) if EVEN else tl.load(gain_ptr + k, mask=k < I, other=0.0)
            wide = x.to(tl.float32)
            square_PIB += wide * wide
            x = (wide * gain.to(tl.float32)[:, :, None]).to(x.dtype)
        acc_PRB = tl.dot(w, x, acc_PRB, input_precision="ieee")
        w_ptrs += BI
        x_ptrs += BI
        k += BI
    if HELD > 0:
        acc_PRB = tl.dot(held_w_PRI, held_x_PIB, acc_PRB, input_precision="ieee")
    if DEPENDENT and LATE:
        tl.extra.cuda.gdc_launch_dependents()
    return tl.sum(acc_PRB, 0), tl.sum(tl.sum(square_PIB, 1), 0)


# M is no constant and x always begins at a multiple of 16 bytes: one kernel serves any number of rows of the same
# tiles, and the order of sums does not depend on the number of rows.
@triton.jit(do_not_specialize=["M", "O"])
def _product(
    x_ptr, gain_ptr, w_ptr, bias_ptr, residual_ptr, out_ptr, part_ptr, square_ptr, M, O, sw, sr, eps,
    I: tl.constexpr, BM: tl.constexpr, BO: tl.constexpr, BI: tl.constexpr, SPLITS: tl.constexpr, PARTS: tl.constexpr,
    NORM: tl.constexpr, GATED: tl.constexpr, BIAS: tl.constexpr, RESIDUAL: tl.constexpr,
    DEPENDENT: tl.constexpr, LATE: tl.constexpr, AHEAD: tl.constexpr, LINE_ELEMENTS: tl.constexpr,
    HELD: tl.constexpr,
):  # fmt: skip
    """BO rows of the weight times BM rows of x, in steps of BI columns, of PARTS parts each.

    O counts the outputs: half the rows of a gated weight. With SPLITS > 1, stores the sums of a share of the columns in
    [SPLITS, M, rows of the weight] and the sums of squares of x in [SPLITS, M].
    """
    m = tl.program_id(0) * BM + tl.arange(0, BM)  # first, so that programs of the same weights run at the same time
    split = tl.program_id(2)
    r = tl.arange(0, BO)
    BF: tl.constexpr = BO // 2 if GATED else BO
    o = tl.program_id(1) * BF + tl.arange(0, BF)
    if GATED:
        row = (r // BF) * O + tl.minimum(tl.program_id(1) * BF + r % BF, O - 1)
    else:
        row = tl.minimum(tl.program_id(1) * BO + r, O - 1)  # outputs past the end are computed and not stored
    STEPS: tl.constexpr = (I - HELD + BI - 1) // BI
    SHARE: tl.constexpr = (STEPS + SPLITS - 1) // SPLITS
    EVEN: tl.constexpr = SPLITS * SHARE * BI + HELD == I
    tl.static_assert(HELD == 0 or (EVEN and SPLITS == 1 and PARTS > 1 and not NORM), "no columns can be held")
    first = split * SHARE * BI
    if PARTS == 1:
        acc_RB, square_B = _sums(
            x_ptr, gain_ptr, w_ptr, m, row, first, M, sw, I, BI, SHARE, EVEN, NORM, DEPENDENT, LATE, AHEAD,
            LINE_ELEMENTS,
        )  # fmt: skip
    else:
        acc_RB, square_B = _sums_of_parts(
            x_ptr, gain_ptr, w_ptr, m, row, first, M, sw, I, BI, PARTS, SHARE, EVEN, NORM, DEPENDENT, LATE, AHEAD,
            LINE_ELEMENTS, HELD,
        )  # fmt: skip
    if SPLITS == 1:
        _epilogue(
            acc_RB, square_B, m, o, bias_ptr, residual_ptr, out_ptr, M, O, sr, eps, I, NORM, GATED, BIAS, RESIDUAL
        )
    else:
        W = 2 * O if GATED else O
        real = tl.program_id(1) * BF + r % BF < O
        part = part_ptr + split.to(tl.int64) * M * W + m.to(tl.int64)[None, :] * W + row[:, None]
        tl.store(part, acc_RB, mask=real[:, None] & (m < M)[None, :])
        if NORM:
            tl.store(square_ptr + split * M + m, square_B, mask=m < tl.where(tl.program_id(1) == 0, M, 0))


@triton.jit(do_not_specialize=["M", "O"])
def _finish(
    part_ptr, square_ptr, bias_ptr, residual_ptr, out_ptr, M, O, sr, eps,
    I: tl.constexpr, BO: tl.constexpr, SPLITS: tl.constexpr,
    NORM: tl.constexpr, GATED: tl.constexpr, BIAS: tl.constexpr, RESIDUAL: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Adds the partial sums of BO outputs of a row, in the order of the splits."""
    wait_for_previous(DEPENDENT)
    m = tl.program_id(0) + tl.arange(0, 1)
    o = tl.program_id(1) * BO + tl.arange(0, BO)
    if GATED:
        r = tl.arange(0, 2 * BO)
        column, W = (r // BO) * O + tl.program_id(1) * BO + r % BO, 2 * O
        acc = tl.zeros((2 * BO, 1), tl.float32)
    else:
        column, W = o, O
        acc = tl.zeros((BO, 1), tl.float32)
    square = tl.zeros((1,), tl.float32)
    for split in tl.static_range(SPLITS):
        parts = part_ptr + (split * M + m).to(tl.int64)[None, :] * W + column[:, None]
        acc += tl.load(parts, mask=(column < W)[:, None], other=0.0)
        if NORM:
            square += tl.load(square_ptr + split * M + m)
    _epilogue(acc, square, m, o, bias_ptr, residual_ptr, out_ptr, M, O, sr, eps, I, NORM, GATED, BIAS, RESIDUAL)


@triton.jit(do_not_specialize=["M", "O"])
def _finish_and_norm(
    part_ptr, bias_ptr, residual_ptr, gain_ptr, out_ptr, normed_ptr, M, O, sr, eps,
    BO: tl.constexpr, SPLITS: tl.constexpr, BIAS: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Adds the partial sums of a row, by split, and the residual; stores the sum and its norm. BO is O or more.

    Residual, gain and bias are read before the wait for the product: the product lets this kernel start only after
    waiting for the kernel that wrote the residual.
    """
    m, o = tl.program_id(0).to(tl.int64), tl.arange(0, BO)
    inside = o < O
    added = tl.load(residual_ptr + m * sr + o, mask=inside, other=0.0).to(tl.float32)
    gain = tl.load(gain_ptr + o, mask=inside, other=0.0).to(tl.float32)
    if BIAS:
        bias = tl.load(bias_ptr + o, mask=inside, other=0.0).to(tl.float32)
    wait_for_previous(DEPENDENT)
    total = tl.zeros((BO,), tl.float32)
    for split in tl.static_range(SPLITS):
        total += tl.load(part_ptr + (split * M + m) * O + o, mask=inside, other=0.0)
    if BIAS:
        total += bias
    out = (total + added).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + m * O + o, out, mask=inside)
    wide = out.to(tl.float32)
    normed = wide * (1.0 / tl.sqrt(tl.sum(wide * wide, 0) / O + eps)) * gain
    tl.store(normed_ptr + m * O + o, normed.to(normed_ptr.dtype.element_ty), mask=inside)


def product(
    x_MI: Tensor, weight_RI: Tensor, bias_R: Tensor | None = None, *, gain_I: Tensor | None = None, eps: float = 0.0,
    residual_MO: Tensor | None = None, gated: bool = False, tiles: ProductTiles | None = None,
) -> Tensor:  # fmt: skip
    """The functions of `ops.products`, except `linear_add_norm`; returns [M, O], with O = R, or R / 2 if `gated`.

    `gain_I` and `eps` ask for the norm before the product. `tiles` None chooses tiles by `tiles_for`. Strided rows of x
    are copied. Raises ValueError if a row of the weight is not contiguous.
    """
    return _compute(x_MI, weight_RI, bias_R, gain_I, eps, residual_MO, gated, tiles, None)[0]


def product_norm(
    x_MI: Tensor, weight_OI: Tensor, bias_O: Tensor | None, residual_MO: Tensor, gain_O: Tensor, eps: float,
    tiles: ProductTiles | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """`product`, and the norm of the result [M, O]. The norm is computed by the kernel that adds partial sums, or by a
    separate kernel."""
    after = gain_O.contiguous(), eps
    out_MO, normed_MO = _compute(x_MI, weight_OI, bias_O, None, 0.0, residual_MO, False, tiles, after)
    if normed_MO is None:
        normed_MO = add_rms_norm_triton(out_MO, None, gain_O, eps)[0]
    return out_MO, normed_MO


def _compute(
    x_MI: Tensor, weight_RI: Tensor, bias_R: Tensor | None, gain_I: Tensor | None, eps: float,
    residual_MO: Tensor | None, gated: bool, tiles: ProductTiles | None, after: tuple[Tensor, float] | None,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """`product`, and if partial sums are added, the norm of the result with the gain and epsilon `after`; else None."""
    (M, I), R = x_MI.shape, weight_RI.shape[0]
    if weight_RI.stride(1) != 1 and I > 1:
        raise ValueError("a product of few rows needs a weight whose rows are contiguous")
    tiles = tiles or _tiles(R, I, tile_rows(M), x_MI.dtype, x_MI.device)
    O = R // 2 if gated else R
    out = torch.empty(M, O, dtype=x_MI.dtype, device=x_MI.device)
    if not out.numel():
        return out, None
    x = x_MI.contiguous()
    x = x.clone() if x.data_ptr() % 16 else x
    residual = None if residual_MO is None else with_unit_stride(residual_MO)
    bias, gain = (None if t is None else t.contiguous() for t in (bias_R, gain_I))
    S, part, square = tiles.splits, None, None
    if S > 1:
        part = torch.empty(S, M, R, dtype=torch.float32, device=x.device)
        square = torch.empty(S, M, dtype=torch.float32, device=x.device)
    flags = dict(NORM=gain is not None, GATED=gated, BIAS=bias is not None, RESIDUAL=residual is not None)
    sr = 0 if residual is None else residual.stride(0)
    launch = dict(launch_pdl=True) if tiles.dependent else {}
    outputs = tiles.outputs // 2 if gated else tiles.outputs
    whole = S == 1 and gain is None and tiles.part < tiles.inputs and (I - tiles.held) % tiles.inputs == 0
    held = tiles.held if whole and tiles.held < I else 0
    element = LINE // x.element_size()
    _product[(triton.cdiv(M, tiles.rows), triton.cdiv(O, outputs), S)](
        x, gain, weight_RI, bias, residual, out, part, square, M, O, weight_RI.stride(0), sr, eps,
        I=I, BM=tiles.rows, BO=tiles.outputs, BI=tiles.inputs, SPLITS=S, PARTS=tiles.inputs // tiles.part, **flags,
        DEPENDENT=tiles.dependent, LATE=tiles.late, AHEAD=max(tiles.ahead, element), LINE_ELEMENTS=element,
        HELD=held, num_warps=tiles.warps, num_stages=tiles.stages, **launch,
    )  # fmt: skip
    if S == 1:
        return out, None
    if after is None:
        _finish[(M, triton.cdiv(O, FINISH))](
            part, square, bias, residual, out, M, O, sr, eps, I=I, BO=FINISH, SPLITS=S, **flags,
            DEPENDENT=tiles.dependent, num_warps=2, **launch,
        )  # fmt: skip
        return out, None
    normed, BO = torch.empty_like(out), triton.next_power_of_2(O)
    _finish_and_norm[(M,)](
        part, bias, residual, after[0], out, normed, M, O, sr, after[1], BO=BO, SPLITS=S, BIAS=bias is not None,
        DEPENDENT=tiles.dependent, num_warps=min(max(BO // 256, 4), 16), **launch,
    )  # fmt: skip
    return out, normed


@functools.cache
def _tiles(O: int, I: int, M: int, dtype: torch.dtype, device: torch.device) -> ProductTiles:
    """`tiles_for`, limited to the device's shared memory and supported features."""
    tiles = tiles_for(O, I, dtype, M)
    if device.type != "cuda":  # the interpreter holds columns, without a wait
        return replace(tiles, dependent=False)
    if not can_wait(device):
        tiles = replace(tiles, dependent=False, held=0)
    return fit(tiles, dtype.itemsize, shared_memory(device))
