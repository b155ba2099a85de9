"""Several ranks train as one process does (gradients, metrics and updates), and an error in one rank ends all."""

from __future__ import annotations

import copy
import json
import time
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from fledge.data.dataset import Rows
from fledge.targets.compatibility import resolve_layers
from fledge.targets.loading import load_target
from fledge.targets.source import LiveFeatures
from fledge.targets.transformers import TransformersTarget
from fledge.train import trainer
from fledge.train.checkpoint import RunDirectory
from fledge.train.cod import DropTokens
from fledge.train.objective import Objective
from fledge.train.optim import MasterAdamW
from fledge.train.ranks import ALONE, RankError, Ranks
from fledge.train.trainer import Schedule
from support.files import metrics_of
from support.mutations import replace_function
from support.ranks import spawn
from support.rows import document, row_of
from support.targets import P_EAGLE, tiny_draft, tiny_target, tiny_target_directory

STEPS = 4
VARIANTS: dict[str, dict[str, Any]] = {
    "eagle3": dict(num_hidden_layers=2),
    "eagle3.1": dict(fc_norm=True, norm_output=True),
    "peagle": dict(num_hidden_layers=2, **P_EAGLE),
    "eagle1": dict(method="eagle1"),
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
    schedule = Schedule(STEPS, 1e-2, objective, rows_per_step=rows_per_step, save_every=100)
    run = RunDirectory(directory)
    run.path.mkdir(parents=True, exist_ok=True)
    rows = Rows(DOCUMENTS, 24, seed=0)
    trainer.train(draft, rows, source, schedule, run, save_dtype=torch.float64, ranks=ranks)
    return {name: p.detach() for name, p in draft.named_parameters()}


# -- an update of several ranks -------------------------------------------------------------------------------------

# (variant, rows of a step): gradients accumulated unevenly, one row each, and fewer rows than ranks
CASES = [*((variant, 5) for variant in VARIANTS), ("eagle3", 4), ("eagle3", 1), ("peagle", 2)]


def train_all_cases(ranks: Ranks, directory: Path) -> None:
    for placement in ("shard", "replicate"):
        for variant, rows_per_step in CASES:
            out = directory / placement / f"{variant} {rows_per_step}"
            found = train(out, variant, replace(ranks, placement=placement), rows_per_step)
            torch.save(found, out / f"rank {ranks.rank}")
    assert any(isinstance(x, DTensor) for x in MasterAdamW([("p", one())], (0.9, 0.95), 0.0, ranks).state().values())


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
    compare_sharded_target(ranks, directory)
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
    optimizer states sharded and replicated, gradients accumulated, rows of very different and of no live slots, and
    ranks without a row."""
    directory = request.getfixturevalue({2: "two_ranks", 4: "four_ranks"}[world])
    for placement in ("shard", "replicate"):
        for variant, rows_per_step in CASES:
            case = f"{variant} {rows_per_step}"
            expected = torch.load(alone / case / "parameters")
            for rank in range(world):
                found = torch.load(directory / placement / case / f"rank {rank}")
                for name, p in expected.items():
                    torch.testing.assert_close(found[name], p, rtol=1e-10, atol=1e-10, msg=f"{case} {name}")
            ours, theirs = metrics_of(directory / placement / case), metrics_of(alone / case)
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
    path = tiny_target_directory(directory)  # rank 0 writes it
    ranks.meet("after the target was saved", None)
    whole = load_target(path, dtype=torch.float64, implementation="transformers")
    sharded = load_target(path, dtype=torch.float64, mesh=ranks.mesh)
    assert sharded.packs == whole.packs and not sharded.rollback_problem
    assert any(isinstance(p, DTensor) for p in sharded.model.parameters())
    row, layers = row_of([DOCUMENTS[ranks.rank], DOCUMENTS[3]], filler=3), (1, 4, 8)
    ours, theirs = (target.features(row, layers) for target in (sharded, whole))
    pairs = {"aux": (ours.aux_TAD, theirs.aux_TAD), "last": (ours.last_TD, theirs.last_TD)}
    pairs["logits"] = sharded.logits(ours.last_TD), whole.logits(theirs.last_TD)
    pairs["prefill"] = tuple(target.prefill([[5, 6, 7, 8]], target.new_cache())[0] for target in (sharded, whole))
    mine, others = sharded.last_layer_weights(), whole.last_layer_weights()
    assert mine.keys() == others.keys()
    pairs |= {name: (mine[name], weight) for name, weight in others.items()}
    pairs |= {f"distributed {i}": pair for i, pair in enumerate(distributed_weights(ranks, whole))}
    found = {name: float((a - b).abs().max()) for name, (a, b) in pairs.items()}
    (directory / f"sharded {ranks.rank}").write_text(json.dumps(found))


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
    """Features, logits, decoding, and the weights that initialize a draft. Rank 0 alone reads the file."""
    for rank in range(2):
        found = json.loads((two_ranks / f"sharded {rank}").read_text())
        assert max(found.values()) < 1e-9 and {"aux", "prefill", "q_proj.weight"} <= found.keys(), found


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
            time.sleep(5)
        return replace(found, last_TD=found.last_TD * float("nan"))


NAN = "FloatingPointError: the gradient of step 1 is nan: the target computes NaN or infinite hidden states"
ERRORS = {  # what ranks 0 and 1 say; the last of them leaves a broken connection
    "raise": (
        "RankError: rank 1 of 2 failed in step 1: ValueError: row 3 is damaged",
        "ValueError: row 3 is damaged",
    ),
    "nan": (NAN, NAN),
    "hang": ("RankError: rank 0 of 2 waited in vain for another rank in step 1: [Rank 0]: Ranks 1 failed", ""),
}


def fail(ranks: Ranks, directory: Path, how: str) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(f"{__name__}.LiveFeatures", type("Broken", (Failing,), {"how": how}))
        limit = timedelta(seconds=2 if how == "hang" else 60)
        try:
            train(directory, "eagle3", replace(ranks, limit=limit))
            told = "nothing"
        except Exception as e:
            told = f"{type(e).__name__}: {e}"
    (directory / f"rank {ranks.rank}").write_text(told)
    time.sleep(5 if how == "hang" else 0)  # the connection stays until the other rank has told


@pytest.mark.parametrize("how", ERRORS)
def test_an_error_in_one_rank_ends_all(how: str, two_ranks: Path) -> None:
    """A rank that fails says why, and the others say which rank failed; one that does not come in time is named."""
    for rank, expected in enumerate(ERRORS[how]):
        assert (two_ranks / how / f"rank {rank}").read_text().startswith(expected)


def test_a_single_process_communicates_nothing() -> None:
    x = torch.ones(3)
    assert ALONE.sum(x) is x and ALONE.reduced([x])[0] is x and ALONE.meet("here", 5) == [5] and ALONE.leads
    with pytest.raises(KeyError), ALONE.together("here"):
        raise KeyError("x")
    assert issubclass(RankError, OSError), "the command line prints it as one sentence"
