"""`fledge push`: uploads a draft to the Hugging Face hub."""

from __future__ import annotations

import contextlib
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fledge.jobs.options import Options, opt
from fledge.json_text import parse_json, read_json

if TYPE_CHECKING:
    from huggingface_hub import HfApi

REPOSITORY = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*")
DRAFT_WEIGHTS = ("*.safetensors", "*.safetensors.index.json", "pytorch_model*.bin")  # of fledge and other trainers
WEIGHTS = (*DRAFT_WEIGHTS, "*.bin", "*.gguf", "*.pt", "*.pth")
LOGIN = "log in with `hf auth login`, or set the environment variable HF_TOKEN to a token that may write"


@dataclass(frozen=True, kw_only=True)
class PushOptions(Options):
    """Upload a draft to the Hugging Face hub: its config, weights, model card and probe.

    The login is that of `hf auth login`, or the token in HF_TOKEN.
    """

    repository: str = opt("repository of the draft: owner/name; it is created if there is none", flag="argument")
    draft: str = opt("directory of the draft, such as run/draft")
    private: bool = opt("create a private repository", False)
    revision: str | None = opt("branch to upload to; it is created if there is none (default: main)", None)
    message: str | None = opt("message of the commit (default: names fledge and its version)", None)
    no_probe: bool = opt(
        "leave out the draft's folder fledge/, with which `fledge check` finds damage; it holds the beginnings of up "
        "to nine training documents as token ids", False
    )  # fmt: skip
    replace_card: bool = opt("also replace a model card that was edited in the repository", False)
    dry_run: bool = opt("upload nothing: print the files and the model card", False)


@dataclass(frozen=True)
class Upload:
    """A file to upload: its path in the repository and its content, the path of a file or bytes."""

    path: str
    content: Path | bytes

    @property
    def size(self) -> int:
        return len(self.content) if isinstance(self.content, bytes) else self.content.stat().st_size


def run(options: PushOptions, show: Callable[[str], None], say: Callable[[str], None]) -> None:
    """Uploads the draft in one commit, and prints its address. Raises ValueError for a damaged draft, for a repository
    that holds something else, and without a login or a permission, and ConnectionError if the hub is not reached."""
    from fledge.eval.probe import FOLDER

    if not REPOSITORY.fullmatch(options.repository):
        raise ValueError(f"{options.repository!r:.100} is not the id of a model repository; write owner/name")
    uploads = files_of(options)
    if any(upload.path.startswith(FOLDER) for upload in uploads):
        say(
            f"note: {FOLDER}/ holds the beginnings of up to nine training documents, as token ids; --no-probe leaves "
            "it out"
        )
    if names := _private_paths(uploads):
        verb = "names" if len(names) == 1 else "name"
        say(f"note: {' and '.join(names)} {verb} the target by its path on this machine, not by a hub id")
    if options.dry_run:
        for upload in uploads:
            show(f"{upload.path}: {_size(upload.size)}")
        show("")
        for line in _card_in(uploads).decode().splitlines():
            show(line)
        return
    with _explained(options.repository), _bars_on_terminals():
        show(_push(options, uploads, say))


@contextlib.contextmanager
def _bars_on_terminals() -> Iterator[None]:
    """Context manager: the hub library shows its bars on a terminal only. It would also write them to a file."""
    from huggingface_hub.utils import are_progress_bars_disabled, disable_progress_bars, enable_progress_bars

    if sys.stderr.isatty() or are_progress_bars_disabled():
        yield
        return
    disable_progress_bars()
    try:
        yield
    finally:
        enable_progress_bars()


def files_of(options: PushOptions) -> list[Upload]:
    """The files of the draft, which are checked first. Raises ValueError if they are damaged, or not safetensors."""
    from fledge.eval.draft_files import read_files as read_draft_and_probe
    from fledge.eval.draft_files import vocabulary_findings
    from fledge.eval.findings import Finding
    from fledge.eval.probe import RECORD, TENSORS
    from fledge.formats.tensors import INDEX, PICKLED, weights_file
    from fledge.jobs.card import local_draft, new_card, read_card
    from fledge.jobs.model_card import CARD, for_repository
    from fledge.models.weights import CONFIG, open_draft

    directory = local_draft(options.draft)
    open_draft(directory)
    weights = weights_file(directory)
    if weights.name == PICKLED:
        raise ValueError(
            f"{weights} is a pickle, which others have to trust; fledge export --draft {directory} --to vllm --out DIR "
            "writes safetensors to push"
        )
    draft, probe = read_draft_and_probe(directory)
    if isinstance(probe, Finding) and not options.no_probe:
        raise ValueError(f"{probe.cause}; --no-probe leaves it out")
    record = None if probe is None or isinstance(probe, Finding) else probe.record
    if found := vocabulary_findings(draft, record):
        raise ValueError(f"{directory}: {found[0].cause}; {found[0].cure}")
    names = [CONFIG, weights.name]
    if weights.name == INDEX:
        names += sorted(set(read_json(weights)["weight_map"].values()))
    names += [name for name in (TENSORS, RECORD) if not options.no_probe and (directory / name).is_file()]
    card = read_card(directory / CARD) if (directory / CARD).is_file() else new_card(directory)
    text = for_repository(card, options.repository)
    return [*(Upload(name, directory / name) for name in names), Upload(CARD, text.encode())]


def _card_in(uploads: Sequence[Upload]) -> bytes:
    return next(upload.content for upload in uploads if isinstance(upload.content, bytes))


def _private_paths(uploads: Sequence[Upload]) -> list[str]:
    """The JSON files in which the target is named, and not by a hub id."""
    files = [upload for upload in uploads if upload.path.endswith(".json")]
    return [file.path for file in files if _names_a_path(read_json(file.content))]


def _names_a_path(content: Any) -> bool:
    """Whether a field for the target, in a config of fledge or speculators, is something else than a hub id."""
    from fledge.hub import hub_id

    if not isinstance(content, dict):
        return False
    names = (content.get(key) for key in ("target", "name_or_path"))
    return any(isinstance(name, str) and name and not hub_id(name) for name in names) or any(
        map(_names_a_path, content.values())
    )


# -- the hub ----------------------------------------------------------------------------------------------------------


def _push(options: PushOptions, uploads: list[Upload], say: Callable[[str], None]) -> str:
    """Uploads the files; the address of the result."""
    from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi

    from fledge import __version__
    from fledge.jobs.model_card import CARD

    api = HfApi(library_name="fledge", library_version=__version__)
    before = _prepared_repository(api, options)
    if CARD in before.paths and not options.replace_card and not _may_replace_card(before, _card_in(uploads)):
        say(f"{CARD} of {options.repository} was edited there and is kept; --replace-card replaces it")
        uploads = [upload for upload in uploads if upload.path != CARD]
    additions = [CommitOperationAdd(upload.path, _as_hub_content(upload.content)) for upload in uploads]
    stale = sorted(set(filter(_is_of_a_draft, before.paths)) - {upload.path for upload in uploads})
    if stale:
        say(f"removing {', '.join(stale)} of the draft that was there before")
    say(f"uploading {_size(sum(upload.size for upload in uploads))} to {options.repository}")
    api.create_commit(
        options.repository,
        [*additions, *(CommitOperationDelete(path) for path in stale)],
        commit_message=options.message or f"Draft model, by fledge {__version__}",
        revision=options.revision,
        parent_commit=before.commit,  # a commit that others have made meanwhile is not overwritten
    )
    branch = f"/tree/{options.revision}" if options.revision else ""
    return f"{api.endpoint}/{options.repository}{branch}"


def _as_hub_content(content: Path | bytes) -> str | bytes:
    return content if isinstance(content, bytes) else str(content)


@dataclass(frozen=True)
class Before:
    """The newest commit of the branch before the upload, and the paths of its files."""

    api: HfApi
    repository: str
    commit: str | None
    paths: list[str]

    def read(self, path: str) -> bytes:
        return Path(self.api.hf_hub_download(self.repository, path, revision=self.commit)).read_bytes()


def _prepared_repository(api: HfApi, options: PushOptions) -> Before:
    """Creates the repository and the branch if they are not there. Returns what the branch has. Raises ValueError if
    that is not a draft."""
    from huggingface_hub import get_token
    from huggingface_hub.errors import RepositoryNotFoundError

    if get_token() is None:
        raise ValueError(f"there is no login for the hub; {LOGIN}")
    name = options.repository
    try:
        public = not api.model_info(name).private
    except RepositoryNotFoundError:  # or one that this login may not see; creating it tells
        api.create_repo(name, private=options.private or None)
    else:
        if public and options.private:
            raise ValueError(f"{name} exists and is public; make it private in its settings, or leave --private out")
    if options.revision:
        api.create_branch(name, branch=options.revision, exist_ok=True)
    info = api.model_info(name, revision=options.revision)
    before = Before(api, name, info.sha, [file.rfilename for file in info.siblings or ()])
    _check_kind(before)
    return before


def _check_kind(before: Before) -> None:
    """Raises ValueError if a repository holds a model that is not a draft, since its files would be removed."""
    from fledge.config import DraftConfig
    from fledge.models.weights import CONFIG

    other = f"{before.repository} holds something else than a draft"
    if CONFIG in before.paths:
        try:
            DraftConfig.from_hf(parse_json(before.read(CONFIG)))
        except ValueError as e:
            raise ValueError(f"{other} ({e}); choose another repository") from e
    elif found := [path for path in before.paths if any(fnmatch(path, pattern) for pattern in WEIGHTS)]:
        raise ValueError(f"{other} ({found[0]} without {CONFIG}); choose another repository")


def _may_replace_card(before: Before, card: bytes) -> bool:
    """Whether the card in the repository is as fledge wrote it, or the same as the new one."""
    from fledge.jobs.model_card import CARD, is_unedited

    there = before.read(CARD)
    return there == card or is_unedited(there.decode(errors="replace"))


def _is_of_a_draft(path: str) -> bool:
    """Whether a path in a repository is one of the files that a draft has beside its config and card."""
    from fledge.eval.probe import RECORD, TENSORS

    return path in (RECORD, TENSORS) or ("/" not in path and any(fnmatch(path, pattern) for pattern in DRAFT_WEIGHTS))


@contextlib.contextmanager
def _explained(repository: str) -> Iterator[None]:
    """Context manager: replaces the errors of huggingface_hub by the cause and what to do."""
    from huggingface_hub.errors import HfHubHTTPError, LocalTokenNotFoundError, OfflineModeIsEnabled

    again = "the same command continues the upload"
    try:
        yield
    except OfflineModeIsEnabled as e:
        raise ConnectionError("HF_HUB_OFFLINE is set, so nothing can be uploaded; unset it") from e
    except LocalTokenNotFoundError as e:
        raise ValueError(f"there is no login for the hub; {LOGIN}") from e
    except HfHubHTTPError as e:
        raise _refusal(e, repository, again) from e
    except Exception as e:
        if type(e).__module__.partition(".")[0] not in ("httpx", "httpx2", "httpcore") and not _of_upload(e):
            raise
        raise ConnectionError(f"the hub cannot be reached ({_first_line(e)}); {again}") from e


def _refusal(error: Any, repository: str, again: str) -> Exception:
    """The error to raise for an answer of the hub."""
    status = error.response.status_code if error.response is not None else 0
    said = error.server_message or _first_line(error)
    if status == 401:
        return ValueError(f"the hub does not accept the login ({said}); {LOGIN}")
    if status in (403, 404):
        return ValueError(
            f"the login has no permission to write to {repository} ({said}); check the owner's name with `hf auth "
            "whoami`, and that the token may write"
        )
    if status == 412:
        return ValueError(f"{repository} was changed during the upload, so nothing was replaced; {again}")
    if status >= 500 or not status:
        return ConnectionError(f"the hub failed ({said}); {again}")
    return ValueError(f"the hub refuses the upload to {repository} ({said})")


def _of_upload(error: Exception) -> bool:
    """Whether huggingface_hub raised this while it sent a large file."""
    return isinstance(error, RuntimeError) and "upload" in str(error).lower()


def _first_line(error: Exception) -> str:
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)


def _size(n: int) -> str:
    return f"{n / 1e6:,.1f} MB" if n >= 1e5 else f"{n:,} bytes"
