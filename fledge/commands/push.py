"""`fledge push`: uploads a draft to the Hugging Face hub."""

from __future__ import annotations

import contextlib
import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import TYPE_CHECKING

from fledge.io.fields import parse_json, read_json
from fledge.options import Options, opt

if TYPE_CHECKING:
    from fledge.drafts.weights import DraftFiles

REPOSITORY = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*")
DRAFT_WEIGHTS = ("*.safetensors", "*.safetensors.index.json", "pytorch_model*.bin")  # of fledge and other trainers
WEIGHTS = (*DRAFT_WEIGHTS, "*.bin", "*.gguf", "*.pt", "*.pth")
LOGIN = "log in with `hf auth login`, or set the environment variable HF_TOKEN to a token that may write"
AGAIN = "the same command continues the upload"
PERMISSION = "check the owner's name with `hf auth whoami`, and that the token may write there"
# what to do, by the status of the hub's answer
CURES = {
    401: LOGIN,
    403: PERMISSION,
    404: PERMISSION,
    412: f"somebody changed the repository meanwhile, and nothing was replaced; {AGAIN}",
}


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
    """Uploads the draft in one commit, and prints its address. Raises ValueError for a damaged draft, for a repository
    that holds something else, and without a login or a permission, and ConnectionError if the hub is not reached."""
    from huggingface_hub.utils import disable_progress_bars

    from fledge.check.probe import FOLDER, RECORD
    from fledge.config import DraftConfig
    from fledge.drafts.weights import CONFIG
    from fledge.io.hub import hub_id
    from fledge.publish.card import CARD, card_to_push

    if not REPOSITORY.fullmatch(options.repository):
        raise ValueError(f"{options.repository!r:.100} is not the id of a model repository; write owner/name")
    directory = Path(options.draft)
    if hub_id(options.draft) and not directory.parent.is_dir():
        raise ValueError(f"{directory} is not a directory here; give the directory of the draft, such as run/draft")
    draft, names = _checked_files(directory, options)
    card = card_to_push(draft, directory / CARD, options.eval, options.repository, save=not options.dry_run)
    if any(name.startswith(FOLDER) for name in names):
        say(f"note: {FOLDER}/ holds the beginnings of up to nine training documents; --no-probe leaves them out")
    for name in (name for name in names if name in (CONFIG, RECORD)):
        hf = read_json(directory / name)
        target = DraftConfig.from_hf(hf.get("config", hf)).provenance.target  # the record has a copy of config.json
        if target and not hub_id(target):
            say(f"note: {name} names the target by its path on this machine, not by a hub id")
    if options.dry_run:
        for name in names:
            show(f"{name}: {_size((directory / name).stat().st_size)}")
        for line in (f"{CARD}: {_size(len(card.encode()))}", "", *card.splitlines()):
            show(line)
        return
    if not sys.stderr.isatty():  # the hub library would write its bars to a file
        disable_progress_bars()
    with _explained(options.repository):
        show(_push(options, {name: directory / name for name in names}, card, say))


def _checked_files(directory: Path, options: PushOptions) -> tuple[DraftFiles, list[str]]:
    """The draft, and the names of its files without the card. Raises ValueError if the files are damaged, or not
    safetensors."""
    from fledge.check.draft_files import Finding, read_files, vocabulary_findings
    from fledge.check.probe import RECORD, TENSORS
    from fledge.drafts.weights import CONFIG, open_draft
    from fledge.io.tensors import INDEX, PICKLED, weights_file

    draft, weights = open_draft(directory), weights_file(directory)
    if weights.name == PICKLED:
        raise ValueError(
            f"{weights} is a pickle, which others have to trust; fledge export --draft {directory} --to vllm --out DIR "
            "writes safetensors to push"
        )
    on_disk, probe = read_files(directory)
    if isinstance(probe, Finding) and not options.no_probe:
        raise ValueError(f"{probe.cause}; --no-probe leaves it out")
    record = None if probe is None or isinstance(probe, Finding) else probe.record
    if found := vocabulary_findings(on_disk, record):
        raise ValueError(f"{directory}: {found[0].cause}; {found[0].cure}")
    names = [CONFIG, weights.name]
    if weights.name == INDEX:
        names += sorted(set(read_json(weights)["weight_map"].values()))
    return draft, names + [name for name in (TENSORS, RECORD) if not options.no_probe and (directory / name).is_file()]


def _push(options: PushOptions, files: dict[str, Path], card: str, say: Callable[[str], None]) -> str:
    """Uploads the files and the card in one commit, and removes those of an earlier draft; the address of the result.
    Creates the repository and the branch if they are not there. Raises ValueError for a repository of another kind."""
    from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi, get_token

    from fledge import __version__
    from fledge.check.probe import RECORD, TENSORS
    from fledge.publish.card import CARD, keep_edits

    api, name = HfApi(library_name="fledge", library_version=__version__), options.repository
    if get_token() is None:
        raise ValueError(f"there is no login for the hub; {LOGIN}")
    if not api.repo_exists(name):
        api.create_repo(name, private=options.private or None)
    elif options.private and not api.model_info(name).private:
        raise ValueError(f"{name} exists and is public; make it private in its settings, or leave --private out")
    if options.revision:
        api.create_branch(name, branch=options.revision, exist_ok=True)
    info = api.model_info(name, revision=options.revision)
    before = [file.rfilename for file in info.siblings or ()]

    def read(path: str) -> bytes:
        return Path(api.hf_hub_download(name, path, revision=info.sha)).read_bytes()

    _check_kind(name, before, read)
    kept = card if options.replace_card or CARD not in before else keep_edits(read(CARD).decode(), card)
    if kept != card:
        say(f"text of {CARD} in {name} that fledge did not generate is kept; --replace-card replaces it")
    contents = {path: str(file) for path, file in files.items()} | {CARD: kept.encode()}
    weights = {path for path in before if "/" not in path and _matches(path, DRAFT_WEIGHTS)}
    stale = sorted((weights | {RECORD, TENSORS}.intersection(before)) - contents.keys())
    if stale:
        say(f"removing {', '.join(stale)} of the draft that was there before")
    say(f"uploading {_size(sum(file.stat().st_size for file in files.values()) + len(kept.encode()))} to {name}")
    api.create_commit(  # `upload_folder` may make several, and others then see files of two drafts
        name,
        [*(CommitOperationAdd(*each) for each in contents.items()), *map(CommitOperationDelete, stale)],
        commit_message=options.message or f"Draft model, by fledge {__version__}",
        revision=options.revision,
        parent_commit=info.sha,  # a commit that others have made meanwhile is not overwritten
    )
    return f"{api.endpoint}/{name}" + (f"/tree/{options.revision}" if options.revision else "")


def _check_kind(name: str, paths: list[str], read: Callable[[str], bytes]) -> None:
    """Raises ValueError if a repository holds a model that is not a draft, since its files would be removed."""
    from fledge.config import DraftConfig
    from fledge.drafts.weights import CONFIG

    reason = next((f"{path} without {CONFIG}" for path in paths if _matches(path, WEIGHTS)), "")
    if CONFIG in paths:
        try:
            DraftConfig.from_hf(parse_json(read(CONFIG)))
            return
        except ValueError as e:
            reason = str(e)
    if reason:
        raise ValueError(f"{name} holds something else than a draft ({reason}); choose another repository")


def _matches(path: str, patterns: tuple[str, ...]) -> bool:
    return any(fnmatch(path, pattern) for pattern in patterns)


@contextlib.contextmanager
def _explained(repository: str) -> Iterator[None]:
    """Context manager: replaces the errors of huggingface_hub by the cause and what to do."""
    from huggingface_hub.errors import HfHubHTTPError, OfflineModeIsEnabled

    try:
        yield
    except OfflineModeIsEnabled as e:
        raise ConnectionError("HF_HUB_OFFLINE is set, so nothing can be uploaded; unset it") from e
    except HfHubHTTPError as e:
        status = 0 if e.response is None else e.response.status_code
        said = e.server_message or _first_line(e)
        if status >= 500 or not status:
            raise ConnectionError(f"the hub failed ({said}); {AGAIN}") from e
        cure = CURES.get(status)
        raise ValueError(f"the hub refuses the upload to {repository} ({said})" + (f"; {cure}" if cure else "")) from e
    except Exception as e:
        of_upload = isinstance(e, RuntimeError) and "upload" in str(e).lower()  # of a large file
        if type(e).__module__.partition(".")[0] not in ("httpx", "httpx2", "httpcore") and not of_upload:
            raise
        raise ConnectionError(f"the hub cannot be reached ({_first_line(e)}); {AGAIN}") from e


def _first_line(error: Exception) -> str:
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)


def _size(n: int) -> str:
    return f"{n / 1e6:,.1f} MB" if n >= 1e5 else f"{n:,} bytes"
