"""Estimates the memory of a run's ranks by arithmetic, for `fledge train --dry-run`."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from fledge.drafts.block import BlockDraft
from fledge.drafts.draft import Draft
from fledge.ops.attention_block import BLOCKS
from fledge.ops.attention_ttt import BLOCK
from fledge.ops.loss import SLOTS_PER_GROUP, LossOptions
from fledge.ops.training import GradientSums
from fledge.targets.distributed import TargetBytes, model_bytes
from fledge.targets.transformers import PASS_TOKENS
from fledge.train.feed import AHEAD
from fledge.train.optim import state_bytes
from fledge.train.row_pass import Implementation
from fledge.train.setup.run import GRADIENT_SUM_BYTES, UPDATE_BYTES, USABLE_FRACTION

EAGER_SCORES = 8  # bytes per attention score that plain torch keeps
EAGER_BLOCK_SCORES = 3  # float32 copies of the scores of some blocks, fitted to bench/results/block_step.json
EAGER_LOGITS = 6  # float32 copies of a tile's logits that the plain loss makes


@dataclass(frozen=True)
class Machine:
    """The devices of a run's `ranks`, of type `device` ("cuda" or "cpu").

    `memory` is the bytes of a device, and `there` says whether the devices are this machine's. `apart` is the number of
    target ranks (0: the training ranks hold the target). `split` splits the target's layers over the ranks that hold
    the target.
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
        """The number of training ranks. Each training rank keeps an equal share of the optimizer's state."""
        return self.ranks - self.apart

    @property
    def target_shares(self) -> int:
        """The number of ranks that share the target's layers; 1: each has all layers."""
        return (self.apart or self.ranks) if self.split else 1


@dataclass(frozen=True)
class Work:
    """The models of a run, and the work of a rank in an optimizer step: `rows` rows of `tokens` tokens.

    `slots` are the slots trained at each step of the heaviest row, and `document` is the length of the longest
    document. `weights` are the target's. The draft may be on the meta device, and `optimizer` is its optimizer's kind.
    Without `runs`, the target's hidden states are on disk, and only its embedding, head and last layer are loaded.
    `staged` is the bytes, per token of a row, of rows on their way from the disk.
    """

    weights: TargetBytes
    draft: Draft
    tokens: int
    slots: tuple[int, ...]
    document: int
    rows: int = 1
    optimizer: str = "muon"
    runs: bool = True
    staged: int = 0

    @property
    def trained(self) -> int:
        """The number of trained parameters."""
        return sum(p.numel() for p in self.draft.parameters() if p.requires_grad)

    @property
    def features(self) -> int:
        """The bytes of the target's hidden states of a row."""
        config = self.draft.config
        states = (config.num_aux_hidden_states + 1) * config.target_hidden_size
        return states * self.draft.dtype.itemsize * self.tokens


def memory_parts(work: Work, impl: Implementation, machine: Machine) -> dict[str, int]:
    """The bytes of each part of the memory of a training rank, at the largest moment of a step."""
    runs = work.runs and not machine.apart
    target = {"the target's embedding, head and last layer": work.weights.rest + work.weights.largest}
    step, target_pass = step_bytes(work, impl, machine.device), _pass_bytes(work, machine) if runs else 0
    state = -(-state_bytes(work.draft, work.optimizer) // machine.trains)
    share = f"1/{machine.trains} of the" if machine.trains > 1 else "the"
    return (_target(work, machine) if runs else target) | {
        f"the draft's weights and {share} optimizer's state": model_bytes(work.draft) + state,
        f"hidden states of {'two rows' if impl.prefetch else 'a row'}": work.features * (1 + impl.prefetch)
        + work.staged * work.tokens,
        # with prefetch, the target computes the next row while the draft trains
        "a training step": step + target_pass if impl.prefetch else max(step, target_pass),
    }


def target_memory_parts(work: Work, machine: Machine) -> dict[str, int]:
    """The bytes of each part of the memory of a target rank, which holds only the target."""
    rows = -(-machine.trains // machine.apart) + AHEAD + 2  # to send (`Deliveries.sent`), and the computed row twice
    return _target(work, machine) | {
        "the draft's weights, to measure τ": model_bytes(work.draft),
        f"hidden states of {rows} rows": rows * work.features,
        "a forward pass of the target": _pass_bytes(work, machine),
    }


def _target(work: Work, machine: Machine) -> dict[str, int]:
    n = machine.target_shares
    split = f"1/{n} of the target's layers, 2 layers whole, embedding and head"
    return {"the target's weights" if n == 1 else split: work.weights.on_rank(n)}


def _pass_bytes(work: Work, machine: Machine) -> int:
    """The bytes of a forward pass of the target: a layer's states, projections and MLP (of about the draft's size),
    captured states, and a mask."""
    config, width = work.draft.config, work.draft.dtype.itemsize
    tokens = work.tokens if machine.target_shares > 1 else min(work.tokens, PASS_TOKENS[machine.device])
    states = 7 + config.num_aux_hidden_states * (1 if tokens == work.tokens else 2)
    return tokens * (width * (states * config.target_hidden_size + 3 * config.intermediate_size) + tokens)


def step_bytes(work: Work, impl: Implementation, device: str) -> int:
    """The bytes of a training step beside weights, optimizer and hidden states, at its largest moment: the backward
    pass or the loss of a chunk of slots, or the update."""
    draft, config, width = work.draft, work.draft.config, work.draft.dtype.itemsize
    live = max(work.slots[0], 1)
    n = min(impl.slots or live, live)  # slots of a chunk
    slots, chunks = max(n * sum(work.slots) // live, 1), -(-live // n)  # slots of a chunk at all steps together

    # the head's gradient is summed in float32, and other gradients also after a number of chunks
    head = 0 if config.family.borrows_head else draft.head.numel()
    each = width * (chunks > 1) + 4 * (chunks > GradientSums.CHUNKS + 1)
    gradients = 4 * head + each * (work.trained - head) + GRADIENT_SUM_BYTES * work.trained * (work.rows > 1)

    blocks = isinstance(draft, BlockDraft)
    activations, backward = (_block_bytes if blocks else _chain_bytes)(work, impl, device, n, slots)

    # the logits of a group of tiles, and the teacher's logits of a tile
    V, W, E = config.vocab_size, config.draft_vocab_size, config.hidden_size
    options = LossOptions(chunk=impl.chunk, impl=impl.loss)
    taught = min(slots, work.tokens) if blocks else n  # teacher rows of a chunk
    rows = min(options.teacher_rows_per_chunk(V, W, len(work.slots), torch.device(device)), taught)
    tile = rows * slots // taught
    loss = width * (min(max(tile, SLOTS_PER_GROUP), slots) * (W + 2 * E) + rows * V)
    loss += 4 * (EAGER_LOGITS * tile * W + 2 * rows * (V + W)) * (impl.loss == "eager")
    return max(gradients + activations + max(loss, backward), UPDATE_BYTES * work.trained)


def _chain_bytes(work: Work, impl: Implementation, device: str, n: int, slots: int) -> tuple[int, int]:
    """The bytes that the first pass and a chunk save, and those of a layer's backward pass, for a draft of one token a
    pass. The chunk has n slots, and `slots` at all steps together."""
    config, width, E = work.draft.config, work.draft.dtype.itemsize, work.draft.config.hidden_size
    inner, layers = config.intermediate_size, config.num_hidden_layers
    heads, kv = (n * config.head_dim for n in (config.num_attention_heads, config.num_key_value_heads))
    # elements that a layer saves of a slot, and what the first pass saves of each token
    layer = 4 * E + 2 * heads + 2 * kv + inner * (2 if impl.layers == "triton" else 4)
    kept = layer - 2 * inner if impl.recompute else layer
    normed = config.num_aux_hidden_states * config.target_hidden_size * (config.fc_norm or config.norm_before_fc)
    first_pass = work.tokens * width * (normed + 6 * E + 6 * kv + (layers - 1) * (kept + 4 * kv))
    passes = layers * slots - (layers - 1) * n  # the first pass has run the lower layers for step 0
    activations = width * (passes * kept + slots * 4 * E)
    if impl.attention == "eager":  # a block of queries keeps scores for all keys that one of the queries reads
        block = min(BLOCK[device], work.tokens)
        keys = max(work.document - (n - min(n, block)) // 2, block)
        activations += slots * layers * config.num_attention_heads * keys * EAGER_SCORES
    return first_pass + activations, width * n * (3 * inner + 2 * E)


def _block_bytes(work: Work, impl: Implementation, device: str, n: int, slots: int) -> tuple[int, int]:
    """As `_chain_bytes`, for a draft of a block a pass: a chunk has n blocks, whose rows go through all layers
    together."""
    config, width, E = work.draft.config, work.draft.dtype.itemsize, work.draft.config.hidden_size
    inner, layers, K = config.intermediate_size, config.num_hidden_layers, len(work.slots)
    heads, kv = (n * config.head_dim for n in (config.num_attention_heads, config.num_key_value_heads))
    rows = n * work.draft.rows_per_slot(K)
    # of each token, the joined states, then keys and values, their gradients, and sums of these in float32
    context = work.tokens * (2 * E * width + layers * kv * (5 * width + 8))
    # elements that a layer saves of a row: queries before and after the rotation, and what attention found for them
    mlp = inner * (2 if impl.layers == "triton" else 4)
    layer = 4 * E + 3 * heads + 3 * kv + (0 if impl.recompute else mlp)
    layer += 20 * E * config.block_conv  # of the four convolutions: the input, two factors, and their products
    activations = width * (rows * layers * layer + 2 * E * (n * K + slots))
    backward = width * rows * (3 * inner + 2 * E)
    keys = work.document
    if impl.attention == "flex":  # copies of all keys and values, and the mask of each pair
        activations += layers * width * 2 * kv * (work.tokens + rows)
        backward += 4 * rows * (work.tokens + rows)
    if impl.attention == "eager":  # copies in float32, of keys and values for each part of the blocks
        activations += layers * 4 * (rows * (heads + 2 * kv) + -(-n // BLOCKS) * keys * 2 * kv)
        scores = min(n, BLOCKS) * (rows // n) * config.num_attention_heads * keys
        backward += EAGER_BLOCK_SCORES * 4 * scores
    return context + activations, backward
