"""Tokenized data: however it is made, in one process or several, read again from the cache, or after a writer was
killed, it is bit for bit the data of its definition."""

from __future__ import annotations

import errno
import json
import os
import pickle
import random
import re
import shutil
import signal
import subprocess
import time
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import pytest
import torch

from fledge.data import documents, token_cache, tokenize
from fledge.data.documents import Document, DocumentTable, fingerprint, windows
from fledge.data.pack import Rows, pack
from fledge.data.read import read_records
from fledge.data.record import Record
from fledge.data.spans import training_documents
from fledge.data.template import ChatTemplate
from fledge.data.token_cache import DataRequest, TrainingData, load_data
from fledge.io.files import cache_directory
from fledge.train.setup.draft import choose_mask_token, choose_vocabulary, occurs
from support.chats import tiny_chats
from support.commands import python
from support.files import write_rows
from support.runs import recipe_of
from support.targets import CHATML, tiny_target_directory, tiny_tokenizer

STOP = 1  # <|im_end|>


@dataclass
class Job:
    """A call of `load_data`: the messages, and the number of records that were tokenized."""

    cache: Path
    said: list[str] = field(default_factory=list)
    tokenized: int = 0

    def load(self, request: DataRequest, workers: int | None = 1) -> TrainingData:
        return load_data(request, self.cache, workers, self.said.append, self.count)

    @contextmanager
    def count(self, label: str, total: int | None):
        def advance() -> None:
            self.tokenized += label == "reading chats"

        yield advance


def asked(*sources: object, **changes) -> DataRequest:
    template = ChatTemplate(tiny_tokenizer(), [STOP])
    request = DataRequest(tuple(map(str, sources)), 3, template, 48, skip_bad=False, hold_out=0)
    return replace(request, **changes)


def many_chats(directory: Path) -> DataRequest:
    """Data with all that can happen: two sources with shares, long chats, equal chats in both, records that cannot be
    read, records that the template refuses, and records to hold out."""
    file = tiny_chats(directory / "a.jsonl", 300)
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    rows[7] = {"messages": [{"role": "user", "content": 5}]}
    rows[11] = {"messages": [{"role": "user", "content": "no answer"}]}
    rows[12]["messages"][1]["content"] = "a young bird " * 60
    rows[20] = {"text": "The young bird can fly. " * 20}
    write_rows(file, rows)
    write_rows(directory / "b.jsonl", rows[100:150] + rows[10:13])
    return asked(f"{file}@1.5", f"{directory / 'b.jsonl'}@0.5", file, skip_bad=True, hold_out=16)


def by_definition(request: DataRequest) -> tuple[list[Document], list[Record], int]:
    """The documents, the held-out records and the number of refused records, with every record in a list."""
    refused: list[str] = []
    records = read_records(list(request.sources), request.seed, refused.append if request.skip_bad else None)
    held_out = []
    if request.hold_out:
        chosen = set(random.Random(request.seed).sample(range(len(records)), request.hold_out))
        held_out = [r for i, r in enumerate(records) if i in chosen]
        records = [r for r in records if r.content_key() not in {h.content_key() for h in held_out}]
    made = []
    for record in records:
        try:
            made += [w for d in training_documents(request.template, record) for w in windows(d, request.max_length)]
        except ValueError as e:
            refused.append(str(e))
    return made, held_out, len(refused)


def assert_same(found: DocumentTable, expected: list[Document]) -> None:
    assert len(found) == len(expected)
    for a, b in zip(found, expected, strict=True):
        assert a.tokens.dtype == a.spans.dtype == np.int32
        assert np.array_equal(a.tokens, b.tokens) and np.array_equal(a.spans, b.spans)
    assert found.lengths.tolist() == [len(d.tokens) for d in expected]
    assert found.supervised.tolist() == [int((d.spans >= 0).sum()) for d in expected]
    assert fingerprint(found) == fingerprint(expected)


# -- the same data, however it is made --------------------------------------------------------------------------------


def test_serial_parallel_and_cached_data_are_that_of_the_definition(tmp_path: Path) -> None:
    request = many_chats(tmp_path)
    expected, held_out, refused = by_definition(request)
    jobs = {name: Job(tmp_path / name) for name in ("serial", "parallel")}
    found = {name: job.load(request, workers) for (name, job), workers in zip(jobs.items(), (1, 2), strict=True)}
    jobs["cached"] = Job(tmp_path / "serial")
    found["cached"] = jobs["cached"].load(request)
    for name, data in found.items():
        assert_same(data.documents, expected)
        assert data.held_out == held_out, name
        assert (data.report.refused, data.report.documents) == (refused, len(expected)), name
        assert data.report == found["serial"].report and data.records == 300 - 1 + 150 + 26 + 299, name
    assert "a.jsonl, line 8, message 1: its content is 5" in str(found["cached"].report)
    assert jobs["serial"].tokenized == jobs["parallel"].tokenized > jobs["cached"].tokenized == 0
    assert "is kept for later runs in" in jobs["serial"].said[0] and str(tmp_path / "serial") in jobs["serial"].said[0]
    assert "is read from" in jobs["cached"].said[0] and len(jobs["cached"].said) == 1


def test_the_vocabulary_of_cached_documents_is_that_of_lists(tmp_path: Path) -> None:
    """A table of documents gives the vocabulary, its coverage and the mask token that a list gives."""
    request = many_chats(tmp_path)
    table, listed = Job(tmp_path / "c").load(request).documents, by_definition(request)[0]
    for size in (5, 100, 400):
        ids, coverage = choose_vocabulary(listed, 400, size, keep=[STOP])
        found, covered = choose_vocabulary(table, 400, size, keep=[STOP])
        assert torch.equal(found, ids) and covered == coverage
    assert choose_mask_token(table, 400, tiny_tokenizer()) == choose_mask_token(listed, 400, tiny_tokenizer())
    assert [occurs(i, table) for i in range(401)] == [any(i in d.tokens for d in listed) for i in range(401)]
    with pytest.raises(ValueError, match="but the target's vocabulary ends at 9"):
        choose_vocabulary(table, 10, 5)


def test_rows_of_cached_documents_are_those_of_lists(tmp_path: Path) -> None:
    request = many_chats(tmp_path)
    expected = Rows(by_definition(request)[0], 64, seed=5)
    found = Rows(Job(tmp_path / "c").load(request).documents, 64, seed=5)
    assert found.epoch(0) == expected.epoch(0) != found.epoch(1) and found.longest() == expected.longest()
    for address in ((0, 0), (0, 7), (1, 3)):
        assert torch.equal(found[address].token_T, expected[address].token_T)
        assert torch.equal(found[address].span_T, expected[address].span_T)
        assert found.tokens(address) == expected.tokens(address)
    for a, b in zip(found.heaviest(), expected.heaviest(), strict=True):
        assert torch.equal(a.token_T, b.token_T)


def packed_by_definition(lengths: list[int], row_length: int, seed: int, open_rows: int) -> list[list[int]]:
    """Best fit with a list of the open rows, in the order of their last change."""
    order = list(range(len(lengths)))
    random.Random(seed).shuffle(order)
    done, rows = [], []
    for i in order:
        fits = [j for j, (free, _) in enumerate(rows) if free >= lengths[i]]
        if fits:
            free, indices = rows.pop(min(fits, key=lambda j: rows[j][0]))
        else:
            if len(rows) == open_rows:
                done.append(rows.pop(min(range(len(rows)), key=lambda j: rows[j][0]))[1])
            free, indices = row_length, []
        rows.append((free - lengths[i], [*indices, i]))
    return done + [indices for _, indices in rows]


def table_of(lengths: np.ndarray) -> DocumentTable:
    return DocumentTable(lengths[:0], lengths[:0], lengths, lengths)


@pytest.mark.parametrize("open_rows", [1, 2, 8, 64])
def test_rows_are_packed_by_best_fit(open_rows: int) -> None:
    for seed in range(20):
        lengths = np.random.default_rng(seed).integers(1, 50, 300 * (seed > 0))
        expected = packed_by_definition(lengths.tolist(), 50, seed, open_rows)
        found = pack(table_of(lengths), 50, seed, open_rows)
        assert found == expected


def test_packing_many_documents_takes_seconds() -> None:
    lengths = np.random.default_rng(0).integers(200, 800, 200_000)
    start = time.process_time()
    assert len(pack(table_of(lengths), 4096, seed=0)) < 1.02 * lengths.sum() / 4096
    assert time.process_time() - start < 10  # half a second on an idle machine


# -- when the cache is used -------------------------------------------------------------------------------------------


def test_only_what_decides_the_data_makes_it_anew(tmp_path: Path) -> None:
    chats, job = tiny_chats(tmp_path / "chats.jsonl", 40), Job(tmp_path / "cache")

    def makes(request: DataRequest) -> bool:
        before = job.tokenized
        job.load(request)
        return job.tokenized > before

    request = asked(chats)
    assert makes(request) and not makes(request)
    other = ChatTemplate(tiny_tokenizer(vocab_size=300), [STOP])
    renamed = shutil.copy(chats, tmp_path / "renamed.jsonl")
    same = [asked(renamed), asked(chats, seed=4)]  # nothing is drawn, so the seed does not matter
    new = [
        asked(chats, max_length=32), asked(chats, skip_bad=True), asked(f"{chats}@2"), asked(f"{chats}@0.5"),
        asked(f"{chats}@0.5", seed=4), asked(chats, chats), asked(chats, hold_out=4), asked(chats, hold_out=4, seed=4),
        asked(chats, template=other), asked(chats, template=ChatTemplate(tiny_tokenizer(), [STOP, 2])),
        asked(chats, template=ChatTemplate(tiny_tokenizer(CHATML + "{# #}"), [STOP])),
        asked(chats, template=ChatTemplate(tiny_tokenizer(), [STOP], {"enable_thinking": False})),
    ]  # fmt: skip
    assert not any(map(makes, same))
    assert all([makes(r) for r in new]) and not any(map(makes, new))
    text = chats.read_text()
    chats.write_text(text.replace("bird", "wing", 1))  # as many bytes, and within one tick of most clocks
    assert makes(request)
    chats.write_text(text)
    assert not makes(request)


def test_a_data_set_of_the_hub_is_known_by_its_fingerprint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets

    texts = ["the young bird", "tries its wings", "until it can fly"]
    sets = {n: datasets.Dataset.from_dict({"text": texts[:n]}) for n in (2, 3)}
    monkeypatch.setattr(datasets, "load_dataset", lambda name, split, revision, **_: sets[int(revision[1:])])
    job = Job(tmp_path)
    for revision, tokenized in ((2, 2), (3, 5), (2, 5)):
        assert len(job.load(asked(f"owner/name@r{revision}")).documents) == revision
        assert job.tokenized == tokenized


# -- damage, killed writers, several processes ------------------------------------------------------------------------


def truncate(file: Path) -> None:
    os.truncate(file, file.stat().st_size - 1)


def flip(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)


@pytest.mark.parametrize(
    ("name", "damage", "why"),
    [
        (documents.TOKENS, truncate, "the SHA-256 of tokens.bin is not the one in SHA256SUMS"),
        (documents.TOKENS, flip, "the SHA-256 of tokens.bin"),
        (documents.SPANS, flip, "the SHA-256 of spans.bin"),
        (documents.SPANS, Path.unlink, "No such file or directory"),
        (token_cache.TABLE, flip, "the SHA-256 of documents.npz"),
        (token_cache.MANIFEST, flip, "the SHA-256 of manifest.json"),
        (token_cache.SUMS, lambda f: f.write_text(""), "the SHA-256 of manifest.json"),
        (token_cache.SUMS, Path.unlink, "No such file or directory"),
    ],
)
def test_damaged_data_is_made_again(name: str, damage, why: str, tmp_path: Path) -> None:
    request, job = asked(tiny_chats(tmp_path / "chats.jsonl", 30)), Job(tmp_path / "c")
    expected = list(job.load(request).documents)
    (file,) = (tmp_path / "c" / "tokens").glob(f"*/{name}")
    damage(file)
    job.said.clear()
    assert_same(job.load(request).documents, expected)
    assert re.search(rf"the tokenized data in .* is damaged \(.*{why}.*\), so it is made again", job.said[0]), job.said
    assert "kept for later runs" in job.said[1] and job.tokenized == 60
    assert_same(job.load(request).documents, expected)
    assert job.tokenized == 60


def test_training_does_not_read_changed_tokens(tmp_path: Path, fledge) -> None:
    """Ids that the vocabulary has, in files of the right size."""
    words = ["train", "--target", tiny_target_directory(tmp_path), "--data", tiny_chats(tmp_path / "chats.jsonl", 30)]
    words += "--max-length 64 --row-length 128 --steps 1 --depth 2 --device cpu --data-cache".split()
    assert fledge(*words, tmp_path / "c", "--out", tmp_path / "a").code == 0
    (file,) = (tmp_path / "c" / "tokens").glob("*/tokens.bin")
    file.write_bytes(bytes(file.stat().st_size))
    ran = fledge(*words, tmp_path / "c", "--out", tmp_path / "b")
    assert ran.code == 0 and "is damaged (the SHA-256 of tokens.bin" in ran.err.replace("\n", " "), ran.err
    trained = [(tmp_path / run / "draft" / "model.safetensors").read_bytes() for run in "ab"]
    assert trained[0] == trained[1]


SLOW = """
import os, sys, time
from contextlib import contextmanager
from pathlib import Path
from fledge.data.template import ChatTemplate
from fledge.data.token_cache import DataRequest, load_data
from support.targets import tiny_tokenizer

chats, cache, workers, stop_at = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4])
template = ChatTemplate(tiny_tokenizer(), [1])
request = DataRequest((chats,), 3, template, 48, skip_bad=False, hold_out=0)

@contextmanager
def count(label, total):
    done = 0
    def advance():
        nonlocal done
        done += label == "reading chats"
        if done == stop_at:
            print("in the middle", flush=True)
            time.sleep(600)
    yield advance

try:
    data = load_data(request, cache, workers, lambda line: print(line, flush=True), count)
    print(len(data.documents), flush=True)
except KeyboardInterrupt:
    sys.exit(130)
"""


def children(process: subprocess.Popen) -> list[int]:
    return [int(n) for file in Path(f"/proc/{process.pid}/task").glob("*/children") for n in file.read_text().split()]


def assert_ended(processes: list[int]) -> None:
    deadline = time.monotonic() + 30
    while any(
        Path(f"/proc/{n}").exists() and "\nState:\tZ" not in Path(f"/proc/{n}/status").read_text() for n in processes
    ):
        assert time.monotonic() < deadline, "worker processes do not end"
        time.sleep(0.05)


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
def test_a_writer_that_is_stopped_leaves_nothing_that_reads_as_whole(tmp_path: Path, workers: int, number: int) -> None:
    """After Ctrl-C, and after a kill, no worker is left, and a new run makes the data."""
    chats, cache = tiny_chats(tmp_path / "chats.jsonl", 400), tmp_path / "c"
    with python(SLOW, chats, cache, workers, 200) as process:
        assert "in the middle\n" in iter(process.stdout.readline, "")
        started = children(process)
        assert len(started) == (workers if workers > 1 else 0)
        assert all(os.getpgid(n) == n for n in started), "Ctrl-C on a terminal reaches the workers"
        process.send_signal(number)
        assert process.wait(timeout=60) == (130 if number == signal.SIGINT else -number)
    assert_ended(started)
    assert not [p for p in (cache / "tokens").iterdir() if not p.name.startswith(".")]
    job = Job(cache)
    assert_same(job.load(asked(chats)).documents, by_definition(asked(chats))[0])
    assert job.tokenized == 400 and "damaged" not in " ".join(job.said)
    assert len(list((cache / "tokens").iterdir())) == 1, "what the stopped writer left is still there"


def test_processes_that_start_together_make_the_data_once(tmp_path: Path) -> None:
    chats, cache = tiny_chats(tmp_path / "chats.jsonl", 1500), tmp_path / "c"
    together = [python(SLOW, chats, cache, 1, -1) for _ in range(3)]
    said = [process.communicate(timeout=300)[0] for process in together]
    assert [process.returncode for process in together] == [0, 0, 0]
    assert sum("kept for later runs" in text for text in said) == 1, said
    assert sum("is read from" in text for text in said) == 2, said
    waited = [text for text in said if "waiting" in text]  # one that starts late finds the data made
    assert all(re.search(r"waiting, because the tokenized data in .* is in use: process \d+", t) for t in waited), said
    assert len({text.split()[-1] for text in said}) == 1


def test_data_that_was_made_while_the_lock_was_taken_is_not_made_again(tmp_path: Path, monkeypatch) -> None:
    request, job, other = asked(tiny_chats(tmp_path / "chats.jsonl", 30)), Job(tmp_path / "c"), Job(tmp_path / "c")
    lock = token_cache.exclusive_lock

    @contextmanager
    def late(*args):
        monkeypatch.setattr(token_cache, "exclusive_lock", lock)
        other.load(request)
        with lock(*args):
            yield

    monkeypatch.setattr(token_cache, "exclusive_lock", late)
    assert_same(job.load(request).documents, by_definition(request)[0])
    assert (job.tokenized, other.tokenized) == (0, 30)


# -- disks that cannot be written -------------------------------------------------------------------------------------


@pytest.mark.parametrize("writes", [0, 1, 3])
def test_a_disk_that_gets_full_stops_the_run(writes: int, tmp_path: Path, monkeypatch) -> None:
    append, done = documents.TokenStore.append, []

    def fail(store, *values) -> None:
        done.append(1)
        if len(done) > writes:
            raise OSError(errno.ENOSPC, "No space left on device")
        append(store, *values)

    monkeypatch.setattr(documents.TokenStore, "append", fail)
    with pytest.raises(OSError, match=r"no space for the tokenized data in .*; fledge train --data-cache names"):
        Job(tmp_path / "c").load(asked(tiny_chats(tmp_path / "chats.jsonl", 400)))
    assert list((tmp_path / "c" / "tokens").iterdir()) == []


def test_a_disk_that_is_full_at_the_end_stops_the_run(tmp_path: Path, monkeypatch) -> None:
    def fail(*args, **kwargs):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(np, "savez", fail)
    with pytest.raises(
        OSError, match=r"no space for the tokenized data in .*; fledge train --data-cache names another"
    ):
        Job(tmp_path / "c").load(asked(tiny_chats(tmp_path / "chats.jsonl", 20)))
    assert list((tmp_path / "c" / "tokens").iterdir()) == []


def test_a_cache_that_cannot_be_written_is_replaced_by_memory(tmp_path: Path, monkeypatch) -> None:
    import fcntl

    request = asked(tiny_chats(tmp_path / "chats.jsonl", 20))
    (tmp_path / "file").write_text("")
    job = Job(tmp_path / "file" / "cache")
    assert_same(job.load(request).documents, by_definition(request)[0])
    assert len(job.said) == 1 and "cannot be used (Not a directory): the tokens are kept in memory" in job.said[0]

    def unsupported(*args):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", unsupported)
    job = Job(tmp_path / "c")
    assert_same(job.load(request).documents, by_definition(request)[0])
    assert len(job.said) == 1 and "does not support locks" in job.said[0] and "kept in memory" in job.said[0]


def test_where_the_cache_is(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")  # which the standard says to ignore
    monkeypatch.delenv("FLEDGE_CACHE")
    assert cache_directory() == tmp_path / ".cache" / "fledge"
    monkeypatch.setenv("XDG_CACHE_HOME", "/x")
    assert cache_directory() == Path("/x/fledge")
    monkeypatch.setenv("FLEDGE_CACHE", "~/y")
    assert cache_directory() == tmp_path / "y" and cache_directory("/z") == Path("/z")


# -- errors -----------------------------------------------------------------------------------------------------------


def error(request: DataRequest, cache: Path, workers: int) -> str:
    with pytest.raises(ValueError) as raised:
        Job(cache).load(request, workers)
    assert not [p for p in (cache / "tokens").iterdir() if not p.name.startswith(".")]
    return str(raised.value)


def test_bad_records_give_the_same_sentence_from_every_number_of_workers(tmp_path: Path) -> None:
    """The first bad record in the data is the one that is named, even if a later one is found first."""
    file = tiny_chats(tmp_path / "chats.jsonl", 300)
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    rows[100]["messages"][0]["content"] = "a young bird " * 2000  # takes its worker longer than the next bad one
    for i in (120, 140, 290):
        rows[i] = {"messages": rows[i]["messages"][:1]}
    write_rows(file, rows)
    sentences = [error(asked(file), tmp_path / f"c{n}", n) for n in (1, 2)]
    assert sentences[0] == sentences[1] and "chats.jsonl, line 121 has no assistant message" in sentences[0]
    rows[295] = {"nothing": 1}
    write_rows(file, rows)
    sentences = [error(asked(file), tmp_path / f"c{n}", n) for n in (1, 2)]
    assert sentences[0] == sentences[1] and "chats.jsonl, line 296 has none of" in sentences[0]


def test_a_worker_that_ends_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ask = tokenize._Worker.ask

    def killed(worker, batch):
        worker.process.kill()
        return ask(worker, batch)

    monkeypatch.setattr(tokenize._Worker, "ask", killed)
    told = error(asked(tiny_chats(tmp_path / "chats.jsonl", 100)), tmp_path / "c", 2)
    assert "ended early (exit code -9)" in told and "--data-workers 1" in told


def test_a_worker_imports_no_torch(tmp_path: Path) -> None:
    """Torch takes seconds to import, and a worker needs it neither for its own modules nor for a tokenizer. Some
    versions of transformers import torch with a tokenizer."""
    request = asked(tiny_chats(tmp_path / "chats.jsonl", 10))
    startup = pickle.dumps(tokenize.Settings(request.template, request.max_length, skip_bad=False))
    (tmp_path / "asked").write_bytes(startup + pickle.dumps(read_records(list(request.sources))))
    code = """
import pickle, sys
from fledge.data.tokenize import tokenize
with open(sys.argv[1], "rb") as f:
    settings, records = pickle.load(f), pickle.load(f)
print(tokenize(records, settings).records, "torch" in sys.modules)
"""
    alone = "import sys, transformers; transformers.PreTrainedTokenizerFast; print(10, 'torch' in sys.modules)"
    with python(code, tmp_path / "asked") as process, python(alone) as transformers:
        found, expected = (p.communicate(timeout=120)[0].split() for p in (process, transformers))
        assert found == expected


def test_a_tokenizer_that_cannot_be_sent_is_refused(tmp_path: Path) -> None:
    template = ChatTemplate(tiny_tokenizer(), [STOP])
    template.later = lambda: None
    told = error(asked(tiny_chats(tmp_path / "chats.jsonl", 10), template=template), tmp_path / "c", 2)
    assert "the tokenizer cannot be sent to other processes" in told and "--data-workers 1" in told


def test_a_file_that_changes_meanwhile_is_refused(tmp_path: Path) -> None:
    file = tiny_chats(tmp_path / "chats.jsonl", 100)

    class Job2(Job):
        @contextmanager
        def count(self, label, total):
            with file.open("a") as f:
                f.write("\n")
            yield lambda: None

    with pytest.raises(ValueError, match=r"chats\.jsonl changed while it was read"):
        Job2(tmp_path / "c").load(asked(file))
    assert list((tmp_path / "c" / "tokens").iterdir()) == []


def test_small_data_starts_no_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokenize, "_cores", lambda: 64)
    assert [tokenize.default_workers(n) for n in (0, 9_999, 10_000, 20_000, 10**6)] == [1, 1, 2, 4, 32]
    monkeypatch.setattr(tokenize, "_cores", lambda: 2)
    assert tokenize.default_workers(10**6) == 2


def test_fledge_train_keeps_its_data_where_it_is_told(fledge, tmp_path: Path, monkeypatch) -> None:
    """The second run reads what the first has made, and so does a resumed run, from any directory."""
    target, chats = tiny_target_directory(tmp_path), tiny_chats(tmp_path / "chats.jsonl", 40)
    monkeypatch.chdir(tmp_path)
    words = "--target", target, "--data", chats, "--data-cache", "kept", "--data-workers", 2
    words = *words, *"--max-length 64 --row-length 128 --steps 2 --depth 2 --draft-vocab 200 --device cpu".split()
    first, second = (fledge("train", *words, "--out", tmp_path / name) for name in ("a", "b"))
    assert first.code == second.code == 0, first.err + second.err
    assert f"is kept for later runs in {tmp_path}/kept/tokens/" in first.err.replace("\n", "")
    assert f"is read from {tmp_path}/kept/tokens/" in second.err and "reading chats" not in second.err
    settled = [recipe_of(tmp_path / name)["settled"] for name in ("a", "b")]
    assert settled[0] == settled[1] and recipe_of(tmp_path / "a")["data_cache"] == str(tmp_path / "kept")
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    again = fledge("train", "--resume", tmp_path / "a")
    assert again.code == 0 and "is read from" in again.err and not list(Path().iterdir()), again.err
