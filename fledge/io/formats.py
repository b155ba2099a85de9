"""A draft's config.json: `config_from_hf` reads it and `config_to_hf` writes it.

A config.json may have the flat layout of fledge, vLLM, SGLang and SafeAILab's code, which has all fields at the top
level, or speculators' format, which `vllm serve DRAFT` loads. speculators' format has the fields of the decoder layers
under `transformer_layer_config`, and under `speculators_config` the target ("verifier") and the number of tokens to
draft. Sources: speculators' config classes (`SpeculatorModelConfig`, `Eagle3SpeculatorConfig`,
`PEagleSpeculatorConfig`, `EagleSpeculatorConfig`) and vLLM's reader of speculators' configs
(transformers_utils/configs/speculators).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import fields, replace
from typing import Any

from fledge.config import REQUIRED, DraftConfig, Provenance, RopeConfig, engine_layers, first_of, heads_of
from fledge.io.fields import (
    CONFIG,
    EAGLE_CONFIG,
    FLAG,
    FLEDGE,
    OBJECT,
    TEXT,
    TOKEN,
    Fields,
    check_template_kwargs,
    format_value,
    integer,
    list_of,
    shortened,
)
from fledge.methods import EAGLE1, EAGLE3, METHODS, PEAGLE, Method

# fields of a `DraftConfig` that have the same name in config.json
SAME_NAMES = (
    "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim",
    "rms_norm_eps", "vocab_size", "draft_vocab_size", "max_position_embeddings", "attention_bias", "mlp_bias",
    "bos_token_id", "eos_token_id", "pad_token_id",
)  # fmt: skip
# An engine's id of a hidden state minus fledge's id. fledge numbers hidden states as transformers' `hidden_states`: id
# i is the input of layer i, i.e. the output of layer i - 1, and 0 is the embedding. In SGLang and DeepSpec, id i is the
# output of layer i.
OFFSETS = {"vllm": 0, "speculators": 0, "safeailab": 0, "sglang": -1, "deepspec": -1}


def to_engine(ids: Iterable[int], engine: str) -> list[int]:
    """fledge's ids in an engine's numbering; `engine` is a key of OFFSETS."""
    return [i + OFFSETS[engine] for i in ids]


def from_engine(ids: Iterable[int], engine: str) -> list[int]:
    """An engine's ids in fledge's numbering; `engine` is a key of OFFSETS."""
    return [i - OFFSETS[engine] for i in ids]


# speculators_model_type: the architecture in the flat layout, from which `config_from_hf` knows the method
ARCHITECTURES = {"eagle": "LlamaForCausalLMEagle", "eagle3": "LlamaForCausalLMEagle3", "peagle": "PEagleDraftModel"}
CLASSES = {"eagle3": "Eagle3DraftModel", "peagle": "PEagleDraftModel"}  # speculators' model classes
LAYER_TYPES = ("llama", "qwen3")
DRAFT_FIELDS = ("draft_vocab_size", "target_hidden_size", "eagle_aux_hidden_state_layer_ids")
NORM_FIELDS = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")
MASK_FIELDS = ("mask_token_id", "ptd_token_id")  # early versions of speculators write ptd_token_id
SPECULATORS = {  # fields that only speculators' format has, and shared fields that are read from it
    "speculators_model_type": TEXT,
    "speculators_config": OBJECT,
    "transformer_layer_config": OBJECT,
    "fledge": OBJECT,
    "layernorms": FLAG,
    "fusion_bias": FLAG,
    "norm_before_residual": FLAG,
}
SPECULATORS_CONFIG = {"verifier": OBJECT, "proposal_methods": list_of(OBJECT, 64)}
PROPOSAL = {"speculative_tokens": integer(1, 64)}
VERIFIER = {"name_or_path": TEXT}


def is_speculators(hf: dict[str, Any]) -> bool:
    """Whether a config.json is in speculators' format. A flat config may also have a `speculators_config`."""
    return ("speculators_model_type" in hf or "speculators_config" in hf) and "hidden_size" not in hf


def flat_config(hf: dict[str, Any]) -> dict[str, Any]:
    """The flat layout of a config.json in speculators' format.

    The target's name becomes `fledge.target`, unless the file has a `fledge.target`. The number of tokens to draft
    becomes `fledge.depth`, except in a file written by fledge, where the number may be a default. Raises ValueError for
    kinds of drafts and of layers that fledge does not have.
    """
    top = Fields(hf, SPECULATORS)
    kind = top.get("speculators_model_type")
    if kind not in ARCHITECTURES:
        raise ValueError(
            f"a draft in speculators' format of type {format_value(kind)}; fledge reads {', '.join(ARCHITECTURES)}"
        )
    layer = top.get("transformer_layer_config", {})
    if layer.get("model_type", "llama") not in LAYER_TYPES:
        raise ValueError(
            f"transformer_layer_config.model_type is {format_value(layer['model_type'])}; fledge's drafts have layers "
            f"of type {' or '.join(LAYER_TYPES)}"
        )
    copied = (*DRAFT_FIELDS, *NORM_FIELDS, "quantization_config", *(MASK_FIELDS if kind == "peagle" else ()))
    flat = {name: value for name, value in layer.items() if name != "architectures"}
    flat |= {name: hf[name] for name in copied if name in hf}
    if kind == "eagle":
        if top.get("layernorms"):
            raise ValueError("an EAGLE-1 draft with layernorms (HASS), which fledge does not support")
        flat["bias"] = top.get("fusion_bias", False)
    if kind == "eagle3" and "norm_before_residual" not in top:
        raise ValueError(
            "norm_before_residual is missing: vLLM then takes true, and speculators false. Write into config.json the "
            "one that the draft was trained with"
        )
    how = top.nested("speculators_config", SPECULATORS_CONFIG)
    verifier, own = how.nested("verifier", VERIFIER), top.get("fledge", {})
    if not own.get("target") and "name_or_path" in verifier:
        own = own | {"target": verifier.get("name_or_path")}
    if "fledge" not in top and (methods := how.get("proposal_methods")):
        tokens = Fields(methods[0], PROPOSAL, "proposal_methods").get("speculative_tokens")
        own = own | ({"depth": tokens} if tokens else {})
    return flat | {"architectures": [ARCHITECTURES[kind]]} | ({"fledge": own} if own else {})


# These fields get into a draft's config.json with the config of a target or of a different kind of draft. Engines load
# a draft with these fields without a message.

# fields that only `deviations` reads; engines ignore the fields, except for the values that it lists
REFUSED_FIELDS = ("layer_types", "sliding_window", "quantization_config", "logit_scale", "dflash_config",
          "dspark_noise_token_id")  # fmt: skip
DFLASH_CONFIG = {"mask_token_id": TOKEN}
MASK_TOKEN_FIELDS = ("mask_token_id", "pard_token", "ptd_token_id")  # the engines' names of the mask token's id


def deviations(hf: dict[str, Any], family: Method) -> list[tuple[str, str, str]]:
    """The fields of a config.json in the flat layout with which an engine computes a draft otherwise than fledge. Each
    is a cause (the field's value), a symptom (the effect in the engine that serves the draft), and a cure (the change
    to make). Raises ValueError for an invalid field."""
    top, found = Fields(hf, CONFIG), []
    kinds = top.get("layer_types", [])[: top.get("num_hidden_layers", 1)]
    if (window := top.get("sliding_window")) and not all(kind == "full_attention" for kind in kinds):
        found.append((
            f"the draft's layers attend to a sliding window only (layer_types, sliding_window {window:,})",
            "vLLM masks all tokens before the window, and fledge does not: acceptance falls in texts longer than it",
            "remove both fields if the draft was trained without a window; fledge does not support drafts with one",
        ))  # fmt: skip
    if "quantization_config" in top:
        kind = format_value(top.get("quantization_config").get("quant_method"))
        found.append((
            f"quantization_config asks for quantized weights ({kind})",
            "vLLM fails to load the draft, or takes its values for quantized ones: acceptance about 0",
            "remove it if the weights are in 16 or 32 bits; fledge does not support quantized drafts",
        ))  # fmt: skip
    if (scale := top.get("logit_scale", 1)) != 1:
        found.append((
            f"logit_scale is {format_value(scale)}",
            "vLLM multiplies the draft's logits by it, and fledge does not: sampled drafts are accepted less often, "
            "and with a negative one none",
            "remove it if the draft was trained without it; fledge does not support scaled logits",
        ))  # fmt: skip
    if family.reads_layers and not top.nested("eagle_config", EAGLE_CONFIG).get("use_aux_hidden_state", True):
        found.append((
            "eagle_config.use_aux_hidden_state is false",
            "vLLM leaves out fc and feeds the target's last hidden state to the draft, or fails: acceptance about 0",
            "set it to true if the draft was trained on hidden states of several layers; fledge does not support "
            "others",
        ))  # fmt: skip
    if family.masks:
        ids = {name: top.get(name) for name in (*MASK_TOKEN_FIELDS, "dspark_noise_token_id")}
        ids["dflash_config.mask_token_id"] = top.nested("dflash_config", DFLASH_CONFIG).get("mask_token_id")
        listed = {name: token for name, token in ids.items() if token is not None}
        if len(set(listed.values())) > 1:
            found.append((
                f"the mask token is {' and '.join(f'{token} in {name}' for name, token in listed.items())}",
                "versions of vLLM read different ones of these fields: with a wrong one, only the first drafted token "
                "is accepted as before",
                "set all of them to the mask token of training",
            ))  # fmt: skip
    return found


def config_from_hf(hf: dict[str, Any], *, refuse_deviations: bool = True) -> DraftConfig:
    """Reads a draft's config.json. Raises ValueError if it is not that of an EAGLE draft, or has an invalid or
    unsupported field; with `refuse_deviations`, also for fields with which an engine would compute something else
    (`deviations`)."""
    hf = flat_config(hf) if isinstance(hf, dict) and is_speculators(hf) else hf
    top = Fields(hf, CONFIG)
    missing = [k for k in REQUIRED if k not in top]
    if missing:
        raise ValueError(f"config.json lacks {', '.join(missing)}; is this a draft model's directory?")
    eagle, own = top.nested("eagle_config", EAGLE_CONFIG), top.nested("fledge", FLEDGE)
    family, mask = _family(top), _mask_token(top)
    if family is EAGLE1 and top.get("qkv_bias"):
        raise ValueError("an EAGLE-1 draft with qkv_bias, which fledge does not support")
    if refuse_deviations and (found := deviations(hf, family)):
        raise ValueError("{}: {}; {}".format(*found[0]))
    if family.masks and mask is None:
        raise ValueError(
            "a P-EAGLE draft without mask_token_id; SpecForge writes it to peagle_config.json, copy it from there"
        )
    if top.get("hidden_act", "silu") != "silu":
        raise ValueError(f"hidden_act {format_value(top.get('hidden_act'))}: every engine's EAGLE-3 draft uses silu")
    aux = own.get("aux_layers", top.get("eagle_aux_hidden_state_layer_ids"))
    if aux is None and "eagle_aux_hidden_state_layer_ids" in eagle:
        aux = from_engine(eagle.get("eagle_aux_hidden_state_layer_ids"), "sglang")
    if aux is None and family.reads_layers and "target_layer_ids" in top:
        aux = from_engine(top.get("target_layer_ids"), "deepspec")
    hidden, vocabulary = top.get("hidden_size"), top.get("vocab_size")
    width = top.get("target_hidden_size", hidden)
    aux_count = (top.get("num_aux_hidden_states") or (len(aux) if aux else 3)) if family.reads_layers else 0
    known = {f.name: own.get(f.name) for f in fields(Provenance) if f.name in own}
    check_template_kwargs(known.get("template_kwargs", {}), "fledge.template_kwargs")
    known["template_modes"] = tuple(known.get("template_modes", ()))
    for mode in known["template_modes"]:
        check_template_kwargs(mode, "fledge.template_modes")
    values = {name: top.get(name) for name in (*SAME_NAMES, "norm_before_residual", "norm_output") if name in top}
    values |= dict(
        draft_vocab_size=top.get("draft_vocab_size", vocabulary),
        target_hidden_size=width,
        rms_norm_eps=float(top.get("rms_norm_eps", 1e-6)),
        rope=replace(RopeConfig.from_hf(hf), long=own.get("longrope_long", False)),
        method=family.name,
        fc_bias=family is EAGLE1 and top.get("bias", True),  # the default in the authors' code
        num_aux_hidden_states=aux_count,
        aux_layers=tuple(aux) if aux else None,
        qk_norm=top.get("model_type") == "qwen3",
        norm_before_fc=eagle.get("norm_before_fc", top.get("norm_before_fc", False)),
        fc_norm=top.get("fc_norm", top.get("use_aux_norm", False)),
        own_embeddings=own.get("own_embeddings", width != hidden),
        mask_token_id=mask if family.masks else None,
        bos_token_id=first_of(top.get("bos_token_id")),
        eos_token_id=first_of(top.get("eos_token_id")),
        provenance=Provenance(**known),
    )
    return DraftConfig(**values | heads_of(hf))


def config_to_hf(config: DraftConfig, dtype: str = "bfloat16") -> dict[str, Any]:
    """The content of config.json, for vLLM, SGLang, SafeAILab's code and transformers.

    It has `rope_theta` and `rope_scaling`, which are all that SafeAILab's code reads, and also `rope_parameters`,
    the format of transformers 5.
    """
    rope = config.rope.to_hf()
    scaling = None if config.rope.rope_type == "default" else {k: v for k, v in rope.items() if k != "rope_theta"}
    if config.rope.rope_type == "linear":
        scaling = {"type": "linear", "factor": config.rope.factor}  # the only scaling that SafeAILab's code supports
    # SGLang has no draft class with q/k norms; this is vLLM's
    architectures = ["Eagle3Qwen3ForCausalLM"] if config.qk_norm else list(config.family.architectures)
    hf: dict[str, Any] = {
        "architectures": architectures,
        "model_type": "qwen3" if config.qk_norm else "llama",
        **{name: getattr(config, name) for name in SAME_NAMES},
        "hidden_act": "silu",
        "bias": config.fc_bias,
        "tie_word_embeddings": False,
        "torch_dtype": dtype,
        "rope_theta": config.rope.rope_theta,
        "rope_scaling": scaling,
        "rope_parameters": rope,
    }
    if config.family.borrows_head:
        del hf["draft_vocab_size"]
    if config.family.reads_layers:
        hf |= {
            "norm_before_residual": config.norm_before_residual,
            "norm_before_fc": config.norm_before_fc,
            "num_aux_hidden_states": config.num_aux_hidden_states,
        }
        # left out if false: SpecForge skips the final norm if `norm_output` is present and false
        hf |= {name: True for name in ("fc_norm", "norm_output") if getattr(config, name)}
    if config.mask_token_id is not None:
        hf |= dict.fromkeys(MASK_TOKEN_FIELDS, config.mask_token_id)
    if config.rope.partial_rotary_factor != 1.0:
        hf["partial_rotary_factor"] = config.rope.partial_rotary_factor
    if config.rope.original_max_position_embeddings and config.rope.rope_type == "longrope":
        hf["original_max_position_embeddings"] = config.rope.original_max_position_embeddings
    if config.target_hidden_size != config.hidden_size:
        hf["target_hidden_size"] = config.target_hidden_size
    layers = config.provenance.target_layers
    if config.aux_layers and not (layers and config.aux_layers == engine_layers(layers)):
        hf["eagle_aux_hidden_state_layer_ids"] = list(config.aux_layers)
        hf["eagle_config"] = {
            "eagle_aux_hidden_state_layer_ids": to_engine(config.aux_layers, "sglang"),
            "use_aux_hidden_state": True,
        }
    own = {f.name: getattr(config.provenance, f.name) for f in fields(Provenance)}
    own |= {"method": config.method, "aux_layers": list(config.aux_layers) if config.aux_layers else None}
    own |= {"own_embeddings": config.own_embeddings, "longrope_long": config.rope.long}
    own["template_modes"] = list(config.provenance.template_modes) or None
    hf["fledge"] = {k: v for k, v in own.items() if v is not None}
    return hf


def _family(top: Fields) -> Method:
    """The method of a draft, from fledge's own field in its config or from the architecture's name.

    The EAGLE authors' configs have Llama's architecture. Such a config is EAGLE-3 if it has one of EAGLE-3's fields,
    and EAGLE-1 if it has a single layer, as no complete model has. Raises ValueError for other configs.
    """
    own = top.nested("fledge", FLEDGE).get("method")
    names = top.get("architectures") or ["Eagle3"]
    if own:
        if own not in METHODS:
            raise ValueError(f"method {format_value(own)} is none of {', '.join(METHODS)}")
        return METHODS[own]
    if _mentions("peagle", names):  # SpecForge's and vLLM's own names
        return PEAGLE
    if _mentions("eagle3", names):
        return EAGLE3 if _mask_token(top) is None else PEAGLE
    if _mentions("eagle", names):
        return EAGLE1
    if any(key in top for key in ("draft_vocab_size", "num_aux_hidden_states", "eagle_config")):
        return EAGLE3
    if top.get("num_hidden_layers") == 1:
        return EAGLE1
    raise ValueError(f"architectures {shortened(str(names))} is not an EAGLE draft")


def _mentions(word: str, names: list[str]) -> bool:
    return any(word in name.lower() for name in names)


def _mask_token(top: Fields) -> int | None:
    return next((top.get(key) for key in MASK_TOKEN_FIELDS if key in top), None)
