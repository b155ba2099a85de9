"""The cache of a target with recurrent layers (state-space models, linear attention), which cannot roll back."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn


class RecurrentCache:
    """The model's own cache of one sequence; with `recompute`, no cache: every call runs the whole sequence again.

    Has the methods of `TargetCache` that decoding without a draft needs.
    """

    def __init__(self, recompute: bool = False):
        self.recompute = recompute
        self.token_1T: Tensor | None = None
        self.state: Any = None  # the cache that the model returned

    @property
    def lengths(self) -> list[int]:
        """The number of tokens of the one sequence."""
        return [0 if self.token_1T is None else self.token_1T.shape[1]]

    def run(self, model: nn.Module, input_ids: Tensor, argument: str, **inputs: Any) -> Tensor:
        """Runs tokens [1, N] after the earlier ones; the model takes its cache as `argument`. Returns its logits
        [1, N, V], or [1, n, V] if `inputs` has `logits_to_keep` = n."""
        N = input_ids.shape[1]
        self.token_1T = input_ids if self.token_1T is None else torch.cat([self.token_1T, input_ids], dim=1)
        if self.recompute:
            return model(input_ids=self.token_1T, use_cache=False, **inputs).logits[:, -N:]
        if self.state is not None:
            inputs = {argument: self.state, **inputs}
        out = model(input_ids=input_ids, use_cache=True, **inputs)
        # transformers 5.24 renames it in outputs, also in those of a model's own code, whose argument has an older name
        self.state = out["cache"] if "cache" in out else out.get(argument)
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
            self.token_1T = self.state = None

    def append(self, other: RecurrentCache) -> None:
        """Takes the sequence of another cache; this one must have none. Raises ValueError if it has one."""
        if self.token_1T is not None:
            raise ValueError(
                "a target whose cache cannot be rolled back decodes one request at a time; use a batch of 1"
            )
        self.token_1T, self.state = other.token_1T, other.state
