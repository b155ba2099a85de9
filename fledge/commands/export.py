"""`fledge export`: writes a draft's files in the format of another engine."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from fledge.options import Options, opt

if TYPE_CHECKING:
    from fledge.drafts.weights import DraftFiles


@dataclass(frozen=True, kw_only=True)
class ExportOptions(Options):
    """Write a draft's files for vllm, sglang, safeailab (SafeAILab's EAGLE code) or speculators (vllm serve DRAFT)."""

    draft: str = opt("the draft: a directory or hub id (owner/name or owner/name@revision)")
    to: str = opt("vllm, sglang, safeailab or speculators", choices=("vllm", "sglang", "safeailab", "speculators"))
    out: str | None = opt("directory for the files (default: only say which files would be written)", None)
    target: str | None = opt(
        "the target: its name in speculators' files (default: as recorded); for engines, copies of its embeddings are "
        "left out",
        None,
    )


def run(options: ExportOptions, say: Callable[[str], None]) -> None:
    """Writes the files; without --out, only describes them. Raises ValueError if the engine cannot serve the draft."""
    from fledge.check.draft_files import DraftOnDisk, norm_output_note, vocabulary_findings
    from fledge.check.draft_files import read_files as read_draft_and_probe
    from fledge.check.read_probe import probe_content
    from fledge.drafts.weights import open_draft, read_files, write_files
    from fledge.engines.export import TargetName, export
    from fledge.engines.support import TITLES, minimum_version, remarks, unsupported
    from fledge.io.files import replace_directory
    from fledge.io.hub import architectures, draft_directory
    from fledge.publish.card import CARD

    out = _free_directory(options.out) if options.out is not None else None
    draft = open_draft(options.draft)
    on_disk, _ = read_draft_and_probe(options.draft)
    found = vocabulary_findings(on_disk, None) if isinstance(on_disk, DraftOnDisk) else [on_disk]
    if found:
        raise ValueError(f"{options.draft}: {found[0].cause}; {found[0].cure}")
    if options.target and options.to != "speculators":
        draft = _without_copied_embeddings(draft, options.target)
    if reason := unsupported(draft.config, options.to):  # before asking the hub for the target's class
        raise ValueError(reason)
    name = options.target or draft.config.provenance.target
    names_target = options.to == "speculators" and bool(name)
    classes = architectures(name) if names_target else ()
    exported = export(draft, options.to, TargetName(name, classes) if names_target else None)
    if not exported.differences:
        what = "are in" if options.to == "speculators" else "are loaded as they are by"
        say(f"The files of {options.draft} {what} {TITLES[options.to]}.")
    else:
        files = f"The files {'in' if options.to == 'speculators' else 'for'} {TITLES[options.to]}"
        say(f"{files} differ from those of {options.draft}: {'; '.join(exported.differences)}.")
    if version := minimum_version(draft.config, options.to):
        say(f"Such a draft needs {'vLLM' if options.to == 'speculators' else TITLES[options.to]} {version} or later.")
    for remark in remarks(draft.config, options.to):
        say(f"Note: {remark}.")
    if note := norm_output_note(on_disk):
        say(f"Note: {note}")
    if names_target and not classes:
        say(
            f"Note: the architectures in the config.json of {name} cannot be read, so verifier.architectures in these "
            "files is empty. vLLM does not need it; for other programs, export again where the target can be read, or "
            "fill it in."
        )
    if names_target and Path(name).exists():
        say(
            f"Note: these files name the target {name}, and vllm serve DRAFT of vLLM 0.33 takes only a hub id there. "
            "Give one with --target, or use vllm serve TARGET --speculative-config .."
        )
    if out is not None:
        with replace_directory(out) as new:
            write_files(exported.encode() if exported.differences else read_files(options.draft), new)
            if not (options.target and options.to != "speculators"):  # the embeddings did not change since training
                write_files(probe_content(options.draft), new)
            if (card := draft_directory(options.draft) / CARD).is_file():
                write_files({CARD: card.read_bytes()}, new)
        say(f"Wrote {out}.")
    elif exported.differences:
        say("Nothing was written; --out DIR writes these files.")


def _without_copied_embeddings(draft: DraftFiles, target: str) -> DraftFiles:
    """The draft without its embeddings, which must be a copy of the target's. Raises ValueError if the draft has no
    embeddings of the target's width, or if the embeddings differ from the target's."""
    import torch

    from fledge.targets.distributed import load_head

    if not draft.config.own_embeddings or draft.config.hidden_size != draft.config.target_hidden_size:
        raise ValueError(
            "--target has no effect: the draft has no embeddings that can be a copy of the target's; leave --target out"
        )
    head, own = load_head(target), draft.tensors["embed_tokens.weight"]
    if head is None:
        raise ValueError(
            f"the embedding of {target} cannot be read alone, without its other weights; leave --target out"
        )
    if not torch.equal(head.embedding.to(own.dtype), own):
        raise ValueError(f"the draft's embeddings are not a copy of those of {target}; leave --target out to keep them")
    tensors = {name: x for name, x in draft.tensors.items() if name != "embed_tokens.weight"}
    return replace(draft, config=replace(draft.config, own_embeddings=False), tensors=tensors)


def _free_directory(path: str) -> Path:
    """The path of --out. Raises ValueError unless the directory can be created, or exists and is empty."""
    from fledge.io.files import check_output_path

    out = check_output_path(path, "--out", directory=True)
    if out.is_dir() and any(out.iterdir()):
        raise ValueError(f"--out {out} holds files; choose another name, or empty it")
    return out
