"""A target made of a transformers causal language model."""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from fledge.config import RopeConfig, llama_names
from fledge.ops.packed_weight import packed_model
from fledge.ops.sdpa import without_cudnn_sdpa
from fledge.ops.transfer import to_device
from fledge.targets import checks
from fledge.targets.attention import heads_per_key, install_attention, to_attention_mask
from fledge.targets.cache import TargetCache
from fledge.targets.interface import UNLIMITED, DecodingTarget, ReferenceDecoding, TrainingTarget
from fledge.targets.linear import computing_with, few_row_layers, use_few_row_products
from fledge.targets.quantized import quantization_of, weight_of
from fledge.targets.recurrent import RecurrentCache
from fledge.targets.sharded import gathered
from fledge.targets.structure import cache_argument, find_decoder, fix_longrope, last_layer_weights, layers_and_norm
from fledge.types import Features, Packed, Tree, group_documents

# tokens of a forward pass over packed documents: the cost of transformers' packed mask grows with their square, while
# each pass has the cost of its kernel launches
PASS_TOKENS = {"cpu": 1024, "cuda": 4096}


class TransformersTarget(TrainingTarget, DecodingTarget, ReferenceDecoding):
    """A transformers model and its tokenizer. The model is not copied, and is frozen.

    Hidden states are captured by forward hooks. The model is modified in three ways. longrope's factors are fixed to
    those for `max_length`. An "sdpa" attention is replaced by `targets.attention`. On a CPU, linear layers compute by
    `ops.linear`, and while requests are decoded, with copies of their weights (`ops.packed_weight`). The last
    two change speed and rounding only.

    The model's layers may be on several devices, as transformers' `device_map` places them. `device` is then the
    embedding's, where tokens are expected and where hidden states and logits are returned.

    With `sharded`, the layers are sharded over several ranks (`targets.sharded`), which all have to run the same number
    of forward passes: a packed row is then a single pass, whatever documents it has.

    Quantized models are computed by the modules of their formats; `quantization` names the format, and is empty for
    others. `head_weight` and the last layer's weights are then those that these modules compute with.

    `max_length` None is the config's maximum position. Raises ValueError for a RoPE type that is not supported, and for
    embeddings that are quantized.
    """

    implementation = "transformers"

    def __init__(
        self,
        model: nn.Module,
        tokenizer: Any,
        *,
        name: str = "",
        max_length: int | None = None,
        trust_remote_code: bool = False,
        sharded: bool = False,
    ):
        self.sharded = sharded
        self.model = model.eval().requires_grad_(False)
        self.tokenizer = tokenizer
        self.name = name
        self.trust_remote_code = trust_remote_code
        self.config = model.config.get_text_config(decoder=True)
        self.decoder = find_decoder(model, self.config.num_hidden_layers)
        self.head = model.get_output_embeddings()
        self.quantization = quantization_of(model.config)
        try:
            self.embedding: Tensor = weight_of(model.get_input_embeddings(), torch.float32)
        except ValueError as e:
            raise ValueError(f"{name or 'the target'} cannot be used: {e}; use a checkpoint that leaves it out") from e
        self.shape = llama_names(self.config) | {"vocab_size": self.embedding.shape[0]}
        self.max_length: int = max_length or self.shape.get("max_position_embeddings", UNLIMITED)
        self._cache_argument = cache_argument(model, self.decoder)
        self._copies: dict[nn.Linear, Tensor] = {}  # of layers, aliases of their weights that have copies
        self._keeps_logits = (
            "logits_to_keep" in inspect.signature(model.forward).parameters
        )  # computes some logits only
        if self.device.type == "cpu":
            use_few_row_products(model)
        self._heads_per_key = heads_per_key(self.config) if install_attention(self.decoder) else 1
        fix_longrope(self.decoder, RopeConfig.from_hf(self.shape).for_length(self.max_length))
        self._places = self._weights_at()

    # -- properties ---------------------------------------------------------------------------------------------

    @property
    def device(self) -> torch.device:
        return self.embedding.device

    @property
    def dtype(self) -> torch.dtype:
        return self.embedding.dtype

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    @property
    def stop_ids(self) -> frozenset[int]:
        """The end-of-sequence ids of the generation config, the model's config and the tokenizer."""
        found: set[int] = set()
        generation = getattr(self.model, "generation_config", None)
        for part in (generation, self.config, self.tokenizer):
            ids = getattr(part, "eos_token_id", None)
            found.update(ids if isinstance(ids, list) else [] if ids is None else [ids])
        return frozenset(found)

    @functools.cached_property
    def layers(self) -> nn.ModuleList:
        """The decoder layers. Raises ValueError, as `norm` does, if they cannot be identified. The model can then still
        decode without a draft."""
        return layers_and_norm(self.decoder, self.config.num_hidden_layers)[0]

    @functools.cached_property
    def norm(self) -> nn.Module:
        """The final norm, whose output is the head's input."""
        return layers_and_norm(self.decoder, self.config.num_hidden_layers)[1]

    @functools.cached_property  # asked for each request
    def rotary(self) -> bool:
        found = (module.rotary_emb for module in self.decoder.modules() if hasattr(module, "rotary_emb"))
        return any(not hasattr(rotation, "embed_positions") for rotation in found)  # GPT-J has a table of rotations

    @functools.cached_property  # likewise
    def context(self) -> int:
        """The config's number of positions; with longrope's short factors, the original number that they are for."""
        rope = RopeConfig.from_hf(self.shape).for_length(self.max_length)
        if rope.rope_type == "longrope" and not rope.long:
            return rope.original_max_position_embeddings
        return self.shape.get("max_position_embeddings", UNLIMITED)

    @functools.cached_property
    def head_weight(self) -> Tensor:
        if self.head.weight is self.model.get_input_embeddings().weight:
            return self.embedding
        return weight_of(self.head, self.dtype)

    @functools.cached_property
    def head_device(self) -> torch.device:
        return next(x.device for x in (*self.head.parameters(), *self.head.buffers()))

    @property
    def plain_head(self) -> bool:
        scalings = ("logits_scaling", "logit_scale", "final_logit_softcapping")
        return getattr(self.head, "bias", None) is None and not any(getattr(self.config, s, None) for s in scalings)

    def last_layer_weights(self) -> dict[str, Tensor]:
        with gathered(self.layers[-1]):
            eps = float(self.shape.get("rms_norm_eps", 1e-5))
            found = last_layer_weights(self.layers[-1], self.norm, eps, self.dtype)
            return {name: weight.clone() for name, weight in found.items()} if self.sharded else found

    # -- training -----------------------------------------------------------------------------------------------

    @torch.no_grad()
    def features(self, row: Packed, layers: Sequence[int]) -> Features:
        """See `TrainingTarget.features`."""
        # transformers' models expect int64
        token, position = to_device([row.token_T.long(), row.position_T.long()], self.device)
        documents, whole = row.without_filler(), None
        width = token.numel() if self.sharded else PASS_TOKENS[self.device.type]
        for a, b in group_documents(documents, width) if self.packs else documents:
            inside, T = [(start - a, end - a) for start, end in documents if a <= start < b], token.numel()
            part = self._run_documents(token[a:b], position[a:b], inside, layers)
            if b - a == T:
                return part
            if whole is None:
                whole = Features(*(x.new_zeros(T, *x.shape[1:]) for x in (part.aux_TAD, part.last_TD)))
            whole.aux_TAD[a:b], whole.last_TD[a:b] = part.aux_TAD, part.last_TD
        return whole

    def _run_documents(
        self, token_T: Tensor, position_T: Tensor, documents: Sequence[tuple[int, int]], layers: Sequence[int]
    ) -> Features:
        """The features of one pass over adjacent documents, [start, end) ranges of the tokens."""
        lengths = {end - start for start, end in documents}
        # documents of equal length are a batch without mask
        return self.run_decoder(token_T, position_T, layers, lengths.pop() if len(lengths) == 1 else None)

    def run_decoder(
        self, token_T: Tensor, position_T: Tensor, layers: Sequence[int], length: int | None = None
    ) -> Features:
        """The features of one forward pass over packed documents, or over a batch of documents of `length` tokens."""
        ids, positions = (x.view(-1, length or x.numel()) for x in (token_T, position_T))
        with self._capture(layers) as states, without_cudnn_sdpa(self.device):
            self.decoder(input_ids=ids, position_ids=positions, use_cache=False)
        return self._features(states, layers)

    @torch.no_grad()
    def logits(self, last_ND: Tensor) -> Tensor:
        """See `TrainingTarget.logits`. Applies the head, and the scalings in the config."""
        logits = self.head(last_ND.to(self.head_device)).to(last_ND.device)
        if scale := getattr(self.config, "logits_scaling", None):  # Granite
            logits = logits / scale
        if scale := getattr(self.config, "logit_scale", None):  # Cohere
            logits = logits * scale
        if cap := getattr(self.config, "final_logit_softcapping", None):  # Gemma
            logits = torch.tanh(logits / cap) * cap
        return logits

    @contextmanager
    def _capture(self, layers: Sequence[int] | None) -> Iterator[dict[int | str, Tensor]]:
        """Captures hidden states of forward passes within the block: the inputs of `layers` by id, and the final norm's
        output as "last". With None, captures nothing."""
        states: dict[int | str, Tensor] = {}
        if layers is None:
            yield states
            return

        def capture_input(index: int):
            def hook(_module, args, kwargs):
                states[index] = args[0] if args else kwargs["hidden_states"]

            return hook

        def capture_output(_module, _args, output):
            states["last"] = output

        hooks = [
            (self.norm if i == self.num_layers else self.layers[i]).register_forward_pre_hook(
                capture_input(i), with_kwargs=True
            )
            for i in layers
        ]
        hooks.append(self.norm.register_forward_hook(capture_output))
        try:
            yield states
        finally:
            for hook in hooks:
                hook.remove()

    def _features(self, states: dict[int | str, Tensor], layers: Sequence[int]) -> Features:
        """Captured states as features, with batch and sequence flattened to one axis. Raises ValueError if layers pass
        on something else than one hidden state per token."""
        for i in layers:
            if states[i].shape != states["last"].shape:
                raise ValueError(
                    f"no draft can be trained for {self.name or 'the target'}: the layers of "
                    f"{type(self.decoder).__name__} pass on states of shape {list(states[i].shape)}, where a draft "
                    f"reads one hidden state per token, {list(states['last'].shape)}"
                )
        last, *aux = (states[i].flatten(0, 1).to(self.device) for i in ("last", *layers))
        return Features(torch.stack(aux, dim=1) if aux else last.new_empty(last.shape[0], 0, last.shape[1]), last)

    # -- decoding -----------------------------------------------------------------------------------------------

    @functools.cached_property
    def _parameters(self) -> list[Tensor]:
        """The model's parameters: their list, since collecting them takes as long as a token of a small model."""
        return list(self.model.parameters())

    @functools.cached_property
    def _few_row_layers(self) -> list[nn.Linear]:
        return [] if self.sharded else few_row_layers(self.model)

    @functools.cached_property
    def _watched(self) -> list[nn.Module]:
        """The modules with parameters of the embedding, the head, and the first and the last layer: where these are
        tells whether the model was moved, and looking at all takes too long for each request."""
        try:
            layers = [self.layers[0], self.layers[-1]]
        except ValueError:  # they cannot be identified
            layers = []
        parts = [self.model.get_input_embeddings(), self.head, *layers]
        found = [module for part in parts if part is not None for module in part.modules()]
        return [module for module in found if next(module.parameters(recurse=False), None) is not None]

    def _weights_at(self) -> list[Any]:
        """What differs after the model's weights were moved, converted or replaced by others."""
        if self.sharded:
            return []
        return [(p.data_ptr(), p.dtype) for module in self._watched for p in module.parameters(recurse=False)]

    def _follow_weights(self) -> None:
        """Reads the model's weights again if they were moved."""
        if self._weights_at() != self._places:
            self._read_weights()
            self._places = self._weights_at()
            self.moves += 1

    def _read_weights(self) -> None:
        """Forgets what was made of the model's weights."""
        self.embedding = weight_of(self.model.get_input_embeddings(), torch.float32)
        for name in ("head_weight", "head_device", "_parameters"):
            vars(self).pop(name, None)

    def prepare_decoding(self) -> None:
        """See `DecodingTarget.prepare_decoding`. On a CPU, it copies the weights of linear layers, again if they have
        changed."""
        self._follow_weights()
        self._copies = {}  # frees copies of changed weights
        if layers := self._few_row_layers:
            aliases = packed_model(self, [layer.weight for layer in layers], self._parameters, list)
            self._copies = {} if aliases is None else dict(zip(layers, aliases, strict=True))

    def __getstate__(self) -> dict[str, Any]:
        """Without copies of weights, which can be neither copied nor pickled."""
        return self.__dict__ | {"_copies": {}}

    @torch.inference_mode()
    def prefill(
        self, prompts: Sequence[Sequence[int]], cache: TargetCache | RecurrentCache,
        layers: Sequence[int] | None = None, final: bool = True,
    ) -> tuple[Tensor, list[Features]]:  # fmt: skip
        """See `DecodingTarget.prefill`. One pass with right padding, which a causal model's earlier tokens do not see.
        A target without rollback takes one prompt, and returns no features."""
        lengths = [len(p) for p in prompts]
        longest = max(lengths)
        ids = torch.tensor([[*p, *[0] * (longest - len(p))] for p in prompts], device=self.device)
        ends = sorted(set(lengths))  # logits are needed only after these numbers of tokens
        inputs: dict[str, Any] = {}
        if self._keeps_logits:
            last = [n - 1 for n in ends]
            # a list, since accelerate would move a tensor to the first device, which may not be the last layer's
            inputs["logits_to_keep"] = 1 if len(ends) == 1 else last
        with self._capture(layers) as states, without_cudnn_sdpa(self.device):
            logits = self.run(ids, cache, **inputs)
        index = [ends.index(n) - len(ends) if self._keeps_logits else n - 1 for n in lengths]
        logits_BV = torch.stack([rows[i] for rows, i in zip(logits, index, strict=True)])
        cache.trim_padding(lengths)
        if layers is None:
            return logits_BV, []
        whole = self._features(states, layers)
        parts = zip(whole.aux_TAD.split(longest), whole.last_TD.split(longest), lengths, strict=True)
        return logits_BV, [Features(aux_TAD[:n], last_TD[0 if final else n - 1 : n]) for aux_TAD, last_TD, n in parts]

    def new_cache(self, sizes: Sequence[int] = ()) -> TargetCache | RecurrentCache:
        """See `DecodingTarget.new_cache`. The cache grows as needed."""
        if not self.rollback_problem:
            return TargetCache()
        return RecurrentCache(recompute=not self._cache_is_exact)

    @torch.inference_mode()
    def verify(
        self, tree: Tree, cache: TargetCache | RecurrentCache, layers: Sequence[int] | None = None
    ) -> tuple[Tensor, Features | None]:
        """See `DecodingTarget.verify`. For a chain of one request, transformers' own causal mask is used."""
        inputs: dict[str, Any] = {}
        cache.committed = cache.lengths
        if len(cache.lengths) > 1 or tree.parent_BN is not None:
            inputs = self._positions_and_masks(tree, cache)
        with self._capture(layers) as states, without_cudnn_sdpa(self.device):
            logits = self.run(tree.token_BN, cache, **inputs)
        return logits, None if layers is None else self._features(states, layers)

    def run(self, token_BN: Tensor, cache: TargetCache | RecurrentCache, **inputs: Any) -> Tensor:
        """Runs tokens after those in a cache, and adds them to the cache. Returns the model's logits [B, N, V]."""
        with computing_with(self._copies):
            if isinstance(cache, RecurrentCache):
                if self._keeps_logits:
                    inputs = {"logits_to_keep": token_BN.shape[1], **inputs}
                return cache.run(self.model, token_BN, self._cache_argument, **inputs).to(self.device)
            inputs = {self._cache_argument: cache, **inputs}
            return self.model(input_ids=token_BN, use_cache=True, **inputs).logits.to(self.device)

    def _positions_and_masks(self, tree: Tree, cache: TargetCache) -> dict[str, Any]:
        """The model's inputs for tree nodes after the sequences in the cache: positions, and an attention mask, or a
        dict of masks if the layers are of several kinds (full and sliding-window attention)."""
        ancestors, lengths = tree.ancestors(), cache.lengths
        B, N = tree.token_BN.shape
        if B > 1:
            node_BN = cache.allocate(N).to(self.device)
        else:
            node_BN = torch.arange(lengths[0], lengths[0] + N, device=self.device)[None]
        depth_BN = ancestors.sum(-1) - 1
        key_position = torch.arange(max(lengths) + N, device=self.device).expand(B, -1)
        past = (key_position < node_BN[:, :1])[:, None].expand(-1, N, -1)
        visible = past.scatter(2, node_BN[:, None].expand(-1, N, -1), ancestors)
        position_BN = node_BN[:, :1] + depth_BN
        key_position = key_position.scatter(1, node_BN, position_BN)

        def mask(kind: str) -> Tensor:
            seen, key_B1T, query_BN1 = visible, key_position[:, None], position_BN[..., None]
            if kind == "sliding_attention" and self._window:
                seen = visible & (key_B1T > query_BN1 - self._window)
            elif kind == "chunked_attention":  # Llama 4
                chunk = self.config.attention_chunk_size
                seen = visible & (key_B1T // chunk == query_BN1 // chunk)
            return to_attention_mask(seen[:, None], self._heads_per_key, self.dtype)

        kinds = set(getattr(self.config, "layer_types", None) or ["sliding_attention"])
        masks = {kind: mask(kind) for kind in sorted(kinds)}
        return dict(position_ids=position_BN, attention_mask=masks if len(masks) > 1 else next(iter(masks.values())))

    @functools.cached_property
    def _window(self) -> int | None:
        """The window of the layers with sliding-window attention, in tokens; None without one. A config may name a
        window that its model ignores, as Llama's does. So, unless the config says which layers have it, the model's
        code must name it too."""
        window = getattr(self.config, "sliding_window", None)
        if getattr(self.config, "layer_types", None) or window is None:
            return window
        # not FSDP's class, which is made of the model's when it is sharded
        own = next(c for c in type(self.decoder).__mro__ if not c.__module__.startswith("torch."))
        try:
            code = inspect.getsource(sys.modules[own.__module__])
        except (OSError, TypeError):  # a model that was written in an interactive session: its config is believed
            return window
        return window if "sliding_window" in code else None

    def reference_generate(self, prompt: Sequence[int], max_new_tokens: int) -> list[int]:
        """See `ReferenceDecoding`. transformers' greedy `generate`."""
        ids = torch.tensor([prompt], device=self.device)
        greedy = dict(do_sample=False, temperature=None, top_p=None, top_k=None, repetition_penalty=1.0)
        out = self.model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=max_new_tokens,
            eos_token_id=sorted(self.stop_ids) or None, pad_token_id=0, **greedy,
        )  # fmt: skip
        return out[0, len(prompt) :].tolist()

    # -- properties determined by running the model, once -------------------------------------------------------

    @functools.cached_property
    def packs(self) -> bool:
        return checks.isolates_documents(self)

    @functools.cached_property
    def _logits_problem(self) -> str:
        return checks.logits_problem(self)

    def check_logits(self) -> None:
        """See `TrainingTarget.check_logits`. Also raises ValueError if the model's logits are NaN or infinite."""
        if self._logits_problem:
            raise ValueError(f"{self.name or 'the target'} {self._logits_problem}")

    @functools.cached_property
    def rollback_problem(self) -> str:
        return checks.rollback_problem(self)

    @functools.cached_property
    def _cache_is_exact(self) -> bool:
        return checks.cache_matches_full_pass(self)

    def check_masks(self, requests: int = 1) -> None:
        checks.check_masks(self, requests)
