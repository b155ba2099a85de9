"""`fledge inspect`: what a draft is, in words."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from fledge.jobs.options import Options, opt, trust_option
from fledge.methods import CHOICES

if TYPE_CHECKING:
    from fledge.config import DraftConfig


@dataclass(frozen=True, kw_only=True)
class InspectOptions(Options):
    """Say what a draft is, for which target, what it reads and says, and whether anything is wrong with it."""

    directory: str = opt("a draft: a directory or hub id (owner/name or owner/name@revision)", flag="argument")
    target: str | None = opt("also check that it fits this target", None)
    trust_remote_code: bool = trust_option()


def run(options: InspectOptions, say: Callable[[str], None]) -> bool:
    """Prints findings; returns whether nothing is wrong. Raises ValueError where there is no draft to look at."""
    from fledge.models.weights import check_draft, open_draft, read_draft_config

    if options.trust_remote_code and not options.target:
        raise ValueError("--trust-remote-code is about a target's code; give --target with it, or leave it out")
    check_draft(options.directory)
    config, problems, notes = None, [], []
    try:
        config = read_draft_config(options.directory)
        config = open_draft(options.directory).config
    except ValueError as e:
        problems.append(str(e))
    if config is not None:
        for line in describe(config):
            say(line)
    if options.target and not problems:
        misfit, notes = _against_target(config, options)
        problems += misfit
    for note in [*(remarks(config) if config is not None else ()), *notes]:
        say(f"Note: {note}")
    for problem in problems:
        say(f"Wrong: {problem}")
    say("Nothing is wrong with it." if not problems else f"{len(problems)} problem(s).")
    return not problems


def _against_target(config: DraftConfig, options: InspectOptions) -> tuple[list[str], list[str]]:
    """Why a draft does not fit the target, and what to know of the target where it does; each may be empty."""
    from fledge.targets.compatibility import mismatch
    from fledge.targets.loading import load_target

    longrope = config.rope.rope_type == "longrope"
    target = load_target(
        options.target, max_length=config.provenance.max_length if longrope else None,
        trust_remote_code=options.trust_remote_code,
    )  # fmt: skip
    wrong, notes = mismatch(config, target), []
    if target.rollback_problem:
        notes.append(
            f"fledge does not decode with it: of {options.target}, {target.rollback_problem}. Serve it with an "
            "engine that can restore such states."
        )
    return [f"does not fit {options.target}: {wrong}"] if wrong else [], notes


def describe(config: DraftConfig) -> list[str]:
    """Sentences about a `DraftConfig`."""
    known = config.provenance
    kind = _title(config)
    article = "An" if kind.startswith("E") else "A"
    switches = [n for n in ("fc_norm", "norm_output", "norm_before_fc", "norm_before_residual", "qk_norm")
                if getattr(config, n)]  # fmt: skip
    layers = f"{config.num_hidden_layers} layer" + ("s" if config.num_hidden_layers > 1 else "")
    lines = [
        f"{article} {kind} draft{' with ' + ', '.join(switches) if switches else ''}: {layers} "
        f"{config.hidden_size} wide, {config.num_attention_heads} heads of {config.head_dim} over "
        f"{config.num_key_value_heads}, RoPE {config.rope.rope_type}.",
        f"For {known.target or 'a target that it does not name'}"
        + (f" ({known.target_layers} layers," if known.target_layers else " (")
        + f" hidden states {config.target_hidden_size} wide).",
    ]
    if not config.family.reads_layers:
        lines.append("It reads the target's final hidden state and uses the target's head.")
    elif config.aux_layers:
        read = ", ".join(map(str, config.aux_layers))
        lines.append(
            f"It reads the target's hidden states {read}, counted as fledge train --aux-layers does: 0 is the "
            "embedding, 1 the first layer's output."
        )
    else:
        lines.append(f"It reads the {config.num_aux_hidden_states} layers that engines read by default.")
    said = f"It can say {config.draft_vocab_size:,} of {config.vocab_size:,} tokens"
    said += f", {known.coverage:.2%} of its training data's assistant text" if known.coverage is not None else ""
    lines.append(said + ".")
    if config.mask_token_id is not None:
        lines.append(f"It drafts in one pass; token {config.mask_token_id} stands for words not known yet.")
    if known.depth:
        lines.append(f"Trained to draft {known.depth} tokens, on documents of up to {known.max_length} tokens.")
    if known.template_kwargs:
        lines.append(f"Chats were rendered with {known.template_kwargs}.")
    return lines


def _title(config: DraftConfig) -> str:
    """The method's name for people: that of a variant where the draft has one of its switches."""
    variants = [
        c for c in CHOICES.values() if c.method is config.family and any(getattr(config, s) for s in c.switches)
    ]
    return variants[-1].title if variants else config.family.title


def remarks(config: DraftConfig) -> list[str]:
    """What an engine would not do with it."""
    found = []
    if config.norm_before_residual:
        found.append("SGLang does not read norm_before_residual and would compute another draft; serve it with vLLM.")
    if config.qk_norm:
        found.append("SGLang has no EAGLE-3 draft with q/k norms; serve it with vLLM.")
    if config.attention_bias or config.mlp_bias:
        found.append("SGLang builds drafts without biases; serve it with vLLM.")
    if config.own_embeddings and config.hidden_size == config.target_hidden_size:
        found.append("SGLang replaces a draft's own embeddings by the target's; vLLM keeps them.")
    if config.provenance.target_layers in (config.aux_layers or ()):
        found.append("SGLang cannot read the output of the target's last layer; serve it with vLLM.")
    if config.fc_bias:
        found.append("vLLM drops the bias of its fc in silence.")
    found += config.family.notes
    if not config.family.reads_layers:
        return found
    if config.draft_vocab_size == config.vocab_size and not config.family.one_pass:
        found.append(
            "SpecForge leaves its t2d and d2t uninitialised where a file has none, and fledge writes none for a whole "
            "vocabulary, since vLLM refuses them there: set them to ones and zeros before you train it on in SpecForge."
        )
    if config.num_aux_hidden_states != 3 or config.num_hidden_layers != 1 or config.fc_norm or config.norm_output:
        found.append("SafeAILab's code reads three layers into one and knows no 3.1 norms; use vLLM or SGLang.")
    return found
