"""The small operations of a decoder layer, fused for decoding: a few rows, one kernel launch each, no gradients.

Each has a definition in plain torch. All compute in at least float32 and round each output once; a network that rounds
in between, as transformers does in 16 bits, differs by such roundings. `impl` is "definition", "triton" (a GPU or
Triton's interpreter) or None for `best_impl`; other names raise ValueError.

Axes beyond the legend in `fledge.types`: F width of the MLP, O = (H + 2 G) d outputs of the fused projection, P slots
of the pool of keys and values, r rotated dimensions of a head.
"""

from __future__ import annotations

from torch import Tensor

from fledge.ops.decode_layer import definition
from fledge.ops.implementations import IMPLS, best_impl, use_triton

__all__ = ["IMPLS", "add_rms_norm", "best_impl", "join_embedding", "rope_to_cache", "silu_mul_fused"]


def add_rms_norm(
    x_ME: Tensor, residual_ME: Tensor | None, weight_E: Tensor, eps: float, *, impl: str | None = None
) -> tuple[Tensor, Tensor]:
    """(sum / rms(sum) * weight, sum) with sum = x + residual, both [M, E] in the dtype of x.

    The norm (RMSNorm, Zhang and Sennrich 2019, arXiv:1910.07467) reads the sum as rounded to that dtype. Without a
    residual, the sum is x itself.
    """
    if use_triton(impl, x_ME):
        from fledge.ops.decode_layer.triton import add_rms_norm_triton

        return add_rms_norm_triton(x_ME, residual_ME, weight_E, eps)
    return definition.add_rms_norm(x_ME, residual_ME, weight_E, eps)


def join_embedding(
    token_M: Tensor,
    state_ME: Tensor,
    embedding_VE: Tensor,
    token_gain_E: Tensor | None = None,
    state_gain_E: Tensor | None = None,
    eps: float = 1e-6,
    *,
    row_M: Tensor | None = None,
    impl: str | None = None,
) -> tuple[Tensor, Tensor]:
    """[embedding of the token ; state] of each row, [M, 2E] in the dtype of the states: the input of a draft. Also
    returns the states, [M, E].

    With `token_gain_E` or `state_gain_E`, the embedding or the state is normalised (RMSNorm with this gain). `token_M`
    is int64. With `row_M` (int64), row m reads state `row_M[m]`, of any number of states. Raises ValueError if the
    shapes do not belong together.
    """
    (rows, E), V = state_ME.shape, embedding_VE.shape[0]
    gains = [x for x in (token_gain_E, state_gain_E) if x is not None]
    M = (rows,) if row_M is None else row_M.shape
    if token_M.shape != M or embedding_VE.shape != (V, E) or any(x.shape != (E,) for x in gains):
        shapes = "".join(f", gain {tuple(x.shape)}" for x in gains)
        raise ValueError(
            f"tokens {tuple(token_M.shape)} do not belong with states {tuple(state_ME.shape)}, embeddings "
            f"{tuple(embedding_VE.shape)}{shapes}"
        )
    arguments = (token_M, state_ME, embedding_VE, token_gain_E, state_gain_E, eps, row_M)
    if use_triton(impl, state_ME):
        from fledge.ops.decode_layer.triton import join_embedding_triton

        return join_embedding_triton(*arguments)
    return definition.join_embedding(*arguments)


def rope_to_cache(
    qkv_MO: Tensor,
    cos_nr: Tensor,
    sin_nr: Tensor,
    heads: int,
    kv_heads: int,
    d: int,
    keys_GPd: Tensor,
    values_GPd: Tensor,
    slot_M: Tensor,
    q_norm_d: Tensor | None = None,
    k_norm_d: Tensor | None = None,
    eps: float = 1e-6,
    *,
    impl: str | None = None,
) -> Tensor:
    """Rotates queries and keys of a fused projection, writes keys and values to the cache; returns queries [M, H, d].

    A row of `qkv_MO` has the heads of the queries, then of the keys, then of the values. With `q_norm_d` or `k_norm_d`,
    each head of the queries or keys is normalised first (RMSNorm with this gain, as in Qwen3). Of each head, the first
    r dimensions are rotated as in `fledge.ops.rope.apply_rope`; cos and sin are [n, r] with equal halves, where n
    divides M and each row is that of M / n consecutive rows.
    The key and value of row m go to slot `slot_M[m]` (int32 or int64, distinct) of the pools `keys_GPd` and
    `values_GPd`, which may be strided views with contiguous heads. Raises ValueError if the shapes do not belong
    together or r is odd or larger than d.
    """
    M, (n, r) = qkv_MO.shape[0], cos_nr.shape
    if (
        qkv_MO.shape != (M, (heads + 2 * kv_heads) * d)
        or sin_nr.shape != (n, r)
        or M % max(n, 1)
        or slot_M.shape != (M,)
        or keys_GPd.shape != (kv_heads, keys_GPd.shape[1], d)
        or values_GPd.shape != keys_GPd.shape
    ):
        raise ValueError(
            f"{heads} query heads and {kv_heads} key heads of {d} do not belong with a projection "
            f"{tuple(qkv_MO.shape)}, cos {tuple(cos_nr.shape)}, sin {tuple(sin_nr.shape)}, slots "
            f"{tuple(slot_M.shape)}, keys {tuple(keys_GPd.shape)} and values {tuple(values_GPd.shape)}"
        )
    if r % 2 or not 0 < r <= d:
        raise ValueError(f"the {r} rotated dimensions must be an even number of at most {d}")
    norms = q_norm_d, k_norm_d, eps
    if use_triton(impl, qkv_MO):
        from fledge.ops.decode_layer.triton import rope_to_cache_triton

        return rope_to_cache_triton(qkv_MO, cos_nr, sin_nr, heads, keys_GPd, values_GPd, slot_M, *norms)
    return definition.rope_to_cache(qkv_MO, cos_nr, sin_nr, heads, keys_GPd, values_GPd, slot_M, *norms)


def silu_mul_fused(gate_up_M2F: Tensor, *, impl: str | None = None) -> Tensor:
    """silu(gate) * up, [M, F], of the output of a fused projection [M, 2 F] with the gate first.

    Raises ValueError if the width is odd.
    """
    if gate_up_M2F.shape[-1] % 2:
        raise ValueError(f"gate and up have one width, so theirs cannot be {gate_up_M2F.shape[-1]} in total")
    if use_triton(impl, gate_up_M2F):
        from fledge.ops.decode_layer.triton import silu_mul_fused_triton

        return silu_mul_fused_triton(gate_up_M2F)
    return definition.silu_mul_fused(gate_up_M2F)
