"""Products of few rows on a CPU, by C code that is compiled on the machine (`layers.c`).

The rows are float32; weights whose numbers 16 bits hold exactly are copied in 16 bits, which halves what is read. A
row's result does not depend on the number of rows and threads, bit by bit. `fledge.drafts.compiled_layers` computes
whole decoder layers so.
"""

from __future__ import annotations

import ctypes
from ctypes import Structure, byref, c_int64, c_void_p

import torch
from torch import Tensor
from torch.nn import functional as F

from fledge.ops.compiled.build import library
from fledge.ops.compiled.threads import THREADS

MOST_ROWS = 384  # of more, PyTorch takes less time for attention, and each thread computes the norms of all rows
PANEL = 16  # outputs of a weight that layers.c keeps next to each other
LANES = 8  # a head has a multiple of so many dimensions
KINDS = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}


class WeightStruct(Structure):
    _fields_ = [("data", c_void_p), ("bias", c_void_p), *((n, c_int64) for n in ("outputs", "inputs", "kind"))]


class CompiledWeight:
    """A copy of a float32 weight [O, I] for `product`: in 16 bits if that changes no number, and in panels of outputs,
    as layers.c reads it. It does not follow later changes of the weight."""

    def __init__(self, weight_OI: Tensor):
        weight_OI = weight_OI.detach().to(short_dtype(weight_OI.detach()) or torch.float32)
        self.shape = (O, I) = tuple(weight_OI.shape)
        self.kept = F.pad(weight_OI, (0, 0, 0, -O % PANEL)).view(-1, PANEL, I).mT.contiguous()
        self.struct = self.with_bias(None)

    def with_bias(self, bias_O: Tensor | None) -> WeightStruct:
        """What layers.c reads. The caller keeps the bias."""
        return WeightStruct(self.kept.data_ptr(), pointer(bias_O), *self.shape, KINDS[self.kept.dtype])

    def product(self, x: Tensor) -> Tensor:
        """x Wᵀ of float32 rows, from [..., I] to [..., O], contiguous."""
        x = x.contiguous()
        out = x.new_empty(*x.shape[:-1], self.shape[0])
        if rows := x.numel() // self.shape[1]:
            with THREADS.computing() as threads:
                functions().fledge_product(byref(self.struct), rows, x.data_ptr(), out.data_ptr(), threads)
        return out


def short_dtype(weight_OI: Tensor) -> torch.dtype | None:
    """The dtype of 16 bits that has all numbers of a weight; None if neither has."""
    for dtype in (torch.bfloat16, torch.float16):
        if torch.equal(weight_OI.to(dtype).to(weight_OI.dtype), weight_OI):
            return dtype
    return None


def pointer(x: Tensor | None) -> int | None:
    """The address of a tensor's memory."""
    return None if x is None else x.data_ptr()


def check_memory(failed: int) -> None:
    """Raises MemoryError if a function of layers.c had no memory."""
    if failed:
        raise MemoryError("no memory for the rows of a pass")


def functions() -> ctypes.CDLL:
    """The functions of layers.c, where it was compiled."""
    compiled = library()
    assert compiled is not None
    return compiled
