"""Estimates the memory of a training step from the shapes of its tensors, where it cannot be measured, and the disk.

`train.memory` measures a step on the GPU that trains. This module adds up what the same step keeps there, for a machine
that is not there or before anything is loaded: between steps, and at the step's largest moment, which is the loss of a
chunk of slots (`train.objective`) or the update. Sizes follow from the tensors that each operation saves for its
backward pass; the plain implementation ("eager") saves more of them than the Triton kernels.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from fledge.config import DraftConfig
from fledge.kernels.gradients import GradientSums
from fledge.kernels.linear import padded_rows
from fledge.kernels.loss import SLOTS_PER_GROUP, LossOptions
from fledge.kernels.ttt_attention import BLOCK
from fledge.models.draft import Draft
from fledge.targets.size import TargetBytes
from fledge.targets.transformers import PASS_TOKENS, TransformersTarget
from fledge.train.feed import AHEAD
from fledge.train.memory import GRADIENT_SUM_BYTES, UPDATE_BYTES
from fledge.train.objective import Implementation
from fledge.train.optim import state_bytes

FLOAT32 = 4  # bytes
EAGER_SCORES = 8  # bytes per attention score that plain torch keeps
METRICS_BYTES = 1000  # of a line of metrics.jsonl
EAGER_LOGITS = 6  # float32 copies of a tile's logits that the plain loss makes


@dataclass(frozen=True)
class Work:
    """What a rank computes in an optimizer step: `rows` rows of `tokens` tokens. `slots` are the slots trained at each
    step of the row that has the most, `document` is the length of the longest document, and `device` the device's
    type."""

    tokens: int
    slots: tuple[int, ...]
    document: int
    rows: int
    device: str = "cuda"

    def resized(self, tokens: int) -> Work:
        """Rows of fewer tokens, with the same share of slots."""
        slots = tuple(-(-n * tokens // self.tokens) for n in self.slots)
        return replace(self, tokens=tokens, slots=slots, document=min(self.document, tokens))


@dataclass(frozen=True)
class Placement:
    """How many ranks share what: the target's layers, and the optimizer's state. 1: each rank has all of it. `apart` is
    the number of ranks that hold only the target; 0: those that train hold it."""

    target: int = 1
    optimizer: int = 1
    apart: int = 0


@dataclass(frozen=True)
class Part:
    """Something that takes memory on a rank, and its bytes."""

    name: str
    bytes: int


@dataclass(frozen=True)
class Sizes:
    """The models of a run: the target's bytes and the target itself, which may be on the meta device as the draft.
    Without `runs`, its hidden states are on disk, and only its embedding, head and last layer are loaded. `staged` are
    the bytes, for each token of a row, of the rows that are read from the disk meanwhile, and `optimizer` the `kind` of
    the optimizer."""

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


def memory_parts(sizes: Sizes, work: Work, impl: Implementation, placed: Placement) -> list[Part]:
    """What takes memory on a rank that trains, at the largest moment of a step; parts of that moment only are at the
    end."""
    trained, config, width = sizes.trained, sizes.draft.config, sizes.draft.dtype.itemsize
    target = _target_name(placed)
    state = "master weights and moments" + (f", 1/{placed.optimizer} of them" if placed.optimizer > 1 else "")
    features = _features(sizes, work)
    runs = sizes.runs and not placed.apart
    held = sizes.weights.on_rank(placed.target)
    if not runs:
        target, held = "the target's embedding, head and last layer", sizes.weights.rest + sizes.weights.largest
    kept = [
        Part(target, held),
        Part("the draft's weights", sum(p.numel() for p in sizes.draft.parameters()) * width),
        Part(state, -(-state_bytes(sizes.draft, sizes.optimizer) // placed.optimizer)),
        Part(
            "hidden states of two rows" if impl.prefetch else "hidden states of a row", features * (1 + impl.prefetch)
        ),
    ]
    if sizes.staged:
        kept.append(Part("the rows that are read from the disk", sizes.staged * work.tokens))
    passing = _target_pass(sizes.target, work, placed, config, width) if runs else 0
    forward = Part("the target's forward pass", passing)
    if impl.prefetch and runs:  # its stream has a memory pool of its own
        kept.append(forward)
    moments = [
        *row_moments(sizes, work, impl),
        [Part("gradients and their sums at the update", UPDATE_BYTES * trained)],
        [forward],
    ]
    return kept + max(moments, key=total)


def target_memory_parts(sizes: Sizes, work: Work, placed: Placement, trains: int) -> list[Part]:
    """What takes memory on a rank that holds only the target, for a number of ranks that train. `work` is that of one
    of these."""
    config, width = sizes.draft.config, sizes.draft.dtype.itemsize
    rows = -(-trains // placed.apart) + AHEAD  # that may be on their way (`Deliveries.sent`)
    return [
        Part(_target_name(placed), sizes.weights.on_rank(placed.target)),
        Part("the draft's weights, to measure τ", sum(p.numel() for p in sizes.draft.parameters()) * width),
        Part(f"hidden states of {rows} rows to send", rows * _features(sizes, work)),
        Part("those of the row that is computed, twice", 2 * _features(sizes, work)),
        Part("the target's forward pass", _target_pass(sizes.target, work, placed, config, width)),
    ]


def _target_name(placed: Placement) -> str:
    return "the target's weights" if placed.target == 1 else f"1/{placed.target} of the target's layers, 2 whole"


def _features(sizes: Sizes, work: Work) -> int:
    """The bytes of a row's features."""
    config = sizes.draft.config
    return (config.num_aux_hidden_states + 1) * config.target_hidden_size * sizes.draft.dtype.itemsize * work.tokens


def total(parts: Sequence[Part]) -> int:
    """The bytes of all parts."""
    return sum(part.bytes for part in parts)


def _target_pass(target: TransformersTarget, work: Work, placed: Placement, config: DraftConfig, width: int) -> int:
    """The bytes of a forward pass of the target: states, projections and MLP of a layer, captured states, a mask."""
    shape, D = target.shape, config.target_hidden_size
    tokens = work.tokens if placed.target > 1 else min(work.tokens, PASS_TOKENS[work.device])
    inner = shape.get("intermediate_size") or 4 * D
    states = config.num_aux_hidden_states * (1 if tokens == work.tokens else 2)
    return tokens * (width * (7 * D + 3 * inner + states * D) + tokens)


def row_moments(sizes: Sizes, work: Work, impl: Implementation) -> list[list[Part]]:
    """What a row takes beside what is kept between steps, at its moments of most memory: the loss and the backward pass
    of a chunk of slots, and the backward pass of the first pass, which comes last."""
    draft, config, width = sizes.draft, sizes.draft.config, sizes.draft.dtype.itemsize
    live, steps = max(work.slots[0], 1), len(work.slots)
    n = min(impl.slots or live, live)
    chunks = -(-live // n)
    slots = max(sum(-(-count * n // live) for count in work.slots), 1)  # of a chunk, at all steps
    head = 0 if config.family.borrows_head else draft.lm_head.weight.numel()
    others = sizes.trained - head
    sums = FLOAT32 * head + GRADIENT_SUM_BYTES * sizes.trained * (work.rows > 1)
    # the first products allocate the gradients; `GradientSums` adds them to float32 sums every few chunks
    gradients = others * (width + FLOAT32 * (width == 2 and chunks > GradientSums.CHUNKS + 1))
    activations = _activations(config, work, impl, n, slots, width)
    backward = width * n * (3 * config.intermediate_size + 2 * config.hidden_size)
    if chunks == 1:  # the loss comes before all gradients, which are made when a step's activations are freed
        backward += gradients - activations // steps
    first = Part("the first pass over the row", work.tokens * _first_pass(config, impl, width))
    return [
        [
            Part("gradients and their sums", sums + gradients * (chunks > 1)),
            first,
            Part(f"activations of {n:,} slots in flight", activations),
            Part("the loss or the backward pass", max(_loss(config, work, impl, n, slots, width), backward)),
        ],
        [
            Part("gradients and their sums", sums + gradients),
            first,
            Part("the first pass's backward pass", work.tokens * _first_backward(config, impl, width)),
        ],
    ]


def _layer(config: DraftConfig, impl: Implementation, first: bool) -> int:
    """The elements per slot that a decoder layer saves for its backward pass, its input not included."""
    E, inner = config.hidden_size, config.intermediate_size
    heads, kv = config.num_attention_heads * config.head_dim, config.num_key_value_heads * config.head_dim
    fused = impl.layers == "triton" and not config.attention_bias
    if first and config.family.fuses_embedding:
        inputs = 3 * E  # [embedding ; state], and fc's output
    elif first and not fused:
        inputs = 3 * E  # the embedding, and the norms of both
    else:
        inputs = E
    mlp = 0 if impl.recompute else (2 if impl.layers == "triton" and not config.mlp_bias else 4) * inner
    return inputs + 2 * heads + 2 * kv + 2 * E + mlp + E


def _activations(config: DraftConfig, work: Work, impl: Implementation, n: int, slots: int, width: int) -> int:
    """The bytes that the steps of a chunk of n slots save: layers, inputs and outputs, and the gradients of these."""
    E, layers = config.hidden_size, config.num_hidden_layers
    heads, kv = config.num_attention_heads * config.head_dim, config.num_key_value_heads * config.head_dim
    first, last = _layer(config, impl, first=True), _layer(config, impl, first=False)
    # step 0 runs the last layer only; the first pass has run the others
    each = first + (layers - 1) * last
    saved = (slots - n) * each + n * (first if layers == 1 else last)
    bytes_ = width * (saved + slots * (2 * E + E)) + n * config.target_hidden_size * width
    if impl.layers == "triton" and not config.family.fuses_embedding and not config.attention_bias:
        bytes_ += n * ((2 * E + heads + 2 * kv) * width + (heads + 2 * kv) * FLOAT32)  # shared embeddings
    if impl.attention == "eager":
        block = min(BLOCK[work.device], work.tokens)  # queries, each with all keys that one of them reads
        keys = max(work.document - (n - min(n, block)) // 2, block)
        bytes_ += slots * layers * config.num_attention_heads * keys * EAGER_SCORES
    return bytes_


def _first_pass(config: DraftConfig, impl: Implementation, width: int) -> int:
    """The bytes per token that the first pass saves, the gradients of its results included."""
    E, layers = config.hidden_size, config.num_hidden_layers
    kv = config.num_key_value_heads * config.head_dim
    fused = config.num_aux_hidden_states * config.target_hidden_size * (config.fc_norm or config.norm_before_fc)
    below = layers - 1  # complete layers; with recompute, only their inputs are saved
    whole = below * E if impl.recompute else sum(_layer(config, impl, first=i == 0) + E for i in range(below))
    last = (4 if layers == 1 else 2) * E + 2 * kv
    return width * (fused + whole + last + E) + layers * 2 * kv * FLOAT32


def _first_backward(config: DraftConfig, impl: Implementation, width: int) -> int:
    """The bytes per token that the backward pass of a complete layer of the first pass takes."""
    if config.num_hidden_layers == 1:
        return width * 4 * config.hidden_size
    again = _layer(config, replace(impl, recompute=False), first=False) if impl.recompute else 0
    return width * (again + 3 * config.intermediate_size + 2 * config.hidden_size)


def _loss(config: DraftConfig, work: Work, impl: Implementation, n: int, slots: int, width: int) -> int:
    """The bytes of the logits of a group of tiles, and of the teacher's for one of them."""
    V, W, E = config.vocab_size, config.draft_vocab_size, config.hidden_size
    options = LossOptions(chunk=impl.chunk, impl=impl.loss)
    rows = min(options.teacher_rows_per_chunk(V, W, len(work.slots), torch.device(work.device)), n)
    tile = min(-(-rows * slots // n), slots)
    group = min(padded_rows(tile * -(-SLOTS_PER_GROUP // tile)), padded_rows(slots))
    copies = FLOAT32 * (EAGER_LOGITS * tile * W + 2 * rows * (V + W)) if impl.loss == "eager" else 0
    return width * (group * (W + 2 * E) + rows * V) + copies


def disk_parts(draft: Draft, steps: int, optimizer: str) -> list[Part]:
    """What a run writes: drafts in bfloat16, with a copy while a new one replaces the old, checkpoints likewise, and
    the metrics of all steps. `optimizer` is the `kind` of the optimizer."""
    config = draft.config
    parameters = list(draft.parameters())
    served = 2 * sum(p.numel() for p in parameters)
    if config.draft_vocab_size < config.vocab_size:
        served += 8 * config.draft_vocab_size + config.vocab_size  # the vocabulary's maps d2t and t2d
    return [
        Part("draft, twice while it is replaced", 2 * served),
        Part("checkpoint, twice while it is replaced", 2 * (served + state_bytes(draft, optimizer))),
        Part("metrics", METRICS_BYTES * steps),
    ]
