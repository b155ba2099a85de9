"""Fields of config.json with which an engine computes a draft otherwise than fledge.

They get into a draft's config.json with the config of a target or of another kind of draft. Engines load such a draft
without a message.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from fledge.io.fields import CONFIG, DFLASH_CONFIG, EAGLE_CONFIG, Fields, format_value
from fledge.methods import Method

# the fields that are read here alone: with other values than those of a `Deviation`, no engine acts on them
FIELDS = ("layer_types", "sliding_window", "quantization_config", "logit_scale", "dflash_config",
          "dspark_noise_token_id")  # fmt: skip
MASK_TOKEN_FIELDS = ("mask_token_id", "pard_token", "ptd_token_id")  # the engines' names of the mask token's id


@dataclass(frozen=True)
class Deviation:
    """What an engine makes of a config.json and fledge does not: what the file says, what it does where the draft is
    served, and the cure."""

    cause: str
    symptom: str
    cure: str

    def __str__(self) -> str:
        return f"{self.cause}: {self.symptom}; {self.cure}"


def deviations(hf: dict[str, Any], family: Method) -> list[Deviation]:
    """The deviations of a config.json in the flat layout. Raises ValueError for an invalid field."""
    top = Fields(hf, CONFIG)
    found = [_window(top), _quantization(top), _logit_scale(top)]
    if family.reads_layers:
        found.append(_final_state(top))
    if family.masks:
        found.append(_mask_tokens(top))
    return [deviation for deviation in found if deviation]


def _window(top: Fields) -> Deviation | None:
    kinds = top.get("layer_types", [])[: top.get("num_hidden_layers", 1)]
    window = top.get("sliding_window")
    if not window or all(kind == "full_attention" for kind in kinds):
        return None
    return Deviation(
        f"the draft's layers attend to a sliding window only (layer_types, sliding_window {window:,})",
        "vLLM masks all tokens before the window, and fledge does not: acceptance falls in texts longer than it",
        "remove both fields if the draft was trained without a window; fledge does not support drafts with one",
    )


def _quantization(top: Fields) -> Deviation | None:
    if "quantization_config" not in top:
        return None
    kind = top.get("quantization_config").get("quant_method")
    return Deviation(
        f"quantization_config asks for quantized weights ({format_value(kind)})",
        "vLLM fails to load the draft, or takes its values for quantized ones: acceptance about 0",
        "remove it if the weights are in 16 or 32 bits; fledge does not support quantized drafts",
    )


def _logit_scale(top: Fields) -> Deviation | None:
    scale = top.get("logit_scale", 1)
    if scale == 1:
        return None
    return Deviation(
        f"logit_scale is {format_value(scale)}",
        "vLLM multiplies the draft's logits by it, and fledge does not: sampled drafts are accepted less often, and "
        "with a negative one none",
        "remove it if the draft was trained without it; fledge does not support scaled logits",
    )


def _final_state(top: Fields) -> Deviation | None:
    if top.nested("eagle_config", EAGLE_CONFIG).get("use_aux_hidden_state", True):
        return None
    return Deviation(
        "eagle_config.use_aux_hidden_state is false",
        "vLLM leaves out fc and feeds the target's last hidden state to the draft, or fails: acceptance about 0",
        "set it to true if the draft was trained on hidden states of several layers; fledge does not support others",
    )


def _mask_tokens(top: Fields) -> Deviation | None:
    ids = {name: top.get(name) for name in (*MASK_TOKEN_FIELDS, "dspark_noise_token_id")}
    ids["dflash_config.mask_token_id"] = top.nested("dflash_config", DFLASH_CONFIG).get("mask_token_id")
    listed = {name: token for name, token in ids.items() if token is not None}
    if len(set(listed.values())) < 2:
        return None
    return Deviation(
        f"the mask token is {' and '.join(f'{token} in {name}' for name, token in listed.items())}",
        "versions of vLLM read different ones of these fields: with a wrong one, only the first drafted token is "
        "accepted as before",
        "set all of them to the mask token of training",
    )
