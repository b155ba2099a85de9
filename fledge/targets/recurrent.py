"""The cache of a target with recurrent layers (state-space models, linear attention), which cannot roll back."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

# what transformers' models call their cache, as an argument and in their outputs; newer versions say `cache`
CACHES = ("cache", "past_key_values", "cache_params", "state")


@functools.cache
def cache_argument(kind: type[nn.Module]) -> str:
    """What models of a class call the cache that is passed to their forward pass."""
    parameters = inspect.signature(kind.forward).parameters
    return next((name for name in CACHES if name in parameters), "past_key_values")


class RecurrentCache:
    """The model's own cache of one sequence; with `recompute`, no cache: every call runs the whole sequence again.

    Has the methods of `TargetCache` that decoding without a draft needs.
    """

    def __init__(self, recompute: bool = False):
        self.recompute = recompute
        self.token_1T: Tensor | None = None
        self.states: dict[str, Any] = {}

    @property
    def lengths(self) -> list[int]:
        """The number of tokens of the one sequence."""
        return [0 if self.token_1T is None else self.token_1T.shape[1]]

    def run(self, model: nn.Module, input_ids: Tensor, **inputs: Any) -> Tensor:
        """Runs tokens [1, N] after the earlier ones. Returns the model's logits [1, N, V], or [1, n, V] if `inputs`
        has `logits_to_keep` = n."""
        N = input_ids.shape[1]
        self.token_1T = input_ids if self.token_1T is None else torch.cat([self.token_1T, input_ids], dim=1)
        if self.recompute:
            return model(input_ids=self.token_1T, use_cache=False, **inputs).logits[:, -N:]
        out = model(input_ids=input_ids, use_cache=True, **self.states, **inputs)
        # a model's own code may call it by an older name than its outputs do
        self.states = {cache_argument(type(model)): x for name, x in out.items() if name in CACHES}
        return out.logits

    def trim_padding(self, lengths: Sequence[int]) -> None:
        """Asserts that there is one prompt without padding."""
        assert list(lengths) == self.lengths, (lengths, self.lengths)

    def keep(self, path_BR: Tensor | None, count_B: Tensor) -> None:
        """Asserts that there is no tree, of which nodes would have to be removed. Does nothing, as all tokens are
        kept."""
        assert path_BR is None

    def select(self, sequences: Sequence[int]) -> None:
        """Keeps the sequence, or without indices none."""
        if not sequences:
            self.token_1T, self.states = None, {}

    def append(self, other: RecurrentCache) -> None:
        """Takes the sequence of another cache; this one must have none. Raises ValueError if it has one."""
        if self.token_1T is not None:
            raise ValueError(
                "a target whose cache cannot be rolled back decodes one request at a time; use a batch of 1"
            )
        self.token_1T, self.states = other.token_1T, other.states
