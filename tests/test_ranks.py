"""Several ranks train as one process does (gradients, metrics and updates), and an error in one rank ends all."""

from __future__ import annotations

import copy
import errno
import gc
import json
import sys
import time
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.distributed.checkpoint import HuggingFaceStorageWriter
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from fledge.check.make_probe import make_probe
from fledge.check.read_probe import read_probe
from fledge.commands import features as features_job
from fledge.commands import train as train_job
from fledge.commands.features import FeaturesOptions
from fledge.data.pack import Rows
from fledge.data.template import ChatTemplate
from fledge.drafts.weights import WEIGHTS, write_files
from fledge.io.display import ProgressDisplay
from fledge.states import writer as feature_writer
from fledge.targets import distributed as distributed_module
from fledge.targets.compatibility import resolve_layers
from fledge.targets.distributed import load_sharded_target, target_bytes
from fledge.targets.loading import load_target
from fledge.targets.source import LiveFeatures
from fledge.targets.transformers import TransformersTarget
from fledge.train import checkpoint, trainer
from fledge.train import ranks as ranks_module
from fledge.train.checkpoint import RunDirectory
from fledge.train.hooks import Checkpoints, Drafts, MetricsFile
from fledge.train.optim import MasterOptimizer
from fledge.train.plan import DropTokens
from fledge.train.ranks import ALONE, RankError, Ranks, _grouped, error_sentence
from fledge.train.row_pass import Objective
from fledge.train.setup.launch import first_to_say
from fledge.train.setup.options import TrainOptions
from fledge.train.trainer import Run, Schedule
from fledge.types import Prompt
from support.chats import tiny_chats
from support.files import metrics_of
from support.mutations import replace_function
from support.ranks import connect, free_ports, spawn, start
from support.rows import document, row_of
from support.targets import P_EAGLE, tiny_draft, tiny_target, tiny_target_directory

STEPS = 4
VARIANTS: dict[str, dict[str, Any]] = {
    "eagle3": dict(num_hidden_layers=2),
    "eagle3.1": dict(fc_norm=True, norm_output=True),
    "peagle": dict(num_hidden_layers=2, **P_EAGLE),
    "eagle1": dict(method="eagle1"),
    "muon": dict(num_hidden_layers=2),
}
# rows that differ much in live slots, and one that has none
DOCUMENTS = [
    document(24, (1, 24), seed=1),
    document(24, (20, 23), seed=2),
    document(24, (2, 9), (12, 24), seed=3),
    document(24, (0, 24), seed=4),
    document(24, seed=5),
    document(24, (3, 7), seed=6),
]


def train(
    directory: Path, variant: str, ranks: Ranks = ALONE, rows_per_step: int = 4
) -> dict[str, Tensor]:  # fmt: skip
    """Trains for STEPS steps in float64 and returns the draft's parameters."""
    target = tiny_target(tokenizer=False, dtype=torch.float64)
    draft = tiny_draft(target, **VARIANTS[variant])
    eagle1 = draft.config.method == "eagle1"
    source = LiveFeatures(target, () if eagle1 else resolve_layers(None, target))
    objective = Objective(
        depth=1 if eagle1 else 3, feature_noise=0.1 if eagle1 else 0.0,
        drop=DropTokens(0.8, 0.2) if variant == "peagle" else None,
    )  # fmt: skip
    optimizer = "muon" if variant == "muon" else "adamw"
    schedule = Schedule(STEPS, 1e-2, objective, rows_per_step=rows_per_step, save_every=100, optimizer=optimizer)
    directory.mkdir(parents=True, exist_ok=True)
    run = Run(draft, Rows(DOCUMENTS, 24, seed=0), source, schedule, RunDirectory(directory), ranks, torch.float64)
    trainer.train(run, [Drafts(), MetricsFile(), Checkpoints()])
    return {name: p.detach() for name, p in draft.named_parameters()}


# -- an update of several ranks -------------------------------------------------------------------------------------

# (variant, rows of a step): gradients accumulated unevenly, one row each, and fewer rows than ranks
CASES = [*((variant, 5) for variant in VARIANTS), ("eagle3", 4), ("eagle3", 1), ("peagle", 2)]


def train_all_cases(ranks: Ranks, directory: Path) -> None:
    for variant, rows_per_step in CASES:
        out = directory / f"{variant} {rows_per_step}"
        torch.save(train(out, variant, ranks, rows_per_step), out / f"rank {ranks.rank}")
    assert any(isinstance(x, DTensor) for x in MasterOptimizer([("p", one())], 0.0, ranks).state().values())


def one() -> torch.nn.Parameter:
    return torch.nn.Parameter(torch.ones(3, 2))


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Runs of a single process, by case."""
    directory = tmp_path_factory.mktemp("alone")
    for variant, rows_per_step in CASES:
        out = directory / f"{variant} {rows_per_step}"
        torch.save(train(out, variant, rows_per_step=rows_per_step), out / "parameters")
    return directory


def everything(ranks: Ranks, directory: Path) -> None:
    """What two ranks are tested for, in one pair of processes, as each takes seconds to start."""
    if ranks.leads:
        tiny_target_directory(directory)
        tiny_chats(directory / "chats.jsonl", 20)
        tiny_chats(directory / "more.jsonl", 60)
    ranks.meet("after the target was saved", None)
    compare_sharded_target(ranks, directory)
    train_with_sharded_target(ranks, directory)
    train_on_features(ranks, directory, directory / "stored")
    train_all_cases(ranks, directory)
    for mistake in MISTAKES:
        train_with_mistake(ranks, directory / mistake.__name__, mistake)
    for how in ERRORS:
        fail(ranks, directory / how, how)


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("two")
    spawn(everything, 2, directory)
    return directory


@pytest.fixture(scope="module")
def four_ranks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("four")
    spawn(train_all_cases, 4, directory)
    return directory


@pytest.mark.parametrize("world", [2, 4])
def test_ranks_train_as_one_process(world: int, alone: Path, request: pytest.FixtureRequest) -> None:
    """The parameters after some steps, on every rank, and the metrics of every step, in float64: for each method, with
    sharded optimizer states, gradients accumulated, rows of very different and of no live slots, and
    ranks without a row."""
    directory = request.getfixturevalue({2: "two_ranks", 4: "four_ranks"}[world])
    for variant, rows_per_step in CASES:
        case = f"{variant} {rows_per_step}"
        expected = torch.load(alone / case / "parameters")
        for rank in range(world):
            found = torch.load(directory / case / f"rank {rank}")
            for name, p in expected.items():
                torch.testing.assert_close(found[name], p, rtol=1e-10, atol=1e-10, msg=f"{case} {name}")
        ours, theirs = metrics_of(directory / case), metrics_of(alone / case)
        assert [m["live"] for m in ours] == [m["live"] for m in theirs]
        for name in ("loss", "grad_norm", *(["tau"] if variant != "peagle" else [])):
            assert [m[name] for m in ours] == pytest.approx([m[name] for m in theirs], rel=1e-9), (case, name)


def train_accumulating(ranks: Ranks, directory: Path) -> None:
    torch.save(train(directory, "eagle3", ranks, 12), directory / f"rank {ranks.rank}")


def test_eight_ranks_train_as_one_process(tmp_path: Path) -> None:
    """With half of the ranks having two rows."""
    expected = train(tmp_path / "alone", "eagle3", rows_per_step=12)
    spawn(train_accumulating, 8, tmp_path)
    for rank in range(8):
        found = torch.load(tmp_path / f"rank {rank}")
        for name, p in expected.items():
            torch.testing.assert_close(found[name], p, rtol=1e-10, atol=1e-10, msg=name)


def forget_other_ranks(reduced: Any, ranks: Ranks, sums: Any) -> Any:
    return [ranks.distribute(x) for x in sums]


def average(reduced: Any, ranks: Ranks, sums: Any) -> Any:
    return [x / ranks.size for x in reduced(ranks, sums)]


MISTAKES = (forget_other_ranks, average)


def train_with_mistake(ranks: Ranks, directory: Path, mistake: Any) -> None:
    with pytest.MonkeyPatch.context() as patch:
        replace_function(patch, Ranks, "reduced", mistake)
        found = train(directory, "eagle3", ranks, 5)
    if ranks.leads:
        torch.save(found, directory / "parameters")


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_wrong_reduction_is_noticed(mistake: Any, alone: Path, two_ranks: Path) -> None:
    expected = torch.load(alone / "eagle3 5" / "parameters")
    found = torch.load(two_ranks / mistake.__name__ / "parameters")
    assert max(float((found[n] - p).abs().max()) for n, p in expected.items()) > 1e-6


def test_rows_are_shared_evenly() -> None:
    """Each rank gets as many rows or one less, each row is given once, and heavy rows are apart."""
    for size in (2, 3, 4):
        for weights in ([5.0], [1.0] * 7, [9.0, 1.0, 8.0, 2.0, 7.0, 3.0], [0.0, 0.0, 10.0, 1.0]):
            shares = Ranks(size=size).shares(weights)
            assert sorted(i for share in shares for i in share) == list(range(len(weights)))
            assert max(map(len, shares)) - min(map(len, shares)) <= 1
    assert Ranks(size=2).shares([9.0, 8.0, 2.0, 1.0]) == [[0, 3], [1, 2]]


# -- a target that is larger than a GPU -----------------------------------------------------------------------------


def compare_sharded_target(ranks: Ranks, directory: Path) -> None:
    """Writes the differences between a target whose layers are sharded and the same target whole, by what is compared.
    Each rank has its own row."""
    path = directory / "target"
    whole = load_target(path, dtype=torch.float64, implementation="transformers")
    sharded = measured_sharded_target(ranks, path)
    assert sharded.packs == whole.packs and not sharded.rollback_problem
    assert any(isinstance(p, DTensor) for p in sharded.model.parameters())
    row, layers = row_of([DOCUMENTS[ranks.rank], DOCUMENTS[3]], filler=3), (1, 4, 8)
    ours, theirs = (target.features(row, layers) for target in (sharded, whole))
    pairs = {"aux": (ours.aux_TAD, theirs.aux_TAD), "last": (ours.last_TD, theirs.last_TD)}
    pairs["logits"] = sharded.logits(ours.last_TD), whole.logits(theirs.last_TD)
    pairs["prefill"] = tuple(
        target.prefill([Prompt([5, 6, 7, 8])], target.new_cache())[0] for target in (sharded, whole)
    )
    mine, others = sharded.last_layer_weights(), whole.last_layer_weights()
    assert mine.keys() == others.keys()
    pairs |= {name: (mine[name], weight) for name, weight in others.items()}
    pairs |= {f"distributed {i}": pair for i, pair in enumerate(distributed_weights(ranks, whole))}
    found = {name: float((a - b).abs().max()) for name, (a, b) in pairs.items()}
    (directory / f"sharded {ranks.rank}").write_text(json.dumps(found))
    files = probe_of(sharded, ranks)
    assert bool(files) == ranks.leads and not probe_of(whole, replace(ranks, rank=1))
    if ranks.leads:
        (directory / "whole").mkdir()
        write_files(files, directory)
        write_files(probe_of(whole, ALONE), directory / "whole")


def measured_sharded_target(ranks: Ranks, path: Path) -> TransformersTarget:
    """A target with sharded layers; while the target is loaded, a rank holds its share and one whole layer."""
    before, most = bytes_in_memory(), []

    def measured(original: Any, *args: Any, **options: Any) -> Any:
        most.append(bytes_in_memory() - before)
        return original(*args, **options)

    with pytest.MonkeyPatch.context() as patch:
        replace_function(patch, distributed_module, "fully_shard", measured)
        target = load_sharded_target(path, ranks.mesh, dtype=torch.float64)
    sizes, layers = target_bytes(target), len(target.layers)
    buffers = sum(x.nbytes for x in target.model.buffers())
    share = sizes.on_rank(ranks.size) + buffers
    assert share < sizes.whole
    # rank 0 has the values of the layers that it did not share yet
    assert len(most) == layers + 1 and max(most[ranks.leads * layers :]) <= share, (most, share)
    assert bytes_in_memory() - before <= share, "and after the loading"
    return target


def bytes_in_memory() -> int:
    """The bytes of the storages of all tensors of this process."""
    gc.collect()
    found = (x for x in gc.get_objects() if issubclass(type(x), Tensor) and not x.is_meta)
    storages = (getattr(x, "_local_tensor", x).untyped_storage() for x in found)
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


def probe_of(target: TransformersTarget, ranks: Ranks) -> Mapping[str, bytes]:
    """The files of a draft's probe, as training makes them."""
    layers = resolve_layers(None, target)
    prepared = SimpleNamespace(
        target=target, source=LiveFeatures(target, layers), layers=layers, max_length=24, decodes=True,
        template=ChatTemplate(target.tokenizer, target.stop_ids),
    )  # fmt: skip
    recipe, rows = SimpleNamespace(features=None, served=None, depth=3), Rows(DOCUMENTS, 24, seed=0)
    draft = tiny_draft(target)
    run = Run(draft, rows, prepared.source, Schedule(1, 0.1), ranks=ranks, save_dtype=torch.float64)
    return make_probe(recipe, prepared, run, print)(draft, {"step": 1})


def test_a_sharded_target_gives_the_probe_of_the_whole_one(two_ranks: Path) -> None:
    """All ranks compute it and rank 0 has the files; with a target of its own, no other rank computes anything."""
    ours, theirs = (read_probe(two_ranks / name) for name in (".", "whole"))
    assert torch.equal(ours.excerpt.states_TAD, theirs.excerpt.states_TAD)
    torch.testing.assert_close(ours.logits_RKSJ, theirs.logits_RKSJ)
    assert ours.record == theirs.record and ours.record.decoding is not None


def distributed_weights(ranks: Ranks, target: TransformersTarget) -> list[tuple[Tensor, Tensor]]:
    """The embedding and head that a target reads from a model whose own are DTensors, which may be trained; and those
    of the model before."""
    model = copy.deepcopy(target.model)
    for i, module in enumerate((model.get_input_embeddings(), model.get_output_embeddings())):
        module.weight = nn.Parameter(distribute_tensor(module.weight.detach(), ranks.mesh, [Shard(i)]))
    found = TransformersTarget(model, None)
    assert not any(isinstance(x, DTensor) for x in (found.embedding, found.head_weight))
    return [(found.embedding, target.embedding), (found.head_weight, target.head_weight)]


def test_a_sharded_target_computes_what_the_whole_one_does(two_ranks: Path) -> None:
    """Features, logits, decoding, and the weights that initialize a draft. Rank 0 alone reads the file. The memory
    of each rank follows its share."""
    for rank in range(2):
        found = json.loads((two_ranks / f"sharded {rank}").read_text())
        assert max(found.values()) < 1e-9 and {"aux", "prefill", "q_proj.weight"} <= found.keys(), found


@pytest.mark.parametrize("target_ranks", [0, 1, 2])
def test_all_ranks_or_none_split_the_communicator_for_a_group(
    target_ranks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Making a group, torch splits the NCCL communicator of all ranks in its members, unless the group is one of gloo
    alone, and in all others, unless they do not take part. A split waits for every rank."""
    size = 2
    splits: list[list[bool]] = []

    def new_group(ranks: Any = None, *, backend: Any = None, use_local_synchronization: bool = False, **_: Any) -> None:
        member = ranks is None or rank in ranks
        splits[-1].append(backend != "gloo" if member else not use_local_synchronization)

    monkeypatch.setattr(dist, "new_group", new_group)
    monkeypatch.setattr(ranks_module, "init_device_mesh", lambda *given: None)
    monkeypatch.setattr(ranks_module.DeviceMesh, "from_group", lambda *given: None)
    for rank in range(size + target_ranks):
        splits.append([])
        _grouped(torch.device("cuda"), timedelta(minutes=1), rank, size, target_ranks)
    assert all(len(set(of_all_ranks)) == 1 for of_all_ranks in zip(*splits, strict=True))


def run_connected(options: TrainOptions, ranks: Ranks) -> dict[str, Any]:
    """`fledge train` in a process that is connected already. Returns the last step's metrics."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("fledge.train.setup.run.run_ranks", lambda options: nullcontext(ranks))
        return train_job.run(options, lambda line: None, ProgressDisplay(quiet=True))


def command(ranks: Ranks, directory: Path, out: Path, **given: Any) -> dict[str, Any]:
    """`fledge train` as a rank that is connected already. Returns the last step's metrics."""
    options = TrainOptions(
        target=str(directory / "target"), data=[str(directory / "chats.jsonl")], out=str(out), device="cpu",
        dtype="float64", max_length=64, row_length=128, steps=2, depth=2, draft_vocab=200, **given,
    )  # fmt: skip
    return run_connected(options, ranks)


def rows_of_three(patch: pytest.MonkeyPatch) -> dict[str, Any]:
    return dict(rows_per_step=3)


def no_packing(patch: pytest.MonkeyPatch) -> dict[str, Any]:
    patch.setattr(TransformersTarget, "packs", False)
    return {}


REFUSALS = {  # what a sharded target refuses, and the sentence of both ranks
    rows_of_three: "--rows-per-step 3 with --shard-target on 2 GPUs: every GPU must have as many rows; give 2, 4, ..",
    no_packing: "cannot process packed documents together, which --shard-target needs; train without it",
}


def train_with_sharded_target(ranks: Ranks, directory: Path) -> None:
    command(ranks, directory, directory / "sharded run", shard_target=True)
    for change in REFUSALS:
        with pytest.MonkeyPatch.context() as patch:
            try:
                command(ranks, directory, directory / change.__name__, shard_target=True, **change(patch))
                told = "nothing"
            except ValueError as e:
                told = str(e)
        (directory / f"{change.__name__} {ranks.rank}").write_text(told)


def test_training_with_a_sharded_target_is_that_of_one_process(two_ranks: Path, tmp_path: Path) -> None:
    """The whole of `fledge train --shard-target`: metrics, and the weights that it saves, in bfloat16. The target of
    one process is computed by another implementation, which rounds some float32 tables otherwise."""
    command(ALONE, two_ranks, tmp_path / "run", rows_per_step=2)
    ours, theirs = metrics_of(two_ranks / "sharded run"), metrics_of(tmp_path / "run")
    for name in ("loss", "grad_norm", "tau"):
        assert [m[name] for m in ours] == pytest.approx([m[name] for m in theirs], rel=1e-6), name
    saved = [load_file(path / "draft" / WEIGHTS) for path in (two_ranks / "sharded run", tmp_path / "run")]
    assert saved[0].keys() == saved[1].keys()
    for name, x in saved[0].items():
        torch.testing.assert_close(x, saved[1][name], rtol=2**-7, atol=1e-6, msg=name)


@pytest.mark.parametrize("change", REFUSALS)
def test_what_a_sharded_target_refuses(change: Any, two_ranks: Path) -> None:
    """In all ranks, before a run is begun."""
    for rank in range(2):
        assert REFUSALS[change] in (two_ranks / f"{change.__name__} {rank}").read_text()
    assert not (two_ranks / change.__name__).exists()


# -- a full disk ------------------------------------------------------------------------------------------------------


def full_disk(*given: Any) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


def save_on_full_disk(ranks: Ranks, directory: Path) -> None:
    """Writes what the ranks say of a checkpoint whose state one of them cannot write, or whose first files."""
    draft = tiny_draft(tiny_target(tokenizer=False))
    for name, owner, where, rank in (
        ("state 0", HuggingFaceStorageWriter, "write_data", 0),
        ("state 1", HuggingFaceStorageWriter, "write_data", 1),
        ("first files", checkpoint, "write_files", 0),
    ):
        run = RunDirectory(directory / "run")
        with pytest.MonkeyPatch.context() as patch:
            if ranks.rank == rank:
                patch.setattr(owner, where, full_disk)
            run.save_checkpoint(draft, torch.float32, {"x": torch.ones(3)}, {"step": 1}, ranks)
            try:
                run.finish_saving()
            except Exception as e:
                (directory / f"{name}, {ranks.rank}").write_text(error_sentence(e))
    run.save_checkpoint(draft, torch.float32, {"x": torch.ones(3)}, {"step": 1}, ranks)
    run.finish_saving()
    ranks.meet("at the end", None)


def test_a_full_disk_is_one_sentence_of_all_ranks(tmp_path: Path) -> None:
    """Whichever rank met it, and the next checkpoint is saved."""
    spawn(save_on_full_disk, 2, tmp_path)
    saved = tmp_path / "run" / "checkpoint"
    sentence = (
        f"no space to save {saved} (No space left on device); the previous content is unchanged. Free some disk space; "
        f"fledge train --resume {tmp_path / 'run'} then continues the training"
    )
    for name in ("state 0", "state 1", "first files"):
        assert [(tmp_path / f"{name}, {rank}").read_text() for rank in range(2)] == [sentence] * 2
    assert (saved / "progress.json").exists()


# -- features on disk -------------------------------------------------------------------------------------------------


def train_on_features(ranks: Ranks, directory: Path, work: Path) -> None:
    """Trains on features that rank 0 has written."""
    words = dict(target=str(directory / "target"), data=[str(directory / "more.jsonl")], max_length=64, device="cpu")
    features, progress = FeaturesOptions(**words, out=str(work / "features")), ProgressDisplay(quiet=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(feature_writer, "MIN_SHARD", 60_000)
        if ranks.leads:
            features_job.run(features, lambda line: None, progress)
    ranks.meet("after features were written", None)
    trained = TrainOptions(
        features=features.out, out=str(work / "run"), device="cpu", row_length=64, rows_per_step=2, depth=2,
        draft_vocab=200,
    )  # fmt: skip
    run_connected(trained, ranks)


def test_ranks_train_on_features(two_ranks: Path, tmp_path: Path) -> None:
    """As one process does."""
    train_on_features(ALONE, two_ranks, tmp_path / "stored")
    ours, theirs = metrics_of(two_ranks / "stored" / "run"), metrics_of(tmp_path / "stored" / "run")
    assert [m["loss"] for m in ours] == pytest.approx([m["loss"] for m in theirs], rel=1e-4) and len(ours) > 10


# -- errors ---------------------------------------------------------------------------------------------------------


class Failing(LiveFeatures):
    """Features of which those on rank 1 fail (`how` "raise"), are NaN, or come too late ("hang")."""

    how = ""

    def features(self, row: Any) -> Any:
        found = super().features(row)
        if dist.get_rank() == 0:
            return found
        if self.how == "raise":
            raise ValueError("row 3 is damaged")
        if self.how == "hang":
            time.sleep(2.5)
        return replace(found, last_TD=found.last_TD * float("nan"))


NAN = (
    "FloatingPointError: the gradient of step 1 is nan: the target's hidden states overflow in float64, or the initial "
    "draft does; train with --dtype float32"
)
LATE = "LostRankError: rank 1 of 2 ended or did not answer in step 1; see the log of torchrun"
OTHER = "LostRankError: another of 2 ranks ended or did not answer in step 1; see the log of torchrun"
ERRORS = {  # what ranks 0 and 1 say; the last of them leaves a broken connection
    "raise": (
        "RankError: rank 1 of 2 failed in step 1: ValueError: row 3 is damaged",
        "ValueError: row 3 is damaged",
    ),
    "nan": (NAN, NAN),
    "hang": (LATE, OTHER),
}


def fail(ranks: Ranks, directory: Path, how: str) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(f"{__name__}.LiveFeatures", type("Broken", (Failing,), {"how": how}))
        limit = timedelta(seconds=2 if how == "hang" else 60)
        try:
            train(directory, "eagle3", replace(ranks, limit=limit))
            told = printed = "nothing"
        except Exception as e:
            told, printed = f"{type(e).__name__}: {e}", error_sentence(e)
    (directory / f"rank {ranks.rank}").write_text(told)
    (directory / f"printed {ranks.rank}").write_text(printed)
    time.sleep(9 if how == "hang" else 0)  # the connection and the store stay until the other rank has told


@pytest.mark.parametrize("how", ERRORS)
def test_an_error_in_one_rank_ends_all(how: str, two_ranks: Path) -> None:
    """A rank that fails says why, and the others say which rank failed; one that does not come in time is named."""
    for rank, expected in enumerate(ERRORS[how]):
        assert (two_ranks / how / f"rank {rank}").read_text().startswith(expected)


def test_ranks_have_one_sentence_for_an_error(two_ranks: Path) -> None:
    """It names the rank if only one failed. So `first_to_say` lets one rank print it."""
    for how in ("raise", "nan"):
        one, other = ((two_ranks / how / f"printed {rank}").read_text() for rank in range(2))
        assert one == other and one.startswith("rank 1 of 2 failed in step 1: ") == (how == "raise")


def reconnect(rank: int, ports: list[int]) -> None:
    """Connects through each port for one collective; fails if its tensor is still held after the connection's end."""
    sys.setswitchinterval(1000)  # seconds; gloo's threads get the GIL only when this thread waits
    for port in ports:
        sent = torch.ones(1000)
        references = sys.getrefcount(sent)
        with connect(rank, 2, port) as ranks:
            dist.all_reduce(sent, group=ranks.host)
        assert sys.getrefcount(sent) == references, "gloo still holds a tensor"


def test_no_thread_holds_a_tensor_when_ranks_have_ended() -> None:
    """A process that ends while one of gloo's threads is about to release a tensor aborts: a run that has done all its
    work would fail. Without the wait, some of these connections leave such a thread."""
    start(reconnect, 2, free_ports(40))


def test_a_sentence_is_said_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the ranks that torchrun's store connects; without it, each says it."""
    assert first_to_say("no") and first_to_say("no"), "a single process"
    store = dist.TCPStore("127.0.0.1", 0, is_master=True)
    for name, value in dict(WORLD_SIZE=2, MASTER_ADDR="127.0.0.1", MASTER_PORT=store.port).items():
        monkeypatch.setenv(name, str(value))
    assert [first_to_say(x) for x in ("no", "no", "yes", "no")] == [True, False, True, False]
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    assert first_to_say("no")
    monkeypatch.delenv("MASTER_PORT")
    assert first_to_say("no")


def test_a_single_process_communicates_nothing() -> None:
    x = torch.ones(3)
    assert ALONE.sum(x) is x and ALONE.reduced([x])[0] is x and ALONE.meet("here", 5) == [5] and ALONE.leads
    with pytest.raises(KeyError), ALONE.together("here"):
        raise KeyError("x")
    assert issubclass(RankError, OSError), "the command line prints it as one sentence"
