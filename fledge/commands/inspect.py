"""`fledge inspect`: describes a draft and checks its files."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from fledge.options import Options, opt


@dataclass(frozen=True, kw_only=True)
class InspectOptions(Options):
    """Describe a draft: its target, inputs, vocabulary, engines that can serve it, and any problems with its files."""

    directory: str = opt("the draft: a directory or hub id (owner/name or owner/name@revision)", flag="argument")


def run(options: InspectOptions, say: Callable[[str], None]) -> bool:
    """Prints a description and any problems. Returns whether there are none. Raises ValueError if there is no draft."""
    from fledge.check.draft_files import DraftOnDisk, norm_output_note, read_files, vocabulary_findings
    from fledge.drafts.weights import check_draft, open_draft, read_draft_config
    from fledge.engines.export import describe_files
    from fledge.engines.support import trainer_notes
    from fledge.io.tensors import stray_symptom
    from fledge.publish.card import describe

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
        found = [] if problems else vocabulary_findings(draft, None)
        problems += [f"{finding.cause}: {finding.symptom}; {finding.cure}" for finding in found]
    if config is not None:
        for line in [*describe(config), *(describe_files(files) if files else ())]:
            say(line)
    for note in [*(trainer_notes(config) if config is not None else ()), *notes]:
        say(f"Note: {note}")
    for problem in problems:
        say(f"Wrong: {problem}")
    say("Nothing is wrong with it." if not problems else f"{len(problems)} problem(s).")
    return not problems
