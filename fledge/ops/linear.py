"""Matrix products by the platform's library, or by what is faster on a CPU: compiled products, and W xᵀ for few rows.

A product of a few rows takes as long as reading the weight. On a CPU with a C compiler, decoding therefore reads copies
of float32 weights (`ops/compiled.py`), in 16 bits where that changes no number, as for most checkpoints.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.nn import functional as F

from fledge.io.machine import free_bytes, is_intel
from fledge.ops.compiled import MOST_ROWS, CompiledWeight, library, short_dtype

Made = TypeVar("Made")

# Up to this number of rows, W xᵀ is faster than x Wᵀ on a CPU: for x Wᵀ, torch's BLAS library first packs the weights,
# which takes longer than the product itself. A single row is computed as two, because the matrix-vector product reads
# the weights more slowly than either. For Intel's CPUs, torch's BLAS library (MKL) has other code: x Wᵀ of one to three
# rows took as long as reading the weights on a Xeon, and W xᵀ twice as long.
FEW_ROWS_ON_CPU = 0 if is_intel() else 8
SHARE = 0.5  # of the free memory, the most that the copies of a model's weights take
FREE = 4 << 30  # bytes assumed to be free where the number is not known
SAMPLES = 64  # numbers of a weight in a `Fingerprint`
_MADE: WeakKeyDictionary[Any, tuple[Fingerprint, Any]] = WeakKeyDictionary()  # results of `packed_model` by owner


def linear(x: Tensor, weight_OI: Tensor, bias_O: Tensor | None = None) -> Tensor:
    """x Wᵀ + b, from [..., I] to [..., O], contiguous. Equals `F.linear` up to rounding; faster for 1 to 8 float32 rows
    on some CPUs, and for weights with copies (`pack`)."""
    out_MO = strided_linear(x.reshape(-1, x.shape[-1]), weight_OI, bias_O)
    return out_MO.contiguous().view(*x.shape[:-1], weight_OI.shape[0])


def strided_linear(
    x_MI: Tensor, weight_OI: Tensor, bias_O: Tensor | None = None, residual_MO: Tensor | None = None
) -> Tensor:
    """`linear` of rows, plus a residual if given. The result may be strided: an operation that reads the result once
    needs no contiguous copy."""
    rows = x_MI.shape[0]
    if (copy := packed_copy(weight_OI, rows)) is not None:
        out_MO = copy.product(x_MI, bias_O)
    elif _few_on_cpu(x_MI, rows):
        out_MO = _product_on_cpu(x_MI, weight_OI, bias_O)
    elif residual_MO is not None and bias_O is None:
        return torch.addmm(residual_MO, x_MI, weight_OI.T)
    else:
        out_MO = F.linear(x_MI, weight_OI, bias_O)
    return out_MO if residual_MO is None else residual_MO + out_MO


def _few_on_cpu(x: Tensor, rows: int) -> bool:
    return 0 < rows <= FEW_ROWS_ON_CPU and x.dtype == torch.float32 and x.is_cpu


def _product_on_cpu(x_MI: Tensor, weight_OI: Tensor, bias_O: Tensor | None) -> Tensor:
    if x_MI.shape[0] == 1:
        out_MO = torch.mm(weight_OI, torch.cat((x_MI, x_MI)).T).T[:1]
    else:  # contiguous: with strided rows, the product takes several times as long
        out_MO = torch.mm(weight_OI, x_MI.contiguous().T).T
    return out_MO if bias_O is None else out_MO + bias_O


def packed_copy(weight_OI: Tensor, rows: int) -> CompiledWeight | None:
    """The copy of a weight for a product of `rows` rows; None without a copy, for too many rows, and if gradients are
    enabled."""
    copy = getattr(weight_OI, "packed_copy", None)
    return copy if copy is not None and 0 < rows <= MOST_ROWS and not torch.is_grad_enabled() else None


def can_pack(weights: Iterable[Tensor]) -> bool:
    """Whether weights can have copies: all are float32 on a CPU, and there is a C compiler."""
    return all(w.device.type == "cpu" and w.dtype == torch.float32 for w in weights) and library() is not None


def pack(weights: Sequence[Tensor]) -> list[Tensor]:
    """An alias of each weight, with the copy as the attribute `packed_copy`. Returns the weights themselves if the
    copies would exceed SHARE of the free memory, or cannot be allocated. Copies do not follow changes of weights."""
    free = free_bytes("cpu")
    most = SHARE * (FREE if free is None else free)
    if 2 * sum(w.numel() for w in weights) > most:  # even if all are copied in 16 bits
        return list(weights)
    if sum(w.numel() * (4 if short_dtype(w) is None else 2) for w in weights) > most:
        return list(weights)
    aliases = [w.detach() for w in weights]
    try:
        for alias in aliases:
            alias.packed_copy = CompiledWeight(alias)
    except (MemoryError, RuntimeError) as e:
        if isinstance(e, RuntimeError) and "memory" not in str(e):  # PyTorch's allocator has no error of its own
            raise
        return list(weights)
    return aliases


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
