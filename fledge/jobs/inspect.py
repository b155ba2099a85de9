"""`fledge inspect`: describes a draft and checks its files."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from fledge.data.modes import shown_mode
from fledge.jobs.options import Options, opt, trust_remote_code_option
from fledge.methods import CHOICES

if TYPE_CHECKING:
    from fledge.config import DraftConfig
    from fledge.eval.draft_files import DraftOnDisk
    from fledge.eval.findings import Finding
    from fledge.models.weights import DraftFiles


@dataclass(frozen=True, kw_only=True)
class InspectOptions(Options):
    """Describe a draft: its target, inputs, vocabulary, engines that can serve it, and any problems with its files."""

    directory: str = opt("the draft: a directory or hub id (owner/name or owner/name@revision)", flag="argument")
    target: str | None = opt("also check that the draft fits this target", None)
    trust_remote_code: bool = trust_remote_code_option()


def run(options: InspectOptions, say: Callable[[str], None]) -> bool:
    """Prints a description and any problems. Returns whether there are none. Raises ValueError if there is no draft."""
    from fledge.eval.draft_files import DraftOnDisk, norm_output_note, read_files, vocabulary_findings
    from fledge.formats.tensors import stray_symptom
    from fledge.models.weights import check_draft, open_draft, read_draft_config

    if options.trust_remote_code and not options.target:
        raise ValueError(
            "--trust-remote-code has no effect without --target; give --target, or leave --trust-remote-code out"
        )
    check_draft(options.directory)
    config, files, problems, notes = None, None, [], []
    try:
        config = read_draft_config(options.directory)
        files = open_draft(options.directory)
        config = files.config
        problems += [f"{name} holds other weights than {files.file}; {stray_symptom(name)}; remove it"
                     for name in files.strays]  # fmt: skip
    except ValueError as e:
        problems.append(str(e))
    draft, _ = read_files(options.directory)
    if isinstance(draft, DraftOnDisk):
        notes += filter(None, [norm_output_note(draft)])
        problems += map(_problem, () if problems else vocabulary_findings(draft, None))
    if config is not None:
        for line in [*describe(config), *(describe_files(files) if files else ())]:
            say(line)
    if options.target and not problems:
        misfit, more = _against_target(config, draft, options)
        problems, notes = misfit, notes + more
    for note in [*(trainer_notes(config) if config is not None else ()), *notes]:
        say(f"Note: {note}")
    for problem in problems:
        say(f"Wrong: {problem}")
    say("Nothing is wrong with it." if not problems else f"{len(problems)} problem(s).")
    return not problems


def _problem(finding: Finding) -> str:
    return f"{finding.cause}: {finding.symptom}; {finding.cure}"


def _against_target(
    config: DraftConfig, draft: DraftOnDisk | Finding, options: InspectOptions
) -> tuple[list[str], list[str]]:
    """Problems and notes about a draft with its target. Problems say why it does not fit; either list may be empty."""
    from fledge.engines.layers import PLACES
    from fledge.eval.draft_files import DraftOnDisk, layer_findings
    from fledge.targets.compatibility import mismatch
    from fledge.targets.loading import load_target

    target = load_target(
        options.target, max_length=config.target_max_length, trust_remote_code=options.trust_remote_code
    )
    wrong, notes = mismatch(config, target), []
    problems = [f"does not fit {options.target}: {wrong}"] if wrong else []
    if not wrong and config.family.reads_layers and isinstance(draft, DraftOnDisk):
        findings, notes = layer_findings(draft, target, None, ("vllm",) if draft.speculators else tuple(PLACES))
        problems += map(_problem, findings)
    if target.rollback_problem:
        notes.append(
            f"fledge cannot decode {options.target} with a draft: {target.rollback_problem}. Serve the draft with an "
            "engine that can restore such states."
        )
    return problems, notes


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
    from fledge.engines.export import needs_export
    from fledge.engines.support import ENGINES, TITLES, minimum_version, unsupported

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
