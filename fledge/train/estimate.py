"""Estimates the memory of a training run by a formula, for a machine where no step can be measured (`train.memory`).

The formula counts the elements that a decoder layer saves for its backward pass, per token of a row and per slot in
flight. It is within 15 % of the steps that were measured on GPUs (`bench/results`).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from fledge.kernels.gradients import GradientSums
from fledge.kernels.loss import SLOTS_PER_GROUP, LossOptions
from fledge.kernels.ttt_attention import BLOCK
from fledge.models.draft import Draft
from fledge.targets.size import TargetBytes, model_bytes
from fledge.targets.transformers import PASS_TOKENS, TransformersTarget
from fledge.train.feed import AHEAD
from fledge.train.memory import GRADIENT_SUM_BYTES, UPDATE_BYTES, USABLE_FRACTION
from fledge.train.objective import Implementation
from fledge.train.optim import state_bytes

EAGER_SCORES = 8  # bytes per attention score that plain torch keeps
EAGER_LOGITS = 6  # float32 copies of a tile's logits that the plain loss makes


@dataclass(frozen=True)
class Machine:
    """The devices of a run's `ranks`, of type `device` ("cuda" or "cpu").

    `memory` is the bytes of a device, and `there` says whether the devices are this machine's. `apart` of the ranks
    hold only the target (0: the ranks that train hold the target). `split` splits the target's layers over its ranks.
    """

    ranks: int
    device: str
    memory: int
    there: bool
    apart: int = 0
    split: bool = False

    @property
    def usable(self) -> int:
        """The bytes of a device that training uses; a GPU's allocator needs the rest."""
        return int(self.memory * (USABLE_FRACTION if self.device == "cuda" else 1))

    @property
    def trains(self) -> int:
        """The number of ranks that train. Each keeps an equal share of the optimizer's state."""
        return self.ranks - self.apart

    @property
    def target_shares(self) -> int:
        """The number of ranks that share the target's layers; 1: each has all layers."""
        return (self.apart or self.ranks) if self.split else 1


@dataclass(frozen=True)
class Work:
    """The work of a rank in an optimizer step: `rows` rows of `tokens` tokens. `slots` are the slots trained at each
    step of the heaviest row, and `document` is the length of the longest document."""

    tokens: int
    slots: tuple[int, ...]
    document: int
    rows: int

    def resized(self, tokens: int) -> Work:
        """Rows of fewer tokens, with the same share of slots."""
        slots = tuple(-(-n * tokens // self.tokens) for n in self.slots)
        return replace(self, tokens=tokens, slots=slots, document=min(self.document, tokens))


@dataclass(frozen=True)
class Sizes:
    """The models of a run, which may be on the meta device.

    Without `runs`, the target's hidden states are on disk, and only its embedding, head and last layer are loaded.
    `staged` is the bytes, per token of a row, of rows on their way from the disk. `optimizer` is the optimizer's kind.
    """

    target: TransformersTarget
    weights: TargetBytes
    draft: Draft
    runs: bool = True
    staged: int = 0
    optimizer: str = "muon"

    @property
    def trained(self) -> int:
        """The number of trained parameters."""
        return sum(p.numel() for p in self.draft.parameters() if p.requires_grad)

    def features(self, tokens: int) -> int:
        """The bytes of the target's hidden states of a row."""
        config = self.draft.config
        return (config.num_aux_hidden_states + 1) * config.target_hidden_size * self.draft.dtype.itemsize * tokens


def memory_parts(sizes: Sizes, work: Work, impl: Implementation, machine: Machine) -> dict[str, int]:
    """The bytes of each part of the memory of a rank that trains, at the largest moment of a step."""
    runs = sizes.runs and not machine.apart
    step, target_pass = step_bytes(sizes, work, impl, machine.device), _pass_bytes(sizes, work, machine) if runs else 0
    target = _target(sizes, machine)
    if not runs:
        target = {"the target's embedding, head and last layer": sizes.weights.rest + sizes.weights.largest}
    state = -(-state_bytes(sizes.draft, sizes.optimizer) // machine.trains)
    share = f"1/{machine.trains} of the" if machine.trains > 1 else "the"
    rows = sizes.features(work.tokens) * (1 + impl.prefetch) + sizes.staged * work.tokens
    return target | {
        f"the draft's weights and {share} optimizer's state": model_bytes(sizes.draft) + state,
        f"hidden states of {'two rows' if impl.prefetch else 'a row'}": rows,
        # with prefetch, the target computes the next row while the draft trains
        "a training step": step + target_pass if impl.prefetch else max(step, target_pass),
    }


def target_memory_parts(sizes: Sizes, work: Work, machine: Machine) -> dict[str, int]:
    """The bytes of each part of the memory of a rank that holds only the target."""
    rows = -(-machine.trains // machine.apart) + AHEAD + 2  # to send (`Deliveries.sent`), and the computed row twice
    return _target(sizes, machine) | {
        "the draft's weights, to measure τ": model_bytes(sizes.draft),
        f"hidden states of {rows} rows": rows * sizes.features(work.tokens),
        "a forward pass of the target": _pass_bytes(sizes, work, machine),
    }


def _target(sizes: Sizes, machine: Machine) -> dict[str, int]:
    n = machine.target_shares
    split = f"1/{n} of the target's layers, 2 layers whole, embedding and head"
    return {"the target's weights" if n == 1 else split: sizes.weights.on_rank(n)}


def _pass_bytes(sizes: Sizes, work: Work, machine: Machine) -> int:
    """The bytes of a forward pass of the target: a layer's states, projections and MLP, captured states, and a mask."""
    config, D = sizes.draft.config, sizes.draft.config.target_hidden_size
    tokens = work.tokens if machine.target_shares > 1 else min(work.tokens, PASS_TOKENS[machine.device])
    inner = sizes.target.shape.get("intermediate_size") or 4 * D
    states = config.num_aux_hidden_states * (1 if tokens == work.tokens else 2)
    return tokens * (sizes.draft.dtype.itemsize * ((7 + states) * D + 3 * inner) + tokens)


def step_bytes(sizes: Sizes, work: Work, impl: Implementation, device: str) -> int:
    """The bytes of a training step beside weights, optimizer and hidden states, at its largest moment: the loss or the
    backward pass of a chunk of slots, the backward pass of the first pass, or the update."""
    draft, config, width = sizes.draft, sizes.draft.config, sizes.draft.dtype.itemsize
    E, inner, layers = config.hidden_size, config.intermediate_size, config.num_hidden_layers
    heads, kv = (n * config.head_dim for n in (config.num_attention_heads, config.num_key_value_heads))
    live = max(work.slots[0], 1)
    n = min(impl.slots or live, live)  # slots of a chunk
    slots, chunks = max(n * sum(work.slots) // live, 1), -(-live // n)  # slots of a chunk at all steps together

    # the head's gradient is summed in float32, and other gradients also after a number of chunks
    head = 0 if config.family.borrows_head else draft.lm_head.weight.numel()
    sums = 4 * head + GRADIENT_SUM_BYTES * sizes.trained * (work.rows > 1)
    gradients = (sizes.trained - head) * (width if chunks <= GradientSums.CHUNKS + 1 else width + 4)

    # elements that a layer saves of a slot, and what the first pass saves of each token
    layer = 4 * E + 2 * heads + 2 * kv + inner * (2 if impl.layers == "triton" else 4)
    kept = layer - 2 * inner if impl.recompute else layer
    normed = config.num_aux_hidden_states * config.target_hidden_size * (config.fc_norm or config.norm_before_fc)
    below = (layers - 1) * (E if impl.recompute else layer + E)
    first_pass = work.tokens * width * (normed + below + 6 * E + (4 * layers + 2) * kv)

    # the first pass has run the lower layers for a chunk's first step
    activations = width * (slots * (layers * kept + 3 * E) + n * (8 * E - (layers - 1) * kept))
    if impl.attention == "eager":  # a block of queries keeps scores for all keys that one of the queries reads
        block = min(BLOCK[device], work.tokens)
        keys = max(work.document - (n - min(n, block)) // 2, block)
        activations += slots * layers * config.num_attention_heads * keys * EAGER_SCORES
    backward = width * (3 * inner + 2 * E)

    # the logits of a group of tiles, and the teacher's logits of a tile
    V, W = config.vocab_size, config.draft_vocab_size
    options = LossOptions(chunk=impl.chunk, impl=impl.loss)
    rows = min(options.teacher_rows_per_chunk(V, W, len(work.slots), torch.device(device)), n)
    tile = rows * slots // n
    loss = width * (min(max(tile, SLOTS_PER_GROUP), slots) * (W + 2 * E) + rows * V)
    loss += 4 * (EAGER_LOGITS * tile * W + 2 * rows * (V + W)) * (impl.loss == "eager")

    below_backward = (backward + width * layer * impl.recompute) * (layers > 1)
    return max(
        sums + gradients * (chunks > 1) + first_pass + activations + max(loss, n * backward),
        sums + gradients + first_pass + work.tokens * below_backward,
        UPDATE_BYTES * sizes.trained,
    )
