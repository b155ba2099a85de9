"""Copies of float32 weights that products on an x86 CPU read in less time.

A product of a few rows takes as long as reading the weight. Most checkpoints have 16 bits a number. Weights of these
checkpoints are copied as float16, in half the bytes, for FBGEMM's products, which convert the numbers to float32 and
compute in float32. float16 has more digits than bfloat16 and fewer exponents, so that the smallest numbers of a
bfloat16 matrix are rounded; a copy is made only if the total rounding error, relative to the norm of the matrix, is
less than float32's. Other weights are copied in the layout of oneDNN's products: with PyTorch's layout, a product of a
few rows takes several times as long as reading the weight on an AMD CPU. Where a C compiler is found, all weights are
copied for the products of `ops/compiled` instead.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from fledge.io.machine import free_bytes, is_x86
from fledge.ops.compiled import MOST_ROWS, CompiledWeight, library, short_dtype

Made = TypeVar("Made")

SHARE = 0.5  # of the free memory, the most that the copies of a model's weights take
FREE = 4 << 30  # bytes assumed to be free where the number is not known
# A copy in 16 bits is used for any number of rows. In oneDNN's layout, the limits are compromises, chosen by the times
# of whole rounds too: one and two rows are about as fast without the copy; few rows of smaller weights are not much
# faster with the copy, and where passes of one row and of a few alternate, weight and copy compete for the caches.
LEAST_ELEMENTS = 1 << 18
LEAST_ROWS = 3
MANY_ROWS = 9  # rows from which on smaller weights too are faster with the copy
ROWS = 8  # the number of rows that oneDNN's layout is chosen for
ROUNDING = torch.finfo(torch.float32).eps  # the largest relative error of a weight's copy in 16 bits
# A matrix is copied in 16 bits only if its largest number is in this range. Outside, float16 has infinity and zero.
SMALLEST, LARGEST = 1e-12, torch.finfo(torch.float16).max
CHECKED = 1 << 20  # numbers of a weight that are compared with the copy at a time
SAMPLES = 64  # numbers of a weight in a `Fingerprint`
_MADE: WeakKeyDictionary[Any, tuple[Fingerprint, Any]] = WeakKeyDictionary()  # results of `packed_model` by owner


@functools.cache
def has_onednn_products() -> bool:
    """Whether this build of PyTorch has oneDNN's products with packed weights, and the CPU is an x86 CPU."""
    return (
        is_x86()
        and torch.backends.mkldnn.is_available()
        and hasattr(torch.ops.mkldnn, "_linear_pointwise")
        and hasattr(torch.ops.mkldnn, "_reorder_linear_weight")
    )


def has_half_products() -> bool:
    """Whether this build of PyTorch has FBGEMM's products with float16 weights, for this CPU."""
    return (
        is_x86()
        and torch.backends.quantized.engine in ("x86", "fbgemm")
        and hasattr(torch.ops.quantized, "linear_prepack_fp16")
        and hasattr(torch.ops.quantized, "linear_dynamic_fp16")
    )


def fits_half(weight: Tensor) -> bool:
    """Whether rounding a matrix to float16 changes the matrix by less than float32's rounding, relative to its norm.
    False for a matrix with numbers that are not finite, or too large for float16."""
    weight, error, norm = weight.detach(), 0.0, 0.0
    largest = float(torch.linalg.vector_norm(weight, float("inf")))
    if not SMALLEST <= largest <= LARGEST:
        return largest == 0
    for part in weight.reshape(-1).split(CHECKED):
        error += float(torch.linalg.vector_norm(part.half().float().sub_(part))) ** 2
        norm += float(torch.linalg.vector_norm(part)) ** 2
    return error <= ROUNDING**2 * norm


def can_pack(weights: Iterable[Tensor]) -> bool:
    """Whether weights can have copies: all are float32 on a CPU that has the products."""
    return (library() is not None or has_onednn_products() or has_half_products()) and all(
        w.device.type == "cpu" and w.dtype == torch.float32 for w in weights
    )


def pack(weights: Sequence[Tensor]) -> list[Tensor]:
    """An alias of each weight, with the copy as an attribute if a copy was made. Returns the weights themselves if the
    copies would exceed SHARE of the free memory, or cannot be allocated. Copies do not follow changes of weights."""
    free = free_bytes("cpu")
    most = SHARE * (FREE if free is None else free)
    if 2 * sum(w.numel() for w in weights) > most:  # even if all are copied in 16 bits
        return list(weights)
    compiled = library() is not None
    halves = [short_dtype(w) is not None if compiled else has_half_products() and fits_half(w) for w in weights]
    least = [1 if compiled or half else least_rows(w) for w, half in zip(weights, halves, strict=True)]
    given = zip(weights, halves, least, strict=True)
    if sum(w.numel() * (2 if half else 4) for w, half, rows in given if rows is not None) > most:
        return list(weights)
    try:
        with ThreadPoolExecutor(torch.get_num_threads()) as pool:  # FBGEMM copies a weight with one thread
            return [*pool.map(_packed, weights, halves, least)]
    except (MemoryError, RuntimeError) as e:
        if isinstance(e, RuntimeError) and "memory" not in str(e):  # PyTorch's allocator has no error of its own
            raise
        return list(weights)


def least_rows(weight_OI: Tensor) -> int | None:
    """The number of rows from which on the product with a weight is faster with a copy in oneDNN's layout; None if this
    build of PyTorch lacks oneDNN's products."""
    if not has_onednn_products():
        return None
    return LEAST_ROWS if weight_OI.numel() >= LEAST_ELEMENTS else MANY_ROWS


def _packed(weight_OI: Tensor, half: bool, rows: int | None) -> Tensor:
    if rows is None:
        return weight_OI
    alias = weight_OI.detach()
    if library() is None:
        alias.copied_for, alias.packed_copy = range(rows, sys.maxsize), copy_of(alias, half)
    else:
        alias.copied_for, alias.packed_copy = range(1, MOST_ROWS + 1), CompiledWeight(alias)
    return alias


def copy_of(weight_OI: Tensor, half: bool) -> Any:
    """A copy of a weight for `packed_linear`, in 16 bits or not: a `CompiledWeight` where there is a compiler, else
    FBGEMM's or one in oneDNN's layout."""
    plain_OI = weight_OI.contiguous()
    if half:
        return torch.ops.quantized.linear_prepack_fp16(plain_OI, None)
    return torch.ops.mkldnn._reorder_linear_weight(plain_OI, ROWS)


@torch.inference_mode(False)
def packed_model(
    owner: Any, weights: Sequence[Tensor], parameters: Iterable[Tensor], make: Callable[[list[Tensor]], Made]
) -> Made | None:
    """The result of `make`, called with the aliases that `pack` returns for an owner's weights. The result is cached
    until the owner ends or a weight changes. The weights consist of `parameters`. None if no copy is possible."""
    if not can_pack(weights):
        _MADE.pop(owner, None)
        return None
    parameters, kept = list(parameters), _MADE.get(owner)
    if kept is None or not kept[0].fits(weights, parameters):
        kept = None
        _MADE.pop(owner, None)  # frees the old copies before new copies are made
        _MADE[owner] = kept = Fingerprint(weights, parameters), make(pack(weights))
    return kept[1]


class Fingerprint:
    """A fingerprint of weights, to detect changes. The weights consist of `parameters`, and PyTorch counts in-place
    changes of parameters. Uncounted writes, as through `.data` and by PyTorch's fused optimizers, are detected if a
    write changes one of SAMPLES numbers spread over a weight."""

    def __init__(self, weights: Sequence[Tensor], parameters: Sequence[Tensor]):
        self.places, self.versions = [w.data_ptr() for w in weights], list(map(version, parameters))
        self.samples = [_spread(w.detach()) for w in weights]
        self.numbers = self._numbers()

    def _numbers(self) -> bytes:
        return torch.cat(self.samples).numpy().tobytes()

    def fits(self, weights: Sequence[Tensor], parameters: Sequence[Tensor]) -> bool:
        """Whether the weights, in the same order, are unchanged."""
        same = self.places == [w.data_ptr() for w in weights] and self.versions == list(map(version, parameters))
        return same and self.numbers == self._numbers()


def _spread(weight_OI: Tensor) -> Tensor:
    """A view of at most SAMPLES numbers spread over a weight; later changes of the weight show in the view."""
    whole = next((w.view(-1) for w in (weight_OI, weight_OI.mT) if w.is_contiguous()), weight_OI.diagonal())
    return whole[:: whole.numel() // SAMPLES or 1][:SAMPLES]


def version(weight: Tensor) -> int:
    """The number of operations that have changed a tensor in place; 0 for tensors without such a counter, for example
    tensors made in inference mode."""
    try:
        return weight._version
    except RuntimeError:
        return 0


def packed_copy(weight_OI: Tensor, rows: int) -> Any | None:
    """The copy of a weight for `packed_linear` of `rows` rows; None without a copy, for numbers of rows that are faster
    without the copy, and if gradients are enabled."""
    copied = rows in getattr(weight_OI, "copied_for", ())
    return weight_OI.packed_copy if copied and not torch.is_grad_enabled() else None


def packed_linear(x: Tensor, copy: Any, bias_O: Tensor | None) -> Tensor:
    """x Wᵀ + b, from [..., I] to [..., O], contiguous."""
    if isinstance(copy, CompiledWeight):
        return copy.product(x) if bias_O is None else copy.product(x).add_(bias_O)
    if isinstance(copy, Tensor):  # in oneDNN's layout
        bias = None if bias_O is None else bias_O.contiguous()  # the operation ignores strides
        return torch.ops.mkldnn._linear_pointwise.default(x, copy, bias, "none", [], "")
    # without `_op`, PyTorch searches the arguments of each call for the fake objects that torch.export passes
    out = torch.ops.quantized.linear_dynamic_fp16.default._op(x, copy)
    return out if bias_O is None else out.add_(bias_O)
