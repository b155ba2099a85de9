"""`fledge export`: writes a draft's files as another engine loads them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from fledge.jobs.options import Options, opt


@dataclass(frozen=True, kw_only=True)
class ExportOptions(Options):
    """Write a draft's files for vllm, sglang, safeailab (SafeAILab's EAGLE code) or speculators (vllm serve DRAFT)."""

    draft: str = opt("the draft: a directory or hub id (owner/name or owner/name@revision)")
    to: str = opt("vllm, sglang, safeailab or speculators")
    out: str | None = opt("directory for the files (default: only say which files would be written)", None)
    target: str | None = opt("hub id of the target, which vllm serve DRAFT loads (default: as the draft records)", None)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.to != "speculators":
            self.refuse(("target",), f"with --to {self.to}, whose files do not name the target;")


def run(options: ExportOptions, say: Callable[[str], None]) -> None:
    """Writes the files, or says what they would be. Raises ValueError if the engine cannot serve the draft."""
    from fledge.engines.export import TargetName, export
    from fledge.engines.support import ENGINES, TITLES, minimum_version
    from fledge.files import replace_directory
    from fledge.hub import architectures
    from fledge.models.weights import open_draft, read_files, write_files

    if options.to not in ENGINES:
        raise ValueError(f"--to {options.to!r:.60} is none of {', '.join(ENGINES)}")
    out = _free_directory(options.out) if options.out is not None else None
    draft = open_draft(options.draft)
    name = options.target or draft.config.provenance.target
    names_target = options.to == "speculators" and bool(name)
    exported = export(draft, options.to, TargetName(name, architectures(name)) if names_target else None)
    if not exported.differences:
        what = "are in" if options.to == "speculators" else "are loaded as they are by"
        say(f"The files of {options.draft} {what} {TITLES[options.to]}.")
    else:
        say(f"{TITLES[options.to]} needs other files than {options.draft} has: {'; '.join(exported.differences)}.")
    if version := minimum_version(draft.config, options.to):
        say(f"Such a draft needs {'vLLM' if options.to == 'speculators' else TITLES[options.to]} {version} or later.")
    if names_target and Path(name).exists():
        say(
            f"Note: these files name the target {name}, and vllm serve DRAFT of vLLM 0.33 takes only a hub id there. "
            "Give one with --target, or use vllm serve TARGET --speculative-config .."
        )
    if out is not None:
        with replace_directory(out) as new:
            write_files(exported.encode() if exported.differences else read_files(options.draft), new)
        say(f"Wrote {out}.")
    elif exported.differences:
        say("Nothing was written; --out DIR writes these files.")


def _free_directory(path: str) -> Path:
    """The path of --out. Raises ValueError unless the directory can be created, or exists and is empty."""
    from fledge.files import check_output_path

    out = check_output_path(path, "--out", directory=True)
    if out.is_dir() and any(out.iterdir()):
        raise ValueError(f"--out {out} holds files; choose another name, or empty it")
    return out
