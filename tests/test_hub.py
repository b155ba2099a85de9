"""Names of targets and drafts: paths, hub ids with revisions, and the error if neither exists."""

from __future__ import annotations

from pathlib import Path

import huggingface_hub
import pytest
from huggingface_hub.errors import LocalEntryNotFoundError

from fledge import hub
from fledge.hub import draft_directory, split_revision
from fledge.models.weights import load_draft, read_draft_config, save_draft
from fledge.targets import loading
from fledge.targets.loading import load_target
from support.chats import tiny_chats
from support.targets import tiny_draft, tiny_target_directory


@pytest.fixture
def asked(monkeypatch, tmp_path):
    """A fake hub that returns `tmp_path`/snapshot, or is unreachable if that does not exist; gives the list of
    requests."""
    calls = []

    def snapshot_download(repository, *, revision=None, allow_patterns=None):
        calls.append((repository, revision, allow_patterns))
        if not (tmp_path / "snapshot").exists():
            raise LocalEntryNotFoundError("\n\nNo connection, and nothing in the cache.\nMore of that.")
        return str(tmp_path / "snapshot")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    monkeypatch.chdir(tmp_path)
    hub._download.cache_clear()
    yield calls
    hub._download.cache_clear()


@pytest.mark.parametrize(
    ("name", "parts"),
    [
        ("owner/name", ("owner/name", None)),
        ("owner/name@v1.0", ("owner/name", "v1.0")),
        ("meta-llama/Llama-3.1-8B@refs/pr/7", ("meta-llama/Llama-3.1-8B", "refs/pr/7")),
        ("owner/name@", ("owner/name@", None)),
        ("./owner/name@v1", ("./owner/name@v1", None)),
        ("../name@v1", ("../name@v1", None)),
        ("/owner/name@v1", ("/owner/name@v1", None)),
        ("name@v1", ("name@v1", None)),
        ("there/name@v1", ("there/name@v1", None)),
    ],
)
def test_names_are_split_into_id_and_revision(asked, name, parts):
    Path("there/name@v1").mkdir(parents=True)
    assert split_revision(name) == parts


def test_a_path_is_never_looked_for_on_the_hub(asked):
    Path("run/draft").mkdir(parents=True)
    for name in ("run/draft", "run/drafts", "run", "nowhere", "a/b/c", "../x", "/tmp/x/y", "./a/b"):
        assert draft_directory(name) == Path(name)
    assert not asked


def test_a_hub_draft_is_downloaded_once_and_without_other_files(asked, target, tmp_path):
    draft = tiny_draft(target, draft_vocab_size=100)
    save_draft(draft, tmp_path / "snapshot")
    assert read_draft_config("owner/name@v2").draft_vocab_size == load_draft("owner/name@v2").config.draft_vocab_size
    files = ["config.json", "*.safetensors", "*.safetensors.index.json", "pytorch_model.bin", "fledge/record.json"]
    assert asked == [("owner/name", "v2", files)]
    load_draft("owner/name")
    assert asked[1][:2] == ("owner/name", None)


def test_drafts_by_hub_id_on_the_command_line(asked, fledge, tmp_path):
    tiny_target_directory(tmp_path)
    chats = tiny_chats(tmp_path / "chats.jsonl", 20)
    words = "--max-length 64 --row-length 128 --steps 1 --depth 2 --device cpu".split()
    train = ["train", "--target", "target", "--data", chats, *words]
    assert fledge(*train, "--out", "first", "--draft-vocab", 100).code == 0
    unreachable = fledge("inspect", "owner/name@v2")
    assert unreachable.code == 2 and unreachable.err == (
        "fledge: the draft owner/name@v2 is not a local directory and cannot be downloaded from the hub: No "
        "connection, and nothing in the cache.\n"
    )
    Path("first/draft").rename("snapshot")
    shown = fledge("inspect", "owner/name@v2")
    assert shown.code == 0 and "An EAGLE-3 draft" in shown.out and "100 of 400 tokens" in shown.out
    asks = ["generate", "--target", "target", "--prompt", "the young bird", "--max-new-tokens", 8]
    assert fledge(*asks, "--draft", "owner/name@v2").out == fledge(*asks).out
    went = fledge(*train, "--out", "second", "--init-from", "owner/name@v2")
    assert went.code == 0, went.err
    assert read_draft_config("second/draft").draft_vocab_size == 100
    assert {call[:2] for call in asked} == {("owner/name", "v2")}


def test_targets_have_revisions_too(monkeypatch, tmp_path):
    directory, asked = tiny_target_directory(tmp_path), []
    for name in ("AutoConfig", "AutoModelForCausalLM", "AutoTokenizer"):
        auto = getattr(loading, name)

        class Hub:
            load = auto.from_pretrained

            @classmethod
            def from_pretrained(cls, name, *, revision, **options):
                asked.append((name, revision))
                return cls.load(directory, **options)

        monkeypatch.setattr(loading, name, Hub)
    assert load_target("owner/name@refs/pr/7").name == "owner/name@refs/pr/7"
    load_target("owner/name")
    assert asked == [("owner/name", "refs/pr/7")] * 3 + [("owner/name", None)] * 3
