"""Other names of options, which users of vLLM, TRL, axolotl and SpecForge know, and the values that a shell completes.

Both are tables by the name of an option, the same in every command that has it. Nothing here validates a value, and
nothing may import torch: a shell waits for a completion.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import Field
from typing import Any

from fledge.io.fields import DTYPES
from fledge.methods import CHOICES
from fledge.options import Options, flag_of, option_fields

ALIASES = {
    "target": ("model",),
    "draft": ("draft_model",),
    "data": ("dataset",),
    "out": ("output_dir", "output"),
    "lr": ("learning_rate",),
    "epochs": ("num_epochs",),
    "steps": ("max_steps",),
    "max_length": ("max_seq_length",),
    "rows_per_step": ("batch_size",),
    "batch": ("batch_size",),
    "warmup": ("warmup_ratio",),
    "clip": ("max_grad_norm",),
    "eval_every": ("eval_steps",),
    "save_every": ("save_steps",),
    "log": ("report_to",),
    "depth": ("num_speculative_tokens",),
    "max_new_tokens": ("max_tokens",),
}

VALUES: dict[str, tuple[str, ...]] = {
    "method": tuple(CHOICES),
    "loss": ("ce", "kl", "accept", "mixed"),
    "optimizer": ("adamw", "muon"),
    "impl": ("eager", "flex", "triton"),
    "activations": ("keep", "recompute", "auto"),
    "log": ("tensorboard", "wandb"),
    "draft_mode": ("chain", "tree", "parallel"),
    "draft_sampling": ("coupled", "sample"),
    "draft_cache": ("stable", "unstable"),
    "target_impl": ("auto", "native", "transformers"),
    "dtype": tuple(DTYPES),
    "precision": ("float32", "bfloat16", "float16", "fp8"),
    "device": ("auto", "cpu", "cuda"),
    "draft_device": ("auto", "cpu", "cuda"),
    "engine": ("vllm", "sglang"),
    "to": ("vllm", "sglang", "safeailab", "speculators"),
}


def aliases_of(kind: type[Options], name: str) -> tuple[str, ...]:
    """The other names of an option in a command. A name that the command uses for another option is left out: `--model`
    of `fledge eval` is the server's model."""
    taken = {f.name for f in option_fields(kind)}
    return tuple(alias for alias in ALIASES.get(name, ()) if alias not in taken)


def flags_of(kind: type[Options], f: Field) -> list[str]:
    """The flags of an option, its own name first."""
    return [flag_of(name) for name in (f.name, *aliases_of(kind, f.name))]


def values_of(f: Field) -> Callable[[str], list[str]] | None:
    """The function with which a shell completes an option's values; None if it completes paths."""
    values = VALUES.get(f.name)
    return None if values is None else lambda incomplete: [v for v in values if v.startswith(incomplete)]


def replace_aliases(kind: type[Options], values: Mapping[str, Any], as_written: Callable[[str], str]) -> dict[str, Any]:
    """Given options (name: value) by their own names. `as_written` turns a name into the form that the user wrote, for
    messages. Raises ValueError if an option is given by two names."""
    own = {alias: f.name for f in option_fields(kind) for alias in aliases_of(kind, f.name)}
    replaced: dict[str, Any] = {}
    for name, value in values.items():
        if (new := own.get(name, name)) in replaced:
            first, second = sorted((name, next(n for n in values if own.get(n, n) == new)))
            raise ValueError(same_option(as_written(first), as_written(second)))
        replaced[new] = value
    return replaced


def same_option(first: str, second: str) -> str:
    """The message for two names of one option."""
    return f"{first} and {second} are the same option; give one of them"
