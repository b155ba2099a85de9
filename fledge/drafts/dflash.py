"""DFlash's draft (Chen et al. 2026, arXiv:2602.06036), and with `block_causal` JetSpec's (arXiv:2606.18394): a block of
masked rows over the target's hidden states."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import cast

import torch
from torch import Tensor, nn

from fledge.config import DraftConfig
from fledge.drafts.block import BlockAttend, BlockDraft
from fledge.drafts.layers import EAGER, Compute, Layer, Linear, RMSNorm


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
        self.layers = nn.ModuleList(Layer(config, qk_norm=True) for _ in range(config.num_hidden_layers))
        self.norm = RMSNorm(E, eps)
        self.causal = config.block_causal

    @torch.no_grad()
    def initialize(self, last_layer: Mapping[str, Tensor], head_VD: Tensor, embedding_VD: Tensor) -> None:
        """Draws the matrices from normal(0, 0.02); norms are 1."""
        for module in self.modules():
            if isinstance(module, nn.Linear):
                module.weight.normal_(0, 0.02)

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

            def rows(q: Tensor, k: Tensor, v: Tensor, i: int = i) -> Tensor:
                return attend(i, *(x.unflatten(0, (N, Q)) for x in (q, k, v))).flatten(0, 1)

            state_ME, _, _ = layer(state_ME, None, rotation, rows, compute)
        drafted_ME = state_ME.unflatten(0, (N, Q))[:, 1:].flatten(0, 1)
        return compute.norm(self.norm, drafted_ME)[0].unflatten(0, (N, K))
