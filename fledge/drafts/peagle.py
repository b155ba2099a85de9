"""P-EAGLE's draft (Hui et al. 2026, arXiv:2602.01469): EAGLE-3's, which drafts all tokens of a round in one pass."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from fledge.config import DraftConfig
from fledge.drafts.eagle import EagleDraft
from fledge.drafts.layers import EAGER, Compute


class ParallelDraft(EagleDraft):
    """Steps from 1 on read a mask token and `mask_hidden` in place of the token and the hidden states that are not
    known yet."""

    def build_fc(self, config: DraftConfig) -> None:
        self.mask_hidden = nn.Parameter(torch.zeros(1, 1, config.num_aux_hidden_states * config.target_hidden_size))
        super().build_fc(config)

    def draw_weights(self) -> None:
        super().draw_weights()
        self.mask_hidden.normal_()

    def mask_inputs(self, compute: Compute = EAGER) -> tuple[Tensor, Tensor]:
        """The inputs of a one-pass draft at depths from 1 on: the mask token, int64 [1], and the fused mask state
        [1, E]. They are the same at every depth."""
        return torch.full((1,), self.config.mask_token_id, device=self.device), self.fuse(self.mask_states, compute)

    @property
    def mask_states(self) -> Tensor:
        """What a one-pass draft reads in place of the target's hidden states where they are unknown, [1, A, D]."""
        return self.mask_hidden.view(1, self.config.num_aux_hidden_states, -1)
