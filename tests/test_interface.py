"""Targets other than transformers models: the members of the target interface are enough for training and decoding."""

from __future__ import annotations

import pkgutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import get_type_hints

import pytest
import torch
from torch import Tensor

import fledge as api
from fledge import drafts as models
from fledge.data.pack import Rows
from fledge.data.record import Record
from fledge.decode.load import load
from fledge.drafts.draft import Draft
from fledge.measure.run import evaluate
from fledge.methods import METHODS
from fledge.targets.compatibility import connect_draft, layers_of
from fledge.targets.interface import Cache, DecodingTarget, Target, TrainingTarget
from fledge.targets.source import FeatureSource, LiveFeatures
from fledge.train.checkpoint import RunDirectory
from fledge.train.hooks import Checkpoints, Drafts, MetricsFile
from fledge.train.row_pass import Objective
from fledge.train.trainer import Run, Schedule, train
from fledge.types import Features, Packed, Sampling, Tree
from support.decoding import prompts
from support.files import metrics_of
from support.rows import document
from support.targets import BOTH_IMPLEMENTATIONS, exact_target, tiny_draft, tiny_target
from support.trees import SHAPES

ROWS = Rows([document(24, (4, 20), seed=i) for i in range(6)], 48, seed=0)
STEPS = 4
DRAFTS = {
    "eagle3": dict(draft_vocab_size=100),
    "other layers": dict(aux_layers=(0, 3, 5, 8), num_aux_hidden_states=4),
    "peagle": dict(method="peagle", mask_token_id=399),
    "eagle1": dict(method="eagle1"),
}


def facts_of(target: Target) -> dict[str, object]:
    """The attributes of a target that its interface declares, by name."""
    return {name: getattr(target, name) for name in get_type_hints(Target)}


class OnDisk(TrainingTarget):
    """A target read from a file, which has the features of all layers for some packed rows, the head, the embedding and
    the last layer's weights."""

    packs = True

    def __init__(self, file: Path):
        kept = torch.load(file, weights_only=False)
        vars(self).update(kept["facts"])
        self.rows, self.last_layer = kept["rows"], kept["last_layer"]

    @staticmethod
    def write(target: TrainingTarget, rows: Sequence[Packed], file: Path) -> None:
        layers = range(target.num_layers + 1)
        read = {tuple(row.token_T.tolist()): target.features(row, layers) for row in rows}
        torch.save({"facts": facts_of(target), "rows": read, "last_layer": target.last_layer_weights()}, file)

    def last_layer_weights(self) -> dict[str, Tensor]:
        return self.last_layer

    def features(self, row: Packed, layers: Sequence[int]) -> Features:
        kept = self.rows[tuple(row.token_T.tolist())]
        return Features(kept.aux_TAD[:, list(layers)], kept.last_TD)

    def logits(self, last_ND: Tensor) -> Tensor:
        return last_ND @ self.head_weight.T

    def check_logits(self) -> None:
        """Does nothing: the logits are the head's product by construction."""


class Relayed(DecodingTarget):
    """A target whose model runs elsewhere: only the declared attributes and the results of calls are available."""

    def __init__(self, target: DecodingTarget):
        vars(self).update(facts_of(target))
        self.rollback_problem = target.rollback_problem
        self._there = target

    def last_layer_weights(self) -> dict[str, Tensor]:
        return {}

    def new_cache(self, sizes: Sequence[int]) -> Cache:
        return self._there.new_cache(sizes)

    def prefill(
        self, prompts: Sequence[Sequence[int]], cache: Cache, layers: Sequence[int] | None = None, final: bool = True
    ) -> tuple[Tensor, list[Features]]:
        return self._there.prefill(prompts, cache, layers, final)

    def verify(self, tree: Tree, cache: Cache, layers: Sequence[int] | None = None) -> tuple[Tensor, Features | None]:
        return self._there.verify(tree, cache, layers)

    def check_masks(self, requests: int = 1) -> None:
        self._there.check_masks(requests)


def trained(draft: Draft, source: FeatureSource, directory: Path) -> list[str]:
    """Trains in a new directory. Returns the metrics of every step, without its seconds."""
    there, depth = RunDirectory(directory), METHODS[draft.config.method].trained_depth or 3
    schedule = Schedule(STEPS, 1e-2, Objective(depth=depth), save_every=STEPS)
    with there.locked():
        there.start("seed: 0\n")
        run = Run(draft, ROWS, source, schedule, there, save_dtype=torch.float32)
        train(run, [Drafts(), MetricsFile(), Checkpoints()])
    found = metrics_of(directory)
    return [{k: v for k, v in m.items() if k not in ("seconds", "tokens_per_s", "parts")} for m in found]


@pytest.fixture(scope="module")
def on_disk(tmp_path_factory) -> OnDisk:
    file = tmp_path_factory.mktemp("target") / "target.pt"
    OnDisk.write(tiny_target(), [ROWS[epoch, i] for epoch in range(2) for i in range(len(ROWS.epoch(epoch)))], file)
    return OnDisk(file)


@pytest.mark.parametrize("method", DRAFTS)
def test_a_draft_is_trained_from_features_on_disk(method: str, on_disk: OnDisk, tmp_path: Path) -> None:
    """The draft is initialised and trained bit for bit as with the live target."""
    live, found = tiny_target(), []
    for name, target in (("live", live), ("disk", on_disk)):
        draft = tiny_draft(target, **DRAFTS[method])
        torch.manual_seed(7)
        draft.initialize(target.last_layer_weights(), target.head_weight, target.embedding)
        layers = connect_draft(draft, target)
        assert layers == layers_of(draft.config, live)
        found.append((trained(draft, LiveFeatures(target, layers), tmp_path / name), draft.state_dict()))
    (steps, weights), (same_steps, same_weights) = found
    assert steps == same_steps and len(steps) == STEPS
    assert all(torch.equal(weights[name], same_weights[name]) for name in weights)


def test_a_target_for_training_alone_does_not_decode(on_disk: OnDisk) -> None:
    assert isinstance(on_disk, api.Target)
    with pytest.raises(TypeError, match=r"target must be .*a fledge\.Target that decodes, not a value of type OnDisk"):
        load(on_disk)


WAYS = {
    "chain": (dict(depth=4), dict()),
    "sampled": (dict(depth=4), dict(temperature=0.8, seed=3, draft="sample")),
    "tree": (dict(mode="tree", depth=4, nodes=12, width=3), dict()),
    "fixed tree": (dict(mode="tree", shape=SHAPES["mixed"]), dict()),
}


@BOTH_IMPLEMENTATIONS
@pytest.mark.parametrize("way", WAYS)
def test_a_target_that_runs_elsewhere_decodes(way: str, native: bool) -> None:
    """Alone and in batches, it generates the same tokens in the same number of rounds as the target itself."""
    options, sampling = WAYS[way]
    target = exact_target(native)
    found = []
    for each in (target, Relayed(target)):
        engine = load(each, tiny_draft(each), **options)
        done = engine.generate_all(prompts(5, seed=2), max_new_tokens=12, batch=3, sampling=Sampling(**sampling))
        done.append(engine.generate([5, 6, 7], max_new_tokens=12, sampling=Sampling(**sampling)))
        found.append([(c.tokens, len(c.trace.rounds)) for c in done])
    assert found[0] == found[1]


@BOTH_IMPLEMENTATIONS
def test_a_target_that_runs_elsewhere_is_evaluated(native: bool) -> None:
    """Its record lacks only the comparison with transformers' decoding, which needs a transformers model."""
    target, records = exact_target(native), []
    for each in (target, Relayed(target)):
        engines = {"draft": load(each, tiny_draft(each), depth=2)}
        asked = [Record("a prompt", text="the bird tries"), Record("a prompt", text="until it can fly")]
        records.append(evaluate(engines, asked, sampling=Sampling(), max_new_tokens=6)["draft"])
    own, relayed = records
    assert own.keys() - relayed.keys() == {"baseline_over_transformers"} and not relayed.keys() - own.keys()
    assert own["tau"] == relayed["tau"] and relayed["identical"] == 2
    assert relayed["target_implementation"] == ("native" if native else "transformers")


def test_a_target_without_the_required_methods_raises() -> None:
    class Nothing(TrainingTarget):
        pass

    with pytest.raises(TypeError, match="check_logits"):
        Nothing()


def test_models_do_not_import_targets_or_transformers() -> None:
    """Importing the draft's modules, the target interface and the compatibility checks does not import transformers,
    which takes seconds."""
    names = [f"fledge.drafts.{m.name}" for m in pkgutil.iter_modules(models.__path__)]
    for modules, heavy in (
        (names, "('transformers', 'fledge.targets')"),
        (["fledge.targets.compatibility", "fledge.targets.source", "fledge.train.trainer"], "('transformers',)"),
    ):
        code = f"import sys, {', '.join(modules)}; print([m for m in {heavy} if m in sys.modules])"
        assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "[]\n"
