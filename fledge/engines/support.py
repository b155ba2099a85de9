"""The drafts that an engine can serve, as tables of properties of drafts, and the target's layers that engines read.

The facts come from reading and running the engines' own loading code, in the versions of `CHECKED`. An engine that
loads a draft but computes a different function does not support the draft.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from fledge.config import DraftConfig, engine_layers
from fledge.io.formats import CLASSES, from_engine

ENGINES = ("vllm", "sglang", "safeailab", "speculators")
SERVERS = ("vllm", "sglang")  # engines that serve unchanged draft files
TITLES = {"vllm": "vLLM", "sglang": "SGLang", "safeailab": "SafeAILab's code", "speculators": "speculators' format"}
CHECKED = {
    "vllm": "0.26.0 and 0.33.0",
    "sglang": "0.5.17 and 0.5.23",
    "safeailab": "commit cb7e084",
    "speculators": "commit c05b95b, read by vLLM 0.26.0 and 0.33.0",
}
ALL = ENGINES
LIST = "eagle_aux_hidden_state_layer_ids"
# by layout of config.json: the place of each engine's list of layers, and a key of OFFSETS for the list's numbering
PLACES = {
    "eagle": {"vllm": (LIST, "vllm"), "sglang": (f"eagle_config.{LIST}", "sglang")},
    "dflash": dict.fromkeys(SERVERS, ("dflash_config.target_layer_ids", "dflash")),
}
Property = Callable[[DraftConfig], bool]


@dataclass(frozen=True)
class Limit:
    """A property of drafts that some engines do not support. `reason` completes "vLLM cannot serve this draft: ..."."""

    engines: tuple[str, ...]
    applies: Property
    reason: str


def _eagle3(config: DraftConfig) -> bool:
    return config.family.reads_layers and not _dflash(config)


def _dflash(config: DraftConfig) -> bool:
    return config.family.layout == "dflash"


def _dflash2(config: DraftConfig) -> bool:
    return config.block_conv or config.candidate_selector


def _layers_in_order(config: DraftConfig) -> bool:
    return config.aux_layers is None or list(config.aux_layers) == sorted(set(config.aux_layers))


def _default_layers(config: DraftConfig) -> bool:
    """Whether the draft reads the engines' default layers; False for listed layers of a target of unknown depth."""
    layers = config.provenance.target_layers
    return config.aux_layers is None or (layers is not None and config.aux_layers == engine_layers(layers))


def _defaults_collide(config: DraftConfig) -> bool:
    layers = config.provenance.target_layers
    return _eagle3(config) and config.aux_layers is None and layers is not None and engine_layers(layers) is None


LIMITS = (
    # the method
    Limit(ALL, lambda c: not c.family.engines, "it does not know the method; fledge alone decodes with the draft"),
    Limit(
        ("sglang",),
        lambda c: c.family.one_pass and "sglang" not in c.family.engines,
        "it has no one-pass drafting; it would load the file and draft one token a pass with it",
    ),
    Limit(("safeailab",), lambda c: c.family.one_pass, "it has no one-pass drafting"),
    Limit(
        ("speculators",),
        lambda c: c.method not in CLASSES,
        f"fledge writes only {' and '.join(CLASSES)} in it; use fledge export --to vllm",
    ),
    Limit(
        ("speculators",),
        lambda c: c.family.one_pass and (c.fc_norm or c.norm_output),
        "vLLM drops fc_norm and norm_output of a P-EAGLE draft in it, and then fails on the weights; use fledge export "
        "--to vllm",
    ),
    # layers, of the draft and of the target
    Limit(("safeailab",), lambda c: _eagle3(c) and c.num_hidden_layers != 1, "it has EAGLE-3 drafts of one layer only"),
    Limit(
        ("safeailab",),
        lambda c: _eagle3(c) and (c.num_aux_hidden_states != 3 or not _default_layers(c)),
        "it always reads the target's layers 2, n/2 and n-3",
    ),
    Limit(
        ALL,
        lambda c: _eagle3(c) and c.aux_layers is None and c.num_aux_hidden_states != 3,
        "it reads three layers of the target unless the config lists others; list them as aux_layers",
    ),
    Limit(
        ALL,
        _defaults_collide,
        "of a target with fewer than 7 layers, its default layers are not three different ones; the draft's config "
        "must list its layers",
    ),
    Limit(
        ALL,
        lambda c: not _layers_in_order(c),
        "it concatenates the target's layers in ascending order, each once, and this draft reads them in another order",
    ),
    Limit(
        ("sglang",),
        lambda c: c.provenance.target_layers in (c.aux_layers or ()),
        "it cannot read the output of the target's last layer",
    ),
    # norms
    Limit(
        ("sglang", "safeailab"),
        lambda c: c.norm_before_residual,
        "it does not read norm_before_residual and always adds the state without its norm",
    ),
    Limit(("sglang", "safeailab"), lambda c: c.qk_norm, "it has no draft class with q/k norms"),
    Limit(("safeailab",), lambda c: c.norm_before_fc, "it has no norm_before_fc"),
    Limit(("safeailab",), lambda c: c.fc_norm or c.norm_output, "it has none of EAGLE-3.1's norms"),
    # biases
    Limit(("sglang",), lambda c: _eagle3(c) and c.attention_bias, "its EAGLE-3 layers have no attention biases"),
    Limit(("sglang",), lambda c: c.mlp_bias, "its draft layers have no MLP biases"),
    Limit(("safeailab",), lambda c: c.attention_bias or c.mlp_bias, "its draft layers have no biases"),
    Limit(("vllm",), lambda c: c.fc_bias, "it drops the bias of fc without a warning"),
    # embeddings and shapes
    Limit(
        ("sglang",),
        lambda c: c.own_embeddings and c.hidden_size == c.target_hidden_size,
        "it replaces the draft's own embeddings by the target's; if they are a copy of those, fledge export --target "
        "leaves them out",
    ),
    Limit(
        ("safeailab",),
        lambda c: c.head_dim * c.num_attention_heads != c.hidden_size,
        "it takes hidden_size / num_attention_heads for the size of a head",
    ),
    # positions
    Limit(
        ("safeailab",),
        lambda c: c.rope.rope_type not in ("default", "linear") or c.rope.partial_rotary_factor != 1.0,
        "it has plain and linearly scaled RoPE only",
    ),
)

# properties of drafts that an engine supports from a version on
SINCE: tuple[tuple[str, Property, tuple[int, ...]], ...] = (
    ("vllm", lambda c: c.fc_norm or c.norm_output, (0, 22)),
    ("vllm", lambda c: c.qk_norm, (0, 24)),
    ("speculators", lambda c: c.fc_norm or c.norm_output, (0, 25)),
    ("speculators", lambda c: c.qk_norm, (0, 26)),
    ("sglang", lambda c: c.norm_before_fc, (0, 5, 17)),
    ("vllm", _dflash, (0, 26)),  # not looked for in older versions
    ("sglang", _dflash, (0, 5, 17)),
    ("vllm", _dflash2, (0, 33)),  # not looked for between 0.26 and 0.33
    ("sglang", _dflash2, (0, 5, 23)),
    ("sglang", lambda c: any(c.windows) and not c.block_causal, (0, 5, 23)),  # older ones make all such layers causal
)
# requirements of an engine for a draft with a property, mostly of its target: a clause after the engine's title
REMARKS: tuple[tuple[str, Property, str], ...] = (
    ("safeailab", _eagle3, "has EAGLE-3 for targets of Llama's and Qwen3's architecture only"),
    (
        "safeailab",
        lambda c: not c.own_embeddings and c.hidden_size == c.target_hidden_size,
        "finds the target's embedding through model.safetensors.index.json, and fails with a target whose weights are "
        "one file without that index",
    ),
    ("vllm", lambda c: len(set(c.windows)) > 1, "has layers with and without a window only in its V2 model runner"),
)


def unsupported(config: DraftConfig, engine: str) -> str | None:
    """The reasons why an engine cannot serve a draft as trained, and the engines that can, as a sentence without full
    stop; None if `engine` can serve the draft.

    `engine` is one of ENGINES; "speculators" stands for vLLM with a draft in speculators' format.
    """
    reasons = _reasons(config, engine)
    if not reasons:
        return None
    why = f"this draft: {'; '.join(reasons)}"
    if engine == "speculators":  # a format: the reasons name the format to write instead
        return f"{TITLES[engine]} ({CHECKED[engine]}) cannot hold {why}"
    others = [TITLES[e] for e in SERVERS if not _reasons(config, e)]
    instead = f"; serve it with {' or '.join(others)}" if others else ""
    return f"{TITLES[engine]} ({CHECKED[engine]}) cannot serve {why}{instead}"


def remarks(config: DraftConfig, engine: str) -> list[str]:
    """An engine's requirements for a draft that the engine can serve, as sentences without full stop."""
    return [f"{TITLES[engine]} {text}" for name, applies, text in REMARKS if name == engine and applies(config)]


def _reasons(config: DraftConfig, engine: str) -> list[str]:
    return [limit.reason for limit in LIMITS if engine in limit.engines and limit.applies(config)]


def minimum_version(config: DraftConfig, engine: str) -> str | None:
    """The lowest version of an engine that supports the draft, e.g. "0.22" (for "speculators", a version of vLLM); None
    if no lower limit is known."""
    versions = [version for name, applies, version in SINCE if name == engine and applies(config)]
    return ".".join(map(str, max(versions))) if versions else None


def layers_read(
    hf: Mapping[str, Any], engine: str, target_layers: int, layout: str = "eagle"
) -> tuple[int, ...] | None:
    """The ids of hidden states (0: the embedding) that an engine of PLACES reads, ascending, as engines concatenate
    states: the engine's list in config.json, else the engine's default layers. None without a list if the target has
    too few layers for the default, or the layout has none. Raises ValueError for anything but a list of integers."""
    place, numbering = PLACES[layout][engine]
    listed = value_at(hf, place)
    if listed is None and layout == "dflash":
        listed = hf.get("target_layer_ids")
    if listed is None:
        return engine_layers(target_layers) if layout == "eagle" else None
    if not isinstance(listed, list) or not all(type(i) is int for i in listed):
        raise ValueError(f"{place} is not a list of integers")
    return tuple(sorted(set(from_engine(listed, numbering))))


def value_at(hf: Mapping[str, Any], place: str) -> Any:
    """The value at a place in a config.json, a path of keys joined by dots; None if a key is missing."""
    value: Any = hf
    for key in place.split("."):
        value = value.get(key) if isinstance(value, Mapping) else None
    return value


def trainer_notes(config: DraftConfig) -> list[str]:
    """Notes about trainers other than fledge that handle the draft differently."""
    found = list(config.family.notes)
    if config.family.reads_layers and config.draft_vocab_size == config.vocab_size and not config.family.one_pass:
        found.append(
            "SpecForge leaves t2d and d2t uninitialized if the file has none. fledge writes none for a full "
            "vocabulary, since vLLM would refuse them. Set t2d to ones and d2t to zeros before you continue "
            "training in SpecForge."
        )
    return found
