"""Features on disk: what is stored, its size, how it is written, and that training reads what the target computed."""

from __future__ import annotations

import json
import os
import shutil
import threading
import time
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fledge.data.documents import Document
from fledge.data.pack import Rows
from fledge.io.display import format_bytes
from fledge.io.files import exclusive_lock
from fledge.methods import CHOICES
from fledge.states import writer as writer_module
from fledge.states.cache import FeatureCache
from fledge.states.layout import (
    FP8_MAX,
    HEADER_BYTES,
    PRECISIONS,
    Layout,
    Sizes,
    decode_layers,
    encode_layers,
    split_shards,
    teacher_tokens,
)
from fledge.states.source import DiskFeatures
from fledge.states.writer import check_space, disk_space, parse_bytes, shard_bytes
from fledge.targets.compatibility import layers_of
from fledge.targets.source import LiveFeatures
from fledge.targets.transformers import TransformersTarget
from fledge.train import trainer
from fledge.train.objective import ttt
from fledge.train.plan import DropTokens, teacher_rows
from fledge.train.row_pass import Objective
from fledge.train.trainer import Run, with_features
from fledge.types import Packed
from support.features import RoundedFeatures, new_cache, writer_of
from support.rows import document, layouts, row_of
from support.targets import P_EAGLE, tiny_draft

LAYERS = (2, 4, 5)
DOCUMENTS = [document(24 + i, (4, 12), (14, 22 + i), seed=i) for i in range(12)]
DRAFTS = {
    "eagle3": {},
    "eagle3.1": dict(fc_norm=True, norm_output=True),
    "peagle": P_EAGLE,
    "eagle1": dict(method="eagle1"),
}
DAMAGE = [
    {"format": 2}, {"shards": [[0, 5]]}, {"shards": [[0, 12], [12, 12]]}, {"shards": [3]}, {"precision": "fp4"},
    {"tokens": "x"}, {"x": 1}, {"template_kwargs": {"messages": []}}, {"layers": [None]},
]  # fmt: skip


def layout_of(target: TransformersTarget, precision: str = "float32", **options) -> Layout:
    values = dict(layers=LAYERS, width=target.embedding.shape[1], precision=precision, all_last=False)
    return Layout(**values | options)


@pytest.fixture(scope="module")
def live(target: TransformersTarget) -> LiveFeatures:
    return LiveFeatures(target, LAYERS)


def disk_source(cache: FeatureCache, live: LiveFeatures, layers: tuple[int, ...] = LAYERS) -> DiskFeatures:
    return DiskFeatures(cache, layers, live.logits, torch.device("cpu"), torch.float32)


# -- what is stored -----------------------------------------------------------------------------------------------


@given(layouts(), st.integers(1, 6))
def test_teacher_tokens_are_those_of_all_slots_and_steps(layout: tuple[list[Document], int], steps: int) -> None:
    documents, filler = layout
    row = row_of(documents, filler)
    needed, _ = teacher_rows(row.live(steps), row.token_T.numel())
    starts = [a for a, _ in row.without_filler()]
    stored = [teacher_tokens(d) + a for d, a in zip(documents, starts, strict=True)]
    assert needed.tolist() == torch.cat(stored).tolist()


@pytest.mark.parametrize("precision", PRECISIONS)
def test_rounding_of_layers(precision: str) -> None:
    """Each state is the nearest that its format has, within the format's relative precision."""
    generator = torch.Generator().manual_seed(0)
    states = torch.randn(50, 3, 64, generator=generator) * torch.logspace(-3, 3, 50)[:, None, None]
    states[0, 0], states[1, 1, 5] = 0, 1e4
    back = torch.empty_like(states)
    kept, scales = encode_layers(states, PRECISIONS[precision])
    decode_layers(kept, scales, back)
    relative = {"float32": 0, "bfloat16": 2**-8, "float16": 2**-11, "fp8": 2**-4}[precision]
    smallest = states.abs().amax(-1, keepdim=True) / FP8_MAX * 2**-10 if precision == "fp8" else 2**-25
    assert bool(((back - states).abs() <= 1.01 * (relative * states.abs() + smallest)).all())
    again = torch.empty_like(states)
    decode_layers(*encode_layers(back, PRECISIONS[precision]), again)
    assert precision == "fp8" or torch.equal(again, back)
    assert (scales is not None) == (precision == "fp8") and torch.equal(back[0, 0], torch.zeros(64))


def test_fp8_keeps_the_largest_state_of_each_token_and_layer() -> None:
    states = torch.randn(20, 2, 16, generator=torch.Generator().manual_seed(1)) * 1e-3
    back = torch.empty_like(states)
    decode_layers(*encode_layers(states, PRECISIONS["fp8"]), back)
    largest = states.abs().argmax(-1, keepdim=True)
    assert torch.allclose(back.gather(-1, largest), states.gather(-1, largest), rtol=1e-6, atol=0)


def test_bytes_a_token_of_an_8b_target() -> None:
    """With fp8, hidden size 4,096 and three layers: at most 20,700 bytes a supervised token, and 14,600 bytes a token
    if a quarter is supervised."""
    layout = Layout((2, 16, 29), 4096, "fp8", all_last=False)
    for share, most in ((1.0, 20_700), (0.25, 14_600)):
        supervised = int(2048 * share)
        documents = [document(2048, (2048 - supervised, 2048), seed=i) for i in range(4)]
        sizes = Sizes.of(documents, layout)
        total = HEADER_BYTES + layout.bytes(*sizes.total(0, 4)) + 8 * 4 * 2048
        assert 0.95 * most < total / (4 * 2048) <= most


def test_shards_are_consecutive_and_of_limited_size(target) -> None:
    layout = layout_of(target)
    sizes = Sizes.of(DOCUMENTS, layout)
    for limit in (1, 30_000, 10**9):
        shards = split_shards(sizes, layout, limit)
        assert [a for a, _ in shards] == [0, *(b for _, b in shards[:-1])] and shards[-1][1] == len(DOCUMENTS)
        big = [s for s in shards if layout.bytes(sum(sizes.tokens[slice(*s)]), sum(sizes.last[slice(*s)])) > limit]
        assert all(b - a == 1 for a, b in big)


# -- what training reads --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("precision", ["float32", "bfloat16", "fp8"])
@pytest.mark.parametrize("name", DRAFTS)
def test_training_equals_training_on_the_rounded_features(name: str, precision: str, target, live, tmp_path) -> None:
    """Loss and gradients are bit for bit those of the target's own features, rounded, in memory."""
    cache = new_cache(tmp_path / "cache", DOCUMENTS, layout_of(target, precision, all_last=name == "eagle1"))
    writer_of(cache, live).write()
    draft = tiny_draft(target, draft_vocab_size=None if name == "eagle1" else 200, **layers_for(name))
    layers = layers_of(draft.config, target)
    disk, memory = disk_source(cache, live, layers), RoundedFeatures(cache, live)
    fixed = CHOICES[name].method.trained_depth
    objective = Objective(fixed or 3, drop=DropTokens(0.8, 0.2) if name == "peagle" else None)
    rows = Rows(DOCUMENTS, 90, seed=0)
    for i, row in enumerate(disk.ahead(iter([rows[0, i] for i in range(len(rows.epoch(0)))]))):
        found = [loss_of(draft, row, source, objective) for source in (disk, memory)]
        assert found[0][0] == found[1][0] != 0, i
        assert all(torch.equal(a, b) for a, b in zip(found[0][1], found[1][1], strict=True))


def layers_for(name: str) -> dict:
    options = DRAFTS[name]
    return options if name == "eagle1" else dict(options, aux_layers=LAYERS)


def loss_of(draft, row: Packed, source, objective: Objective) -> tuple[float, list[torch.Tensor]]:
    sums = ttt(draft, row, source.features(row), source.logits, objective, key="0")
    gradients = [p.grad.clone() for p in draft.parameters() if p.grad is not None]
    draft.zero_grad()
    return float(sums.loss), gradients


def test_float32_features_are_those_that_the_target_computes(target, live, tmp_path) -> None:
    cache = new_cache(tmp_path / "cache", DOCUMENTS, layout_of(target, all_last=True))
    writer_of(cache, live).write()
    row = Rows(DOCUMENTS, 90, seed=1)[0, 0]
    stored, computed = disk_source(cache, live).features(row), live.features(row)
    torch.testing.assert_close(stored.aux_TAD, computed.aux_TAD, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(stored.last_TD, computed.last_TD, rtol=1e-4, atol=1e-4)


@pytest.mark.gpu
@pytest.mark.parametrize("precision", ["float32", "bfloat16", "fp8"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_features_on_a_gpu(precision: str, dtype: torch.dtype, target, live, tmp_path) -> None:
    """Read ahead, uploaded on a side stream and decoded there, they are bit for bit those on the CPU."""
    cache = new_cache(tmp_path / "cache", DOCUMENTS, layout_of(target, precision, all_last=True))
    writer_of(cache, live).write()
    rows = Rows(DOCUMENTS, 90, seed=0)
    wanted = [rows[0, i] for i in range(len(rows.epoch(0)))]
    here = DiskFeatures(cache, LAYERS, live.logits, torch.device("cpu"), dtype)
    there = DiskFeatures(cache, LAYERS, live.logits, torch.device("cuda"), dtype)
    given = with_features(there.ahead(iter(wanted)), there.features, there.device, prefetch=True)
    for row, (found_row, found) in zip(wanted, given, strict=True):
        expected = here.features(row)
        assert found_row is row and torch.equal(found.aux_TAD.cpu(), expected.aux_TAD)
        assert torch.equal(found.last_TD.cpu(), expected.last_TD)


@pytest.mark.gpu
def test_host_memory_is_not_overwritten_before_it_is_copied(target, live, tmp_path) -> None:
    """On a GPU that is behind: the copy of a row waits for the work of the row before."""
    cache = new_cache(tmp_path / "cache", DOCUMENTS, layout_of(target, "float32"))
    writer_of(cache, live).write()
    rows = Rows(DOCUMENTS, 90, seed=0)
    wanted = [rows[epoch, i] for epoch in range(4) for i in range(len(rows.epoch(epoch)))]
    here, there = (DiskFeatures(cache, LAYERS, live.logits, torch.device(d), torch.float32) for d in ("cpu", "cuda"))
    sums = []
    for row, found in with_features(there.ahead(iter(wanted)), there.features, there.device, prefetch=True):
        torch.cuda._sleep(100_000_000)
        sums.append(found.aux_TAD.double().sum())
        del row, found
    expected = [here.features(row).aux_TAD.double().sum() for row in wanted]
    assert torch.allclose(torch.stack(sums).cpu(), torch.stack(expected), rtol=1e-9)


@pytest.mark.gpu
def test_writing_on_a_gpu_rounds_as_on_a_cpu() -> None:
    generator = torch.Generator().manual_seed(0)
    states = torch.randn(100, 3, 64, generator=generator) * torch.logspace(-3, 3, 100)[:, None, None]
    for precision in PRECISIONS.values():
        for dtype in (torch.float32, torch.bfloat16):
            here, there = (encode_layers(x, precision) for x in (states.to(dtype), states.to("cuda", dtype)))
            for a, b in zip(here, there, strict=True):
                assert (a is None and b is None) or torch.equal(a.float(), b.cpu().float())


def test_a_draft_reads_some_of_the_stored_layers(target, live, tmp_path) -> None:
    cache = new_cache(tmp_path / "cache", DOCUMENTS, layout_of(target, "fp8"))
    writer_of(cache, live).write()
    row = Rows(DOCUMENTS, 90, seed=1)[0, 0]
    whole, some = (disk_source(cache, live, layers).features(row) for layers in (LAYERS, LAYERS[1:]))
    assert torch.equal(whole.aux_TAD[:, 1:], some.aux_TAD) and torch.equal(whole.last_TD, some.last_TD)
    with pytest.raises(ValueError, match=r"the draft also reads \[7\]"):
        disk_source(cache, live, (2, 4, 7))


def test_a_row_without_sources_takes_as_much_memory(target, live, tmp_path) -> None:
    """Trials of memory use change rows, and a stream has no shard at that time."""
    cache = new_cache(tmp_path / "cache", DOCUMENTS, layout_of(target))
    found = disk_source(cache, live).features(row_of(DOCUMENTS[:2], filler=9))
    assert found.aux_TAD.shape == (58, 3, 32) and found.last_TD.shape == (58, 32) and not found.aux_TAD.any()


def test_rows_are_read_ahead_in_order(target, live, tmp_path) -> None:
    cache = new_cache(tmp_path / "cache", DOCUMENTS, layout_of(target))
    writer_of(cache, live).write()
    rows = Rows(DOCUMENTS, 60, seed=0)
    source, wanted = disk_source(cache, live), [rows[0, i] for i in range(len(rows.epoch(0)))]
    read: list[int] = []
    given = source.ahead(read.append(i) or row for i, row in enumerate(wanted))
    assert next(given) is wanted[0] and read == [0, 1, 2]
    assert all(a is b for a, b in zip(given, wanted[1:], strict=True))


def test_reading_ends_when_training_fails(target, live, tmp_path, monkeypatch) -> None:
    """Also while the error, and with it the trainer's frame, is kept: no thread waits for a row to be asked for."""
    cache = new_cache(tmp_path / "cache", DOCUMENTS, layout_of(target))
    writer_of(cache, live).write()
    before = set(threading.enumerate())

    def fail(run, upcoming):
        next(upcoming)
        raise RuntimeError("broken")

    monkeypatch.setattr(trainer, "optimizer_step", fail)
    draft, rows = tiny_draft(target, aux_layers=LAYERS), Rows(DOCUMENTS, 60, seed=0)
    with pytest.raises(RuntimeError, match="broken") as kept:
        trainer.train(Run(draft, rows, disk_source(cache, live), trainer.Schedule(99, 0.1)))
    assert set(threading.enumerate()) <= before, kept


@pytest.mark.parametrize("precision", ["float32", "fp8"])
def test_rows_read_ahead_are_those_read_alone(precision: str, target, live, tmp_path) -> None:
    """Also if some rows are not asked for."""
    cache = new_cache(tmp_path / "cache", DOCUMENTS, layout_of(target, precision))
    writer_of(cache, live).write()
    rows = Rows(DOCUMENTS, 60, seed=0)
    wanted = [rows[epoch, i] for epoch in range(2) for i in range(len(rows.epoch(epoch)))]
    whole, source = disk_source(cache, live), disk_source(cache, live)
    expected = [whole.features(row) for row in wanted]
    for i, row in enumerate(source.ahead(iter(wanted))):
        if i % 3 != 1:
            found = source.features(row)
            assert torch.equal(found.aux_TAD, expected[i].aux_TAD) and torch.equal(found.last_TD, expected[i].last_TD)


# -- writing ------------------------------------------------------------------------------------------------------


def test_a_shard_has_its_name_only_when_it_is_whole(target, live, tmp_path, monkeypatch) -> None:
    """A full disk ends the writing with one sentence, keeps the finished shards, and leaves no other file."""
    cache = new_cache(tmp_path / "cache", DOCUMENTS, layout_of(target))
    flush, done = os.fsync, []

    def full(handle: int) -> None:
        done.append(handle)
        if len(done) == 3:
            raise OSError(28, "No space left on device")
        flush(handle)

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(OSError, match=r"no space to write .*shard-00002"):
            writer_of(cache, live).write()
    kept = sorted(f.name for f in cache.path.iterdir() if "shard" in f.name)
    assert kept[:2] == ["shard-00000.safetensors", "shard-00001.safetensors"]
    assert not list(cache.path.glob(".fledge-new*")) and not list(cache.path.glob("*.lock"))
    before = cache.file(0).stat()
    writer_of(cache, live).write()
    assert all(cache.is_written(i) for i in cache.shards) and cache.file(0).stat().st_ino == before.st_ino


def test_a_shard_of_another_process_is_left_to_it(target, live, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(writer_module, "POLL_SECONDS", 0.01)
    cache, said = new_cache(tmp_path / "cache", DOCUMENTS, layout_of(target)), []
    with exclusive_lock(cache.lock(1), "it"):
        thread = threading.Thread(target=writer_of(cache, live, say=said.append).write)
        thread.start()
        while not said:
            time.sleep(0.01)
        assert [cache.is_written(i) for i in cache.shards] == [i != 1 for i in cache.shards]
    thread.join(60)
    assert cache.is_written(1), "an abandoned shard is taken over"
    assert "being written by other processes" in said[0]


# -- damage -------------------------------------------------------------------------------------------------------


@pytest.fixture
def written(target, live, tmp_path) -> Iterator[FeatureCache]:
    cache = new_cache(tmp_path / "cache", DOCUMENTS, layout_of(target))
    writer_of(cache, live).write()
    yield FeatureCache.open(cache.path)


def test_damaged_shards_are_named(written: FeatureCache) -> None:
    one, other = written.file(0), written.file(1)
    content = one.read_bytes()
    others = "its tensors are others than the manifest says"
    for damaged, message in (
        (content[:-1], r"shard-00000.safetensors has [\d,]+ bytes instead of"),
        (content + b"0", "bytes instead of"),
        (content[:100], "no header of a shard"),
        (b"", "no header of a shard"),
        (other.read_bytes(), "a shard of other features"),
        (
            content.replace(b'"data_offsets":[0,', b'"data_offsets":[1,'),
            "its tensors are others than the manifest says",
        ),
        (content.replace(b"F32", b"I32", 1), others),
    ):
        one.write_bytes(damaged)
        with pytest.raises(ValueError, match=message):
            written.offsets(0)
    one.unlink()
    with pytest.raises(ValueError, match=r"shard-00000.safetensors is missing; run the same `fledge features` command"):
        written.offsets(0)


def test_a_shard_of_another_target_is_refused(written: FeatureCache, target, live, tmp_path) -> None:
    foreign = new_cache(tmp_path / "foreign", DOCUMENTS, written.layout, target_sha256="another")
    writer_of(foreign, live).write()
    shutil.copy(foreign.file(0), written.file(0))
    with pytest.raises(ValueError, match=r"shard-00000.safetensors is a shard of other features"):
        written.offsets(0)


def test_a_shard_that_shrinks_while_it_is_read(written: FeatureCache, live) -> None:
    source = disk_source(written, live)
    source.reader._offsets(0)
    os.truncate(written.file(0), 3000)
    with pytest.raises(ValueError, match=r"shard-00000.safetensors is truncated"):
        source.features(Rows(DOCUMENTS, 400, seed=0)[0, 0])


@pytest.mark.parametrize("change", DAMAGE)
def test_a_damaged_manifest_is_one_sentence(written: FeatureCache, change: dict) -> None:
    file = written.path / "manifest.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | change))
    with pytest.raises(ValueError, match=r"manifest.json cannot be read: "):
        FeatureCache.open(written.path)


def test_damaged_documents_are_one_sentence(written: FeatureCache) -> None:
    file = written.path / "documents.safetensors"
    content = bytearray(file.read_bytes())
    content[-100] ^= 1
    for damaged in (bytes(content), bytes(content[:200])):
        file.write_bytes(damaged)
        with pytest.raises(ValueError, match=r"documents.safetensors (does not hold|cannot be read)"):
            _ = FeatureCache.open(written.path).documents


# -- budget -------------------------------------------------------------------------------------------------------


def test_sizes_of_disks() -> None:
    assert parse_bytes("500GB") == 500 * 10**9 and parse_bytes("1.5 TiB") == 3 * 2**39 and parse_bytes("10kb") == 10_000
    for wrong in ("500", "GB", "-1GB", "1XB"):
        with pytest.raises(ValueError, match="is not a size such as 500GB"):
            parse_bytes(wrong)
    assert format_bytes(999) == "999 bytes" and format_bytes(1.5e12) == "1.50 TB"
    assert shard_bytes(10**15) == 512 * 2**20 and shard_bytes(1) == 2**20


def test_the_space_is_exact_and_what_does_not_fit_is_refused(written: FeatureCache) -> None:
    total, taken = disk_space(written)
    on_disk = sum(f.stat().st_size for f in written.path.glob("*.safetensors"))
    assert 0 <= total - on_disk <= 1024 * len(written.shards)  # the upper bound of a header
    assert taken == pytest.approx(on_disk, abs=1024)
    check_space(written, None, print)
    with pytest.raises(ValueError, match=r"more than the disk budget of 1.00 KB; store fp8"):
        check_space(written, 1000, print)
    small = FeatureCache(written.path, replace(written.manifest, precision="fp8"), written.documents)
    with pytest.raises(ValueError, match=r"more than the disk budget of 1.00 KB; use a share of the data"):
        check_space(small, 1000, print)
