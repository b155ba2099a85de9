"""How much a model weighs."""

from __future__ import annotations

from torch import nn


def weight_bytes(model: nn.Module) -> int:
    """Bytes of the weights that a forward pass multiplies by: all but embeddings that are only looked up."""
    tables = {m.weight.data_ptr() for m in model.modules() if isinstance(m, nn.Embedding)}
    heads = {m.weight.data_ptr() for m in model.modules() if isinstance(m, nn.Linear)}
    return sum(p.numel() * p.element_size() for p in model.parameters() if p.data_ptr() not in tables - heads)
