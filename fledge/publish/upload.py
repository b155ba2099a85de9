"""Uploads a draft to the Hugging Face hub."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from fnmatch import fnmatch
from pathlib import Path

from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi, get_token
from huggingface_hub.errors import HfHubHTTPError, OfflineModeIsEnabled

from fledge import __version__
from fledge.check.draft_files import Finding, read_files, vocabulary_findings
from fledge.check.probe import RECORD, TENSORS
from fledge.config import DraftConfig
from fledge.drafts.weights import CONFIG, DraftFiles, open_draft
from fledge.io.fields import parse_json, read_json
from fledge.io.tensors import INDEX, PICKLED, weights_file
from fledge.publish.card import CARD, keep_edits

DRAFT_WEIGHTS = ("*.safetensors", "*.safetensors.index.json", "pytorch_model*.bin")  # by fledge or any other trainer
WEIGHTS = (*DRAFT_WEIGHTS, "*.bin", "*.gguf", "*.pt", "*.pth")
LOGIN = "log in with `hf auth login`, or set the environment variable HF_TOKEN to a token that may write"
AGAIN = "the same command continues the upload"
PERMISSION = "check the owner's name with `hf auth whoami`, and that the token may write there"
# advice for the user, by the status of the hub's answer
CURES = {
    401: LOGIN,
    403: PERMISSION,
    404: PERMISSION,
    412: f"somebody changed the repository meanwhile, and nothing was replaced; {AGAIN}",
}


def files_to_push(directory: Path, *, probe: bool) -> tuple[DraftFiles, list[str]]:
    """The draft, and the names of the draft's files without the card; with `probe`, including the files of the probe.
    Raises ValueError if the files are damaged, or not safetensors."""
    draft, weights = open_draft(directory), weights_file(directory)
    if weights.name == PICKLED:
        raise ValueError(
            f"{weights} is a pickle, which others have to trust; fledge export --draft {directory} --to vllm --out DIR "
            "writes safetensors to push"
        )
    on_disk, stored = read_files(directory)
    if isinstance(stored, Finding) and probe:
        raise ValueError(f"{stored.cause}; --no-probe leaves it out")
    record = None if stored is None or isinstance(stored, Finding) else stored.record
    if found := vocabulary_findings(on_disk, record):
        raise ValueError(f"{directory}: {found[0].cause}; {found[0].cure}")
    names = [CONFIG, weights.name]
    if weights.name == INDEX:
        names += sorted(set(read_json(weights)["weight_map"].values()))
    return draft, names + [name for name in (TENSORS, RECORD) if probe and (directory / name).is_file()]


def upload(
    name: str, files: dict[str, Path], card: str, say: Callable[[str], None], *, private: bool, revision: str | None,
    message: str | None, replace_card: bool,
) -> str:  # fmt: skip
    """Uploads the files and the card to the repository `name` in one commit, and removes the files of an earlier draft.
    Returns the address of the repository or branch. Creates a missing repository or branch.

    Raises ValueError for a repository of a model that is no draft, and without a login (see also `explained`).
    """
    api = HfApi(library_name="fledge", library_version=__version__)
    if get_token() is None:
        raise ValueError(f"there is no login for the hub; {LOGIN}")
    if not api.repo_exists(name):
        api.create_repo(name, private=private or None)
    elif private and not api.model_info(name).private:
        raise ValueError(f"{name} exists and is public; make it private in its settings, or leave --private out")
    if revision:
        api.create_branch(name, branch=revision, exist_ok=True)
    info = api.model_info(name, revision=revision)
    before = [file.rfilename for file in info.siblings or ()]

    def read(path: str) -> bytes:
        return Path(api.hf_hub_download(name, path, revision=info.sha)).read_bytes()

    _check_kind(name, before, read)
    kept = card if replace_card or CARD not in before else keep_edits(read(CARD).decode(), card)
    if kept != card:
        say(f"text of {CARD} in {name} that fledge did not generate is kept; --replace-card replaces it")
    contents = {path: str(file) for path, file in files.items()} | {CARD: kept.encode()}
    weights = {path for path in before if "/" not in path and _matches(path, DRAFT_WEIGHTS)}
    stale = sorted((weights | {RECORD, TENSORS}.intersection(before)) - contents.keys())
    if stale:
        say(f"removing {', '.join(stale)} of the draft that was there before")
    say(f"uploading {size_text(sum(file.stat().st_size for file in files.values()) + len(kept.encode()))} to {name}")
    api.create_commit(  # `upload_folder` may make several commits, and readers could then see files of two drafts
        name,
        [*(CommitOperationAdd(*each) for each in contents.items()), *map(CommitOperationDelete, stale)],
        commit_message=message or f"Draft model, by fledge {__version__}",
        revision=revision,
        parent_commit=info.sha,  # the upload fails rather than overwrite a commit made meanwhile
    )
    return f"{api.endpoint}/{name}" + (f"/tree/{revision}" if revision else "")


def _check_kind(name: str, paths: list[str], read: Callable[[str], bytes]) -> None:
    """Raises ValueError if a repository holds a model that is no draft, since the upload would remove weights."""
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
def explained(repository: str) -> Iterator[None]:
    """Context manager: replaces the errors of huggingface_hub by errors with the cause and advice."""
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
        of_upload = isinstance(e, RuntimeError) and "upload" in str(e).lower()  # a large file failed
        if type(e).__module__.partition(".")[0] not in ("httpx", "httpx2", "httpcore") and not of_upload:
            raise
        raise ConnectionError(f"the hub cannot be reached ({_first_line(e)}); {AGAIN}") from e


def _first_line(error: Exception) -> str:
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)


def size_text(n: int) -> str:
    return f"{n / 1e6:,.1f} MB" if n >= 1e5 else f"{n:,} bytes"
