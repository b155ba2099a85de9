"""The configuration of a draft.

`DraftConfig.for_target` derives a draft's config from a target's, which `RopeConfig.from_hf` and `llama_names` read.
`fledge.io.formats` reads and writes a draft's config.json.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, fields, replace
from typing import Any

from fledge.io.fields import CONFIG, ROPE, Fields, format_value
from fledge.methods import METHODS, NORMS, Method

ROPE_TYPES = ("default", "linear", "llama3", "yarn", "longrope")
# The default layers of targets with too few layers for the engines' default. The output of the last layer is avoided
# if possible, since SGLang cannot capture it.
SHALLOW_TARGET_LAYERS = {2: (0, 1, 2), 3: (0, 1, 2), 4: (1, 2, 3), 5: (1, 2, 4), 6: (1, 3, 5)}
CONV_TAPS, CONV_GROUP = 2, 16  # the rows and channels of DFlash 2's convolutions (`drafts.dflash.BlockConv`)
SELECTOR_RANK, SELECTOR_TOKENS = 256, 16  # of DFlash 2's selector (`drafts.block.CandidateSelector`)
NO_RANK = 16  # the rank of the selector of zeros in the files of a draft without a selector
REQUIRED = ("hidden_size", "intermediate_size", "num_attention_heads", "vocab_size")
# Llama's names of sizes, and other names of the same sizes that a config's attribute map may not translate
LLAMA_NAMES = {
    "hidden_size": (),
    "num_attention_heads": (),
    "num_key_value_heads": ("num_kv_heads",),
    "head_dim": ("kv_channels",),
    "intermediate_size": ("ffn_dim", "ffn_hidden_size", "n_inner", "dff"),
    "max_position_embeddings": ("n_positions", "max_seq_len", "seq_length", "model_max_length"),
}


@dataclass(frozen=True)
class RopeConfig:
    """Rotary position embedding, with the fields of transformers' `rope_parameters`.

    `long` selects the long one of longrope's two factor lists. It is set once, from the configured maximum length: a
    choice by the length of each call would make packed rows differ from unpacked ones, and prefill from decoding.
    Missing YaRN fields are set to transformers' defaults, since SpecForge does not have defaults for them.
    """

    rope_type: str = "default"
    rope_theta: float = 10000.0
    partial_rotary_factor: float = 1.0
    factor: float | None = None
    original_max_position_embeddings: int | None = None
    low_freq_factor: float | None = None
    high_freq_factor: float | None = None
    attention_factor: float | None = None
    beta_fast: float | None = None
    beta_slow: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool | None = None
    short_factor: tuple[float, ...] | None = None
    long_factor: tuple[float, ...] | None = None
    long: bool = False

    def __post_init__(self) -> None:
        if self.rope_type != "yarn":
            return
        defaults = {"beta_fast": 32.0, "beta_slow": 1.0, "truncate": True}
        filled = {k: v for k, v in defaults.items() if getattr(self, k) is None}
        if not (self.mscale and self.mscale_all_dim):  # transformers ignores either field if the other is missing
            filled |= {"mscale": 1.0, "mscale_all_dim": 0.0}
        for name, value in filled.items():
            object.__setattr__(self, name, value)

    @classmethod
    def from_hf(cls, hf: dict[str, Any]) -> RopeConfig:
        """Reads transformers 5's `rope_parameters`, or the older `rope_theta` with `rope_scaling`.

        A non-null `rope_scaling` has precedence over `rope_parameters`, as in transformers. Raises ValueError for an
        unsupported RoPE type, and for a missing or invalid field.
        """
        top = Fields(hf, CONFIG)
        given = top.get("rope_parameters", {})
        if "full_attention" in given:  # one dict for each layer type; the draft's layers have full attention
            given = given["full_attention"]
        params = Fields(given, ROPE, "rope_parameters")
        theta = params.get("rope_theta")  # which the older rope_scaling does not have
        if top.get("rope_scaling"):
            params = top.nested("rope_scaling", ROPE)
        values = {key: params.get(key) for key in ROPE}
        named, older = values.pop("rope_type"), values.pop("type")
        kind = named or older or "default"
        kind = "longrope" if kind == "su" else kind  # the name in Phi-3's first configs
        if kind == "dynamic":
            raise ValueError(
                "RoPE type 'dynamic' is refused: it changes the frequencies with the length of a call, so that a "
                "packed row differs from an unpacked one and prefill from decoding. Set rope_type to 'yarn' or "
                "'linear' in the target's config, or remove the scaling and stay within its trained length."
            )
        if kind not in ROPE_TYPES:
            raise ValueError(f"unknown RoPE type {format_value(kind)}; fledge supports {', '.join(ROPE_TYPES)}")
        values["rope_theta"] = values["rope_theta"] or theta or top.get("rope_theta", cls.rope_theta)
        if values["partial_rotary_factor"] is None:
            values["partial_rotary_factor"] = top.get("partial_rotary_factor", cls.partial_rotary_factor)
        if kind in ("llama3", "yarn", "longrope"):
            # as in transformers: the top level's field has precedence, and the default is max_position_embeddings
            trained = values["original_max_position_embeddings"] or top.get("max_position_embeddings")
            values["original_max_position_embeddings"] = top.get("original_max_position_embeddings", trained)
        known = {k: tuple(v) if isinstance(v, list) else v for k, v in values.items()}
        return cls(rope_type=kind, **known)._complete(top.get("max_position_embeddings"))

    def _complete(self, max_positions: int | None) -> RopeConfig:
        """Sets a missing `factor` to the ratio of the maximum and the original length (Phi-3, DeepSeek). Raises
        ValueError if a field that the RoPE type requires is missing."""
        needed = {"linear": ("factor",), "llama3": ("factor", "low_freq_factor", "high_freq_factor")}
        missing = [f"a `{key}`" for key in needed.get(self.rope_type, ()) if getattr(self, key) is None]
        if missing:
            raise ValueError(f"RoPE type {self.rope_type!r} needs {' and '.join(missing)} in the config")
        if self.rope_type == "default" or self.factor is not None:
            return self
        original = self.original_max_position_embeddings
        if not original or not max_positions:
            raise ValueError(
                f"RoPE type {self.rope_type!r} needs a `factor` in the config, or max_position_embeddings and "
                "original_max_position_embeddings"
            )
        return replace(self, factor=max_positions / original)

    def to_hf(self) -> dict[str, Any]:
        """The `rope_parameters` dict of transformers 5, without fields that are None."""
        out = {f.name: getattr(self, f.name) for f in fields(self) if f.name != "long"}
        out = {k: list(v) if isinstance(v, tuple) else v for k, v in out.items() if v is not None}
        if self.partial_rotary_factor == 1.0:
            del out["partial_rotary_factor"]
        return out

    def for_length(self, max_length: int) -> RopeConfig:
        """A copy with longrope's factor list for sequences of at most `max_length` tokens."""
        if self.rope_type != "longrope":
            return self
        original = self.original_max_position_embeddings
        if original is None:
            raise ValueError("RoPE type 'longrope' needs original_max_position_embeddings in the config")
        return replace(self, long=max_length > original)


@dataclass(frozen=True)
class Provenance:
    """Facts about a draft's training, written under `fledge` in config.json and checked when the draft is loaded.

    `target` is the target's directory or hub id and `target_layers` its number of layers. `depth` is the number of TTT
    steps, `max_length` the maximum length in tokens, and `coverage` the share of the data's tokens that are in the
    draft's vocabulary. The hashes are those of `io.fingerprints`. `template_kwargs` are the variables of the chat
    template in training. If they were not the same for all chats, `template_modes` are all sets of them, and
    `template_kwargs` the variables that all sets share.
    """

    target: str = ""
    target_layers: int | None = None
    tokenizer_sha256: str | None = None
    template_sha256: str | None = None
    vocabulary_sha256: str | None = None
    template_kwargs: dict[str, Any] = field(default_factory=dict)
    template_modes: tuple[dict[str, Any], ...] = ()
    depth: int | None = None
    max_length: int | None = None
    coverage: float | None = None

    @property
    def modes(self) -> tuple[dict[str, Any], ...]:
        """All sets of template variables in training, at least one."""
        return self.template_modes or (self.template_kwargs,)


@dataclass(frozen=True)
class DraftConfig:
    """The configuration of a draft.

    `method` is a key of `fledge.methods.METHODS`, and `family` its entry there. `qk_norm`, `norm_before_residual`,
    `norm_before_fc`, `fc_norm` and `norm_output` are variants of EAGLE-3: EAGLE-3.1 has `fc_norm` and `norm_output`,
    the others are from speculators and SpecForge. `fc_bias` is for EAGLE-1 only. `mask_token_id` is the input token of
    a one-pass draft at depths where the token is unknown. `block_causal`, `block_conv`, `candidate_selector` and
    `windows` are for DFlash: with `block_causal`, rows of a block see only the rows up to themselves; with `block_conv`
    and `candidate_selector`, a draft has DFlash 2's convolutions over the rows of a block, and its choice among
    candidates; `windows` are the sliding windows of all layers in tokens, None for a layer without a window, or empty
    if no layer has a window. `aux_layers` are the ids of the
    target's hidden states that are read, as in transformers' `hidden_states`: id i is the input of layer i, i.e. the
    output of layer i - 1. None means the engines' default (`engine_layers`). Raises ValueError for fields that
    contradict each other.
    """

    hidden_size: int
    intermediate_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    vocab_size: int
    draft_vocab_size: int
    target_hidden_size: int
    method: str = "eagle3"
    fc_bias: bool = False
    rms_norm_eps: float = 1e-5
    rope: RopeConfig = field(default_factory=RopeConfig)
    max_position_embeddings: int = 2048
    num_hidden_layers: int = 1
    num_aux_hidden_states: int = 3
    aux_layers: tuple[int, ...] | None = None
    attention_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    norm_before_residual: bool = False
    norm_before_fc: bool = False
    fc_norm: bool = False
    norm_output: bool = False
    own_embeddings: bool = False
    mask_token_id: int | None = None
    block_causal: bool = False
    block_conv: bool = False
    candidate_selector: bool = False
    windows: tuple[int | None, ...] = ()
    bos_token_id: int | None = None
    eos_token_id: int | None = None
    pad_token_id: int | None = None
    provenance: Provenance = field(default_factory=Provenance)

    def __post_init__(self) -> None:
        if self.method not in METHODS:
            raise ValueError(f"method {format_value(self.method)} is none of {', '.join(METHODS)}")
        self._check_family()
        if self.family.masks != (self.mask_token_id is not None):
            raise ValueError(
                f"mask_token_id is {self.mask_token_id}: drafts that read a mask token (P-EAGLE, DFlash) need one, and "
                "other drafts must not have one"
            )
        if self.mask_token_id is not None and not 0 <= self.mask_token_id < self.vocab_size:
            raise ValueError(f"mask_token_id {self.mask_token_id} is outside the vocabulary of {self.vocab_size}")
        if self.draft_vocab_size > self.vocab_size:
            raise ValueError(
                f"the draft vocabulary has {self.draft_vocab_size} tokens and the target's only {self.vocab_size}; "
                f"choose at most {self.vocab_size}"
            )
        if self.num_attention_heads % self.num_key_value_heads:
            raise ValueError(
                f"{self.num_attention_heads} attention heads cannot share {self.num_key_value_heads} key-value heads "
                "evenly; make the first a multiple of the second"
            )
        if self.fc_norm and self.norm_before_fc:
            raise ValueError("fc_norm (EAGLE-3.1) and norm_before_fc (speculators) exclude each other; choose one")
        if self.hidden_size != self.target_hidden_size and not self.own_embeddings:
            raise ValueError(
                f"a draft of hidden size {self.hidden_size} cannot use the target's embeddings of size "
                f"{self.target_hidden_size}; it needs embeddings of its own, or the target's hidden size"
            )
        if self.aux_layers is not None and len(self.aux_layers) != self.num_aux_hidden_states:
            raise ValueError(
                f"num_aux_hidden_states is {self.num_aux_hidden_states} but the config lists "
                f"{len(self.aux_layers)} layers: {list(self.aux_layers)}"
            )

    @property
    def family(self) -> Method:
        """The draft's entry in the table of methods."""
        return METHODS[self.method]

    @property
    def target_max_length(self) -> int | None:
        """The `max_length` to load the target with. With longrope, whose factors depend on the length, the `max_length`
        of training; else None."""
        return self.provenance.max_length if self.rope.rope_type == "longrope" else None

    def _check_family(self) -> None:
        """Raises ValueError for fields that the method does not support."""
        family = self.family
        same_shape = self.hidden_size == self.target_hidden_size and self.draft_vocab_size == self.vocab_size
        if family.borrows_head and not same_shape:
            raise ValueError(
                f"a draft of {family.title} uses its target's head, so it must have the target's hidden size and its "
                "whole vocabulary"
            )
        if on := [name for name in NORMS if name not in family.options and getattr(self, name)]:
            raise ValueError(f"{' and '.join(on)}: {family.title} has no such norm; leave it out")
        if family.layout == "dflash" and not self.aux_layers:
            raise ValueError(f"the config of {family.title} must list the target's layers that the draft reads")
        if self.mlp_bias and family.layout == "dflash":
            raise ValueError(f"mlp_bias: the MLPs of {family.title} have no biases; leave it out")
        of_blocks = dict(
            block_causal=self.block_causal, block_conv=self.block_conv, candidate_selector=self.candidate_selector,
            sliding_window=self.windows,
        )  # fmt: skip
        for name, value in of_blocks.items():
            if value and name not in family.options:
                raise ValueError(f"{name}: {family.title} drafts no block of rows; leave it out")
        if self.block_conv and self.hidden_size % CONV_GROUP:
            raise ValueError(
                f"block_conv needs a hidden size that is a multiple of {CONV_GROUP}, and it is {self.hidden_size}; "
                "leave block_conv out"
            )
        if self.windows and len(self.windows) != self.num_hidden_layers:
            raise ValueError(f"the config has {self.num_hidden_layers} layers, and windows of {len(self.windows)}")
        if len({w for w in self.windows if w}) > 1:
            raise ValueError(f"the windows {self.windows} have several sizes; config.json has a place for one")
        depth = self.provenance.depth or 0
        if narrow := next((w for w in self.windows if w is not None and w <= depth), None):
            raise ValueError(f"a sliding window of {narrow} is narrower than a block, which has {depth + 1} rows")
        if self.aux_layers and not family.reads_layers:
            raise ValueError(f"aux_layers: {family.title} reads the target's final hidden state only; leave it out")

    @classmethod
    def for_target(cls, hf: dict[str, Any], *, max_length: int, **overrides: Any) -> DraftConfig:
        """A one-layer draft with the target's hidden size, attention heads, RoPE and norm epsilon.

        `hf` is the target's text config from `llama_names`. `overrides` replace any fields. Raises ValueError if the
        target's config lacks a required field or has an unsupported RoPE type, or if overrides contradict each other.
        """
        missing = [k for k in REQUIRED if hf.get(k) is None]
        if missing:
            raise ValueError(
                f"the target's config has no {', '.join(missing)}, from which the draft's shape is derived"
            )
        width = overrides.get("hidden_size", hf["hidden_size"])
        shape = dict(
            hidden_size=width,
            intermediate_size=hf["intermediate_size"],
            target_hidden_size=hf["hidden_size"],
            vocab_size=hf["vocab_size"],
            draft_vocab_size=hf["vocab_size"],
            rms_norm_eps=float(hf.get("rms_norm_eps", 1e-5)),
            rope=RopeConfig.from_hf(hf).for_length(max_length),
            max_position_embeddings=hf.get("max_position_embeddings", max_length),
            bos_token_id=first_of(hf.get("bos_token_id")),
            eos_token_id=first_of(hf.get("eos_token_id")),
            pad_token_id=hf.get("pad_token_id"),
            own_embeddings=width != hf["hidden_size"],
            **heads_of(hf),
        )
        return cls(**{**shape, **overrides})

    def with_provenance(self, **known: Any) -> DraftConfig:
        """A copy with these provenance fields replaced."""
        return replace(self, provenance=replace(self.provenance, **known))


def llama_names(config: Any) -> dict[str, Any]:
    """A transformers text config as a dict with the field names of Llama's config, for `DraftConfig.for_target`.

    Names are translated by the config's attribute map and by LLAMA_NAMES. Missing sizes get defaults: an MLP of four
    times the hidden size (GPT-2, Bloom), and heads of dimension 64 for models without attention (Mamba). A RoPE type
    that drafts do not support (Gemma 4's "proportional") is replaced by plain RoPE with the same base.
    `max_position_embeddings` is missing if the config has no maximum length (ALiBi, recurrent layers).
    """
    hf = {name: value for name, value in config.to_dict().items() if value is not None}
    for name, others in LLAMA_NAMES.items():
        found = next((k for k in (name, config.attribute_map.get(name), *others) if k in hf), None)
        if found is not None:
            hf[name] = hf[found]
    if width := hf.get("hidden_size"):
        hf.setdefault("intermediate_size", 4 * width)
        hf.setdefault("num_attention_heads", width // math.gcd(width, 64))
    if hf.get("multi_query") and not hf.get("new_decoder_architecture"):  # Falcon-7B and GPTBigCode have one KV head
        hf["num_key_value_heads"] = 1
    return hf | {"rope_parameters": _usable_rope(hf.get("rope_parameters"))}


def _usable_rope(parameters: dict[str, Any] | None) -> dict[str, Any]:
    """The RoPE parameters of a draft. "dynamic" is kept, and refused later: with it, the target's own features depend
    on the length of a call."""
    parameters = parameters or {}
    if "full_attention" in parameters:  # by kind of layer; None of layers that do not rotate (Beam)
        parameters = parameters["full_attention"] or next(filter(None, parameters.values()), {})
    kind = parameters.get("rope_type") or parameters.get("type") or "default"
    if kind in (*ROPE_TYPES, "su", "dynamic"):
        return parameters
    return {"rope_type": "default", "rope_theta": parameters.get("rope_theta") or 10000.0}


def default_aux_layers(target_layers: int) -> tuple[int, ...]:
    """The default `DraftConfig.aux_layers`: `engine_layers`, or for targets of 2 to 6 layers SHALLOW_TARGET_LAYERS.

    Raises ValueError for a target with fewer than 2 layers.
    """
    if target_layers < 2:
        raise ValueError(
            "EAGLE-3 reads three hidden states, and a target of one layer has fewer; use fledge train --method eagle1, "
            "which reads the final hidden state only"
        )
    return engine_layers(target_layers) or SHALLOW_TARGET_LAYERS[target_layers]


def engine_layers(n: int) -> tuple[int, int, int] | None:
    """The layers that engines read of a target of n layers if a draft's config lists none; None if these would not be
    three different layers."""
    return (2, n // 2, n - 3) if n >= 7 else None


def first_of(ids: int | list[int] | None) -> int | None:
    """A special token's id in a config, which is the first if the config lists several ids."""
    return next(iter(ids), None) if isinstance(ids, list) else ids


def heads_of(hf: dict[str, Any]) -> dict[str, int]:
    """The fields of a `DraftConfig` for the attention heads, with the defaults of Llama's config."""
    top = Fields(hf, CONFIG)
    heads = top.get("num_attention_heads")
    return dict(
        num_attention_heads=heads,
        num_key_value_heads=top.get("num_key_value_heads", heads),
        head_dim=top.get("head_dim") or top.get("hidden_size") // heads,
    )
