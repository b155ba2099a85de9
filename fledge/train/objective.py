"""Training-time test on live slots: a draft's K steps as the decoder would take them (EAGLE-3, section 3.2)."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from fledge.kernels.loss import Scores, soft_target_loss
from fledge.kernels.ttt_attention import document_blocks, ttt_attention_eager
from fledge.models.draft import Draft
from fledge.types import Features, Packed, Step

# tokens of an attention block: a dense block costs its square, each block costs its launches
BLOCK = {"cpu": 512, "cuda": 2048}


def ttt(
    draft: Draft,
    row: Packed,
    features: Features,
    teacher: Callable[[Tensor], Tensor],
    *,
    steps: int,
    gamma: float = 0.8,
    keep_unseen: bool = False,
) -> Step:
    """Loss and counts of a packed row (on the CPU; features and draft wherever they are).

    `teacher` maps final hidden states [n, D] to the target's logits [n, V]. Slot t's teacher at step k is the target
    after x_{t+1+k}. A row without a live slot gives zeros.
    """
    live = row.live(steps)
    hidden = [draft.read(out)[1] for out in ttt_hidden(draft, row, features, live)]
    # teacher rows that some slot needs, ascending, and each slot's place among them
    needed = torch.cat([t + 1 + k for k, t in enumerate(live)]).unique()
    rows = [torch.searchsorted(needed, t + 1 + k) for k, t in enumerate(live)]
    last_PD = features.last_TD[needed.to(features.last_TD.device)]
    loss, scores = soft_target_loss(
        hidden,
        draft.lm_head.weight,
        rows,
        lambda s: teacher(last_PD[s]),
        draft.target_ids(),
        [gamma**k for k in range(steps)],
        keep_unseen=keep_unseen,
    )
    return _count(loss, scores, live)


def ttt_hidden(draft: Draft, row: Packed, features: Features, live: list[Tensor]) -> list[Tensor]:
    """The draft's layer output of every live slot at every step: K tensors [S_k, E].

    Keys of step 0 are made for every token; everything else only where a slot is live (a draft of several layers
    needs step 0 of all but its last layer for every token, since deeper keys come from there).
    """
    device = draft.device
    token, position = row.token_T.to(device), row.position_T.to(device)
    documents = row.documents()
    context = _Context(row.doc_T.to(device), documents)
    out: list[Tensor] = []
    for k, slots in enumerate(live):
        at = slots.to(device)
        context.enter(
            at,
            document_blocks(slots, documents, BLOCK[device.type]),
            _within(slots, live[k - 1], device) if k else None,
        )
        if k == 0:
            hidden = draft.fuse(features.aux_TAD.to(device, draft.dtype))
            after, place = step_inputs(token, position, torch.arange(token.numel(), device=device), 0)
            out.append(draft.step(after, hidden, place, context.attend, rows=at))
        else:
            fed_back = draft.read(out[-1])[0][context.kept]
            after, place = step_inputs(token, position, at, k)
            out.append(draft.step(after, fed_back, place, context.attend))
    return out


def step_inputs(token_T: Tensor, position_T: Tensor, slots_S: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Token x_{t+1+k} and rotary position pos_t + k of each slot t. (The row's last slot has no next token and is
    never live; it reads token 0, and only its own key, which nothing sees, comes of it.)"""
    after = slots_S + 1 + k
    token = torch.where(after < token_T.numel(), token_T[after.clamp_max(token_T.numel() - 1)], 0)
    return token, position_T[slots_S] + k


class _Context:
    """What slots attend to while the steps go by: K0, V0 of the row, and their own keys of the steps since."""

    def __init__(self, doc_T: Tensor, documents: list[tuple[int, int]]):
        self.doc_T, self.documents = doc_T, documents
        self.first: list[tuple[Tensor, Tensor]] = []
        self.own: list[list[tuple[Tensor, Tensor]]] = []
        self.kept: Tensor | None = None

    def enter(self, slots: Tensor, blocks: list[tuple[int, int, int, int]], kept: Tensor | None) -> None:
        """Begins a step: its slots, and where they stand among those of the step before."""
        self.slots, self.blocks, self.kept = slots, blocks, kept
        if kept is not None:
            self.own = [[(k[kept], v[kept]) for k, v in layer] for layer in self.own]

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if self.kept is None:
            self.first.append((k, v))
            self.own.append([])
            if q.shape[0] == k.shape[0]:  # a layer below the last: every token asks
                rows = torch.arange(k.shape[0])
                blocks = document_blocks(rows, self.documents, BLOCK[k.device.type])
                return ttt_attention_eager(q, k, v, [], rows.to(q.device), self.doc_T, blocks)
        else:
            self.own[layer].append((k, v))
        return ttt_attention_eager(q, *self.first[layer], self.own[layer], self.slots, self.doc_T, self.blocks)


def _within(slots: Tensor, before: Tensor, device: torch.device) -> Tensor:
    return torch.searchsorted(before, slots).to(device)


def _count(loss: Tensor, scores: Scores, live: list[Tensor]) -> Step:
    hits = [h.cpu() for h in scores.hits]
    survive, alive = [], None
    for k, (slots, hit) in enumerate(zip(live, hits, strict=True)):
        alive = hit if k == 0 else alive[torch.searchsorted(live[k - 1], slots)] & hit
        survive.append(int(alive.sum()))
    return Step(
        loss=loss,
        live_K=torch.tensor([t.numel() for t in live]),
        scored_K=scores.scored_K.cpu(),
        hit_K=torch.tensor([int(h.sum()) for h in hits]),
        survive_K=torch.tensor(survive),
        accept_K=scores.accept_K.cpu(),
        walked=walk(live, hits),
    )


def walk(live: list[Tensor], hits: list[Tensor]) -> tuple[int, int]:
    """Tokens committed and rounds taken if the row were decoded as it stands (its text being the target's own)."""
    rounds = walk_rounds(live, hits)
    return sum(rounds) + len(rounds), len(rounds)


def walk_rounds(live: list[Tensor], hits: list[Tensor]) -> list[int]:
    """Drafted tokens accepted in each round: a round at slot t accepts the run of hits that starts there, and the
    next begins at t + accepted + 1. Where a span ends, a round is cut with it."""
    if not live or not live[0].numel():
        return []
    n = int(live[0][-1]) + 1
    run = torch.zeros(n, dtype=torch.int64)
    for slots, hit in zip(reversed(live), reversed(hits), strict=True):
        run[slots] = torch.where(hit, run[slots] + 1, 0)  # length of the run of hits from step k on
    is_live = torch.zeros(n, dtype=torch.bool)
    is_live[live[0]] = True
    run, is_live = run.tolist(), is_live.tolist()
    rounds, t = [], int(live[0][0])
    while t < n:
        if is_live[t]:
            rounds.append(run[t])
            t += run[t] + 1
        else:
            t += 1
    return rounds
