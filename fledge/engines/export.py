"""The files of a draft in the format of each engine, the differences from the draft's current files, and the commands
that start vLLM and SGLang with a draft.

vLLM, SGLang and SafeAILab's code load most of fledge's own files (`drafts.weights.draft_files`) unchanged. `LAYOUTS`
has a function that makes the files for each engine.
"""

from __future__ import annotations

import importlib.util
import json
import re
import shutil
import sys
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from fledge.config import DraftConfig, RopeConfig
from fledge.drafts.weights import DraftFiles, dtype_name, encode_files, portable_tensors
from fledge.engines.support import ENGINES, TITLES, minimum_version, unsupported
from fledge.io.fields import CONFIG as FLAT_FIELDS
from fledge.io.fields import shortened, some_of
from fledge.io.formats import (
    CLASSES,
    CONV,
    DRAFT_FIELDS,
    NORM_FIELDS,
    REFUSED_FIELDS,
    SELECTOR,
    config_to_hf,
    is_speculators,
    to_engine,
)
from fledge.io.hub import split_revision
from fledge.io.tensors import WEIGHTS, stray_readers

Files = tuple[dict[str, Any], dict[str, Tensor]]  # the object in config.json, and the tensors
# Fields that no engine reads in a draft's config.json, or that are compared separately
NOT_COMPARED = {
    "fledge", "speculators_config", "transformer_layer_config", "torch_dtype", "bos_token_id", "eos_token_id",
    "pad_token_id", "embed_requires_grad", *REFUSED_FIELDS,
}  # fmt: skip
# Values that every engine reads like a missing field; for fields not in DEFAULTS, false is like a missing field
DEFAULTS = {
    "num_aux_hidden_states": 3, "hidden_act": "silu", "bias": None, "eagle_config": {"use_aux_hidden_state": True},
}  # fmt: skip
# fields of DFlash's layout that are compared as `_block_as_read` says, or that no engine reads
DFLASH_FIELDS = {
    "is_causal", "block_size", "dflash_config", "layer_types", "sliding_window", "use_sliding_window",
    "max_window_layers", "mask_token_id", "target_layer_ids", "num_target_layers", "dtype", "draft_vocab_size",
}  # fmt: skip
OUTSIDE_MODEL = {"model.lm_head.weight", "model.d2t"}  # names under which SGLang does not find the tensors
ROPE_FIELDS = {"rope_theta", "rope_scaling", "rope_parameters"}
# the fields of speculators' `transformer_layer_config`
LAYER_FIELDS = (
    "model_type", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads",
    "head_dim", "hidden_act", "rms_norm_eps", "vocab_size", "max_position_embeddings", "attention_bias", "mlp_bias",
    "tie_word_embeddings", "bos_token_id", "eos_token_id", "pad_token_id", "rope_theta", "rope_parameters",
    "partial_rotary_factor", "original_max_position_embeddings",
    # vLLM reads layer fields as fields of the draft; without num_aux_hidden_states, vLLM expects three hidden states
    "num_aux_hidden_states",
)  # fmt: skip
# vLLM's names of one class; True: the draft reads hidden states of layers (EAGLE-3), False: final states (EAGLE-1)
VLLM_CLASSES = {
    True: {"LlamaForCausalLM", "LlamaForCausalLMEagle3", "Eagle3LlamaForCausalLM"},
    False: {"LlamaForCausalLM", "EagleLlamaForCausalLM"},
}
SWITCHES = {"--enable-metrics"}  # flags without a value, harmless when repeated
PROGRAMS = {"vllm": ("vllm", "serve"), "sglang": ("python3", "-m", "sglang.launch_server")}
NAMES_OF_TARGET = {"vllm": ("--model",), "sglang": ("--model-path", "--model")}  # further flags of the target
DEPTH = 5  # drafted tokens of a round, for a draft without a recorded depth


@dataclass(frozen=True)
class TargetName:
    """The target's hub id or directory, and the `architectures` of its config.json."""

    name: str
    architectures: tuple[str, ...] = ()


@dataclass(frozen=True)
class Export:
    """A draft for one engine.

    `differences` are phrases about the differences between the export's files and the draft's current files; empty if
    the engine loads the draft's current files. `hf` and `tensors` are the content of the export's files.
    """

    differences: tuple[str, ...]
    hf: dict[str, Any]
    tensors: dict[str, Tensor]

    def encode(self) -> dict[str, bytes]:
        """The content of the files, by name."""
        return encode_files(self.hf, self.tensors)


def export(draft: DraftFiles, engine: str, target: TargetName | None = None) -> Export:
    """A draft's files for an engine, one of `support.ENGINES`.

    Weights keep values and dtypes. `target` is needed for "speculators", unless the draft's config names the target.
    Raises ValueError if the engine cannot serve the draft (`support.unsupported`), or without a needed target.
    """
    if reason := unsupported(draft.config, engine):
        raise ValueError(reason)
    hf, tensors = LAYOUTS[engine](draft, target)
    if engine == "vllm" and is_speculators(draft.hf) and not unsupported(draft.config, "speculators"):
        readable = _differences(draft, engine, *_speculators(draft, _recorded(draft)))  # vLLM reads this format too
        return Export(readable and _differences(draft, engine, hf, tensors), hf, tensors)
    return Export(_differences(draft, engine, hf, tensors), hf, tensors)


def needs_export(draft: DraftFiles, engine: str) -> bool:
    """Whether an engine that supports a draft needs other files than the draft has."""
    return bool(export(draft, engine, _recorded(draft)).differences)


def _recorded(draft: DraftFiles) -> TargetName:
    return TargetName(draft.config.provenance.target or "unknown")


def _portable(draft: DraftFiles, target: TargetName | None) -> Files:
    return _flat(draft), portable_tensors(draft.config, draft.tensors)


def _sglang(draft: DraftFiles, target: TargetName | None) -> Files:
    """`_portable`, `bias` False: SGLang's EAGLE-1 always has a bias in `fc`, and `bias` means the attention's bias."""
    hf, tensors = _portable(draft, target)
    return hf | {"bias": False}, tensors


def _safeailab(draft: DraftFiles, target: TargetName | None) -> Files:
    """`_portable` with `target_hidden_size`, without which SafeAILab's code does not read the draft's embeddings."""
    hf, tensors = _portable(draft, target)
    if draft.config.own_embeddings:
        hf["target_hidden_size"] = draft.config.target_hidden_size
    return hf, tensors


def _speculators(draft: DraftFiles, target: TargetName | None) -> Files:
    config = draft.config
    target = target or (_recorded(draft) if config.provenance.target else None)
    if target is None:
        raise ValueError(
            "speculators' format names the draft's target, and this draft's config does not; give the target's hub id "
            "with --target"
        )
    flat, kind = _flat(draft), config.method
    if config.aux_layers:
        flat["eagle_aux_hidden_state_layer_ids"] = to_engine(config.aux_layers, "speculators")
    layer = {name: flat[name] for name in LAYER_FIELDS if name in flat}
    rope = dict(flat["rope_parameters"])
    if rope["rope_type"] != "default":  # for transformers 4
        layer["rope_scaling"] = {name: value for name, value in rope.items() if name != "rope_theta"}
    # `vllm serve DRAFT` loads the verifier and drafts so many tokens a round
    tokens = {"speculative_tokens": trained_depth(config)}
    greedy = {"proposal_type": "greedy", **tokens, "verifier_accept_k": 1, "accept_tolerance": 0.0}
    hf = {
        "architectures": [CLASSES[kind]],
        "speculators_model_type": kind,
        "speculators_config": {
            "algorithm": kind,
            "default_proposal_method": "greedy",
            "proposal_methods": [greedy],
            "verifier": {"name_or_path": target.name, "architectures": list(target.architectures)},
        },
        "transformer_layer_config": layer,
        "torch_dtype": flat["torch_dtype"],
        "embed_requires_grad": config.own_embeddings,
    }
    hf |= {name: flat[name] for name in DRAFT_FIELDS if name in flat}
    hf |= {name: flat.get(name, False) for name in NORM_FIELDS}
    if kind == "peagle":
        hf["mask_token_id"] = flat["mask_token_id"]
    return hf | {"fledge": flat["fledge"]}, _speculators_tensors(config, draft.tensors)


def _speculators_tensors(config: DraftConfig, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors with all layers numbered, and without copies of the layers' input norms under SGLang's name."""
    tensors = portable_tensors(config, state)
    copies = {name for name in tensors if name.startswith("layers.") and name.endswith("hidden_norm.weight")}
    return {name.replace("midlayer.", "layers.0."): x for name, x in tensors.items() if name not in copies}


LAYOUTS: dict[str, Callable[[DraftFiles, TargetName | None], Files]] = {
    "vllm": _portable,
    "sglang": _sglang,
    "safeailab": _safeailab,
    "speculators": _speculators,
}


def _flat(draft: DraftFiles) -> dict[str, Any]:
    dtype = next(x.dtype for x in draft.tensors.values() if x.is_floating_point())
    return config_to_hf(draft.config, dtype_name(dtype))


def _differences(
    draft: DraftFiles, engine: str, hf: dict[str, Any], tensors: Mapping[str, Tensor]
) -> tuple[str, ...]:  # fmt: skip
    """Phrases about differences of `hf` and `tensors` from a draft's current files, of parts that the engine reads."""
    found, fields = [] if draft.file == WEIGHTS else [f"weights in {WEIGHTS}, not {draft.file}"], []
    if strays := [name for name in draft.strays if engine in stray_readers(name)]:
        found.append(f"without {some_of(strays)}, with other weights")
    if is_speculators(draft.hf) != is_speculators(hf):
        found.append("config.json in " + ("speculators' format" if is_speculators(hf) else "the flat layout"))
    elif is_speculators(hf):
        fields = _changed(draft.hf, hf) + _changed(_layer(draft.hf), _layer(hf))
    else:
        fields = _changed(*(_as_read(x, engine, draft.config) for x in (draft.hf, hf)))
    if fields:
        found.append(f"config.json: {'; '.join(fields)}")
    if _tensors_read(draft.names, engine, draft.config) == _tensors_read(tensors.keys(), engine, draft.config):
        return tuple(found)
    added, removed = sorted(tensors.keys() - draft.names), sorted(draft.names - tensors.keys())
    if added or removed:
        instead = f" instead of {some_of(removed)}" if removed else ""
        found.append(f"tensors {some_of(added)}{instead}" if added else f"without the tensors {some_of(removed)}")
    return tuple(found)


def _as_read(hf: dict[str, Any], engine: str, config: DraftConfig) -> dict[str, Any]:
    """A flat config with the engine's defaults for missing fields, and a single spelling of each field."""
    heads = config.num_attention_heads
    defaults = {"head_dim": config.hidden_size // heads, "num_key_value_heads": heads}
    if engine != "safeailab" and config.family.reads_layers:  # EAGLE-1 and SafeAILab: a bias by default
        defaults["bias"] = False
    if engine == "vllm":
        defaults["draft_vocab_size"] = config.vocab_size
    read = hf | {name: value for name, value in defaults.items() if hf.get(name) is None}
    if engine != "safeailab":  # SafeAILab's code reads only the older fields of RoPE
        read = {name: value for name, value in read.items() if name not in ROPE_FIELDS}
        read["rope_parameters"] = RopeConfig.from_hf(hf).to_hf()
    if config.family.layout == "dflash":
        return {name: x for name, x in read.items() if name not in DFLASH_FIELDS} | _block_as_read(hf, engine)
    classes, given = VLLM_CLASSES[config.family.reads_layers], set(hf.get("architectures") or ())
    if engine == "vllm" and given & classes and (given <= classes or not config.family.reads_layers):
        read["architectures"] = sorted(classes)
    return read


def _block_as_read(hf: dict[str, Any], engine: str) -> dict[str, Any]:
    """The fields of DFlash's layout as versions of vLLM and SGLang read them: whether each layer's rows of a block are
    causal, the mask token, the windows, and the size of a block."""
    inside, kinds = hf.get("dflash_config") or {}, hf.get("layer_types")
    sliding = [kind == "sliding_attention" for kind in kinds or ["full_attention"] * hf.get("num_hidden_layers", 1)]

    def everywhere(said: bool | None, otherwise: list[bool]) -> list[bool]:
        return otherwise if said is None else [said] * len(sliding)

    is_causal, mask = hf.get("is_causal"), inside.get("mask_token_id")
    if engine == "vllm":
        older = everywhere(inside.get("causal"), sliding)
        read: dict[str, Any] = {"causal in 0.26": older, "causal in 0.33": everywhere(is_causal, older)}
        mask = hf.get("mask_token_id") if mask is None else mask
    else:
        by_kind = [bool(is_causal) or of_window for of_window in sliding]
        read = {"causal in 0.5.17": by_kind if kinds else [False] * len(sliding)}
        read |= {"causal in 0.5.23": everywhere(is_causal, sliding)}
        read |= {"block_size": inside.get("block_size") or hf.get("block_size")}
    windows = [hf.get("sliding_window") if of_window else None for of_window in sliding]
    layers = inside.get("target_layer_ids", hf.get("target_layer_ids"))
    read |= {name: inside.get(name) for name in (*CONV, *SELECTOR)}
    return read | {"mask_token_id": mask, "windows": windows, "target_layer_ids": layers}


def _tensors_read(names: Iterable[str], engine: str, config: DraftConfig) -> set[str]:
    """The names of the tensors that an engine reads, in a single spelling if the engine accepts several spellings."""
    if engine not in ("vllm", "sglang"):
        return set(names)
    skipped = {"t2d", *(["fc.bias"] if engine == "vllm" else [])}
    found = {name for name in names if name not in skipped and not name.endswith("rotary_emb.inv_freq")}
    if not config.family.reads_layers:
        return found
    if engine == "sglang":  # SGLang's EAGLE-3 class accepts names with and without the prefix
        found = {n if n in OUTSIDE_MODEL else n.removeprefix("model.") for n in found}
    return {n.replace("layers.0.", "midlayer.", 1) for n in found}


def _layer(hf: dict[str, Any]) -> dict[str, Any]:
    return hf.get("transformer_layer_config", {}) if is_speculators(hf) else {}


def _changed(old: dict[str, Any], new: dict[str, Any]) -> list[str]:
    """Phrases about the changed fields of config.json, with the new and the old value: fields of `new` that are added
    or differ, and fields of the flat layout that `new` lacks."""
    skipped = NOT_COMPARED | ({"architectures"} if is_speculators(new) else set())  # vLLM ignores speculators' classes
    if "rope_theta" in old and "rope_parameters" not in old:
        skipped |= {"rope_parameters"}  # SafeAILab's code reads only the older fields of RoPE
    names = {*new, *(name for name in old if name in FLAT_FIELDS)} - skipped
    changed = sorted(name for name in names if _value(name, old) != _value(name, new))
    return [
        f"{name} {_text(new.get(name), old.get(name))}, not {_text(old.get(name), new.get(name))}" for name in changed
    ]


def _text(value: Any, other: Any) -> str:
    """A field's value as text. If both values are objects, only the entries that differ from `other`."""
    if value is None:
        return "absent"
    if isinstance(value, dict) and isinstance(other, dict):
        value = {k: v for k, v in value.items() if k not in other or other[k] != v}
    return shortened(json.dumps(value))


def _value(name: str, hf: dict[str, Any]) -> Any:
    value = hf.get(name)
    return None if value == DEFAULTS.get(name, False) else value


def describe_files(files: DraftFiles) -> list[str]:
    """Sentences about the layout of a draft's files, and about the engines that can serve the draft."""
    lines = [f"Its files have {files.layout}."]
    for engine in ENGINES:
        if reason := unsupported(files.config, engine):
            lines.append(f"{reason}.")
            continue
        after = f"fledge export --to {engine}"
        how = f"can serve it after {after}" if needs_export(files, engine) else "can serve these files"
        if engine == "speculators":
            how = f"has it after {after}" if needs_export(files, engine) else "is what these files have"
        version = minimum_version(files.config, engine)
        maker = "vLLM " if engine == "speculators" else ""
        lines.append(f"{TITLES[engine]} {how}{f' (from {maker}{version} on)' if version else ''}.")
    return lines


@dataclass(frozen=True)
class Serving:
    """A target served with a draft: `depth` drafted tokens a round, or a tree of `nodes` nodes, including the root,
    with at most `width` children per node (SGLang only)."""

    target: str
    draft: str
    config: DraftConfig
    depth: int
    nodes: int | None = None
    width: int | None = None


def trained_depth(config: DraftConfig) -> int:
    """The number of tokens that a draft was trained to draft in a round; DEPTH if not recorded."""
    return config.provenance.depth or DEPTH


def serve_command(engine: str, serving: Serving, arguments: Sequence[str] = ()) -> list[str]:
    """The words of the command that starts an engine's server with a draft, followed by `arguments`.

    Raises ValueError for a tree that the engine does not draft, and for arguments that set the served model or the
    drafting again.
    """
    command = engine_command(engine, serving)
    fixed = {word for word in command if word.startswith("--")} - SWITCHES | {*NAMES_OF_TARGET[engine]}
    if given := next((word for word in arguments if _replaces(word, fixed)), None):
        raise ValueError(
            f"{given.partition('=')[0]} is among the words after --, but fledge serve gives the target and what the "
            "draft needs; say which target by --target, and what is drafted by --depth, --tree-nodes and --tree-width"
        )
    return [*program(engine), *command[len(PROGRAMS[engine]) :], *arguments]


def _replaces(word: str, flags: Collection[str]) -> bool:
    """Whether argparse reads a word as a flag in `flags` or as a flag of speculative decoding, such as vLLM's -sc.
    argparse accepts shortened flags, and engines accept underscores for hyphens."""
    name = re.split(r"[=.]", word, maxsplit=1)[0].replace("_", "-")
    if not name.startswith("--"):
        return name.startswith("-s")
    return name.startswith("--spec") or (name != "--" and any(flag.startswith(name) for flag in flags))


def engine_command(engine: str, serving: Serving) -> list[str]:
    """The words of `serve_command` on a machine on which the engine is installed, without further arguments."""
    return [*PROGRAMS[engine], *(_vllm_words if engine == "vllm" else _sglang_words)(serving)]


def program(engine: str) -> list[str]:
    """The words that start an engine's server on this machine: the engine's script, or a module of this Python."""
    importable = importlib.util.find_spec(engine) is not None
    if importable and engine == "sglang":
        return [sys.executable, *PROGRAMS[engine][1:]]
    if importable and shutil.which("vllm") is None:
        return [sys.executable, "-m", "vllm.entrypoints.cli.main", "serve"]
    return list(PROGRAMS[engine])


def available(engine: str) -> bool:
    """Whether an engine can be started on this machine: by the engine's script, or by this Python."""
    return importlib.util.find_spec(engine) is not None or (engine == "vllm" and shutil.which("vllm") is not None)


def _vllm_words(serving: Serving) -> list[str]:
    if serving.nodes is not None or serving.width is not None:
        raise ValueError("vLLM drafts chains, no trees; leave --tree-nodes and --tree-width out, or use SGLang")
    target, revision = split_revision(serving.target)
    draft, draft_revision = split_revision(serving.draft)
    # without a method, vLLM takes the draft for an independent small language model, unless the path contains eagle
    method, eagle = serving.config.family.engines["vllm"], serving.config.family.layout == "eagle"
    speculative = {"method": method, "model": draft, "num_speculative_tokens": serving.depth}
    speculative |= {"revision": draft_revision} if draft_revision else {}
    speculative |= {"parallel_drafting": True} if serving.config.family.one_pass and eagle else {}
    words = [target, *(["--revision", revision] if revision else [])]
    return [*words, "--speculative-config", json.dumps(speculative)]


def _sglang_words(serving: Serving) -> list[str]:
    target, revision = split_revision(serving.target)
    draft, draft_revision = split_revision(serving.draft)
    words = ["--model-path", target, *(["--revision", revision] if revision else [])]
    words += ["--speculative-algorithm", serving.config.family.engines["sglang"]]
    words += ["--speculative-draft-model-path", draft]
    words += ["--speculative-draft-model-revision", draft_revision] if draft_revision else []
    amounts = _sglang_block(serving) if serving.config.family.layout == "dflash" else _sglang_tree(serving)
    words += [str(word) for flag in amounts.items() for word in flag]
    return [*words, "--enable-metrics"]  # the counters that `fledge eval --endpoint` reads


def _sglang_block(serving: Serving) -> dict[str, int]:
    """The flags of a block of `depth` tokens; none for a block as long as in training, which config.json says."""
    if serving.nodes is not None or serving.width is not None:
        raise ValueError("SGLang drafts chains with DFlash, no trees; leave --tree-nodes and --tree-width out")
    trained = serving.config.provenance.depth
    return {} if serving.depth == trained else {"--speculative-dflash-block-size": serving.depth + 1}


def _sglang_tree(serving: Serving) -> dict[str, int]:
    """The flags of a tree, of which a chain is one."""
    width = serving.width or (1 if serving.nodes is None else 10)
    most = 1 + width + (serving.depth - 1) * width**2  # scored nodes: `width` nodes a level have `width` children each
    nodes = serving.nodes or (serving.depth + 1 if width == 1 else min(60, most))
    if width > 1 and nodes > most:
        raise ValueError(
            f"a tree of {serving.depth} levels, {width} wide, has at most {most} nodes; give --tree-nodes {most} or "
            "fewer, a larger --tree-width or more --depth"
        )
    if width == 1 and nodes != serving.depth + 1:
        raise ValueError(
            f"a tree with one child per node is a chain: for {serving.depth} tokens it has {serving.depth + 1} nodes, "
            f"not {nodes}; leave --tree-nodes out, or give a larger --tree-width"
        )
    amounts = {"--speculative-num-steps": serving.depth, "--speculative-eagle-topk": width}
    return amounts | {"--speculative-num-draft-tokens": nodes}
