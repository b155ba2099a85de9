"""Counter-based random numbers, keyed by (seed, request, position, purpose), as tensor functions.

The random numbers for a position do not depend on what was drafted before, nor on the order of calls. Speculative
sampling can therefore be compared with token-by-token sampling at the same seed. A key is hashed to a 64-bit state,
which seeds a stream of SplitMix64 (Steele, Lea & Flood 2014). All functions run on the device of their tensors and wait
for no GPU.

The functions have faster implementations: "triton" on a GPU, "compiled" on a CPU with a C compiler, and "numpy" on
another CPU, which `coupled` lacks. Their results are those of the "definition".
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fledge.ops.compiled.build import library
from fledge.ops.implementations import current_device

TOKEN, DRAFT, ACCEPT, RESIDUAL = range(4)  # purposes
IMPLS = ("definition", "numpy", "compiled", "triton")


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


def _implementation(impl: str | None, device: torch.device) -> str:
    """`impl`, or the fastest where it is None. Raises ValueError for a name that is not in IMPLS."""
    if impl is None:
        if device.type == "cpu":
            return "numpy" if library() is None else "compiled"
        return "triton" if device.type == "cuda" else "definition"
    if impl not in IMPLS:
        raise ValueError(f"the implementation {impl!r} must be one of {', '.join(IMPLS)}")
    return impl


def hash_keys(seed: Tensor, request: Tensor, position: Tensor, purpose: int, *, impl: str | None = None) -> Tensor:
    """The states of keys, int64 in the shape that `seed`, `request` and `position` (int64, of at most two dimensions)
    broadcast to. `impl` is one of IMPLS; None: the fastest. Raises ValueError for another."""
    impl = _implementation(impl, position.device)
    if impl == "numpy":
        from fledge.ops.sampling_cpu import hash_keys_cpu

        return hash_keys_cpu((seed, request, position), purpose)
    if impl == "compiled":
        from fledge.ops.compiled.draws import hash_keys_compiled

        return hash_keys_compiled(seed, request, position, purpose)
    if impl == "triton":
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


def gumbel_argmax(scores: Tensor, state: Tensor, *, impl: str | None = None) -> Tensor:
    """A sample from softmax(scores) by the Gumbel-max trick for scores [.., V] and states that broadcast to [..]: int64
    [..].

    Entries of -inf are never sampled. Rows must not contain NaN. `impl` is as in `hash_keys`.
    """
    impl = _implementation(impl, scores.device)
    if impl in ("numpy", "compiled"):
        return _on_cpu(scores, state, impl)
    if impl == "triton":
        from fledge.ops.sampling_triton import gumbel_argmax_triton

        with current_device(scores.device):
            return gumbel_argmax_triton(scores, state)
    return (scores.double() + gumbel(state, scores.shape[-1])).argmax(-1)


def coupled(
    logits_BSW: Tensor, state_BS: Tensor, temperature_B: Tensor, ids_W: Tensor | None = None, *, impl: str | None = None
) -> Tensor:
    """A draft's logits over temperature, plus the Gumbel noise with which the target draws at the same positions:
    float32 [B, S, W]. Logits of temperature 0 stay as they are.

    Their argmax is a draw from the draft's distribution, and the target's own draw is the same token with probability
    of at least (1 - d) / (1 + d), where d is the total variation distance of the two distributions (Gumbel sampling of
    Daliri, Musco & Suresh 2024, arXiv:2408.07978). The target's draws do not depend on the draft.

    `state_BS` are the states of the target's draws after each of the S rows of a request, or [B, 1] for all of them,
    `temperature_B` float64, and `ids_W` (int64) the target's ids of the draft's tokens; None if they are the same.
    `impl` is as in `hash_keys`; "numpy" is the definition.
    """
    impl = _implementation(impl, logits_BSW.device)
    if impl == "compiled":
        from fledge.ops.compiled.draws import coupled_compiled

        return coupled_compiled(logits_BSW, state_BS, temperature_B, ids_W)
    if impl == "triton":
        from fledge.ops.sampling_triton import coupled_triton

        with current_device(logits_BSW.device):
            return coupled_triton(logits_BSW, state_BS, temperature_B, ids_W)
    ids_W = torch.arange(logits_BSW.shape[-1], device=logits_BSW.device) if ids_W is None else ids_W
    noise_BSW = _uniforms_at(state_BS, ids_W).log_().neg_().log_()
    temperature_B11 = temperature_B[:, None, None]
    noisy_BSW = logits_BSW.double() / temperature_B11 - noise_BSW
    return torch.where(temperature_B11 > 0, noisy_BSW, logits_BSW.double()).float()


def filtered_argmax(
    scores_MV: Tensor, top_k: Sequence[int], top_p: Sequence[float], state_M: Tensor
) -> list[int | None]:
    """`gumbel_argmax` of rows of scores on a CPU among the tokens that top-k (0 keeps all), then top-p (1 keeps all)
    leave, where these are few; None for other rows, and where rounding could decide which tokens stay."""
    from fledge.ops.sampling_cpu import filtered_argmax_cpu

    return filtered_argmax_cpu(scores_MV, top_k, top_p, state_M)


def _on_cpu(scores: Tensor, state: Tensor, impl: str) -> Tensor:
    from fledge.ops.compiled.draws import gumbel_argmax_compiled
    from fledge.ops.sampling_cpu import gumbel_argmax_cpu

    shape, scores = scores.shape[:-1], scores.reshape(-1, scores.shape[-1])
    scores = scores if scores.dtype in (torch.float32, torch.float64) else scores.float()
    states = state.expand(shape).reshape(-1)
    fast = gumbel_argmax_compiled if impl == "compiled" and scores.dtype == torch.float32 else gumbel_argmax_cpu
    drawn = fast(scores, states)
    for i in (i for i, token in enumerate(drawn) if token is None):
        drawn[i] = int(gumbel_argmax(scores[i], states[i], impl="definition"))
    return torch.tensor(drawn, dtype=torch.int64).view(shape)
