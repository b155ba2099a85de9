"""Products of few rows against their definitions: on a GPU where there is one, else in Triton's interpreter."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional as F

from fledge.ops import products
from fledge.ops.device import computed_by
from fledge.ops.products import (
    FEW_ROWS,
    MOST_ROWS,
    linear_add,
    linear_add_norm,
    most_rows,
    norm_linear,
    norm_swiglu,
    plain_linear,
)
from support.devices import distance, needs_triton

needs_triton()

from fledge.ops.products_triton import (  # noqa: E402  (needs_triton skips before it)
    ProductTiles,
    fit,
    product,
    product_norm,
    tiles_for,
)

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
HALF = torch.bfloat16 if DEVICE == "cuda" else torch.float16  # the interpreter neither rounds nor multiplies bfloat16
TOLERANCE = {torch.float32: 1e-5, torch.float16: 1e-3, torch.bfloat16: 8e-3}  # of the norm
EPS = 1e-5
KINDS = "norm", "add", "swiglu", "plain"


def choosing(impl: str | None) -> AbstractContextManager[Any]:
    """The kernels for any number of rows ("triton"), or for none ("definition"); None: as the device and rows say."""
    if impl == "definition":  # whose norms on a GPU are kernels
        return mock.patch.object(products, "most_rows", lambda *_: -1)
    return nullcontext() if impl is None else computed_by(impl)


class Case:
    """Random arguments of the four functions; a weight [O, I] has 2 O rows in `swiglu`."""

    def __init__(self, kind: str, M: int, O: int, I: int, dtype: torch.dtype, bias: bool = False, seed: int = 0):
        generator = torch.Generator(DEVICE).manual_seed(seed)

        def randn(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator, device=DEVICE).to(dtype)

        R = 2 * O if kind == "swiglu" else O
        self.kind, self.x, self.gain, self.residual = kind, 3 * randn(M, I), 1 + randn(I) / 4, randn(M, O)
        self.weight, self.bias = randn(R, I) / I**0.5, randn(R) if bias else None

    def __call__(
        self, rows: slice = slice(None), impl: str | None = "triton", tiles: ProductTiles | None = None
    ) -> Tensor:
        x, residual = self.x[rows], self.residual[rows]
        norm = {"gain_I": self.gain, "eps": EPS} if self.kind in ("norm", "swiglu") else {}
        if tiles is not None:
            residual = residual if self.kind == "add" else None
            gated = self.kind == "swiglu"
            return product(x, self.weight, self.bias, residual_MO=residual, gated=gated, tiles=tiles, **norm)
        with choosing(impl):
            if self.kind == "add":
                return linear_add(x, self.weight, residual, self.bias)
            if self.kind == "plain":
                return plain_linear(x, self.weight, self.bias)
            function = norm_linear if self.kind == "norm" else norm_swiglu
            return function(x, self.gain, EPS, self.weight, self.bias)

    def exact(self) -> Tensor:
        """In float64, written out."""
        x, weight = self.x.double(), self.weight.double()
        if self.kind in ("norm", "swiglu"):
            x = x / (x.square().mean(-1, keepdim=True) + EPS).sqrt() * self.gain.double()
        out = x @ weight.T + (0 if self.bias is None else self.bias.double())
        if self.kind == "add":
            out += self.residual.double()
        if self.kind == "swiglu":
            gate, up = out.chunk(2, -1)
            out = F.silu(gate) * up
        return out

    def check(self, **options) -> None:
        found, exact = self(**options), self.exact()
        assert found.shape == exact.shape and found.dtype == self.x.dtype
        assert found.is_contiguous() or options.get("impl") == "definition"
        assert distance(found, exact) <= TOLERANCE[self.x.dtype] * (2 if self.kind == "swiglu" else 1)


@pytest.mark.parametrize(("M", "O", "I"), [(1, 48, 64), (3, 33, 100), (8, 1, 515), (16, 70, 72)])
@pytest.mark.parametrize("kind", KINDS)
def test_values(kind: str, M: int, O: int, I: int, uninitialized_memory_is_nan) -> None:
    for dtype in (torch.float32, HALF):
        for bias in (False, True):
            case = Case(kind, M, O, I, dtype, bias)
            for impl in ("triton", "definition"):
                case.check(impl=impl)


@pytest.mark.parametrize(("M", "O", "I"), [(17, 33, 132), (32, 20, 128), (33, 140, 70), (64, 10, 515), (70, 24, 64)])
@pytest.mark.parametrize("kind", KINDS)
def test_values_of_many_rows(kind: str, M: int, O: int, I: int, uninitialized_memory_is_nan) -> None:
    """Also with more rows than a program has, and with more programs than columns to share."""
    for bias in (False, True):
        Case(kind, M, O, I, HALF, bias).check()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "tiles",
    [
        ProductTiles(rows=16, outputs=16, inputs=32, part=16, splits=2),
        ProductTiles(outputs=32, inputs=64, splits=3),  # of two steps: the last share is empty
        ProductTiles(outputs=64, inputs=16, part=16),
        ProductTiles(rows=32, outputs=64, inputs=64, part=64, splits=3),
        ProductTiles(rows=64, outputs=128, inputs=32, part=32, splits=2),
    ],
    ids=lambda t: f"{t.rows} rows {t.outputs}x{t.inputs}",
)
def test_tiles(kind: str, tiles: ProductTiles, uninitialized_memory_is_nan) -> None:
    for M in (5, tiles.rows + 1):
        for dtype in (torch.float32, HALF):
            Case(kind, M, 37, 104, dtype, bias=True).check(tiles=tiles)


@pytest.mark.parametrize("kind", KINDS)
def test_held_columns(kind: str, uninitialized_memory_is_nan) -> None:
    """The last columns. None are held where there are no others, or these are no whole steps."""
    for I, held in ((160, 64), (160, 128), (96, 64), (64, 64), (104, 32)):
        for dtype in (torch.float32, HALF):
            Case(kind, 5, 37, I, dtype, bias=True).check(tiles=ProductTiles(outputs=16, inputs=32, part=16, held=held))


@pytest.mark.parametrize(("kind", "I"), [("add", 2048), ("plain", 2064), ("norm", 2048)])
def test_the_product_after_attention_holds_columns(kind: str, I: int) -> None:
    """Also of a width of which no whole steps are left; but not of a product that computes the norm."""
    case = Case(kind, 8, 2052, I, HALF)
    assert tiles_for(2052, I, HALF, 8).held
    case.check()
    assert torch.equal(case(slice(1, 4)), case()[1:4])


@pytest.mark.parametrize("kind", KINDS)
def test_a_row_depends_on_no_other(kind: str) -> None:
    """Bit by bit, with any number of rows up to 8, and from 9 to 16; also where a row begins at no multiple of 16
    bytes."""
    for dtype in (torch.float32, HALF):
        for I in (96, 99):
            for M, parts in ((8, ((0, 1), (5, 6), (2, 7))), (16, ((0, 9), (3, 14)))):
                case = Case(kind, M, 40, I, dtype)
                whole = case()
                assert torch.equal(whole, case())
                for rows in (slice(*part) for part in parts):
                    assert torch.equal(case(rows), whole[rows])


def test_each_weight_is_read_once() -> None:
    """One program has all rows, of up to FEW_ROWS."""
    for O, I, M in itertools.product((896, 4096, 6144, 14336, 28672, 128256), (4096, 14336), range(1, FEW_ROWS + 1)):
        assert tiles_for(O, I, torch.bfloat16, M).rows == (8 if M <= 8 else 16)


@pytest.mark.parametrize("kind", KINDS)
def test_a_row_of_many_depends_on_no_other(kind: str) -> None:
    """Bit by bit, with any number of rows that have the same tiles. Rows keep their places: unlike a GPU's, the sums of
    the interpreter depend on them in wide products."""
    for I in (128, 99):
        case = Case(kind, MOST_ROWS, 140, I, HALF)
        whole, half = case(), case(slice(32))
        for n in (33, 50):
            assert torch.equal(case(slice(n)), whole[:n])
        for n in (17, 30):
            assert torch.equal(case(slice(n)), half[:n])


def norm_of(y: Tensor, gain: Tensor) -> Tensor:
    """RMSNorm in float64."""
    y = y.double()
    return y / (y.square().mean(-1, keepdim=True) + EPS).sqrt() * gain.double()


@pytest.mark.parametrize(("M", "O", "I"), [(1, 48, 64), (16, 33, 128), (17, 33, 512), (33, 140, 256), (64, 24, 100)])
@pytest.mark.parametrize("bias", [False, True])
def test_a_sum_and_its_norm(M: int, O: int, I: int, bias: bool, uninitialized_memory_is_nan) -> None:
    """The kernels leave the norm of up to FEW_ROWS rows to the next product. With more, it is that of the sum as it was
    rounded, whether or not programs share the columns."""
    for dtype in (torch.float32, HALF):
        case, gain = Case("add", M, O, I, dtype, bias), torch.linspace(0.5, 1.5, O, device=DEVICE).to(dtype)
        arguments = (case.x, case.weight, case.residual, gain, EPS, case.bias)
        for impl in ("triton", "definition"):
            with choosing(impl):
                found, normed = linear_add_norm(*arguments)
            assert distance(found, case.exact()) <= TOLERANCE[dtype]
            if impl == "triton":
                assert torch.equal(found, case())
                assert (normed is None) == (M <= FEW_ROWS)
            if normed is not None:
                assert normed.dtype == dtype and distance(normed, norm_of(found, gain)) <= TOLERANCE[dtype]


def test_a_sum_and_its_norm_in_other_tiles(uninitialized_memory_is_nan) -> None:
    """With shares of the columns and without; rows of the residual may be strided, and those of x are then copied."""
    case = Case("add", 40, 37, 104, HALF, bias=True)
    gain = torch.linspace(0.5, 1.5, 37, device=DEVICE).to(HALF)
    case.residual = torch.cat((case.residual, torch.full_like(case.residual, torch.nan)), 1)[:, :37]
    case.x = case.x.T.contiguous().T
    for splits in (1, 2, 3):
        tiles = ProductTiles(rows=64, outputs=64, inputs=32, part=32, splits=splits)
        found, normed = product_norm(case.x, case.weight, case.bias, case.residual, gain, EPS, tiles)
        assert distance(found, case.exact()) <= TOLERANCE[HALF]
        assert distance(normed, norm_of(found, gain)) <= TOLERANCE[HALF]


@pytest.mark.parametrize("kind", ["norm", "swiglu"])
def test_rows_that_are_normed_already(kind: str) -> None:
    """Their product is computed, and nothing else is read."""
    for M in (3, 40):
        case = Case(kind, M, 24, 64, HALF)
        normed = norm_of(case.x, case.gain).to(HALF)
        unread = torch.full_like(case.x, torch.nan), torch.full_like(case.gain, torch.nan)
        function = norm_linear if kind == "norm" else norm_swiglu
        for impl in ("triton", "definition"):
            with choosing(impl):
                found = function(*unread[:1], unread[1], EPS, case.weight, normed_ME=normed)
            assert distance(found, case.exact()) <= 2 * TOLERANCE[HALF]


def test_views() -> None:
    """Strided rows of x and the residual, and a part of the columns of a weight."""
    case = Case("add", 3, 40, 64, torch.float32)
    expected = case()
    case.x, case.residual = case.x.T.contiguous().T, case.residual.T.contiguous().T
    case.weight = torch.cat((case.weight, torch.full_like(case.weight, torch.nan)), 1)[:, :64]
    assert torch.equal(case(), expected)
    case.residual = torch.cat((case.residual, case.residual), 1)[:, 40:]
    assert torch.equal(case(), expected)
    case.weight = case.weight.T.contiguous().T
    with pytest.raises(ValueError, match="rows are contiguous"):
        case()


@pytest.mark.parametrize("kind", KINDS)
def test_the_choice(kind: str) -> None:
    """Kernels for few rows of 16 or 32 bits on a GPU; no rows and many rows have definitions."""
    for dtype in (torch.float32, HALF):
        most = most_rows(48 if kind == "swiglu" else 24, dtype)
        assert 0 <= most <= MOST_ROWS
        for M in (0, 1, FEW_ROWS, FEW_ROWS + 1, most, most + 1, MOST_ROWS + 1):
            case = Case(kind, M, 24, 32, dtype)
            expected = case(impl="triton" if DEVICE == "cuda" and 0 < M <= most else "definition")
            assert torch.equal(case(impl=None), expected) and expected.shape == (M, 24)
            assert M == 0 or distance(expected, case.exact()) <= 2 * TOLERANCE[dtype]
    case = Case(kind, 2, 24, 32, torch.float64)
    assert distance(case(impl=None), case.exact()) <= 1e-12


def test_the_norm_of_many_rows_on_a_gpu_is_one_kernel(monkeypatch) -> None:
    """Where the library's products are chosen on a GPU, the norm before them is the fused kernel: plain torch would
    launch several."""
    called = []

    def fused(x_ME: Tensor, residual_ME: Tensor | None, weight_E: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        called.append(tuple(x_ME.shape))
        return x_ME, x_ME

    monkeypatch.setattr(products, "add_rms_norm", fused)
    monkeypatch.setattr(products, "silu_mul_fused", lambda gate_up: gate_up.chunk(2, -1)[0])
    with FakeTensorMode():  # shapes and devices without values: no GPU is needed
        shapes = (128, 32), (32,), (48, 32), (32, 32)
        x, gain, weight, square = (torch.empty(*shape, device="cuda") for shape in shapes)
        assert norm_linear(x, gain, EPS, weight).shape == (128, 48)
        assert norm_swiglu(x, gain, EPS, weight).shape == (128, 24)
        assert linear_add_norm(x, square, x, gain, EPS)[0].shape == (128, 32)
    assert called == [(128, 32)] * 3


def test_tiles_fit_into_shared_memory() -> None:
    tiles = ProductTiles(outputs=64, inputs=256, stages=4)
    assert fit(tiles, 2, 227 * 1024) == tiles
    assert [fit(tiles, 2, kib * 1024).stages for kib in (120, 100, 64, 10)] == [4, 3, 2, 2]
    whole = ProductTiles(rows=64, outputs=128, inputs=64, part=64, stages=4)
    assert [fit(whole, 2, kib * 1024).stages for kib in (227, 102, 100, 64, 10)] == [4, 4, 3, 2, 2]


@pytest.mark.parametrize("O", [896, 4096, 6144, 128256])
def test_shares_of_columns_are_equal(O: int) -> None:
    """Where programs share columns: else every step would need a mask."""
    for I in (896, 4096, 8192, 12288, 14336):
        for M in (17, 32, 33, MOST_ROWS, 1000):
            tiles = tiles_for(O, I, torch.bfloat16, M)
            assert tiles.rows == (32 if M <= 32 else 64)
            assert I % (tiles.inputs * tiles.splits) == 0 and (tiles.splits == 1 or O < 12288)


LARGE = [
    ("norm", 6144, 4096), ("add", 4096, 4096), ("swiglu", 14336, 4096), ("add", 4096, 14336), ("plain", 128256, 4096),
    ("plain", 1024, 8192), ("plain", 32000, 4096), ("norm", 1000, 16384), ("add", 1024, 32768), ("norm", 4608, 3584),
    ("swiglu", 18944, 3584), ("norm", 1152, 896), ("swiglu", 4864, 896), ("plain", 151936, 896),
]  # fmt: skip


@pytest.mark.gpu
@pytest.mark.parametrize(("kind", "O", "I"), LARGE)
def test_large_matrices(kind: str, O: int, I: int) -> None:
    """Values, equal rows and repeated calls, with and without dependent launches and shared columns."""
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        case = Case(kind, 16, O, I, dtype, bias=kind == "norm")
        case.check()
        whole = case()
        assert torch.equal(case(slice(2, 16)), whole[2:16])
        few = case(slice(8, 16))  # up to 8 rows have tiles of their own
        assert all(torch.equal(case(slice(8 + a, 8 + b)), few[a:b]) for a, b in ((0, 1), (7, 8), (1, 4)))
        assert all(torch.equal(case(), whole) for _ in range(5))
        if dtype == torch.bfloat16:
            for tiles in (ProductTiles(outputs=64, inputs=128, part=32, splits=3), ProductTiles(rows=16, stages=4)):
                case.check(tiles=tiles)
                plain = case(tiles=tiles)
                for ahead, late in ((128, True), (1024, False)):
                    dependent = replace(tiles, dependent=True, ahead=ahead, late=late)
                    assert all(torch.equal(case(tiles=dependent), plain) for _ in range(5))
                held = ProductTiles(outputs=16, inputs=512, stages=3, held=1024)
                case.check(tiles=held)
                plain, dependent = case(tiles=held), replace(held, dependent=True, late=True)
                assert all(torch.equal(case(tiles=dependent), plain) for _ in range(5))


@pytest.mark.gpu
@pytest.mark.parametrize(("kind", "O", "I"), LARGE)
def test_large_matrices_and_many_rows(kind: str, O: int, I: int) -> None:
    """Values, equal rows and repeated calls, with and without dependent launches."""
    for dtype in (torch.bfloat16, torch.float16):
        for M, fewer in ((32, slice(3, 20)), (MOST_ROWS, slice(5, 50))):
            case = Case(kind, M, O, I, dtype, bias=kind == "norm")
            case.check()
            whole = case()
            assert torch.equal(case(fewer), whole[fewer])
            assert all(torch.equal(case(), whole) for _ in range(5))
            tiles = ProductTiles(rows=M, outputs=256, inputs=64, part=64, warps=8, stages=3, splits=2)
            case.check(tiles=tiles)
            plain = case(tiles=tiles)
            for ahead in (128, 1024):
                dependent = replace(tiles, dependent=True, ahead=ahead)
                assert all(torch.equal(case(tiles=dependent), plain) for _ in range(5))


@pytest.mark.gpu
@pytest.mark.parametrize("M", [17, 32, 64, 200])
def test_a_captured_chain_of_sums_and_norms(M: int) -> None:
    """Replays of products that read each other's sums and norms at once follow the input of the moment: what a kernel
    reads before it waits was written before."""
    D, width, dtype = 4096, 14336, torch.bfloat16
    up, down = Case("swiglu", M, width, D, dtype), Case("add", M, D, width, dtype, seed=1)
    gain = torch.linspace(0.5, 1.5, D, device=DEVICE).to(dtype)

    def layers(x: Tensor) -> tuple[Tensor, Tensor]:
        normed = None
        for _ in range(3):
            activated = norm_swiglu(x, gain, EPS, up.weight, normed_ME=normed)
            x, normed = linear_add_norm(activated, down.weight, x, gain, EPS)
        return x, normed

    def exact(x: Tensor) -> Tensor:
        for _ in range(3):
            gate, value = (norm_of(x, gain).to(dtype).double() @ up.weight.double().T).chunk(2, -1)
            x = (x.double() + (F.silu(gate) * value).to(dtype).double() @ down.weight.double().T).to(dtype)
        return x

    x = torch.randn(M, D, device=DEVICE, dtype=dtype)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        layers(x)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, normed = layers(x)
    for _ in range(5):
        x.normal_()
        graph.replay()
        found, of_found = out.clone(), normed.clone()
        assert distance(found, exact(x)) <= 2e-2 and distance(of_found, norm_of(found, gain)) <= 8e-3
        assert all(torch.equal(a, b) for a, b in zip((found, of_found), layers(x), strict=True))


@pytest.mark.gpu
@pytest.mark.parametrize("M", [8, 32, 64])
@pytest.mark.parametrize("dependent", [False, True])
def test_a_captured_graph(dependent: bool, M: int) -> None:
    """Replays of an MLP whose products read each other's results, twice in a row, follow the input of the moment."""
    D, width, dtype = 4096, 14336, torch.bfloat16
    up, down = Case("swiglu", M, width, D, dtype), Case("add", M, D, width, dtype, seed=1)
    first, second = (replace(tiles_for(R, I, dtype, M), dependent=dependent) for R, I in ((2 * width, D), (D, width)))

    def layers(x: Tensor, run: Callable[[Case, ProductTiles], Tensor]) -> Tensor:
        for _ in range(2):
            up.x = down.residual = x
            down.x = run(up, first)
            x = run(down, second)
        return x

    x = torch.randn(M, D, device=DEVICE, dtype=dtype)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        layers(x, lambda case, tiles: case(tiles=tiles))
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = layers(x, lambda case, tiles: case(tiles=tiles))
    for _ in range(5):
        x.normal_()
        graph.replay()
        found = out.clone()
        assert distance(found, layers(x, lambda case, _: case.exact().to(dtype))) <= 2e-2
        assert torch.equal(found, layers(x, lambda case, _: case()))
