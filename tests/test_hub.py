"""Names of targets and drafts: paths, hub ids with revisions, and the error if neither exists; what is shown of
downloads."""

from __future__ import annotations

import contextvars
from contextlib import contextmanager
from pathlib import Path

import huggingface_hub
import pytest
from huggingface_hub.errors import LocalEntryNotFoundError
from huggingface_hub.utils.tqdm import are_progress_bars_disabled, disable_progress_bars, enable_progress_bars

from fledge.drafts.weights import load_draft, read_draft_config, save_draft
from fledge.io import hub
from fledge.io.hub import draft_directory, show_progress, split_revision
from fledge.targets import loading
from fledge.targets.loading import load_head, load_target
from support.chats import tiny_chats
from support.hub import Repository, serving, stand_in
from support.targets import tiny_draft, tiny_target_directory


@pytest.fixture
def asked(monkeypatch, tmp_path):
    """A fake hub that returns `tmp_path`/snapshot, or is unreachable if that does not exist; gives the list of
    requests."""
    calls = []

    def snapshot_download(repository, *, revision=None, allow_patterns=None, tqdm_class=None):
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
def counted(monkeypatch):
    """A function that does something while progress is shown, and returns (label, total, unit, what was counted)."""
    monkeypatch.setattr(hub, "MEGABYTE", 1000)  # as models are small here

    def run(work):
        bars = []

        @contextmanager
        def counter(label, total, *, unit):
            bars.append((label, total, unit, steps := []))
            yield steps.append

        def shown():
            show_progress(counter)
            work()

        contextvars.copy_context().run(shown)
        return [(label, total, unit, sum(steps)) for label, total, unit, steps in bars]

    return run


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


def kilobytes(server, name):
    """The size of each file of a model's weights."""
    files = server.files(name)
    return [len(files[f]) / 1000 for f in files if f.endswith(".safetensors")]


@pytest.mark.parametrize("name", ["bird/whole", "bird/shards"])
def test_the_download_of_a_target_is_shown(served, counted, name):
    """All its weights in one bar, before their tensors; nothing once they are there, also of the head alone."""
    tensors = (f"tensors of {name}", 75, "tensors", 75)
    sizes = kilobytes(served, name)
    download, after = counted(lambda: load_target(name))
    label, total, unit, done = download
    assert (label, total, unit) == (f"MB of {name} from the hub", round(sum(sizes)), "MB")
    assert len(sizes) == (1 if name == "bird/whole" else 5)
    assert int(sum(sizes)) == done and after == tensors
    assert counted(lambda: load_target(name)) == [tensors]
    assert counted(lambda: load_head(name)) == []


def test_only_the_files_that_are_needed_are_downloaded(served, counted):
    """A target of which only the ends are loaded."""
    ((label, total, _, done),) = counted(lambda: load_head("bird/shards"))
    assert label == "MB of bird/shards from the hub"
    assert 0 < total - 1 <= done <= total < 0.9 * sum(kilobytes(served, "bird/shards"))


def test_the_download_of_a_draft_is_shown(served, counted):
    """The total counts the files whose download had begun at the first megabyte: the config may be complete by then."""
    (size,) = kilobytes(served, "bird/draft")
    ((label, total, unit, done),) = counted(lambda: load_draft("bird/draft"))
    assert (label, unit) == ("MB of bird/draft from the hub", "MB") and done >= int(size) and total >= 1


@pytest.mark.parametrize("shown", [True, False])
def test_a_download_that_nobody_counts_is_that_of_transformers(served, monkeypatch, shown):
    """In Python, the hub library shows its own bars, unless they were disabled."""
    during, read = [], loading._read_tokenizer
    monkeypatch.setattr(hub, "_snapshot", None)
    monkeypatch.setattr(
        loading, "_read_tokenizer", lambda *given: during.append(not are_progress_bars_disabled()) or read(*given)
    )
    (enable_progress_bars if shown else disable_progress_bars)()
    try:
        assert load_target("bird/whole").name == "bird/whole" and during == [shown]
    finally:
        enable_progress_bars()


def test_what_is_in_the_cache_is_loaded_without_the_hub(served, counted, monkeypatch):
    for name in ("bird/whole", "bird/shards"):
        load_target(name)
    served.repositories.clear()
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(hub, "_snapshot", None)
    for name in ("bird/whole", "bird/shards"):
        assert counted(lambda name=name: load_target(name)) == [(f"tensors of {name}", 75, "tensors", 75)]


def test_a_download_that_fails_is_the_readers(served, counted):
    """The reader's error says what is wrong."""
    del served.files("bird/shards")["model-00003-of-00005.safetensors"]
    with pytest.raises(ValueError, match="the target bird/shards cannot be loaded"):
        counted(lambda: load_target("bird/shards"))


def test_an_unknown_id_is_named(served):
    with pytest.raises(ValueError, match="the target bird/none cannot be loaded"):
        load_target("bird/none")


def test_a_hub_that_is_not_reached_is_named_with_a_cure(monkeypatch):
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(ValueError, match=r"the target brid/chat cannot be loaded: .*connect to .*\. Check its name; "):
        load_target("brid/chat")
