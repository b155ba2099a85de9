"""The operations of training: matrix products and SwiGLU that save few tensors, and sums of weights' gradients."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fledge.ops.linear import linear, strided_linear

# Training pads the number of rows of its products to a multiple of this. For each new number of rows, cuBLAS selects an
# algorithm, which takes the CPU longer than a small product takes the GPU.
ROW_MULTIPLE = 128


def zeros_fp32(x: Tensor) -> Tensor:
    """Zeros of the shape of `x`, in float32, or in float64 if `x` is float64."""
    return torch.zeros_like(x, dtype=torch.promote_types(x.dtype, torch.float32))


class Fp32Accumulator:
    """A sum of matrix products of the shape of a weight, in float32, or in float64 if the weight is float64.

    The first product allocates the sum, which saves filling a large tensor with zeros and adding to it.
    """

    def __init__(self, weight_OI: Tensor):
        self.weight_OI = weight_OI
        self.sum_OI: Tensor | None = None

    def add_product(self, a_OS: Tensor, b_SI: Tensor) -> None:
        """Adds the product a b. For 16-bit factors on a GPU, the GEMM itself accumulates into the float32 sum."""
        wide = torch.promote_types(a_OS.dtype, torch.float32)
        fused = a_OS.dtype != wide and a_OS.device.type == "cuda"
        if not fused:
            a_OS, b_SI = a_OS.to(wide), b_SI.to(wide)
        if self.sum_OI is None:
            self.sum_OI = torch.mm(a_OS, b_SI, out_dtype=wide) if fused else a_OS @ b_SI
        elif fused:
            torch.ops.aten.addmm.dtype_out(self.sum_OI, a_OS, b_SI, wide, out=self.sum_OI)
        else:
            self.sum_OI.addmm_(a_OS, b_SI)

    def total(self) -> Tensor:
        """The sum; zeros if nothing was added."""
        return zeros_fp32(self.weight_OI) if self.sum_OI is None else self.sum_OI


class GradientSums:
    """Accumulates parameter gradients outside autograd over the chunks of slots of one training row.

    Kernels that receive a `GradientSums` add a weight's gradient to `weight.grad` inside the GEMM that computes it
    (`add_product`), and return None to autograd. The gradient of a weight used in K steps then needs no K separate
    additions. All other gradients reach `.grad` through autograd.

    A 16-bit sum loses small addends, so `end_chunk` adds the 16-bit `.grad`s to float32 sums every few chunks, and
    `finish` rounds the totals once.
    """

    CHUNKS = 4  # chunks that are summed in 16 bits before an addition to the float32 sums

    def __init__(self, parameters: Iterable[nn.Parameter], head: nn.Parameter | None = None):
        """The loss accumulates the gradient of `head` in float32 from the start, in `head_sum`.

        `parameters` may include `head`. Parameters that do not require a gradient are ignored.
        """
        trainable = [p for p in parameters if p.requires_grad]
        self.head = head if head is not None and head.requires_grad else None
        self.head_sum = None if self.head is None else Fp32Accumulator(self.head)
        self.parameters_16bit = [p for p in trainable if p is not self.head and p.dtype.itemsize == 2]
        self.sums_float32: list[Tensor] = []
        self.pending_chunks = 0

    @staticmethod
    def add_product(weight_OI: Tensor, dy_SO: Tensor, x_SJ: Tensor, start: int = 0) -> None:
        """Adds dyᵀ x to columns [start, start + J) of weight.grad. Does nothing if the weight requires no gradient.

        The weight must be a leaf tensor.
        """
        if not weight_OI.requires_grad:
            return
        assert weight_OI.is_leaf, "only a leaf tensor has a .grad to add to"
        if weight_OI.grad is None and x_SJ.shape[1] == weight_OI.shape[1]:
            weight_OI.grad = dy_SO.T @ x_SJ
            return
        if weight_OI.grad is None:
            weight_OI.grad = torch.zeros_like(weight_OI)
        weight_OI.grad[:, start : start + x_SJ.shape[1]].addmm_(dy_SO.T, x_SJ)

    def end_chunk(self) -> None:
        """Must be called after the backward pass of each chunk."""
        self.pending_chunks += 1
        if self.pending_chunks > self.CHUNKS:
            self._add_to_float32()

    def _add_to_float32(self) -> None:
        """Adds the 16-bit `.grad`s to the float32 sums and clears them."""
        self.sums_float32 = self.sums_float32 or [zeros_fp32(p) for p in self.parameters_16bit]
        for p, total in zip(self.parameters_16bit, self.sums_float32, strict=True):
            if p.grad is not None:
                total += p.grad
                p.grad = None
        self.pending_chunks = 0

    def finish(self) -> None:
        """Stores the totals in the parameters' `.grad`. Gradients from before the row are included."""
        if self.sums_float32:
            self._add_to_float32()
            for p, total in zip(self.parameters_16bit, self.sums_float32, strict=True):
                p.grad = total.to(p.dtype)
            self.sums_float32 = []
        if self.head is not None:
            total = self.head_sum.total()
            self.head.grad = total.to(self.head.dtype) if self.head.grad is None else self.head.grad.add_(total)


def take_rows(x_NE: Tensor, rows_P: Tensor, distinct: int) -> Tensor:
    """x[rows_P], shape [P, E], with a backward pass that needs no atomic additions.

    The first `distinct` entries of `rows_P` must be different from each other, and the gradients of the remaining
    entries are ignored. The backward pass therefore scatters rows without summing any.
    """
    return _TakeRows.apply(x_NE, rows_P, distinct)


class _TakeRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, rows, distinct):
        ctx.save_for_backward(rows)
        ctx.shape, ctx.distinct = x.shape, distinct
        return x.index_select(0, rows)

    @staticmethod
    def backward(ctx, dy):
        (rows,) = ctx.saved_tensors
        dx = dy.new_zeros(ctx.shape)
        dx[rows[: ctx.distinct]] = dy[: ctx.distinct]
        return dx, None, None


def padded_rows(rows: int) -> int:
    """`rows` rounded up to a multiple of ROW_MULTIPLE."""
    return -(-rows // ROW_MULTIPLE) * ROW_MULTIPLE


def linear_products(
    x_SI: Tensor, *weights_OI: Tensor, residual_SO: Tensor | None = None, gradients: GradientSums | None = None
) -> tuple[Tensor, ...]:
    """x Wᵀ for each weight, each [S, O]; or residual + x Wᵀ for a single weight.

    If a weight has more columns than x, only its first I columns are used. With `gradients`, the backward pass adds the
    weights' gradients there and the weights must be leaves; without, they are returned to autograd. The gradients of x
    from several weights are accumulated inside the GEMMs that compute them.
    """
    if not torch.is_grad_enabled() and all(w.shape[1] == x_SI.shape[1] for w in weights_OI):
        if residual_SO is not None:
            return (strided_linear(x_SI, weights_OI[0], residual_MO=residual_SO),)
        return tuple(linear(x_SI, w) for w in weights_OI)
    return _Products.apply(gradients, residual_SO, x_SI, *weights_OI)


class SharedProducts:
    """[x ; y] Wᵀ for many rows y that are concatenated with the same few rows x.

    The part x Wᵀ of the product is computed once. `with_rows` adds the part of y. The gradient of the shared part is
    summed in float32 over all calls of `with_rows` (in `totals`), and `backward` propagates it to x and the weights.
    Needs a GPU, or Triton's interpreter.
    """

    def __init__(self, x_NI: Tensor, *weights_OI: Tensor, gradients: GradientSums | None = None):
        self.width = x_NI.shape[1]
        self.weights, self.gradients = weights_OI, gradients
        self.products = linear_products(x_NI, *weights_OI, gradients=gradients)
        self.totals = [torch.zeros_like(p, dtype=torch.float32) for p in self.products]
        # an input that requires gradients: without it, autograd would skip the backward pass of `with_rows`
        self.anchor = x_NI.new_empty(0, requires_grad=any(p.requires_grad for p in self.products))

    def with_rows(self, rows_S: Tensor, y_SJ: Tensor, *weights_OI: Tensor) -> tuple[Tensor, ...]:
        """[x[rows] ; y] Wᵀ for some of the constructor's weights, each [S, O].

        `rows_S` is int32 or int64. Rows whose index occurs more than once must have zero output gradients.
        """
        return _WithRows.apply(self, self.anchor, rows_S, y_SJ, *weights_OI)

    def index(self, weight: Tensor) -> int:
        """The position of a weight among the constructor's weights."""
        return next(i for i, w in enumerate(self.weights) if w is weight)

    def backward(self) -> None:
        """Backpropagates the summed gradients of the shared products to x and the weights."""
        pairs = [(p, t) for p, t in zip(self.products, self.totals, strict=True) if p.requires_grad]
        torch.autograd.backward([p for p, _ in pairs], [t.to(p.dtype) for p, t in pairs])


class _Products(torch.autograd.Function):
    @staticmethod
    def forward(ctx, gradients, residual, x, *weights):
        # not save_for_backward: under activation checkpointing it returns copies of the weights without `.grad`
        ctx.weights, ctx.gradients = weights, gradients
        ctx.save_for_backward(x)
        if residual is not None:
            return (torch.addmm(residual, x, weights[0].T),)
        return tuple(x @ w[:, : x.shape[1]].T for w in weights)

    @staticmethod
    def backward(ctx, *dys):
        (x,) = ctx.saved_tensors
        dx, dweights = _backward(dys, x, ctx.weights, 0, ctx.needs_input_grad[2], ctx.gradients)
        return None, dys[0] if ctx.needs_input_grad[1] else None, dx, *dweights


class _WithRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx, shared, _anchor, rows, y, *weights):
        ctx.shared, ctx.weights = shared, weights
        ctx.save_for_backward(rows, y)
        parts = (shared.products[shared.index(w)].index_select(0, rows) for w in weights)
        return tuple(p.addmm_(y, w[:, shared.width :].T) for p, w in zip(parts, weights, strict=True))

    @staticmethod
    def backward(ctx, *dys):
        from fledge.ops.training_triton import add_rows_

        rows, y = ctx.saved_tensors
        shared, weights = ctx.shared, ctx.weights
        for dy, weight in zip(dys, weights, strict=True):
            add_rows_(shared.totals[shared.index(weight)], rows, dy)
        dy, dweights = _backward(dys, y, weights, shared.width, ctx.needs_input_grad[3], shared.gradients)
        return None, None, None, dy, *dweights


def _backward(
    dys: Sequence[Tensor], x: Tensor, weights: Sequence[Tensor], start: int, needs_dx: bool,
    gradients: GradientSums | None,
) -> tuple[Tensor | None, list[Tensor | None]]:  # fmt: skip
    """The gradient of x, [S, I] (None unless `needs_dx`), and of each weight (None if `gradients` accumulates it).

    `dys` are the gradients of the products, [S, O] each. x was multiplied by the weights' columns [start, start + I).
    """
    dx, dweights = None, []
    for dy, weight in zip(dys, weights, strict=True):
        columns, dweight = slice(start, start + x.shape[1]), None
        if gradients is not None:
            gradients.add_product(weight, dy, x, start)
        elif weight.requires_grad:
            dweight = torch.zeros_like(weight)  # another product makes the gradient of the other columns
            torch.mm(dy.T, x, out=dweight[:, columns])
        dweights.append(dweight)
        if needs_dx:
            dx = dy @ weight[:, columns] if dx is None else dx.addmm_(dy, weight[:, columns])
    return dx, dweights


def swiglu_reference(x: Tensor, gate_IE: Tensor, up_IE: Tensor, down_EI: Tensor, residual: Tensor) -> Tensor:
    """The definition in plain torch: residual + MLP(x), all of shape [S, E]."""
    return residual + F.linear(F.silu(F.linear(x, gate_IE)) * F.linear(x, up_IE), down_EI)


def swiglu(
    x: Tensor, gate_IE: Tensor, up_IE: Tensor, down_EI: Tensor, residual: Tensor, *, recompute: bool = False,
    gradients: GradientSums | None = None,
) -> Tensor:  # fmt: skip
    """`swiglu_reference`, Llama's SwiGLU MLP, with Triton kernels, on a GPU or in Triton's interpreter.

        g = x Wg', u = x Wu', a = silu(g) u, y = a Wd'

        da = dy Wd,   dg = da u σ(g) (1 + g (1 - σ(g))),   du = da silu(g),   dx = dg Wg + du Wu

    It saves x, g and u and recomputes a. dg, du and a are written into the memory of g, u and da. With `gradients`, the
    weights' gradients are added there and the weights must be leaves; without, they are returned to autograd.
    `recompute` saves memory by computing g and u again in the backward pass.
    """
    if not torch.is_grad_enabled():
        from fledge.ops.training_triton import silu_mul

        g, u = linear_products(x, gate_IE, up_IE)
        return linear_products(silu_mul(g, u), down_EI, residual_SO=residual)[0]
    return _SwiGLU.apply(x, gate_IE, up_IE, down_EI, residual, recompute, gradients)


class _SwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, gate, up, down, residual, recompute, gradients):
        from fledge.ops.training_triton import silu_mul

        g, u = x @ gate.T, x @ up.T
        # not save_for_backward: under activation checkpointing it returns copies of the weights without `.grad`
        ctx.weights, ctx.gradients = (gate, up, down), gradients
        ctx.save_for_backward(x, *(() if recompute else (g, u)))
        return torch.addmm(residual, silu_mul(g, u), down.T)

    @staticmethod
    def backward(ctx, dy):
        from fledge.ops.training_triton import silu_mul_backward_

        x, *saved = ctx.saved_tensors
        gate, up, down = ctx.weights
        g, u = saved or (x @ gate.T, x @ up.T)
        dg, du, a = silu_mul_backward_(g, u, dy @ down)
        dweights = []
        for weight, dout, inp in ((gate, dg, x), (up, du, x), (down, dy, a)):
            if ctx.gradients is not None:
                ctx.gradients.add_product(weight, dout, inp)
            dweights.append(dout.T @ inp if ctx.gradients is None and weight.requires_grad else None)
        return (dg @ gate).addmm_(du, up), *dweights, dy, None, None
