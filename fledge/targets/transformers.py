"""Any transformers causal language model as a target: features by hooks, a cache that rolls back, its own logits."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from fledge.config import RopeConfig, llama_names
from fledge.kernels.sdpa import without_cudnn_sdpa
from fledge.kernels.transfer import to_device
from fledge.models.size import weight_bytes
from fledge.targets import checks
from fledge.targets.attention import heads_per_key, install_attention, ready_mask
from fledge.targets.cache import TargetCache
from fledge.targets.interface import UNLIMITED, DecodingTarget, ReferenceDecoding, TrainingTarget
from fledge.targets.linear import use_few_row_products
from fledge.targets.running import RunningState
from fledge.targets.structure import find_decoder, fix_longrope, last_layer_weights, layers_and_norm
from fledge.types import Features, Packed, Tree, group_documents

# tokens of a pass over packed documents: transformers' packed mask costs their square, a pass costs its launches
PIECE = {"cpu": 1024, "cuda": 4096}


class TransformersTarget(TrainingTarget, DecodingTarget, ReferenceDecoding):
    """A transformers model and its tokenizer. The model is used in place and frozen.

    Features are taken by hooks on the running modules. Three things of the model are changed: longrope's choice of
    frequencies is made once, for `max_length`; its attention to a mask ("sdpa") becomes `attention.attend`; on a CPU
    its linear layers compute by `kernels.linear`. The latter two differ in speed, for few rows, and in rounding.

    `max_length` None is the config's longest position. Raises ValueError for a RoPE type that is refused.
    """

    def __init__(
        self,
        model: nn.Module,
        tokenizer: Any,
        *,
        name: str = "",
        max_length: int | None = None,
        trust_remote_code: bool = False,
    ):
        self.model = model.eval().requires_grad_(False)
        self.tokenizer = tokenizer
        self.name = name
        self.trust_remote_code = trust_remote_code
        self.config = model.config.get_text_config(decoder=True)
        self.decoder = find_decoder(model, self.config.num_hidden_layers)
        self.head = model.get_output_embeddings()
        self.embedding: Tensor = model.get_input_embeddings().weight
        self.shape = llama_names(self.config) | {"vocab_size": self.embedding.shape[0]}
        self.max_length: int = max_length or self.shape.get("max_position_embeddings", UNLIMITED)
        self._one_logit = "logits_to_keep" in inspect.signature(model.forward).parameters
        if self.device.type == "cpu":
            use_few_row_products(model)
        self._heads_per_key = heads_per_key(self.config) if install_attention(self.decoder) else 1
        fix_longrope(self.decoder, RopeConfig.from_hf(self.shape).for_length(self.max_length))

    # -- what it is ---------------------------------------------------------------------------------------------

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
        """The generation config's, the model's and the tokenizer's end-of-sequence ids."""
        found: set[int] = set()
        generation = getattr(self.model, "generation_config", None)
        for ids in (getattr(generation, "eos_token_id", None), self.config.eos_token_id, self._tokenizer_eos()):
            found.update(ids if isinstance(ids, list) else [] if ids is None else [ids])
        return frozenset(found)

    def _tokenizer_eos(self) -> int | None:
        return None if self.tokenizer is None else self.tokenizer.eos_token_id

    @functools.cached_property
    def layers(self) -> nn.ModuleList:
        """Its decoder layers. Raises ValueError, as `norm` does, where the model does not show them; it can then decode
        without a draft."""
        return layers_and_norm(self.decoder, self.config.num_hidden_layers)[0]

    @functools.cached_property
    def norm(self) -> nn.Module:
        """Its final norm, whose output the head reads."""
        return layers_and_norm(self.decoder, self.config.num_hidden_layers)[1]

    @property
    def rotary(self) -> bool:
        return any(hasattr(module, "rotary_emb") for module in self.decoder.modules())

    @property
    def context(self) -> int:
        """Most tokens it reads: its positions, or those that longrope's chosen factors are for."""
        rope = RopeConfig.from_hf(self.shape).for_length(self.max_length)
        if rope.rope_type == "longrope" and not rope.long:
            return rope.original_max_position_embeddings
        return self.shape.get("max_position_embeddings", UNLIMITED)

    @property
    def head_weight(self) -> Tensor:
        return self.head.weight

    @property
    def plain_head(self) -> bool:
        scalings = ("logits_scaling", "logit_scale", "final_logit_softcapping")
        return getattr(self.head, "bias", None) is None and not any(getattr(self.config, s, None) for s in scalings)

    @property
    def weight_bytes(self) -> int:
        return weight_bytes(self.model)

    def last_layer_weights(self) -> dict[str, Tensor]:
        return last_layer_weights(self.layers[-1], self.norm, float(self.shape.get("rms_norm_eps", 1e-5)))

    def compile(self, **options: Any) -> None:
        """Compiles the norms and MLPs of its layers, once for all of them and for every length: what stands between
        their products is fused. `options` are torch.compile's."""
        for layer in self.layers:
            for part in layer.children():
                if type(part).__name__.endswith(("Norm", "MLP")):
                    part.compile(dynamic=True, **options)

    # -- training -----------------------------------------------------------------------------------------------

    @torch.no_grad()
    def features(self, row: Packed, layers: Sequence[int]) -> Features:
        """See `TrainingTarget.features`. Many documents go through in one pass where `packs`, else one at a time."""
        # transformers' models are written for int64
        token, position = to_device([row.token_T.long(), row.position_T.long()], self.device)
        documents, whole = row.without_filler(), None
        for a, b in group_documents(documents, PIECE[self.device.type]) if self.packs else documents:
            lengths = {end - start for start, end in documents if a <= start < b}
            each = lengths.pop() if len(lengths) == 1 else None  # documents of one length need no mask
            part, T = self.run_decoder(token[a:b], position[a:b], layers, each), token.numel()
            if b - a == T:
                return part
            if whole is None:
                whole = Features(*(x.new_zeros(T, *x.shape[1:]) for x in (part.aux_TAD, part.last_TD)))
            whole.aux_TAD[a:b], whole.last_TD[a:b] = part.aux_TAD, part.last_TD
        return whole

    def run_decoder(
        self, token_T: Tensor, position_T: Tensor, layers: Sequence[int], each: int | None = None
    ) -> Features:
        """Features of one pass over tokens of a row, or of several sequences of `each` tokens side by side."""
        ids, positions = (x.view(-1, each or x.numel()) for x in (token_T, position_T))
        with self._captured(layers) as held, without_cudnn_sdpa(self.device):
            self.decoder(input_ids=ids, position_ids=positions, use_cache=False)
        return self._features(held, layers)

    @torch.no_grad()
    def logits(self, last_ND: Tensor) -> Tensor:
        """See `TrainingTarget.logits`: the head, with the scalings that its config names."""
        logits = self.head(last_ND)
        if scale := getattr(self.config, "logits_scaling", None):  # Granite
            logits = logits / scale
        if scale := getattr(self.config, "logit_scale", None):  # Cohere
            logits = logits * scale
        if cap := getattr(self.config, "final_logit_softcapping", None):  # Gemma
            logits = torch.tanh(logits / cap) * cap
        return logits

    @contextmanager
    def _captured(self, layers: Sequence[int] | None) -> Iterator[dict[int | str, Tensor]]:
        """Collects the inputs of some layers and the output of the final norm while the model runs; nothing where
        `layers` is None."""
        held: dict[int | str, Tensor] = {}
        if layers is None:
            yield held
            return

        def before(index: int):
            def hook(_module, args, kwargs):
                held[index] = args[0] if args else kwargs["hidden_states"]

            return hook

        def after(_module, _args, output):
            held["last"] = output

        hooks = [
            (self.norm if i == self.num_layers else self.layers[i]).register_forward_pre_hook(
                before(i), with_kwargs=True
            )
            for i in layers
        ]
        hooks.append(self.norm.register_forward_hook(after))
        try:
            yield held
        finally:
            for hook in hooks:
                hook.remove()

    @staticmethod
    def _features(held: dict[int | str, Tensor], layers: Sequence[int]) -> Features:
        last = held["last"].flatten(0, 1)
        aux = [held[i].flatten(0, 1) for i in layers]
        return Features(torch.stack(aux, dim=1) if aux else last.new_empty(last.shape[0], 0, last.shape[1]), last)

    # -- decoding -----------------------------------------------------------------------------------------------

    @torch.inference_mode()
    def prefill(
        self, prompts: Sequence[Sequence[int]], layers: Sequence[int] | None = None
    ) -> tuple[Tensor, list[Features], TargetCache | RunningState]:
        """See `DecodingTarget.prefill`. One pass: shorter prompts are filled up at their ends, which no earlier token
        sees. A target that cannot roll back reads one prompt, without features, into a `RunningState`."""
        lengths, cache = [len(p) for p in prompts], self._new_cache()
        most = max(lengths)
        ids = torch.tensor([[*p, *[0] * (most - len(p))] for p in prompts], device=self.device)
        ends = sorted(set(lengths))  # only the logits after these are wanted
        inputs: dict[str, Any] = {}
        if self._one_logit:
            at = [n - 1 for n in ends]
            inputs["logits_to_keep"] = 1 if len(ends) == 1 else torch.tensor(at, device=self.device)
        with self._captured(layers) as held, without_cudnn_sdpa(self.device):
            logits = self.run(ids, cache, **inputs)
        place = [ends.index(n) - len(ends) if self._one_logit else n - 1 for n in lengths]
        logits_BV = torch.stack([rows[i] for rows, i in zip(logits, place, strict=True)])
        cache.settle(lengths)
        if layers is None:
            return logits_BV, [], cache
        whole = self._features(held, layers)
        parts = zip(whole.aux_TAD.split(most), whole.last_TD.split(most), lengths, strict=True)
        return logits_BV, [Features(aux_TAD[:n], last_TD[:n]) for aux_TAD, last_TD, n in parts], cache

    def _new_cache(self) -> TargetCache | RunningState:
        if not self.rollback_problem:
            return TargetCache()
        return RunningState(recompute=not self._steps_exactly)

    @torch.inference_mode()
    def verify(
        self, tree: Tree, cache: TargetCache | RunningState, layers: Sequence[int] | None = None
    ) -> tuple[Tensor, Features | None]:
        """See `DecodingTarget.verify`. A chain of one request needs no mask of ours."""
        inputs: dict[str, Any] = {}
        if len(cache.lengths) > 1 or tree.parent_BN is not None:
            inputs = self._positions_and_masks(tree, cache)
        with self._captured(layers) as held, without_cudnn_sdpa(self.device):
            logits = self.run(tree.token_BN, cache, **inputs)
        return logits, None if layers is None else self._features(held, layers)

    def run(self, token_BN: Tensor, cache: TargetCache | RunningState, **inputs: Any) -> Tensor:
        """The model's logits [B, N, V] of tokens that follow those in a cache, which then holds them too."""
        if isinstance(cache, RunningState):
            if self._one_logit:
                inputs = {"logits_to_keep": token_BN.shape[1], **inputs}
            return cache.run(self.model, token_BN, **inputs)
        return self.model(input_ids=token_BN, past_key_values=cache, use_cache=True, **inputs).logits

    def _positions_and_masks(self, tree: Tree, cache: TargetCache) -> dict[str, Any]:
        """The model's inputs for trees' nodes after what is in the cache: positions, and a mask for each kind of
        layer."""
        ancestors, lengths = tree.ancestors(), cache.lengths
        B, N = tree.token_BN.shape
        node_BN = cache.allocate(N) if B > 1 else torch.arange(lengths[0], lengths[0] + N, device=self.device)[None]
        depth_BN = ancestors.sum(-1) - 1
        key_position = torch.arange(max(lengths) + N, device=self.device).expand(B, -1)
        past = (key_position < node_BN[:, :1])[:, None].expand(-1, N, -1)
        visible = past.scatter(2, node_BN[:, None].expand(-1, N, -1), ancestors)
        position_BN = node_BN[:, :1] + depth_BN
        key_position = key_position.scatter(1, node_BN, position_BN)
        window = getattr(self.config, "sliding_window", None)

        def mask(kind: str) -> Tensor:
            seen = visible
            if kind == "sliding_attention" and window:
                seen = visible & (key_position[:, None] > position_BN[..., None] - window)
            return ready_mask(seen[:, None], self._heads_per_key, self.dtype)

        kinds = set(getattr(self.config, "layer_types", None) or ["sliding_attention"])
        masks = {kind: mask(kind) for kind in sorted(kinds)}
        return dict(position_ids=position_BN, attention_mask=masks if len(masks) > 1 else next(iter(masks.values())))

    def reference_generate(self, prompt: Sequence[int], max_new_tokens: int) -> list[int]:
        """See `ReferenceDecoding`: transformers' own greedy `generate`."""
        ids = torch.tensor([prompt], device=self.device)
        greedy = dict(do_sample=False, temperature=None, top_p=None, top_k=None, repetition_penalty=1.0)
        out = self.model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=max_new_tokens,
            eos_token_id=sorted(self.stop_ids) or None, pad_token_id=0, **greedy,
        )  # fmt: skip
        return out[0, len(prompt) :].tolist()

    # -- what is found out by trying, once ----------------------------------------------------------------------

    @functools.cached_property
    def packs(self) -> bool:
        return checks.keeps_documents_apart(self)

    @functools.cached_property
    def _logits_problem(self) -> str:
        return checks.logits_problem(self)

    def check_logits(self) -> None:
        """See `TrainingTarget.check_logits`. Also raises ValueError where its logits are NaN or infinite."""
        if self._logits_problem:
            raise ValueError(f"{self.name or 'the target'} {self._logits_problem}")

    @functools.cached_property
    def rollback_problem(self) -> str:
        return checks.rollback_problem(self)

    @functools.cached_property
    def _steps_exactly(self) -> bool:
        return checks.steps_exactly(self)

    def check_masks(self, requests: int = 1) -> None:
        checks.check_masks(self, requests)
