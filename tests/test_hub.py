"""Names of targets and drafts: paths, hub ids with revisions, and the error if neither exists; downloads."""

from __future__ import annotations

import json
from pathlib import Path

import huggingface_hub
import pytest
from huggingface_hub.errors import LocalEntryNotFoundError
from huggingface_hub.utils.tqdm import are_progress_bars_disabled, disable_progress_bars, enable_progress_bars

from fledge.drafts.weights import load_draft, read_draft_config, save_draft
from fledge.io import hub
from fledge.io.hub import draft_directory, split_revision
from fledge.targets import loading
from fledge.targets.distributed import load_head
from fledge.targets.loading import load_target
from support.chats import tiny_chats
from support.hub import Repository, serving, stand_in
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


@pytest.fixture
def served(monkeypatch, tmp_path):
    """A hub with a target in one file (bird/whole) and in several (bird/shards), and a draft."""
    directory = tiny_target_directory(tmp_path)
    files = {f.name: f.read_bytes() for f in directory.iterdir()}
    load_target(directory).model.save_pretrained(tmp_path / "shards", max_shard_size="100KB")
    shards = {f.name: f.read_bytes() for f in (tmp_path / "shards").iterdir()}
    save_draft(tiny_draft(load_target(directory), draft_vocab_size=100), tmp_path / "drafted")
    draft = {f.name: f.read_bytes() for f in (tmp_path / "drafted").iterdir() if f.is_file()}
    with serving() as server:
        stand_in(server, monkeypatch, tmp_path)
        small = {name: content for name, content in files.items() if name != "model.safetensors"}
        models = {"bird/whole": files, "bird/shards": small | shards, "bird/draft": draft}
        for name, content in models.items():
            server.repositories[name] = Repository(branches={"main": content})
        yield server
    hub._download.cache_clear()


def test_only_the_files_that_are_needed_are_downloaded(served):
    """A target of which only the ends are loaded."""
    load_head("bird/shards")
    names = [f for f in served.files("bird/shards") if f.endswith(".safetensors")]
    there = [f for f in names if isinstance(huggingface_hub.try_to_load_from_cache("bird/shards", f), str)]
    assert len(names) == 5 and 0 < len(there) < 5


@pytest.mark.parametrize("shown", [True, False])
def test_the_hub_library_shows_its_bars_unless_they_were_disabled(served, monkeypatch, shown):
    during, read = [], loading.read_tokenizer
    monkeypatch.setattr(
        loading, "read_tokenizer", lambda *given: during.append(not are_progress_bars_disabled()) or read(*given)
    )
    (enable_progress_bars if shown else disable_progress_bars)()
    try:
        assert load_target("bird/whole").name == "bird/whole" and during == [shown]
    finally:
        enable_progress_bars()


def test_what_is_in_the_cache_is_loaded_without_the_hub(served, monkeypatch):
    for name in ("bird/whole", "bird/shards"):
        load_target(name)
    served.repositories.clear()
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    for name in ("bird/whole", "bird/shards"):
        load_target(name)


def test_a_download_that_fails_is_the_readers(served):
    """The reader's error says what is wrong."""
    del served.files("bird/shards")["model-00003-of-00005.safetensors"]
    with pytest.raises(ValueError, match="the target bird/shards cannot be loaded"):
        load_target("bird/shards")


def test_an_adapter_on_the_hub_is_named_with_the_cure(served):
    config = json.dumps({"peft_type": "LORA", "base_model_name_or_path": "bird/whole"})
    served.repositories["bird/adapter"] = Repository(branches={"main": {"adapter_config.json": config.encode()}})
    with pytest.raises(ValueError, match="the target bird/adapter is a LORA adapter of bird/whole, not a whole model"):
        load_target("bird/adapter")
    with pytest.raises(ValueError, match="the target bird/none cannot be loaded"):
        load_target("bird/none")


def test_a_hub_that_is_not_reached_is_named_with_a_cure(monkeypatch):
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(ValueError, match=r"the target brid/chat cannot be loaded: .*connect to .*\. Check its name; "):
        load_target("brid/chat")
