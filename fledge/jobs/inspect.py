"""`fledge inspect`: what a draft is, in words."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from fledge.jobs.options import Options, opt


@dataclass(frozen=True, kw_only=True)
class InspectOptions(Options):
    """Say what a draft is, for which target, what it reads and says, and whether anything is wrong with it."""

    directory: str = opt("a draft's directory", flag="argument")
    target: str | None = opt("also check that it fits this target", None)


def run(options: InspectOptions, say: Callable[[str], None]) -> bool:
    """Prints findings; returns whether nothing is wrong."""
    import torch

    from fledge.models.weights import load_draft, read_draft_config

    config = read_draft_config(options.directory)
    for line in describe(config):
        say(line)
    problems: list[str] = []
    try:
        draft = load_draft(options.directory)
        bad = [n for n, p in draft.named_parameters() if not bool(torch.isfinite(p).all())]
        problems += [f"{', '.join(bad[:3])} holds values that are not numbers"] if bad else []
        flat = [n for n, p in draft.named_parameters() if p.dim() > 1 and not bool(p.any())]
        problems += [f"{', '.join(flat[:3])} is all zeros"] if flat else []
    except ValueError as e:
        problems.append(str(e))
    if options.target and not problems:
        from fledge.models.target import load_target
        from fledge.models.weights import mismatch

        longrope = config.rope.rope_type == "longrope"
        target = load_target(options.target, max_length=config.provenance.max_length if longrope else None)
        wrong = mismatch(config, target)
        problems += [f"does not fit {options.target}: {wrong}"] if wrong else []
    for remark in remarks(config):
        say(f"Note: {remark}")
    for problem in problems:
        say(f"Wrong: {problem}")
    say("Nothing is wrong with it." if not problems else f"{len(problems)} problem(s).")
    return not problems


def describe(config) -> list[str]:
    """Sentences about a `DraftConfig`."""
    known = config.provenance
    eagle1 = config.method == "eagle1"
    kind = "EAGLE-1" if eagle1 else "EAGLE-3.1" if config.fc_norm or config.norm_output else "EAGLE-3"
    kind = "P-EAGLE" if config.method == "peagle" else kind
    article = "A" if config.method == "peagle" else "An"
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
    if eagle1:
        lines.append("It reads the target's last hidden state, and speaks through its head.")
    elif config.aux_layers:
        read = ", ".join(str(i - 1) for i in config.aux_layers)
        lines.append(f"It reads the outputs of the target's layers {read} (counted from 0).")
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


def remarks(config) -> list[str]:
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
    if config.method == "eagle1":
        return [*found, "vLLM drops the bias of its fc in silence."] if config.fc_bias else found
    if config.method == "peagle":
        found.append(
            "SGLang knows no P-EAGLE and would draft a word at a time with it; vLLM serves it with parallel_drafting."
        )
    if config.num_aux_hidden_states != 3 or config.num_hidden_layers != 1 or config.fc_norm or config.norm_output:
        found.append("SafeAILab's code reads three layers into one and knows no 3.1 norms; use vLLM or SGLang.")
    return found
