"""A draft's config.json in the formats of other projects: ids of layers, speculators' config, and fields that fledge
refuses.

`vllm serve DRAFT` loads speculators' format. The flat layout of vLLM and SGLang has all fields at the top level.
speculators' format has the fields of the decoder layers under `transformer_layer_config`, and under
`speculators_config` the target ("verifier") and the number of tokens to draft. Sources: speculators' config classes
(`SpeculatorModelConfig`, `Eagle3SpeculatorConfig`, `PEagleSpeculatorConfig`, `EagleSpeculatorConfig`) and vLLM's
reader of speculators' configs (transformers_utils/configs/speculators).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from fledge.io.fields import CONFIG, EAGLE_CONFIG, FLAG, OBJECT, TEXT, TOKEN, Fields, format_value, integer, list_of
from fledge.methods import Method

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


# speculators_model_type: the architecture in the flat layout, from which `DraftConfig.from_hf` knows the method
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
