"""Faster linear layers for a target on a CPU, where the matrix products of a decoding round have few rows."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import MethodType

from torch import Tensor, nn

from fledge.ops.linear import linear

# The weights that some layers compute with now instead of their own. Not an attribute of the layers, since a model that
# the caller has loaded should compute with its own weights at any other time, and be copied and pickled as before.
_INSTEAD: dict[nn.Linear, Tensor] = {}


def use_few_row_products(model: nn.Module) -> None:
    """Replaces the forward of every `nn.Linear` of a model by `fledge.ops.linear`. Leaves subclasses and modules
    with a replaced forward as they are."""
    for module in model.modules():
        if type(module) is nn.Linear and "forward" not in vars(module):
            # a bound method, because torch.compile traces it once for all layers
            module.forward = MethodType(forward, module)


def forward(self: nn.Linear, x: Tensor) -> Tensor:
    weight = _INSTEAD.get(self)
    return linear(x, self.weight if weight is None else weight, self.bias)


def few_row_layers(model: nn.Module) -> list[nn.Linear]:
    """The layers whose forward `use_few_row_products` has replaced."""
    replaced = (m for m in model.modules() if isinstance(m, nn.Linear) and "forward" in vars(m))
    return [m for m in replaced if getattr(vars(m)["forward"], "__func__", None) is forward]


@contextmanager
def computing_with(weights: Mapping[nn.Linear, Tensor]) -> Iterator[None]:
    """While it is entered, these of the `few_row_layers` compute with these weights."""
    _INSTEAD.update(weights)
    try:
        yield
    finally:
        for layer in weights:
            _INSTEAD.pop(layer, None)
