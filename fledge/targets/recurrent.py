"""The cache of a target with recurrent layers (state-space models, linear attention), which cannot roll back."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

STATES = ("past_key_values", "cache_params", "state")  # names of the returned cache in transformers' model outputs


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
        self.states = {name: out[name] for name in STATES if name in out}
        return out.logits

    def trim_padding(self, lengths: Sequence[int]) -> None:
        """Asserts that there is one prompt without padding."""
        assert list(lengths) == self.lengths, (lengths, self.lengths)

    def keep(self, lengths: Sequence[int], paths: Sequence[Sequence[int]]) -> None:
        """Asserts that all tokens are kept, since none can be removed."""
        kept = [length + len(path) for length, path in zip(lengths, paths, strict=True)]
        assert kept == self.lengths, (kept, self.lengths)
