"""Training-time test on live slots: a draft's K steps as the decoder would take them (EAGLE-3, section 3.2). EAGLE-1
is its first step alone, with another loss; P-EAGLE's depths are its steps with a mask in place of what came before, for
fewer slots the deeper they are.

Slots meet only in the keys of step 0. So one pass makes those for the whole row, then the slots go by in chunks, each
through all its steps, its loss and its backward pass, before the next: what is held follows the chunk, not the row.
The chunks' gradients for the keys add up, and go back through the first pass at the end.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from fledge.kernels.linear import WideSum, rounded, zeros_wide
from fledge.kernels.loss import Scores, loss_and_gradients
from fledge.kernels.precision import at_least_float32
from fledge.kernels.rows import take_rows
from fledge.kernels.transfer import to_device
from fledge.kernels.ttt_attention import BLOCK, OwnSteps, Queries, document_blocks, ttt_attention
from fledge.models.draft import Draft
from fledge.models.layers import Layer, Words
from fledge.train.cod import DropTokens
from fledge.types import Features, Packed, Step

EAGLE1_CE = 0.1  # weight of EAGLE-1's soft cross-entropy beside its regression (EAGLE, section 3.2)


@dataclass(frozen=True)
class Ways:
    """How the step is computed; every way gives the same values and gradients to rounding. The first three name
    implementations; `slots` is the most slots in flight (None: all), `recompute` makes the MLP's activations again in
    the backward pass, `chunk` is how many teacher rows the loss takes at a time. `ahead` is for a trainer on a GPU: the
    next row's features are made beside this row's step."""

    attention: str = "eager"
    loss: str = "eager"
    layers: str = "eager"
    slots: int | None = None
    recompute: bool = False
    chunk: int | None = None
    ahead: bool = False

    @property
    def rounds(self) -> bool:
        """Whether products' heights are rounded up, with rows that nothing reads."""
        return self.layers == "triton"


def ttt(
    draft: Draft, row: Packed, features: Features, teacher: Callable[[Tensor], Tensor], *, steps: int, **options: Any
) -> Step:
    """Loss and counts of a packed row; where gradients are enabled, those of the loss, a sum, are added to the draft's
    parameters. Waits for the device; see `ttt_queued` for the rest."""
    return ttt_queued(draft, row, features, teacher, steps=steps, **options).count()


def ttt_queued(
    draft: Draft,
    row: Packed,
    features: Features,
    teacher: Callable[[Tensor], Tensor],
    *,
    steps: int,
    gamma: float = 0.8,
    kind: str = "ce",
    keep_unseen: bool = False,
    noise: tuple[float, str] = (0.0, ""),
    drop: DropTokens | None = None,
    ways: Ways = Ways(),
) -> Found:
    """Forward and backward pass of a packed row (on the CPU; features and draft wherever they are) without waiting for
    the device.

    `teacher` maps final hidden states [n, D] to the target's logits [n, V]. Slot t's teacher at step k is the target
    after x_{t+1+k}. A row without a live slot gives zeros. EAGLE-1 has one step, whose output is to equal the target's
    next state as well: its loss is 1.0 SmoothL1 + 0.1 `kind`. Raises ValueError where it is asked for more. `noise` is
    how far what the draft reads is moved, and what that is drawn by (EAGLE, section 3.2). Of a P-EAGLE draft's steps,
    which weigh alike (`gamma` 1), `drop` says which slots are trained (None: all that are live).
    """
    if draft.eagle1 and steps != 1:
        raise ValueError(f"EAGLE-1 trains one step, not {steps}; more are for drafting with it")
    draft.compute(ways.layers, recompute=ways.recompute)
    first = _FirstPass(draft, row, features, ways, noise)
    live = row.live(steps)
    kept = drop.keep(row, live) if drop else live
    head = draft.head
    dhead = WideSum(head) if first.learns and head.requires_grad else None
    sums = _ManyChunks([p for p in draft.parameters() if p.requires_grad and p is not head])
    parts = []
    weights = [EAGLE1_CE] if draft.eagle1 else [gamma**k for k in range(steps)]
    for chunk in _chunks(kept, ways.slots, first.begins):
        leaves = first.leaves(chunk[0])
        needed, rows = _followed(chunk, row.token_T.numel(), rounds=ways.rounds)
        words = _words(draft, row, needed, rows)
        hidden = [read for _, read in _later_steps(draft, row, leaves, chunk, ways, words)]
        last_PD = features.last_TD.index_select(0, *to_device([needed], features.last_TD.device))
        loss, scores, dhidden = loss_and_gradients(
            hidden,
            head,
            rows,
            lambda s, last_PD=last_PD: teacher(last_PD[s]),
            draft.target_ids(),
            weights,
            kind=kind,
            keep_unseen=keep_unseen,
            chunk=ways.chunk,
            impl=ways.loss,
            dhead=dhead,
            gradients=first.learns,
        )
        if draft.eagle1:
            loss = loss + _regression(
                hidden[0], last_PD.index_select(0, *to_device([rows[0]], last_PD.device)), dhidden
            )
        if first.learns:
            torch.autograd.backward(hidden, dhidden)
            if words:
                words[0].products.backward()
            first.collect(leaves)
            sums.collect()
        parts.append((loss, scores))
    if first.learns:
        first.backward()
        sums.finish()
        if dhead is not None:
            made = dhead.total()
            head.grad = made.to(head.dtype) if head.grad is None else head.grad.add_(made)
    return Found(parts, kept, whole=kept is live)


def _regression(out_PE: Tensor, wanted_SE: Tensor, dout: list[Tensor]) -> Tensor:
    """EAGLE-1's regression: Σ_slots SmoothL1(f̂, f), a mean over the state's width, of the first S rows. Its gradient is
    added to the one there is."""
    S, E = wanted_SE.shape
    off = at_least_float32(out_PE[:S].detach()) - at_least_float32(wanted_SE.to(out_PE.device))
    if dout:
        dout[0][:S] += (off.clamp(-1, 1) / E).to(dout[0].dtype)
    return torch.where(off.abs() < 1, off.square() / 2, off.abs() - 0.5).sum() / E


@dataclass(frozen=True)
class Found:
    """What a row's steps found, still on the device: loss and scores of each chunk, and the slots trained, the `whole`
    of those live or some."""

    parts: Sequence[tuple[Tensor, Scores]]
    live: Sequence[Tensor]
    whole: bool

    def scored_K(self) -> Tensor:
        """Scored slots of each step, int64 [K]."""
        return sum(scores.scored_K for _, scores in self.parts)

    def count(self) -> Step:
        """Brings it to the host, which waits for the device."""
        steps = range(len(self.live))
        hits = torch.cat([scores.hits[k] for k in steps for _, scores in self.parts])
        hits = hits.cpu().split([t.numel() for t in self.live])
        right = torch.zeros(len(self.live), int(self.live[0][-1]) + 1 if self.live[0].numel() else 0, dtype=torch.uint8)
        for k, (slots, hit) in enumerate(zip(self.live, hits, strict=True)):
            right[k, slots] = hit.to(torch.uint8)
        return Step(
            loss=sum(loss for loss, _ in self.parts),
            live_K=torch.tensor([t.numel() for t in self.live]),
            scored_K=self.scored_K().cpu(),
            hit_K=torch.tensor([int(h.sum()) for h in hits]),
            survive_K=right.cumprod(0).sum(1),
            accept_K=sum(scores.accept_K for _, scores in self.parts).cpu(),
            walked=walk(self.live, hits) if self.whole else (0, 0),
        )


def ttt_hidden(draft: Draft, row: Packed, features: Features, live: Sequence[Tensor]) -> list[Tensor]:
    """The draft's layer output of every live slot at every step, by the plain way: K tensors [S_k, E]."""
    draft.compute("eager")
    return [out for out, _ in _later_steps(draft, row, _FirstPass(draft, row, features, Ways()).made, live, Ways())]


@dataclass
class _Keys:
    """What slots read of the first pass: the state that enters the last layer [N, E] and each layer's K0, V0
    [N, G, d], of the row's tokens from `start` on."""

    start: int
    hidden: Tensor
    keys: list[tuple[Tensor, Tensor]]

    def tensors(self) -> list[Tensor]:
        return [self.hidden, *(x for pair in self.keys for x in pair)]


class _ManyChunks:
    """Gradients of many chunks. Sums in 16 bits lose what is small beside them, so after every few chunks they go into
    float32; a row of few chunks needs none of that."""

    CHUNKS = 4

    def __init__(self, parameters: list[torch.nn.Parameter]):
        self.parameters = [p for p in parameters if p.dtype.itemsize == 2]
        self.wide: list[Tensor] = []
        self.waiting = 0

    def collect(self) -> None:
        """Counts a chunk, whose gradients were added to the parameters'."""
        self.waiting += 1
        if self.waiting > self.CHUNKS:
            self._fold()

    def _fold(self) -> None:
        self.wide = self.wide or [zeros_wide(p) for p in self.parameters]
        for p, total in zip(self.parameters, self.wide, strict=True):
            if p.grad is not None:
                total += p.grad
                p.grad = None
        self.waiting = 0

    def finish(self) -> None:
        """Leaves the whole sums in the parameters' gradients."""
        if self.wide:
            self._fold()
            for p, total in zip(self.parameters, self.wide, strict=True):
                p.grad = total.to(p.dtype)
            self.wide = []


class _FirstPass:
    """Step 0 of every token, as far as other slots read it: every layer's keys and values, and so all of the layers
    below the last."""

    def __init__(self, draft: Draft, row: Packed, features: Features, ways: Ways, noise: tuple[float, str] = (0.0, "")):
        device = draft.device
        self.begins = torch.tensor([a for a, _ in row.documents()])
        everyone = torch.arange(row.token_T.numel())
        token, position = to_device(step_inputs(row, everyone, 0), device)
        rotary = draft.rotary(position, draft.dtype)
        hidden = draft.fuse(_moved(draft.reads(features).to(device, draft.dtype), row, *noise))
        keys = []
        for i, layer in enumerate(draft.blocks):
            x, residual = draft.inputs(i, token, hidden)
            if i + 1 == len(draft.blocks):
                keys.append(layer.self_attn.keys_values(x, rotary))
                break
            queries = next(_plan(row, [everyone], 0, device)).queries

            def through(x: Tensor, residual: Tensor, layer: Layer = layer, queries: Queries = queries):
                q, k, v = layer.self_attn.projections(x, rotary)
                return k, v, layer.close(ttt_attention(q, k, v, [], queries, ways.attention), residual)

            if ways.recompute and torch.is_grad_enabled():  # of this layer nothing is held but what enters it
                *pair, hidden = checkpoint(through, x, residual, use_reentrant=False)
            else:
                *pair, hidden = through(x, residual)
            keys.append(tuple(pair))
        self.made = _Keys(0, hidden, keys)
        self.learns = torch.is_grad_enabled() and any(p.requires_grad for p in draft.parameters())
        self.gradients: list[Tensor] = []

    def leaves(self, slots: Tensor) -> _Keys:
        """What these slots read, cut out of the graph: from the first one's document on, to the last."""
        start, end = _reach(slots, self.begins)
        cut = [x.detach()[start:end].requires_grad_(x.requires_grad) for x in self.made.tensors()]
        return _Keys(start, cut[0], list(zip(cut[1::2], cut[2::2], strict=True)))

    def collect(self, leaves: _Keys) -> None:
        """Adds a chunk's gradients; those of keys that several chunks read are summed in float32."""
        whole = self.made.tensors()
        if not self.gradients:
            wide = [x.dtype if i == 0 else torch.promote_types(x.dtype, torch.float32) for i, x in enumerate(whole)]
            self.gradients = [torch.zeros_like(x, dtype=dtype) for x, dtype in zip(whole, wide, strict=True)]
        for total, leaf in zip(self.gradients, leaves.tensors(), strict=True):
            if leaf.grad is not None:
                total[leaves.start : leaves.start + leaf.shape[0]] += leaf.grad

    def backward(self) -> None:
        """Sends what was collected back to the parameters."""
        if self.gradients:
            whole = self.made.tensors()
            reached = [(x, g.to(x.dtype)) for x, g in zip(whole, self.gradients, strict=True) if x.requires_grad]
            torch.autograd.backward([x for x, _ in reached], [g for _, g in reached])


def _moved(states_TAD: Tensor, row: Packed, scale: float, key: str) -> Tensor:
    """The states plus noise, uniform in ± scale 512 / (their document's length), as EAGLE's code has it."""
    if not scale:
        return states_TAD
    seed = int.from_bytes(hashlib.sha256(key.encode()).digest()[:7], "big")
    generator = torch.Generator(states_TAD.device).manual_seed(seed)
    far = [torch.full((b - a,), scale * 512 / (b - a), dtype=states_TAD.dtype) for a, b in row.documents()]
    far = to_device([torch.cat(far)], states_TAD.device)[0]
    drawn = torch.rand(states_TAD.shape, generator=generator, device=states_TAD.device, dtype=torch.float32)
    return states_TAD + (2 * drawn - 1).to(states_TAD.dtype) * far[:, None, None]


def _words(draft: Draft, row: Packed, read: Tensor, rows: Sequence[Tensor]) -> list[Words]:
    """Every step's tokens by their place among those that the slots read: a slot's step reads what its neighbour's
    step before read, so that the embedding's products are made once for all steps. Empty where the draft makes none."""
    shared = draft.shared_words(*to_device([row.token_T[read].int()], draft.device))
    if shared is None:
        return []
    spare = read.numel() - 1  # of the rows that nothing reads, the last one's stand there
    beyond = [r.new_full((rounded(r.numel()) - r.numel(),), spare) for r in rows]
    places = [torch.cat(pair).int() for pair in zip(rows, beyond, strict=True)]
    return [Words(shared, r) for r in to_device(places, draft.device)]


def _later_steps(
    draft: Draft, row: Packed, first: _Keys, live: Sequence[Tensor], ways: Ways, words: Sequence[Words] = ()
) -> list[tuple[Tensor, Tensor]]:
    """Step 0 of the live slots from the last layer on, and all their steps after it: of each step the layer's output
    [S_k, E] and what the head reads of it."""
    own = [OwnSteps() for _ in draft.blocks]
    made: list[tuple[Tensor, Tensor]] = []
    fed_back = first.hidden
    masked = draft.masked() if draft.peagle else None
    for k, plan in enumerate(_plan(row, live, first.start, draft.device, rounds=ways.rounds)):

        def attend(layer: int, q: Tensor, keys: Tensor, values: Tensor, queries: Queries = plan.queries) -> Tensor:
            own[layer].append((keys, values))
            return ttt_attention(q, *first.keys[layer], own[layer], queries, ways.attention)

        token = words[k] if words else plan.token_P
        if k == 0:
            last, top = len(draft.blocks) - 1, draft.blocks[-1]
            x, residual = draft.inputs(last, token, take_rows(fed_back, plan.kept_P, live[0].numel()))
            q = top.self_attn.queries(x, draft.rotary(plan.position_P, draft.dtype))
            out = top.close(ttt_attention(q, *first.keys[last], [], plan.queries, ways.attention), residual)
        elif masked:
            out = draft.step(*masked, plan.position_P, attend)
        else:
            if live[k].numel() < live[k - 1].numel():
                fed_back = take_rows(fed_back, plan.kept_P, live[k].numel())
            out = draft.step(token, fed_back, plan.position_P, attend)
        fed_back, read = draft.read(out)
        made.append((out, read))
    return made


@dataclass(frozen=True)
class _Plan:
    """A step of S slots, on the device: the tokens fed, their positions, what each may read, and where its slots stand
    among those of the step before (of step 0: among the row's tokens). The last slot is repeated to P rows."""

    token_P: Tensor
    position_P: Tensor
    queries: Queries
    kept_P: Tensor


def _plan(
    row: Packed, live: Sequence[Tensor], start: int, device: torch.device, *, rounds: bool = False
) -> Iterator[_Plan]:
    """The steps of some slots, whose keys are the row's from `start` on; each made while the device is at the last."""
    end = int(live[0][-1]) + 1 if live[0].numel() else start
    documents = [(a - start, min(b, end) - start) for a, b in row.documents() if start <= a < end]
    begins, ends = torch.tensor(documents, dtype=torch.int64).view(-1, 2).T
    begin_of = torch.repeat_interleave(begins, ends - begins)
    places: list[Tensor] = []  # of a step's slots among themselves, by token
    for k, slots in enumerate(live):
        at = slots - start
        places.append(torch.zeros(end - start, dtype=torch.int64))
        places[k][at] = torch.arange(slots.numel())
        S = slots.numel()
        fill = torch.arange(rounded(S) if rounds else S).clamp_max(S - 1)
        kept = places[k - 1][at] if k else at
        of_rows = torch.stack([*step_inputs(row, slots, k), kept])[:, fill]
        of_slots = torch.stack([at, begin_of[at], *(p[at] for p in places[1:])])
        i, j = to_device([of_rows.int(), of_slots.int()], device)
        blocks = document_blocks(at, documents, BLOCK[device.type])
        yield _Plan(i[0], i[1], Queries(j[0], j[1], j[2:], blocks), i[2])


def _followed(live: Sequence[Tensor], tokens: int, *, rounds: bool = False) -> tuple[Tensor, list[Tensor]]:
    """The tokens x_{t+1+k} that some slot t reads at its step k, and after which it needs the target's distribution:
    where they stand in the row, ascending, and every step's slots' places among them. Rounded up, they end with at
    least one that nothing reads."""
    wanted = torch.zeros(tokens, dtype=torch.bool)
    for k, slots in enumerate(live):
        wanted[slots + 1 + k] = True
    place, found = wanted.cumsum(0) - 1, wanted.nonzero().squeeze(-1)
    if rounds and found.numel():
        found = torch.cat([found, found[-1:].expand(rounded(found.numel() + 1) - found.numel())])
    return found, [place[slots + 1 + k] for k, slots in enumerate(live)]


def step_inputs(row: Packed, slots_S: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Token x_{t+1+k} and rotary position pos_t + k of each slot t. (The row's last slot has no next token and is
    never live; it reads token 0, and only its own key, which nothing sees, comes of it.)"""
    after, n = slots_S + 1 + k, row.token_T.numel()
    token = torch.where(after < n, row.token_T[after.clamp_max(n - 1)], 0)
    return token, row.position_T[slots_S] + k


def _reach(slots: Tensor, begins: Tensor) -> tuple[int, int]:
    """The row's tokens that these slots may read: from the first one's document to the last slot."""
    if not slots.numel():
        return 0, 0
    return int(begins[torch.searchsorted(begins, slots[:1], right=True) - 1]), int(slots[-1]) + 1


def _chunks(live: Sequence[Tensor], slots: int | None, begins: Tensor) -> list[list[Tensor]]:
    """The live slots of every step, in runs of at most `slots`; at least one run, which may be empty. A run ends where
    a document (they begin at `begins`) ends, if that leaves it three quarters full, so that the next need not read the
    beginning of one that was cut."""
    n = live[0].numel()
    slots = slots or max(n, 1)
    firsts = torch.searchsorted(live[0], begins)  # each document's first slot, among all
    chunks, a = [], 0
    while a < n or not chunks:
        b = min(a + slots, n)
        whole = int(firsts[torch.searchsorted(firsts, b, right=True) - 1]) if n else 0
        if b < n and whole - a >= 0.75 * slots:
            b = whole
        mine = live[0][a:b]
        ends = mine[[0, -1]] + torch.tensor([0, 1]) if mine.numel() else torch.tensor([0, 0])
        cuts = [torch.searchsorted(t, ends).tolist() for t in live]
        chunks.append([t[i:j] for t, (i, j) in zip(live, cuts, strict=True)])
        a = b
    return chunks


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
