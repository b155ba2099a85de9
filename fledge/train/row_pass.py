"""How a draft computes a packed row in training: a first pass over all tokens, then chunks of slots."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fledge.drafts.block import BlockDraft
from fledge.drafts.draft import Draft
from fledge.drafts.fused_layers import FusedCompute
from fledge.drafts.layers import Compute, EmbeddingRows
from fledge.methods import Method
from fledge.ops.attention_block import block_attention
from fledge.ops.attention_ttt import OwnSteps, ttt_attention
from fledge.ops.device import to_device
from fledge.ops.training import GradientSums, SharedProducts, padded_rows, take_rows
from fledge.train.plan import DrawAnchors, DropTokens, chunk_slots, key_range, plan_steps, step_inputs, teacher_rows
from fledge.types import Features, Packed


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
    `ops.loss.KINDS`, and `temperature` that of the losses ce and kl. `dpace` weights each slot's gradient by the
    draft's confidence in the block up to the slot (D-PACE) instead of gamma^k, for block drafts whose head is the
    target's. `keep_out_of_vocab` also scores slots whose teacher argmax is outside the draft's vocabulary.
    `feature_noise` is the scale of EAGLE-1's uniform noise on the input features (EAGLE, section 3.2; 0: none). `drop`
    samples the slots trained at each step (None: all live slots).
    """

    depth: int = 5
    gamma: float = 0.8
    loss: str = "ce"
    temperature: float = 1.0
    dpace: bool = False
    keep_out_of_vocab: bool = False
    feature_noise: float = 0.0
    drop: DropTokens | DrawAnchors | None = None

    def discounts(self) -> list[float]:
        """The weight of each of the K steps in the mean of the losses. D-PACE's weights are left out: these weights
        grow as the draft improves, so that a weighted mean could rise meanwhile."""
        return [1.0 if self.dpace else self.gamma**k for k in range(self.depth)]

    def weights(self, method: Method) -> list[float]:
        """The weight of the distillation loss at each of the K steps."""
        return [method.cross_entropy * discount for discount in self.discounts()]

    def divisors(self) -> list[float]:
        """For each of the K steps, what a scored slot adds to the number that an optimizer step's gradient is divided
        by: its weight, or with D-PACE 1 for each block. Divided by the sum of D-PACE's weights, the gradient would no
        longer be that of the expected number of accepted tokens of a block."""
        return [float(k == 0) for k in range(self.depth)] if self.dpace else self.discounts()


class RowPass:
    """The forward and backward passes of one row: the first pass over all tokens, then chunks of slots.

    A slot reads other slots only through the keys and values of the first pass, which therefore computes keys and
    values for the whole row. The chunks' gradients for the first pass are summed, and the first pass is backpropagated
    once at the end.

    `trained` are the slots trained at each step, of the `supervised` slots that are live at step 0. `gradients` sums
    the parameters' gradients; None if gradients are disabled.
    """

    def __init__(
        self, draft: Draft, row: Packed, features: Features, objective: Objective = Objective(),
        implementation: Implementation = Implementation(), key: str = "",
    ):  # fmt: skip
        self.draft, self.row, self.implementation = draft, row, implementation
        live = row.live(objective.depth)
        self.supervised = live[0].numel()
        self.trained = objective.drop.keep(row, live, key) if objective.drop else live
        learns = torch.is_grad_enabled() and any(p.requires_grad for p in draft.parameters())
        self.gradients = GradientSums(draft.parameters(), draft.head) if learns else None
        self.document_starts = torch.tensor([a for a, _ in row.documents()])
        fused, recompute = implementation.layers == "triton", implementation.recompute
        self.compute = FusedCompute(recompute, self.gradients) if fused else Compute(recompute)
        states_TAD = draft.select_states(features).to(draft.device, draft.dtype)
        self.first = self.first_pass(add_feature_noise(states_TAD, row, objective.feature_noise, key))
        self.first_gradients: list[Tensor] = []  # summed over the chunks, one for each of `first.tensors()`

    def first_pass(self, states_TAD: Tensor) -> FirstPass:
        """The state, keys and values of every token that slots may read, from the target's hidden states
        (`Draft.select_states`)."""
        raise NotImplementedError

    def steps(self, first: FirstPass, slots: list[Tensor], needed_P: Tensor, rows: list[Tensor]) -> Steps:
        """The forward pass of a chunk's steps. `slots` are the chunk's slots at each step; `needed_P` and `rows` are
        the results of `teacher_rows`."""
        raise NotImplementedError

    def slot_chunks(self) -> list[list[Tensor]]:
        """The trained slots in chunks; for each chunk, the slots of each step."""
        return chunk_slots(self.trained, self.implementation.slots, self.document_starts)

    def chunk(self, slots: list[Tensor]) -> Chunk:
        """Runs the forward pass of a chunk's steps; `slots` are the chunk's slots at each step."""
        first = self.first.cut(*key_range(slots[0], self.document_starts))
        needed, rows = teacher_rows(slots, self.row.token_T.numel(), pad_rows=self.implementation.pads_rows)
        return Chunk(self, slots, first, needed, rows, self.steps(first, slots, needed, rows))

    def collect(self, first: FirstPass) -> None:
        """Adds a chunk's gradients for the first pass. Gradients of keys and values are summed in float32, since
        several chunks may read the same keys and values."""
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


class EaglePass(RowPass):
    """Training-time test (TTT, EAGLE-3, section 3.2): K steps from every slot, and each step reads the previous step.

    EAGLE-1 trains the first step only. P-EAGLE's depths are steps that read a mask token and a learned state instead of
    the previous step's output, with fewer slots at greater depths.
    """

    def first_pass(self, states_TAD: Tensor) -> FirstPass:
        """Step 0 of every token: the complete layers below the last one, and the last layer's keys and values."""
        draft, all_tokens = self.draft, torch.arange(self.row.token_T.numel())
        token, position = to_device(step_inputs(self.row, all_tokens, 0), draft.device)
        # only the layers below the last compute attention
        queries = next(plan_steps(self.row, [all_tokens], 0, draft.device)).queries if len(draft.blocks) > 1 else None

        def attend(_layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return ttt_attention(q, k, v, [], queries, self.implementation.attention)

        state = draft.fuse(states_TAD, self.compute)
        return FirstPass(0, *draft(token, state, position, attend, self.compute, part="keys"))

    def steps(self, first: FirstPass, slots: list[Tensor], needed_P: Tensor, rows: list[Tensor]) -> Steps:
        shared, by_step = self._shared_embedding(needed_P, rows)
        outputs, head_inputs = map(list, zip(*self._steps(first, slots, by_step), strict=True))
        return Steps(outputs, head_inputs, shared)

    def _shared_embedding(
        self, needed_P: Tensor, rows: Sequence[Tensor]
    ) -> tuple[SharedProducts | None, list[EmbeddingRows]]:
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
        masked = draft.mask_inputs(compute)
        fed_back = first.state
        plans = plan_steps(self.row, slots, first.start, draft.device, pad_rows=self.implementation.pads_rows)
        for k, plan in enumerate(plans):

            def attend(layer: int, q: Tensor, keys: Tensor | None, values: Tensor | None, plan=plan) -> Tensor:
                if keys is not None:  # at step 0, keys and values come from the first pass
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


class BlockPass(RowPass):
    """A block of K tokens from every slot, in one pass (`BlockDraft`)."""

    draft: BlockDraft

    def first_pass(self, states_TAD: Tensor) -> FirstPass:
        if (asked := self.implementation.attention) not in self.draft.implementations:
            able = " or ".join(self.draft.implementations)
            raise ValueError(
                f"{self.draft.family.title} has no {asked!r} attention; train the draft with --impl {able}"
            )
        (position,) = to_device([self.row.position_T.long()], self.draft.device)
        return FirstPass(0, states_TAD[:, 0, :0], self.draft.context(states_TAD, position, self.compute))

    def steps(self, first: FirstPass, slots: list[Tensor], needed_P: Tensor, rows: list[Tensor]) -> Steps:
        draft, anchor_N = self.draft, slots[0]
        document_N = torch.searchsorted(self.document_starts, anchor_N, right=True) - 1
        start_N, end_N = self.document_starts[document_N] - first.start, anchor_N + 1 - first.start  # on the CPU
        token_N, position_N = step_inputs(self.row, anchor_N, 0)
        among = [torch.searchsorted(anchor_N, t) for t in slots]  # each step's slots among the anchors
        token_N, position_N, *among = to_device([token_N.long(), position_N.long() + 1, *among], draft.device)

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return block_attention(
                q, k, v, *first.keys[layer], start_N, end_N, causal=draft.causal, window=draft.window(layer),
                impl=self.implementation.attention,
            )  # fmt: skip

        block_NKE = draft.block(token_N, position_N, len(slots), attend, self.compute)
        head_inputs = [x_NE.index_select(0, at_S) for x_NE, at_S in zip(block_NKE.unbind(1), among, strict=True)]
        return Steps(head_inputs, head_inputs)


def row_pass(
    draft: Draft, row: Packed, features: Features, objective: Objective = Objective(),
    implementation: Implementation = Implementation(), key: str = "",
) -> RowPass:  # fmt: skip
    """The passes of a row by a draft, after the first pass."""
    kind = BlockPass if isinstance(draft, BlockDraft) else EaglePass
    return kind(draft, row, features, objective, implementation, key)


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
        """The tokens [start, end), detached from the graph: leaf tensors, which collect a chunk's gradients."""
        leaves = [x.detach()[start:end].requires_grad_(x.requires_grad) for x in self.tensors()]
        return FirstPass(start, leaves[0], list(zip(leaves[1::2], leaves[2::2], strict=True)))


@dataclass
class Steps:
    """The results of a chunk's K steps: the `outputs` of the last layer and the `head_inputs`, K tensors [S_k or more,
    E] each. `shared` are embeddings that several steps read."""

    outputs: list[Tensor]
    head_inputs: list[Tensor]
    shared: SharedProducts | None = None


@dataclass
class Chunk:
    """A chunk of slots after the forward pass of its steps.

    `slots` are the chunk's slots at each step. `needed_P` are the tokens after which the teacher is needed, and `rows`
    the indices of each step's tokens in `needed_P` (`teacher_rows`).
    """

    row_pass: RowPass
    slots: list[Tensor]
    first: FirstPass
    needed_P: Tensor
    rows: list[Tensor]
    steps: Steps

    @property
    def head_inputs(self) -> list[Tensor]:
        return self.steps.head_inputs

    def backward(self, dhead_inputs: list[Tensor]) -> None:
        """The backward pass of the chunk's steps."""
        torch.autograd.backward(self.head_inputs, dhead_inputs)
        if self.steps.shared:
            self.steps.shared.backward()
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
