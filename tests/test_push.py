"""`fledge push` uploads the files of a sound draft in one commit, and nothing of others is lost."""

from __future__ import annotations

import json
import time
from fnmatch import fnmatch

import pytest
from huggingface_hub import constants

from fledge.io.display import format_bytes
from fledge.io.hub import DRAFT_FILES
from fledge.io.machine import environment
from fledge.publish.card import END, START
from support.drafts_on_disk import saved
from support.files import reconfigure
from support.hub import Repository, serving, stand_in

CARD, CONFIG, WEIGHTS = "README.md", "config.json", "model.safetensors"


@pytest.fixture
def hub():
    with serving() as hub:
        yield hub


@pytest.fixture
def draft(tmp_path):
    saved(tmp_path / "draft")
    return tmp_path / "draft"


@pytest.fixture
def push(hub, tmp_path, fledge, monkeypatch):
    """Runs `fledge push` with the stand-in as the hub."""
    stand_in(hub, monkeypatch, tmp_path)
    return lambda *words: fledge("push", *words)


def test_the_files_of_a_draft_travel_and_no_others(hub, push, draft):
    (draft / "notes.txt").write_text("private")
    (draft / "fledge").mkdir()
    (draft / "fledge" / "secret.json").write_text("{}")
    before = {p: p.read_bytes() for p in draft.rglob("*") if p.is_file()}
    done = push("--draft", draft, "bird/draft", "--private", "--message", "first")
    assert done.code == 0 and done.out == f"{hub.url}/bird/draft\n", done.err
    assert hub.listing() == [CARD, CONFIG, WEIGHTS] and hub.repositories["bird/draft"].private
    assert hub.repositories["bird/draft"].messages == ["first"] and hub.sent == 1
    assert all(hub.files()[name] == (draft / name).read_bytes() for name in (CONFIG, WEIGHTS))
    card = hub.files()[CARD].decode()
    assert "fledge generate --target TARGET --draft bird/draft" in card
    assert {p: p.read_bytes() for p in draft.rglob("*") if p.is_file()} == before, "the draft itself is not changed"


def test_a_later_draft_replaces_all_of_the_earlier_one(hub, push, draft):
    """Also the probe, with which `fledge check` would find damage, and weights that were in several files."""
    assert push("--draft", draft, "bird/draft").code == 0
    stale = ["fledge/record.json", "fledge/probe.safetensors", "model-00001-of-00002.safetensors"]
    stale += ["pytorch_model-00001-of-00002.bin"]
    others = ["LICENSE", "draft.gguf", "fledge/notes.txt", "optimizer.pt", "parts/model.safetensors"]
    hub.files().update(dict.fromkeys([*stale, *others], b"x"))
    reconfigure(draft, rms_norm_eps=1e-6)
    done = push("--draft", draft, "bird/draft")
    assert done.code == 0 and all(name in done.err for name in stale), done.err
    assert hub.listing() == sorted([CARD, CONFIG, WEIGHTS, *others])
    assert json.loads(hub.files()[CONFIG])["rms_norm_eps"] == 1e-6
    assert hub.sent == 1, "weights that the hub has are not sent again"


@pytest.mark.parametrize("branch", ["main", "v2"])
def test_what_others_change_during_an_upload_is_not_overwritten(hub, push, draft, branch):
    words = ["--draft", draft, "bird/draft", *(["--revision", branch] if branch != "main" else [])]
    assert push(*words).code == 0
    reconfigure(draft, rms_norm_eps=1e-6)
    there = hub.files(branch=branch)[CONFIG]
    hub.meanwhile = {CARD: b"# Theirs\n"}
    refused = push(*words)
    assert refused.code == 2 and "somebody changed the repository meanwhile" in refused.err, refused.err
    assert hub.files(branch=branch)[CARD] == b"# Theirs\n" and hub.files(branch=branch)[CONFIG] == there
    again = push(*words)
    assert again.code == 0 and "--replace-card" in again.err and hub.files(branch=branch)[CARD] == b"# Theirs\n"
    assert hub.files(branch=branch)[CONFIG] != there


def test_what_people_wrote_in_a_card_is_kept(hub, push, draft):
    assert push("--draft", draft, "bird/draft").code == 0
    generated = hub.files()[CARD].decode()
    edited = "---\nlicense: mit\n---\nMy draft.\n" + generated[generated.index(START) :] + "\nAsk me.\n"
    hub.files()[CARD] = edited.encode()
    reconfigure(draft, rope_theta=5000.0, rope_parameters={"rope_type": "default", "rope_theta": 5000.0})
    eval_json = draft.parent / "eval.json"
    record = {"tau": 2.5, "alpha": [0.8], "prompts": 80, "environment": environment("cpu", "float32")}
    eval_json.write_text(json.dumps(record))
    kept = push("--draft", draft, "bird/draft", "--eval", eval_json)
    assert kept.code == 0 and "--replace-card" in kept.err, kept.err
    there = hub.files()[CARD].decode()
    assert there.startswith("---\nlicense: mit\n---\nMy draft.\n") and there.endswith(f"{END}\n\nAsk me.\n")
    assert "| 2.50 | 0.80 |" in there and "| 2.50 | 0.80 |" in (draft / CARD).read_text()
    again = push("--draft", draft, "bird/draft", "--replace-card")
    assert again.code == 0 and "license" not in hub.files()[CARD].decode(), "the measurements are in the draft's card"
    assert "| 2.50 | 0.80 |" in hub.files()[CARD].decode()
    later = push("--draft", draft, "bird/draft")
    assert later.code == 0 and "--replace-card" not in later.err, "nobody wrote in it since"


def test_cards_of_people_alone_are_kept(hub, push, draft):
    (draft / CARD).write_text("# Mine\n")
    assert push("--draft", draft, "bird/draft").code == 0
    assert hub.files()[CARD] == b"# Mine\n", "a card without a generated part is uploaded as it is"
    hub.files()[CARD] = b"---\nlicense: mit\n---\n# Edited on the hub\n"
    kept = push("--draft", draft, "bird/draft")
    assert kept.code == 0 and "--replace-card" in kept.err
    assert hub.files()[CARD] == b"---\nlicense: mit\n---\n# Edited on the hub\n"
    assert push("--draft", draft, "bird/draft", "--replace-card").code == 0
    assert hub.files()[CARD] == b"# Mine\n"


def test_a_branch_of_its_own(hub, push, draft):
    done = push("--draft", draft, "bird/draft", "--revision", "v2")
    assert done.code == 0 and done.out == f"{hub.url}/bird/draft/tree/v2\n", done.err
    assert not hub.files() and WEIGHTS in hub.files(branch="v2")


@pytest.mark.parametrize("files", [{CONFIG: b'{"model_type": "bert"}', WEIGHTS: b"x"}, {"pytorch_model.bin": b"x"}])
def test_another_model_is_not_overwritten(hub, push, draft, files):
    hub.repositories["bird/draft"] = Repository(branches={"main": dict(files)})
    done = push("--draft", draft, "bird/draft")
    assert done.code == 2 and "something else than a draft" in done.err and hub.files() == files


def test_a_public_repository_is_not_taken_for_a_private_one(hub, push, draft):
    hub.repositories["bird/draft"] = Repository()
    done = push("--draft", draft, "bird/draft", "--private")
    assert done.code == 2 and "is public" in done.err and not hub.files()


@pytest.mark.parametrize(("status", "said"), [(500, "the hub failed"), (0, "the hub")])
def test_an_upload_that_failed_is_continued(hub, push, draft, monkeypatch, status, said):
    """huggingface_hub tries again by itself after some failures, and waits before."""
    monkeypatch.setattr(time, "sleep", lambda seconds: None)
    hub.repositories["bird/draft"] = Repository()
    hub.failures += [status] * 20
    failed = push("--draft", draft, "bird/draft")
    hub.failures.clear()
    assert failed.code == 2 and said in failed.err and "the same command continues" in failed.err, failed.err
    assert not hub.files()
    assert push("--draft", draft, "bird/draft").code == 0 and hub.listing() == [CARD, CONFIG, WEIGHTS]
    assert hub.sent == 1


@pytest.mark.parametrize(
    ("token", "repository", "said"),
    [
        ("", "bird/draft", "there is no login for the hub; log in with `hf auth login`"),
        ("hf_old", "bird/draft", "log in with `hf auth login`"),
        ("hf_good", "other/draft", "check the owner's name with `hf auth whoami`"),
        ("hf_good", "datasets/bird/draft", "write owner/name"),
    ],
)
def test_why_nothing_is_uploaded(hub, push, draft, monkeypatch, token, repository, said):
    monkeypatch.setenv("HF_TOKEN", token)
    done = push("--draft", draft, repository)
    assert done.code == 2 and said in done.err and not done.out, done.err
    assert len(done.err.strip().splitlines()) == 1 and "hf_" not in done.err and not hub.repositories


def test_a_hub_that_is_not_reached(push, draft, monkeypatch):
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    done = push("--draft", draft, "bird/draft")
    assert done.code == 2 and "the hub cannot be reached" in done.err and "Errno" in done.err


def test_dry_run_asks_nobody(hub, push, draft, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "")
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    done = push("--draft", draft, "bird/draft", "--dry-run")
    size = (draft / CONFIG).stat().st_size
    assert done.code == 0 and f"{CONFIG}: {format_bytes(size)}\n" in done.out and "library_name: fledge" in done.out
    assert not hub.repositories


def test_damaged_drafts_are_refused(fledge, draft, tmp_path):
    (draft / WEIGHTS).write_bytes((draft / WEIGHTS).read_bytes()[:-8])
    damaged = fledge("push", "--draft", draft, "bird/draft", "--dry-run")
    assert damaged.code == 2 and WEIGHTS in damaged.err and not damaged.out
    missing = fledge("push", "--draft", tmp_path / "none", "bird/draft", "--dry-run")
    assert missing.code == 2 and "holds no config.json" in missing.err
    on_hub = fledge("push", "--draft", "bird/draft", "bird/draft", "--dry-run")
    assert on_hub.code == 2 and "not a directory here" in on_hub.err


def test_a_damaged_probe_is_refused_or_left_out(fledge, draft):
    (draft / "fledge").mkdir()
    (draft / "fledge" / "record.json").write_text("{}")
    refused = fledge("push", "--draft", draft, "bird/draft", "--dry-run")
    assert refused.code == 2 and "--no-probe" in refused.err
    assert fledge("push", "--draft", draft, "bird/draft", "--dry-run", "--no-probe").code == 0


@pytest.mark.parametrize(
    ("target", "noted"),
    [("/home/bird/models/target", True), ("../bird/target", True), ("~/bird", True), ("C:\\bird\\target", True),
     ("bird/target", False), ("bird/target@main", False), ("", False)],
)  # fmt: skip
def test_a_target_that_is_named_by_a_path_is_noted(fledge, draft, target, noted):
    hf = json.loads((draft / CONFIG).read_text())
    reconfigure(draft, fledge=hf["fledge"] | {"target": target})
    done = fledge("push", "--draft", draft, "bird/draft", "--dry-run")
    assert done.code == 0 and ("config.json names the target by its path on this machine" in done.err) == noted
    assert not noted or target not in done.out


def test_what_is_pushed_is_what_is_downloaded():
    """Of the pushed files, only the card is not downloaded with a draft."""
    pushed = (CONFIG, WEIGHTS, "model.safetensors.index.json", "fledge/record.json", "fledge/probe.safetensors")
    assert all(any(fnmatch(name, pattern) for pattern in DRAFT_FILES) for name in pushed)
