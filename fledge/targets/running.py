"""The past of one request to a target whose layers keep a running summary, of which nothing can be forgotten."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

STATES = ("past_key_values", "cache_params", "state")  # what transformers' models call the cache that they return


class RunningState:
    """The model's own cache of one sequence, token by token; with `recompute` no cache at all: every call reads the
    whole sequence again. Has those methods of `TargetCache` that decoding without a draft needs."""

    def __init__(self, recompute: bool = False):
        self.recompute = recompute
        self.token_1T: Tensor | None = None
        self.held: dict[str, Any] = {}

    @property
    def lengths(self) -> list[int]:
        """Tokens of the one sequence."""
        return [0 if self.token_1T is None else self.token_1T.shape[1]]

    def run(self, model: nn.Module, input_ids: Tensor, **inputs: Any) -> Tensor:
        """Runs tokens [1, N] after those seen so far. Returns the model's logits [1, N, V], or those of the last tokens
        where the model is asked for no more (`logits_to_keep`)."""
        N = input_ids.shape[1]
        self.token_1T = input_ids if self.token_1T is None else torch.cat([self.token_1T, input_ids], dim=1)
        if self.recompute:
            return model(input_ids=self.token_1T, use_cache=False, **inputs).logits[:, -N:]
        out = model(input_ids=input_ids, use_cache=True, **self.held, **inputs)
        self.held = {name: out[name] for name in STATES if name in out}
        return out.logits

    def settle(self, lengths: Sequence[int]) -> None:
        """Asserts that the prompt just read is the only one."""
        assert list(lengths) == self.lengths, (lengths, self.lengths)

    def keep(self, lengths: Sequence[int], paths: Sequence[Sequence[int]]) -> None:
        """Asserts that the tokens after the first `lengths` are all kept, since none can be forgotten."""
        kept = [length + len(path) for length, path in zip(lengths, paths, strict=True)]
        assert kept == self.lengths, (kept, self.lengths)
