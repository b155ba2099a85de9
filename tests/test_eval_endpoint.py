"""`fledge eval --endpoint`: figures of a running server, beside one without a draft and fledge's own decoder."""

from __future__ import annotations

import asyncio
import json
import random
import shutil
import signal
import statistics
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from fledge.drafts.weights import save_draft
from fledge.engines.client import Client, Decoding
from fledge.engines.metrics import of_requests
from fledge.io.http import ServerProblem, root_of
from fledge.measure import endpoint
from fledge.measure import server as server_module
from fledge.measure.endpoint import causes, measure, tau_error
from fledge.measure.prompts import read_prompts
from fledge.measure.record import is_record
from fledge.measure.server import _depth_of
from support.commands import Ran
from support.drafts_on_disk import rewrite
from support.files import write_rows
from support.openai_server import FakeServer
from support.targets import CHATML, tiny_draft, tiny_target, tiny_target_directory, tiny_tokenizer

HEADER = "{{ '<|im_start|>' + m['role'] + '\n' }}"
TURNS = [{"turns": ["the young bird", "tries again"]}, {"turns": ["it can fly"]}, {"text": "the bird tries its wings"}]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with a target, a draft of it, and prompts."""
    root = tmp_path_factory.mktemp("made")
    tiny_target_directory(root)
    save_draft(tiny_draft(tiny_target(), draft_vocab_size=200), root / "draft")
    write_rows(root / "prompts.jsonl", TURNS)
    return root


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(endpoint, "POLL", 0.01)
    monkeypatch.setattr(endpoint, "SETTLING", {"vllm": 1.0, "sglang": 1.0})


Evaluate = Callable[..., Ran]


@pytest.fixture
def evaluate(fledge: Callable[..., Ran], made: Path) -> Evaluate:
    def run(server: FakeServer, *words: Any) -> Ran:
        return fledge("eval", "--endpoint", server.url, "--prompts", made / "prompts.jsonl", *words)

    return run


def record_of(ran: Ran) -> dict[str, Any]:
    assert ran.code == 0, ran.err
    return json.loads(ran.out)


def counted(server: FakeServer) -> tuple[float, list[float]]:
    """τ and α by definition of the rounds that a server simulated, without those of the warm-up."""
    reached = [len(server.accepted), *(sum(a > k for a in server.accepted) for k in range(server.depth))]
    return 1 + sum(server.accepted) / len(server.accepted), [reached[k + 1] / reached[k] for k in range(server.depth)]


@pytest.fixture
def without_warm_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Warm-up requests have one token, so no rounds."""
    monkeypatch.setattr(endpoint, "WARM_UP_TOKENS", 1)


@pytest.mark.usefixtures("without_warm_up")
def test_vllm_beside_the_same_server_without_a_draft(evaluate, tmp_path):
    out = tmp_path / "record.json"
    with FakeServer(words=20).started() as server, FakeServer(words=20, speculates=False).started() as plain:
        words = ["--baseline-endpoint", plain.url, "--concurrency", 1, "--concurrency", 2, "--json", "--out", out]
        records = record_of(evaluate(server, *words))
        assert list(records) == ["1 in flight", "2 in flight"] and json.loads(out.read_text()) == records
        assert is_record(records)
        first, second = records.values()
        for r in records.values():
            assert r["tau"] == pytest.approx(2.5, abs=0.2) and len(r["alpha"]) == 3 and r["depth"] == 3
            assert (r["prompts"], r["requests"], r["identical"], r["compared"]) == (3, 4, 4, "tokens")
            assert r["server"] == {"engine": "vllm", "model": "bird", "context": 512, "version": "0.26.0"}
            assert r["tokens_per_s"] > 0 and r["speedup"] > 0 and r["ttft_ms"]["median"] > 0 and r["itl_ms"]["p90"] >= 0
            assert (
                r["baseline"]["tau"] is None
                and "without a draft" in r["baseline"]["note"]
                and r["mean_new_tokens"] == 20
            )
        assert server.most_in_flight <= 2 and {b["temperature"] for b in server.asked} == {0.0}
        assert first["counted"]["rounds"] + second["counted"]["rounds"] == server.rounds
        assert all(b["max_tokens"] in (1, 128) for b in server.asked)


@pytest.mark.usefixtures("without_warm_up")
def test_tau_and_alpha_are_those_of_the_rounds(evaluate):
    with FakeServer(words=20, accepts=(0, 3, 1, 1, 2)).started() as server:
        record = record_of(evaluate(server, "--json"))
        tau, alpha = counted(server)
        assert record["tau"] == pytest.approx(tau) and record["alpha"] == pytest.approx(alpha)


@pytest.mark.usefixtures("without_warm_up")
def test_sglang_is_asked_by_token_ids_or_read_from_counters(evaluate, made):
    options = dict(engine="sglang", words=20, tokenizer=tiny_tokenizer(), accepts=(0, 3, 1, 1, 2))
    with FakeServer(**options).started() as server:
        record = record_of(evaluate(server, "--target", made / "target", "--json"))
        tau, alpha = counted(server)
        assert record["tau"] == pytest.approx(tau) and record["alpha"] == pytest.approx(alpha) and record["depth"] == 3
        assert "requests' own counts" in record["counted"]["source"] and not record["mismatched_prompts"]
    with FakeServer(**options, histogram=False).started() as server:
        went = evaluate(server, "--target", made / "target")
        assert went.code == 0 and "There is no α by position: the server does not count it." in went.out
    with FakeServer(**options).started() as server:
        record = record_of(evaluate(server, "--json"))
        assert record["tau"] == pytest.approx(2.4, abs=0.3) and record["alpha"] is None
        assert "counters in /metrics" in record["counted"]["source"]
    with FakeServer(**options, metrics=False).started() as server:
        went = evaluate(server)
        said = " ".join(went.out.split())
        assert went.code == 0 and "There is no τ: SGLang was started without --enable-metrics" in said, said


def test_what_is_not_known_is_not_invented(evaluate):
    with FakeServer(engine="other").started() as server:
        went = evaluate(server)
        assert went.code == 0 and "There is no τ: the server is neither vLLM nor SGLang" in " ".join(went.out.split())
    with FakeServer(speculates=False).started() as server:
        record = record_of(evaluate(server, "--json"))
        assert record["tau"] is record["alpha"] is None and "without a draft" in record["note"]


def test_fledges_decoder_answers_the_same_prompts(evaluate, made):
    words = ["--target", made / "target", "--draft", made / "draft", "--device", "cpu", "--max-new-tokens", 8]
    with FakeServer(words=20, tokenizer=tiny_tokenizer(), depth=2, accepts=(0, 1, 2)).started() as server:
        record = record_of(evaluate(server, *words, "--json"))
        own = record["own"]
        assert own["depth"] == 2 == record["depth"] and own["tau"] >= 1 and own["identical"] == 0
        assert own["device"] == "cpu" and own["rounds"] > 0
        text = " ".join(record["causes"])
        assert "4 of 4 answers differ from fledge's" in text and "section When τ differs" in text
        went = evaluate(server, *words, "--depth", 3)
        said = " ".join(went.out.split())
        assert (
            went.code == 0
            and "τ differs by more than 3%" in said
            and "The server drafts 2.00 tokens a round and" in said
        )
        assert "fledge's decoder on the same prompts: τ" in said


def test_a_draft_of_another_target_asks_nothing(evaluate, made):
    save_draft(tiny_draft(tiny_target(vocab_size=500), draft_vocab_size=200), made / "misfit")
    shutil.copytree(made / "draft", made / "damaged")
    rewrite(made / "damaged", lambda x: x["norm.weight"].zero_())
    with FakeServer().started() as server:
        for draft, reason in (("misfit", "it was made for a vocabulary of 500 tokens"), ("damaged", "only zeros")):
            went = evaluate(server, "--target", made / "target", "--draft", made / draft)
            assert went.code == 2 and reason in " ".join(went.err.split()) and not server.asked, went.err


def short_of_memory(*given: Any, **options: Any) -> None:
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.\nMore lines.")


@pytest.mark.parametrize("how", ["a tree", "memory"])
def test_a_measurement_outlives_a_failure_of_fledges_decoder(evaluate, made, tmp_path, monkeypatch, how):
    out, sglang = tmp_path / "record.json", how == "a tree"
    if not sglang:
        monkeypatch.setattr("fledge.decode.options.DecodeOptions.load_engine", short_of_memory)
    options = dict(engine="sglang", depth=31) if sglang else {}
    with FakeServer(words=20, tokenizer=tiny_tokenizer(), **options).started() as server:
        words = ["--target", made / "target", "--draft", made / "draft", "--device", "cpu", "--out", out]
        went = evaluate(server, *words)
    said, shown, record = " ".join(went.err.split()), " ".join(went.out.split()), json.loads(out.read_text())
    assert went.code == 2 and "the server was measured, but fledge's own τ is missing: " in said, said
    assert ("is probably a tree" if sglang else "not enough memory for the target and the draft beside") in said
    assert sglang or ("--gpu-memory-utilization" in said and "More lines" not in said)
    assert record["tau"] > 1 and record["own"] is None and f"{record['tau']:.2f}" in shown and "verifications" in shown


def test_a_mistake_in_the_code_is_no_message(evaluate, made, tmp_path, monkeypatch):
    def fail(*given: Any) -> None:
        raise RuntimeError("a kernel failed")

    monkeypatch.setattr("fledge.decode.options.DecodeOptions.load_engine", fail)
    with FakeServer(words=20, tokenizer=tiny_tokenizer()).started() as server, pytest.raises(RuntimeError, match="a k"):
        evaluate(server, "--target", made / "target", "--draft", made / "draft", "--out", tmp_path / "r.json")
    assert json.loads((tmp_path / "r.json").read_text())["tau"] > 1


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_a_baseline_that_drafts_is_refused(evaluate, made, engine, monkeypatch):
    """By the counters of the first, short requests; without those (SGLang), by those of the answers."""
    for words, most in ((8, 1), (1, 5)):
        monkeypatch.setattr(endpoint, "WARM_UP_TOKENS", words)
        options = dict(engine=engine, words=20, tokenizer=tiny_tokenizer(), metrics=engine == "vllm")
        with FakeServer(**options).started() as server, FakeServer(**options).started() as plain:
            went = evaluate(server, "--baseline-endpoint", plain.url, "--target", made / "target")
            said = " ".join(went.err.split())
            assert went.code == 2 and f"{plain.url} (--baseline-endpoint) drafts itself: it counts 2." in said, said
            assert not server.asked and (engine == "sglang" or len(plain.asked) <= most)


def test_a_baseline_with_another_name(evaluate, tmp_path):
    with FakeServer().started() as server, FakeServer(speculates=False, models=("cat",)).started() as plain:
        out = tmp_path / "record.json"
        went = evaluate(server, "--baseline-endpoint", plain.url, "--out", out)
        record = json.loads(out.read_text())
        assert (record["server"]["model"], record["baseline_server"]["model"]) == ("bird", "cat")
        assert record["baseline_endpoint"] == plain.url and record["baseline_server"]["engine"] == "vllm"
        said = " ".join((went.out + went.err).split())
        assert went.code == 0 and "the servers call their models bird and cat; a speedup means something only" in said
    with FakeServer().started() as server, FakeServer(speculates=False, models=("cat", "dog")).started() as plain:
        went = evaluate(server, "--baseline-endpoint", plain.url)
        assert went.code == 2 and not server.asked


@pytest.mark.parametrize("rest", ["/v1", "/v1/chat/completions", "/v1/completions/", "/v1/models", "/"])
def test_what_stands_behind_the_address(rest: str):
    assert root_of(f"http://h:8000/base{rest}") == "http://h:8000/base"


@pytest.mark.parametrize("url", ["http://localhost:abc", "http://localhost:99999", "http://[::1", "ftp://h", "http://"])
@pytest.mark.parametrize("command", ["eval", "regenerate", "train"])
def test_what_is_no_address(fledge, made, command, url, tmp_path):
    words = ["--features-from" if command == "train" else "--endpoint", url, "--target", made / "target"]
    words += ["--prompts" if command == "eval" else "--data", made / "prompts.jsonl", "--out", tmp_path / "out"]
    went = fledge(command, *words)
    said = " ".join(went.err.split())
    assert went.code == 2 and "address of a server" in said and "http://localhost:8000" in said, said


@pytest.mark.parametrize("command", ["eval", "regenerate", "train"])
def test_credentials_are_in_no_address_and_in_no_message(fledge, made, command, tmp_path, monkeypatch):
    words = [command, "--target", made / "target", "--prompts" if command == "eval" else "--data"]
    words += [made / "prompts.jsonl", "--out", tmp_path / "out"]
    flag = "--features-from" if command == "train" else "--endpoint"
    with FakeServer().started() as server:
        host = server.url.removeprefix("http://")
        for url in ("http://me:hidden@" + host, "me:hid/den@" + host, server.url + "/v1?key=hidden", host + "#hidden"):
            went = fledge(*words, flag, url)
            said = " ".join(went.err.split())
            assert went.code == 2 and "address of a server must not have @, ? or #" in said, said
            assert "--api-key-env" in said and "hid" not in said and not (tmp_path / "out").exists()
        monkeypatch.setenv("KEY", "hidden\nkey")
        if command != "train":  # which asks for the key after it has loaded the target
            went = fledge(*words, flag, server.url, "--api-key-env", "KEY")
            said = " ".join(went.err.split())
            assert went.code == 2 and "variable KEY is to hold an API key, but has characters" in said, said
            assert "hidden" not in said
        assert not server.asked


def test_separators_of_unicode_end_no_answer(evaluate, tmp_path, monkeypatch):
    text = "the young\u2028bird\u2029tries\x85its wings"
    monkeypatch.setattr(FakeServer, "answer_to", lambda self, prompt, n: text)
    with FakeServer().started() as server:
        went = evaluate(server, "--out", tmp_path / "record.json")
    assert went.code == 0, went.err


@pytest.mark.parametrize(
    "meta", [{"spec_verify_ct": "3"}, {"spec_verify_ct": 10**400}, {"spec_verify_ct": float("nan")}]
)
def test_counts_that_are_no_numbers_are_named(meta):
    with pytest.raises(ValueError, match=r"SGLang's meta_info counts .* as spec_verify_ct, which is no number"):
        of_requests([{"completion_tokens": 5, **meta}])


def test_a_server_is_not_its_own_baseline(evaluate):
    with FakeServer().started() as server:
        for same in (server.url, server.url + "/v1/", server.url.removeprefix("http://")):
            went = evaluate(server, "--baseline-endpoint", same)
            said = " ".join(went.err.split())
            assert went.code == 2 and "--endpoint and --baseline-endpoint are both" in said and not server.asked, said


def test_prompts_that_the_server_renders_otherwise_are_named(evaluate, made):
    other = tiny_tokenizer(CHATML.replace("assistant\n' }}{% endif", "assistant\nit can fly' }}{% endif"))
    for engine in ("vllm", "sglang"):
        with FakeServer(engine=engine, tokenizer=other).started() as server:
            went = evaluate(server, "--target", made / "target")
            said = " ".join(went.out.split())
            assert went.code == 0 and "prompts are other tokens on the server" in said and "thinking mode" in said, said


def test_prompts_of_as_many_other_tokens_are_named(evaluate, made):
    """vLLM returns the tokens of the prompt, so that another system prompt of the same length is found."""
    said, other = (
        CHATML.replace("assistant\n' }}{% endif", f"assistant\n{word}' }}}}{{% endif") for word in ("x", "y")
    )
    tokenizer, same = tiny_tokenizer(other), tiny_tokenizer(said)
    target = made / "renders"
    tiny_target().model.save_pretrained(target)
    same.save_pretrained(target)
    with FakeServer(tokenizer=tokenizer).started() as server:
        record = record_of(evaluate(server, "--target", target, "--json"))
        assert "by the target's template" in record["mismatched_prompts"][0]
        assert record["mismatched_prompts"][0].startswith("token ")
    with FakeServer(tokenizer=same).started() as server:
        assert not record_of(evaluate(server, "--target", target, "--json"))["mismatched_prompts"]
    with FakeServer(engine="other", tokenizer=tokenizer).started() as server:
        assert not record_of(evaluate(server, "--target", target, "--json"))["mismatched_prompts"]
        assert not any("return_token_ids" in body for body in server.asked)


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_a_row_has_template_arguments_of_its_own(fledge, tmp_path, monkeypatch, engine):
    """A row's arguments reach the server, the tokens of its turns, and its answers within later turns."""
    monkeypatch.setattr(FakeServer, "answer_to", lambda self, prompt, n: "it can fly")
    marks = "{% if think %}{{ 'until ' if m['role'] == 'user' else 'it ' }}{% endif %}"
    tokenizer = tiny_tokenizer(CHATML.replace("{{ '<|im_start|>' + m['role'] + '\n' +", HEADER + marks + "{{"))
    target = tiny_target_directory(tmp_path)
    tokenizer.save_pretrained(target)
    turns = ["the young bird", "tries again"]
    rows = [{"turns": turns}, {"turns": turns, "chat_template_kwargs": {"think": True}}]
    words = ["--prompts", write_rows(tmp_path / "own.jsonl", rows), "--target", target, "--json"]
    with FakeServer(engine=engine, tokenizer=tokenizer).started() as server:
        words += ["--endpoint", server.url, "--template-kwargs", '{"think": false}']
        record = record_of(fledge("eval", *words))
    assert not record["mismatched_prompts"]
    second = [
        "<|im_start|>user\nuntil the young bird<|im_end|>\n<|im_start|>assistant\nit can fly<|im_end|>\n"
        "<|im_start|>user\nuntil tries again<|im_end|>\n<|im_start|>assistant\n",
        "<|im_start|>user\nthe young bird<|im_end|>\n<|im_start|>assistant\nit can fly<|im_end|>\n"
        "<|im_start|>user\ntries again<|im_end|>\n<|im_start|>assistant\n",
    ]
    asked = [tokenizer.decode(server.tokens_of(body)) for body in server.asked]
    assert {prompt for prompt in asked if "again" in prompt} == set(second)


def test_causes_that_the_record_shows_come_first():
    record = {
        "tau": 2.0, "depth": 3.0, "concurrency": 4,
        "own": {"tau": 2.5, "depth": 5, "mode": "chain", "identical": None, "method": "eagle3"},
        "requests": 8,
        "sampling": {"temperature": 1.0}, "mismatched_prompts": ["31 tokens on the server, 27 by the template"],
    }  # fmt: skip
    found = causes(record)
    assert [text.split()[0] for text in found] == ["1", "The", "At", "For"] and "give --depth" in found[1]
    assert causes(record | {"tau": 2.44}) == [] == causes(record | {"tau": None})


def test_a_difference_within_chance_has_no_cause():
    """The standard error is that of simulated rounds."""
    draw, p = random.Random(0), [0.7, 0.5, 0.6]

    def tau(rounds: int) -> float:
        accepted = (next((k for k in range(3) if draw.random() > p[k]), 3) for _ in range(rounds))
        return 1 + sum(accepted) / rounds

    own = {"tau": 2.5, "alpha": p, "rounds": 100, "depth": 3, "mode": "chain", "identical": 8, "method": "eagle3"}
    record = {
        "tau": 2.3, "alpha": p, "counted": {"rounds": 200}, "own": own, "depth": 3.0, "concurrency": 1, "requests": 8,
        "sampling": {"temperature": 0.0}, "mismatched_prompts": [],
    }  # fmt: skip
    simulated = statistics.stdev(tau(200) - tau(100) for _ in range(2000))
    assert tau_error(record) == pytest.approx(simulated, rel=0.06)
    (found,) = causes(record)
    assert found.startswith("The difference of 0.20 is within chance: its standard error is 0.1")
    more = record | {"counted": {"rounds": 20000}, "own": own | {"rounds": 20000}}
    assert causes(more)[-1].startswith("For causes that cannot be seen")
    assert tau_error(record | {"alpha": None}) is None


def test_other_users_of_the_server_are_noticed(made):
    prompts = read_prompts(made / "prompts.jsonl")

    async def run(server: FakeServer) -> None:
        async with Client(server.url, connections=3, retries=0) as client:
            await client.connect()
            await measure(client, prompts, Decoding(8), concurrency=1)

    with FakeServer(words=8).started() as server:
        server.on_request = lambda n: server.speculate(30) if n == 3 else None  # the first request is the warm-up
        with pytest.raises(ServerProblem, match="others used the server during the measurement"):
            asyncio.run(run(server))
        server.on_request = lambda n: None
        server.in_flight = 2
        with pytest.raises(ServerProblem, match="has 2 other requests; measure when nobody else uses the server"):
            asyncio.run(run(server))
        server.in_flight = 0
        asyncio.run(run(server))
    with FakeServer(words=8, speculates=False).started() as server:
        server.metrics_text = lambda: (  # an engine without a counter of tokens
            f"vllm:spec_decode_num_drafts_total {9 * len(server.asked)}\nvllm:spec_decode_num_accepted_tokens_total 0\n"
        )
        with pytest.raises(ServerProblem, match="36 drafts for 32 tokens of ours"):
            asyncio.run(run(server))


def test_a_measurement_is_not_repeated_when_a_request_fails(evaluate, tmp_path):
    with FakeServer(failures=[None, None, 500]).started() as server:
        went = evaluate(server, "--out", tmp_path / "r.json")
        assert went.code == 2 and "status 500" in went.err and not (tmp_path / "r.json").exists()
    with FakeServer(refuse="fly").started() as server:
        went = evaluate(server)
        assert went.code == 2 and "prompts.jsonl, line 2: the server answers with status 400" in went.err


@pytest.mark.parametrize("end", ["a failure", "Ctrl-C"])
@pytest.mark.parametrize("planned", [2, 3])
def test_finished_measurements_outlive_the_end_of_a_later_one(evaluate, tmp_path, monkeypatch, end, planned):
    out, places, written = tmp_path / "r.json", [], []

    async def measure_one(client: Client, *given: Any, concurrency: int, **options: Any) -> Any:
        places.append(concurrency)
        if len(places) < planned:
            return await measure(client, *given, concurrency=concurrency, **options)
        written.append(json.loads(out.read_text()))
        if end == "a failure":
            raise ServerProblem("the server has gone")
        signal.raise_signal(signal.SIGINT)
        await asyncio.sleep(60)

    monkeypatch.setattr(server_module, "measure", measure_one)
    with FakeServer(words=20).started() as server:
        words = [word for n in range(planned) for word in ("--concurrency", n + 1)]
        went = evaluate(server, *words, "--out", out)
    record = json.loads(out.read_text())
    assert went.code == (2 if end == "a failure" else 130) and places == list(range(1, planned + 1))
    assert list(record) == [f"{n + 1} in flight" for n in range(planned - 1)] and written == [record]
    assert all(r["tau"] > 1 and f"{r['tau']:.2f}" in went.out for r in record.values())
    assert f"{planned - 1} of {planned} measurements were finished" in " ".join((went.out + went.err).split())
    assert ("the server has gone" in went.err) == (end == "a failure")
    assert signal.getsignal(signal.SIGINT) is not signal.SIG_IGN


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (["--concurrency", 0], "--concurrency 0: it must be at least 1"),
        (["--concurrency", 2, "--concurrency", 2], "--concurrency has 2, 2: two of them would have the same name"),
        (["--draft", "d"], "--draft without --target"),
        (["--draft", "d", "--draft", "e", "--target", "t"], "a server has one draft"),
        (["--seed", 3], "--seed has no effect at --temperature 0"),
        (["--device", "cpu"], "--device has no effect with --endpoint unless fledge decodes too"),
    ],
)
def test_options_that_make_no_sense_ask_nothing(words, reason, evaluate):
    with FakeServer().started() as server:
        went = evaluate(server, *words)
        assert went.code == 2 and reason in went.err.replace("\n", " ") and not server.asked


def test_fledge_drafts_what_the_server_does() -> None:
    """Chains of the server's length; of a tree, SGLang counts the nodes, which are no length."""

    def depth(engine: str, drafted: float | None, mode: str | None) -> int:
        acceptance = None if drafted is None else SimpleNamespace(depth=drafted)
        found = SimpleNamespace(
            server=SimpleNamespace(engine=engine), measurement=SimpleNamespace(acceptance=acceptance)
        )
        return _depth_of({("p", 1): found}, 5, mode)

    assert [depth("vllm", 7.0, None), depth("vllm", 31.0, None), depth("sglang", 3.0, None)] == [7, 31, 3]
    assert [depth("vllm", None, None), depth("sglang", 31.0, "tree")] == [5, 5]
    with pytest.raises(ValueError, match="drafts 31 tokens a round, which is probably a tree"):
        depth("sglang", 31.0, None)


def test_amounts_of_a_server_are_fixed(evaluate, made) -> None:
    with FakeServer().started() as server:
        words = ["--target", made / "target", "--draft", made / "draft", "--depth", "auto"]
        went = evaluate(server, *words)
    assert went.code == 2 and "a server drafts fixed amounts" in went.err, went.err


def test_why_there_is_no_acceptance() -> None:
    def why(engine: str, by_ids: bool, **counted: float) -> str:
        client = SimpleNamespace(server=SimpleNamespace(engine=engine))
        return endpoint._why_unknown(client, endpoint.Counters(**counted), by_ids)

    assert "--disable-log-stats" in why("vllm", False) and "without a draft" in why("vllm", False, tokens=3)
    assert "counted no verifications" in why("sglang", True) and "--enable-metrics" in why("sglang", False)


def test_later_turns_follow_answers_with_their_special_tokens(evaluate: Evaluate, made: Path) -> None:
    def with_special(text: str) -> list[int]:
        return tiny_tokenizer()("<|im_start|>" + text)["input_ids"]

    with FakeServer(tokenizer=tiny_tokenizer(), generates=with_special).started() as server:
        evaluate(server, "--target", made / "target", "--max-new-tokens", 32, "--json")
        later = [body["messages"] for body in server.asked if len(body.get("messages", [])) == 3]
        assert later and all(messages[1]["content"].startswith("<|im_start|>") for messages in later)
