"""The decoder layer of a draft, as training runs it. The caller provides the attention function."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from fledge.config import DraftConfig
from fledge.ops.linear import linear
from fledge.ops.rope import apply_rope, cos_sin, rope_frequencies

if TYPE_CHECKING:
    from fledge.ops.training import SharedProducts

# attend(q [T, H, d], k [T, G, d], v [T, G, d]) -> [T, H, d]; k and v are None if the layer computes queries only
Attend = Callable[[Tensor, Tensor | None, Tensor | None], Tensor]
Part = Literal["all", "keys", "queries"]
Rotation = tuple[Tensor, Tensor]  # cos and sin, each [S, 1, rotated]


@dataclass(frozen=True)
class Compute:
    """The operations of layers in plain torch, the definition; `FusedCompute` gives the same values and gradients up to
    rounding. `recompute` recomputes the MLP's activations in the backward pass."""

    recompute: bool = False

    def products(self, x: Tensor, *projections: Linear) -> tuple[Tensor, ...]:
        """x Wᵀ + b of each projection."""
        return tuple(p(x) for p in projections)

    def add_product(self, x: Tensor, projection: Linear, residual: Tensor) -> Tensor:
        """residual + x Wᵀ + b."""
        return residual + projection(x)

    def norm(self, norm: RMSNorm, x: Tensor) -> tuple[Tensor, Tensor]:
        """The norm of x [S, E], and x itself. The caller must use the returned x: kernels sum its gradient and the
        norm's."""
        return norm(x), x

    def rotate(self, x: Tensor, rotation: Rotation) -> Tensor:
        """`apply_rope` of contiguous x."""
        return apply_rope(x, *rotation)

    def mlp(self, mlp: MLP, x: Tensor, residual: Tensor) -> Tensor:
        """residual + MLP(x), all [S, E]."""
        if self.recompute:
            return residual + checkpoint(mlp, x, use_reentrant=False, preserve_rng_state=False)
        return residual + mlp(x)

    def share(self, layer: Layer, embedded_NE: Tensor) -> SharedProducts | None:
        """The products of the embeddings of N tokens and a layer's projections, for several steps; None where each step
        computes its own."""
        return None


EAGER = Compute()


class Linear(nn.Linear):
    """`nn.Linear`, with `ops.linear` for products with few rows on a CPU."""

    def forward(self, x: Tensor) -> Tensor:
        return linear(x, self.weight, self.bias)


class RMSNorm(nn.Module):
    """x / rms(x) * weight over the last axis (Zhang & Sennrich 2019)."""

    def __init__(self, width: int, eps: float):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, self.weight.shape, self.weight, self.eps)


class Rotary(nn.Module):
    """cos and sin of the configured rotary embedding.

    The frequencies stay float32 when the draft is cast to another dtype: with 16-bit frequencies, the angles of large
    positions would be wrong by more than a turn.
    """

    def __init__(self, config: DraftConfig):
        super().__init__()
        with torch.device("cpu"):  # real values even if the draft is created on the meta device
            frequencies, self.scale = rope_frequencies(config.rope, config.head_dim)
        self.register_buffer("frequencies", frequencies, persistent=False)

    def forward(self, position_S: Tensor, dtype: torch.dtype) -> Rotation:
        """(cos, sin) at the positions, each [S, 1, rotated], computed in float32 and returned in `dtype`."""
        cos, sin = cos_sin(position_S, self.frequencies, self.scale, dtype)
        return cos[:, None], sin[:, None]

    def _apply(self, fn, recurse: bool = True):
        frequencies = self.frequencies
        super()._apply(fn, recurse)
        self.frequencies = frequencies.to(self.frequencies.device)
        return self


class EmbeddingRows(NamedTuple):
    """The rows of the products of `Compute.share` that a step's slots read, int [S]."""

    shared: SharedProducts
    rows_S: Tensor


class FusedInput(NamedTuple):
    """The input of the first layer's projections, [norm(embedding) ; norm(state)], without the concatenation."""

    embedding: EmbeddingRows
    normed_SE: Tensor


class Attention(nn.Module):
    """Grouped-query attention: the projections, RoPE, and the output projection plus the residual."""

    def __init__(self, config: DraftConfig, width: int, *, qk_norm: bool):
        super().__init__()
        self.heads, self.kv_heads, self.head_dim = (
            config.num_attention_heads,
            config.num_key_value_heads,
            config.head_dim,
        )
        bias = config.attention_bias
        self.q_proj = Linear(width, self.heads * self.head_dim, bias=bias)
        self.k_proj = Linear(width, self.kv_heads * self.head_dim, bias=bias)
        self.v_proj = Linear(width, self.kv_heads * self.head_dim, bias=bias)
        self.o_proj = Linear(self.heads * self.head_dim, config.hidden_size, bias=bias)
        if qk_norm:
            self.q_norm = RMSNorm(self.head_dim, config.rms_norm_eps)
            self.k_norm = RMSNorm(self.head_dim, config.rms_norm_eps)
        self.qk_norm = qk_norm

    def forward(
        self, x: Tensor | FusedInput, residual: Tensor, rotation: Rotation, attend: Attend, compute: Compute = EAGER,
        *, part: Part = "all",
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None]:  # fmt: skip
        """Returns (residual + output [T, E], keys [T, G, d], values [T, G, d]).

        `x` is [T, width], or [1, width] for the same input at all T positions; `residual` is [T, E]. `part` "keys"
        computes keys and values only, and the output is None. "queries" computes the output only, and keys and values
        are None.
        """
        of_queries = [] if part == "keys" else [self.q_proj]
        of_keys = [] if part == "queries" else [self.k_proj, self.v_proj]
        products = self._products(x, compute, *of_queries, *of_keys)
        k, v = self._as_keys_values(*products[-2:], rotation, compute) if of_keys else (None, None)
        if not of_queries:
            return None, k, v
        attended = attend(self._as_queries(products[0], rotation, compute), k, v)
        return compute.add_product(attended.flatten(1), self.o_proj, residual.expand(attended.shape[0], -1)), k, v

    @staticmethod
    def _products(x: Tensor | FusedInput, compute: Compute, *projections: Linear) -> tuple[Tensor, ...]:
        if isinstance(x, FusedInput):
            shared, rows_S = x.embedding
            return shared.with_rows(rows_S, x.normed_SE, *(p.weight for p in projections))
        return compute.products(x, *projections)

    def _as_queries(self, q: Tensor, rotation: Rotation, compute: Compute) -> Tensor:
        q = q.view(-1, self.heads, self.head_dim)
        return _rotated(self.q_norm(q) if self.qk_norm else q, rotation, compute)

    def _as_keys_values(self, k: Tensor, v: Tensor, rotation: Rotation, compute: Compute) -> tuple[Tensor, Tensor]:
        k, v = (x.view(-1, self.kv_heads, self.head_dim) for x in (k, v))
        k = _rotated(self.k_norm(k) if self.qk_norm else k, rotation, compute)
        return k, v.expand(k.shape[0], -1, -1).contiguous()


def _rotated(x: Tensor, rotation: Rotation, compute: Compute) -> Tensor:
    return compute.rotate(x.expand(rotation[0].shape[0], -1, -1).contiguous(), rotation)


class MLP(nn.Module):
    """down(silu(gate x) * up x), as in Llama."""

    def __init__(self, config: DraftConfig):
        super().__init__()
        E, inner, bias = config.hidden_size, config.intermediate_size, config.mlp_bias
        self.gate_proj = Linear(E, inner, bias=bias)
        self.up_proj = Linear(E, inner, bias=bias)
        self.down_proj = Linear(inner, E, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    """A draft's decoder layer.

    An ordinary decoder layer, unless `reads_embedding`: the projections then read [norm(embedding) ; norm(state)], 2E
    wide. Without `norms_input`, the projections read the state without a norm. `qk_norm` normalizes queries and keys;
    None: as the config says.
    """

    def __init__(
        self, config: DraftConfig, *, reads_embedding: bool = False, norms_input: bool = True,
        qk_norm: bool | None = None,
    ):  # fmt: skip
        super().__init__()
        E, eps = config.hidden_size, config.rms_norm_eps
        self.reads_embedding, self.norms_input = reads_embedding, norms_input
        self.norm_before_residual = config.norm_before_residual
        if self.norms_input:
            self.input_layernorm = RMSNorm(E, eps)
        if self.reads_embedding:
            self.hidden_norm = RMSNorm(E, eps)
        qk_norm = config.qk_norm if qk_norm is None else qk_norm
        self.self_attn = Attention(config, 2 * E if self.reads_embedding else E, qk_norm=qk_norm)
        self.post_attention_layernorm = RMSNorm(E, eps)
        self.mlp = MLP(config)

    def forward(
        self, state_TE: Tensor, embedding: Tensor | EmbeddingRows | None, rotation: Rotation, attend: Attend,
        compute: Compute = EAGER, *, part: Part = "all",
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None]:  # fmt: skip
        """Returns (output state [T, E], keys [T, G, d], values [T, G, d]) from the input state [T, E].

        `embedding` [T, E] is for the first layer only. `part` is as in `Attention.forward`.
        """
        x, residual = self._inputs(state_TE, embedding, compute)
        h, k, v = self.self_attn(x, residual, rotation, attend, compute, part=part)
        if h is None:
            return None, k, v
        normed, h = compute.norm(self.post_attention_layernorm, h)
        return compute.mlp(self.mlp, normed, h), k, v

    def _inputs(
        self, state_TE: Tensor, embedding: Tensor | EmbeddingRows | None, compute: Compute
    ) -> tuple[Tensor | FusedInput, Tensor]:
        """The input of the projections, [T, 2E or E], and the residual [T, E]."""
        if not self.norms_input:
            return state_TE, state_TE
        if not self.reads_embedding:
            return compute.norm(self.input_layernorm, state_TE)
        normed, state_TE = compute.norm(self.hidden_norm, state_TE)
        residual = normed if self.norm_before_residual else state_TE
        if isinstance(embedding, EmbeddingRows):
            return FusedInput(embedding, normed), residual
        return torch.cat((compute.norm(self.input_layernorm, embedding)[0], normed), dim=-1), residual
