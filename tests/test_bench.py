"""The benchmark programs run on a CPU with small sizes and write records of numbers."""

from __future__ import annotations

import contextlib
import importlib
import json
import math
import os
import random
import runpy
import shutil
import statistics
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, Qwen3MoeConfig

from fledge.commands.serve import ServeOptions
from fledge.drafts.weights import save_draft
from fledge.measure.record import is_record
from fledge.states.vllm_files import STATES
from fledge.targets.loading import load_target
from fledge.types import Round, Trace
from support.chats import tiny_chats
from support.files import write_rows
from support.targets import tiny_draft, tiny_target, tiny_target_directory
from support.vllm_server import FakeVllm

BENCH = Path(__file__).parents[1] / "bench"


def record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, *words: object) -> dict:
    """The record that a benchmark writes when it runs with these arguments."""
    out = tmp_path / f"{name}.json"
    monkeypatch.syspath_prepend(str(BENCH))
    monkeypatch.setattr(sys, "argv", [name, "--out", str(out), "--device", "cpu", *map(str, words)])
    runpy.run_path(str(BENCH / f"{name}.py"), run_name="__main__")
    return json.loads(out.read_text(), parse_constant=pytest.fail)


def test_train_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    words = "--shape", "tiny", "--depth", 3, "--tokens", 512, "--supervised", 0.5, 1, "--slots", 128, "--teachers", "V"
    found = record(tmp_path, monkeypatch, "train_step", *words, "--online", "--target-layers", 8, "--repeats", 1)
    half, whole = found["rows"]
    assert half["slots"] == [255, 254, 253] and whole["scored"] == whole["slots"] == [510, 509, 508]
    assert half["ms"] > 0 and half["teacher"] == "V"
    online = found["online"]
    assert 0 < online["target_ms"] < online["ms"] and online["tokens_per_s"] == pytest.approx(512e3 / online["ms"])


def test_block_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    words = "--shape", "tiny", "--depth", 4, "--cases", "200:24", "--slots", 16, "--repeats", 1
    found = record(tmp_path, monkeypatch, "block_step", *words)
    assert is_record(found)
    (row,) = found["rows"]
    assert row["T"] == 200 and row["anchors"] == 24 == row["slots"][0] and row["scored"] == row["slots"]
    assert row["ratio"] == pytest.approx(row["ms"] / row["products_ms"]) and row["attention_ms"] > 0
    E, inner, heads, kv, V = 64, 128, 64, 32, 512
    context = 2 * 200 * (2 * 2 * 64 * E + 2 * 2 * 3 * E * kv)
    layers = 2 * 24 * 5 * 2 * 3 * (2 * E * heads + 2 * E * kv + 3 * E * inner)
    head = 2 * sum(row["slots"]) * 2 * E * V
    assert row["tflop"] * 1e12 == pytest.approx(context + layers + head, rel=0.2)
    assert row["tflop"] * 1e12 > context + layers + head, "the teacher's logits count too"
    with pytest.raises(SystemExit):
        record(tmp_path, monkeypatch, "block_step", *words, "--impls", "triton")
    assert "flex and triton need a GPU" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (("--tokens", 512, "--supervised", 0.25), "complete spans of 256 tokens cover 0%"),
        (("--tokens", 512, "--impls", "triton"), "need a GPU"),
        ((), "choose others with --tokens"),
    ],
)
def test_train_step_refuses(words: tuple, reason: str, tmp_path, monkeypatch, capsys) -> None:
    with pytest.raises(SystemExit):
        record(tmp_path, monkeypatch, "train_step", *words)
    assert reason in capsys.readouterr().err


def test_decode_kernels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    dtype = torch.get_default_dtype()
    try:
        found = record(tmp_path, monkeypatch, "decode_kernels", "--shape", "tiny", "--lengths", 9, "--repeats", 1)
    finally:
        torch.set_default_dtype(dtype), torch.set_default_device(None)
    kernels = {"attention": 3, "tree": 2, "mask": 2, "norm": 3, "rope": 3, "activation": 3, "likeliest": 3, "draw": 3}
    kernels |= {"filter": 3, "peaked": 3, "sort": 3, "level": 2, "best": 2, "ranked": 2, "prefixes": 2}
    kernels |= {"place": 2, "accept": 2}
    names = [name for name, times in kernels.items() for _ in range(times)]
    blocks = ["ranked"] * 3 + ["prefixes"] * 3
    assert [row["kernel"] for row in found["rows"]] == [*names, *blocks, "fresh", "fresh"]
    assert all(row["us"] > 0 and row["move_us"] > 0 for row in found["rows"])


def test_kernels_of_experts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    pytest.importorskip("triton")
    dtype = torch.get_default_dtype()
    words = "--shape", "tiny-moe", "--lengths", 9, "--repeats", 1
    try:
        rows = record(tmp_path, monkeypatch, "decode_kernels", *words)["rows"]
        with pytest.raises(SystemExit):
            record(tmp_path, monkeypatch, "decode_kernels", "--sweep", "attention")
    finally:
        torch.set_default_dtype(dtype), torch.set_default_device(None)
    assert "a sweep needs a GPU" in capsys.readouterr().err
    one, *more = (row["bytes"] / (2 * 3 * 64 * 32) for row in rows if row["kernel"] == "expert")
    assert one == 2 and len(more) == 2 and all(2 <= read <= 8 for read in more)


DECODE_CASES = ("token", "chain of 7", "tree of 60", "one pass of 7", "block of 15", "block tree of 64")


@pytest.mark.filterwarnings("ignore::fledge.decode.draft_size.ChanceWarning")  # the draft is random
def test_decode_with_experts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The more rows, the more of the experts count. A request joins the running ones."""
    words = "--shape", "tiny-moe", "--context", 9, "--new", 6, "--batch", 1, 2, "--case", "token", "chain of 7"
    rows = record(tmp_path, monkeypatch, "decode", *words, "--engine", "fledge", "--joining", 200)["rows"]
    assert all(min(r["alone_ms"], r["wait_ms"], r["first_token_ms"]) > 0 for r in rows)
    floors = [r["floor_ms"] for r in rows]
    assert len(rows) == 4 and all(0 < r["floor_ms"] < r["ms"] for r in rows) and floors[0] < floors[1] < floors[2]


@pytest.mark.filterwarnings("ignore::fledge.decode.draft_size.ChanceWarning")  # the draft is random
def test_decode(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every kind of round is timed, and none reads its weights faster than the machine."""
    words = "--shape", "tiny", "--context", 9, "--new", 12, "--batch", 1, 2
    rows = record(tmp_path, monkeypatch, "decode", *words)["rows"]
    others = [r for r in rows if r["engine"] == "transformers"]
    assert [(r["what"], r["batch"], r["rounds"]) for r in others] == [("token", 1, 11), ("token", 2, 11)]
    for r in others:
        assert r["tokens_per_s"] == pytest.approx(12e3 * r["batch"] / (11 * r["wall_ms"]))
    own = [r for r in rows if r["engine"] == "fledge"]
    assert [(r["what"], r["batch"]) for r in own] == [(what, batch) for what in DECODE_CASES for batch in (1, 2)]
    for r in own:
        assert r["floor_ms"] < r["ms"] and r["wall_ms"] > 0 and r["tokens_per_s"] > 0
        # of a vocabulary of 512, 63 nodes may hold a token by chance
        assert r["rounds"] == 11 or (r["what"] == "block tree of 64" and 5 < r["rounds"] < 11)
        assert r["ms"] == pytest.approx(r["draft_ms"] + r["verify_ms"])
        assert (r["draft_ms"] > 0) == (r["what"] != "token")
        assert r["devices"] == 1


VLLM = {  # the names of vLLM that the benchmark uses; every request takes a millisecond a round
    "__init__.py": """
import json, pathlib, time, types
__version__ = "0.26.0"

class SamplingParams:
    def __init__(self, temperature, max_tokens, ignore_eos, detokenize):
        assert temperature == 0 and ignore_eos and not detokenize
        self.max_tokens = max_tokens

class LLM:
    def __init__(self, model, load_format, enable_prefix_caching, speculative_config=None, disable_log_stats=True, **_):
        from vllm.model_executor.model_loader import made
        config = json.loads(pathlib.Path(model, "config.json").read_text())
        assert config["architectures"] == ["LlamaForCausalLM"] and config["vocab_size"] == 512
        assert load_format in made and not enable_prefix_caching
        self.draft, self.counts, self.drafts = speculative_config, not disable_log_stats, 0
        if self.draft:
            method = self.draft["method"], self.draft["num_speculative_tokens"]
            assert method in (("eagle3", 7), ("dflash", 15))
            found = json.loads(pathlib.Path(self.draft["model"], "config.json").read_text())
            assert pathlib.Path(self.draft["model"], "model.safetensors").exists()
            if self.draft.get("parallel_drafting"):
                assert found["ptd_token_id"] == 5 and found["num_hidden_layers"] == 4
                raise RuntimeError("no such attention")

    def generate(self, prompts, sampling, use_tqdm):
        assert all(len(p["prompt_token_ids"]) == 9 for p in prompts)
        if self.draft and len(prompts) == 2:
            raise ValueError("too many")
        time.sleep(1e-3 * sampling.max_tokens)
        self.drafts += (sampling.max_tokens // 2) * len(prompts)
        output = types.SimpleNamespace(token_ids=[0] * sampling.max_tokens)
        return [types.SimpleNamespace(outputs=[output])] * len(prompts)

    def get_metrics(self):
        assert self.counts
        return [types.SimpleNamespace(name="vllm:spec_decode_num_drafts", value=self.drafts)]
""",
    "config/__init__.py": "",
    "config/load.py": "class LoadConfig: pass",
    "model_executor/__init__.py": "",
    "model_executor/model_loader.py": """
made = {}

class DummyModelLoader: pass

class DefaultModelLoader: pass

def register_model_loader(name):
    return lambda loader: made.setdefault(name, loader)
""",
}


def test_decode_with_vllm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    """vLLM runs in a process of its own; what fails there is a row with an error, and the other rows are kept."""
    words = "--shape", "tiny", "--context", 9, "--new", 12, "--batch", 1, 2, "--engine", "vllm"
    with pytest.raises(SystemExit):
        record(tmp_path, monkeypatch, "decode", *words)
    assert "needs vLLM, which is not installed here" in capsys.readouterr().err
    for name, text in VLLM.items():
        file = tmp_path / "site" / "vllm" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "site"))
    rows = record(tmp_path, monkeypatch, "decode", *words)["rows"]
    assert [(r["what"], r["batch"]) for r in rows] == [
        (what, batch) for what in DECODE_CASES if "tree of" not in what for batch in (1, 2)
    ]
    assert all(r["engine"] == "vllm 0.26.0" and r["context"] == 9 for r in rows)
    alone, together, chain, *failed, block, last = rows
    for row, rounds in ((alone, 11), (together, 11), (chain, 6), (block, 6)):
        assert row["rounds"] == rounds and 12 / rounds < row["wall_ms"] < 100
        assert row["tokens_per_round"] == pytest.approx(11 / rounds)
        assert row["tokens_per_s"] == pytest.approx(12e3 * row["batch"] / (rounds * row["wall_ms"]))
    errors = ["ValueError: too many"] + 2 * ["vLLM ended with status 1: RuntimeError: no such attention"]
    assert [row["error"] for row in (*failed, last)] == [*errors, "ValueError: too many"]


def test_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second start finds what the first has made."""
    out = tmp_path / "data.json"
    words = (
        "--out",
        out,
        "--records",
        200,
        "--workers",
        2,
        "--work",
        tmp_path,
        "--target",
        BENCH.parent / "fledge" / "demo" / "target",
    )
    monkeypatch.setattr(sys, "argv", ["data", *map(str, words)])
    monkeypatch.setenv("PYTHONPATH", str(BENCH.parent))  # for the processes that it starts
    runpy.run_path(str(BENCH / "data.py"), run_name="__main__")
    found = json.loads(out.read_text())
    first, second = found["first"], found["second"]
    assert first["workers_gib"] > 0 == second["workers_gib"] and first["documents"] == 200 - 16 == second["documents"]
    assert first["sha256"] == second["sha256"] and second["cache_s"] < first["cache_s"]
    assert found["cache_mb"] * 1e6 > 8 * first["tokens"] and [p.name for p in tmp_path.iterdir()] == ["data.json"]


def test_prompt_sets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    demo, prompts = BENCH.parent / "fledge" / "demo", tmp_path / "sums.jsonl"
    prompts.write_text('{"text": "What is 2 + 3?"}\n{"text": "Once upon a time"}\n')
    words = "--target", demo / "target", "--draft", demo / "draft", "--prompts", prompts, "--new", 12, "--repeats", 2
    words = *words, "--seconds", 0.05, "--batch", 1, 2, "--temperature", 0, "--ways", "as trained", "auto", "alone"
    found = record(tmp_path, monkeypatch, "prompt_sets", *words)
    rows = found["rows"]
    assert [(x["way"], x["set"], x["rows"]) for x in found["sets"]] == [(w, "sums", 2) for w in words[-3:]]
    assert found["sets"][0]["speedup"] ** 2 == pytest.approx(rows[0]["speedup"] * rows[1]["speedup"])
    ways = [(way, b) for way in ("as trained", "auto", "alone") for b in (1, 2)]
    assert [(r["way"], r["batch"]) for r in rows] == ways
    assert all(r["tokens_per_s"] > 0 and r["prompts"] == 2 for r in rows)
    assert all(1 <= r["tau"] < 6 if r["way"] != "alone" else r["tau"] == 0 for r in rows), "alone drafts nothing"
    assert all(0 <= r["paused"] <= 1 and r["set"] == "sums" and r["passes"] > 0 for r in rows)
    assert all(r["speedup_iqr"][0] <= r["speedup"] <= r["speedup_iqr"][1] for r in rows)


def test_family(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two drafts of one layer; a second run measures only what the record lacks."""
    for name, n in (("sgd_train", 30), ("sgd_dev", 9), ("gsm8k_train", 50), ("stories", 50)):
        tiny_chats(tmp_path / f"{name}.jsonl", n)
    target = tiny_target_directory(tmp_path, num_hidden_layers=4)
    words = ["--target", target, "--chats", tmp_path, "--work", tmp_path / "work", "--seconds", 0, "--layers", 1]
    words += ["--nodes", 8, "--prompts", 3, "--timed", 1, "--new", 6, "--row-length", 512, "--draft-vocab", 64]
    found = record(tmp_path, monkeypatch, "family", *words, "--draft", "eagle3")
    assert [row["mode"] for row in found["rows"][::3]] == ["none", "chain", "tree of 8"]
    again = record(tmp_path, monkeypatch, "family", *words, "--draft", "eagle3", "dflash causal")
    assert again["rows"][:9] == found["rows"] and [t["draft"] for t in again["training"]] == ["eagle3", "dflash causal"]
    new = again["rows"][9:]
    assert {(row["draft"], row["set"]) for row in new} == {
        ("dflash causal", n) for n in ("sgd_dev", "gsm8k", "stories")
    }
    assert all(row["tau"] >= 1 and row["tokens_per_s_16"] > 0 and row["round_ms"] > row["draft_ms"] for row in new)


def test_few_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    pytest.importorskip("triton")
    dtype = torch.get_default_dtype()
    try:
        words = "--shape", "tiny", "--only", "gate_up", "draft k", "--rows", 1, 8, "--repeats", 1
        found = record(tmp_path, monkeypatch, "few_rows", *words)
        with pytest.raises(SystemExit):
            record(tmp_path, monkeypatch, "few_rows", "--sweep")
    finally:
        torch.set_default_dtype(dtype), torch.set_default_device(None)
    assert "a sweep needs a GPU" in capsys.readouterr().err
    assert [(row["matrix"], row["M"]) for row in found["rows"]] == [
        ("gate_up", 1), ("gate_up", 8), ("draft k", 1), ("draft k", 8)
    ]  # fmt: skip
    assert all(row["us"] > 0 and row["definition_us"] > 0 and row["linear_us"] > 0 for row in found["rows"])


def test_features(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    words = "--shape", "tiny", "--tokens", 1000, "--document", 100, "--rows", 2, "--depth", 2
    words = *words, "--work", tmp_path / "work", "--supervised", 0.5, 1, "--row-length", 250
    rows = record(tmp_path, monkeypatch, "features", *words)["rows"]
    assert [(r["supervised"], r["row_length"]) for r in rows] == [(0.5, 250), (1, 250)]
    for r in rows:
        layers, scales, last = (
            3 * 64,
            3 * 4,
            64 * 2 * (100 * r["supervised"] - (2 if r["supervised"] == 1 else 1)) / 100,
        )
        assert r["bytes_per_token"] == pytest.approx(layers + scales + last + 8, rel=0.05)  # and the headers
        assert all(r[f"read_{name}"]["gb_per_s"] > 0 for name in ("cold", "warm"))
        assert all(r["parts"][f"{name}_ms"] > 0 for name in ("read", "copy", "decode"))
        assert r["step_from_disk"]["tokens_per_s"] > 0 and r["step_from_disk"]["wait_ms"] > 0
    assert not (tmp_path / "work").exists()


def test_scale(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a rank measures, with a target that runs and from features on disk."""
    words = "--shape", "tiny", "--tokens", 128, "--document", 32, "--depth", 2, "--steps", 2
    monkeypatch.setenv("LOCAL_RANK", "0")  # as in a process that the benchmark has started
    rows = record(tmp_path, monkeypatch, "scale", *words, "--source", "disk", "online", "--work", tmp_path / "work")
    assert [(r["what"], r["T"]) for r in rows] == [("online, tiny, shard", 128), ("from disk, tiny, shard", 128)]
    assert all(r["tokens_per_s"] == pytest.approx(128e3 / r["ms"]) for r in rows) and not (tmp_path / "work").exists()


def test_rows_of_scale_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the same commit and device, but for those that are measured again."""
    monkeypatch.syspath_prepend(str(BENCH))
    bench = runpy.run_path(str(BENCH / "scale.py"))
    here, file = {"device": "a GPU", "commit": "abc", "cores": 16}, tmp_path / "scale.json"
    assert bench["rows_of"](file, here) == []
    rows = [{"what": what, "gpus": gpus, "T": 4096, "ms": 1.0} for what in ("online", "disk") for gpus in (1, 2)]
    file.write_text(json.dumps({"environment": here, "rows": rows}))
    assert bench["rows_of"](file, here | {"cores": 32}) == rows
    assert (
        bench["rows_of"](file, here | {"commit": "def"}) == bench["rows_of"](file, here | {"device": "another"}) == []
    )
    found = bench["merged"](rows, [{**rows[1], "ms": 2.0}, {**rows[1], "T": 8192}])
    assert found == [rows[0], {**rows[1], "ms": 2.0}, rows[2], rows[3], {**rows[1], "T": 8192}]


def test_served_features(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a server that behaves as vLLM, each captured state has its own number here; of one that is a token late, the
    record says so, with an exit code."""
    path = tiny_target_directory(tmp_path, num_hidden_layers=3)
    target = load_target(path, implementation="transformers")

    def run(name: str, **how: object) -> dict:
        @contextlib.contextmanager
        def serving(words, *_):
            config = json.loads(words[words.index("--kv-transfer-config") + 1])
            directory = Path(config["kv_connector_extra_config"]["shared_storage_path"])
            with FakeVllm(target, directory, range(1, 4), torch.bfloat16, max_model_len=512, **how) as server:
                yield server.url, 1.0

        monkeypatch.syspath_prepend(str(BENCH))
        module = importlib.import_module("served_features")
        monkeypatch.setattr(module, "serving", serving)
        monkeypatch.setattr(module, "offline", lambda *given: pytest.fail("the server works"))
        words = "--target", path, "--device", "cpu", "--tokens", 2000, "--out", tmp_path / name
        monkeypatch.setattr(sys, "argv", ["served_features", *map(str, words)])
        with pytest.raises(SystemExit) as ended:
            module.main()
        return json.loads((tmp_path / name).read_text()) | {"code": ended.value.code}

    right = run("right.json")
    assert right["agrees"] and not right["code"] and right["files_left"] == 0 and right["timing"]["tokens"] > 1000
    assert [row["best"] for row in right["states"]] == ["1", "2", "3"]
    monkeypatch.setattr("fledge.states.vllm.TOLERANCE", float("inf"))
    late = run("late.json", change=lambda t: t | {STATES: t[STATES].roll(1, 0)})
    assert not late["agrees"] and late["code"]


SERVER = """
import sys, time
from support.openai_server import FakeServer
port = int(sys.argv[sys.argv.index("--port") + 1])
with FakeServer(port=port, depth=2, accepts=(0, 1, 2), speculates="--speculative-config" in sys.argv).started():
    print("started", flush=True)
    time.sleep(60)
"""


def test_serving(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of an engine beside fledge's own are added to the record, case by case; the engine is simulated."""
    target, draft = tiny_target_directory(tmp_path), tmp_path / "draft"
    save_draft(tiny_draft(tiny_target(), draft_vocab_size=200), draft)
    write_rows(tmp_path / "p.jsonl", [{"turns": ["the young bird", "again"]}, {"turns": ["it can fly"]}])
    monkeypatch.setenv("PYTHONPATH", str(BENCH.parent / "tests"))
    monkeypatch.setattr("fledge.engines.export.program", lambda engine: [sys.executable, "-c", SERVER])
    words = ["--target", target, "--prompts", tmp_path / "p.jsonl", "--new", 6, "--concurrency", 1, 2]
    words += ["--parallel", 2]
    engine = ["--", "--max-model-len", 64]
    for k, methods in ((2, ["--draft", f"eagle3={draft}", "--plain"]), (3, ["--draft", f"eagle3={draft}"])):
        found = record(tmp_path, monkeypatch, "serving", *words, "--k", k, *methods, *engine)
    cases = [(row["method"], row["k"], row["concurrency"]) for row in found["rows"]]
    assert cases == [("none", 0, 1), ("none", 0, 2), *[("eagle3", k, c) for k in (2, 3) for c in (1, 2)]]
    for row in found["rows"][2:]:
        assert row["tau"] >= 1 and len(row["alpha"]) == row["k"] and row["vllm_tau"] > 1 and len(row["vllm_alpha"]) == 2
        assert (row["requests"], row["identical_to_first"]) == (3, 3) and row["tokens_per_s"] > 0
        assert row["own_rounds"] > 0 and len(row["z"]) == 2 and row["z"][0] > 0 and row["steps"] is None
    assert found["arguments"] == "--max-model-len 64" and found["rows"][0]["z"] is None
    assert found["rows"][0]["tau"] is found["rows"][0]["vllm_tau"] is None
    assert (tmp_path / "serving_none_0.log").read_text() == "started\n"
    # one of two engines that run together ends
    broken = shutil.copytree(draft, tmp_path / "broken")
    monkeypatch.setattr(
        "fledge.commands.serve.command_of",
        lambda o: [sys.executable, "-c", "exit('no GPU')" if o.draft == str(broken) else SERVER, *o.arguments],
    )
    more = ["--draft", f"broken={broken}", f"again={draft}", "--k", 2]
    with pytest.raises(SystemExit) as ended:
        record(tmp_path, monkeypatch, "serving", *words, *more, *engine)
    assert ended.value.code == 1 and "no GPU" in (tmp_path / "serving_broken_2.log").read_text()
    rows = json.loads((tmp_path / "serving.json").read_text())["rows"]
    assert [row["method"] for row in rows[-2:]] == ["again", "again"]
    with pytest.raises(SystemExit, match="is of another commit or other settings"):
        record(tmp_path, monkeypatch, "serving", *words, "--plain", "--limit", 1, *engine)


def test_serving_trees(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A tree is a case of its own, in the engine and in fledge."""
    target, draft = tiny_target_directory(tmp_path), tmp_path / "draft"
    save_draft(tiny_draft(tiny_target(), draft_vocab_size=200), draft)
    write_rows(tmp_path / "p.jsonl", [{"turns": ["the young bird"]}, {"turns": ["it can fly"]}])
    monkeypatch.setenv("PYTHONPATH", str(BENCH.parent / "tests"))
    server = SERVER.replace("port=port", "port=port, engine='sglang'").replace("speculative-config", "enable-metrics")
    started = []

    def command_of(options: ServeOptions) -> list[str]:
        started.append((options.depth, options.tree_nodes, options.tree_width))
        return [sys.executable, "-c", server, "--enable-metrics", *options.arguments]

    monkeypatch.setattr("fledge.commands.serve.command_of", command_of)
    words = ["--engine", "sglang", "--target", target, "--prompts", tmp_path / "p.jsonl", "--new", 6]
    words += ["--concurrency", 1, "--draft", f"eagle3={draft}", "--k", 3, "--tree", "2:5:3"]
    found = record(tmp_path, monkeypatch, "serving", *words)
    chain, tree = found["rows"]
    assert started == [(3, None, None), (2, 5, 3)]
    assert [(row["k"], row["nodes"], row["width"]) for row in (chain, tree)] == [(3, None, None), (2, 5, 3)]
    assert len(chain["alpha"]) == 3 and len(tree["alpha"]) == 2 and tree["sglang_tau"] > 1 and tree["tau"] >= 1
    assert chain["fledge_identical"] == 0 and chain["equal_answers"] is None
    assert (tmp_path / "serving_eagle3_2_5_3.log").exists()


def test_serving_compares_equal_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Over these alone, τ is that of rounds that drafted after the same texts; vLLM does not count by request."""
    monkeypatch.syspath_prepend(str(BENCH))
    of_equal_answers = runpy.run_path(str(BENCH / "serving.py"))["of_equal_answers"]

    def answers(*metas: dict) -> SimpleNamespace:
        asked = [SimpleNamespace(answer=SimpleNamespace(text=t, meta=m)) for t, m in zip("abc", metas, strict=True)]
        return SimpleNamespace(requests=asked)

    def counts(rounds: int, accepted: int) -> dict:
        return {"spec_verify_ct": rounds, "spec_num_correct_drafts": accepted, "completion_tokens": 9}

    traces = [Trace([Round(3, n)] * 2) for n in (1, 2, 3)]
    own = {"completions": [SimpleNamespace(text=t, trace=trace) for t, trace in zip("axc", traces, strict=True)]}
    assert of_equal_answers(own, answers(counts(2, 2), counts(5, 0), counts(3, 6))) == {
        "answers": 2, "tau": 3.0, "engine_tau": 1 + 8 / 5, "rounds": 4, "engine_rounds": 5,
        "difference_se": pytest.approx(1.0),
    }  # fmt: skip
    assert of_equal_answers(own, answers({}, {}, {})) is None


def test_z_is_that_of_two_proportions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCH))
    z = runpy.run_path(str(BENCH / "serving.py"))["_z"]
    draw, values = random.Random(0), []
    for _ in range(2000):
        passed = [sum(draw.random() < 0.3 for _ in range(n)) for n in (80, 120)]
        values.append(z(80, passed[0], 120, passed[1]))
    assert abs(statistics.mean(values)) < 0.1 and abs(statistics.stdev(values) - 1) < 0.1
    assert z(0, 0, 5, 2) is None and z(5, 5, 5, 5) is None and z(50, 40, 50, 10) > 5


def test_regenerate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A killed `fledge regenerate` loses and repeats nothing; the engine is simulated, and its own benchmark left
    out."""
    target, chats = tiny_target_directory(tmp_path), tiny_chats(tmp_path / "chats.jsonl", 30)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(BENCH.parent), str(BENCH.parent / "tests")]))
    server = "from transformers import AutoTokenizer\n" + SERVER.replace(
        "port=port", f"port=port, latency=0.01, tokenizer=AutoTokenizer.from_pretrained({str(target)!r})"
    )
    monkeypatch.setattr("fledge.engines.export.program", lambda engine: [sys.executable, "-c", server])
    monkeypatch.syspath_prepend(str(BENCH))
    monkeypatch.delitem(sys.modules, "serving", raising=False)
    module = importlib.import_module("regenerate")
    monkeypatch.setattr(module, "by_vllm", lambda *given: {"tokens": 1})
    words = "--target", target, "--data", chats, "--records", 20, "--concurrency", 2, "--new", 6, "--kills", 1
    monkeypatch.setattr(sys, "argv", ["regenerate", *map(str, words), "--device", "cpu", "--out", str(tmp_path / "r")])
    module.main()
    found = json.loads((tmp_path / "r").read_text())
    pair = ["vllm bench serve", "fledge regenerate"]
    assert [row["what"] for row in found["rows"]] == [*pair, *reversed(pair)]
    assert found["rows"][1]["completed"] > 10 and found["rows"][1]["tokens"] > 0
    assert len(found["killed"]["records_at_kills"]) == 1 and found["killed"]["records_at_kills"][0] > 0
    assert (found["killed"]["lost"], found["killed"]["twice"], found["killed"]["answered_otherwise"]) == (0, 0, 0)


def test_the_chosen_experts_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """The work of a mixture's token: two of eight experts, and all other matrices."""
    monkeypatch.syspath_prepend(str(BENCH))
    active_elements = runpy.run_path(str(BENCH / "scale.py"))["active_elements"]
    sizes = dict(hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2, head_dim=8)
    mixture = dict(num_experts=8, num_experts_per_tok=2, moe_intermediate_size=12)
    config = Qwen3MoeConfig(**sizes, **mixture, num_key_value_heads=2, vocab_size=40)
    model = AutoModelForCausalLM.from_config(config)
    every = sum(p.numel() for p in model.parameters() if p.dim() > 1)
    unused = 6 * 3 * 12 * 16
    assert active_elements(SimpleNamespace(model=model, config=config)) == every - unused


def test_golden_compares_all_but_times(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Times, speeds, commits and the directories of both sides do not count; each bit of other numbers does."""
    monkeypatch.syspath_prepend(str(BENCH))
    compare_folders = runpy.run_path(str(BENCH / "golden.py"))["compare_folders"]
    table = "prompts     τ  tokens/s  identical\n5        {:.2f}       {}        5/5\n"

    def difference(name: str, *contents: object) -> list[str]:
        """The differences of two folders of a case, each with one file of the given content."""
        folders = [tmp_path / side / "case" for side in ("base", "here")]
        for folder, content in zip(folders, contents, strict=True):
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir(parents=True)
            if isinstance(content, dict) and name.endswith(".safetensors"):
                save_file(content, folder / name)
            elif content is not None:
                text = content if isinstance(content, str) else json.dumps(content)
                (folder / name).write_text(text.replace("HERE", str(folder)))
        return compare_folders(*folders)

    w = torch.tensor([1.0, -4.0])
    for name, a, b in (
        ("m.jsonl", {"loss": 0.1, "seconds": 1}, {"loss": 0.1, "seconds": 2}),
        ("r.json", {"of": "HERE/run", "environment": {"commit": "a"}, "x": math.nan},
         {"of": "HERE/run", "environment": {}, "x": math.nan}),
        ("stdout", table.format(1.5, 900), table.format(1.5, 1111)),
        ("stdout", "8 steps took 0.09 s each", "8 steps took 0.1 s each"),
        ("p.html", "<svg>1</svg><p>τ is 2</p><p>2 times faster</p>", "<svg>2</svg><p>τ is 2</p><p>as fast in time</p>"),
        ("w.safetensors", {"a": w}, {"a": w.clone()}),
    ):  # fmt: skip
        assert difference(name, a, b) == []
    for name, a, b, found in (
        ("m.jsonl", {"loss": 0.1}, {"loss": 0.1 + 2**-56}, "m.jsonl: [0].loss: 0.1 → 0.10000000000000002"),
        ("r.json", {"a": [1, 2]}, {"a": [1]}, "r.json: .a: 2 → 1 items"),
        ("r.json", {"a": 1, "b": 2}, {"a": 1}, "r.json: .b: only one side has it"),
        ("r.json", {"a": 1}, None, "r.json: only one side writes it"),
        ("stdout", table.format(1.5, 900), table.format(1.51, 900), "stdout: [1]: '5  1.5'.. '0  5/5' → '1  5/5'"),
        ("w.safetensors", {"a": w}, {"a": w + 1}, "w.safetensors: a: largest relative difference 2.5e-01"),
        ("w.safetensors", {"a": w}, {"a": w.double()}, "w.safetensors: a: another dtype or shape"),
    ):
        assert difference(name, a, b) == [found]
