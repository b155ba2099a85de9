"""The state that a round of decoding passes to the next round, as tensors on the target's device."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from fledge.types import Verdict


@dataclass(frozen=True)
class RoundState:
    """The tokens that each of B requests committed last, which the draft has not read.

    Of R rows, the first `count_B[b]` (int64, at least 1) are valid. `token_BR` are the tokens, int64; the last valid
    token is the next tree's root. `aux_BRAD` are the target's hidden states at the token before each token. `path_BR`
    (int64) are the accepted nodes of the last tree, the root first. `length_B` (int64) are the numbers of all committed
    tokens without the root.
    """

    token_BR: Tensor
    aux_BRAD: Tensor
    count_B: Tensor
    path_BR: Tensor
    length_B: Tensor

    @classmethod
    def first(cls, token_B: Tensor, aux_BAD: Tensor, length_B: Tensor) -> RoundState:
        """The state after a prefill: one token of each request, and the hidden states at the prompt's last token."""
        token_B1, one_B = token_B[:, None], torch.ones_like(token_B)
        return cls(token_B1, aux_BAD[:, None], one_B, torch.zeros_like(token_B1), length_B)

    def after(self, verdict: Verdict, aux_BNAD: Tensor, chains: bool) -> RoundState:
        """The state after a verification; `aux_BNAD` are the target's hidden states at all nodes. `chains`: whether all
        trees are chains; the accepted nodes are then the first nodes, and nothing need be gathered."""
        aux_BRAD = aux_BNAD
        if not chains:
            aux_BRAD = aux_BNAD.gather(1, verdict.path_BR[..., None, None].expand(-1, -1, *aux_BNAD.shape[2:]))
        return RoundState(verdict.token_BR, aux_BRAD, verdict.count_B, verdict.path_BR, self.length_B + verdict.count_B)

    def plain(self) -> RoundState:
        """The state of requests that go on without a draft: the last valid tokens (R = 1), without hidden states
        (A = D = 0)."""
        token_B1 = self.token_BR.gather(1, self.count_B[:, None] - 1)
        return RoundState.first(token_B1[:, 0], self.aux_BRAD.new_empty(len(token_B1), 0, 0), self.length_B)

    def idle(self, size: int) -> RoundState:
        """The state of `size` requests that do not exist: one token of an empty text."""
        return replace(self._map(lambda x: x.new_zeros(size, *x.shape[1:])), count_B=self.count_B.new_ones(size))

    def rows(self, n: int) -> RoundState:
        """The same state with R = n rows: cut, or padded with zeros."""
        if n == self.token_BR.shape[1]:
            return self
        return self._map(lambda x: _resized(x, n) if x.dim() > 1 else x)

    def select(self, index_B: Tensor) -> RoundState:
        """The requests with these indices (int64)."""
        return self._map(lambda x: x[index_B])

    def to(self, device: torch.device) -> RoundState:
        """The state on another device. Only a copy to the CPU is waited for."""
        return self._map(lambda x: x.to(device, non_blocking=device.type != "cpu"))

    @staticmethod
    def concatenate(states: Sequence[RoundState]) -> RoundState:
        """The requests of several states with equal R; a single state itself, not a copy."""
        if len(states) == 1:
            return states[0]
        return RoundState(*(torch.cat(x) for x in zip(*(vars(s).values() for s in states), strict=True)))

    def _map(self, change: Callable[[Tensor], Tensor]) -> RoundState:
        return RoundState(*(change(x) for x in vars(self).values()))


def _resized(x_BR: Tensor, n: int) -> Tensor:
    if n <= x_BR.shape[1]:
        return x_BR[:, :n]
    return torch.cat([x_BR, x_BR.new_zeros(x_BR.shape[0], n - x_BR.shape[1], *x_BR.shape[2:])], dim=1)
