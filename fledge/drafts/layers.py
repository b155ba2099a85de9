"""The decoder layer of a draft, as training runs it. The caller provides the attention function."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from fledge.config import DraftConfig
from fledge.ops.linear import linear
from fledge.ops.rope import apply_rope, cos_sin, rope_frequencies
from fledge.ops.training import GradientSums, SharedProducts, linear_products, swiglu

# attend(q [T, H, d], k [T, G, d], v [T, G, d]) -> [T, H, d]; k and v are None if the layer computes queries only
Attend = Callable[[Tensor, Tensor | None, Tensor | None], Tensor]
Part = Literal["all", "keys", "queries"]
Rotation = tuple[Tensor, Tensor]  # cos and sin, each [S, 1, rotated]


@dataclass(frozen=True)
class Compute:
    """How layers are computed. Every `Compute` gives the same values and gradients, up to rounding.

    `impl` "eager" is plain torch. "triton" uses fused kernels (on a GPU, or in Triton's interpreter), which save fewer
    activations; modules with biases stay in plain torch. `recompute` recomputes the MLP's activations in the backward
    pass. With `gradients`, the kernels add the weights' gradients there ("triton" only); None leaves them to autograd.
    """

    impl: str = "eager"
    recompute: bool = False
    gradients: GradientSums | None = None

    def __post_init__(self) -> None:
        if self.impl not in ("eager", "triton"):
            raise ValueError(f"layer implementation {self.impl!r} must be 'eager' or 'triton'")

    @property
    def uses_triton(self) -> bool:
        return self.impl == "triton"


EAGER = Compute()


class Linear(nn.Linear):
    """`nn.Linear`, with `ops.linear` for products with few rows on a CPU."""

    def forward(self, x: Tensor, compute: Compute = EAGER, residual: Tensor | None = None) -> Tensor:
        """x Wᵀ + b, plus the residual if given."""
        if compute.uses_triton and self.bias is None:
            return linear_products(x, self.weight, residual_SO=residual, gradients=compute.gradients)[0]
        out = linear(x, self.weight, self.bias)
        return out if residual is None else residual + out


class RMSNorm(nn.Module):
    """x / rms(x) * weight over the last axis (Zhang & Sennrich 2019)."""

    def __init__(self, width: int, eps: float):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, self.weight.shape, self.weight, self.eps)

    def with_input(self, x: Tensor, compute: Compute) -> tuple[Tensor, Tensor]:
        """The norm of x [S, E], and x itself. The caller must use the returned x: its gradient and the norm's are
        summed by one kernel with "triton"."""
        if compute.uses_triton:
            from fledge.ops.training_triton import norm_with_input

            return norm_with_input(x, self.weight, self.eps)
        return self(x), x


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

    def forward(self, position_S: Tensor, dtype: torch.dtype, compute: Compute = EAGER) -> Rotation:
        """(cos, sin) at the positions, each [S, 1, rotated], computed in float32 and returned in `dtype`."""
        cos, sin = cos_sin(position_S, self.frequencies, self.scale, dtype, triton=compute.uses_triton)
        return cos[:, None], sin[:, None]

    def _apply(self, fn, recurse: bool = True):
        frequencies = self.frequencies
        super()._apply(fn, recurse)
        self.frequencies = frequencies.to(self.frequencies.device)
        return self


class SharedEmbedding:
    """The embeddings [N, E] of the tokens of a chunk, which several TTT steps read.

    The first layer multiplies them by its projections once, for all steps (`products`).
    """

    def __init__(self, embedded_NE: Tensor):
        self.embedded_NE = embedded_NE
        self.products: SharedProducts | None = None  # set by the first layer at the first step

    def backward(self) -> None:
        """Backpropagates the gradients of the products, summed over the steps."""
        if self.products is not None:
            self.products.backward()


class EmbeddingRows(NamedTuple):
    """The rows of a `SharedEmbedding` that a step's slots read, int [S]."""

    shared: SharedEmbedding
    rows_S: Tensor


class FusedInput(NamedTuple):
    """The input of the first layer's projections, [norm(embedding) ; norm(state)], without the concatenation."""

    embedding: EmbeddingRows
    normed_SE: Tensor


class Attention(nn.Module):
    """Grouped-query attention: the projections, RoPE, and the output projection plus the residual."""

    def __init__(self, config: DraftConfig, width: int):
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
        if config.qk_norm:
            self.q_norm = RMSNorm(self.head_dim, config.rms_norm_eps)
            self.k_norm = RMSNorm(self.head_dim, config.rms_norm_eps)
        self.qk_norm = config.qk_norm

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
        return self.o_proj(attended.flatten(1), compute, residual.expand(attended.shape[0], -1)), k, v

    @staticmethod
    def _products(x: Tensor | FusedInput, compute: Compute, *projections: Linear) -> tuple[Tensor, ...]:
        weights = [p.weight for p in projections]
        if isinstance(x, FusedInput):
            return x.embedding.shared.products.with_rows(x.embedding.rows_S, x.normed_SE, *weights)
        if compute.uses_triton and projections[0].bias is None:
            return linear_products(x, *weights, gradients=compute.gradients)
        return tuple(p(x) for p in projections)

    def _as_queries(self, q: Tensor, rotation: Rotation, compute: Compute) -> Tensor:
        q = q.view(-1, self.heads, self.head_dim)
        return _rotated(self.q_norm(q) if self.qk_norm else q, rotation, compute)

    def _as_keys_values(self, k: Tensor, v: Tensor, rotation: Rotation, compute: Compute) -> tuple[Tensor, Tensor]:
        k, v = (x.view(-1, self.kv_heads, self.head_dim) for x in (k, v))
        k = _rotated(self.k_norm(k) if self.qk_norm else k, rotation, compute)
        return k, v.expand(k.shape[0], -1, -1).contiguous()


def _rotated(x: Tensor, rotation: Rotation, compute: Compute) -> Tensor:
    x = x.expand(rotation[0].shape[0], -1, -1).contiguous()
    if compute.uses_triton:
        from fledge.ops.training_triton import rope

        return rope(x, *rotation)
    return apply_rope(x, *rotation)


class MLP(nn.Module):
    """residual + down(silu(gate x) * up x), as in Llama."""

    def __init__(self, config: DraftConfig):
        super().__init__()
        E, inner, bias = config.hidden_size, config.intermediate_size, config.mlp_bias
        self.gate_proj = Linear(E, inner, bias=bias)
        self.up_proj = Linear(E, inner, bias=bias)
        self.down_proj = Linear(inner, E, bias=bias)

    def forward(self, x: Tensor, residual: Tensor, compute: Compute = EAGER) -> Tensor:
        """`x`, `residual` and the result are [S, E]."""
        if compute.uses_triton and self.gate_proj.bias is None:
            weights = self.gate_proj.weight, self.up_proj.weight, self.down_proj.weight
            return swiglu(x, *weights, residual, recompute=compute.recompute, gradients=compute.gradients)
        if compute.recompute:
            return residual + checkpoint(self._plain, x, use_reentrant=False, preserve_rng_state=False)
        return residual + self._plain(x)

    def _plain(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    """A draft's decoder layer.

    An ordinary decoder layer, unless `reads_embedding`: the projections then read [norm(embedding) ; norm(state)], 2E
    wide. Without `norms_input`, the projections read the state without a norm.
    """

    def __init__(self, config: DraftConfig, *, reads_embedding: bool = False, norms_input: bool = True):
        super().__init__()
        E, eps = config.hidden_size, config.rms_norm_eps
        self.reads_embedding, self.norms_input = reads_embedding, norms_input
        self.norm_before_residual = config.norm_before_residual
        if self.norms_input:
            self.input_layernorm = RMSNorm(E, eps)
        if self.reads_embedding:
            self.hidden_norm = RMSNorm(E, eps)
        self.self_attn = Attention(config, 2 * E if self.reads_embedding else E)
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
        normed, h = self.post_attention_layernorm.with_input(h, compute)
        return self.mlp(normed, h, compute), k, v

    def _inputs(
        self, state_TE: Tensor, embedding: Tensor | EmbeddingRows | None, compute: Compute
    ) -> tuple[Tensor | FusedInput, Tensor]:
        """The input of the projections, [T, 2E or E], and the residual [T, E]."""
        if not self.norms_input:
            return state_TE, state_TE
        if not self.reads_embedding:
            return self.input_layernorm.with_input(state_TE, compute)
        normed, state_TE = self.hidden_norm.with_input(state_TE, compute)
        residual = normed if self.norm_before_residual else state_TE
        if isinstance(embedding, EmbeddingRows):
            self._project_shared(embedding.shared, compute)
            return FusedInput(embedding, normed), residual
        return torch.cat((self.input_layernorm.with_input(embedding, compute)[0], normed), dim=-1), residual

    def _project_shared(self, shared: SharedEmbedding, compute: Compute) -> None:
        """Multiplies shared embeddings by the projections, unless that is done already."""
        if shared.products is None:
            attention = self.self_attn
            weights = (p.weight for p in (attention.q_proj, attention.k_proj, attention.v_proj))
            embedded = self.input_layernorm(shared.embedded_NE)
            shared.products = SharedProducts(embedded, *weights, gradients=compute.gradients)
