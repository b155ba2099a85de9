"""A draft's config.json: `config_from_hf` reads it and `config_to_hf` writes it.

A config.json may have the flat layout of fledge, vLLM, SGLang and SafeAILab's code, which has all fields at the top
level, or speculators' format, which `vllm serve DRAFT` loads. speculators' format has the fields of the decoder layers
under `transformer_layer_config`, and under `speculators_config` the target ("verifier") and the number of tokens to
draft. Sources: speculators' config classes (`SpeculatorModelConfig`, `Eagle3SpeculatorConfig`,
`PEagleSpeculatorConfig`, `EagleSpeculatorConfig`) and vLLM's reader of speculators' configs
(transformers_utils/configs/speculators). DFlash drafts have the layout of DFlash's authors.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import fields, replace
from typing import Any

from fledge.config import (
    CONV_GROUP,
    CONV_TAPS,
    NO_RANK,
    REQUIRED,
    SELECTOR_RANK,
    SELECTOR_TOKENS,
    DraftConfig,
    Provenance,
    RopeConfig,
    engine_layers,
    first_of,
    heads_of,
)
from fledge.io.fields import (
    BLOCK,
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
from fledge.methods import DFLASH, EAGLE1, EAGLE3, METHODS, PEAGLE, Method, spread_taps

# fields of a `DraftConfig` that have the same name in config.json
SAME_NAMES = (
    "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim",
    "rms_norm_eps", "vocab_size", "draft_vocab_size", "max_position_embeddings", "attention_bias", "mlp_bias",
    "bos_token_id", "eos_token_id", "pad_token_id",
)  # fmt: skip
# An engine's id of a hidden state minus fledge's id. fledge numbers hidden states as transformers' `hidden_states`: id
# i is the input of layer i, i.e. the output of layer i - 1, and 0 is the embedding. In SGLang, DeepSpec and DFlash,
# id i is the output of layer i.
OFFSETS = {"vllm": 0, "speculators": 0, "safeailab": 0, "sglang": -1, "deepspec": -1, "dflash": -1}


def to_engine(ids: Iterable[int], engine: str) -> list[int]:
    """fledge's ids in an engine's numbering; `engine` is a key of OFFSETS."""
    return [i + OFFSETS[engine] for i in ids]


def from_engine(ids: Iterable[int], engine: str) -> list[int]:
    """An engine's ids in fledge's numbering; `engine` is a key of OFFSETS."""
    return [i - OFFSETS[engine] for i in ids]


MASK_TOKEN_FIELDS = ("mask_token_id", "pard_token", "ptd_token_id")  # the engines' names of the mask token's id

# speculators_model_type: the architecture in the flat layout, from which `config_from_hf` knows the method
ARCHITECTURES = {
    "eagle": "LlamaForCausalLMEagle", "eagle3": "LlamaForCausalLMEagle3", "peagle": "PEagleDraftModel",
    "dflash": "DFlashDraftModel",
}  # fmt: skip
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
    "block_size": BLOCK,
    "aux_hidden_state_layer_ids": list_of(integer(0, 4096), 64),
    "mask_token_id": TOKEN,
    "projector_type": TEXT,
    **dict.fromkeys(("sliding_window_non_causal", "sample_from_anchor", "shift_label"), FLAG),
}
SPECULATORS_CONFIG = {"verifier": OBJECT, "proposal_methods": list_of(OBJECT, 64)}
PROPOSAL = {"speculative_tokens": integer(1, 64)}
VERIFIER = {"name_or_path": TEXT}


def is_speculators(hf: dict[str, Any]) -> bool:
    """Whether a config.json is in speculators' format. A flat config may also have a `speculators_config`."""
    return ("speculators_model_type" in hf or "speculators_config" in hf) and "hidden_size" not in hf


def flat_config(hf: Any) -> Any:
    """The flat layout of a config.json, with the fields that `config_from_hf` reads; anything but the formats
    known here is returned unchanged. Raises ValueError for fields that contradict each other or are invalid, and for
    kinds of drafts and of layers that fledge does not have."""
    if not isinstance(hf, dict):
        return hf
    return from_speculators(hf) if is_speculators(hf) else from_dflash(hf) if is_dflash(hf) else hf


def from_speculators(hf: dict[str, Any]) -> dict[str, Any]:
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
    flat |= _block_of_speculators(top, Fields(layer, CONFIG)) if kind == "dflash" else {}
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
    if kind != "dflash" and "fledge" not in top and (methods := how.get("proposal_methods")):
        tokens = Fields(methods[0], PROPOSAL, "proposal_methods").get("speculative_tokens")
        own = own | ({"depth": tokens} if tokens else {})
    flat |= {"architectures": [ARCHITECTURES[kind]]} | ({"fledge": own} if own else {})
    return from_dflash(flat) if kind == "dflash" else flat


def _block_of_speculators(top: Fields, layer: Fields) -> dict[str, Any]:
    """The fields of DFlash's layout for a block in speculators' format, where layers with a sliding window are causal
    unless the config says otherwise, and others are not. Raises ValueError for blocks that fledge does not have."""
    others = {
        "sample_from_anchor": "a token for the anchor's row too, as DSpark's drafts have",
        "shift_label": "labels of the next row, as Domino's drafts have",
    }
    for name, what in others.items():
        if top.get(name, False):
            raise ValueError(f"{name} is true: {what}, which fledge does not support")
    if top.get("projector_type", "dflash") != "dflash":
        raise ValueError(f"projector_type is {format_value(top.get('projector_type'))}; fledge reads dflash")
    kinds = layer.get("layer_types", [])[: layer.get("num_hidden_layers", 1)] or ["full_attention"]
    causal = {kind == "sliding_attention" and not top.get("sliding_window_non_causal", False) for kind in kinds}
    if len(causal) > 1:
        raise ValueError(
            "layers with a sliding window are causal within a block, and others are not (sliding_window_non_causal is "
            "false); fledge has blocks whose layers are all of one kind"
        )
    if (layers := top.get("aux_hidden_state_layer_ids")) is None:
        raise ValueError("a DFlash draft without aux_hidden_state_layer_ids; get the file as its trainer wrote it")
    inside = {"target_layer_ids": to_engine(from_engine(layers, "speculators"), "dflash")}
    inside |= {"mask_token_id": top.get("mask_token_id")} if "mask_token_id" in top else {}
    return {"dflash_config": inside, "block_size": top.get("block_size", 8), "is_causal": causal == {True}}


# DFlash's layout: that of a Qwen3 model, with the fields of the block under `dflash_config`. The code of DFlash's
# authors, SpecForge, AutoModel and JetSpec write the layout; vLLM and SGLang read it.

DFLASH_CONFIG = {
    "mask_token_id": TOKEN,
    "target_layer_ids": list_of(integer(-1, 4096), 64),
    "block_size": BLOCK,
    **dict.fromkeys(("causal", "causal_head"), FLAG),
}
DFLASH2 = "DFlash2DraftModel"  # the engines' class of drafts with convolutions and a selector
CONV = {"conv_kernel_size": CONV_TAPS, "conv_group_size": CONV_GROUP}
SELECTOR = {"selector_rank": SELECTOR_RANK, "selector_top_k": SELECTOR_TOKENS}
# fields of the flat layout that EAGLE's drafts alone have
FLAT_ONLY = (
    "bias", "mlp_bias", "norm_before_residual", "norm_before_fc", "num_aux_hidden_states", "eagle_config",
    "eagle_aux_hidden_state_layer_ids",
)  # fmt: skip
# fields of other drafts in the same layout, and of logits that fledge does not compute
DFLASH_UNKNOWN = (
    "markov_rank", "input_embedding_scale", "output_multiplier", "final_logit_softcapping",
)  # fmt: skip


def is_dflash(hf: dict[str, Any]) -> bool:
    """Whether a config.json is in DFlash's layout."""
    names = hf.get("architectures")
    return isinstance(names, list) and any("dflash" in name.lower() for name in names if isinstance(name, str))


def from_dflash(hf: dict[str, Any]) -> dict[str, Any]:
    """A config.json in DFlash's layout, with its fields also under the names of the flat layout.

    The number of rows of a block becomes `fledge.depth`, and the target's number of layers `fledge.target_layers`,
    unless the file has these. Without layers, the default ones are read, and without a number of rows, a block has as
    many as by default. Raises ValueError for a block of unknown causality, for windows of unknown layers, and for other
    drafts in the same layout, such as DSpark.
    """
    top, own = Fields(hf, CONFIG), dict(Fields(hf, CONFIG).get("fledge", {}))
    inside = top.nested("dflash_config", DFLASH_CONFIG)
    said = hf | (hf.get("dflash_config") or {})
    for name in DFLASH_UNKNOWN:
        value = said.get(name)
        if value not in (None, 1, 1.0, 0, False):
            raise ValueError(
                f"{name} is {format_value(value)}: fledge has no drafts of this kind, which is not DFlash's"
            )
    n, layers = top.get("num_target_layers"), inside.get("target_layer_ids", top.get("target_layer_ids"))
    if layers is None and n is not None:
        layers = to_engine(spread_taps(n, top.get("num_hidden_layers", 1)), "dflash")
    if layers is None:
        raise ValueError("a DFlash draft without dflash_config.target_layer_ids; get the file as its trainer wrote it")
    if list(layers) != sorted(set(layers)):
        raise ValueError(f"target_layer_ids {layers} do not ascend, and fledge joins layers in the target's order")
    switched = hf.get("use_sliding_window") or (hf.get("dflash_config") or {}).get("use_swa")
    if switched and "layer_types" not in top:
        raise ValueError(
            "a sliding window is on, and layer_types, which say which layers have the window, are missing; write "
            "layer_types and sliding_window"
        )
    block = inside.get("block_size", top.get("block_size", None if "fledge" in top else DFLASH.depth + 1))
    own |= {"depth": block - 1} if block and "depth" not in own else {}
    own |= {"target_layers": n} if n and "target_layers" not in own else {}
    flat = {"target_layer_ids": layers, "block_causal": _is_causal(top, inside), "fledge": own}
    parts = dict(block_conv=CONV, candidate_selector=SELECTOR)
    flat |= {name: own.get(name, True) and _has_part(said, part) for name, part in parts.items()}
    mask = {name: inside.get(name) for name in ("mask_token_id",) if name in inside and name not in top}
    return hf | flat | mask


def _has_part(said: dict[str, Any], part: dict[str, int]) -> bool:
    """Whether a draft has a part of DFlash 2, whose fields are CONV or SELECTOR, from all fields of its config.json."""
    if said.get(next(iter(part))) in (None, 0):
        return False
    for name, value in part.items():
        if said.get(name) not in (None, value):
            raise ValueError(f"{name} is {format_value(said.get(name))}; fledge has drafts with {value} only")
    return True


def _is_causal(top: Fields, inside: Fields) -> bool:
    """Whether a block is causal. AutoModel writes is_causal false into every draft, and `dflash_config.causal` into
    causal drafts. Without all of the fields, DFlash's own code makes sliding layers causal and others not."""
    named = {name: inside.get(name) for name in ("causal", "causal_head")}
    said = {name: value for name, value in named.items() if value is not None}
    if len(set(said.values())) > 1:
        raise ValueError("dflash_config.causal and dflash_config.causal_head contradict each other; set both alike")
    if "fledge" not in top and top.get("is_causal", False) and not all(said.values()):
        raise ValueError("is_causal is true, and dflash_config says that a block is not causal; set all alike")
    if said:
        return next(iter(said.values()))
    if "is_causal" in top:
        return top.get("is_causal")
    kinds = {kind == "sliding_attention" for kind in top.get("layer_types", [])[: top.get("num_hidden_layers", 1)]}
    if len(kinds) > 1:
        raise ValueError(
            "some layers have a sliding window and others not, and is_causal is missing; set it to true if the rows of "
            "a block saw only the rows before them in training, and else to false"
        )
    return kinds == {True}


def to_dflash(flat: dict[str, Any], config: DraftConfig) -> dict[str, Any]:
    """A config.json in DFlash's layout from one in the flat layout. Causality is written in three places: versions of
    engines read different ones. Engines load DFlash 2's convolutions and selector together: where a draft has one
    of them, fields under `fledge` say that the other is there for the engines alone."""
    hf = {k: v for k, v in flat.items() if k not in (*MASK_TOKEN_FIELDS, *FLAT_ONLY)}
    own, L, causal, windows = flat["fledge"], config.num_hidden_layers, config.block_causal, config.windows
    layers = to_engine(config.aux_layers or (), "dflash")
    inside: dict[str, Any] = {"mask_token_id": config.mask_token_id, "target_layer_ids": layers}
    if config.block_conv or config.candidate_selector:
        parts = dict(block_conv=config.block_conv, candidate_selector=config.candidate_selector)
        hf |= {"architectures": [DFLASH2], "fledge": own | {name: False for name, there in parts.items() if not there}}
        inside |= CONV | SELECTOR | ({} if config.candidate_selector else {"selector_rank": NO_RANK})
    size = {"block_size": own["depth"] + 1} if "depth" in own else {}
    hf |= {
        "model_type": "qwen3",
        "is_causal": causal,
        "layer_types": ["sliding_attention" if w else "full_attention" for w in windows] or ["full_attention"] * L,
        "use_sliding_window": any(windows),
        "sliding_window": next((w for w in windows if w), None),
        "max_window_layers": L,
        "dtype": flat["torch_dtype"],
        "dflash_config": inside | size | {"causal": causal, "causal_head": causal},
    }
    return hf | size | ({"num_target_layers": own["target_layers"]} if "target_layers" in own else {})


# These fields get into a draft's config.json with the config of a target or of a different kind of draft. Engines load
# a draft with these fields without a message.

# fields that only `deviations` reads; engines ignore the fields, except for the values that it lists
REFUSED_FIELDS = ("layer_types", "sliding_window", "quantization_config", "logit_scale", "dflash_config",
          "dspark_noise_token_id")  # fmt: skip


def deviations(hf: dict[str, Any], family: Method) -> list[tuple[str, str, str]]:
    """The fields of a config.json in the flat layout with which an engine computes a draft otherwise than fledge. Each
    is a cause (the field's value), a symptom (the effect in the engine that serves the draft), and a cure (the change
    to make). Raises ValueError for an invalid field."""
    top, found = Fields(hf, CONFIG), []
    kinds = top.get("layer_types", [])[: top.get("num_hidden_layers", 1)]
    windowed = not all(kind == "full_attention" for kind in kinds)
    if (window := top.get("sliding_window")) and windowed and family.layout != "dflash":
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
    """Reads a draft's config.json. Raises ValueError if it is not that of a known method, or has an invalid or
    unsupported field; with `refuse_deviations`, also for fields with which an engine would compute something else
    (`deviations`)."""
    hf = flat_config(hf)
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
        if family.layout == "dflash":
            raise ValueError("a DFlash draft without mask_token_id (in dflash_config); write the one of its training")
        raise ValueError(
            "a P-EAGLE draft without mask_token_id; SpecForge writes it to peagle_config.json, copy it from there"
        )
    if top.get("hidden_act", "silu") != "silu":
        raise ValueError(
            f"hidden_act {format_value(top.get('hidden_act'))}: fledge's drafts use silu, as every engine's do"
        )
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
        qk_norm=top.get("model_type") == "qwen3" and "qk_norm" in family.options,
        norm_before_fc=eagle.get("norm_before_fc", top.get("norm_before_fc", False)),
        fc_norm=top.get("fc_norm", top.get("use_aux_norm", False)),
        own_embeddings=own.get("own_embeddings", width != hidden),
        mask_token_id=mask if family.masks else None,
        block_causal=top.get("block_causal", False),
        block_conv=top.get("block_conv", False),
        candidate_selector=top.get("candidate_selector", False),
        windows=_windows(top) if family.layout == "dflash" else (),
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
    if config.family.layout == "dflash":
        return to_dflash(hf, config)
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
    if _mentions("dflash", names):
        return DFLASH
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
    raise ValueError(f"architectures {shortened(str(names))} is not a draft that fledge knows")


def _mentions(word: str, names: list[str]) -> bool:
    return any(word in name.lower() for name in names)


def _mask_token(top: Fields) -> int | None:
    return next((top.get(key) for key in MASK_TOKEN_FIELDS if key in top), None)


def _windows(top: Fields) -> tuple[int | None, ...]:
    """`DraftConfig.windows` of a config.json with transformers' fields."""
    kinds, window = top.get("layer_types", [])[: top.get("num_hidden_layers", 1)], top.get("sliding_window")
    if "sliding_attention" not in kinds:
        return ()
    if not window:
        raise ValueError("layer_types has sliding_attention, and sliding_window is missing")
    return tuple(window if kind == "sliding_attention" else None for kind in kinds)
