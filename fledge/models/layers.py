"""The decoder layer of a draft, cut where training and decoding differ: between its projections and its attention."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from fledge.config import DraftConfig
from fledge.kernels.linear import SharedProducts, accumulating_products, linear
from fledge.kernels.mlp import swiglu_mlp
from fledge.kernels.rope import apply_rope, rope_frequencies


class Linear(nn.Linear):
    """`nn.Linear` that is quick with the few rows of a round and, if it `accumulates`, with many backward passes."""

    accumulates = False

    def forward(self, x: Tensor) -> Tensor:
        if self.fused:
            return accumulating_products(x, self.weight)[0]
        return linear(x, self.weight, self.bias)

    def onto(self, residual: Tensor, x: Tensor) -> Tensor:
        """The residual plus the product."""
        if self.fused:
            return accumulating_products(x, self.weight, onto_SO=residual)[0]
        return residual + self(x)

    @property
    def fused(self) -> bool:
        return self.accumulates and self.bias is None and torch.is_grad_enabled()


class RMSNorm(nn.Module):
    """x / rms(x) * weight over the last axis (Zhang & Sennrich 2019)."""

    def __init__(self, width: int, eps: float):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps, self.impl = eps, "eager"

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, self.weight.shape, self.weight, self.eps)

    def beside(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """The norm of x [S, E], and x for those who read that too."""
        if self.impl == "triton" and torch.is_grad_enabled():
            from fledge.kernels.norm import norm_beside

            return norm_beside(x, self.weight, self.eps)
        return self(x), x


class Rotary(nn.Module):
    """cos and sin of the configured rotary embedding at given positions.

    The frequencies stay float32 whatever the draft is cast to: rounded to 16 bits, angles would be off by whole turns.
    """

    def __init__(self, config: DraftConfig):
        super().__init__()
        with torch.device("cpu"):  # numbers also where a draft is made of shapes alone
            frequencies, self.scale = rope_frequencies(config.rope, config.head_dim)
        self.register_buffer("frequencies", frequencies, persistent=False)
        self.impl = "eager"

    def forward(self, position_S: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Returns (cos, sin), each [S, 1, rotated], computed in float32 and returned in `dtype`."""
        if self.impl == "triton":
            from fledge.kernels.elementwise import cos_sin

            return cos_sin(position_S, self.frequencies, self.scale, dtype)
        angle = position_S[:, None].float() * self.frequencies
        angle = torch.cat((angle, angle), dim=-1)[:, None]
        return (angle.cos() * self.scale).to(dtype), (angle.sin() * self.scale).to(dtype)

    def _apply(self, fn, recurse: bool = True):
        exact = self.frequencies
        super()._apply(fn, recurse)
        self.frequencies = exact.to(self.frequencies.device)
        return self


class Words(NamedTuple):
    """Tokens whose embedding's share of the first layer's projections was made before: rows of those products."""

    products: SharedProducts
    rows_S: Tensor


class Joined(NamedTuple):
    """What the first layer's projections read, [norm(embedding) ; norm(hidden)], not put together."""

    words: Words
    hidden_SE: Tensor


class Attention(nn.Module):
    """Projections of grouped-query attention; what is attended to is the caller's."""

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

        self.impl = "eager"

    def queries(self, x: Tensor | Joined, rotary: tuple[Tensor, Tensor]) -> Tensor:
        """[S, width] (or one row for all) to rotated queries [S, H, d]."""
        return self._queries(*self._products(x, self.q_proj), rotary)

    def keys_values(self, x: Tensor | Joined, rotary: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """[S, width] to rotated keys and values, each [S, G, d]."""
        return self._keys_values(*self._products(x, self.k_proj, self.v_proj), rotary)

    def projections(self, x: Tensor | Joined, rotary: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values of the same rows."""
        q, k, v = self._products(x, self.q_proj, self.k_proj, self.v_proj)
        return self._queries(q, rotary), *self._keys_values(k, v, rotary)

    @staticmethod
    def _products(x: Tensor | Joined, *projections: Linear) -> tuple[Tensor, ...]:
        weights = [p.weight for p in projections]
        if isinstance(x, Joined):
            return x.words.products.beside(x.words.rows_S, x.hidden_SE, *weights)
        if projections[0].fused:
            return accumulating_products(x, *weights)
        return tuple(p(x) for p in projections)

    def _queries(self, q: Tensor, rotary: tuple[Tensor, Tensor]) -> Tensor:
        q = q.view(-1, self.heads, self.head_dim)
        return self._rotated(self.q_norm(q) if self.qk_norm else q, rotary)

    def _keys_values(self, k: Tensor, v: Tensor, rotary: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        k, v = (x.view(-1, self.kv_heads, self.head_dim) for x in (k, v))
        k = self._rotated(self.k_norm(k) if self.qk_norm else k, rotary)
        return k, v.expand(k.shape[0], -1, -1).contiguous()

    def _rotated(self, x: Tensor, rotary: tuple[Tensor, Tensor]) -> Tensor:
        x = x.expand(rotary[0].shape[0], -1, -1).contiguous()
        if self.impl == "triton":
            from fledge.kernels.elementwise import rope

            return rope(x, *rotary)
        return apply_rope(x, *rotary)


class MLP(nn.Module):
    """down(silu(gate x) * up x), the SwiGLU of Llama."""

    def __init__(self, config: DraftConfig):
        super().__init__()
        E, inner, bias = config.hidden_size, config.intermediate_size, config.mlp_bias
        self.gate_proj = Linear(E, inner, bias=bias)
        self.up_proj = Linear(E, inner, bias=bias)
        self.down_proj = Linear(inner, E, bias=bias)
        self.impl, self.recompute = "eager", False

    def onto(self, residual: Tensor, x: Tensor) -> Tensor:
        """The residual plus the MLP of x."""
        if self.impl == "triton" and self.gate_proj.bias is None:
            weights = self.gate_proj.weight, self.up_proj.weight, self.down_proj.weight
            return swiglu_mlp(x, *weights, residual, impl=self.impl, recompute=self.recompute)
        if self.recompute and torch.is_grad_enabled():
            return residual + checkpoint(self, x, use_reentrant=False, preserve_rng_state=False)
        return residual + self(x)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    """A draft's decoder layer. The first reads [norm(embedding) ; norm(hidden)], 2E wide, or in EAGLE-1 what fc made
    of both, without a norm; further ones are plain."""

    def __init__(self, config: DraftConfig, first: bool):
        super().__init__()
        E, eps, eagle1 = config.hidden_size, config.rms_norm_eps, config.method == "eagle1"
        if not (first and eagle1):
            self.input_layernorm = RMSNorm(E, eps)
        if first and not eagle1:
            self.hidden_norm = RMSNorm(E, eps)
        self.self_attn = Attention(config, 2 * E if first and not eagle1 else E)
        self.post_attention_layernorm = RMSNorm(E, eps)
        self.mlp = MLP(config)

    def close(self, attended_SHd: Tensor, residual_SE: Tensor) -> Tensor:
        """Everything after the attention: output projection, residual, MLP. Returns [S, E]."""
        h = self.self_attn.o_proj.onto(residual_SE, attended_SHd.flatten(1))
        normed, h = self.post_attention_layernorm.beside(h)
        return self.mlp.onto(h, normed)
