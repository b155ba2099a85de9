"""DFlash's draft (Chen et al. 2026, arXiv:2602.06036): a block of masked rows over the target's hidden states. With
`block_causal`, it is JetSpec's (arXiv:2606.18394), and with `block_conv` and `candidate_selector` DFlash 2's
(https://inco.ai/blog/dflash2)."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping
from typing import Any, cast

import torch
from torch import Tensor, nn

from fledge.config import CONV_GROUP, CONV_TAPS, NO_RANK, DraftConfig
from fledge.drafts.block import BlockAttend, BlockDraft, CandidateSelector, ZeroLinear
from fledge.drafts.layers import EAGER, Attend, Compute, Layer, Linear, RMSNorm, Rotation


class BlockConv(nn.Module):
    """Two depthwise convolutions over the rows of a block, one before and one after a sublayer (attention or MLP):

        y_t = Σ_o (base[o] + delta_t[o]) x_{t-o},   o = 0, 1

    x_t is row t, and the row before a block's first row is zero. `base_kernel` has a factor for each channel, [2, taps,
    E]: first of the convolution before the sublayer, then of the one after. `kernel_projection` computes both deltas
    from the sublayer's input, a factor for each group of CONV_GROUP channels. Without training, both convolutions
    return their input.
    """

    def __init__(self, width: int):
        super().__init__()
        self.base_kernel = nn.Parameter(torch.empty(2, CONV_TAPS, width))
        self.kernel_projection = ZeroLinear(width, 2 * CONV_TAPS * (width // CONV_GROUP))
        self.reset()

    @torch.no_grad()
    def reset(self) -> None:
        """Makes both convolutions return their input."""
        self.kernel_projection.reset_parameters()
        self.base_kernel.zero_()
        self.base_kernel[:, 0] = 1

    def before(self, x_ME: Tensor, rows: int) -> tuple[Tensor, Tensor]:
        """The convolution of a sublayer's input, which has blocks of `rows` rows, and the deltas for `after`."""
        delta_M2oG = self.kernel_projection(x_ME).unflatten(-1, (2, CONV_TAPS, -1))
        return convolve_blocks(x_ME, self.base_kernel[0], delta_M2oG[:, 0], rows), delta_M2oG[:, 1]

    def after(self, x_ME: Tensor, delta_MoG: Tensor, rows: int) -> Tensor:
        """The convolution of the sublayer's output."""
        return convolve_blocks(x_ME, self.base_kernel[1], delta_MoG, rows)


def convolve_blocks(x_ME: Tensor, base_oE: Tensor, delta_MoG: Tensor, rows: int) -> Tensor:
    """y_t = Σ_o (base[o] + delta_t[o]) x_{t-o} of the rows of each block. A block has `rows` rows, and zeros before its
    first row. A delta is added to the factors of E / G neighbouring channels."""
    G = delta_MoG.shape[-1]
    x_NQGc, base_oGc = x_ME.view(-1, rows, G, x_ME.shape[1] // G), base_oE.unflatten(1, (G, -1))
    factor_oNQGc = base_oGc[:, None, None] + delta_MoG.unflatten(0, (-1, rows)).movedim(2, 0)[..., None]
    y_NQGc = factor_oNQGc[0] * x_NQGc
    for o in range(1, min(len(base_oE), rows)):
        y_NQGc = y_NQGc + factor_oNQGc[o] * nn.functional.pad(x_NQGc[:, :-o], (0, 0, 0, 0, o, 0))
    return y_NQGc.view_as(x_ME)


class ConvLayer(Layer):
    """A decoder layer whose attention and MLP each stand between two convolutions over the rows of a block."""

    def __init__(self, config: DraftConfig):
        super().__init__(config, qk_norm=True)
        self.attention_conv, self.mlp_conv = BlockConv(config.hidden_size), BlockConv(config.hidden_size)

    def convolved(self, state_ME: Tensor, rotation: Rotation, attend: Attend, rows: int, compute: Compute) -> Tensor:
        """The output state [M, E] of whole blocks of `rows` rows."""
        nothing_ME = torch.zeros_like(state_ME)  # in place of the residual, which no convolution may read
        normed_ME, state_ME = compute.norm(self.input_layernorm, state_ME)
        x_ME, delta = self.attention_conv.before(normed_ME, rows)
        attended_ME, _, _ = self.self_attn(x_ME, nothing_ME, rotation, attend, compute)
        state_ME = state_ME + self.attention_conv.after(attended_ME, delta, rows)
        normed_ME, state_ME = compute.norm(self.post_attention_layernorm, state_ME)
        x_ME, delta = self.mlp_conv.before(normed_ME, rows)
        return state_ME + self.mlp_conv.after(compute.mlp(self.mlp, x_ME, nothing_ME), delta, rows)


class DFlashDraft(BlockDraft):
    """A block has a row for the anchor, which reads the anchor's embedding, and a row for each drafted token, which
    reads the mask token's. The output at row k predicts the token k places after the anchor; row 0 predicts nothing.

    The target's hidden states are joined by `fc` and normed. All layers compute keys and values of the result by their
    own projections, without the layers' input norms, and the result passes no layer. Queries and keys are normed in
    every layer. Embedding and head are the target's.

    Parameters have the names of the authors' checkpoint format, which vLLM and SGLang read.
    """

    def build(self, config: DraftConfig) -> None:
        E, eps = config.hidden_size, config.rms_norm_eps
        self.fc = Linear(config.num_aux_hidden_states * config.target_hidden_size, E, bias=False)
        self.hidden_norm = RMSNorm(E, eps)
        layer = ConvLayer if config.block_conv else functools.partial(Layer, qk_norm=True)
        self.layers = nn.ModuleList(layer(config) for _ in range(config.num_hidden_layers))
        self.norm = RMSNorm(E, eps)
        if config.candidate_selector:
            self.candidate_selector = CandidateSelector(config.vocab_size, E)
        self.causal = config.block_causal

    @torch.no_grad()
    def initialize(self, last_layer: Mapping[str, Tensor], head_VD: Tensor, embedding_VD: Tensor) -> None:
        """Draws the matrices from normal(0, 0.02); norms are 1. Convolutions return their input, and a selector the
        logits, so that a new draft with these parts drafts what a draft without the parts would."""
        for module in self.modules():
            if isinstance(module, BlockConv):
                module.reset()
            elif isinstance(module, nn.Linear) and not isinstance(module, ZeroLinear):
                module.weight.normal_(0, 0.02)
        if selector := self.selector():
            selector.initialize()

    def selector(self) -> CandidateSelector | None:
        return self.candidate_selector if self.config.candidate_selector else None

    @classmethod
    def to_file(cls, config: DraftConfig, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """See `Draft.to_file`. Engines load DFlash 2's convolutions and selector, or neither. For a draft with one of
        the two, the file has the other as it is without training, and a selector of a low rank, which
        changes no token."""
        tensors, like = dict(state), state["norm.weight"]
        if config.block_conv and not config.candidate_selector:
            shapes = dict.fromkeys(("predecessor_codebook", "successor_codebook"), (config.vocab_size, NO_RANK))
            shapes["hidden_projection.weight"] = NO_RANK, config.hidden_size
            tensors |= {f"candidate_selector.{name}": like.new_zeros(shape) for name, shape in shapes.items()}
        if config.candidate_selector and not config.block_conv:
            conv = BlockConv(config.hidden_size).to(like.dtype).state_dict()
            places = [f"layers.{i}.{x}_conv" for i in range(config.num_hidden_layers) for x in ("attention", "mlp")]
            tensors |= {f"{place}.{name}": x.clone() for place in places for name, x in conv.items()}
        return tensors

    @classmethod
    def from_file(cls, tensors: dict[str, Tensor], config: DraftConfig) -> dict[str, Tensor]:
        """See `Draft.from_file`. Leaves out the part that `to_file` has added."""
        given = super().from_file(tensors, config)
        if not config.candidate_selector:
            given = {name: x for name, x in given.items() if not name.startswith("candidate_selector.") or x.any()}
        if not config.block_conv:
            new = BlockConv(config.hidden_size).state_dict()
            kinds = {name: name.partition("_conv.")[2] for name in given}
            given = {n: x for n, x in given.items() if kinds[n] not in new or not x.equal(new[kinds[n]].to(x))}
        return given

    def window(self, layer: int) -> int | None:
        return self.config.windows[layer] if self.config.windows else None

    def block_rows(self, K: int) -> int:
        return K + 1

    def context(self, states_TAD: Tensor, position_T: Tensor, compute: Compute = EAGER) -> list[tuple[Tensor, Tensor]]:
        layers = cast(Iterable[Layer], self.layers)
        (joined_TE,) = compute.products(states_TAD.flatten(1), self.fc)
        state_TE, rotation = compute.norm(self.hidden_norm, joined_TE)[0], self.rotary(position_T, self.dtype)
        return [layer.self_attn(state_TE, state_TE, rotation, None, compute, part="keys")[1:] for layer in layers]

    def block(
        self, token_N: Tensor, position_N: Tensor, K: int, attend: BlockAttend, compute: Compute = EAGER
    ) -> Tensor:
        N, Q, mask = token_N.numel(), K + 1, self.config.mask_token_id
        assert mask is not None
        token_NQ = torch.cat([token_N[:, None], token_N.new_full((N, K), mask)], dim=1)
        position_NQ = position_N[:, None] + torch.arange(Q, device=position_N.device)
        state_ME, rotation = self.embed(token_NQ.flatten()), self.rotary(position_NQ.flatten(), self.dtype)
        for i, layer in enumerate(self.layers):

            def rows(q: Tensor, k: Any, v: Any, i: int = i) -> Tensor:
                return attend(i, *(x.unflatten(0, (N, Q)) for x in (q, k, v))).flatten(0, 1)

            if isinstance(layer, ConvLayer):
                state_ME = layer.convolved(state_ME, rotation, rows, Q, compute)
            else:
                state_ME, _, _ = layer(state_ME, None, rotation, rows, compute)
        drafted_ME = state_ME.unflatten(0, (N, Q))[:, 1:].flatten(0, 1)
        return compute.norm(self.norm, drafted_ME)[0].unflatten(0, (N, K))
