"""Training-time test on live slots: a draft's K steps as the decoder would take them (EAGLE-3, section 3.2).

EAGLE-1 is its first step alone, with another loss. P-EAGLE's depths are its steps with a mask token and a learned state
in place of the previous step's output, for fewer slots at greater depths.

Slots meet only in the keys of step 0. So a first pass computes those for the whole row; then the slots go by in
chunks, each through all its steps, its loss and its backward pass before the next, and what is held in memory follows
the chunk, not the row. The chunks' gradients for the keys are summed, and go back through the first pass at the end.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fledge.kernels.gradients import GradientSums
from fledge.kernels.linear import rounded
from fledge.kernels.loss import LossOptions, Scores, Teacher, loss_and_gradients
from fledge.kernels.precision import at_least_float32
from fledge.kernels.rows import take_rows
from fledge.kernels.transfer import to_device
from fledge.kernels.ttt_attention import OwnSteps, ttt_attention
from fledge.methods import Method
from fledge.models.draft import Draft
from fledge.models.layers import Compute, EmbeddingRows, SharedEmbedding
from fledge.train.cod import DropTokens
from fledge.train.plan import chunks_of, plan_steps, reach, step_inputs, teacher_rows
from fledge.train.walk import walk
from fledge.types import Features, Packed, Step


@dataclass(frozen=True)
class Implementation:
    """How a step is computed; every choice gives the same values and gradients up to rounding.

    `attention` ("eager", "flex", "triton"), `loss` and `layers` ("eager", "triton") name implementations. `slots` is
    the most slots in flight (None: all); `recompute` computes the MLP's activations again in the backward pass;
    `chunk` is how many teacher rows the loss takes at a time. `prefetch`, for a trainer on a GPU: the next row's
    features are computed while this row is trained on.
    """

    attention: str = "eager"
    loss: str = "eager"
    layers: str = "eager"
    slots: int | None = None
    recompute: bool = False
    chunk: int | None = None
    prefetch: bool = False

    @property
    def rounds(self) -> bool:
        """Whether products are computed with a rounded number of rows, of which the last are not read."""
        return self.layers == "triton"


@dataclass(frozen=True)
class Objective:
    """What a draft is trained for.

    `depth` is the number of TTT steps (EAGLE-1: 1); step k has weight gamma^k; `loss` is one of `kernels.loss.KINDS`.
    `keep_out_of_vocab` also trains slots whose teacher argmax is outside the draft's vocabulary. `noise` is the scale
    of EAGLE-1's uniform feature noise (EAGLE, section 3.2). `drop` says which slots of P-EAGLE's depths are trained
    (None: all that are live).
    """

    depth: int = 5
    gamma: float = 0.8
    loss: str = "ce"
    keep_out_of_vocab: bool = False
    noise: float = 0.0
    drop: DropTokens | None = None

    def weights(self, method: Method) -> list[float]:
        """The weight of each step's distillation loss."""
        return [method.cross_entropy * self.gamma**k for k in range(self.depth)]


def ttt(
    draft: Draft, row: Packed, features: Features, teacher: Callable[[Tensor], Tensor],
    objective: Objective = Objective(), implementation: Implementation = Implementation(), key: str = "",
) -> Step:  # fmt: skip
    """Loss and counts of a packed row; the gradients of the loss, a sum, are added to the draft's parameters where
    gradients are enabled. Waits for the device; otherwise as `ttt_queued`."""
    return ttt_queued(draft, row, features, teacher, objective, implementation, key).to_step()


def ttt_queued(
    draft: Draft, row: Packed, features: Features, teacher: Callable[[Tensor], Tensor],
    objective: Objective = Objective(), implementation: Implementation = Implementation(), key: str = "",
) -> RowResult:  # fmt: skip
    """Forward and backward pass of a packed row (on the CPU; features and draft anywhere) without waiting for the
    device.

    `teacher` maps final hidden states [n, D] to the target's logits [n, V]; slot t's teacher at step k is the target
    after x_{t+1+k}. A row without a live slot gives zeros. `key` is the seed of the row's noise and dropped slots.
    Raises ValueError for a depth other than the one that the method fixes (EAGLE-1: 1).
    """
    fixed = draft.family.trained_depth
    if fixed is not None and objective.depth != fixed:
        raise ValueError(f"{draft.family.title} trains {fixed} step, not {objective.depth}; set the objective's depth")
    row_pass = RowPass(draft, row, features, objective, implementation, key)
    # no name is given to a chunk, so that it is freed before the next one is computed
    parts = [
        _train_chunk(row_pass.chunk(slots), features, teacher, objective, implementation)
        for slots in row_pass.slot_chunks()
    ]
    row_pass.backward()
    return RowResult(parts, row_pass.trained, all_live=objective.drop is None)


def _train_chunk(
    chunk: Chunk, features: Features, teacher: Callable[[Tensor], Tensor], objective: Objective,
    implementation: Implementation,
) -> tuple[Tensor, Scores]:  # fmt: skip
    """Loss and backward pass of a chunk."""
    draft, gradients = chunk.row_pass.draft, chunk.row_pass.gradients
    states_PD = features.last_TD.index_select(0, *to_device([chunk.needed_P], features.last_TD.device))
    taught = Teacher(lambda s: teacher(states_PD[s]), chunk.rows, draft.target_ids(), draft.config.vocab_size)
    options = LossOptions(objective.loss, objective.keep_out_of_vocab, implementation.chunk, implementation.loss)
    loss, scores, dhidden = loss_and_gradients(
        chunk.head_inputs, draft.head, taught, objective.weights(draft.family), options,
        head_sum=gradients.head_sum if gradients else None, gradients=gradients is not None,
    )  # fmt: skip
    if draft.family.regression:
        loss = loss + _regression(chunk.head_inputs[0], states_PD, chunk.rows[0], dhidden)
    if gradients:
        chunk.backward(dhidden)
    return loss, scores


def _regression(out_PE: Tensor, states_PD: Tensor, rows_S: Tensor, dout: list[Tensor]) -> Tensor:
    """EAGLE-1's regression: Σ_slots SmoothL1(f̂, f), the mean over the state's width, of the first S outputs against
    the target's states at `rows_S`. Its gradient is added to `dout`."""
    wanted_SE = states_PD.index_select(0, *to_device([rows_S], states_PD.device))
    S, E = wanted_SE.shape
    off = at_least_float32(out_PE[:S].detach()) - at_least_float32(wanted_SE.to(out_PE.device))
    if dout:
        dout[0][:S] += (off.clamp(-1, 1) / E).to(dout[0].dtype)
    return torch.where(off.abs() < 1, off.square() / 2, off.abs() - 0.5).sum() / E


@dataclass(frozen=True)
class RowResult:
    """What a row's steps found, still on the device: loss and scores of each chunk, and the slots trained at each step
    (`all_live`: every live one)."""

    parts: Sequence[tuple[Tensor, Scores]]
    slots: Sequence[Tensor]
    all_live: bool

    def scored_K(self) -> Tensor:
        """Scored slots of each step, int64 [K]."""
        return sum(scores.scored_K for _, scores in self.parts)

    def to_step(self) -> Step:
        """Brings it to the host, which waits for the device."""
        steps = range(len(self.slots))
        hits = torch.cat([scores.hits[k] for k in steps for _, scores in self.parts])
        hits = hits.cpu().split([t.numel() for t in self.slots])
        tokens = int(self.slots[0][-1]) + 1 if self.slots[0].numel() else 0
        right = torch.zeros(len(self.slots), tokens, dtype=torch.uint8)
        for k, (slots, hit) in enumerate(zip(self.slots, hits, strict=True)):
            right[k, slots] = hit.to(torch.uint8)
        return Step(
            loss=sum(loss for loss, _ in self.parts),
            live_K=torch.tensor([t.numel() for t in self.slots]),
            scored_K=self.scored_K().cpu(),
            hit_K=torch.tensor([int(h.sum()) for h in hits]),
            survive_K=right.cumprod(0).sum(1),
            accept_K=sum(scores.accept_K for _, scores in self.parts).cpu(),
            walked=walk(self.slots, hits) if self.all_live else (0, 0),
        )


class RowPass:
    """The forward and backward passes of one row: the first pass over all its tokens, then chunks of its slots.

    `trained` are the slots trained at each step; `gradients` is where the parameters' gradients are summed, or None
    where nothing learns.
    """

    def __init__(
        self, draft: Draft, row: Packed, features: Features, objective: Objective = Objective(),
        implementation: Implementation = Implementation(), key: str = "",
    ):  # fmt: skip
        self.draft, self.row, self.implementation = draft, row, implementation
        live = row.live(objective.depth)
        self.trained = objective.drop.keep(row, live, key) if objective.drop else live
        learns = torch.is_grad_enabled() and any(p.requires_grad for p in draft.parameters())
        self.gradients = GradientSums(draft.parameters(), draft.head) if learns else None
        fused = implementation.layers == "triton"
        self.compute = Compute(implementation.layers, implementation.recompute, self.gradients if fused else None)
        self.begins = torch.tensor([a for a, _ in row.documents()])
        states_TAD = draft.reads(features).to(draft.device, draft.dtype)
        self.first = self._first_pass(_with_noise(states_TAD, row, objective.noise, key))
        self.sums: list[Tensor] = []  # gradients for what the slots read of the first pass

    def _first_pass(self, states_TAD: Tensor) -> FirstPass:
        """Step 0 of every token, as far as slots read it: every layer's keys and values, and so all of the layers
        below the last."""
        draft, everyone = self.draft, torch.arange(self.row.token_T.numel())
        token, position = to_device(step_inputs(self.row, everyone, 0), draft.device)
        # the layers below the last attend for every token
        queries = next(plan_steps(self.row, [everyone], 0, draft.device)).queries if len(draft.blocks) > 1 else None

        def attend(_layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return ttt_attention(q, k, v, [], queries, self.implementation.attention)

        state = draft.fuse(states_TAD, self.compute)
        return FirstPass(0, *draft(token, state, position, attend, self.compute, part="keys"))

    def slot_chunks(self) -> list[list[Tensor]]:
        """The slots trained at each step, in chunks of at most as many as may be in flight."""
        return chunks_of(self.trained, self.implementation.slots, self.begins)

    def chunk(self, slots: list[Tensor]) -> Chunk:
        """The forward pass of a chunk's steps."""
        first = self.first.cut(*reach(slots[0], self.begins))
        needed, rows = teacher_rows(slots, self.row.token_T.numel(), rounds=self.implementation.rounds)
        shared, by_step = self._shared_embedding(needed, rows)
        outputs, head_inputs = map(list, zip(*self._steps(first, slots, by_step), strict=True))
        return Chunk(self, slots, first, shared, needed, rows, outputs, head_inputs)

    def _shared_embedding(
        self, read_P: Tensor, rows: Sequence[Tensor]
    ) -> tuple[SharedEmbedding | None, list[EmbeddingRows]]:
        """The embeddings of the tokens read, and each step's rows among them: what a slot reads at one step its
        neighbour read at the step before, so their products are computed once for all steps."""
        draft = self.draft
        shared = draft.shared_embedding(*to_device([self.row.token_T[read_P]], draft.device), self.compute)
        if shared is None:
            return None, []
        spare = read_P.numel() - 1  # what the rows beyond the slots read; no slot reads it
        beyond = [r.new_full((rounded(r.numel()) - r.numel(),), spare) for r in rows]
        places = [torch.cat(pair).int() for pair in zip(rows, beyond, strict=True)]
        return shared, [EmbeddingRows(shared, r) for r in to_device(places, draft.device)]

    def _steps(
        self, first: FirstPass, slots: Sequence[Tensor], embedding_rows: Sequence[EmbeddingRows]
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """The slots' steps: of each the output of the last layer [S_k, E] and what the head reads of it."""
        draft, compute, attention = self.draft, self.compute, self.implementation.attention
        own = [OwnSteps() for _ in draft.blocks]
        last = len(draft.blocks) - 1
        masked = draft.masked(compute) if draft.family.one_pass else None
        fed_back = first.hidden
        plans = plan_steps(self.row, slots, first.start, draft.device, rounds=self.implementation.rounds)
        for k, plan in enumerate(plans):

            def attend(layer: int, q: Tensor, keys: Tensor | None, values: Tensor | None, plan=plan) -> Tensor:
                if keys is not None:  # at step 0 the first pass has them
                    own[layer].append((keys, values))
                return ttt_attention(q, *first.keys[layer], own[layer], plan.queries, attention)

            token = embedding_rows[k] if embedding_rows else plan.token_P
            if k == 0:
                state = take_rows(fed_back, plan.kept_P, slots[0].numel())
                out = draft(token, state, plan.position_P, attend, compute, first=last, part="queries").hidden_SE
            elif masked:
                out = draft.step(*masked, plan.position_P, attend, compute)
            else:
                if slots[k].numel() < slots[k - 1].numel():
                    fed_back = take_rows(fed_back, plan.kept_P, slots[k].numel())
                out = draft.step(token, fed_back, plan.position_P, attend, compute)
            fed_back, head_input = draft.read(out, compute)
            yield out, head_input

    def collect(self, first: FirstPass) -> None:
        """Adds a chunk's gradients for the first pass; those of keys, which several chunks read, in float32."""
        whole = self.first.tensors()
        if not self.sums:
            wide = [x.dtype if i == 0 else torch.promote_types(x.dtype, torch.float32) for i, x in enumerate(whole)]
            self.sums = [torch.zeros_like(x, dtype=dtype) for x, dtype in zip(whole, wide, strict=True)]
        for total, leaf in zip(self.sums, first.tensors(), strict=True):
            if leaf.grad is not None:
                total[first.start : first.start + leaf.shape[0]] += leaf.grad

    def backward(self) -> None:
        """Sends the chunks' gradients back through the first pass, and leaves all sums in the parameters' `.grad`."""
        if self.sums:
            whole = self.first.tensors()
            reached = [(x, g.to(x.dtype)) for x, g in zip(whole, self.sums, strict=True) if x.requires_grad]
            torch.autograd.backward([x for x, _ in reached], [g for _, g in reached])
        if self.gradients:
            self.gradients.finish()


@dataclass
class FirstPass:
    """What slots read of the first pass: the state that enters the last layer [N, E] and each layer's K0, V0
    [N, G, d], of the row's tokens from `start` on."""

    start: int
    hidden: Tensor
    keys: list[tuple[Tensor, Tensor]]

    def tensors(self) -> list[Tensor]:
        return [self.hidden, *(x for pair in self.keys for x in pair)]

    def cut(self, start: int, end: int) -> FirstPass:
        """The tokens [start, end), cut out of the graph: leaves whose gradients are collected by chunk."""
        leaves = [x.detach()[start:end].requires_grad_(x.requires_grad) for x in self.tensors()]
        return FirstPass(start, leaves[0], list(zip(leaves[1::2], leaves[2::2], strict=True)))


@dataclass
class Chunk:
    """A chunk of a row's slots after all their steps: `outputs` of the last layer and `head_inputs`, K tensors
    [S_k or more, E]; `needed_P` are the row's places whose states teach, `rows` each step's rows among them."""

    row_pass: RowPass
    slots: list[Tensor]
    first: FirstPass
    shared: SharedEmbedding | None
    needed_P: Tensor
    rows: list[Tensor]
    outputs: list[Tensor]
    head_inputs: list[Tensor]

    def backward(self, dhead_inputs: list[Tensor]) -> None:
        """The backward pass of the chunk's steps."""
        torch.autograd.backward(self.head_inputs, dhead_inputs)
        if self.shared:
            self.shared.backward()
        self.row_pass.collect(self.first)
        self.row_pass.gradients.end_chunk()


def _with_noise(states_TAD: Tensor, row: Packed, scale: float, key: str) -> Tensor:
    """The states plus noise, uniform in ± scale 512 / (their document's length), as in EAGLE's code."""
    if not scale:
        return states_TAD
    seed = int.from_bytes(hashlib.sha256(key.encode()).digest()[:7], "big")
    generator = torch.Generator(states_TAD.device).manual_seed(seed)
    bounds = [torch.full((b - a,), scale * 512 / (b - a), dtype=states_TAD.dtype) for a, b in row.documents()]
    bounds = to_device([torch.cat(bounds)], states_TAD.device)[0]
    drawn = torch.rand(states_TAD.shape, generator=generator, device=states_TAD.device, dtype=torch.float32)
    return states_TAD + (2 * drawn - 1).to(states_TAD.dtype) * bounds[:, None, None]
