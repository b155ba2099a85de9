"""`fledge features` and `fledge train --features`: from chats to a draft, interrupted, continued, with bad input."""

from __future__ import annotations

import os
import re
import shutil
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from fledge.drafts.weights import load_draft
from fledge.states import writer as writer_module
from fledge.states.cache import FeatureCache
from fledge.states.writer import RESERVED_SHARE, disk_space
from support.chats import tiny_chats
from support.commands import Ran, kill_as_it_writes, python
from support.files import listing, metrics_of, write_rows
from support.runs import recipe_of
from support.targets import tiny_target_directory

Fledge = Callable[..., Ran]

DEMO = Path(__file__).parents[1] / "fledge" / "demo" / "target"
WRITE = "--max-length", 64
TRAIN = "--row-length", 128, "--steps", 5, "--depth", 2, "--draft-vocab", 200, "--save-every", 2, "--device", "cpu"

# `fledge` with shards of at least 60,000 bytes
RUN = """
import sys
import torch
torch.set_num_threads(1)
from fledge.states import writer
writer.MIN_SHARD = 60_000
from fledge.cli import main
sys.argv = ["fledge", *sys.argv[1:]]
main()
"""


@pytest.fixture(autouse=True)
def small_shards(monkeypatch) -> None:
    monkeypatch.setattr(writer_module, "MIN_SHARD", 60_000)


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> Path:
    root = tmp_path_factory.mktemp("made")
    tiny_target_directory(root)
    tiny_chats(root / "chats.jsonl", 60)
    return root


def write_words(made: Path, out: Path, *more: object) -> list[object]:
    return ["features", "--target", made / "target", "--data", made / "chats.jsonl", "--out", out, *WRITE, *more]


def losses(run: Path) -> list[float]:
    return [m["loss"] for m in metrics_of(run)]


def test_training_from_features_is_training_live(fledge: Fledge, made: Path, tmp_path: Path) -> None:
    """With float32 features, the losses are those of training with the target, up to rounding; and no target runs."""
    wrote = fledge(*write_words(made, tmp_path / "f"))
    assert wrote.code == 0, wrote.err
    assert "bytes a token in float32" in wrote.err and "tokens/s" in wrote.err
    stored = fledge("train", "--features", tmp_path / "f", "--out", tmp_path / "run", *TRAIN)
    assert stored.code == 0, stored.err
    words = "--target", made / "target", "--data", made / "chats.jsonl", "--out", tmp_path / "live", *WRITE, *TRAIN
    assert fledge("train", *words).code == 0
    assert losses(tmp_path / "run") == pytest.approx(losses(tmp_path / "live"), rel=1e-4)
    known, settled = recipe_of(tmp_path / "run"), recipe_of(tmp_path / "live")["settled"]
    assert known["settled"] == settled and known["features"] == str(tmp_path / "f") and "data" not in known
    ours, theirs = (load_draft(tmp_path / run / "draft").config.provenance for run in ("run", "live"))
    assert (ours.tokenizer_sha256, ours.max_length, ours.template_sha256) == (
        theirs.tokenizer_sha256, theirs.max_length, theirs.template_sha256,
    )  # fmt: skip


@pytest.mark.parametrize("method", ["eagle3.1", "peagle", "eagle1"])
def test_one_cache_for_every_method(method: str, fledge: Fledge, made: Path, tmp_path: Path) -> None:
    wrote = fledge(*write_words(made, tmp_path / "f", "--precision", "fp8", "--all-final-states"))
    assert wrote.code == 0, wrote.err
    words = [w for w in TRAIN if w not in ("--draft-vocab", 200)] if method == "eagle1" else TRAIN
    ran = fledge("train", "--features", tmp_path / "f", "--out", tmp_path / "run", "--method", method, *words)
    assert ran.code == 0, ran.err
    assert len(losses(tmp_path / "run")) == 5


def test_a_block_draft_says_that_it_reads_the_layers_of_the_features(
    fledge: Fledge, made: Path, tmp_path: Path
) -> None:
    """EAGLE-3's layers are read with a message; with DFlash's own, training is that with the target, without one."""
    words = [*(w for w in TRAIN if w not in ("--draft-vocab", 200)), "--method", "dflash", "--layers", 2]
    for name, layers in (("eagle", []), ("own", ["--aux-layers", "2,6"])):
        assert fledge(*write_words(made, tmp_path / name, *layers)).code == 0
        ran = fledge("train", "--features", tmp_path / name, "--out", tmp_path / f"run-{name}", *words)
        assert ran.code == 0, ran.err
        said = "layers 2,4,5, which the features hold; DFlash reads 2,6 by default" in ran.err.replace("\n", " ")
        assert said == (name == "eagle"), ran.err
    live = "--target", made / "target", "--data", made / "chats.jsonl", "--out", tmp_path / "live", *WRITE, *words
    assert fledge("train", *live).code == 0
    assert losses(tmp_path / "run-own") == pytest.approx(losses(tmp_path / "live"), rel=1e-4)
    assert losses(tmp_path / "run-eagle") != pytest.approx(losses(tmp_path / "live"), rel=1e-4)


@pytest.mark.parametrize("precision", ["fp8", "bfloat16"])
def test_features_for_eagle1_alone(precision: str, fledge: Fledge, made: Path, tmp_path: Path) -> None:
    words = "--aux-layers", "none", "--all-final-states", "--precision", precision
    wrote = fledge(*write_words(made, tmp_path / "f", *words))
    assert wrote.code == 0 and FeatureCache.open(tmp_path / "f").manifest.layers == [], wrote.err
    words = "train", "--features", tmp_path / "f", "--out", tmp_path / "run", "--steps", 2, "--device", "cpu"
    assert fledge(*words, "--method", "eagle1").code == 0
    ran = fledge(*words[:4], tmp_path / "other", *words[5:])
    assert ran.code == 2 and "has the hidden states of layers [], and the draft also reads" in ran.err


def test_features_of_supervised_tokens_are_not_enough_for_eagle1(fledge: Fledge, made: Path, tmp_path: Path) -> None:
    assert fledge(*write_words(made, tmp_path / "f")).code == 0
    ran = fledge("train", "--features", tmp_path / "f", "--out", tmp_path / "run", "--method", "eagle1")
    assert ran.code == 2 and "write them with fledge features --all-final-states" in ran.err
    ran = fledge(*write_words(made, tmp_path / "g", "--aux-layers", "none"))
    assert ran.code == 2 and "--aux-layers none needs --all-final-states" in ran.err


@pytest.mark.parametrize("precision", ["fp8", "bfloat16"])
def test_bytes_a_token_as_announced(precision: str, fledge: Fledge, tmp_path: Path) -> None:
    """The bundled target: what is announced before the first byte is what the disk holds, within 1 %."""
    data = write_rows(
        tmp_path / "text.jsonl", [{"text": f"Ada has {i} apples and gets {i} more.\n" * 30} for i in range(9)]
    )
    words = "--out", tmp_path / "f", "--max-length", 128, "--precision", precision
    wrote = fledge("features", "--target", DEMO, "--data", data, *words)
    assert wrote.code == 0, wrote.err
    announced = float(re.search(r"take ([\d,]+) bytes a token", wrote.err)[1].replace(",", ""))
    cache = FeatureCache.open(tmp_path / "f")
    on_disk = sum(f.stat().st_size for f in cache.path.glob("*.safetensors"))
    assert announced == pytest.approx(on_disk / cache.manifest.tokens, rel=0.01)
    assert wrote.err.index("bytes a token") < wrote.err.rindex("elapsed")


def test_a_killed_writer_continues_with_the_same_bytes(fledge: Fledge, made: Path, tmp_path: Path) -> None:
    """Killed at any moment, no file reads as a whole shard that is not one; at the end all bytes are the same."""
    assert fledge(*write_words(made, tmp_path / "whole")).code == 0
    whole = {f.name: f.read_bytes() for f in (tmp_path / "whole").glob("shard*")}
    out = tmp_path / "killed"
    for count in (1, len(whole) // 2):
        with python(RUN, *write_words(made, out)) as process:
            while len(list(out.glob("shard*.safetensors"))) < count and process.poll() is None:
                time.sleep(0.002)
            os.kill(process.pid, signal.SIGKILL)
        kept = {f.name: f.read_bytes() for f in out.glob("shard*.safetensors")}
        assert kept.items() <= whole.items()
    refused = fledge("train", "--features", out, "--out", tmp_path / "run", *TRAIN)
    assert len(kept) == len(whole) or (refused.code == 2 and "is missing; run the same" in refused.err)
    if len(kept) < len(whole):  # as by a kill just after the shard was written
        (out / "shard-00000.lock").write_text("process 1")
    continued = fledge(*write_words(made, out))
    assert continued.code == 0 and ("continuing" in continued.err or "is complete" in continued.err)
    assert {f.name: f.read_bytes() for f in out.glob("shard*")} == whole
    assert listing(out) == listing(tmp_path / "whole")
    assert "is complete" in fledge(*write_words(made, out)).err


@pytest.mark.parametrize("name", ["documents.safetensors", "held-out.jsonl", "manifest.json"])
def test_a_writer_that_is_killed_as_it_begins_leaves_nothing(name: str, fledge: Fledge, made: Path, tmp_path: Path):
    kill_as_it_writes(name, *write_words(made, tmp_path / "f"))
    assert [f for f in listing(tmp_path / "f") if f.startswith(".fledge-new-")]
    assert fledge(*write_words(made, tmp_path / "f")).code == 0
    assert not [f for f in listing(tmp_path / "f") if f.startswith(".")]


def test_two_processes_write_one_cache(made: Path, tmp_path: Path) -> None:
    """Together they write each shard once, and both end when it is complete."""
    started = [python(RUN, *write_words(made, tmp_path / "f")) for _ in range(2)]
    for process in started:
        with process:
            process.communicate(timeout=200)
        assert process.returncode == 0
    cache = FeatureCache.open(tmp_path / "f")
    assert all(cache.offsets(i) for i in cache.shards)
    assert not list(cache.path.glob("*.lock")) and not list(cache.path.glob(".fledge-new*"))


def test_another_run_in_the_same_directory_is_refused(fledge: Fledge, made: Path, tmp_path: Path) -> None:
    assert fledge(*write_words(made, tmp_path / "f")).code == 0
    before = {f: (tmp_path / "f" / f).stat().st_mtime_ns for f in listing(tmp_path / "f")}
    for more, what in (
        (("--precision", "fp8"), "another precision (float32, not fp8)"),
        (("--data", f"{made / 'chats.jsonl'}@0.5"), "another data"),
        (("--aux-layers", "1,2,3"), "another layers"),
    ):
        ran = fledge(*write_words(made, tmp_path / "f", *more))
        assert ran.code == 2 and what in ran.err and ran.err.count("\n") < 6, ran.err
    assert before == {f: (tmp_path / "f" / f).stat().st_mtime_ns for f in listing(tmp_path / "f")}


def test_features_of_another_target_are_refused(fledge: Fledge, made: Path, tmp_path: Path) -> None:
    assert fledge(*write_words(made, tmp_path / "f")).code == 0
    other = tiny_target_directory(tmp_path, seed=5)
    ran = fledge("train", "--features", tmp_path / "f", "--target", other, "--out", tmp_path / "run", *TRAIN)
    assert ran.code == 2 and "are of another target than" in ran.err
    fewer = tiny_target_directory(tmp_path / "fewer", num_hidden_layers=3)
    ran = fledge("train", "--features", tmp_path / "f", "--target", fewer, "--out", tmp_path / "run", *TRAIN)
    assert ran.code == 2 and "are of another target than" in ran.err, "before the layers, which it does not have"
    words = write_words(made, tmp_path / "f")
    words[2] = other
    ran = fledge(*words)
    assert ran.code == 2 and "holds features of another target; choose another --out" in ran.err


def test_a_deleted_and_a_truncated_shard_are_written_again(fledge: Fledge, made: Path, tmp_path: Path) -> None:
    assert fledge(*write_words(made, tmp_path / "f")).code == 0
    file = tmp_path / "f" / "shard-00001.safetensors"
    content = file.read_bytes()
    file.write_bytes(content[:-10])
    ran = fledge("train", "--features", tmp_path / "f", "--out", tmp_path / "run", *TRAIN)
    assert ran.code == 2 and f"{file} has {len(content) - 10:,} bytes instead of {len(content):,}" in ran.err
    again = fledge(*write_words(made, tmp_path / "f"))
    assert again.code == 2 and f"{file} has {len(content) - 10:,} bytes" in again.err and "complete" not in again.err
    assert "delete it and run the same `fledge features` command again" in " ".join(again.err.split())
    file.unlink()
    ran = fledge("train", "--features", tmp_path / "f", "--out", tmp_path / "run", *TRAIN)
    assert ran.code == 2 and f"{file} is missing" in ran.err and not (tmp_path / "run").exists()
    assert fledge(*write_words(made, tmp_path / "f")).code == 0
    assert file.read_bytes() == content


def test_a_flipped_byte_is_found(fledge: Fledge, made: Path, tmp_path: Path) -> None:
    """By --verify, which training does not wait for; the shard is written again with the same bytes."""
    assert fledge(*write_words(made, tmp_path / "f", "--precision", "fp8")).code == 0
    ran = fledge("features", "--verify", tmp_path / "f")
    assert ran.code == 0 and "shards are as they were written" in ran.err
    file = tmp_path / "f" / "shard-00001.safetensors"
    whole, tensors = file.read_bytes(), load_file(file)
    assert {name: x.dtype for name, x in tensors.items()} == {
        "layers": torch.float8_e4m3fn, "scales": torch.float32, "last": torch.bfloat16
    }  # fmt: skip
    for at in (len(whole) // 3, len(whole) - 1):
        damaged = bytearray(whole)
        damaged[at] ^= 16
        file.write_bytes(damaged)
        ran = fledge("features", "--verify", tmp_path / "f")
        assert ran.code == 2, ran.err
        assert f"{file} is damaged: its content is not what was written; delete it and run the same" in ran.err
    (tmp_path / "f" / "shard-00000.safetensors").unlink()
    ran = fledge("features", "--verify", tmp_path / "f")
    assert ran.code == 2 and "shard-00000.safetensors is missing" in ran.err and "(2 of " in ran.err
    file.unlink()
    assert fledge(*write_words(made, tmp_path / "f", "--precision", "fp8")).code == 0
    assert file.read_bytes() == whole


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ((), "give --target and --out, or --verify DIRECTORY"),
        (("--target", "t"), "give --out, or --verify"),
        (("--verify", "f", "--out", "g"), "--out has no effect with --verify, which only reads f; leave --out out"),
        (("--verify", "nothing"), "nothing holds no features"),
    ],
)
def test_what_is_to_be_verified(words: tuple[str, ...], message: str, fledge: Fledge) -> None:
    ran = fledge("features", *words)
    assert ran.code == 2 and message in ran.err


def test_a_shard_that_is_deleted_during_training(fledge: Fledge, made: Path, tmp_path: Path, monkeypatch) -> None:
    """Training ends with one sentence; after the shard was written again, it continues from its checkpoint."""
    from fledge.train import trainer

    assert fledge(*write_words(made, tmp_path / "f")).code == 0
    words = "train", "--features", tmp_path / "f", "--out", tmp_path / "run", *TRAIN, "--save-every", 1
    assert fledge(*words[:4], tmp_path / "unbroken", *words[5:]).code == 0
    step, saved = trainer.optimizer_step, tmp_path / "saved"

    def deleting(*given):
        if (tmp_path / "run" / "checkpoint").exists() and not saved.exists():
            shutil.move(tmp_path / "f", saved)
        return step(*given)

    monkeypatch.setattr(trainer, "optimizer_step", deleting)
    ran = fledge(*words)
    assert ran.code == 2 and re.search(r"shard-\d+.safetensors is missing; run the same", ran.err), ran.err
    shutil.copytree(saved, tmp_path / "f", dirs_exist_ok=True)
    assert fledge("train", "--resume", tmp_path / "run").code == 0
    assert losses(tmp_path / "run") == losses(tmp_path / "unbroken")


def test_the_budget_is_checked_before_the_first_byte(fledge: Fledge, made: Path, tmp_path: Path, monkeypatch) -> None:
    ran = fledge(*write_words(made, tmp_path / "f", "--disk-budget", "100KB"))
    assert ran.code == 2 and "more than the disk budget of 100.00 KB" in ran.err and not (tmp_path / "f").exists()
    ran = fledge(*write_words(made, tmp_path / "f", "--disk-budget", "100"))
    assert ran.code == 2 and "--disk-budget 100 is not a size such as 500GB" in ran.err
    full = shutil._ntuple_diskusage(10**6, 10**6 - 50_000, 50_000)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: full)
    for more in ((), ("--disk-budget", "1GB")):
        ran = fledge(*write_words(made, tmp_path / "f", *more))
        assert ran.code == 2 and "the features take" in ran.err and not (tmp_path / "f").exists()


@pytest.mark.parametrize("more", [(), ("--disk-budget", "1GB")])
def test_unwritten_documents_count_as_space_to_be_used(
    more, fledge: Fledge, made: Path, tmp_path: Path, monkeypatch
) -> None:
    """A disk with space for the shards, but not for the documents beside them."""
    assert fledge(*write_words(made, tmp_path / "whole")).code == 0
    total, _ = disk_space(FeatureCache.open(tmp_path / "whole"))
    free = total - 1 if more else int((total - 1) / (1 - RESERVED_SHARE))
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(2 * free, free, free))
    ran = fledge(*write_words(made, tmp_path / "f", *more))
    assert ran.code == 2 and "the features take" in ran.err and not (tmp_path / "f").exists(), ran.err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--precision", "fp4"), "--precision fp4 is not one of float32, bfloat16, float16, fp8"),
        (("--precision", "float16"), "--precision float16 has a smaller range than the target's float32"),
        (("--aux-layers", "2,99"), "layers [2, 99] were requested, but the target has layers 0..8"),
        (("--max-length", 9999), "--max-length 9999 is more than the target's context"),
    ],
)
def test_wrong_options_write_nothing(words, message: str, fledge: Fledge, made: Path, tmp_path: Path) -> None:
    ran = fledge(*write_words(made, tmp_path / "f", *words))
    assert ran.code == 2 and message in ran.err and not (tmp_path / "f").exists(), ran.err


def test_a_full_disk_keeps_the_finished_shards(fledge: Fledge, made: Path, tmp_path: Path, monkeypatch) -> None:
    from fledge.states import cache

    replace, out = cache.replace_parts, tmp_path / "f"

    def full(file, parts, temporary):
        def broken():
            yield parts[0]
            raise OSError(28, "No space left on device")

        replace(file, broken() if file.name == "shard-00002.safetensors" else parts, temporary)

    with monkeypatch.context() as patch:
        patch.setattr(cache, "replace_parts", full)
        ran = fledge(*write_words(made, out))
    assert ran.code == 2 and "no space to write" in ran.err and "the finished shards are kept" in ran.err
    kept = {f.name: f.stat().st_ino for f in out.glob("shard*")}
    assert {"shard-00000.safetensors", "shard-00001.safetensors"} <= kept.keys()
    assert fledge(*write_words(made, out)).code == 0
    assert kept.items() <= {f.name: f.stat().st_ino for f in out.glob("shard*")}.items()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--data", "d"), "--data has no effect with --features"),
        (("--max-length", 64), "--max-length has no effect with --features"),
        (("--row-length", 32), "--row-length 32 is less than 64, the maximum document length of"),
        (("--aux-layers", "1,2,3"), "and the draft also reads [1, 3]"),
        (("--dtype", "float64"), None),
    ],
)
def test_options_with_features(words, message, fledge: Fledge, made: Path, tmp_path: Path) -> None:
    out = made / "features"
    if not out.exists():
        assert fledge(*write_words(made, out)).code == 0
    ran = fledge("train", "--features", out, "--out", tmp_path / "run", "--steps", 1, "--depth", 2, *words)
    assert ran.code == (0 if message is None else 2) and (message is None or message in ran.err), ran.err


def test_other_files_are_left_alone(fledge: Fledge, made: Path, tmp_path: Path) -> None:
    (tmp_path / "documents.safetensors").write_text("a killed writer's")
    (tmp_path / "notes.txt").write_text("mine")
    ran = fledge(*write_words(made, tmp_path))
    assert ran.code == 2 and "holds other files, such as notes.txt; choose another --out" in ran.err
    (tmp_path / "notes.txt").unlink()
    assert fledge(*write_words(made, tmp_path)).code == 0
    (mine := tmp_path / "mine").mkdir()
    (mine / "held-out.jsonl").write_text("mine")
    ran = fledge(*write_words(made, mine))
    assert ran.code == 2 and "holds other files, such as held-out.jsonl" in ran.err


def test_a_directory_without_features(fledge: Fledge, tmp_path: Path) -> None:
    ran = fledge("train", "--features", tmp_path, "--out", tmp_path / "run")
    assert ran.code == 2 and "holds no features (no manifest.json); write them with `fledge features`" in ran.err


def test_held_out_records_of_the_features_measure_tau(fledge: Fledge, made: Path, tmp_path: Path) -> None:
    """Records are held out when features are written, and decoded if --eval-every asks for it."""
    chats = tiny_chats(tmp_path / "chats.jsonl", 170)
    words = "--target", made / "target", "--data", chats, "--out", tmp_path / "f", *WRITE
    wrote = fledge("features", *words)
    assert wrote.code == 0 and "16 of 170 records are held out" in wrote.err
    assert len((tmp_path / "f" / "held-out.jsonl").read_text().splitlines()) == 16
    ran = fledge(
        "train", "--features", tmp_path / "f", "--out", tmp_path / "run", *TRAIN, "--eval-every", 5, "--eval-tokens", 4
    )
    assert ran.code == 0 and metrics_of(tmp_path / "run")[-1]["eval_tau"] >= 1, ran.err
    ran = fledge("train", "--features", tmp_path / "f", "--out", tmp_path / "quick", *TRAIN)
    assert ran.code == 0 and "τ is not measured by decoding" in ran.err
    assert "eval_tau" not in metrics_of(tmp_path / "quick")[-1]
