"""A target computed by fledge's own forward pass."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from fledge.drafts.decode_layer import CachedRows, LayerWeights, Rotation, queries
from fledge.drafts.kv_cache import KVCache, LastRows, PromptRows, SlotPool, TreeRows
from fledge.ops.few_rows import plain_linear
from fledge.ops.implementations import current_device
from fledge.ops.packed_attention import PackedAttention
from fledge.ops.packed_weight import packed_model
from fledge.ops.sdpa import without_cudnn_sdpa
from fledge.ops.transfer import to_device
from fledge.ops.tree_attention import place_trees
from fledge.targets.native.decoder import NativeDecoder
from fledge.targets.native.support import native_problem
from fledge.targets.transformers import TransformersTarget
from fledge.types import Features, Tree


@dataclass(frozen=True)
class PackedModel:
    """What decoding on a CPU computes with: weights that have copies."""

    decoder: NativeDecoder
    head: Tensor


class NativeTarget(TransformersTarget):
    """A transformers model whose forward pass is fledge's, for training and decoding.

    The model's weights are used as they are, with projections that read the same input in one matrix; the model itself
    still computes, and is the reference (`reference_generate`, `check_logits`). Raises ValueError for a model that the
    native forward pass does not support (see `native_problem`).
    """

    def __init__(self, model: nn.Module, tokenizer: Any, **options: Any):
        super().__init__(model, tokenizer, **options)
        if problem := native_problem(model, self.config):
            raise ValueError(f"{self.name or 'the target'} cannot run natively: {problem}")
        self._packed: PackedModel | None = None
        self._read_weights()
        self._places = self._weights_at()

    def _read_weights(self) -> None:
        super()._read_weights()
        pool = vars(self).get("pool")
        if pool is not None and (pool.buffer.device, pool.buffer.dtype) != (self.device, self.dtype):
            del self.pool
        self.native, self._packed = NativeDecoder(self.model, self.config), None

    implementation = "native"
    packs = True
    rollback_problem = ""
    pads = False
    prefills_in_parts = True

    # -- training -----------------------------------------------------------------------------------------------

    def _run_documents(
        self, token_T: Tensor, position_T: Tensor, documents: Sequence[tuple[int, int]], layers: Sequence[int]
    ) -> Features:
        with without_cudnn_sdpa(self.device):
            return self.native(token_T, position_T, PackedRows(documents, self.device), layers)

    @torch.no_grad()
    def logits(self, last_ND: Tensor) -> Tensor:
        """See `TrainingTarget.logits`."""
        with current_device(self.device):
            return plain_linear(last_ND, self.head.weight, self.head.bias)

    # -- decoding -----------------------------------------------------------------------------------------------

    @functools.cached_property
    def pool(self) -> SlotPool:
        """The slots of all caches but separate ones."""
        return self._new_pool()

    def _new_pool(self) -> SlotPool:
        n = self.native
        return SlotPool(len(n.layers), n.shape.kv_heads, n.shape.head_dim, self.device, self.dtype)

    def new_cache(self, sizes: Sequence[int] = ()) -> KVCache:
        """See `DecodingTarget.new_cache`."""
        return KVCache(self.pool, sizes)

    def separate_cache(self, sizes: Sequence[int]) -> KVCache:
        """See `DecodingTarget.separate_cache`. CUDA graphs read the buffer of `pool`, so that they must be captured
        again when it grows."""
        return KVCache(self._new_pool(), sizes)

    def prepare_decoding(self) -> None:
        """See `DecodingTarget.prepare_decoding`. On a CPU, it copies the weights, again if they have changed."""
        self._follow_weights()
        weights, self._packed = [*self.native.matrices(), self.head.weight], None  # frees copies of changed weights
        self._packed = packed_model(self, weights, self._parameters, self._with_copies)

    def _with_copies(self, aliases: Sequence[Tensor]) -> PackedModel:
        *matrices, head = aliases
        return PackedModel(self.native.with_matrices(iter(matrices)), head)

    def __getstate__(self) -> dict[str, Any]:
        return super().__getstate__() | {"_packed": None}

    @property
    def _decoder(self) -> NativeDecoder:
        return self.native if self._packed is None else self._packed.decoder

    def _decoding_logits(self, last_ND: Tensor) -> Tensor:
        """`logits` of final states [N, D] of `_decoder`."""
        head = self.head.weight if self._packed is None else self._packed.head
        return plain_linear(last_ND, head, self.head.bias)

    @torch.inference_mode()
    def prefill(
        self, prompts: Sequence[Sequence[int]], cache: KVCache, layers: Sequence[int] | None = None,
        final: bool = True,
    ) -> tuple[Tensor, list[Features]]:  # fmt: skip
        """See `DecodingTarget.prefill`. One pass over all tokens, without padding."""
        with current_device(self.device), without_cudnn_sdpa(self.device):
            return self._prefill(prompts, cache, layers, final and layers is not None)

    def _prefill(
        self, prompts: Sequence[Sequence[int]], cache: KVCache, layers: Sequence[int] | None, final: bool
    ) -> tuple[Tensor, list[Features]]:
        counts = [len(p) for p in prompts]
        rows = PromptRows(cache, counts)
        token, count_B = torch.tensor([*itertools.chain(*prompts)]), torch.tensor(counts)
        token, count_B = to_device([token, count_B], self.device)
        last_B = count_B.cumsum(0) - 1
        every = final or len(self.native.layers) in (layers or ())  # whether the last layer's output is read everywhere
        last = None if every else CachedRows(LastRows(rows, count_B), last_B)
        features = self._decoder(token, rows.position_M, CachedRows(rows), layers or (), last)
        rows.commit(count_B)
        last_BD = features.last_TD[last_B] if every else features.last_TD
        logits_BV = self._decoding_logits(last_BD)
        if layers is None:
            return logits_BV, []
        states = features.last_TD.split(counts) if final else last_BD.split(1)
        parts = zip(features.aux_TAD.split(counts), states, strict=True)
        return logits_BV, [Features(*part) for part in parts]

    @torch.inference_mode()
    def verify(self, tree: Tree, cache: KVCache, layers: Sequence[int] | None = None) -> tuple[Tensor, Features | None]:
        """See `DecodingTarget.verify`. Does not synchronize."""
        with current_device(self.device):
            return self._verify(tree, cache, layers)

    def _verify(self, tree: Tree, cache: KVCache, layers: Sequence[int] | None) -> tuple[Tensor, Features | None]:
        B, N = tree.token_BN.shape
        position_BN, slot_BN, visible = place_trees(tree, cache.start_B, cache.length_B)
        attend = CachedRows(TreeRows(cache, N, visible, position_BN, slot_BN))
        features = self._decoder(tree.token_BN.flatten(), position_BN.flatten(), attend, layers or ())
        return self._decoding_logits(features.last_TD).view(B, N, -1), None if layers is None else features


class PackedRows:
    """The attention of a packed row, without a cache. `documents` are the [start, end) token ranges that cover it."""

    def __init__(self, documents: Sequence[tuple[int, int]], device: torch.device):
        counts, starts = [end - start for start, end in documents], [start for start, _ in documents]
        self.attention = PackedAttention(counts, [0] * len(counts), starts, device)

    def __call__(self, layer: int, qkv_MO: Tensor, weights: LayerWeights, rotation: Rotation) -> Tensor:
        """See `RowAttention`."""
        shape, slot_M = weights.shape, self.attention.slot_M
        keys, values = qkv_MO.new_empty(2, shape.kv_heads, qkv_MO.shape[0], shape.head_dim)
        q_MHd = queries(qkv_MO, weights, rotation, keys, values, slot_M)
        return self.attention(q_MHd, keys, values, shape.scale, weights.window).flatten(1)
