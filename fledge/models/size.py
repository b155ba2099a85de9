"""The size of a model's weights."""

from __future__ import annotations

from torch import nn


def weight_bytes(model: nn.Module) -> int:
    """The bytes of weights that a forward pass reads: all parameters except an embedding that is not also the head."""
    tables = {m.weight.data_ptr() for m in model.modules() if isinstance(m, nn.Embedding)}
    heads = {m.weight.data_ptr() for m in model.modules() if isinstance(m, nn.Linear)}
    return sum(p.numel() * p.element_size() for p in model.parameters() if p.data_ptr() not in tables - heads)
