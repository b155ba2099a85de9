"""`fledge inspect`: describes a draft and checks its files."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from fledge.options import Options, opt, trust_remote_code_option

if TYPE_CHECKING:
    from fledge.check.draft_files import DraftOnDisk, Finding
    from fledge.config import DraftConfig


@dataclass(frozen=True, kw_only=True)
class InspectOptions(Options):
    """Describe a draft: its target, inputs, vocabulary, engines that can serve it, and any problems with its files."""

    directory: str = opt("the draft: a directory or hub id (owner/name or owner/name@revision)", flag="argument")
    target: str | None = opt("also check that the draft fits this target", None)
    trust_remote_code: bool = trust_remote_code_option()


def run(options: InspectOptions, say: Callable[[str], None]) -> bool:
    """Prints a description and any problems. Returns whether there are none. Raises ValueError if there is no draft."""
    from fledge.check.draft_files import DraftOnDisk, norm_output_note, read_files, vocabulary_findings
    from fledge.drafts.weights import check_draft, open_draft, read_draft_config
    from fledge.engines.export import describe_files
    from fledge.engines.support import trainer_notes
    from fledge.io.tensors import stray_symptom
    from fledge.publish.card import describe

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
    from fledge.check.draft_files import DraftOnDisk, layer_findings
    from fledge.engines.support import PLACES
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
