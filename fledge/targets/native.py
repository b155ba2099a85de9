"""A target computed by fledge's own forward pass of Llama-like models, also with experts: fused projections, and a
preallocated cache."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from fledge.drafts.compiled_layers import CompiledLayers, layers_of
from fledge.drafts.decode_layer import LayerShape, LayerWeights, Rotation, layer_output, layer_weights
from fledge.drafts.kv_cache import CacheRows, KVCache, PromptRows, SlotPool, TreeRows, queries
from fledge.ops.attention_prompt import PackedAttention, without_cudnn_sdpa
from fledge.ops.device import current_device, to_device
from fledge.ops.layer import add_rms_norm
from fledge.ops.linear import packed_model
from fledge.ops.products import norm_linear, plain_linear
from fledge.ops.rope import cos_sin
from fledge.ops.trees import place_trees
from fledge.targets.quantized import quantization_of
from fledge.targets.structure import forward as few_row_forward
from fledge.targets.transformers import TransformersTarget, run_in_passes
from fledge.types import Features, Packed, Prompt, Tree

# transformers' classes whose decoder layers are Llama's: RMSNorm, rotary grouped-query attention, gated SiLU MLP. The
# layers may have biases, norms of queries and keys (Qwen3), fused projections (Phi-3), sliding windows, and mixtures of
# gated MLPs in all or some layers, with or without a shared MLP.
CLASSES = (
    "LlamaForCausalLM", "MistralForCausalLM", "MixtralForCausalLM", "Phi3ForCausalLM", "Qwen2ForCausalLM",
    "Qwen2MoeForCausalLM", "Qwen3ForCausalLM", "Qwen3MoeForCausalLM",
)  # fmt: skip
PARTS = (nn.Linear, nn.Embedding, nn.Dropout, nn.ModuleList)  # exactly these: a subclass may compute something else
ACTIVATION = "transformers.activations"
# transformers adds hooks to a model's layers when hidden states are asked for; the hooks change nothing
HARMLESS_HOOKS = "transformers.utils.output_capturing"
# The attention of the rows of a pass, `PackedRows` or `CacheRows` of `drafts/kv_cache.py`: the heads' outputs
# [M, H d] of layer i, from the fused projections of M rows, [M, (H + 2 G) d], before RoPE and before the norms of
# queries and keys.
RowAttention = Callable[[int, Tensor, LayerWeights, Rotation], Tensor]


class NativeTarget(TransformersTarget):
    """A transformers model whose forward pass is fledge's, for training and decoding. `options` are as in
    `TargetParts`.

    The native forward pass uses the model's weights, with projections of the same input joined in one matrix. The model
    itself still computes, for comparison. The model must have no `native_problem`.
    """

    implementation = "native"
    packs = True
    rollback_problem = ""
    pads = False
    prefills_in_parts = True

    def __init__(self, model: nn.Module, tokenizer: Any, **options: Any):
        super().__init__(model, tokenizer, **options)
        self._read_weights()

    def _read_weights(self) -> None:
        pool = vars(self).get("pool")
        if pool is not None and (pool.buffer.device, pool.buffer.dtype) != (self.device, self.dtype):
            del self.pool
        self.native = NativeDecoder(self.model, self.config)
        self._packed: NativeDecoder | None = None  # `native` with copies of weights, for decoding on a CPU
        self.note_places()  # the joined projections are new

    @torch.no_grad()
    def features(self, row: Packed, layers: Sequence[int]) -> Features:

        def run(token_T: Tensor, position_T: Tensor, documents: Sequence[tuple[int, int]]) -> Features:
            with current_device(self.device), without_cudnn_sdpa(self.device):
                return self.native(token_T, position_T, PackedRows(documents, self.device), layers)

        return run_in_passes(row, self.pass_tokens, self.device, run)

    @torch.no_grad()
    def logits(self, last_ND: Tensor) -> Tensor:
        with current_device(self.device):
            return plain_linear(last_ND, self.head.weight, self.head.bias)

    def _new_pool(self) -> SlotPool:
        n = self.native
        return SlotPool(len(n.layers), n.shape.kv_heads, n.shape.head_dim, self.device, self.dtype)

    pool = functools.cached_property(_new_pool)  # the slots of all caches but separate ones

    def new_cache(self, sizes: Sequence[int] = ()) -> KVCache:
        return KVCache(self.pool, sizes)

    def separate_cache(self, sizes: Sequence[int]) -> KVCache:
        """Uses a new pool: when `pool` grows, CUDA graphs, which read the pool's buffer, must be captured again."""
        return KVCache(self._new_pool(), sizes)

    def prepare_decoding(self) -> None:
        """On a CPU, decoding computes with copies of the weights, which are made again if the weights have changed."""
        if self.follow_weights():
            self._read_weights()
        self._packed = None  # frees the old copies before new ones are made
        self._packed = packed_model(self, self.native.matrices(), self.parameters, self.native.with_matrices)

    def __getstate__(self) -> dict[str, Any]:
        """Without copies of weights, which can be neither copied nor pickled."""
        return super().__getstate__() | {"_packed": None}

    @property
    def _decoder(self) -> NativeDecoder:
        return self._packed or self.native

    @torch.inference_mode()
    def prefill(
        self, prompts: Sequence[Prompt], cache: KVCache, layers: Sequence[int] | None = None,
        final: bool = True,
    ) -> tuple[Tensor, list[Features]]:  # fmt: skip
        """Computes all prompts in one pass, without padding."""
        counts, final = [len(p) for p in prompts], final and layers is not None
        with current_device(self.device), without_cudnn_sdpa(self.device):
            rows = PromptRows(cache, counts)
            token, count_B = torch.tensor([token for p in prompts for token in p.ids]), torch.tensor(counts)
            token, count_B = to_device([token, count_B], self.device)
            last_B = count_B.cumsum(0) - 1
            every = final or self.num_layers in (layers or ())  # whether the last layer's output is read everywhere
            last = None if every else rows.last(count_B, last_B)
            features = self._decoder(token, rows.position_M, rows, layers or (), last)
            rows.commit(count_B)
            last_BD = features.last_TD[last_B] if every else features.last_TD
            logits_BV = self._decoder.logits(last_BD)
        if layers is None:
            return logits_BV, []
        states = features.last_TD.split(counts) if final else last_BD.split(1)
        return logits_BV, [Features(*part) for part in zip(features.aux_TAD.split(counts), states, strict=True)]

    @torch.inference_mode()
    def verify(self, tree: Tree, cache: KVCache, layers: Sequence[int] | None = None) -> tuple[Tensor, Features | None]:
        """Does not synchronize the device."""
        B, N = tree.token_BN.shape
        with current_device(tree.token_BN.device):
            position_BN, slot_BN, visible = place_trees(tree, cache.start_B, cache.length_B)
            attend = TreeRows(cache, N, visible, position_BN, slot_BN)
            features = self._decoder(tree.token_BN.flatten(), position_BN.flatten(), attend, layers or ())
            logits_BNV = self._decoder.logits(features.last_TD).view(B, N, -1)
        return logits_BNV, None if layers is None else features


class NativeDecoder:
    """The decoder of a transformers model that `native_problem` accepts, with the model's own weights."""

    def __init__(self, model: nn.Module, config):
        decoder = model.model
        attention = decoder.layers[0].self_attn
        shape = LayerShape(
            heads=config.num_attention_heads,
            kv_heads=config.num_key_value_heads,
            head_dim=attention.head_dim,
            scale=attention.scaling,
            eps=float(config.rms_norm_eps),
        )
        windows = _windows(decoder.layers, config)
        self.shape = shape
        self.layers = [layer_weights(layer, shape, at) for layer, at in zip(decoder.layers, windows, strict=True)]
        self.embedding: Tensor = decoder.embed_tokens.weight
        self.norm: Tensor = decoder.norm.weight
        head = model.get_output_embeddings()
        self.head, self.head_bias = head.weight, head.bias
        self.compiled: CompiledLayers | None = None  # of the same weights, for few rows on a CPU
        self.frequencies: Tensor = decoder.rotary_emb.inv_freq.float()
        self.rope_scale: float = decoder.rotary_emb.attention_scaling

    def matrices(self) -> list[Tensor]:
        """The weights of the layers' products, but those of experts, and of the head's."""
        return [*(m for w in self.layers for m in w.matrices()), self.head]

    def with_matrices(self, matrices: Sequence[Tensor]) -> NativeDecoder:
        """The same with other weights instead of `matrices`, for decoding on a CPU."""
        other, given = copy.copy(self), iter(matrices)
        other.layers = [w.with_matrices(given) for w in self.layers]
        other.head = next(given)
        other.compiled = layers_of(other.layers, self.shape, self.norm)
        return other

    def logits(self, last_ND: Tensor) -> Tensor:
        """The logits [N, V] of final states [N, D]."""
        return plain_linear(last_ND, self.head, self.head_bias)

    def rotation(self, position_M: Tensor) -> Rotation:
        """cos and sin at the positions, each [M, rotated], computed in float32 as transformers does."""
        return cos_sin(position_M, self.frequencies, self.rope_scale, self.embedding.dtype)

    def __call__(
        self, token_M: Tensor, position_M: Tensor, attend: RowAttention, layers: Sequence[int] = (),
        last: CacheRows | None = None,
    ) -> Features:  # fmt: skip
        """The features of M rows: token ids and positions, int64 [M]. `layers` are as in `TrainingTarget.features`.

        With `last`, the attention of the last layer, the last layer's output and the final states are those of its Q
        queries only, [Q, D].
        """
        rotation, aux = self.rotation(position_M), []
        x_MD, normed_MD = nn.functional.embedding(token_M, self.embedding), None
        if self.compiled and isinstance(attend, CacheRows) and self.compiled.takes(attend, token_M.numel()):
            asked_Q = None if last is None else last.asked_Q
            _, final_QD, aux_MAD = self.compiled(x_MD, rotation, attend, asked_Q=asked_Q, aux_layers=layers)
            return Features(aux_MAD, final_QD)
        next_norms = [*(w.input_norm for w in self.layers[1:]), self.norm]  # of what reads each layer's output
        for i, (w, next_norm) in enumerate(zip(self.layers, next_norms, strict=True)):
            if i in layers:
                aux.append(x_MD)
            qkv_MO = norm_linear(x_MD, w.input_norm, w.shape.eps, w.qkv, w.qkv_bias, normed_ME=normed_MD)
            if last is not None and i == len(self.layers) - 1:
                attend, x_MD = last, last.asked(x_MD)
            x_MD, normed_MD = layer_output(attend(i, qkv_MO, w, rotation), x_MD, w, next_norm)
        if len(self.layers) in layers:
            aux.append(x_MD)
        if normed_MD is None:
            normed_MD, _ = add_rms_norm(x_MD, None, self.norm, self.shape.eps)
        none = x_MD.new_empty(token_M.numel(), 0, x_MD.shape[1])
        return Features(torch.stack(aux, dim=1) if aux else none, normed_MD)


def _windows(layers: Sequence[nn.Module], config: Any) -> list[int | None]:
    """The sliding window of each decoder layer (None: no window). Qwen's attention modules have a window each; Mistral,
    Mixtral and Phi-3 use the config's window in all layers; Llama has no window, whatever the config says."""
    everywhere = config.sliding_window if config.model_type in ("mistral", "mixtral", "phi3") else None
    return [getattr(layer.self_attn, "sliding_window", everywhere) for layer in layers]


class PackedRows:
    """The attention of a packed row, without a cache. `documents` are the row's [start, end) token ranges, without
    gaps."""

    def __init__(self, documents: Sequence[tuple[int, int]], device: torch.device):
        counts, starts = [end - start for start, end in documents], [start for start, _ in documents]
        self.attention = PackedAttention(counts, [0] * len(counts), starts, device)

    def __call__(self, layer: int, qkv_MO: Tensor, weights: LayerWeights, rotation: Rotation) -> Tensor:
        shape, slot_M = weights.shape, self.attention.slot_M
        keys, values = qkv_MO.new_empty(2, shape.kv_heads, qkv_MO.shape[0], shape.head_dim)
        q_MHd = queries(qkv_MO, weights, rotation, keys, values, slot_M)
        return self.attention(q_MHd, keys, values, shape.scale, weights.window).flatten(1)


def native_problem(model: nn.Module, config: Any) -> str:
    """The reason why the native forward pass cannot compute a transformers model; empty if it can. `config` is the
    model's text config."""
    kind = type(model)
    if kind.__name__ not in CLASSES or not kind.__module__.startswith("transformers.models."):
        known = ", ".join(name.removesuffix("ForCausalLM") for name in CLASSES)
        return f"{kind.__name__} is not one of the supported architectures ({known})"
    if quantization := quantization_of(model.config):
        return f"its weights are quantized by {quantization}"
    if config.hidden_act != "silu":
        return f"its activation is {config.hidden_act}, and the native MLP computes silu"
    parameters = list(model.parameters())
    if len({p.device for p in parameters}) > 1:
        return "its weights are on several devices"
    for name, module in model.named_modules():
        if problem := _problem_of(module, kind.__module__):
            return f"{name or 'the model'} {problem}"
    if parameters[0].device.type == "meta":
        return "its weights are on the meta device, which holds no values"
    if len({p.dtype for p in parameters}) > 1 or not parameters[0].dtype.is_floating_point:
        return "its weights have several dtypes, or are quantized"
    return ""


def _problem_of(module: nn.Module, source: str) -> str:
    """Why a module may compute something else than its class in the Python module `source`; empty if it does not."""
    kind = type(module)
    if kind not in PARTS and kind.__module__ not in (source, ACTIVATION):
        return f"was replaced by a {kind.__name__} (quantization, an adapter or other code)"
    if "forward" in vars(module) and getattr(module.forward, "__func__", None) is not few_row_forward:
        return "has a forward method of its own (an adapter, offloading or other code)"
    hooks = [*module._forward_pre_hooks.values(), *module._forward_hooks.values()]
    if any(getattr(hook, "__module__", None) != HARMLESS_HOOKS for hook in hooks):
        return "has forward hooks (an adapter, offloading or other code)"
    return ""
