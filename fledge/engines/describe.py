"""Describes a draft in sentences."""

from __future__ import annotations

from fledge.config import DraftConfig
from fledge.data.modes import shown_mode
from fledge.drafts.weights import DraftFiles
from fledge.engines.export import needs_export
from fledge.engines.support import ENGINES, TITLES, minimum_version, unsupported
from fledge.methods import CHOICES


def describe(config: DraftConfig) -> list[str]:
    """Sentences that describe a `DraftConfig`."""
    known = config.provenance
    kind = method_title(config)
    article = "An" if kind.startswith("E") else "A"
    switches = [n for n in ("fc_norm", "norm_output", "norm_before_fc", "norm_before_residual", "qk_norm")
                if getattr(config, n)]  # fmt: skip
    layers = f"{config.num_hidden_layers} layer" + ("s" if config.num_hidden_layers > 1 else "")
    lines = [
        f"{article} {kind} draft{' with ' + ', '.join(switches) if switches else ''}: {layers} "
        f"{config.hidden_size} wide, {config.num_attention_heads} heads of {config.head_dim} over "
        f"{config.num_key_value_heads}, RoPE {config.rope.rope_type}.",
        f"Its target is {known.target or 'not recorded'} ("
        + (f"{known.target_layers} layers, " if known.target_layers else "")
        + f"hidden states {config.target_hidden_size} wide).",
    ]
    if not config.family.reads_layers:
        lines.append("It reads the target's final hidden state and uses the target's LM head.")
    elif config.aux_layers:
        read = ", ".join(map(str, config.aux_layers))
        lines.append(
            f"It reads the target's hidden states {read}, numbered as in fledge train --aux-layers: 0 is the "
            "embedding, 1 the output of the first layer."
        )
    else:
        lines.append(
            f"It reads {config.num_aux_hidden_states} hidden states, of the layers that engines read by default."
        )
    vocabulary = f"Its vocabulary has {config.draft_vocab_size:,} of {config.vocab_size:,} tokens"
    if known.coverage is not None:
        vocabulary += f" and covers {known.coverage:.2%} of the assistant tokens in its training data"
    lines.append(vocabulary + ".")
    if config.mask_token_id is not None:
        lines.append(
            f"It drafts in one pass; token {config.mask_token_id} is the mask token for positions not known yet."
        )
    if known.depth:
        lines.append(f"It was trained to draft {known.depth} tokens, on documents of up to {known.max_length} tokens.")
    if known.template_modes:
        modes = " and with ".join(map(shown_mode, known.template_modes))
        lines.append(f"Its training chats were rendered with {modes}.")
    elif known.template_kwargs:
        lines.append(f"Its training chats were rendered with the template arguments {known.template_kwargs}.")
    return lines


def method_title(config: DraftConfig) -> str:
    """The display name of the method, or of its variant (EAGLE-3.1) if the draft has one of the variant's switches."""
    variants = [
        c for c in CHOICES.values() if c.method is config.family and any(getattr(config, s) for s in c.switches)
    ]
    return variants[-1].title if variants else config.family.title


def describe_files(files: DraftFiles) -> list[str]:
    """Sentences about the layout of a draft's files, and about the engines that can serve it."""
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


def trainer_notes(config: DraftConfig) -> list[str]:
    """What trainers other than fledge do differently with this draft."""
    found = list(config.family.notes)
    if config.family.reads_layers and config.draft_vocab_size == config.vocab_size and not config.family.one_pass:
        found.append(
            "SpecForge leaves t2d and d2t uninitialized if the file has none. fledge writes none for a full "
            "vocabulary, since vLLM would refuse them. Set t2d to ones and d2t to zeros before you continue "
            "training in SpecForge."
        )
    return found
