"""A draft's forward pass in decoding, in the same fused operations as a native target's (`drafts/decode_layer.py`).

`EagleDraft.forward` or `BlockDraft.block`, which training runs, is the definition: both compute the same values up to
rounding.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor
from torch.nn import functional as F

from fledge.config import DraftConfig
from fledge.drafts.block import BlockDraft
from fledge.drafts.compiled_layers import CompiledLayers, Joined, layers_of
from fledge.drafts.decode_layer import LayerShape, LayerWeights, Rotation, layer_output, layer_weights
from fledge.drafts.dflash import DFlashDraft
from fledge.drafts.draft import Draft
from fledge.drafts.eagle import EagleDraft
from fledge.drafts.eagle1 import Eagle1Draft
from fledge.drafts.kv_cache import CacheRows, KVCache, SlotPool, TreeRows, queries
from fledge.drafts.layers import Layer
from fledge.drafts.peagle import ParallelDraft
from fledge.ops.compiled import MOST_ROWS
from fledge.ops.layer import add_rms_norm, join_embedding, rms_norm
from fledge.ops.linear import packed_model
from fledge.ops.products import norm_linear, plain_linear
from fledge.ops.rope import cos_sin


class DraftDecoder:
    """The forward pass of a draft with a key-value cache, without gradients.

    The decoder uses the draft's own parameters: the parameters of projections become views of joined matrices
    (`layer_weights`), and the draft can still be trained. On a CPU, products may read copies of the parameters
    (`ops/linear.py`), and a draft whose parameters have changed then needs a new decoder. A draft that was moved
    to another device or dtype needs a new decoder too.
    """

    def __init__(self, draft: EagleDraft):
        _check_network(type(draft))
        self.draft, self.shape = draft, _layer_shape(draft.config)
        layers = [layer_weights(block, self.shape) for block in draft.blocks]
        reading = layers[-1].without_queries()  # what `read` computes of the last layer
        weights = [*(m for w in layers for m in w.matrices()), reading.qkv, draft.fc.weight, draft.head]
        aliases = packed_model(draft, weights, draft.parameters(), list) or weights
        *matrices, keys_and_values, self.fc, self.head = aliases
        rest = iter(matrices)
        self.layers = [w.with_matrices(rest) for w in layers]
        self.reading = replace(reading, qkv=keys_and_values)
        self.embedding = draft.embedding  # of the target that the draft is used with now
        self.target_id_W = None if draft.d2t is None else draft.target_ids()
        others = (
            [self.embedding] if draft.family.fuses_embedding else [self.embedding, draft.midlayer.hidden_norm.weight]
        )
        norm_E = None if draft.family.borrows_head else draft.norm.weight
        self.compiled = layers_of(self.layers, self.shape, norm_E, others)
        self.dtype = draft.dtype

    def fuse(self, aux_TAD: Tensor) -> Tensor:
        """See `EagleDraft.fuse`. On a CPU, the norms of all layers' states are computed together."""
        draft, config = self.draft, self.draft.config
        if not (aux_TAD.is_cpu and draft.family.reads_layers):
            return draft.fuse(aux_TAD)
        if config.fc_norm:
            gain_AD = torch.stack([norm.weight for norm in draft.fc_norm])
            aux_TAD = rms_norm(aux_TAD, gain_AD, config.rms_norm_eps)
        flat = aux_TAD.flatten(1)
        if config.norm_before_fc:
            flat = rms_norm(flat, draft.input_norm.weight, draft.input_norm.eps)
        return plain_linear(flat, self.fc)

    def rotation(self, position_M: Tensor) -> Rotation:
        """cos and sin at the positions, each [M, rotated], computed in float32."""
        return _rotation(self.draft, position_M)

    def read(self, token_M: Tensor, state_ME: Tensor, rotation: Rotation, rows: CacheRows) -> None:
        """Adds the keys and values of M rows to the cache, and computes nothing else of the last layer."""
        last, normed_ME = len(self.layers) - 1, None
        for i, w in enumerate(self.layers):
            w = self.reading if i == last else w
            qkv_MO, residual_ME = self._project(i, w, token_M, state_ME, normed_ME=normed_ME)
            if i == last:
                rows.write(i, qkv_MO, w, rotation)
            else:
                attended_MO = rows(i, qkv_MO, w, rotation)
                state_ME, normed_ME = layer_output(attended_MO, residual_ME, w, self.layers[i + 1].input_norm)

    def step(
        self, token_M: Tensor, state_ME: Tensor, rotation: Rotation, attend: CacheRows,
        asked: CacheRows | None = None, row_M: Tensor | None = None,
    ) -> tuple[Tensor, Tensor | None]:  # fmt: skip
        """One draft step of M rows, as `EagleDraft.step`. Returns the last layer's output [Q, E] at the queries of
        `asked` (None: at all rows); earlier layers compute all rows. With `row_M` (int64), row m has the state
        `row_M[m]`, of any number of states. Also returns the norm of the output if computed on the way, for `predict`;
        else None."""
        last, normed_ME = len(self.layers) - 1, None
        queries = asked or attend
        if self.compiled and (not last or queries is attend) and self.compiled.takes(queries, token_M.numel()):
            return self._compiled_step(self.compiled, token_M, state_ME, rotation, queries, row_M)
        for i, w in enumerate(self.layers):
            at = asked if asked is not None and i == last else attend
            qkv_MO, residual_ME = self._project(i, w, token_M, state_ME, row_M, normed_ME)
            next_norm = None if i == last else self.layers[i + 1].input_norm
            attended_MO = at(i, qkv_MO, w, rotation)
            state_ME, normed_ME = layer_output(attended_MO, at.asked(residual_ME), w, next_norm)
        return state_ME, None

    def _compiled_step(
        self, layers: CompiledLayers, token_M: Tensor, state_ME: Tensor, rotation: Rotation, queries: CacheRows,
        row_M: Tensor | None,
    ) -> tuple[Tensor, Tensor | None]:  # fmt: skip
        draft = self.draft
        if draft.family.fuses_embedding:
            first, state_ME = self._first_input(token_M, state_ME, row_M)
        else:
            state_ME = state_ME if row_M is None else state_ME[row_M]
            first = self._joined(token_M)
        out_QE, normed_QE, _ = layers(state_ME, rotation, queries, asked_Q=queries.asked_Q, first=first)
        return out_QE, normed_QE

    def _joined(self, token_M: Tensor) -> Joined:
        draft, gain_E = self.draft, self.layers[0].input_norm
        gains = gain_E, draft.midlayer.hidden_norm.weight
        return Joined(token_M, self.embedding, *gains, draft.config.norm_before_residual)

    def rest_of_chain(
        self, token_B: Tensor, state_BE: Tensor, rotation: Rotation, cache: KVCache, slot_KB: Tensor,
        noise: tuple[Tensor, Tensor] | None = None,
    ) -> Tensor | None:  # fmt: skip
        """The next K tokens of a chain of each sequence, target ids, int64 [B, K], in one call: the same tokens as by K
        times `step`, `predict` and argmax. `noise` are the states [K, B] and temperatures [B] of `coupled`; None adds
        no noise. `rotation` [K B, rotated] and `slot_KB` are for all steps. Returns None where one call cannot compute
        the tokens."""
        head = getattr(self.head, "packed_copy", None)
        if self.compiled is None or self.compiled.final_norm_E is None or self.draft.family.fuses_embedding:
            return None
        if len(self.layers) > 1 or slot_KB.shape[1] > MOST_ROWS or head is None:
            return None
        ids = self.target_id_W
        normed = self.draft.config.norm_output
        joined = self._joined(token_B)
        return self.compiled.chain(joined, state_BE, rotation, cache, slot_KB, head, ids, normed, noise).T

    def predict(self, out_SE: Tensor, normed_SE: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """The input state of the next step [S, E] and the logits [S, W] from the two results of `step`, as
        `EagleDraft.split_output` and `Draft.logits`."""
        draft = self.draft
        if draft.family.borrows_head:
            return out_SE, plain_linear(out_SE, self.head)
        if normed_SE is not None:
            return normed_SE if draft.config.norm_output else out_SE, plain_linear(normed_SE, self.head)
        if draft.config.norm_output:
            normed_SE, _ = add_rms_norm(out_SE, None, draft.norm.weight, draft.norm.eps)
            return normed_SE, plain_linear(normed_SE, self.head)
        return out_SE, norm_linear(out_SE, draft.norm.weight, draft.norm.eps, self.head)

    def _project(
        self, layer: int, w: LayerWeights, token_M: Tensor, state_ME: Tensor, row_M: Tensor | None = None,
        normed_ME: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        """A layer's fused projections [M, O] and residual [M, E]. The first layer also reads the tokens, and chooses
        states by `row_M`; for later layers, `normed_ME` is as in `norm_linear`."""
        if layer:
            eps = w.shape.eps
            return norm_linear(state_ME, w.input_norm, eps, w.qkv, w.qkv_bias, normed_ME=normed_ME), state_ME
        x_MI, residual_ME = self._first_input(token_M, state_ME, row_M)
        return plain_linear(x_MI, w.qkv, w.qkv_bias), residual_ME

    def _first_input(self, token_M: Tensor, state_ME: Tensor, row_M: Tensor | None) -> tuple[Tensor, Tensor]:
        """The input of the first layer's projections, [M, I], and the layer's residual [M, E]."""
        draft, w, E = self.draft, self.layers[0], state_ME.shape[1]
        if draft.family.fuses_embedding:
            joined_M2E, _ = join_embedding(token_M, state_ME, self.embedding, row_M=row_M)
            x_ME = plain_linear(joined_M2E, self.fc, draft.fc.bias)
            return x_ME, x_ME
        gains = w.input_norm, draft.midlayer.hidden_norm.weight, w.shape.eps
        x_M2E, state_ME = join_embedding(token_M, state_ME, self.embedding, *gains, row_M=row_M)
        return x_M2E, x_M2E[:, E:] if draft.config.norm_before_residual else state_ME


class BlockDecoder:
    """The forward passes of a block draft with a key-value cache, by the draft's own functions, without gradients."""

    def __init__(self, draft: BlockDraft):
        self.draft = draft
        self.windows = [draft.window(i) for i in range(draft.config.num_hidden_layers)]

    def write_context(self, states_MAD: Tensor, position_M: Tensor, slot_M: Tensor, pool: SlotPool) -> None:
        """Writes the keys and values of M tokens to slots of the cache, from the target's hidden states at the tokens.
        Positions and slots are int64."""
        for layer, (key_MGd, value_MGd) in enumerate(self.draft.context(states_MAD, position_M)):
            self._write(layer, key_MGd, value_MGd, slot_M, pool)

    def block(self, token_B: Tensor, position_BQ: Tensor, K: int, rows: TreeRows) -> Tensor:
        """The head's inputs [B, K, E], as `BlockDraft.block`. `rows` are the Q rows of each block, at `position_BQ`."""

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            self._write(layer, k.flatten(0, 1), v.flatten(0, 1), rows.slot_M, rows.cache.pool)
            return rows.read(layer, q.flatten(0, 1), window=self.windows[layer]).view_as(q)

        return self.draft.block(token_B, position_BQ[:, 0], K, attend)

    def logits(self, head_input_SE: Tensor) -> Tensor:
        """The logits [S, W] over the draft's vocabulary."""
        return self.draft.logits(head_input_SE)

    @staticmethod
    def _write(layer: int, key_MGd: Tensor, value_MGd: Tensor, slot_M: Tensor, pool: SlotPool) -> None:
        key_GPd, value_GPd = pool.layers[layer]
        key_GPd[:, slot_M], value_GPd[:, slot_M] = key_MGd.transpose(0, 1), value_MGd.transpose(0, 1)


class DFlashDecoder(BlockDecoder):
    """The forward passes of DFlash's draft, in fused operations. The weights are the draft's own, as in `DraftDecoder`,
    with the same limits."""

    draft: DFlashDraft

    def __init__(self, draft: DFlashDraft):
        super().__init__(draft)
        shape = _layer_shape(draft.config)
        layers = [layer_weights(layer, shape, at) for layer, at in zip(draft.layers, self.windows, strict=True)]
        contexts = [w.without_queries() for w in layers]
        weights = [*(m for w in layers for m in w.matrices()), *(w.qkv for w in contexts), draft.fc.weight, draft.head]
        aliases = iter(packed_model(draft, weights, draft.parameters(), list) or weights)
        self.layers = [w.with_matrices(aliases) for w in layers]
        self.contexts = [replace(w, qkv=next(aliases)) for w in contexts]  # projections to keys and values only
        self.fc, self.head = aliases
        self.embedding = draft.embedding  # of the target that the draft is used with now
        self.compiled = layers_of(self.layers, shape, draft.norm.weight, [self.embedding])

    def write_context(self, states_MAD: Tensor, position_M: Tensor, slot_M: Tensor, pool: SlotPool) -> None:
        """See `BlockDecoder.write_context`."""
        norm, rotation = self.draft.hidden_norm, _rotation(self.draft, position_M)
        state_ME, _ = add_rms_norm(plain_linear(states_MAD.flatten(1), self.fc), None, norm.weight, norm.eps)
        for w, (keys_GPd, values_GPd) in zip(self.contexts, pool.layers, strict=True):
            queries(plain_linear(state_ME, w.qkv, w.qkv_bias), w, rotation, keys_GPd, values_GPd, slot_M)

    def block(self, token_B: Tensor, position_BQ: Tensor, K: int, rows: TreeRows) -> Tensor:
        """See `BlockDecoder.block`."""
        (B, Q), rotation, norm = position_BQ.shape, _rotation(self.draft, position_BQ.flatten()), self.draft.norm
        token_BQ = F.pad(token_B[:, None], (0, Q - 1), value=self.draft.config.mask_token_id)
        x_ME, normed_ME = F.embedding(token_BQ.flatten(), self.embedding), None
        if self.compiled and self.compiled.takes(rows, B * Q):
            _, normed_ME, _ = self.compiled(x_ME, rotation, rows)
        else:
            next_norms = [*(w.input_norm for w in self.layers[1:]), norm.weight]
            for i, (w, next_norm) in enumerate(zip(self.layers, next_norms, strict=True)):
                assert w.input_norm is not None
                qkv_MO = norm_linear(x_ME, w.input_norm, w.shape.eps, w.qkv, w.qkv_bias, normed_ME=normed_ME)
                x_ME, normed_ME = layer_output(rows(i, qkv_MO, w, rotation), x_ME, w, next_norm)
        if normed_ME is None:
            normed_ME, _ = add_rms_norm(x_ME, None, norm.weight, norm.eps)
        return normed_ME.view(B, Q, -1)[:, 1 : K + 1]

    def logits(self, head_input_SE: Tensor) -> Tensor:
        """See `BlockDecoder.logits`."""
        return plain_linear(head_input_SE, self.head)


def block_decoder(draft: BlockDraft) -> BlockDecoder:
    """The fastest decoder that computes what the draft does. The fused operations are those of a plain `Layer`."""
    computed = ("context", "block", "block_rows", "window", "logits", "embed")
    same = all(getattr(type(draft), name) is getattr(DFlashDraft, name, None) for name in computed)
    fused = isinstance(draft, DFlashDraft) and same and all(type(layer) is Layer for layer in draft.layers)
    return DFlashDecoder(draft) if fused else BlockDecoder(draft)


def _layer_shape(config: DraftConfig) -> LayerShape:
    return LayerShape(
        heads=config.num_attention_heads,
        kv_heads=config.num_key_value_heads,
        head_dim=config.head_dim,
        scale=config.head_dim**-0.5,
        eps=config.rms_norm_eps,
    )


def _rotation(draft: Draft, position_M: Tensor) -> Rotation:
    """cos and sin at the positions, each [M, rotated], computed in float32."""
    return cos_sin(position_M, draft.rotary.frequencies, draft.rotary.scale, draft.dtype)


def _check_network(kind: type) -> None:
    """Raises ValueError for a network that computes something else than `DraftDecoder`."""
    known = next((k for k in kind.__mro__ if k in (EagleDraft, Eagle1Draft, ParallelDraft)), kind)
    computed = ("forward", "step", "fuse", "split_output", "mask_inputs", "_layer_input")
    if other := [name for name in computed if getattr(kind, name, None) is not getattr(known, name, None)]:
        raise ValueError(
            f"{kind.__name__} has its own {' and '.join(other)}, which decoding does not call: it computes those of "
            f"{known.__name__} in fused operations; derive the network from BlockDraft, or leave them as they are"
        )
