"""The base class of drafts that predict a block of tokens in one pass over the target's hidden states."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from fledge.config import SELECTOR_RANK, SELECTOR_TOKENS
from fledge.drafts.draft import Draft
from fledge.drafts.layers import EAGER, Compute, Linear
from fledge.ops.device import at_least_float32
from fledge.ops.topk import largest

# attend(layer, q [N, Q, H, d], k [N, Q, G, d], v [N, Q, G, d]) -> [N, Q, H, d]: of the Q rows of N blocks
BlockAttend = Callable[[int, Tensor, Tensor, Tensor], Tensor]


class ZeroLinear(Linear):
    """A `Linear` without bias that begins with zeros."""

    def __init__(self, inputs: int, outputs: int):
        super().__init__(inputs, outputs, bias=False)

    def reset_parameters(self) -> None:
        """Draws no random numbers, so that the other parameters of a draft are those of a draft without this module."""
        nn.init.zeros_(self.weight)


class CandidateSelector(nn.Module):
    """DFlash 2's choice among the C likeliest tokens of each place of a block (https://inco.ai/blog/dflash2). Given the
    token a that was chosen at the place before, which is the anchor's token at the first place, token b has the score

        S(a, b) = U(b) + Σ_r A[a]_r (P h)_r B[b]_r

    U(b) is the token's logit, h the head's input, A and B the two codebooks [V, rank], and P `hidden_projection`. B is
    zero without training, and the scores are then the logits.
    """

    def __init__(self, vocabulary: int, width: int):
        super().__init__()
        self.predecessor_codebook = nn.Parameter(torch.empty(vocabulary, SELECTOR_RANK))
        self.successor_codebook = nn.Parameter(torch.empty(vocabulary, SELECTOR_RANK))
        self.hidden_projection = ZeroLinear(width, SELECTOR_RANK)

    @torch.no_grad()
    def initialize(self) -> None:
        """Draws A and P from normal(0, 0.02); B is 0."""
        self.predecessor_codebook.normal_(0, 0.02)
        self.hidden_projection.weight.normal_(0, 0.02)
        self.successor_codebook.zero_()

    @staticmethod
    def candidates(logits: Tensor) -> tuple[Tensor, Tensor]:
        """The ids of the likeliest tokens of each row of logits [.., V], ascending, int64, and the logits in at least
        float32, each [.., C]."""
        ids = largest(logits, min(SELECTOR_TOKENS, logits.shape[-1]))[1].sort(-1).values
        return ids, at_least_float32(logits.gather(-1, ids))

    def pairs(self, head_input_SE: Tensor, before_S: Tensor, ids_SC: Tensor) -> Tensor:
        """S(a, b) - U(b) of candidates b = `ids_SC` after tokens a = `before_S` (int64), [S, C]."""
        gate_Sr = nn.functional.embedding(before_S, self.predecessor_codebook) * self.hidden_projection(head_input_SE)
        successor_SCr = nn.functional.embedding(ids_SC, self.successor_codebook)
        return (successor_SCr @ gate_Sr[..., None])[..., 0]


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

    def selector(self) -> CandidateSelector | None:
        """The selector that chooses among the likeliest tokens of each place of a block; None: the likeliest."""
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
