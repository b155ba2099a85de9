"""Counter-based random numbers, keyed by (seed, request, position, purpose), draws with them, and top-k and top-p.

The random numbers for a position do not depend on what was drafted before, nor on the order of calls. Speculative
sampling can therefore be compared with token-by-token sampling at the same seed. A key is hashed to a 64-bit state,
which seeds a stream of SplitMix64 (Steele, Lea & Flood 2014). All functions run on the device of their tensors and wait
for no GPU.

Each function has a definition, and kernels in Triton for a GPU. On a CPU, `ops.sampling_cpu` has faster functions, with
the same results.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from fledge.ops.compiled import library
from fledge.ops.device import chosen, current_device, use_triton
from fledge.ops.sampling_cpu import coupled_compiled, gumbel_argmax_cpu, hash_keys_cpu

TOKEN, DRAFT, ACCEPT, RESIDUAL = range(4)  # purposes
MOST_TOKENS = 2**22  # of a row of `filter_top`'s kernels, whose sums of that many weights fit into 64 bits


def _signed(x: int) -> int:
    """The int64 with the bits of a 64-bit number."""
    return x - (1 << 64) if x >> 63 else x


_GOLDEN = _signed(0x9E3779B97F4A7C15)


def _mix(x: Tensor) -> Tensor:
    """SplitMix64's finaliser on int64 tensors. Their products wrap modulo 2^64; a mask makes the right shifts
    logical."""

    def fold(x: Tensor, by: int) -> Tensor:
        return (x >> by).bitwise_and_((1 << (64 - by)) - 1).bitwise_xor_(x)

    x = fold(x, 30).mul_(_signed(0xBF58476D1CE4E5B9))
    x = fold(x, 27).mul_(_signed(0x94D049BB133111EB))
    return fold(x, 31)


def hash_keys(seed: Tensor, request: Tensor, position: Tensor, purpose: int) -> Tensor:
    """The states of keys, int64 in the shape that `seed`, `request` and `position` (int64, of at most two dimensions)
    broadcast to."""
    if position.is_cpu and chosen() is None:
        return hash_keys_cpu(seed, request, position, purpose)
    if use_triton(position):
        from fledge.ops.sampling_triton import hash_keys_triton

        with current_device(position.device):
            return hash_keys_triton(seed, request, position, purpose)
    state = _mix(seed + _GOLDEN)
    for part in (request, position, purpose):
        state = _mix(state + _GOLDEN + part)
    return state


def uniforms(state: Tensor, n: int) -> Tensor:
    """The first n uniform random numbers in (0, 1) of each state, float64 [.., n]."""
    return _uniforms_at(state, torch.arange(n, device=state.device))


def _uniforms_at(state: Tensor, place_V: Tensor) -> Tensor:
    """The uniform random numbers of each state at places (int64) that count from 0, float64 [.., V]."""
    counter = (place_V + 1) * _GOLDEN + state[..., None]
    # 52 bits, so that adding 0.5 is exact and the result is below 1
    bits = _mix(counter).bitwise_right_shift_(12).bitwise_and_((1 << 52) - 1)
    return bits.double().add_(0.5).mul_(2.0**-52)


def gumbel(state: Tensor, n: int) -> Tensor:
    """The first n standard Gumbel variates of each state, float64 [.., n]."""
    return uniforms(state, n).log_().neg_().log_().neg_()


def gumbel_argmax(scores: Tensor, state: Tensor) -> Tensor:
    """A sample from softmax(scores) by the Gumbel-max trick for scores [.., V] and states that broadcast to [..]: int64
    [..].

    Entries of -inf are never sampled. Rows must not contain NaN.
    """
    if scores.is_cpu and chosen() is None:
        shape, rows_MV = scores.shape[:-1], scores.reshape(-1, scores.shape[-1])
        rows_MV = rows_MV if rows_MV.dtype in (torch.float32, torch.float64) else rows_MV.float()
        states = state.expand(shape).reshape(-1)
        drawn = gumbel_argmax_cpu(rows_MV, states)
        for i in (i for i, token in enumerate(drawn) if token is None):
            drawn[i] = int(_gumbel_argmax(rows_MV[i], states[i]))
        return torch.tensor(drawn, dtype=torch.int64).view(shape)
    if use_triton(state):
        from fledge.ops.sampling_triton import gumbel_argmax_triton

        with current_device(scores.device):
            return gumbel_argmax_triton(scores, state)
    return _gumbel_argmax(scores, state)


def _gumbel_argmax(scores: Tensor, state: Tensor) -> Tensor:
    return (scores.double() + gumbel(state, scores.shape[-1])).argmax(-1)


def coupled(logits_BSW: Tensor, state_BS: Tensor, temperature_B: Tensor, ids_W: Tensor | None = None) -> Tensor:
    """A draft's logits over temperature, plus the Gumbel noise with which the target draws at the same positions:
    float32 [B, S, W]. Logits of temperature 0 stay as they are.

    Their argmax is a draw from the draft's distribution, and the target's own draw is the same token with probability
    of at least (1 - d) / (1 + d), where d is the total variation distance of the two distributions (Gumbel sampling of
    Daliri, Musco & Suresh 2024, arXiv:2408.07978). The target's draws do not depend on the draft.

    `state_BS` are the states of the target's draws after each of the S rows of a request, or [B, 1] for all of them,
    `temperature_B` float64, and `ids_W` (int64) the target's ids of the draft's tokens; None if they are the same.
    """
    if logits_BSW.is_cpu and chosen() is None and library() is not None:
        return coupled_compiled(logits_BSW, state_BS, temperature_B, ids_W)
    if use_triton(state_BS):
        from fledge.ops.sampling_triton import coupled_triton

        with current_device(logits_BSW.device):
            return coupled_triton(logits_BSW, state_BS, temperature_B, ids_W)
    ids_W = torch.arange(logits_BSW.shape[-1], device=logits_BSW.device) if ids_W is None else ids_W
    noise_BSW = _uniforms_at(state_BS, ids_W).log_().neg_().log_()
    temperature_B11 = temperature_B[:, None, None]
    noisy_BSW = logits_BSW.double() / temperature_B11 - noise_BSW
    return torch.where(temperature_B11 > 0, noisy_BSW, logits_BSW.double()).float()


def filter_top(scores_BNV: Tensor, top_k_B: Tensor, top_p_B: Tensor) -> Tensor:
    """Top-k, then top-p, as TopKLogitsWarper and TopPLogitsWarper of transformers.

    Top-k keeps the k highest scores of each row and all scores equal to the k-th. Top-p then removes the least likely
    tokens whose probabilities add up to at most 1 - p, but never the likeliest token. Among equal scores, top-p removes
    lower ids first, so that the choice does not depend on the batch; transformers leaves the choice open. `top_k_B`
    (int64; 0 keeps all) and `top_p_B` (float64; 1 keeps all) have an entry per request. Scores are float32 or float64,
    and must not be NaN.

    The definition sorts. The kernels, for float32 rows of up to MOST_TOKENS on a GPU, search for the lowest kept score.
    Kernels and definition round sums of probabilities differently, and may differ in tokens at which the sum is 1 - p
    up to rounding. The kernels add integers: equal rows have equal results, in any batch. Nothing waits for the device.
    """
    if use_triton(scores_BNV) and scores_BNV.dtype == torch.float32 and scores_BNV.shape[-1] <= MOST_TOKENS:
        from fledge.ops.top_filter_triton import filter_top_triton

        with current_device(scores_BNV.device):
            return filter_top_triton(scores_BNV, top_k_B, top_p_B)
    # removed scores become -inf, and -inf sorts first; sums run from the least likely token up, as in transformers
    V = scores_BNV.shape[-1]
    ascending = _sorted(scores_BNV)
    # the k-th highest score; without a limit, the lowest score
    top_k_B = top_k_B.where(top_k_B > 0, V).clamp_max(V)
    lowest = ascending.gather(-1, (V - top_k_B)[:, None, None].expand(-1, ascending.shape[1], 1))
    scores_BNV = scores_BNV.masked_fill(scores_BNV < lowest, -torch.inf)
    ascending = ascending.masked_fill(ascending < lowest, -torch.inf)
    # no sum is below -1, the threshold of requests without top-p
    threshold = (1 - top_p_B).where(top_p_B < 1, -1.0).to(scores_BNV.dtype)[:, None, None]
    removed = ascending.softmax(-1).cumsum(-1) <= threshold
    count = removed[..., :-1].sum(-1, keepdim=True)  # the likeliest token stays
    lowest = ascending.gather(-1, count)
    below, equal = scores_BNV < lowest, scores_BNV == lowest
    gone = below | (equal & (equal.cumsum(-1) <= count - below.sum(-1, keepdim=True)))
    return scores_BNV.masked_fill(gone, -torch.inf)


def _sorted(x: Tensor) -> Tensor:
    """The numbers of each row of x [.., V], float32 or float64, in ascending order. NumPy sorts several times as fast
    as torch on a CPU."""
    if x.device.type != "cpu":
        return x.sort(dim=-1).values
    return torch.from_numpy(np.sort(x.numpy(), axis=-1))
