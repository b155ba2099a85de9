"""What each field of a draft's config.json may hold: a table, so that nobody who reads a field has to check it."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

MOST_LAYERS = 512  # decoder layers of a draft, or of the target whose number some trainers leave there
SHOWN = 60  # characters of a wrong value that a message repeats
# parameters of transformers' apply_chat_template and of its renderer, and the tokenizer's own special tokens: given as
# a template's variables they would change what is rendered, or how, and not only what a template does with a variable
RESERVED = frozenset(
    "conversation conversations messages tools documents chat_template add_generation_prompt continue_final_message "
    "tokenize sanitize_control_tokens padding truncation max_length return_tensors return_dict "
    "return_assistant_tokens_mask tokenizer_kwargs kwargs bos_token eos_token "
    "unk_token sep_token pad_token cls_token mask_token additional_special_tokens".split()
)
LONGEST_KWARGS = 10_000  # characters of the JSON of a template's arguments


@dataclass(frozen=True)
class Kind:
    """What a field may hold, in words for messages."""

    words: str
    fits: Callable[[Any], bool]


def whole(least: int, most: int) -> Kind:
    """An integer within bounds (a JSON true is none)."""
    return Kind(
        f"a whole number from {least:,} to {most:,}",
        lambda x: _is_number(x) and isinstance(x, int) and least <= x <= most,
    )


def number(above: float, most: float) -> Kind:
    """A finite number within bounds, the lower one excluded."""
    return Kind(f"a number above {above:g} and at most {most:g}", lambda x: _is_number(x) and above < x <= most)


def up_to(most: float) -> Kind:
    """A finite number from 0 on."""
    return Kind(f"a number from 0 to {most:g}", lambda x: _is_number(x) and 0 <= x <= most)


def _is_number(x: Any) -> bool:
    return isinstance(x, int | float) and not isinstance(x, bool)


def several(kind: Kind, most: int) -> Kind:
    """A list of at most so many."""
    return Kind(
        f"a list of at most {most:,}, each {kind.words}",
        lambda x: isinstance(x, list) and len(x) <= most and all(map(kind.fits, x)),
    )


def either(one: Kind, other: Kind) -> Kind:
    return Kind(f"{one.words}, or {other.words}", lambda x: one.fits(x) or other.fits(x))


FLAG = Kind("true or false", lambda x: isinstance(x, bool))
OBJECT = Kind("a JSON object", lambda x: isinstance(x, dict))
TEXT = Kind("a text of at most 4,096 characters", lambda x: isinstance(x, str) and len(x) <= 4096)
SIZE = whole(1, 2**20)
HEADS = whole(1, 2**12)
TOKEN = whole(-1, 2**24)  # some write -1 for none
POSITIONS = whole(2, 2**40)
LAYERS = several(whole(0, 4096), 64)
FACTORS = several(number(0, 1e6), 4096)

ROPE = {
    "rope_type": TEXT,
    "type": TEXT,
    "rope_theta": number(1, 1e15),
    "partial_rotary_factor": number(0, 1),
    "factor": number(0, 1e6),
    "original_max_position_embeddings": number(1, 2**40),
    "low_freq_factor": number(0, 1e6),
    "high_freq_factor": number(0, 1e6),
    "attention_factor": number(0, 1e6),
    "beta_fast": number(0, 1e6),
    "beta_slow": number(0, 1e6),
    "mscale": up_to(1e3),
    "mscale_all_dim": up_to(1e3),
    "truncate": FLAG,
    "short_factor": FACTORS,
    "long_factor": FACTORS,
}
EAGLE_CONFIG = {"eagle_aux_hidden_state_layer_ids": several(whole(-1, 4096), 64), "norm_before_fc": FLAG}
OWN = {  # under `fledge`
    "method": TEXT,
    "aux_layers": LAYERS,
    "own_embeddings": FLAG,
    "longrope_long": FLAG,
    "target": TEXT,
    "target_layers": whole(1, 4096),
    "tokenizer_sha256": TEXT,
    "template_sha256": TEXT,
    "vocabulary_sha256": TEXT,
    "template_kwargs": OBJECT,
    "depth": whole(1, 64),
    "max_length": POSITIONS,
    "coverage": up_to(1),
}
CONFIG = {
    "architectures": several(TEXT, 64),
    "model_type": TEXT,
    "hidden_size": SIZE,
    "intermediate_size": SIZE,
    "num_hidden_layers": whole(1, MOST_LAYERS),
    "num_attention_heads": HEADS,
    "num_key_value_heads": HEADS,
    "head_dim": whole(1, 2**14),
    "hidden_act": TEXT,
    "rms_norm_eps": number(0, 1),
    "vocab_size": whole(1, 2**24),
    "draft_vocab_size": whole(1, 2**24),
    "target_hidden_size": SIZE,
    "num_aux_hidden_states": whole(1, 64),
    "eagle_aux_hidden_state_layer_ids": LAYERS,
    "eagle_config": OBJECT,
    "fledge": OBJECT,
    "max_position_embeddings": POSITIONS,
    "original_max_position_embeddings": ROPE["original_max_position_embeddings"],
    "rope_theta": ROPE["rope_theta"],
    "partial_rotary_factor": ROPE["partial_rotary_factor"],
    "rope_parameters": OBJECT,
    "rope_scaling": OBJECT,
    "attention_bias": FLAG,
    "mlp_bias": FLAG,
    "qkv_bias": FLAG,
    "bias": FLAG,
    "norm_before_residual": FLAG,
    "norm_before_fc": FLAG,
    "fc_norm": FLAG,
    "use_aux_norm": FLAG,
    "norm_output": FLAG,
    "mask_token_id": TOKEN,
    "pard_token": TOKEN,
    "ptd_token_id": TOKEN,
    "bos_token_id": either(TOKEN, several(TOKEN, 64)),
    "eos_token_id": either(TOKEN, several(TOKEN, 64)),
    "pad_token_id": TOKEN,
}


class Fields:
    """A JSON object whose fields are checked as they are read. `name` is the object's own, within the file."""

    def __init__(self, values: Any, table: dict[str, Kind], name: str = ""):
        if not isinstance(values, dict):
            raise ValueError(f"{name or 'it'} is {shown(values)}, not a JSON object")
        self._values, self._table, self._name = values, table, name

    def __contains__(self, key: str) -> bool:
        return self._values.get(key) is not None

    def get(self, key: str, default: Any = None) -> Any:
        """A field's value, or `default` where it is missing or null. Raises ValueError, naming the field, for a value
        of another kind than the table's. A key that the table lacks is a mistake of ours (KeyError)."""
        kind, value = self._table[key], self._values.get(key)
        if value is None:
            return default
        if not kind.fits(value):
            raise ValueError(f"{self._name}{'.' * bool(self._name)}{key} is {shown(value)}; it has to be {kind.words}")
        return value

    def within(self, key: str, table: dict[str, Kind]) -> Fields:
        """The object under a key; an empty one where there is none."""
        return Fields(self.get(key, {}), table, key)


def shown(value: Any) -> str:
    """A value from a file, as a message repeats it: short."""
    if isinstance(value, int) and abs(value) >= 10**SHOWN:
        return f"a number of more than {SHOWN} digits"
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, dict | list):
        return f"{'an object' if isinstance(value, dict) else 'a list'} of {len(value):,}"
    return shortened(repr(value))


def shortened(text: str) -> str:
    """A text from a file, as a message repeats it."""
    return text if len(text) <= SHOWN else text[:SHOWN] + ".."


def check_template_kwargs(kwargs: dict[str, Any], name: str) -> dict[str, Any]:
    """Arguments for a chat template as they are, where they are variables of a template and plain JSON. Raises
    ValueError, which calls them `name`, for options that change what is rendered or how."""
    reserved = sorted(RESERVED.intersection(kwargs))
    if reserved:
        raise ValueError(
            f"{name} sets {', '.join(reserved)}: such options replace the target's chat template or what is rendered "
            "by it. Only variables that the template itself reads, such as enable_thinking, can be set; leave it out"
        )
    try:
        size = len(json.dumps(kwargs, allow_nan=False))
    except (TypeError, ValueError, RecursionError) as e:
        raise ValueError(f"{name} holds what is no plain JSON ({e})") from e
    if size > LONGEST_KWARGS:
        raise ValueError(f"{name} is {size:,} characters of JSON; at most {LONGEST_KWARGS:,} are taken")
    return kwargs
