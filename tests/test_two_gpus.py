"""Target and draft on two GPUs, and a target whose layers are on two: the tokens are those of one GPU."""

from __future__ import annotations

import copy
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from fledge.decode import batch as batches
from fledge.decode import rounds, scheduler
from fledge.decode.engine import Engine
from fledge.decode.load import load
from fledge.drafts.draft import Draft
from fledge.targets.loading import target_of
from fledge.targets.transformers import TransformersTarget
from fledge.types import Sampling, TreeShape
from support.chats import tiny_chats
from support.decoding import prompts
from support.files import metrics_of
from support.ranks import ranks_of
from support.targets import DFLASH, P_EAGLE, tiny_draft, tiny_target_directory, tiny_tokenizer
from support.trees import good_pair

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="there are no two GPUs"),
]

WAYS: dict[str, dict[str, Any]] = {
    "chain": dict(depth=4),
    "chain, unstable": dict(depth=4, stable=False),
    "confident": dict(depth=4, confidence=0.2),
    "tree": dict(mode="tree", nodes=12, width=4, depth=4),
    "shape": dict(mode="tree", shape=TreeShape((-1, 0, 0, 1, 1), (0, 0, 1, 0, 1))),
    "one pass": dict(depth=3),
    "block": dict(depth=3),
    "block tree": dict(mode="tree", nodes=60, depth=3),
}


@pytest.fixture(autouse=True)
def same_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same requests run together on one GPU and on two, however long a prefill takes."""
    monkeypatch.setattr(scheduler, "BEGINNING", 0.0)


def pair(way: str, target_gpu: str, draft_gpu: str, implementation: str = "native") -> tuple[TransformersTarget, Draft]:
    """A target and a draft in float32."""
    made, draft, _ = good_pair()
    target = target_of(
        copy.deepcopy(made.model).to(target_gpu, torch.float32), made.tokenizer, implementation=implementation
    )
    if way == "one pass" or "block" in way:
        draft = tiny_draft(made, **(P_EAGLE if way == "one pass" else DFLASH))
    return target, copy.deepcopy(draft).to(draft_gpu, torch.float32)


def completions(engine: Engine, way: str, batch: int) -> list[Any]:
    """Nine requests of different lengths, greedy, then several kinds of sampling."""
    asked = [p for p in prompts(20, longest=14, seed=2) if len(p) > 1][:9]
    mixed = [Sampling(), Sampling(temperature=1.0, seed=2), Sampling(temperature=0.7, top_k=9, repetition_penalty=1.2)]
    kinds = [[Sampling()] * 9, mixed * 3]
    if not WAYS[way].get("mode"):
        kinds.append([Sampling(temperature=1.0, seed=5, draft="sample")] * 9)
    new = [25, 7, 40]
    return [
        done
        for kind in kinds
        for limit in new
        for done in engine.generate_all(asked, sampling=kind, max_new_tokens=limit, batch=batch)
    ]


@pytest.mark.filterwarnings("ignore::fledge.decode.draft_size.ChanceWarning")
@pytest.mark.parametrize("gpus", [("cuda:0", "cuda:1"), ("cuda:1", "cuda:0")], ids=["0 and 1", "1 and 0"])
@pytest.mark.parametrize("batch", [1, 4])
@pytest.mark.parametrize("way", WAYS)
def test_two_gpus_give_the_tokens_of_one(
    way: str, batch: int, gpus: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With requests that join and leave; a round is launched before the last one's results are read, and nothing in it
    waits for a GPU."""
    ahead: list[int] = []

    def checked(launch: Any) -> Any:
        def run(*given: Any) -> Any:
            torch.cuda.set_sync_debug_mode("error")
            try:
                return launch(*given)
            finally:
                torch.cuda.set_sync_debug_mode("default")

        return run

    class Captured(rounds.CapturedRounds):
        def __init__(self, *given: Any):
            super().__init__(*given)
            self.verify = checked(self.verify)

        draft = checked(rounds.CapturedRounds.draft)

    commit = batches.Batch._commit
    monkeypatch.setattr(batches, "CapturedRounds", Captured)
    monkeypatch.setattr(batches.Batch, "_commit", lambda self: ahead.append(len(self.launched)) or commit(self))
    one = load(*pair(way, gpus[0], gpus[0]), **WAYS[way])
    two = load(*pair(way, *gpus), **WAYS[way])
    expected, found = completions(one, way, batch), completions(two, way, batch)
    assert [c.tokens for c in found] == [c.tokens for c in expected]
    assert [[r.accepted for r in c.trace.rounds] for c in found] == [
        [r.accepted for r in c.trace.rounds] for c in expected
    ]
    if way != "confident":  # which asks the GPU when to end
        assert max(ahead) == 2 and {len(b.graphs) > 0 for b in two._idle_batches[True]} == {True}


@pytest.mark.filterwarnings("ignore::fledge.decode.draft_size.ChanceWarning")
@pytest.mark.parametrize("implementation", ["native", "transformers"])
@pytest.mark.parametrize("way", WAYS)
def test_rounds_without_graphs(way: str, implementation: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batches, "can_capture", lambda *given: False)
    expected, found = (
        completions(load(*pair(way, "cuda:0", gpu, implementation), **WAYS[way]), way, 4)
        for gpu in ("cuda:0", "cuda:1")
    )
    assert [c.tokens for c in found] == [c.tokens for c in expected]


def test_a_gpu_that_is_not_the_current_one() -> None:
    """Without a draft, the second GPU gives the tokens of the first."""
    expected, found = (
        load(pair("chain", gpu, gpu)[0]).generate([5, 6, 7], max_new_tokens=30).tokens for gpu in ("cuda:0", "cuda:1")
    )
    assert found == expected


TRAIN = """--max-length 64 --row-length 128 --steps 6 --depth 3 --draft-vocab 200 --rows-per-step 2 --eval-every 2
           --eval-tokens 6 --seed 3 --dtype float32""".split()


def trained(directory: Path, name: str, *words: object) -> list[dict[str, Any]]:
    """The metrics of `fledge train` on GPUs, in processes of its own."""
    command = [sys.executable, "-m", "fledge", "train", *TRAIN, "--target", directory / "target", "--data",
               directory / "chats.jsonl", "--out", directory / name, *words]  # fmt: skip
    done = subprocess.run([str(word) for word in command], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return metrics_of(directory / name)


def test_targets_larger_than_a_gpu_in_training(tmp_path: Path) -> None:
    """A run with a GPU for the target, and a run with sharded layers, have the losses and τ of a run on one GPU."""
    tiny_target_directory(tmp_path, hidden_size=64, intermediate_size=128, head_dim=16)
    tiny_chats(tmp_path / "chats.jsonl", 170)
    ways = {"fed": ("--gpus", 2, "--target-gpus", 1), "sharded": ("--gpus", 2, "--shard-target")}
    expected = trained(tmp_path, "one", "--device", "cuda:0")
    assert sum("eval_tau" in m for m in expected) == 3
    for name, words in ways.items():
        found = trained(tmp_path, name, *words)
        assert [m["loss"] for m in found] == pytest.approx([m["loss"] for m in expected], rel=1e-3), name
        tau = [[m["eval_tau"] for m in run if "eval_tau" in m] for run in (found, expected)]
        assert tau[0] == pytest.approx(tau[1], abs=0.1), name


def test_a_rank_that_holds_the_target_is_stopped_and_killed(tmp_path: Path) -> None:
    """SIGTERM ends both ranks with a checkpoint, from which they go on; without one of them, the other ends too."""
    tiny_target_directory(tmp_path, hidden_size=64, intermediate_size=128, head_dim=16)
    tiny_chats(tmp_path / "chats.jsonl", 170)
    run = tmp_path / "run"
    words = ["train", *TRAIN, "--steps", 100_000, "--eval-every", 0, "--target", tmp_path / "target", "--data",
             tmp_path / "chats.jsonl", "--out", run]  # fmt: skip
    for given, number in ((words, signal.SIGTERM), (["train", "--resume", run], signal.SIGKILL)):
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", 2, "-m"]
        command = [*torchrun, "fledge", *given, "--target-gpus", 1, "--rank-timeout", 1]
        before = len(metrics_of(run)) if (run / "metrics.jsonl").exists() else 0
        process = subprocess.Popen([str(word) for word in command], stderr=subprocess.PIPE, text=True)
        while not (run / "metrics.jsonl").exists() or len(metrics_of(run)) < before + 4:
            assert process.poll() is None
            time.sleep(0.1)
        if number == signal.SIGTERM:
            process.send_signal(number)
        else:
            os.kill(ranks_of(process)[1], number)
        _, told = process.communicate(timeout=150)
        assert process.returncode != 0 and (run / "checkpoint" / "progress.json").exists(), told
        assert number == signal.SIGKILL or "continue with: fledge train" in told.replace("\n", ""), told


@pytest.mark.filterwarnings("ignore::fledge.decode.draft_size.ChanceWarning")
@pytest.mark.parametrize("draft_gpu", ["cuda:0", "cuda:1"])
@pytest.mark.parametrize("way", ["chain", "tree", "one pass"])
def test_a_target_on_two_gpus(way: str, draft_gpu: str, tmp_path: Path) -> None:
    """A model that transformers loaded with a device_map drafts and decodes as on one GPU."""
    pytest.importorskip("accelerate", reason="transformers needs accelerate for a device_map")
    path = tiny_target_directory(tmp_path)
    places = {"model.embed_tokens": 0, "model.rotary_emb": 0, "model.norm": 1, "lm_head": 1}
    places |= {f"model.layers.{i}": int(i >= 3) for i in range(8)}
    split = AutoModelForCausalLM.from_pretrained(path, device_map=places, dtype=torch.float32)
    whole = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).to("cuda:0")
    assert split.model.layers[7].mlp.up_proj.weight.device == torch.device("cuda:1")
    two, one = target_of(split, tiny_tokenizer()), target_of(whole, tiny_tokenizer(), implementation="transformers")
    assert two.implementation == "transformers, since its weights are on several devices"
    assert load(split, tokenizer=tiny_tokenizer()).target.device == torch.device("cuda:0")
    draft = tiny_draft(one, **(P_EAGLE if way == "one pass" else {}))
    expected = completions(load(one, copy.deepcopy(draft).to("cuda:0"), **WAYS[way]), way, 4)
    found = completions(load(two, copy.deepcopy(draft).to(draft_gpu), **WAYS[way]), way, 4)
    assert [c.tokens for c in found] == [c.tokens for c in expected]
    two.check_logits()
