"""Training from hidden states of vLLM: the client, its files, and the commands, with a server that behaves as vLLM."""

from __future__ import annotations

import re
import shlex
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import DeepseekV3Config

from fledge.data.documents import Document
from fledge.data.pack import make_row
from fledge.drafts.weights import load_draft
from fledge.states.layout import needed_tokens
from fledge.states.vllm import Patience, VllmFeatures, VllmServer
from fledge.states.vllm_files import (
    STATES,
    TOKENS,
    StatesFolder,
    directory_of,
    layers_of,
    lock_of,
    lock_state,
    serve_words,
)
from fledge.targets.distributed import load_head
from fledge.targets.loading import load_target
from fledge.targets.source import LiveFeatures
from fledge.targets.transformers import TransformersTarget
from fledge.train.setup.options import ServedOptions
from fledge.train.setup.target import open_served_features
from fledge.types import Features, Packed
from support.chats import tiny_chats
from support.commands import Ran
from support.files import metrics_of
from support.runs import recipe_of
from support.targets import tiny_target, tiny_target_directory
from support.vllm_server import FakeVllm, write_states

Fledge = Callable[..., Ran]

LAYERS, ALL = (2, 4, 5), (2, 4, 5, 8)  # those that an EAGLE-3 draft reads of 8 layers, and those that vLLM captures
QUICK = Patience(answer=2, file=1.0, nudge=0.1)
TRAIN = "--max-length", 64, "--row-length", 128, "--steps", 5, "--depth", 2, "--draft-vocab", 200, "--device", "cpu"
START = "vllm serve tiny"


def documents(*lengths: int) -> list[Document]:
    draw = torch.Generator().manual_seed(0)
    made = []
    for n in lengths:
        spans = np.zeros(n, dtype=np.int32)
        spans[: n // 3] = spans[-2:] = -1  # a prompt, and what a template puts after an answer
        made.append(Document(torch.randint(5, 400, (n,), generator=draw, dtype=torch.int32).numpy(), spans))
    return made


DOCUMENTS = documents(20, 33, 9)
ROW = make_row(DOCUMENTS, 80, sources=range(3))


def client(server: FakeVllm, say: Callable[[str], None] = print, **options) -> VllmServer:
    return VllmServer(server.url, START, say, **{"patience": QUICK, **options})


def source_of(states, target: TransformersTarget, layers=LAYERS, captured=ALL) -> VllmFeatures:
    return VllmFeatures(states, target, layers, captured)


@pytest.fixture(autouse=True)
def short_delays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fledge.io.http.FIRST_DELAY", 0.001)


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> Path:
    root = tmp_path_factory.mktemp("made")
    tiny_target_directory(root)
    tiny_chats(root / "chats.jsonl", 40)
    (root / "prompts.jsonl").write_text('{"text": "The young bird tries its wings, falls, and tries again."}\n')
    return root


@pytest.fixture(scope="module")
def loaded(made: Path) -> TransformersTarget:
    return load_target(made / "target", implementation="transformers")


# -- the source ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layers", [LAYERS, (1, 8), ()])
def test_features_are_those_of_the_target(layers: tuple[int, ...], target, tmp_path: Path) -> None:
    """Numbering, final norm and alignment: layer i is the input of decoder layer i, n that of the final norm."""
    captured = tuple(sorted({*layers, 8}))
    with FakeVllm(target, tmp_path, captured) as server:
        found = source_of(client(server), target, layers, captured).features(ROW)
    expected = LiveFeatures(target, layers).features(ROW)
    torch.testing.assert_close(found.aux_TAD, expected.aux_TAD, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(found.last_TD, expected.last_TD, rtol=1e-4, atol=1e-4)
    assert not found.aux_TAD[62:].any() and not found.last_TD[62:].any() and not list(tmp_path.iterdir())


def test_bfloat16_files_are_the_rounded_states(target, tmp_path: Path) -> None:
    with FakeVllm(target, tmp_path, (1, 8), dtype=torch.bfloat16) as server:
        found = source_of(client(server), target, (1, 8), (1, 8)).features(ROW)
    expected = LiveFeatures(target, (1, 8)).features(ROW).aux_TAD.bfloat16().float()
    torch.testing.assert_close(found.aux_TAD, expected, rtol=1e-2, atol=1e-3)
    assert torch.equal(found.aux_TAD[:62], found.aux_TAD[:62].bfloat16().float())
    assert torch.equal(found.last_TD[:62], target.norm(found.aux_TAD[:62, 1]))


def test_rows_are_asked_for_ahead(target, tmp_path: Path) -> None:
    """Several documents are in flight, the rows come in order, and each document is asked for once."""
    rows = [replace(ROW, sources=(i, i + 1, i + 2)) for i in range(6)]
    with FakeVllm(target, tmp_path, ALL, delay=0.03) as server:
        source = source_of(client(server, patience=Patience()), target)
        given = [(row, source.features(row)) for row in source.ahead(iter(rows))]
    assert [row.sources for row, _ in given] == [row.sources for row in rows]
    assert len(server.requests) == 18 and server.at_once > 3
    assert all(torch.equal(f.last_TD, given[0][1].last_TD) for _, f in given) and not list(tmp_path.iterdir())


def test_training_that_stops_early_waits_for_nothing(target, tmp_path: Path) -> None:
    with FakeVllm(target, tmp_path, ALL, stuck=True) as server:
        states = client(server, patience=Patience(file=60, nudge=60))
        rows = source_of(states, target).ahead(iter([ROW] * 5))
        next(rows)
        began = time.monotonic()
        rows.close()
    assert time.monotonic() - began < 3


def test_a_row_without_sources_gets_zeros(target, tmp_path: Path) -> None:
    with FakeVllm(target, tmp_path, ALL) as server:
        found = source_of(client(server), target).features(replace(ROW, sources=()))
    assert not server.requests and found.aux_TAD.shape == (80, 3, 32) and not found.last_TD.any()


# -- what can be wrong --------------------------------------------------------------------------------------------


def named(path: str) -> dict:
    return {"kv_transfer_params": {"hidden_states_path": path}}


def next_token(token: int, log_probability: float) -> dict:
    return {"choices": [{"token_ids": [token], "logprobs": {"token_logprobs": [log_probability]}}]}


@pytest.mark.parametrize(
    ("how", "message"),
    [
        (dict(change=lambda t: t | {TOKENS: t[TOKENS] + 1}), "other tokens than those that were asked for: they"),
        (dict(change=lambda t: {name: x[:-1] for name, x in t.items()}), "they differ after 8 of 9 tokens"),
        (dict(change=lambda t: t | {STATES: t[STATES][:-1]}), r"shape \[8, 4, 32\] for 9 tokens"),
        (dict(change=lambda t: {TOKENS: t[TOKENS]}), "is not a file of hidden states of vLLM"),
        (dict(change=lambda t: None), "has not written .* within 1 s of its answer; look at its log"),
        (dict(delay=9), "has not written .* within 1 s of its answer; look at its log"),
        (dict(layers=(2, 4, 8)), r"gives 3 states .* not those of the 4 layers \[2, 4, 5, 8\] .*--features-layers"),
        (dict(layers=(2, 4, 5, 7)), "hidden states are not those of tiny llama: its next token"),
        (dict(change=lambda t: t | {STATES: t[STATES].roll(1, 0)}), "hidden states are not those of"),
        (dict(change=lambda t: t | {STATES: t[STATES] * float("nan")}), "hidden states are not those of"),
        (dict(change=lambda t: t | {STATES: torch.zeros_like(t[STATES])}), "hidden states are not those of"),
        (dict(locks=False), "has no lock beside it, .*without use_synchronization_lock: vllm serve tiny"),
        (dict(connector=False), "writes no hidden states, as only vLLM with its connector.* does: vllm serve tiny"),
        (dict(seen_path="/nowhere/states"), "/nowhere/states, which this machine does not see.*--features-map"),
        (dict(alter=lambda a: [a]), "has not answered a request in 5 attempts, .*: an answer that is no JSON object"),
        (dict(alter=lambda a: b"[" * 200_000), "in 5 attempts, .* because: an answer that is no JSON; look at"),
        (dict(alter=lambda a: {"kv_transfer_params": ["x"]}), "writes no hidden states, as only vLLM with its conn"),
        (dict(alter=lambda a: named("/x" * 9999 + "/y.safetensors")), "/x/x, which this machine does not see"),
        (dict(alter=lambda a: named("x" * 999 + ".safetensors")), "names xxx.* which ends in .safetensors"),
        (dict(alter=lambda a: named("\0.safetensors")), "which ends in .safetensors"),
        (dict(alter=lambda a: a | next_token(10**30, -1.0)), "which has no token 1000000.* serves another model"),
        (dict(alter=lambda a: a | next_token(-1, -1.0)), "which has no token -1: .* serves another model"),
        (dict(alter=lambda a: a | next_token(3, float("nan"))), "has the log-probability nan there"),
        (dict(drip=0.03), "has not answered a request for hidden states within 2 s"),
        (dict(status=400), "refuses a request for the hidden states of 9 tokens: .* status 400: the engine is dead"),
    ],
)  # fmt: skip
def test_problems_are_said(how: dict, message: str, target, tmp_path: Path) -> None:
    with FakeVllm(target, tmp_path, **{"layers": ALL, **how}) as server, pytest.raises(ValueError, match=message):
        source_of(client(server), target).features(make_row(DOCUMENTS[2:], 9, sources=[0]))


def test_a_server_that_sends_elsewhere_gets_no_documents(target, tmp_path: Path) -> None:
    with FakeVllm(target, tmp_path, ALL) as other, FakeVllm(target, tmp_path, ALL, redirect=other.url) as server:
        with pytest.raises(ValueError, match=f"{server.url}/v1/.* cannot be read: it redirects to {other.url}; give"):
            client(server)
        server.redirect = ""
        states = client(server)
        server.redirect = other.url
        with pytest.raises(ValueError, match=f"{server.url}/v1/.* cannot be read: it redirects to {other.url}; give"):
            source_of(states, target).features(ROW)
        assert not other.requests


def test_states_of_another_target_are_refused(target, tmp_path: Path) -> None:
    with FakeVllm(tiny_target(seed=3), tmp_path, ALL) as server, pytest.raises(ValueError, match="another model"):
        source_of(client(server), target).features(ROW)


def test_layers_that_are_not_captured_are_refused(target, tmp_path: Path) -> None:
    (tmp_path / "x").mkdir()
    write_states(tmp_path / "x" / "a.safetensors", target, [5, 6, 7], ALL)
    folder = StatesFolder(tmp_path / "x")
    with pytest.raises(ValueError, match=r"layer 0, the embedding, cannot be had from vLLM.*--aux-layers"):
        source_of(folder, target, (0, 2, 5), (0, 2, 5, 8))
    with pytest.raises(ValueError, match=r"captures the layers \[2, 4, 5\], and training also needs \[8\]"):
        source_of(folder, target, LAYERS, LAYERS)


def test_requests_are_repeated(target, tmp_path: Path) -> None:
    """A dropped connection is no end; a server that is gone is one, in one sentence."""
    with FakeVllm(target, tmp_path, ALL, failures=2) as server:
        states = client(server)
        assert source_of(states, target).features(ROW).last_TD.any()
        server.failures = 1000
        with pytest.raises(ValueError, match="has not answered a request in 5 attempts"):
            source_of(states, target).features(ROW)


def test_a_server_that_waits_for_a_step_is_nudged(target, tmp_path: Path) -> None:
    """The files of the last requests are written with the scheduler's next step; a further request makes it."""
    with FakeVllm(target, tmp_path, ALL, stuck=True) as server:
        found = source_of(client(server), target).features(ROW)
    assert found.last_TD.any() and [0] in server.requests


def test_another_path_here(target, tmp_path: Path) -> None:
    with FakeVllm(target, tmp_path / "here", ALL, seen_path="/srv/there") as server:
        states = client(server, mapped=(Path("/srv/there"), tmp_path / "here"))
        assert source_of(states, target).features(ROW).last_TD.any()


def test_files_that_cannot_be_deleted(target, tmp_path: Path, monkeypatch) -> None:
    def refuse(file: Path) -> None:
        raise PermissionError(1, "Operation not permitted")

    said: list[str] = []
    monkeypatch.setattr("fledge.states.vllm.remove", refuse)
    with FakeVllm(target, tmp_path, ALL) as server:
        source_of(client(server, said.append), target).features(ROW)
    assert len(said) == 2 and "cannot be deleted after its use (Operation not permitted)" in said[1]


@pytest.mark.parametrize("name", ["notes.txt", "weights.safetensors"])
def test_a_file_that_is_not_vllms_is_not_deleted(name: str, target, tmp_path: Path, monkeypatch) -> None:
    file = tmp_path / name
    save_file({"x": torch.zeros(2)}, file)
    lock_of(file).touch()
    answer = FakeVllm.complete
    found = {"kv_transfer_params": {"hidden_states_path": str(file)}}
    monkeypatch.setattr(FakeVllm, "complete", lambda self, body: answer(self, body) | found)
    message = "not a file of hidden states of vLLM" if file.suffix == ".safetensors" else "names .*notes.txt as a file"
    with FakeVllm(target, tmp_path / "states", ALL) as server, pytest.raises(ValueError, match=message):
        source_of(client(server), target).features(ROW)
    assert file.exists() and lock_of(file).exists()


def test_too_long_documents(target, tmp_path: Path) -> None:
    with FakeVllm(target, tmp_path, ALL, max_model_len=33) as server:
        source = source_of(client(server), target)
        source.check(DOCUMENTS[::2])
        with pytest.raises(ValueError, match=r"33 tokens, .* up to 32; give --max-length 32, or .*max-model-len 34"):
            source.check(DOCUMENTS)


# -- a directory of files -----------------------------------------------------------------------------------------


def test_a_folder(target, tmp_path: Path) -> None:
    """Files are found by their tokens: of the document, of a longer text, and of one without a document's last tokens,
    which the loss does not need."""
    first, second, third = (d.tokens.tolist() for d in DOCUMENTS)
    for name, tokens in (("a", first), ("b", [*second, 7, 8]), ("c", third[: needed_tokens(DOCUMENTS[2])])):
        write_states(tmp_path / f"{name}.safetensors", target, tokens, ALL)
    save_file({"x": torch.zeros(2)}, tmp_path / "other.safetensors")
    lock_of(tmp_path / "a.safetensors").touch()
    source = source_of(StatesFolder(tmp_path), target)
    source.check(DOCUMENTS)
    found, expected = source.features(ROW), LiveFeatures(target, LAYERS).features(ROW)
    covered = 53 + needed_tokens(DOCUMENTS[2])
    assert covered < 62
    for ours, theirs in ((found.aux_TAD, expected.aux_TAD), (found.last_TD, expected.last_TD)):
        torch.testing.assert_close(ours[:covered], theirs[:covered], rtol=1e-4, atol=1e-4)
        assert not ours[covered:].any()
    assert ROW.live(1)[0].max() + 1 < covered and len(list(tmp_path.iterdir())) == 5


def test_a_folder_that_lacks_documents(target, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="holds no hidden states"):
        StatesFolder(tmp_path)
    write_states(tmp_path / "a.safetensors", target, DOCUMENTS[0].tokens.tolist()[:12], ALL)
    source = source_of(StatesFolder(tmp_path), target)
    with pytest.raises(
        ValueError, match="lacks the hidden states of 3 of 3 documents, such as one of 20 tokens; vLLM's"
    ):
        source.check(DOCUMENTS)
    with pytest.raises(ValueError, match="has no hidden states of a document of"):
        source.features(ROW)
    (tmp_path / "b.safetensors").write_bytes((tmp_path / "a.safetensors").read_bytes()[:50])
    with pytest.raises(ValueError, match=r"b.safetensors is truncated or damaged"):
        StatesFolder(tmp_path)


def test_a_folder_that_is_being_written(target, tmp_path: Path) -> None:
    with FakeVllm(target, tmp_path, ALL, stuck=True) as server:
        write_states(tmp_path / "cmpl-0-0.safetensors", target, [5, 6, 7], ALL)
        server.complete({"prompt": [5, 6, 7]})
        assert lock_state(tmp_path / "cmpl-0-0.safetensors") == "held"
        with pytest.raises(ValueError, match="is still being written"):
            StatesFolder(tmp_path)


# -- the checkpoint -----------------------------------------------------------------------------------------------


def quantized_checkpoint(path: Path) -> None:
    """Changes a checkpoint as a quantized one looks: projections in fp8 with scales, other weights as before."""
    tensors = load_file(path / "model.safetensors")
    for name in [n for n in tensors if "proj" in n]:
        tensors[name] = tensors[name].to(torch.float8_e4m3fn)
        tensors[f"{name}_scale"] = torch.ones(1)
    save_file(tensors, path / "model.safetensors", {"format": "pt"})
    config = (path / "config.json").read_text()
    (path / "config.json").write_text(config.replace("{", '{"quantization_config": {"quant_method": "fp8"},', 1))


def test_the_head_of_a_quantized_target(tmp_path: Path) -> None:
    path = tiny_target_directory(tmp_path)
    whole = load_head(path)
    quantized_checkpoint(path)
    head = load_head(path)
    assert torch.equal(head.embedding, whole.embedding) and torch.equal(head.head_weight, whole.head_weight)
    norms = {n: w for n, w in whole.last_layer_weights().items() if "norm" in n}
    found = head.last_layer_weights()
    assert len(norms) == 3 and found.keys() == norms.keys() and all(torch.equal(found[n], norms[n]) for n in norms)


def test_a_head_that_is_quantized_is_not_taken(tmp_path: Path) -> None:
    path = tiny_target_directory(tmp_path)
    tensors = load_file(path / "model.safetensors")
    tensors["lm_head.weight"] = tensors["lm_head.weight"].to(torch.float8_e4m3fn)
    save_file(tensors, path / "model.safetensors", {"format": "pt"})
    assert load_head(path) is None


# -- the commands -------------------------------------------------------------------------------------------------


def losses(run: Path) -> list[float]:
    return [m["loss"] for m in metrics_of(run)]


def train_words(made: Path, out: Path, *more: object) -> list[object]:
    return ["train", "--target", made / "target", "--data", made / "chats.jsonl", "--out", out, *TRAIN, *more]


@pytest.fixture(scope="module")
def live(made: Path, tmp_path_factory) -> Path:
    """A run whose target computes the hidden states itself, on the same documents."""
    from fledge.commands.train import run
    from fledge.io.display import ProgressDisplay
    from fledge.train.setup.options import TrainOptions

    out, display = tmp_path_factory.mktemp("live") / "run", ProgressDisplay(quiet=True)
    options = TrainOptions(
        target=str(made / "target"), data=[str(made / "chats.jsonl")], out=str(out), max_length=64, row_length=128,
        steps=5, depth=2, draft_vocab=200, device="cpu", eval_prompts=str(made / "prompts.jsonl"), eval_tokens=2,
    )  # fmt: skip
    run(options, lambda line: None, display)
    return out


def test_training_from_a_server_is_training_live(fledge: Fledge, made, loaded, live: Path, tmp_path: Path) -> None:
    with FakeVllm(loaded, tmp_path / "states", ALL, delay=0.01) as server:
        ran = fledge(*train_words(made, tmp_path / "run", "--features-from", server.url))
    assert ran.code == 0 and "fledge eval measures it afterwards" in ran.err, ran.err
    assert losses(tmp_path / "run") == pytest.approx(losses(live), rel=1e-4)
    ours, theirs = (load_draft(run / "draft").state_dict() for run in (tmp_path / "run", live))
    assert all(torch.allclose(ours[n].float(), theirs[n].float(), atol=1e-2) for n in theirs)
    assert recipe_of(tmp_path / "run")["features_from"] == server.url and not list((tmp_path / "states").iterdir())


def test_features_on_disk_from_a_server(fledge: Fledge, made, loaded, tmp_path: Path) -> None:
    """The cache is that of the target itself, and is trained on without the server."""
    words = "--data", made / "chats.jsonl", "--max-length", 64, "--target", made / "target"
    with FakeVllm(loaded, tmp_path / "states", ALL) as server:
        wrote = fledge("features", *words, "--out", tmp_path / "vllm", "--features-from", server.url)
    assert wrote.code == 0, wrote.err
    assert fledge("features", *words, "--out", tmp_path / "own").code == 0
    for file in (tmp_path / "own").glob("shard*"):
        ours, theirs = load_file(tmp_path / "vllm" / file.name), load_file(file)
        assert all(torch.allclose(ours[n], theirs[n], rtol=1e-4, atol=1e-4) for n in theirs)
    ran = fledge("train", "--features", tmp_path / "vllm", "--out", tmp_path / "run", *TRAIN[2:])
    assert ran.code == 0 and len(losses(tmp_path / "run")) == 5, ran.err


def test_training_from_a_folder(fledge: Fledge, made, loaded, live: Path, tmp_path: Path) -> None:
    """Also with more layers than the draft reads, and none that is missing."""
    more, folder = (0, *ALL), tmp_path / "folder"
    folder.mkdir()
    with FakeVllm(loaded, tmp_path / "states", ALL) as server:
        assert fledge(*train_words(made, tmp_path / "first", "--features-from", server.url)).code == 0
        for i, tokens in enumerate(server.requests):
            write_states(folder / f"{i}.safetensors", loaded, tokens, more)
    words = train_words(made, tmp_path / "run", "--features-from", folder, "--features-layers", "0,2,4,5,8")
    ran = fledge(*words)
    assert ran.code == 2 and "lacks the hidden states of" in ran.err and not (tmp_path / "run" / "draft").exists()
    from fledge.states import vllm as source

    (tmp_path / "all").mkdir()
    asked: list[Document] = []
    check = source.VllmFeatures.check
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(source.VllmFeatures, "check", lambda self, found: asked.extend(found) or check(self, found))
        assert fledge(*words).code == 2
    for i, document in enumerate(asked):
        write_states(folder / f"all-{i}.safetensors", loaded, document.tokens.tolist(), more)
    ran = fledge(*words)
    assert ran.code == 0 and losses(tmp_path / "run") == pytest.approx(losses(live), rel=1e-4), ran.err


def test_a_quantized_target_is_trained_for(fledge: Fledge, made, loaded, tmp_path: Path) -> None:
    """Only the server has the target; features that it gave can be kept and trained on."""
    path = tiny_target_directory(tmp_path)
    quantized_checkpoint(path)
    words = "--target", path, "--data", made / "chats.jsonl", "--max-length", 64
    with FakeVllm(loaded, tmp_path / "states", ALL) as server:
        ran = fledge("train", *words, "--features-from", server.url, "--out", tmp_path / "run", *TRAIN[2:])
        assert ran.code == 0, ran.err
        wrote = fledge("features", *words, "--features-from", server.url, "--out", tmp_path / "f")
        assert wrote.code == 0, wrote.err
    ran = fledge("train", "--features", tmp_path / "f", "--out", tmp_path / "again", *TRAIN[2:])
    assert ran.code == 0 and "the whole target is loaded" not in ran.err, ran.err


def test_eagle1_from_a_server(fledge: Fledge, made, loaded, tmp_path: Path) -> None:
    words = [w for w in TRAIN if w not in ("--draft-vocab", 200)]
    with FakeVllm(loaded, tmp_path / "states", (8,)) as server:
        ran = fledge(
            *train_words(made, tmp_path / "run")[:7], *words, "--method", "eagle1", "--features-from", server.url
        )
    assert ran.code == 0 and len(losses(tmp_path / "run")) == 5, ran.err


def test_a_run_continues_at_another_address(fledge: Fledge, made, loaded, tmp_path: Path) -> None:
    words = train_words(made, tmp_path / "run", "--save-every", 2)
    with FakeVllm(loaded, tmp_path / "states", ALL) as server:
        assert fledge(*words[:6], tmp_path / "whole", *words[7:], "--features-from", server.url).code == 0
        count = len(server.requests)
    answer = FakeVllm.complete

    def failing(self, body):
        if len(self.requests) > count // 2:
            self.status = 400
        return answer(self, body)

    with FakeVllm(loaded, tmp_path / "states", ALL) as server, pytest.MonkeyPatch.context() as patch:
        patch.setattr(FakeVllm, "complete", failing)
        ran = fledge(*words, "--features-from", server.url)
        assert ran.code == 2 and "refuses a request" in ran.err
    ran = fledge("train", "--resume", tmp_path / "run")
    assert ran.code == 2 and "no server answers at" in ran.err
    with FakeVllm(loaded, tmp_path / "states", ALL) as server:
        ran = fledge("train", "--resume", tmp_path / "run", "--features-from", server.url)
    assert ran.code == 0 and losses(tmp_path / "run") == losses(tmp_path / "whole"), ran.err


def test_without_a_server_the_command_that_starts_it(fledge: Fledge, made, tmp_path: Path) -> None:
    ran = fledge(*train_words(made, tmp_path / "run", "--features-from", "http://127.0.0.1:9"))
    assert ran.code == 2 and not (tmp_path / "run").exists()
    command = shlex.split(ran.err[ran.err.index("vllm serve") :])
    assert command == serve_words(str(made / "target"), ALL, 65)


def test_a_target_that_the_connector_refuses_asks_no_server(target, tmp_path: Path) -> None:
    """By its config; MiniCPM3 has the same field, and ordinary attention in vLLM."""

    def opened(model_type: str, rank: int | None) -> None:
        config = DeepseekV3Config() if model_type == "deepseek_v3" else SimpleNamespace(model_type=model_type)
        config.kv_lora_rank = rank
        latent = SimpleNamespace(config=config, name="t", num_layers=8, context=256, trust_remote_code=False)
        options = ServedOptions(features_from="http://127.0.0.1:9", api_key_env="KEY")
        open_served_features(options, latent, LAYERS, 64, print)

    with pytest.raises(ValueError, match=r"t has multi-head latent attention \(kv_lora_rank 512\)"):
        opened("deepseek_v3", 512)
    for model_type, rank in (("minicpm3", 256), ("llama", None)):
        with pytest.raises(ValueError, match="no server answers at"):
            opened(model_type, rank)


OTHERS = tuple(i - (i == ALL[0]) for i in ALL)  # as many other layers, with the same last one


@pytest.mark.parametrize("kind", ["server", "folder"])
def test_the_directory_says_which_layers_are_captured(kind: str, target, tmp_path: Path) -> None:
    """vLLM writes states without the layers' ids: as many of other layers look the same."""
    said: list[str] = []

    def features(directory: Path, layers: tuple[int, ...]) -> Features:
        directory.mkdir()
        if kind == "folder":
            for i, d in enumerate(DOCUMENTS):
                write_states(directory / f"{i}.safetensors", target, d.tokens.tolist(), layers)
            return source_of(StatesFolder(directory), target).features(ROW)
        with FakeVllm(target, directory, layers) as server:
            return source_of(client(server, said.append), target).features(ROW)

    sound = features(Path(tmp_path, Path(directory_of(ALL)).name), ALL)
    assert not said
    with pytest.raises(ValueError, match=re.escape(f"vLLM captures the layers {list(OTHERS)}, as the name of its")):
        features(Path(tmp_path, Path(directory_of(OTHERS)).name), OTHERS)
    unnamed = features(tmp_path / "states", OTHERS)
    assert not torch.equal(unnamed.aux_TAD, sound.aux_TAD) and len(said) == (kind == "server")
    assert kind == "folder" or "which layers vLLM captured, so they are not checked" in said[0]


def test_names_of_directories() -> None:
    assert directory_of((2, 16, 32)) == "/dev/shm/hidden-states-2-16-32"
    assert layers_of("/a/hidden-states-2-16-32/") == layers_of("hidden-states-2-16-32") == (2, 16, 32)
    assert layers_of("/a/hidden-states") is layers_of("/hidden-states-2/b") is layers_of("hidden-states-a") is None


def test_a_server_with_a_key(fledge: Fledge, made, loaded, tmp_path: Path, monkeypatch) -> None:
    with FakeVllm(loaded, tmp_path / "states", ALL, key="secret") as server:
        words = train_words(made, tmp_path / "run", "--features-from", server.url, "--api-key-env", "KEY_OF_TEST")
        ran = fledge(*words)
        said = " ".join(ran.err.split())
        assert ran.code == 2 and "status 401: Unauthorized; set the environment variable of" in said, said
        monkeypatch.setenv("KEY_OF_TEST", "secret")
        ran = fledge(*words)
    assert ran.code == 0 and "does not say by its name which layers" in " ".join(ran.err.split()), ran.err


def test_the_command() -> None:
    words = serve_words("owner/name@v2", (2, 8), 100, "/x", trust=True)
    assert words[:6] == ["vllm", "serve", "owner/name", "--revision", "v2", "--trust-remote-code"]
    assert '"eagle_aux_hidden_state_layer_ids": [2, 8]' in words[7] and '"shared_storage_path": "/x"' in words[9]


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (("--features-from", "states"), "states is neither a directory nor the address of a server"),
        (("--features-from", "http://h", "--features", "f"), "give one of them"),
        (("--features-from", "http://h", "--eval-every", 5), "--eval-every has no effect with --features-from, as the"),
        (("--features-from", "http://h", "--eval-prompts", "p"), "--eval-prompts has no effect with --features-from"),
        (("--features-from", "http://h", "--features-map", "/a"), "--features-map /a is not THERE=HERE"),
        (("--features-from", "http://h", "--features-layers", "a"), "--features-layers a is not a list of layer"),
        (("--features-from", "."), "holds no hidden states"),
        (("--features-from", ".", "--features-map", "/a=."), "--features-map has no effect with a directory of files"),
        (("--features-layers", "2,8"), "--features-layers has no effect without hidden states of vLLM"),
    ],
)  # fmt: skip
def test_options_that_do_not_fit(more, message: str, fledge: Fledge, made: Path, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    ran = fledge(*train_words(made, tmp_path / "run", *more))
    assert ran.code == 2 and message in re.sub(r"\s+", " ", ran.err), ran.err
    assert not (tmp_path / "run").exists()


def test_a_run_without_vllm_is_not_continued_with_it(fledge: Fledge, live: Path) -> None:
    ran = fledge("train", "--resume", live, "--features-from", "http://h")
    assert ran.code == 2 and "was started without --features-from; leave --features-from out" in ran.err


def test_needed_tokens_are_those_of_the_loss() -> None:
    for document in (*DOCUMENTS, Document(np.arange(9), np.array([-1, 0, 0, 0, -1, 1, 1, -1, -1]))):
        row: Packed = make_row([document], len(document.tokens))
        teachers = {int(t) + 1 + k for k, live in enumerate(row.live(5)) for t in live}
        assert needed_tokens(document) == max(teachers) + 1


def test_threads_of_a_closed_source_end(target, tmp_path: Path) -> None:
    closed = threading.Event()
    closed.set()
    with FakeVllm(target, tmp_path, ALL, delay=5) as server, pytest.raises(ValueError, match="not waited for any more"):
        client(server).get([5, 6, 7], 3, closed)
