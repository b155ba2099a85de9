"""Attention of training-time test: each slot reads its document's past and its own drafted steps.

For slot t at step k the keys are K0 of the slots s <= t of the same document, made from target features, and the
slot's own keys of steps 1 .. k (EAGLE-3, section 3.2; the causal part never shrinks with k):

    out = softmax(d^-1/2 [q . K0_s for s <= t in doc(t) ; q . k_1 ; .. ; q . k_k]) [V0 ; v_1 ; .. ; v_k]

Scores and softmax are at least float32, whatever the inputs are. `ttt_attention` has three implementations, with
the values and gradients of `ttt_attention_reference`.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor
from torch.nn import functional as F

from fledge.kernels.ttt_attention.definition import ttt_attention_eager, ttt_attention_reference
from fledge.kernels.ttt_attention.inputs import BLOCK, OwnSteps, Queries, document_blocks

__all__ = [
    "BLOCK", "IMPLS", "OwnSteps", "Queries", "document_blocks", "ttt_attention", "ttt_attention_reference",
]  # fmt: skip

IMPLS = ("eager", "flex", "triton")


def ttt_attention(
    q_SHd: Tensor,
    k0_TGd: Tensor,
    v0_TGd: Tensor,
    own: Sequence[tuple[Tensor, Tensor]],
    queries: Queries,
    impl: str = "eager",
) -> Tensor:
    """Attention of S queries over T keys and J own steps, each (k, v) of shape [P_j, G, d]. Returns [S, H, d]; rows of
    q beyond the queries' come out as zeros.

    `impl`: "eager" in dense blocks of documents, "flex" by FlexAttention, "triton" by our kernels; the last two need
    a GPU. Raises ValueError for another.
    """
    S, beyond = queries.slot_S.numel(), q_SHd.shape[0] - queries.slot_S.numel()
    if impl == "eager":
        return F.pad(ttt_attention_eager(q_SHd[:S], k0_TGd, v0_TGd, own, queries), (0, 0, 0, 0, 0, beyond))
    if impl == "flex":
        from fledge.kernels.ttt_attention.flex import ttt_attention_flex

        out = ttt_attention_flex(q_SHd[:S], k0_TGd, v0_TGd, own, queries.at_JS, queries.slot_S, queries.first_S)
        return F.pad(out, (0, 0, 0, 0, 0, beyond))
    if impl == "triton":
        from fledge.kernels.ttt_attention.triton import ttt_attention_triton

        return ttt_attention_triton(q_SHd, k0_TGd, v0_TGd, own, queries.at_JS, queries.slot_S, queries.first_S)
    raise ValueError(f"attention {impl!r} is none of {', '.join(IMPLS)}")
