"""The target's layers that an engine reads with a draft's config.json."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fledge.config import engine_layers
from fledge.io.formats import from_engine

LIST = "eagle_aux_hidden_state_layer_ids"
PLACES = {"vllm": LIST, "sglang": f"eagle_config.{LIST}"}  # where an engine looks for its list


def layers_read(hf: Mapping[str, Any], engine: str, target_layers: int) -> tuple[int, ...] | None:
    """The ids of hidden states (0: the embedding) that an engine of PLACES reads: those of its own list, else its
    default ones; ascending, as engines join them. None if it has no list, and the target too few layers for the
    default. Raises ValueError for a list that is not one of integers."""
    listed = value_at(hf, PLACES[engine])
    if listed is None:
        return engine_layers(target_layers)
    if not isinstance(listed, list) or not all(type(i) is int for i in listed):
        raise ValueError(f"{PLACES[engine]} is not a list of integers")
    return tuple(sorted(set(from_engine(listed, engine))))


def value_at(hf: Mapping[str, Any], place: str) -> Any:
    """The value at a place in a config.json, whose parts are joined by dots; None without it."""
    value: Any = hf
    for key in place.split("."):
        value = value.get(key) if isinstance(value, Mapping) else None
    return value
