"""Random numbers and draws of `ops.sampling` on a CPU, by the C code of `layers.c`."""

from __future__ import annotations

import torch
from torch import Tensor

from fledge.ops.compiled import functions, pointer
from fledge.ops.compiled.threads import THREADS

SEVERAL = 1 << 15  # scores of all rows from which on several threads draw


def hash_keys_compiled(seed: Tensor, request: Tensor, position: Tensor, purpose: int) -> Tensor:
    """`hash_keys`."""
    parts = [x.contiguous() for x in torch.broadcast_tensors(seed, request, position)]
    state = torch.empty_like(parts[2])
    functions().fledge_states(state.numel(), *map(pointer, parts), purpose, pointer(state))
    return state


def gumbel_argmax_compiled(scores_MV: Tensor, state_M: Tensor) -> list[int | None]:
    """The argmax of scores (float32) plus Gumbel noise in each row; None where the definition has to decide."""
    (M, V), scores_MV, state_M = scores_MV.shape, scores_MV.contiguous(), state_M.contiguous()
    token_M = torch.empty(M, dtype=torch.int64)
    given = M, V, pointer(scores_MV), pointer(state_M), pointer(token_M)
    if M * V < SEVERAL:
        functions().fledge_draws(*given, 1)
    else:
        with THREADS.computing() as threads:
            functions().fledge_draws(*given, threads)
    return [None if token < 0 else token for token in token_M.tolist()]


def coupled_compiled(logits_BSW: Tensor, state_BS: Tensor, temperature_B: Tensor, ids_W: Tensor | None) -> Tensor:
    """`coupled`."""
    logits_BSW = logits_BSW.float().contiguous()
    (B, S, W), noisy_BSW = logits_BSW.shape, torch.empty_like(logits_BSW)
    state_BS, temperature_BS = state_BS.expand(B, S).contiguous(), temperature_B[:, None].expand(B, S).contiguous()
    ids_W = None if ids_W is None else ids_W.contiguous()
    given = logits_BSW, ids_W, temperature_BS, state_BS, noisy_BSW
    functions().fledge_coupled(B * S, W, *map(pointer, given))
    return noisy_BSW
