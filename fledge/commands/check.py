"""`fledge check`: checks whether a draft and its target have changed since training."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from fledge.io.display import ProgressDisplay, print_error
from fledge.io.results import ResultPrinter
from fledge.options import Options, dtype_option, opt, trust_remote_code_option

if TYPE_CHECKING:
    from fledge.check.draft_files import Report

TOO_LARGE = 3  # exit code if the target does not fit in memory


@dataclass(frozen=True, kw_only=True)
class CheckOptions(Options):
    """Check that a draft and its target compute what they computed in training, and name what is wrong if not."""

    target: str = opt("target model: a directory or hub id (owner/name or owner/name@revision)")
    trust_remote_code: bool = trust_remote_code_option()
    draft: str = opt("draft model: a directory or hub id")
    engine: str | None = opt(
        "also check what this engine would refuse or ignore: vllm or sglang", None, choices=("vllm", "sglang")
    )
    device: str = opt("device: auto, cpu, cuda, cuda:1, ...", "auto")
    dtype: str | None = dtype_option()
    files_only: bool = opt(
        "check only what needs none of the target's weights, for a target that does not fit here: files, vocabulary, "
        "config, tokenizer, template, and the draft's logits", False
    )  # fmt: skip
    json: bool = opt("print the result as JSON", False)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.files_only:
            self.refuse(("device", "dtype"), "with --files-only, which runs no target;")


def run(options: CheckOptions, progress: ProgressDisplay, printer: ResultPrinter) -> int:
    """Runs all possible checks and prints the results. Returns the command's exit code. Raises ValueError if the draft
    or the target does not exist."""
    from fledge.check.pair import TargetTooLarge, check_pair

    try:
        report = check_pair(
            options.draft, options.target, options.engine, files_only=options.files_only, device=options.device,
            dtype=options.dtype, trust_remote_code=options.trust_remote_code, progress=progress,
        )  # fmt: skip
    except TargetTooLarge as e:
        print_error(e)
        return TOO_LARGE
    if options.json:
        print(json.dumps(as_json(report), indent=2), flush=True)
    else:
        print_report(report, printer)
    return int(bool(report.findings))


def as_json(report: Report) -> dict[str, Any]:
    """The report as JSON-ready data, with None in place of infinity, which JSON lacks."""
    return {
        "sound": not report.findings,
        "replayed": "logits_error" in report.measured,
        "files_only": report.files_only,
        "findings": [asdict(f) for f in report.findings],
        "passed": [dict(zip(("check", "shown"), pair, strict=True)) for pair in report.passed],
        "notes": report.notes,
        "measured": {k: None if v == float("inf") else v for k, v in report.measured.items()},
    }


def print_report(report: Report, printer: ResultPrinter) -> None:
    """Prints a line for each check, note and finding."""
    for check, shown in report.passed:
        printer.print(f"{check}: {shown}.")
    for note in report.notes:
        printer.print(f"Note: {note}")
    for finding in report.findings:
        printer.print(f"Wrong, {finding.check}: {finding}")
    count = len(report.findings)
    if count:
        printer.print(f"{count} problem{'s' if count > 1 else ''}.")
    elif report.files_only:
        printer.print("No fault found in the files; what the target computes was not compared.")
    elif "logits_error" in report.measured:
        printer.print("The draft is sound.")
    else:
        printer.print("No fault found; without a probe the weights cannot be compared with training's.")
