"""Training-time test (TTT, EAGLE-3, section 3.2): a draft's K steps from every live slot, as in decoding.

EAGLE-1 trains the first step only, with another loss. P-EAGLE's depths are TTT steps that read a mask token and a
learned state instead of the previous step's output, with fewer slots at greater depths.

A slot reads other slots only through the keys and values of step 0. A first pass therefore computes those for the whole
row. Then the slots are processed in chunks. Each chunk runs all its steps, its loss and its backward pass before the
next one starts, so that activation memory depends on the chunk's size, not on the row's length. The chunks' gradients
for the first pass are summed, and the first pass is backpropagated once at the end.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fledge.drafts.draft import Draft
from fledge.drafts.layers import Compute, EmbeddingRows, SharedEmbedding
from fledge.methods import Method
from fledge.ops.gradients import GradientSums, take_rows
from fledge.ops.loss import LossOptions, Scores, Teacher, loss_and_gradients
from fledge.ops.precision import at_least_float32
from fledge.ops.products import padded_rows
from fledge.ops.transfer import to_device
from fledge.ops.ttt_attention import OwnSteps, ttt_attention
from fledge.train.cod import DropTokens
from fledge.train.plan import chunk_slots, key_range, plan_steps, step_inputs, teacher_rows
from fledge.train.simulate import simulate_decoding
from fledge.types import Features, Packed, RowSums


@dataclass(frozen=True)
class Implementation:
    """How a training step is computed. All choices give the same values and gradients up to rounding.

    `attention` ("eager", "flex", "triton"), `loss` and `layers` ("eager", "triton") name implementations. `slots` is
    the maximum number of slots in a chunk (None: all slots). `recompute` recomputes the MLP's activations in the
    backward pass. `chunk` is the number of teacher rows that the loss computes at a time (None: the loss's default).
    `prefetch` computes the next row's features while the draft trains on this row (CUDA only).
    """

    attention: str = "eager"
    loss: str = "eager"
    layers: str = "eager"
    slots: int | None = None
    recompute: bool = False
    chunk: int | None = None
    prefetch: bool = False

    @property
    def pads_rows(self) -> bool:
        """Whether the number of rows of matrix products is rounded up (`padded_rows`)."""
        return self.layers == "triton"


@dataclass(frozen=True)
class Objective:
    """The training objective.

    `depth` is the number K of TTT steps (EAGLE-1: 1), and step k has weight gamma^k. `loss` is one of
    `ops.loss.KINDS`. `keep_out_of_vocab` also scores slots whose teacher argmax is outside the draft's vocabulary.
    `feature_noise` is the scale of EAGLE-1's uniform noise on the input features (EAGLE, section 3.2; 0: none). `drop`
    samples the slots trained at each step (None: all live slots).
    """

    depth: int = 5
    gamma: float = 0.8
    loss: str = "ce"
    keep_out_of_vocab: bool = False
    feature_noise: float = 0.0
    drop: DropTokens | None = None

    def weights(self, method: Method) -> list[float]:
        """The weight of the distillation loss at each of the K steps."""
        return [method.cross_entropy * self.gamma**k for k in range(self.depth)]


def ttt(
    draft: Draft, row: Packed, features: Features, teacher: Callable[[Tensor], Tensor],
    objective: Objective = Objective(), implementation: Implementation = Implementation(), key: str = "",
) -> RowSums:  # fmt: skip
    """`ttt_queued`, with the result on the host. Synchronizes the device."""
    return ttt_queued(draft, row, features, teacher, objective, implementation, key).to_host()


def ttt_queued(
    draft: Draft, row: Packed, features: Features, teacher: Callable[[Tensor], Tensor],
    objective: Objective = Objective(), implementation: Implementation = Implementation(), key: str = "",
) -> RowResult:  # fmt: skip
    """Forward and backward pass of a packed row, without synchronizing the device.

    The gradients of the loss, a sum over slots, are added to the parameters' `.grad` if gradients are enabled. The row
    is on the CPU; features and draft may be on any devices. `teacher` maps final hidden states [n, D] to the target's
    logits [n, V]; the teacher of slot t at step k is the target's distribution after x_{t+1+k}. `key` is the seed of
    the feature noise and of the dropped slots. A row without live slots gives zeros. Raises ValueError if the
    objective's depth is not the one that the method requires (EAGLE-1: 1).
    """
    fixed = draft.family.trained_depth
    if fixed is not None and objective.depth != fixed:
        raise ValueError(
            f"{draft.family.title} trains {fixed} step, not {objective.depth}; set the objective's depth to {fixed}"
        )
    row_pass = RowPass(draft, row, features, objective, implementation, key)
    # a chunk is not assigned to a variable, so that it is freed before the next one is computed
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
    """The loss and backward pass of a chunk. Returns the loss and the scores."""
    draft, gradients = chunk.row_pass.draft, chunk.row_pass.gradients
    states_PD = features.last_TD.index_select(0, *to_device([chunk.needed_P], features.last_TD.device))
    soft_targets = Teacher(
        lambda rows: teacher(states_PD[rows]), chunk.rows, draft.target_ids(), draft.config.vocab_size
    )
    options = LossOptions(objective.loss, objective.keep_out_of_vocab, implementation.chunk, implementation.loss)
    loss, scores, dhead_inputs = loss_and_gradients(
        chunk.head_inputs, draft.head, soft_targets, objective.weights(draft.family), options,
        head_sum=gradients.head_sum if gradients else None, gradients=gradients is not None,
    )  # fmt: skip
    if draft.family.regression:
        loss = loss + _regression(chunk.head_inputs[0], states_PD, chunk.rows[0], dhead_inputs)
    if gradients:
        chunk.backward(dhead_inputs)
    return loss, scores


def _regression(out_PE: Tensor, states_PD: Tensor, rows_S: Tensor, dhead_inputs: list[Tensor]) -> Tensor:
    """EAGLE-1's regression loss Σ_slots SmoothL1(f̂, f) / E (EAGLE, section 3.2).

    f̂ are the first S rows of the draft's output and f the target's final states at `rows_S`, both E wide. The gradient
    is added to the first of `dhead_inputs`, if there are any.
    """
    target_SE = states_PD.index_select(0, *to_device([rows_S], states_PD.device))
    S, E = target_SE.shape
    error = at_least_float32(out_PE[:S].detach()) - at_least_float32(target_SE.to(out_PE.device))
    if dhead_inputs:
        dhead_inputs[0][:S] += (error.clamp(-1, 1) / E).to(dhead_inputs[0].dtype)
    return torch.where(error.abs() < 1, error.square() / 2, error.abs() - 0.5).sum() / E


@dataclass(frozen=True)
class RowResult:
    """The result of a row, on the device: `parts` are the loss and scores of each chunk, and `slots` the slots trained
    at each step. `all_live`: no live slot was dropped."""

    parts: Sequence[tuple[Tensor, Scores]]
    slots: Sequence[Tensor]
    all_live: bool

    def scored_K(self) -> Tensor:
        """The number of scored slots of each step, int64 [K]."""
        return sum(scores.scored_K for _, scores in self.parts)

    def to_host(self) -> RowSums:
        """The row's sums, with the counts on the host. Synchronizes the device."""
        steps = range(len(self.slots))
        hits = torch.cat([scores.hits[k] for k in steps for _, scores in self.parts])
        hits = hits.cpu().split([t.numel() for t in self.slots])
        tokens = int(self.slots[0][-1]) + 1 if self.slots[0].numel() else 0
        hit_KT = torch.zeros(len(self.slots), tokens, dtype=torch.uint8)
        for k, (slots, hit) in enumerate(zip(self.slots, hits, strict=True)):
            hit_KT[k, slots] = hit.to(torch.uint8)
        return RowSums(
            loss=sum(loss for loss, _ in self.parts),
            live_K=torch.tensor([t.numel() for t in self.slots]),
            scored_K=self.scored_K().cpu(),
            hit_K=torch.tensor([int(h.sum()) for h in hits]),
            survive_K=hit_KT.cumprod(0).sum(1),
            accept_K=sum(scores.accept_K for _, scores in self.parts).cpu(),
            simulated=simulate_decoding(self.slots, hits) if self.all_live else (0, 0),
        )


class RowPass:
    """The forward and backward passes of one row: the first pass over all tokens, then chunks of slots.

    `trained` are the slots trained at each step. `gradients` sums the parameters' gradients; None if gradients are
    disabled.
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
        self.document_starts = torch.tensor([a for a, _ in row.documents()])
        states_TAD = draft.select_states(features).to(draft.device, draft.dtype)
        self.first = self._first_pass(add_feature_noise(states_TAD, row, objective.feature_noise, key))
        self.first_gradients: list[Tensor] = []  # summed over the chunks, one for each of `first.tensors()`

    def _first_pass(self, states_TAD: Tensor) -> FirstPass:
        """Step 0 of every token: the complete layers below the last one, and the last layer's keys and values."""
        draft, all_tokens = self.draft, torch.arange(self.row.token_T.numel())
        token, position = to_device(step_inputs(self.row, all_tokens, 0), draft.device)
        # only the layers below the last compute attention
        queries = next(plan_steps(self.row, [all_tokens], 0, draft.device)).queries if len(draft.blocks) > 1 else None

        def attend(_layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return ttt_attention(q, k, v, [], queries, self.implementation.attention)

        state = draft.fuse(states_TAD, self.compute)
        return FirstPass(0, *draft(token, state, position, attend, self.compute, part="keys"))

    def slot_chunks(self) -> list[list[Tensor]]:
        """The trained slots in chunks; for each chunk, the slots of each step."""
        return chunk_slots(self.trained, self.implementation.slots, self.document_starts)

    def chunk(self, slots: list[Tensor]) -> Chunk:
        """Runs the forward pass of a chunk's steps; `slots` are its slots at each step."""
        first = self.first.cut(*key_range(slots[0], self.document_starts))
        needed, rows = teacher_rows(slots, self.row.token_T.numel(), pad_rows=self.implementation.pads_rows)
        shared, by_step = self._shared_embedding(needed, rows)
        outputs, head_inputs = map(list, zip(*self._steps(first, slots, by_step), strict=True))
        return Chunk(self, slots, first, shared, needed, rows, outputs, head_inputs)

    def _shared_embedding(
        self, needed_P: Tensor, rows: Sequence[Tensor]
    ) -> tuple[SharedEmbedding | None, list[EmbeddingRows]]:
        """The embeddings of the chunk's tokens, and for each step the rows of its slots among them (`teacher_rows`).

        Slot t reads at step k the token that slot t + 1 read at step k - 1, so the embeddings' products with the
        projections are computed once for all steps. (None, []) if the draft does not support this.
        """
        draft = self.draft
        shared = draft.shared_embedding(*to_device([self.row.token_T[needed_P]], draft.device), self.compute)
        if shared is None:
            return None, []
        padding_row = needed_P.numel() - 1  # belongs to no slot
        padding = [r.new_full((padded_rows(r.numel()) - r.numel(),), padding_row) for r in rows]
        padded = [torch.cat(pair).int() for pair in zip(rows, padding, strict=True)]
        return shared, [EmbeddingRows(shared, r) for r in to_device(padded, draft.device)]

    def _steps(
        self, first: FirstPass, slots: Sequence[Tensor], embedding_rows: Sequence[EmbeddingRows]
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """Runs the steps of a chunk. Yields for each the last layer's output and the head's input, [S_k or more, E]."""
        draft, compute, attention = self.draft, self.compute, self.implementation.attention
        own = [OwnSteps() for _ in draft.blocks]
        last = len(draft.blocks) - 1
        masked = draft.mask_inputs(compute) if draft.family.one_pass else None
        fed_back = first.state
        plans = plan_steps(self.row, slots, first.start, draft.device, pad_rows=self.implementation.pads_rows)
        for k, plan in enumerate(plans):

            def attend(layer: int, q: Tensor, keys: Tensor | None, values: Tensor | None, plan=plan) -> Tensor:
                if keys is not None:  # at step 0 they come from the first pass
                    own[layer].append((keys, values))
                return ttt_attention(q, *first.keys[layer], own[layer], plan.queries, attention)

            token = embedding_rows[k] if embedding_rows else plan.token_P
            if k == 0:
                state = take_rows(fed_back, plan.previous_P, slots[0].numel())
                out = draft(token, state, plan.position_P, attend, compute, first=last, part="queries").state_SE
            elif masked:
                out = draft.step(*masked, plan.position_P, attend, compute)
            else:
                if slots[k].numel() < slots[k - 1].numel():
                    fed_back = take_rows(fed_back, plan.previous_P, slots[k].numel())
                out = draft.step(token, fed_back, plan.position_P, attend, compute)
            fed_back, head_input = draft.split_output(out, compute)
            yield out, head_input

    def collect(self, first: FirstPass) -> None:
        """Adds a chunk's gradients for the first pass. Those of keys and values are summed in float32, since several
        chunks may read the same ones."""
        whole = self.first.tensors()
        if not self.first_gradients:
            wide = [x.dtype if i == 0 else torch.promote_types(x.dtype, torch.float32) for i, x in enumerate(whole)]
            self.first_gradients = [torch.zeros_like(x, dtype=dtype) for x, dtype in zip(whole, wide, strict=True)]
        for total, leaf in zip(self.first_gradients, first.tensors(), strict=True):
            if leaf.grad is not None:
                total[first.start : first.start + leaf.shape[0]] += leaf.grad

    def backward(self) -> None:
        """Backpropagates the chunks' gradients through the first pass; stores all sums in the parameters' `.grad`."""
        if self.first_gradients:
            whole = self.first.tensors()
            pairs = [(x, g.to(x.dtype)) for x, g in zip(whole, self.first_gradients, strict=True) if x.requires_grad]
            torch.autograd.backward([x for x, _ in pairs], [g for _, g in pairs])
        if self.gradients:
            self.gradients.finish()


@dataclass
class FirstPass:
    """The results of the first pass for N tokens of the row, from `start` on: `state`, the input of the last layer
    [N, E], and `keys`, each layer's (keys, values) of step 0, each [N, G, d]."""

    start: int
    state: Tensor
    keys: list[tuple[Tensor, Tensor]]

    def tensors(self) -> list[Tensor]:
        return [self.state, *(x for pair in self.keys for x in pair)]

    def cut(self, start: int, end: int) -> FirstPass:
        """The tokens [start, end), detached from the graph: leaves that collect the gradients of one chunk."""
        leaves = [x.detach()[start:end].requires_grad_(x.requires_grad) for x in self.tensors()]
        return FirstPass(start, leaves[0], list(zip(leaves[1::2], leaves[2::2], strict=True)))


@dataclass
class Chunk:
    """A chunk of slots after the forward pass of its steps.

    `slots` are its slots at each step. `outputs` of the last layer and `head_inputs` are K tensors [S_k or more, E].
    `needed_P` and `rows` are the tokens after which the teacher is needed, and each step's rows among them
    (`teacher_rows`).
    """

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


def add_feature_noise(states_TAD: Tensor, row: Packed, scale: float, key: str) -> Tensor:
    """The states plus uniform noise from ± scale · 512 / (length of the document), as in the EAGLE authors' code.

    `key` is the seed. With a scale of 0, returns the states unchanged.
    """
    if not scale:
        return states_TAD
    seed = int.from_bytes(hashlib.sha256(key.encode()).digest()[:7], "big")
    generator = torch.Generator(states_TAD.device).manual_seed(seed)
    bounds = [torch.full((b - a,), scale * 512 / (b - a), dtype=states_TAD.dtype) for a, b in row.documents()]
    bounds = to_device([torch.cat(bounds)], states_TAD.device)[0]
    drawn = torch.rand(states_TAD.shape, generator=generator, device=states_TAD.device, dtype=torch.float32)
    return states_TAD + (2 * drawn - 1).to(states_TAD.dtype) * bounds[:, None, None]
