"""`fledge push`: uploads a draft to the Hugging Face hub."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from fledge.io.display import format_bytes
from fledge.io.fields import read_json
from fledge.options import Options, opt

REPOSITORY = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*")


@dataclass(frozen=True, kw_only=True)
class PushOptions(Options):
    """Upload a draft to the Hugging Face hub: its config, weights, model card and probe.

    The login is that of `hf auth login`, or the token in HF_TOKEN.
    """

    repository: str = opt("repository of the draft: owner/name; it is created if there is none", flag="argument")
    draft: str = opt("directory of the draft, such as run/draft")
    eval: list[str] = opt(
        "file that `fledge eval --out` wrote; its measurements replace those in the draft's model card (README.md); "
        "repeatable", repeatable=True
    )  # fmt: skip
    private: bool = opt("create a private repository", False)
    revision: str | None = opt("branch to upload to; it is created if there is none (default: main)", None)
    message: str | None = opt("message of the commit (default: names fledge and its version)", None)
    no_probe: bool = opt(
        "leave out the draft's folder fledge/, with which `fledge check` finds damage; it holds the beginnings of up "
        "to nine training documents as token ids", False
    )  # fmt: skip
    replace_card: bool = opt("replace all of the model card in the repository, also text that was added there", False)
    dry_run: bool = opt("upload nothing: print the files and the model card", False)


def run(options: PushOptions, show: Callable[[str], None], say: Callable[[str], None]) -> None:
    """Uploads the draft in one commit, and prints the upload's address. Raises ValueError for a damaged draft, for a
    repository of a model that is no draft, and without login or permission; ConnectionError if the hub fails."""
    from huggingface_hub.utils import disable_progress_bars

    from fledge.check.probe import FOLDER, RECORD
    from fledge.drafts.weights import CONFIG
    from fledge.io.formats import config_from_hf
    from fledge.io.hub import hub_id
    from fledge.publish.card import CARD
    from fledge.publish.upload import card_to_push, explained, files_to_push, upload

    if not REPOSITORY.fullmatch(options.repository):
        raise ValueError(f"{options.repository!r:.100} is not the id of a model repository; write owner/name")
    directory = Path(options.draft)
    if hub_id(options.draft) and not directory.parent.is_dir():
        raise ValueError(f"{directory} is not a directory here; give the directory of the draft, such as run/draft")
    draft, names = files_to_push(directory, probe=not options.no_probe)
    card = card_to_push(draft, directory / CARD, options.eval, options.repository, save=not options.dry_run)
    if any(name.startswith(FOLDER) for name in names):
        say(f"note: {FOLDER}/ holds the beginnings of up to nine training documents; --no-probe leaves them out")
    for name in (name for name in names if name in (CONFIG, RECORD)):
        hf = read_json(directory / name)
        target = config_from_hf(hf.get("config", hf)).provenance.target  # the record has a copy of config.json
        if target and not hub_id(target):
            say(f"note: {name} names the target by its path on this machine, not by a hub id")
    if options.dry_run:
        for name in names:
            show(f"{name}: {format_bytes((directory / name).stat().st_size)}")
        for line in (f"{CARD}: {format_bytes(len(card.encode()))}", "", *card.splitlines()):
            show(line)
        return
    if not sys.stderr.isatty():  # the hub library would write progress bars to a file
        disable_progress_bars()
    files = {name: directory / name for name in names}
    with explained(options.repository):
        address = upload(
            options.repository, files, card, say, private=options.private, revision=options.revision,
            message=options.message, replace_card=options.replace_card,
        )  # fmt: skip
        show(address)
