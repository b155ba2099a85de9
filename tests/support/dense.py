"""A dense definition of training: it computes every slot of a row at every step, with a mask over the whole row."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from fledge.drafts.draft import Draft
from fledge.ops.attention_ttt import ttt_attention_reference
from fledge.ops.loss import loss_reference
from fledge.types import Features, Packed
from support.rows import queries_of


@dataclass
class Dense:
    """Results of the dense definition: the loss and, for each step, the live slots, the draft's logits [S_k, W] and the
    teacher's logits [S_k, V]. `ids` are the target's ids of the draft's tokens. `tops` are the tokens [S_k] that have
    to be among `ids` for a slot to be scored: the teacher's first choices, or hard labels."""

    loss: Tensor
    live: list[Tensor]
    logits: list[Tensor]
    taught: list[Tensor]
    ids: Tensor
    tops: list[Tensor]

    def scored(self) -> list[int]:
        """The number of slots per step whose teacher's first choice, or hard label, is in the draft's vocabulary."""
        return [int(torch.isin(tops, self.ids).sum()) for tops in self.tops]

    def hits(self) -> list[Tensor]:
        """For each step and slot, whether the draft's first choice is the teacher's first choice."""
        pairs = zip(self.logits, self.taught, strict=True)
        return [self.ids[logits.argmax(-1)] == taught.argmax(-1) for logits, taught in pairs]

    def survived(self) -> list[int]:
        """The number of slots per step that are hits at this step and at all steps before."""
        alive, counts = set(self.live[0].tolist()), []
        for slots, hits in zip(self.live, self.hits(), strict=True):
            alive &= set(slots[hits].tolist())
            counts.append(len(alive))
        return counts

    def accepted(self) -> list[Tensor]:
        """The sum over slots, for each step, of the probability that rejection sampling accepts the draft's token."""
        pairs = zip(self.logits, self.taught, strict=True)
        return [torch.minimum(t.softmax(-1)[:, self.ids], logits.softmax(-1)).sum() for logits, t in pairs]


def dense(
    draft: Draft, row: Packed, features: Features, teacher: Tensor, steps: int, gamma: float = 0.8, kind: str = "ce",
    keep: Callable[[list[Tensor]], list[Tensor]] = list,
) -> Dense:  # fmt: skip
    """Computes all slots of the row at every step, with masked attention over the whole row, then selects the live
    slots by their definition, and those of them that `keep` keeps. `teacher` holds the target's logits of the row,
    [T, V]."""
    T = row.token_T.numel()
    slots = torch.arange(T)
    first: list[tuple[Tensor, Tensor]] = []
    own: list[list[tuple[Tensor, Tensor]]] = [[] for _ in draft.blocks]
    hidden, outs = draft.fuse(features.aux_TAD.to(draft.dtype)), []
    for k in range(steps):

        def attend(layer: int, q: Tensor, keys: Tensor, values: Tensor, k: int = k) -> Tensor:
            (own[layer] if k else first).append((keys, values))
            return ttt_attention_reference(q, *first[layer], own[layer], queries_of(row, slots, len(own[layer])))

        token = row.token_T[(slots + 1 + k).clamp_max(T - 1)]
        out = draft.step(token, hidden, row.position_T + k, attend)
        hidden, normed = draft.split_output(out)
        outs.append(normed)
    live = keep([torch.tensor([t for t in range(T) if is_live(row, t, k)], dtype=torch.int64) for k in range(steps)])
    read = [o[t] for o, t in zip(outs, live, strict=True)]
    rows, ids = [t + 1 + k for k, t in enumerate(live)], draft.target_ids()
    label = row.token_T.roll(-1).long()  # the token after each token
    loss = loss_reference(read, draft.lm_head.weight, rows, teacher, ids, [gamma**k for k in range(steps)], kind, label)
    tops = [(label if kind == "hard" else teacher.argmax(-1))[r] for r in rows]
    return Dense(loss, live, [draft.lm_head(x) for x in read], [teacher[r] for r in rows], ids, tops)


def is_live(row: Packed, t: int, k: int) -> bool:
    """Whether x_{t+1} .. x_{t+2+k} lie in one span of the document of slot t."""
    end = t + 3 + k
    if end > row.token_T.numel():
        return False
    return (
        row.span_T[t + 1] >= 0 and len(set(row.span_T[t + 1 : end].tolist()) | {-2}) == 2 and one_document(row, t, end)
    )


def one_document(row: Packed, a: int, b: int) -> bool:
    return len(set(row.doc_T[a:b].tolist())) == 1
