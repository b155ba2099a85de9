"""Quantized targets: the name of a target's quantization, and the weights that quantized layers compute with.

transformers loads a quantized model with the package of the format (bitsandbytes, compressed-tensors, AWQ, GPTQ, fp8,
..), which replaces linear layers by the package's modules. A replaced module may hold the weight packed, scaled, or in
8 bits.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn import functional as F

ROWS = 1024  # rows of the identity matrix at a time
TOLERANCE = 0.2  # relative difference of products with the weight to the module's outputs; inputs may have 4 bits


def quantization_of(config: Any) -> str:
    """The name of a model's quantization by the model's config, such as "bitsandbytes (4 bits)"; empty for a model that
    is not quantized."""
    found = getattr(config, "quantization_config", None)
    if found is None:
        return ""
    known = found if isinstance(found, dict) else found.to_dict()
    method = str(getattr(known.get("quant_method"), "value", known.get("quant_method") or "an unknown method"))
    if method == "bitsandbytes":
        return f"bitsandbytes ({8 if known.get('load_in_8bit') else 4} bits)"
    detail = known.get("format") or (f"{known['bits']} bits" if known.get("bits") else "")
    return f"{method} ({detail})" if detail else method


def loading_alone(quantization: str) -> AbstractContextManager[None]:
    """Context manager for a rank that loads a quantized model alone: otherwise, compressed-tensors divides the work
    among all ranks, even ranks that do not load the model."""
    if not quantization.startswith("compressed-tensors"):
        return nullcontext()
    try:
        from compressed_tensors.offload import as_single_threaded
    except ImportError:  # transformers says what to install; versions without it load alone
        return nullcontext()
    return as_single_threaded()


@torch.no_grad()
def run_once(model: nn.Module) -> None:
    """Runs a model on one token: compressed-tensors decompresses the weights in the first pass of the whole model, and
    fledge may run the decoder alone."""
    device = model.get_input_embeddings().weight.device
    model(input_ids=torch.zeros(1, 1, dtype=torch.int64, device=device), use_cache=False)


def is_plain(weight: Any) -> bool:
    """Whether a weight is a tensor of the numbers that a layer computes with: not packed, scaled or of a subclass."""
    plain = isinstance(weight, DTensor) or type(weight) in (Tensor, nn.Parameter)
    return plain and weight.dtype.is_floating_point and weight.dtype.itemsize > 1


@torch.no_grad()
def weight_of(module: nn.Module, dtype: torch.dtype) -> Tensor | None:
    """The weight [out, in] of a linear layer or [V, D] of an embedding: the module's own weight, or for a quantized
    linear layer the weight that the layer computes with, in `dtype`. All ranks gather a weight that ranks share. None
    if the module has no weight. Raises ValueError for a quantized embedding, and for a layer whose outputs differ from
    the products with the weight found.
    """
    weight = getattr(module, "weight", None)
    if is_plain(weight):
        return weight.full_tensor() if isinstance(weight, DTensor) else weight
    if isinstance(module, nn.Embedding):
        raise ValueError(
            f"its embedding is quantized ({weight.dtype}), and a draft reads it as numbers of 16 or 32 bits"
        )
    width = getattr(module, "in_features", None)
    return None if width is None else _products_with_identity(module, width, dtype)


def _products_with_identity(module: nn.Module, width: int, dtype: torch.dtype) -> Tensor:
    """The weight of a linear layer, from the layer's outputs for the rows of the identity matrix. Formats that quantize
    inputs round nothing in a row with a single number: a layer with a fixed input scale gets the scale as the
    number."""
    device = next(x.device for x in (*module.parameters(), *module.buffers()))
    scale = getattr(module, "input_scale", None)
    one = float(scale) if isinstance(scale, Tensor) and scale.numel() == 1 else 1.0
    bias = getattr(module, "bias", None)
    columns = []
    for start in range(0, width, ROWS):
        rows = torch.arange(start, min(start + ROWS, width), device=device)
        x = F.one_hot(rows, width).to(dtype) * one
        y = module(x)
        columns.append((y if bias is None else y - bias).to(dtype) / one)
    weight = torch.cat(columns).T.contiguous()
    x = torch.randn(16, width, generator=torch.Generator().manual_seed(0)).to(device, dtype)
    expected, found = module(x).float(), F.linear(x, weight, bias).float()
    if not bool((found - expected).norm() <= TOLERANCE * expected.norm()):
        raise ValueError(f"the weight of a {type(module).__name__} cannot be read: its products are not linear")
    return weight
