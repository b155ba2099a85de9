"""The common parts of all kinds of target: a transformers model's weights, structure, limits and tokenizer."""

from __future__ import annotations

from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from fledge.config import RopeConfig, llama_names
from fledge.targets.interface import UNLIMITED, Target
from fledge.targets.quantized import quantization_of, weight_of
from fledge.targets.structure import (
    find_decoder,
    fix_longrope,
    last_layer_weights,
    layers_and_norm,
    use_few_row_products,
)


class TargetParts(Target):
    """A transformers model and its tokenizer, with the parts that training and decoding read beside the forward pass:
    embedding, head, final norm, the weights of the last layer, config. The model is not copied, and is frozen.

    For a model that does not run, only embedding, head, norm and last layer need to have values. `last_layer` are the
    last layer's weights for a model without values for the last layer (None: the model has the values).
    `last_layer_complete`: whether no weight of the last layer, without experts, was left out (`load_head`).

    The model is modified in two ways. longrope always uses the factors for `max_length`. On a CPU, linear layers
    compute by `ops.linear`, which changes speed and rounding only.

    The model's layers may be on several devices, as placed by transformers' `device_map`. `device` is then the device
    of the embedding, where tokens are expected and where hidden states and logits are returned.

    `sharded` tells whether the layers are sharded over several ranks. `quantization` names the format of quantized
    weights, and is empty otherwise. For quantized weights, `head_weight` and the last layer's weights are the weights
    that the format's modules compute with. `moves` counts how often `follow_weights` has found the weights elsewhere.

    `max_length` None is the config's maximum position. Raises ValueError for a RoPE type that is not supported, and for
    embeddings that are quantized.
    """

    implementation = "none"
    last_layer_complete = True
    sharded = False

    def __init__(
        self,
        model: nn.Module,
        tokenizer: Any,
        *,
        name: str = "",
        max_length: int | None = None,
        trust_remote_code: bool = False,
        last_layer: dict[str, Tensor] | None = None,
    ):
        self.model = model.eval().requires_grad_(False)
        self.tokenizer, self.name, self.trust_remote_code = tokenizer, name, trust_remote_code
        self.moves, self._last_layer = 0, last_layer
        self.config = model.config.get_text_config(decoder=True)
        self.decoder = find_decoder(model, self.config.num_hidden_layers)
        self.head = model.get_output_embeddings()
        self.quantization = quantization_of(model.config)
        try:
            self.embedding: Tensor = weight_of(model.get_input_embeddings(), torch.float32)
        except ValueError as e:
            raise ValueError(f"{name or 'the target'} cannot be used: {e}; use a checkpoint that leaves it out") from e
        self.shape = llama_names(self.config) | {"vocab_size": self.embedding.shape[0]}
        self.context: int = self.shape.get("max_position_embeddings", UNLIMITED)
        self.max_length = max_length or self.context
        rope = RopeConfig.from_hf(self.shape).for_length(self.max_length)
        fix_longrope(self.decoder, rope)
        if rope.rope_type == "longrope" and not rope.long:
            self.context = rope.original_max_position_embeddings  # the limit of the short factors
        rotations = (module.rotary_emb for module in self.decoder.modules() if hasattr(module, "rotary_emb"))
        self.rotary = any(not hasattr(r, "embed_positions") for r in rotations)  # GPT-J has a table of rotations
        self.few_row_layers = use_few_row_products(model) if self.device.type == "cpu" else []
        self.note_places()

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

    @cached_property
    def layers(self) -> nn.ModuleList:
        """The decoder layers. Raises ValueError like `norm`, if the layers cannot be identified. The model can then
        still decode without a draft."""
        return layers_and_norm(self.decoder, self.config.num_hidden_layers)[0]

    @cached_property
    def norm(self) -> nn.Module:
        """The final norm, whose output is the head's input."""
        return layers_and_norm(self.decoder, self.config.num_hidden_layers)[1]

    @cached_property
    def head_weight(self) -> Tensor:
        if self.head.weight is self.model.get_input_embeddings().weight:
            return self.embedding
        return weight_of(self.head, self.dtype)

    @property
    def plain_head(self) -> bool:
        scalings = ("logits_scaling", "logit_scale", "final_logit_softcapping")
        return getattr(self.head, "bias", None) is None and not any(getattr(self.config, s, None) for s in scalings)

    def last_layer_weights(self) -> dict[str, Tensor]:
        if self._last_layer is not None:
            return self._last_layer
        eps = float(self.shape.get("rms_norm_eps", 1e-5))
        return last_layer_weights(self.layers[-1], self.norm, eps, self.dtype)

    @torch.no_grad()
    def logits(self, last_ND: Tensor) -> Tensor:
        """Applies the head, and the scalings in the config."""
        device = next(x.device for x in (*self.head.parameters(), *self.head.buffers()))
        logits = self.head(last_ND.to(device)).to(last_ND.device)
        if scale := getattr(self.config, "logits_scaling", None):  # Granite
            logits = logits / scale
        if scale := getattr(self.config, "logit_scale", None):  # Cohere
            logits = logits * scale
        if cap := getattr(self.config, "final_logit_softcapping", None):  # Gemma
            logits = torch.tanh(logits / cap) * cap
        return logits

    @cached_property
    def parameters(self) -> list[Tensor]:
        """The model's parameters, as a cached list: collecting parameters takes as long as a token of a small model."""
        return list(self.model.parameters())

    @cached_property
    def _owners(self) -> list[nn.Module]:
        """The modules with parameters of their own, as a cached list, since walking over all modules takes long."""
        return [m for m in self.model.modules() if m._parameters]

    def _weights_at(self) -> list[Any]:
        """The addresses and dtypes of the weights, which change when weights are moved, converted or replaced."""
        return [(p.data_ptr(), p.dtype) for m in self._owners for p in m._parameters.values() if p is not None]

    def note_places(self) -> None:
        """Notes the addresses and dtypes of the weights, for `follow_weights`."""
        self._places = self._weights_at()

    def follow_weights(self) -> bool:
        """Reads the model's weights again if the weights were moved, converted or replaced. Returns whether the weights
        were read again."""
        if self._weights_at() == self._places:
            return False
        self.embedding = weight_of(self.model.get_input_embeddings(), torch.float32)
        for name in ("head_weight", "parameters"):
            vars(self).pop(name, None)
        self.note_places()
        self.moves += 1
        return True
