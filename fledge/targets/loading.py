"""Loads targets, or takes loaded transformers models as targets, and says plainly why one cannot be loaded."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils.logging import disable_progress_bar, enable_progress_bar, is_progress_bar_enabled

from fledge.config import RopeConfig, llama_names
from fledge.hub import split_revision
from fledge.targets.transformers import TransformersTarget


def load_target(
    path: str | Path,
    *,
    device: str | torch.device = "cpu",
    dtype: torch.dtype | None = None,
    max_length: int | None = None,
    trust_remote_code: bool = False,
) -> TransformersTarget:
    """Loads a model and tokenizer from a directory or a hub id, which may end in a revision (owner/name@revision).

    `dtype` None is the checkpoint's own on an accelerator and float32 on the CPU. Code that comes with the model runs
    only with `trust_remote_code`. Raises ValueError with the cause where the files are missing, cut short, not a
    causal language model, or need such code.
    """
    device = torch.device(device)
    name, revision = split_revision(path)
    if not Path(path).exists() and (Path(path).is_absolute() or name.count("/") > 1):
        raise ValueError(f"the target {path} does not exist; it is a directory or a hub id such as owner/name")
    if Path(path).exists() and not (Path(path) / "config.json").is_file():
        raise ValueError(f"{path} holds no config.json; a target is a directory as save_pretrained writes it")
    if Path(path).exists() and '"draft_vocab_size"' in (Path(path) / "config.json").read_text(errors="replace"):
        raise ValueError(f"{path} is a draft; the target is the model that it was trained for")
    shown = is_progress_bar_enabled()
    disable_progress_bar()
    try:
        # said each time, because transformers would otherwise ask on standard input, where prompts come from
        trusted = dict(revision=revision, trust_remote_code=trust_remote_code)
        RopeConfig.from_hf(llama_names(AutoConfig.from_pretrained(name, **trusted).get_text_config(decoder=True)))
        model, found = AutoModelForCausalLM.from_pretrained(
            name, dtype=dtype or (torch.float32 if device.type == "cpu" else "auto"), output_loading_info=True,
            **trusted,
        )  # fmt: skip
        tokenizer = AutoTokenizer.from_pretrained(name, **trusted)
        tokenizer("The tokenizer's files are read in full at its first use.")
    except Exception as e:
        if "trust_remote_code" in str(e):
            raise ValueError(
                f"the target {path} comes with code of its own, which fledge does not run unasked; read it, and if you "
                "trust it, give --trust-remote-code (in Python trust_remote_code=True)"
            ) from e
        if isinstance(e, ValueError) and "RoPE" in str(e):
            raise
        hub = "" if Path(path).exists() else "it is no directory here, and as a hub id: "
        raise ValueError(f"the target {path} cannot be loaded: {hub}{_first_line(e)}{_cure(e)}") from e
    finally:
        if shown:
            enable_progress_bar()
    if missing := sorted(found["missing_keys"]):  # which transformers fills with random numbers
        raise ValueError(
            f"the target {path} cannot be loaded: its weights lack {len(missing)} tensors of its model, such as "
            f"{missing[0]}; copy or download it again"
        )
    return TransformersTarget(
        model.to(device), tokenizer, name=str(path), max_length=max_length, trust_remote_code=trust_remote_code
    )


def target_of(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None = None, *, max_length: int | None = None
) -> TransformersTarget:
    """A target made of a loaded transformers model, which is used in place and frozen.

    `tokenizer` None is the one that lies where the model came from. Raises ValueError where there is none, and for a
    model that is no causal language model.
    """
    name = model.config.name_or_path
    if model.get_output_embeddings() is None or model.config.is_encoder_decoder:
        raise ValueError(f"{type(model).__name__} is no causal language model; load one by AutoModelForCausalLM")
    if tokenizer is None:
        try:
            tokenizer = AutoTokenizer.from_pretrained(name, trust_remote_code=False)
        except Exception as e:
            where = f"in {name}, where the model is from" if name else "since the model does not say where it is from"
            raise ValueError(f"no tokenizer can be loaded {where}; give load(model, tokenizer=..) one") from e
    return TransformersTarget(model, tokenizer, name=name or type(model).__name__, max_length=max_length)


def _cure(e: Exception) -> str:
    if "Safetensor" in type(e).__name__:
        return ". A weights file is cut short or damaged: copy or download it again"
    if isinstance(e, json.JSONDecodeError):
        return ". A JSON file of the model is damaged: copy or download it again"
    return ""


def _first_line(e: Exception) -> str:
    return next((line for line in str(e).splitlines() if line.strip()), type(e).__name__).strip()
