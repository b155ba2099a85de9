"""Reads untrusted JSON, and validates a draft's config.json by a table with the type and range of every field that
fledge reads."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

MOST_BYTES = 2**26  # largest JSON file that is read; configs, indices and records are far smaller
MOST_LAYERS = 512  # upper bound of num_hidden_layers, in which some trainers leave the target's layer count
MAX_SHOWN = 60  # characters of a wrong value that an error message quotes
# Forbidden names of chat template arguments: the parameters of transformers' apply_chat_template and renderer, and the
# tokenizer's special tokens. An argument with a forbidden name would replace the template or the messages, or change
# the rendering, instead of setting a variable of the template.
RESERVED = frozenset(
    "conversation conversations messages tools documents chat_template add_generation_prompt continue_final_message "
    "tokenize sanitize_control_tokens padding truncation max_length return_tensors return_dict "
    "return_assistant_tokens_mask tokenizer_kwargs kwargs bos_token eos_token "
    "unk_token sep_token pad_token cls_token mask_token additional_special_tokens".split()
)
# names of compute dtypes: names of torch dtypes
DTYPES = {
    "auto": None, "bf16": "bfloat16", "fp16": "float16", "fp32": "float32", "fp64": "float64",
    "bfloat16": "bfloat16", "float16": "float16", "float32": "float32", "float64": "float64",
}  # fmt: skip
MAX_KWARGS_LENGTH = 10_000  # characters of the chat template arguments as JSON


def parse_json(text: str | bytes) -> Any:
    """The value of a JSON text. Raises ValueError if the text is not JSON, or nested too deeply for Python."""
    try:
        return json.loads(text)
    except RecursionError as e:
        raise ValueError("it is nested too deeply") from e


def read_json(file: Path, most: int | None = None) -> Any:
    """The value in a JSON file. Raises ValueError like `parse_json`, and for more than `most` bytes (None:
    MOST_BYTES)."""
    most = MOST_BYTES if most is None else most
    with file.open("rb") as f:  # reads without asking for the file's size, since a device has size 0
        content = f.read(most + 1)
    if len(content) > most:
        raise ValueError(f"it has more than {most:,} bytes")
    return parse_json(content.decode())


@dataclass(frozen=True)
class Kind:
    """The allowed values of a field: `accepts` tests a value, `description` completes "it must be ..." in messages."""

    description: str
    accepts: Callable[[Any], bool]


def integer(minimum: int, maximum: int) -> Kind:
    """An integer within inclusive bounds. JSON's true and false are not accepted."""
    return Kind(
        f"an integer from {minimum:,} to {maximum:,}",
        lambda x: _is_number(x) and isinstance(x, int) and minimum <= x <= maximum,
    )


def positive(maximum: float, above: float = 0) -> Kind:
    """A finite number x with above < x <= maximum."""
    return Kind(f"a number above {above:g} and at most {maximum:g}", lambda x: _is_number(x) and above < x <= maximum)


def non_negative(maximum: float) -> Kind:
    """A finite number x with 0 <= x <= maximum."""
    return Kind(f"a number from 0 to {maximum:g}", lambda x: _is_number(x) and 0 <= x <= maximum)


def _is_number(x: Any) -> bool:
    return isinstance(x, int | float) and not isinstance(x, bool)


def list_of(kind: Kind, max_length: int) -> Kind:
    """A list of at most `max_length` values of one kind; an empty list is allowed."""
    return Kind(
        f"a list of at most {max_length:,} values, each {kind.description}",
        lambda x: isinstance(x, list) and len(x) <= max_length and all(map(kind.accepts, x)),
    )


def either(one: Kind, other: Kind) -> Kind:
    """A value of either kind."""
    return Kind(f"{one.description}, or {other.description}", lambda x: one.accepts(x) or other.accepts(x))


FLAG = Kind("true or false", lambda x: isinstance(x, bool))
OBJECT = Kind("a JSON object", lambda x: isinstance(x, dict))
TEXT = Kind("a string of at most 4,096 characters", lambda x: isinstance(x, str) and len(x) <= 4096)
SIZE = integer(1, 2**20)
HEADS = integer(1, 2**12)
TOKEN = integer(-1, 2**24)  # some configs write -1 for no token
POSITIONS = integer(2, 2**40)
LAYERS = list_of(integer(0, 4096), 64)
FACTORS = list_of(positive(1e6), 4096)
BLOCK = integer(2, 65)  # rows of a block, one more than the drafted tokens

ROPE = {
    **dict.fromkeys(("rope_type", "type"), TEXT),
    "rope_theta": positive(1e15, above=1),
    "partial_rotary_factor": positive(1),
    "original_max_position_embeddings": positive(2**40, above=1),
    **dict.fromkeys(("low_freq_factor", "high_freq_factor", "attention_factor", "factor"), positive(1e6)),
    **dict.fromkeys(("beta_fast", "beta_slow"), positive(1e6)),
    **dict.fromkeys(("mscale", "mscale_all_dim"), non_negative(1e3)),
    "truncate": FLAG,
    **dict.fromkeys(("short_factor", "long_factor"), FACTORS),
}
EAGLE_CONFIG = {
    "eagle_aux_hidden_state_layer_ids": list_of(integer(-1, 4096), 64),
    "norm_before_fc": FLAG,
    "use_aux_hidden_state": FLAG,
}
FLEDGE = {  # the fields under `fledge`, which fledge's own checkpoints have
    "method": TEXT,
    "aux_layers": LAYERS,
    **dict.fromkeys(("own_embeddings", "longrope_long", "block_conv", "candidate_selector"), FLAG),
    "target": TEXT,
    "target_layers": integer(1, 4096),
    "tokenizer_sha256": TEXT,
    "template_sha256": TEXT,
    "vocabulary_sha256": TEXT,
    "template_kwargs": OBJECT,
    "template_modes": list_of(OBJECT, 64),
    "depth": integer(1, 64),
    "max_length": POSITIONS,
    "coverage": non_negative(1),
}
CONFIG = {
    "architectures": list_of(TEXT, 64),
    **dict.fromkeys(("model_type", "hidden_act"), TEXT),
    **dict.fromkeys(("hidden_size", "intermediate_size", "target_hidden_size"), SIZE),
    "num_hidden_layers": integer(1, MOST_LAYERS),
    **dict.fromkeys(("num_attention_heads", "num_key_value_heads"), HEADS),
    "head_dim": integer(1, 2**14),
    "rms_norm_eps": positive(1),
    **dict.fromkeys(("vocab_size", "draft_vocab_size"), integer(1, 2**24)),
    "num_aux_hidden_states": integer(1, 64),
    "eagle_aux_hidden_state_layer_ids": LAYERS,
    "target_layer_ids": list_of(integer(-1, 4096), 64),
    **dict.fromkeys(("block_causal", "block_conv", "candidate_selector", "is_causal"), FLAG),
    "block_size": BLOCK,
    "num_target_layers": integer(1, 4096),
    **dict.fromkeys(("eagle_config", "fledge", "rope_parameters", "rope_scaling"), OBJECT),
    "max_position_embeddings": POSITIONS,
    **{name: ROPE[name] for name in ("original_max_position_embeddings", "rope_theta", "partial_rotary_factor")},
    **dict.fromkeys(("attention_bias", "mlp_bias", "qkv_bias", "bias"), FLAG),
    **dict.fromkeys(("norm_before_residual", "norm_before_fc", "fc_norm", "use_aux_norm", "norm_output"), FLAG),
    **dict.fromkeys(("mask_token_id", "pard_token", "ptd_token_id", "pad_token_id"), TOKEN),
    **dict.fromkeys(("bos_token_id", "eos_token_id"), either(TOKEN, list_of(TOKEN, 64))),
    # fields that `io.formats.deviations` reads
    "layer_types": list_of(TEXT, 4096),
    "sliding_window": integer(0, 2**40),
    **dict.fromkeys(("quantization_config", "dflash_config"), OBJECT),
    "logit_scale": Kind("a number from -1e+06 to 1e+06", lambda x: _is_number(x) and abs(x) <= 1e6),
    "dspark_noise_token_id": TOKEN,
}


class Fields:
    """A JSON object whose fields are checked against a table when they are read.

    `name` is the object's key within the file ("" for the top level), for messages. Raises ValueError if `values` is
    not a JSON object.
    """

    def __init__(self, values: Any, table: dict[str, Kind], name: str = ""):
        if not isinstance(values, dict):
            raise ValueError(f"{name or 'it'} is {format_value(values)}, not a JSON object")
        self._values, self._table, self._name = values, table, name

    def __contains__(self, key: str) -> bool:
        return self._values.get(key) is not None

    def get(self, key: str, default: Any = None) -> Any:
        """The value of a field, or `default` if the field is missing or null.

        Raises ValueError, naming the field, if the table does not allow the value, and KeyError for a key that is not
        in the table (a bug of the caller).
        """
        kind, value = self._table[key], self._values.get(key)
        if value is None:
            return default
        if not kind.accepts(value):
            name = f"{self._name}.{key}" if self._name else key
            raise ValueError(f"{name} is {format_value(value)}; it must be {kind.description}")
        return value

    def nested(self, key: str, table: dict[str, Kind]) -> Fields:
        """The JSON object under a key, checked against a table of its own; an empty object if the key is missing."""
        return Fields(self.get(key, {}), table, key)


def format_value(value: Any) -> str:
    """A value from a file as text for error messages: at most about 80 characters."""
    if isinstance(value, int) and abs(value) >= 10**MAX_SHOWN:
        return f"a number of more than {MAX_SHOWN} digits"
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, dict | list):
        return f"{'an object' if isinstance(value, dict) else 'a list'} of {len(value):,}"
    return shortened(repr(value))


def parse_dtype(dtype: str | torch.dtype | None) -> torch.dtype | None:
    """The torch dtype of a name in DTYPES; None for None and for auto. A torch dtype is returned unchanged. Raises
    ValueError for anything else."""
    import torch

    if dtype is None or isinstance(dtype, torch.dtype):
        return dtype
    if dtype not in DTYPES:
        raise ValueError(f"dtype {dtype!r:.60} is not one of {', '.join(DTYPES)}")
    name = DTYPES[dtype]
    return getattr(torch, name) if name else None


def first_line(error: BaseException) -> str:
    """The first non-empty line of an error's message; the name of the error's class without a message."""
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)


def shortened(text: str) -> str:
    """A string from a file as text for error messages, cut after MAX_SHOWN characters."""
    return text if len(text) <= MAX_SHOWN else text[:MAX_SHOWN] + ".."


def some_of(names: Sequence[str], most: int = 3) -> str:
    """The first `most` names and the number of further names, as text for messages."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more


def check_template_kwargs(kwargs: dict[str, Any], name: str) -> dict[str, Any]:
    """Returns chat template arguments unchanged if each is a template variable and all are plain JSON.

    Raises ValueError, calling the arguments `name`, for names in RESERVED, for values that JSON cannot represent, and
    for more than MAX_KWARGS_LENGTH characters of JSON.
    """
    reserved = sorted(RESERVED.intersection(kwargs))
    if reserved:
        raise ValueError(
            f"{name} sets {', '.join(reserved)}: such options replace the target's chat template, its input or how it "
            "is rendered. Only variables that the template itself reads, such as enable_thinking, can be set"
        )
    try:
        size = len(json.dumps(kwargs, allow_nan=False))
    except (TypeError, ValueError, RecursionError) as e:
        raise ValueError(f"{name} holds a value that is not plain JSON ({e})") from e
    if size > MAX_KWARGS_LENGTH:
        raise ValueError(f"{name} is {size:,} characters of JSON; the limit is {MAX_KWARGS_LENGTH:,}")
    return kwargs
