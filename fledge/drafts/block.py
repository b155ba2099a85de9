"""The base class of drafts that predict a block of tokens in one pass over the target's hidden states."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from fledge.drafts.draft import Draft
from fledge.drafts.layers import EAGER, Compute

# attend(layer, q [N, Q, H, d], k [N, Q, G, d], v [N, Q, G, d]) -> [N, Q, H, d]: of the Q rows of N blocks
BlockAttend = Callable[[int, Tensor, Tensor, Tensor], Tensor]


class BlockDraft(Draft):
    """A draft that predicts the K tokens after an anchor in one pass (DFlash, arXiv:2602.06036, is one).

    Each verified token leaves keys and values, which `context` computes from the target's hidden states at the token.
    The anchor is the last token that the target has chosen. Each of a block's Q rows sees the context of all tokens
    before the anchor, and rows of the block: every row, or with `causal` only the rows up to itself. The next round
    overwrites the keys and values of a block.

    Training and decoding both call these functions, each with an `attend` of its own. Keys and values have
    `config.num_key_value_heads` heads of `config.head_dim` in `config.num_hidden_layers` layers, in the draft's dtype.
    `compute` has products, norms, rotation and MLP by kernels in training on a GPU; a network that does not use it
    trains with these in plain torch.
    """

    implementations = ("eager", "flex", "triton")
    causal = False

    def window(self, layer: int) -> int | None:
        """The sliding window of a layer in tokens: a row sees context tokens fewer than `window` places before the row.
        A window has at least as many tokens as a block has rows, and hides no row. None: no window."""
        return None

    def block_rows(self, K: int) -> int:
        """The number Q of rows of a block that drafts K tokens."""
        return K

    def rows_per_slot(self, K: int) -> int:
        """See `Draft.rows_per_slot`: a slot is an anchor."""
        return self.block_rows(K)

    def context(self, states_TAD: Tensor, position_T: Tensor, compute: Compute = EAGER) -> list[tuple[Tensor, Tensor]]:
        """Each layer's keys and values, [T, G, d], of T tokens at rotary positions `position_T` (int64), from the
        target's hidden states at them (`select_states`)."""
        raise NotImplementedError

    def block(
        self, token_N: Tensor, position_N: Tensor, K: int, attend: BlockAttend, compute: Compute = EAGER
    ) -> Tensor:
        """The head's inputs [N, K, E] for the K tokens after each of N anchors, whose target ids and rotary positions
        are given (int64)."""
        raise NotImplementedError
