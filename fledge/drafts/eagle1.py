"""EAGLE-1's draft (Li et al. 2024, arXiv:2401.15077)."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from fledge.config import DraftConfig
from fledge.drafts.eagle import EagleDraft
from fledge.drafts.layers import EAGER, Compute, EmbeddingRows, Layer, Linear


class Eagle1Draft(EagleDraft):
    """`fc` joins the token's embedding with the target's final hidden state, and the first layer reads the result as an
    ordinary decoder layer without an input norm. There is no final norm, and the head is the target's."""

    def build_fc(self, config: DraftConfig) -> None:
        self.fc = Linear(2 * config.hidden_size, config.hidden_size, bias=config.fc_bias)

    def first_layer(self, config: DraftConfig) -> Layer:
        return Layer(config, norms_input=False)

    def build_head(self, config: DraftConfig) -> None:
        """The head is the target's."""

    @classmethod
    def to_file(cls, config: DraftConfig, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """See `Draft.to_file`. The engines number the first layer."""
        tensors = {name.replace("midlayer.", "layers.0."): x for name, x in state.items()}
        # SGLang's fc has a bias, which stays uninitialized without one in the file
        return {"fc.bias": torch.zeros(config.hidden_size, dtype=state["fc.weight"].dtype)} | tensors

    @torch.no_grad()
    def initialize(self, last_layer: Mapping[str, Tensor], head_VD: Tensor, embedding_VD: Tensor) -> None:
        """Makes `fc` the identity on the input state, and draws all other weights from normal(0, 0.02): the state is
        the output of the target's final norm, unlike the input of a decoder layer."""
        self.draw_weights()
        E = self.config.hidden_size
        self.fc.weight[:, E:] += torch.eye(E)
        if self.fc.bias is not None:
            self.fc.bias.zero_()

    def fuse(self, aux_TAD: Tensor, compute: Compute = EAGER) -> Tensor:
        """The draft's input state [T, E]: the target's final hidden state itself."""
        return aux_TAD[:, 0]

    def _layer_input(
        self, token_T: Tensor | EmbeddingRows, state_TE: Tensor, compute: Compute
    ) -> tuple[Tensor | EmbeddingRows | None, Tensor]:
        return None, compute.products(torch.cat((self.embed(token_T), state_TE), dim=-1), self.fc)[0]

    def shared_embedding(self, token_N: Tensor, compute: Compute) -> None:
        """None: `fc` reads the embeddings."""
        return None

    def split_output(self, out_SE: Tensor, compute: Compute = EAGER) -> tuple[Tensor, Tensor]:
        """The last layer's output, twice: both the next step and the head read it."""
        return out_SE, out_SE
