"""The rows of a draft's first pass in a round: tokens, positions and slots."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from fledge.ops.implementations import best_impl


@dataclass(frozen=True)
class FreshRows:
    """The n rows of each of B requests, and where the nodes drafted after them go; all int64.

    `token_Bn` are the rows' tokens, `slot_Bn` their slots, and `state_Bn` which input state each reads, of those of all
    requests' tokens and a last one for masked rows; None without these: row i reads that of token i. `asked_BS` are the
    S rows whose outputs are asked for: that of the last token (of a request without tokens, the first row), which is
    the root, `root_B`, and the masked ones after it. `position_M` are the positions of all rows, [B n], then those of
    the nodes of each level below the root but the last, [levels, B]. `slot_BJ` are the slots of the nodes that will be
    expanded.
    """

    token_Bn: Tensor
    state_Bn: Tensor | None
    asked_BS: Tensor
    root_B: Tensor
    slot_Bn: Tensor
    slot_BJ: Tensor
    position_M: Tensor


def fresh_rows(
    token_BR: Tensor, count_B: Tensor, start_B: Tensor, length_B: Tensor, *, masked: int = 0, mask_token: int = 0,
    levels: int = 0, expanded: int = 0, impl: str | None = None,
) -> FreshRows:  # fmt: skip
    """The rows of the first `count_B[b]` of R tokens (int64) behind the committed ones of each sequence.

    With `masked`, as many rows follow, and those without a token have `mask_token`. `start_B` and `length_B` are as in
    `KVCache`, `levels` and `expanded` the numbers of levels and nodes that are drafted after them. `impl` is
    "definition" (plain torch), "triton" (one kernel; a GPU or Triton's interpreter), or None: "triton" on a GPU.
    """
    given = (token_BR, count_B, start_B, length_B, masked, mask_token, levels, expanded)
    if (best_impl(token_BR.device, torch.float32) if impl is None else impl) == "triton":
        from fledge.ops.fresh_rows_triton import fresh_rows_triton

        return FreshRows(*fresh_rows_triton(*given))
    return _fresh_rows(*given)


def _fresh_rows(
    token_BR: Tensor, count_B: Tensor, start_B: Tensor, length_B: Tensor, masked: int, mask_token: int, levels: int,
    expanded: int,
) -> FreshRows:  # fmt: skip
    """The definition of `fresh_rows`."""
    (B, R), count_B1, length_B1 = token_BR.shape, count_B[:, None], length_B[:, None]
    most = torch.arange(max(R + masked, levels, expanded), device=token_BR.device)
    row_n, token_Bn, state_Bn = most[: R + masked], token_BR, None
    if masked:
        known_Bn = row_n < count_B1
        token_Bn = torch.where(known_Bn, F.pad(token_BR, (0, masked)), mask_token)
        first_B1 = torch.arange(0, B * R, R, device=token_BR.device)[:, None]
        state_Bn = torch.where(known_Bn, first_B1 + row_n, B * R)
    asked_BS = (count_B1 - 1).clamp_min(0) + most[: masked + 1]
    position_Bn, after_B1 = length_B1 + row_n, length_B1 + count_B1
    position_LB = after_B1[:, 0] + most[:levels, None]
    return FreshRows(
        token_Bn,
        state_Bn,
        asked_BS,
        token_BR.gather(1, asked_BS[:, :1])[:, 0],
        position_Bn + start_B[:, None],
        after_B1 + start_B[:, None] + most[:expanded],
        torch.cat([position_Bn.flatten(), position_LB.flatten()]),
    )
