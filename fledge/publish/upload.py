"""Uploads a draft to the Hugging Face hub: the files, and the card with measurements and the commands of engines."""

from __future__ import annotations

import contextlib
import re
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi, get_token
from huggingface_hub.errors import HfHubHTTPError, OfflineModeIsEnabled

from fledge import __version__
from fledge.check.draft_files import Finding, read_files, vocabulary_findings
from fledge.check.probe import RECORD, TENSORS
from fledge.drafts.weights import CONFIG, DraftFiles, open_draft
from fledge.engines.export import Serving, engine_command, needs_export, trained_depth
from fledge.engines.support import SERVERS, TITLES, minimum_version, unsupported
from fledge.io.display import format_bytes
from fledge.io.fields import first_line, parse_json, read_json
from fledge.io.files import replace_text
from fledge.io.fingerprints import draft_sha256
from fledge.io.formats import config_from_hf
from fledge.io.hub import hub_id
from fledge.io.tensors import INDEX, PICKLED, weights_file
from fledge.measure.record import is_record
from fledge.publish.card import CARD, END, MEASURED, START, card_text, code, measured_row, measured_text, plain

GENERATED = re.compile(f"(?s)(?<={re.escape(START)}).*(?={re.escape(END)})")
USE = "## Use"
TARGET = "TARGET"  # stands for a target without a hub id in commands

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


def card_to_push(draft: DraftFiles, file: Path, records: Sequence[str], repository: str, *, save: bool) -> str:
    """The card in `file`, or a new card, with the measurements in records of `fledge eval` and the commands for a
    repository. With `save`, `file` gets the measurements, too. Raises ValueError for an unusable card or record."""
    try:
        card = file.read_text(encoding="utf-8") if file.is_file() else card_text(draft.config)
    except UnicodeDecodeError as e:
        raise ValueError(f"{file} is not UTF-8 text; convert it") from e
    if rows := [row for record in records for row in measured_rows(Path(record), draft)]:
        if not GENERATED.search(card):
            raise ValueError(f"{file} has no lines {START} and {END}, between which measurements are put; add them")
        card = with_section(card, MEASURED, measured_text(rows))
        if save:
            replace_text(file, card)
    return with_section(card, USE, use_text(draft, repository))


def with_section(card: str, heading: str, content: str) -> str:
    """The card with new content below a heading of the generated part. A missing section is added at the end of the
    generated part. A card without a generated part stays unchanged."""

    def replaced(found: re.Match[str]) -> str:
        before, _, rest = found[0].partition(f"\n{heading}\n")
        following = re.search(r"(?ms)^## .*", rest)
        after = following[0] if following else ""
        return f"{before.rstrip()}\n\n{heading}\n\n{content}\n\n{after}"

    return GENERATED.sub(replaced, card, count=1)


def keep_edits(there: str, card: str) -> str:
    """The card `there` with the generated part of `card`; `there` unchanged if either card has no generated part."""
    new = GENERATED.search(card)
    return GENERATED.sub(lambda _: new[0], there, count=1) if new else there


def use_text(draft: DraftFiles, repository: str) -> str:
    """The commands that serve a draft from a repository; for an engine that cannot serve the draft, the reason."""
    config, name = draft.config, draft.config.provenance.target
    target = name if hub_id(name) else TARGET
    parts = [f"{code(TARGET)} stands for the target."] if target == TARGET else []
    for engine in SERVERS:
        if reason := unsupported(config, engine):
            parts.append(f"{plain(reason)}.")
            continue
        served, version = repository, minimum_version(config, engine)
        if needs_export(draft, engine):
            served = "DIR"
            export = f"fledge export --draft {repository} --to {engine} --out {served}"
            parts.append(f"{TITLES[engine]} needs other files than these, which `{export}` writes.")
        words = engine_command(engine, Serving(target, served, config, trained_depth(config)))
        since = f" ({version} or later)" if version else ""
        parts.append(f"{TITLES[engine]}{since}:\n\n```sh\n{shlex.join(words)}\n```")
    own = f"fledge generate --target {target} --draft {repository} --prompt Hello"
    parts.append(f"fledge, which also measures what the draft gains (`fledge eval`):\n\n```sh\n{own}\n```")
    return "\n\n".join(parts)


def measured_rows(file: Path, draft: DraftFiles) -> list[str]:
    """The table's rows for the measurements of `draft` in a record of `fledge eval`. Raises ValueError, naming the
    file, if the file is no record of `fledge eval`, or has no measurement of `draft`."""
    try:
        content = read_json(file)
    except (OSError, ValueError) as e:
        raise ValueError(f"--eval {file} cannot be read ({e}); fledge eval --out FILE writes such a file") from e
    if not is_record(content):
        raise ValueError(f"--eval {file} is not a record that fledge eval --out wrote")
    records: dict[str, Any] = {"": content} if "tau" in content else content
    known = (draft_sha256(draft.tensors), None)  # None: fledge eval measured a server without --draft
    own = {label: record for label, record in records.items() if record.get("draft_sha256") in known}
    if not own:
        others = ", ".join(sorted({str(record.get("draft")) for record in records.values()}))
        raise ValueError(f"--eval {file} has measurements of other drafts only ({others}); measure this draft")
    try:
        return [_row_of(label, record) for label, record in own.items()]
    except (KeyError, TypeError, ValueError) as e:
        raise ValueError(f"--eval {file} is not a record of fledge eval with a draft ({type(e).__name__}: {e})") from e


def _row_of(label: str, record: Mapping[str, Any]) -> str:
    prompts = f"{record.get('prompt_set') or label or 'prompts'}, {int(record['prompts'])}"
    temperature = (record.get("sampling") or {}).get("temperature", 0)
    words = [f"temperature {temperature}" if temperature else "greedy", str(record.get("mode") or "")]
    words += [f"{name} {record[name]}" for name in ("depth", "nodes") if record.get(name)]
    words += [f"batch {record['batch']}"] if record.get("batch", 1) != 1 else []
    alpha = [None if a is None else float(a) for a in record["alpha"]]
    speedup = None if record.get("speedup") is None else float(record["speedup"])
    device = "a server" if record.get("endpoint") else str(record["environment"]["device"])
    return measured_row(prompts, ", ".join(filter(None, words)), float(record["tau"]), alpha, speedup, device)


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
    say(f"uploading {format_bytes(sum(file.stat().st_size for file in files.values()) + len(kept.encode()))} to {name}")
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
            config_from_hf(parse_json(read(CONFIG)))
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
        said = e.server_message or first_line(e)
        if status >= 500 or not status:
            raise ConnectionError(f"the hub failed ({said}); {AGAIN}") from e
        cure = CURES.get(status)
        raise ValueError(f"the hub refuses the upload to {repository} ({said})" + (f"; {cure}" if cure else "")) from e
    except Exception as e:
        of_upload = isinstance(e, RuntimeError) and "upload" in str(e).lower()  # a large file failed
        if type(e).__module__.partition(".")[0] not in ("httpx", "httpx2", "httpcore") and not of_upload:
            raise
        raise ConnectionError(f"the hub cannot be reached ({first_line(e)}); {AGAIN}") from e
