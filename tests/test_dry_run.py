"""`fledge train --dry-run` plans the run that `fledge train` would begin, and leaves nothing behind."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from rich.console import Console

import fledge as package
from fledge.io.display import ProgressDisplay
from fledge.io.results import ResultPrinter
from fledge.train.setup import dry_run, launch
from fledge.train.setup.run import DoesNotFit
from support.chats import tiny_chats
from support.commands import TESTS, Ran
from support.files import metrics_of
from support.runs import recipe_of
from support.targets import tiny_target_directory, tiny_tokenizer

LLAMA_70B = dict(
    architectures=["LlamaForCausalLM"], model_type="llama", hidden_size=8192, intermediate_size=28_672,
    num_hidden_layers=80, num_attention_heads=64, num_key_value_heads=8, vocab_size=128_256, hidden_act="silu",
    max_position_embeddings=131_072, rms_norm_eps=1e-5, tie_word_embeddings=False, torch_dtype="bfloat16",
    eos_token_id=1,
)  # fmt: skip

Fledge = Callable[..., Ran]


@pytest.fixture
def words(tmp_path: Path) -> list[Any]:
    """A command that trains a draft for a tiny target on a CPU; the run would be tmp_path / "run"."""
    target, data = tiny_target_directory(tmp_path), tiny_chats(tmp_path / "chats.jsonl", 40)
    return ["train", "--target", target, "--data", data, "--row-length", 128, "--max-length", 64, "--draft-vocab", 200,
            "--out", tmp_path / "run"]  # fmt: skip


@pytest.fixture
def large(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The same for a target of 70B parameters, of which there are only the config and a tokenizer."""
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=1 << 40))  # not of this machine
    directory = tmp_path / "large"
    tiny_tokenizer().save_pretrained(directory)
    (directory / "config.json").write_text(json.dumps(LLAMA_70B))
    return ["train", "--target", directory, "--data", tiny_chats(tmp_path / "many.jsonl", 400), "--row-length", 4096,
            "--out", tmp_path / "run", "--dry-run"]  # fmt: skip


@pytest.fixture
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)


def files_in(directory: Path) -> dict[str, tuple[int, int]]:
    return {str(f): (f.stat().st_mtime_ns, f.stat().st_size) for f in sorted(directory.rglob("*"))}


def gb(out: str, part: str) -> float:
    """The amount of a part in the printed lines, in GB."""
    number, unit = re.search(rf": {re.escape(part)}: ([\d.,]+) (\w+)\n", out).groups()
    return float(number.replace(",", "")) * {"GB": 1, "MB": 1e-3, "KB": 1e-6}[unit]


def test_more_rows_in_a_step_than_in_an_epoch_are_said(words: list[Any], fledge: Fledge) -> None:
    words += ["--device", "cpu", "--dry-run"]
    rows = int(re.search(r"Steps: (\d+) rows", fledge(*words).out)[1])
    said = " ".join(fledge(*words, "--rows-per-step", rows + 1).err.split())
    assert f"--rows-per-step {rows + 1}, but an epoch has {rows} rows: a step takes each of them up to 2 times" in said
    assert "but an epoch has" not in fledge(*words, "--rows-per-step", rows).err


def test_a_dry_run_tells_the_steps_of_the_run_and_writes_nothing(
    words: list[Any], fledge: Fledge, tmp_path: Path
) -> None:
    """Rows and steps are those of the run, and the hours come from steps that trained nothing."""
    words += ["--device", "cpu", "--epochs", 2, "--rows-per-step", 2]
    before = files_in(tmp_path)
    planned = fledge(*words, "--dry-run")
    assert planned.code == 0, planned.err
    assert files_in(tmp_path) == before
    assert fledge(*words).code == 0
    settled = recipe_of(tmp_path / "run")["settled"]
    tokens = re.search(r"documents, ([\d,]+) tokens", planned.err)[1]
    steps = re.search(
        r"Steps: (\d+) rows of 128 tokens for the ([\d,]+) tokens of the data; (\d+) steps of 2 rows", planned.out
    )
    assert steps[2] == tokens and int(steps[3]) == settled["steps"] == -(-2 * int(steps[1]) // 2)
    assert "memory of the process on CPUs: the draft's weights and the optimizer's state: " in planned.out
    assert f"with --impl eager and {settled['slots']} slots in flight" in planned.out
    assert re.search(r"3 steps took \d+\.\d\d s each, [\d,]+ tokens/s\.\n", planned.out)
    assert re.search(rf"{steps[3]} steps would take about \d+ (s|min), without the", planned.out)


def test_the_options_of_a_recipe_are_planned(words: list[Any], fledge: Fledge, tmp_path: Path) -> None:
    assert fledge(*words, "--device", "cpu", "--steps", 2).code == 0
    again = ["train", "--config", tmp_path / "run/recipe.yaml", "--dry-run"]
    planned = fledge(*again, "--out", tmp_path / "other", "--steps", 7)
    assert planned.code == 0 and "; 7 steps of 1 row, lr" in planned.out, planned.err
    assert not (tmp_path / "other").exists()
    taken = fledge(*again, "--out", tmp_path / "run")
    assert taken.code == 2 and "holds a training run" in taken.err


def test_the_rest_of_a_stopped_run_is_planned(
    words: list[Any], fledge: Fledge, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The steps that are left; none of a finished run. The data must be that of the run."""
    resume = ["train", "--resume", tmp_path / "run", "--dry-run"]
    with monkeypatch.context() as patch:
        patch.setattr(ProgressDisplay, "stderr_closed", True)
        assert fledge(*words, "--device", "cpu", "--steps", 5).code == 130
    assert len(metrics_of(tmp_path / "run")) == 1
    before = files_in(tmp_path)
    planned = fledge(*resume)
    assert planned.code == 0 and "5 steps of 1 row, lr 0.016; 4 of them are left." in planned.out, planned.err
    assert "4 steps would take about" in planned.out
    imagined = fledge(*resume, "--gpu-memory", 8)
    assert imagined.code == 0 and "4 of them are left" in imagined.out and "are not there" in imagined.out
    small = fledge(*resume, "--gpu-memory", 0.001)  # a resumed run keeps its slots and rows
    assert small.code == 1 and "does not fit" in small.out and "--slots or" not in small.out
    fresh = fledge(*words[:-1], tmp_path / "b", "--row-length", 2000, "--dry-run", "--gpu-memory", 0.004)
    assert fresh.code == 1 and "or a smaller --row-length" in fresh.out
    assert files_in(tmp_path) == before
    tiny_chats(tmp_path / "chats.jsonl", 41)
    assert (changed := fledge(*resume)).code == 2 and "the data differs from that of the run in" in changed.err
    tiny_chats(tmp_path / "chats.jsonl", 40)
    assert fledge("train", "--resume", tmp_path / "run").code == 0
    finished = fledge(*resume)
    assert finished.code == 0 and "; 0 of them are left." in finished.out and "took" not in finished.out


def test_gpus_that_are_not_there_need_no_weights(words: list[Any], fledge: Fledge, tmp_path: Path) -> None:
    for file in (tmp_path / "target").glob("*.safetensors"):
        file.unlink()
    planned = fledge(*words, "--dry-run", "--gpus", 2, "--gpu-memory", 8, "--rows-per-step", 3)
    assert planned.code == 0, planned.err
    assert "memory of each of 2 GPUs: the target's weights: " in planned.out
    assert "the draft's weights and 1/2 of the optimizer's state: " in planned.out
    assert "The hours are not estimated, as these GPUs are not there." in planned.out
    assert "3 rows a step for 2 ranks: some ranks wait in every step" in planned.err
    assert "steps of 3 rows, 2 on each rank" in planned.out
    assert fledge(*words, "--dry-run", "--device", "cpu").code == 2  # to be timed, the target is loaded


@pytest.mark.parametrize(
    "method", ["eagle3.1", "eagle1", "peagle --layers 2", "eagle3 --train-embeddings", "dflash --layers 2"]
)
def test_the_draft_of_every_method_is_planned(method: str, words: list[Any], fledge: Fledge, tmp_path: Path) -> None:
    """The plan trains as many parameters as the run, and as one that continues its draft, which must fit the target."""
    if method.split()[0] in ("eagle1", "dflash"):
        del words[9:11]  # it has the target's vocabulary
    words += ["--method", *method.split()]
    planned = fledge(*words, "--dry-run", "--gpu-memory", 8)
    assert planned.code == 0, planned.err
    trained = fledge(*words, "--device", "cpu", "--steps", 1)
    count = re.search(r"training ([\d,]+) parameters", trained.err)[1]
    assert f"The draft has {count} parameters, in float32." in planned.out
    again = [*words[:7], "--init-from", tmp_path / "run/draft", "--dry-run", "--gpu-memory", 8, "--out", tmp_path / "b"]
    if "train-embeddings" in method:
        again.append("--train-embeddings")
    assert f"The draft has {count} parameters" in (continued := fledge(*again)).out, continued.err
    config = json.loads((tmp_path / "target/config.json").read_text())
    (tmp_path / "target/config.json").write_text(json.dumps(config | {"hidden_size": 64}))
    refused = fledge(*again)
    assert refused.code == 2 and "--init-from" in refused.err and "hidden states of size" in refused.err


@pytest.mark.parametrize("memory", [80, 141])
def test_a_70b_target_fits_on_eight_gpus_only_if_it_is_sharded(memory: int, large: list[Any], fledge: Fledge) -> None:
    machine = ("--gpus", 8, "--gpu-memory", memory)
    whole = fledge(*large, *machine)
    assert whole.code == 1 and "Memory: does not fit" in whole.out, whole.err
    assert "--shard-target on several --gpus." in whole.out
    assert gb(whole.out, "the target's weights") == pytest.approx(70.55e9 * 2 / 1e9, rel=0.01)
    sharded = fledge(*large, *machine, "--shard-target")
    assert sharded.code == 0 and "Memory: fits with --impl triton and 8,192 slots" in sharded.out, sharded.err
    assert f"of {memory}.00 GB (7% must stay free)" in sharded.out
    layer = (2 * 8192**2 + 2 * 8192 * 1024 + 3 * 8192 * 28_672) * 2 / 1e9
    rest = 2 * 128_256 * 8192 * 2 / 1e9
    assert gb(sharded.out, "1/8 of the target's layers, 2 layers whole, embedding and head") == pytest.approx(
        12 * layer + rest, rel=0.01
    )
    assert "the draft's weights and 1/8 of the optimizer's state: " in sharded.out


def test_a_70b_target_on_gpus_of_its_own(large: list[Any], fledge: Fledge) -> None:
    """Both kinds of ranks are planned."""
    machine = ("--gpus", 8, "--gpu-memory", 80)
    planned = fledge(*large, *machine, "--target-gpus", 4, "--shard-target", "--rows-per-step", 4)
    assert planned.code == 0, planned.out + planned.err
    assert "memory of each of 4 GPUs training the draft: the target's embedding, head and last layer: " in planned.out
    assert "memory of each of 4 GPUs holding only the target: 1/4 of the target's layers" in planned.out
    assert "Rank 4 reads the whole target into host memory" in planned.out
    layer = (2 * 8192**2 + 2 * 8192 * 1024 + 3 * 8192 * 28_672) * 2 / 1e9
    rest = 2 * 128_256 * 8192 * 2 / 1e9
    assert gb(planned.out, "1/4 of the target's layers, 2 layers whole, embedding and head") == pytest.approx(
        22 * layer + rest, rel=0.01
    )
    assert gb(planned.out, "the target's embedding, head and last layer") == pytest.approx(layer + rest, rel=0.01)
    row = 4 * 8192 * 2 * 4096 / 1e9  # four states of a token
    assert gb(planned.out, "hidden states of 4 rows") == pytest.approx(4 * row, abs=0.011)
    assert "steps of 4 rows, 1 on each rank" in planned.out
    refused = fledge(*large, *machine, "--target-gpus", 1)
    assert refused.code == 1 and "more --target-gpus with --shard-target." in refused.out, refused


@pytest.mark.parametrize(
    ("given", "cure"),
    [
        ("--gpu-memory 80", "use fewer --slots or a smaller --row-length or --shard-target on several --gpus."),
        ("--gpu-memory 48 --gpus 8 --shard-target --slots 16000 --row-length 16384", "or more --gpus."),
    ],
)  # fmt: skip
def test_what_takes_less_memory_is_named(
    given: str, cure: str, large: list[Any], fledge: Fledge, tmp_path: Path
) -> None:
    text = "the young bird tries its wings " * 40_000
    (tmp_path / "many.jsonl").write_text(json.dumps({"text": text}) + "\n")
    refused = fledge(*large, *given.split())
    assert refused.code == 1 and cure in refused.out, refused.out + refused.err


def test_training_from_features_on_disk_is_planned(words: list[Any], fledge: Fledge, tmp_path: Path) -> None:
    """The target does not run, and only the parts are counted that are loaded."""
    target, data = words[2], words[4]
    written = fledge("features", "--target", target, "--data", data, "--out", tmp_path / "f", "--device", "cpu")
    assert written.code == 0, written.err
    stored = ["train", "--features", tmp_path / "f", "--out", tmp_path / "run", "--dry-run"]
    planned = fledge(*stored, "--gpu-memory", 8)
    assert planned.code == 0 and "memory of the GPU: the target's embedding, head" in planned.out, planned.err
    whole = fledge(*words, "--dry-run", "--gpu-memory", 8)
    assert gb(planned.out, "the target's embedding, head and last layer") < gb(whole.out, "the target's weights")
    timed = fledge(*stored, "--device", "cpu")
    assert timed.code == 0 and "3 steps took" in timed.out, timed.err


def test_data_without_live_slots_is_planned(words: list[Any], fledge: Fledge, tmp_path: Path) -> None:
    """Answers shorter than the depth leave nothing to train at most of the steps."""
    chat = [{"role": "user", "content": "the young bird"}, {"role": "assistant", "content": "fly"}]
    words[4].write_text(json.dumps({"messages": chat}) + "\n")
    del words[5:9]  # the lengths
    planned = fledge(*words, "--dry-run", "--gpu-memory", 8)
    assert planned.code == 0 and "Steps: 1 row of" in planned.out, planned.err


def test_a_full_disk_is_noticed(large: list[Any], fledge: Fledge, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=30 * 10**9))
    planned = fledge(*large, "--gpus", 8, "--gpu-memory", 141, "--shard-target")
    assert planned.code == 1 and "Memory: fits" in planned.out, planned.err
    assert re.search(
        r"Disk: does not fit, 35\.\d\d GB of the 30\.00 GB that are free where .*; choose another", planned.out
    )


@pytest.mark.parametrize(
    ("where", "error"), [("time_steps", torch.OutOfMemoryError), ("choose_implementation", DoesNotFit)]
)
def test_a_step_that_runs_out_of_memory_does_not_fit(
    where: str, error: type[Exception], words: list[Any], fledge: Fledge, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*given: Any) -> None:
        raise error("too much")

    monkeypatch.setattr(dry_run, where, fail)
    planned = fledge(*words, "--dry-run", "--device", "cpu")
    assert planned.code == 1, planned.err
    assert "Memory: does not fit, as steps show that were tried: too much\n" in planned.out


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("--gpu-memory 80", "--gpu-memory describes GPUs to plan a run for; give it together with --dry-run"),
        ("--dry-run --gpus 8", "--gpus 8, but this machine has no GPU; give --gpu-memory, the GB of memory of each"),
        ("--dry-run --gpu-memory 80 --shard-target", "--shard-target splits the target over several GPUs; give --gpus"),
        ("--dry-run --gpu-memory 80 --target-gpus 1", "--target-gpus sets some of several GPUs apart"),
        ("--dry-run --gpu-memory 80 --gpus 2 --target-gpus 2", "--target-gpus 2 of 2 GPUs leaves none to train"),
        ("--dry-run --gpu-memory 80 --gpus 2 --target-gpus 1 --shard-target", "leaves it whole on one GPU; give"),
        ("--dry-run --gpu-memory 80 --device cpu", "--gpu-memory with --device cpu; leave one of them out"),
        ("--dry-run --gpu-memory 80 --method eagle4", "--method eagle4 is not one of"),
        ("--dry-run --gpu-memory 80 --max-length 9999", "--max-length 9999 is more than the target's context"),
    ],
)  # fmt: skip
def test_what_cannot_be_planned_is_refused(
    given: str, message: str, words: list[Any], fledge: Fledge, no_gpu: None, tmp_path: Path
) -> None:
    del words[5:9]  # the lengths
    refused = fledge(*words, *given.split())
    assert refused.code == 2 and refused.err.startswith("fledge: "), refused.err
    assert message in refused.err and not (tmp_path / "run").exists()


def test_it_is_an_option_of_the_command(words: list[Any], tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="dry_run is an option of the command"):
        package.train_draft(target=words[2], data=words[4], out=tmp_path / "run", dry_run=True)


def test_several_gpus_that_are_there_are_timed_by_their_ranks(
    words: list[Any], fledge: Fledge, monkeypatch: pytest.MonkeyPatch
) -> None:
    """--gpus prints the plan and starts the ranks with its own arguments; its exit code is theirs."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(dry_run, "resolve_device", lambda device: "cuda")
    monkeypatch.setattr("fledge.decode.load.resolve_device", lambda device: "cuda")
    monkeypatch.setattr(dry_run, "total_memory", lambda device: 8 << 30)
    started = []
    monkeypatch.setattr(dry_run, "start_processes", lambda *given: started.append(given) or 3)
    assert launch.needs_processes is dry_run.needs_processes
    went = fledge(*words, "--dry-run", "--gpus", 2)
    assert went.code == 3 and "memory of each of 2 GPUs" in went.out, went.err
    assert started == [(2, [str(word) for word in (*words, "--dry-run", "--gpus", 2)])]


def test_ranks_print_one_plan_and_time_together(words: list[Any], tmp_path: Path) -> None:
    """Two ranks of torchrun on a CPU; as children of --gpus they leave the plan to the process that started them."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "fledge"]
    environment = {**os.environ, "PYTHONPATH": str(TESTS.parent), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    for more, plans in (((), 1), (("--gpus", "2"), 0)):
        command = [*torchrun, *map(str, words), "--dry-run", "--device", "cpu", *more]
        went = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
        assert went.returncode == 0, went.stderr
        assert went.stdout.count("memory of each of 2 processes on CPUs: the target's weights") == plans, went.stdout
        assert went.stdout.count("3 steps took") == went.stdout.count("would take about") == 1
    assert not (tmp_path / "run").exists()


def test_amounts_are_a_table_on_a_terminal() -> None:
    printer = ResultPrinter()
    printer.console = Console(force_terminal=True, width=60, color_system=None)
    with printer.console.capture() as captured:
        printer.amounts("disk", [("draft", "5.2 GiB"), ("metrics", "0.1 MiB")])
    lines = [line.split() for line in captured.get().splitlines() if line.strip()]
    assert lines[0] == ["disk"] and lines[2:] == [["draft", "5.2", "GiB"], ["metrics", "0.1", "MiB"]]


@pytest.mark.gpu
def test_steps_are_timed_on_a_gpu(words: list[Any], fledge: Fledge) -> None:
    """The plan fits, the implementation is measured as for a run, and so is the peak."""
    planned = fledge(*words, "--dry-run", "--device", "cuda", "--dtype", "bfloat16")
    assert planned.code == 0, planned.err
    assert "memory of the GPU: the target's weights" in planned.out and "rows of 128 tokens take about" in planned.err
    assert re.search(r"3 steps took .* tokens/s; their peak on a GPU was [\d.]+ (MB|GB)\.\n", planned.out)
    assert "would take about" in planned.out
