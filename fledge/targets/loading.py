"""Loads targets, or makes targets of loaded transformers models."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.utils.tqdm import are_progress_bars_disabled, enable_progress_bars
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.quantizers import AutoQuantizationConfig
from transformers.utils import cached_file, logging

from fledge.config import RopeConfig, llama_names
from fledge.io.fields import first_line, parse_dtype, read_json
from fledge.io.hub import progress_counter, split_revision
from fledge.targets import checks
from fledge.targets.native import NativeTarget, native_problem
from fledge.targets.quantized import loading_alone, quantization_of, run_once
from fledge.targets.transformers import TransformersTarget

IMPLEMENTATIONS = ("auto", "native", "transformers")
INVALID = "is not a valid JSON file"  # in transformers' message about a damaged file


def load_target(
    path: str | Path,
    *,
    device: str | torch.device = "cpu",
    dtype: torch.dtype | str | None = None,
    max_length: int | None = None,
    trust_remote_code: bool = False,
    implementation: str = "auto",
    weights: bool = True,
) -> TransformersTarget:
    """Loads a model and its tokenizer from a directory or a hub id, which may have a revision (owner/name@revision).

    `dtype` is a torch dtype or one of the names of `fledge train --dtype`; None is float32 on the CPU, and the
    checkpoint's dtype otherwise. `max_length` is as in `Target`. Code in the model's files runs only with
    `trust_remote_code`. `implementation` is as in `target_of`. Without `weights`, only config and tokenizer are read,
    and the model is on the meta device: the model has sizes, and computes nothing.

    Raises ValueError if files are missing or damaged, if the files hold no causal language model, if the model needs
    code that is not trusted, and if the weights are quantized by a package that is not installed.
    """
    check_implementation(implementation)
    device = torch.device(device)
    model, tokenizer, quantization = read_model(path, device, dtype, trust_remote_code, weights)
    options = dict(name=str(path), max_length=max_length, trust_remote_code=trust_remote_code)
    if not weights:
        return TransformersTarget(model, tokenizer, **options)
    target = _make_target(model if quantization else model.to(device), tokenizer, implementation, **options)
    target.quantization = quantization  # transformers may load other weights if the format cannot run
    return target


def read_model(
    path: str | Path, device: torch.device, dtype: torch.dtype | str | None, trust_remote_code: bool, weights: bool
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase, str]:
    """Reads a model, its tokenizer, and the name of the model's quantization (`quantization_of`). Arguments and errors
    are as in `load_target`. The weights are in host memory, or on the device if quantized."""
    dtype = parse_dtype(dtype)
    info: dict[str, Any] = {"missing_keys": (), "mismatched_keys": ()}
    with explaining_errors(path):
        name, options, config = read_config(path, trust_remote_code)
        wanted = dtype or (torch.float32 if device.type == "cpu" else "auto")
        quantization = quantization_of(config)
        if quantization:  # otherwise transformers would leave out an unknown quantization
            AutoQuantizationConfig.from_dict(dict(config.quantization_config))
        if weights:
            # a quantized model is loaded on the final device, since some quantized models cannot be moved
            place: dict[str, Any] = {"device_map": {"": device}} if quantization and device.type != "cpu" else {}
            with loading_alone(quantization), counting_tensors(f"tensors of {path}"):
                # sizes that differ are not ignored: `_check_complete` names them
                model, info = AutoModelForCausalLM.from_pretrained(
                    name, dtype=wanted, output_loading_info=True, ignore_mismatched_sizes=True, **place, **options
                )
                if quantization:
                    run_once(model)
        else:
            model = empty_model(name, config, config.dtype if isinstance(wanted, str) else wanted, options)
        tokenizer = read_tokenizer(name, options)
    _check_complete(path, info)
    return model, tokenizer, quantization


def target_of(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase | None = None,
    *,
    max_length: int | None = None,
    implementation: str = "auto",
) -> TransformersTarget:
    """Makes a target of a loaded transformers model, which is not copied, and is frozen.

    `tokenizer` None loads the tokenizer from the model's `name_or_path`. `implementation` "native" computes with
    fledge's own forward pass (`NativeTarget`), "transformers" with the model's forward pass, and "auto" natively where
    supported. Raises ValueError if there is no tokenizer, if the model is not a causal language model, and if the model
    does not support the implementation.
    """
    check_implementation(implementation)
    name = model.config.name_or_path
    if model.get_output_embeddings() is None or model.config.is_encoder_decoder:
        raise ValueError(f"{type(model).__name__} is not a causal language model; load one by AutoModelForCausalLM")
    if tokenizer is None:
        try:
            tokenizer = AutoTokenizer.from_pretrained(name, trust_remote_code=False)
        except Exception as e:
            where = f"from {name}, the model's source" if name else "since the model's config has no name_or_path"
            raise ValueError(f"no tokenizer can be loaded {where}; pass one with load(model, tokenizer=..)") from e
    return _make_target(model, tokenizer, implementation, name=name or type(model).__name__, max_length=max_length)


def check_implementation(implementation: str) -> None:
    """Raises ValueError unless `implementation` is in IMPLEMENTATIONS."""
    if implementation not in IMPLEMENTATIONS:
        raise ValueError(f"target implementation {implementation!r} is none of {', '.join(IMPLEMENTATIONS)}")


def _make_target(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, implementation: str, **options: Any
) -> TransformersTarget:
    if implementation == "transformers":
        return TransformersTarget(model, tokenizer, **options)
    problem = native_problem(model, model.config.get_text_config(decoder=True))
    if not problem:
        native = NativeTarget(model, tokenizer, **options)
        if not (problem := checks.native_difference(native)):
            return native
    if implementation == "native":
        raise ValueError(f"{options['name']} cannot run natively: {problem}; use the implementation transformers")
    target = TransformersTarget(model, tokenizer, **options)
    target.implementation = f"transformers, since {problem}"
    return target


def _check_complete(path: str | Path, info: dict[str, Any]) -> None:
    """Raises ValueError for tensors that transformers initialized randomly: tensors missing in a model's files, and
    tensors of another size in the files than in config.json. `info` is transformers' report about the loading."""
    differing = sorted(info["mismatched_keys"])
    for name, stored, wanted in differing:
        raise ValueError(
            f"the target {path} cannot be loaded: {name} has shape {list(stored)} in its files, and its config.json "
            f"asks for {list(wanted)} (the first of {len(differing)} tensors of other sizes). Correct config.json, "
            "e.g. vocab_size where tokens were added, or copy both from one model"
        )
    if missing := sorted(info["missing_keys"]):
        raise ValueError(
            f"the target {path} cannot be loaded: its files lack {len(missing)} of the model's tensors, such as "
            f"{missing[0]}; copy or download it again"
        )


def read_config(path: str | Path, trust_remote_code: bool) -> tuple[str, dict[str, Any], Any]:
    """A target's name and options in transformers' form, and the target's config. Raises ValueError for a RoPE type
    that is not supported, and OSError if the generation config, which names the tokens that end an answer, is
    damaged."""
    name, revision = split_revision(path)
    # always explicit: otherwise transformers would ask on standard input, which may be the prompt
    options = dict(revision=revision, trust_remote_code=trust_remote_code)
    config = AutoConfig.from_pretrained(name, **options)
    RopeConfig.from_hf(llama_names(config.get_text_config(decoder=True)))
    _generation_config(name, options)
    return name, options, config


def _generation_config(name: str, options: dict[str, Any]) -> GenerationConfig | None:
    """A target's generation config; None if the file is missing. Raises OSError for a damaged generation config, which
    transformers treats as missing when loading a model."""
    try:
        return GenerationConfig.from_pretrained(name, **options)
    except OSError as e:
        if INVALID in str(e):
            raise
        return None


def empty_model(name: str, config: Any, dtype: torch.dtype | None, options: dict[str, Any]) -> PreTrainedModel:
    """A target's model on the meta device."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype, trust_remote_code=options["trust_remote_code"])
    if (generation := _generation_config(name, options)) is not None:
        model.generation_config = generation
    return model


def read_tokenizer(name: str, options: dict[str, Any]) -> PreTrainedTokenizerBase:
    tokenizer = AutoTokenizer.from_pretrained(name, **options)
    tokenizer("The first use of a tokenizer reads all of its files.")
    return tokenizer


def _other_kind(path: Path) -> str:
    """A message with a cure if a path is an adapter or a GGUF model, and no model in transformers' format; or empty."""
    names = [file.name for file in path.iterdir()] if path.is_dir() else [path.name]
    if any(name.startswith(("model", "pytorch_model")) and name.endswith((".safetensors", ".bin")) for name in names):
        return ""
    if "adapter_config.json" in names:
        return _adapter(path / "adapter_config.json", str(path))
    if gguf := next((name for name in sorted(names) if name.endswith(".gguf")), None):
        directory = str(path if path.is_dir() else path.parent)
        return (
            f"holds a model in GGUF format ({gguf}), which fledge does not read. Give the model that it was made from, "
            f"or convert it: AutoModelForCausalLM.from_pretrained({directory!r}, gguf_file={gguf!r})"
            ".save_pretrained(..), and the same with AutoTokenizer"
        )
    return ""


def _adapter_on_hub(path: str | Path) -> str:
    """`_adapter` of a hub id; empty if no adapter is found there."""
    name, revision = split_revision(path)
    found = None
    with contextlib.suppress(Exception):  # offline, unknown or private id: the error of the model's config says so
        found = cached_file(name, "adapter_config.json", revision=revision)
    return _adapter(Path(found), name) if found else ""


def _adapter(file: Path, name: str) -> str:
    """A message about an adapter, from adapter_config.json: kind, base model, and how to merge both into a target."""
    try:
        config = read_json(file)
        kind, base = config["peft_type"], config["base_model_name_or_path"]
    except (ValueError, KeyError, TypeError):
        kind, base = "PEFT", "another model"
    return (
        f"is a {kind} adapter of {base}, not a whole model. Merge the two and give the result: pip install peft, then "
        f"AutoPeftModelForCausalLM.from_pretrained({name!r}).merge_and_unload().save_pretrained(..), and "
        f"AutoTokenizer.from_pretrained({base!r}).save_pretrained(..) to the same directory"
    )


@contextlib.contextmanager
def explaining_errors(path: str | Path) -> Iterator[None]:
    """Context manager for loading a target, without progress bars of transformers. Any exception becomes a ValueError
    with the problem and a remedy."""
    name, _ = split_revision(path)
    local = Path(path).is_absolute() or name.count("/") > 1 or name.startswith(("./", "../"))
    if local and not Path(path).exists():
        raise ValueError(f"the target {path} does not exist; it is a directory or a hub id such as owner/name")
    if problem := _other_kind(Path(path)):
        raise ValueError(f"the target {path} {problem}")
    if Path(path).is_file():
        raise ValueError(f"the target {path} is a file; give the directory that it is in")
    if Path(path).exists() and not (Path(path) / "config.json").is_file():
        raise ValueError(f"{path} holds no config.json; a target is a directory as save_pretrained writes it")
    if Path(path).exists() and '"draft_vocab_size"' in (Path(path) / "config.json").read_text(errors="replace"):
        raise ValueError(f"{path} is a draft; the target is the model that it was trained for")
    progress_bar_was_enabled, downloads_were_shown = logging.is_progress_bar_enabled(), not are_progress_bars_disabled()
    logging.disable_progress_bar()  # also those of downloads
    if downloads_were_shown:
        enable_progress_bars()
    try:
        yield
    except Exception as e:
        if "trust_remote_code" in str(e):
            raise ValueError(
                f"the target {path} comes with code of its own, which fledge runs only on request; read it, and if you "
                "trust it, give --trust-remote-code (in Python trust_remote_code=True)"
            ) from e
        if isinstance(e, ValueError) and "RoPE" in str(e):
            raise
        if "instantiate the backend tokenizer" in str(e):
            raise ValueError(
                f"the target {path} has no files of a tokenizer (tokenizer.json, or those of its kind), or lacks some; "
                "copy them from where the model is from"
            ) from e
        if not Path(path).exists() and (adapter := _adapter_on_hub(path)):
            raise ValueError(f"the target {path} {adapter}") from e
        hub = "" if Path(path).exists() else "it is not a local directory, and as a hub id: "
        raise ValueError(f"the target {path} cannot be loaded: {hub}{first_line(e).rstrip('.')}{_remedy(e)}") from e
    finally:
        if progress_bar_was_enabled:
            logging.enable_progress_bar()


def _remedy(e: Exception) -> str:
    """A sentence to append to the message of a loading error; may be empty."""
    if "Safetensor" in type(e).__name__:
        return ". A weights file is truncated or damaged: copy or download it again"
    if isinstance(e, json.JSONDecodeError) or INVALID in str(e):
        return ". A JSON file of the model is damaged: copy or download it again"
    if "couldn't connect" in str(e):
        return ". Check its name; without a connection, only directories and downloaded models can be loaded"
    return ""


@contextlib.contextmanager
def counting_tensors(label: str) -> Iterator[None]:
    """Context manager: transformers' loading of weights is counted, if progress is shown
    (`fledge.io.hub.show_progress`)."""
    if (counter := progress_counter()) is None:
        yield
        return

    def counted(items: Iterable[Any]) -> Iterator[Any]:
        items = list(items)
        with counter(label, len(items), unit="tensors") as advance:
            for item in items:
                yield item
                advance(1)

    def bar(make: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        loads = kwargs.get("desc") == "Loading weights" and args
        return counted(args[0]) if loads else make(*args, **kwargs)

    before = logging.set_tqdm_hook(bar)
    try:
        yield
    finally:
        logging.set_tqdm_hook(before)
