"""The client of OpenAI-compatible servers: what it sends, repeats and refuses."""

from __future__ import annotations

import asyncio
import gzip
import json
from typing import Any

import pytest

from fledge.engines import client as client_module
from fledge.engines.client import Answer, Client, Decoding, Server
from fledge.io import http as http_module
from fledge.io.http import BadRequest, ServerProblem
from support.openai_server import FakeServer

CHAT = [{"role": "user", "content": "the young bird"}]
DECODING = Decoding(max_new_tokens=8)


@pytest.fixture(autouse=True)
def short_delays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_module, "FIRST_DELAY", 0.001)
    monkeypatch.setattr(http_module, "LAST_DELAY", 0.002)


def ask(server: FakeServer, prompt: Any = CHAT, native: bool = False, **options: Any) -> tuple[Answer, Client]:
    """The answer to one prompt, and the client."""
    made = {name: options.pop(name) for name in ("timeout", "retries", "api_key") if name in options}

    async def run() -> tuple[Answer, Client]:
        async with Client(server.url, **made) as client:
            await client.connect()
            decoding = options.pop("decoding", DECODING)
            answer = client.generate(prompt, decoding) if native else client.ask(prompt, decoding, **options)
            return await answer, client

    return asyncio.run(run())


def test_a_chat_a_text_and_token_ids_streamed_or_not():
    with FakeServer().started() as server:
        for prompt in (CHAT, "the young bird", [3, 4, 5]):
            whole, _ = ask(server, prompt)
            streamed, _ = ask(server, prompt, stream=True, token_ids=True)
            assert whole.text == streamed.text == server.answer_to(prompt, 8) and len(whole.text.split()) == 6
            assert whole.finish == streamed.finish == "stop"
            assert (whole.prompt_tokens, whole.tokens) == (streamed.prompt_tokens, streamed.tokens) == (3, 6)
            assert whole.token_ids is None and len(streamed.token_ids) == 6
            assert streamed.started < streamed.first <= streamed.last
        assert [body.get("stream", False) for body in server.asked] == [False, True] * 3


def test_a_cut_answer_says_so():
    with FakeServer().started() as server:
        answer, _ = ask(server, decoding=Decoding(max_new_tokens=2))
    assert answer.finish == "length" and answer.tokens == 2


@pytest.mark.parametrize("engine", ["vllm", "sglang", "other"])
def test_everything_that_changes_the_text_is_sent_to_engines_with_defaults_of_their_own(engine: str):
    """vLLM and SGLang take absent fields from generation_config.json; other servers may refuse unknown fields."""
    with FakeServer(engine=engine).started() as server:
        ask(server, decoding=Decoding(8, template_kwargs={"enable_thinking": False}), tools=[{"type": "function"}])
        ask(server, decoding=Decoding(8, temperature=0.7, top_p=0.9, top_k=5), seed=3, token_ids=True)
    plain, sampled = server.asked
    own = {"top_k": -1, "min_p": 0.0, "repetition_penalty": 1.0}
    assert plain.items() >= {"model": "bird", "temperature": 0.0, "top_p": 1.0, "max_tokens": 8}.items()
    assert plain["chat_template_kwargs"] == {"enable_thinking": False} and plain["tools"]
    assert (plain.items() >= own.items()) == (engine != "other") and ("min_p" in plain) == (engine != "other")
    assert plain.get("tool_choice") == ("none" if engine == "vllm" else None)
    assert sampled.items() >= {"temperature": 0.7, "top_p": 0.9, "top_k": 5, "seed": 3}.items()
    assert ("return_token_ids" in sampled) == (engine == "vllm") and "chat_template_kwargs" not in sampled


def test_sglang_counts_the_acceptance_of_a_request():
    with FakeServer(engine="sglang", words=9).started() as server:
        answer, _ = ask(server, [3, 4, 5], native=True, decoding=Decoding(16))
        assert answer.text == server.answer_to([3, 4, 5], 16) and answer.tokens == len(answer.token_ids) == 9
        assert answer.meta["spec_verify_ct"] == server.rounds and answer.finish == "stop"
        assert server.asked[0]["sampling_params"]["max_new_tokens"] == 16


@pytest.mark.parametrize("failure", [408, 425, 429, 500, 502, 503, "drop", "malformed", "hang"])
def test_failures_that_may_pass_are_repeated(failure: Any):
    with FakeServer(failures=[failure, failure], hang=0.6).started() as server:
        answer, client = ask(server, timeout=0.3)
        assert answer.text == server.answer_to(CHAT, 8)
        assert client.repeated.total() == 2 and len(server.asked) == 3


def test_a_stream_that_breaks_off_is_repeated():
    with FakeServer(failures=["broken"]).started() as server:
        answer, client = ask(server, stream=True)
        native, _ = ask(server, [3], native=True)
    assert answer.text == server.answer_to(CHAT, 8) and client.repeated.total() == 1 and native.tokens == 6


def test_a_server_that_keeps_failing_ends_the_request():
    with FakeServer(failures=[500] * 9).started() as server:
        with pytest.raises(
            ServerProblem, match=r"has not answered a request in 3 attempts, the last time .* status 500"
        ):
            ask(server, retries=2)
        assert len(server.asked) == 3
        with pytest.raises(ServerProblem, match=r"in 1 attempt, the last"):
            ask(server, retries=0)


@pytest.mark.parametrize(
    ("status", "kind"), [(400, BadRequest), (413, BadRequest), (422, BadRequest), (404, ServerProblem)]
)
def test_refusals_are_not_repeated(status: int, kind: type[ValueError]):
    with FakeServer(failures=[status]).started() as server:
        with pytest.raises(kind, match=f"status {status}: failed as told"):
            ask(server)
        assert len(server.asked) == 1


def test_a_server_that_wants_a_key():
    with FakeServer(key="secret").started() as server:
        with pytest.raises(ServerProblem, match="no such key; set the environment variable of --api-key-env"):
            ask(server)
        assert ask(server, api_key="secret")[0].text


def connect(url: str, model: str | None = None) -> Server:
    async def run() -> Server:
        async with Client(url, timeout=2) as client:
            return await client.connect(model)

    return asyncio.run(run())


def test_the_model_is_the_only_one_or_the_named_one():
    with FakeServer(models=("a", "b"), context=None).started() as server:
        with pytest.raises(ServerProblem, match="serves 2 models; name one by --model: a, b"):
            connect(server.url)
        with pytest.raises(ServerProblem, match="has no model c; it serves a, b"):
            connect(server.url, "c")
        assert connect(server.url + "/v1/", "b") == Server("vllm", "b", None)
    with FakeServer(engine="other").started() as server:
        assert connect(server.url.removeprefix("http://")) == Server("", "bird", 512)
        address = server.url
    with pytest.raises(ServerProblem, match=r"no server answers at .* \(no connection\)"):
        connect(address)
    with pytest.raises(ValueError, match="is not the address of a server"):
        connect("ftp://localhost")


ODD = [None, 3, "a", [], [3], {}, {"content": 3}, {"content": ["a"]}]


def test_answers_in_other_forms_are_repeated_or_read():
    """Whatever JSON comes as an answer, the client repeats the request, and says so if it always comes."""
    bodies = [[], [3], {"usage": 3}, {"choices": 3}, {"choices": [{"finish_reason": ["stop"], "message": {}}]}]
    bodies += [{"choices": odd} for odd in ODD] + [{"choices": [odd]} for odd in ODD]
    bodies += [{"choices": [{"message": odd, "finish_reason": "stop"}]} for odd in (3, "a", [3], {"content": 3})]
    bodies += [{"choices": [{"message": {"content": "a"}, "finish_reason": "stop"}], "usage": {"prompt_tokens": "3"}}]
    bodies += [
        {"error": {"message": "out of memory"}},
        {"choices": [{"message": {"content": "a"}, "finish_reason": "abort"}]},
    ]
    with FakeServer(failures=list(bodies)).started() as server:
        answer, client = ask(server, retries=len(bodies))
        assert answer.text == server.answer_to(CHAT, 8) and client.repeated.total() == len(bodies), client.repeated


def test_unpaired_surrogates_of_an_answer_are_replaced():
    body = {"choices": [{"message": {"content": "a\ud83d b\ud83d\ude00"}, "finish_reason": "stop"}]}
    with FakeServer(failures=[body]).started() as server:
        assert ask(server)[0].text == "a\ufffd b\U0001f600"


CHOICE = {"message": {"content": "a"}, "finish_reason": "stop", "token_ids": [1]}


@pytest.mark.parametrize(
    "odd",
    [
        b"[" * 200_000,
        b'{"a":' * 200_000,
        b"1" * 5000,
        {"choices": [CHOICE | {"token_ids": [10**30]}]},
        {"choices": [CHOICE | {"token_ids": [-1]}]},
        {"choices": [CHOICE | {"token_ids": [None]}]},
        {"choices": [CHOICE], "prompt_token_ids": [2**40]},
        {"choices": [CHOICE], "usage": {"completion_tokens": 10**400}},
    ],
    ids=lambda odd: str(odd)[:60],
)
def test_deep_json_and_impossible_numbers_are_no_answers(odd: Any):
    body = odd if isinstance(odd, bytes) else json.dumps(odd).encode()
    with FakeServer(raw={"/v1/chat/completions": (200, {}, body)}).started() as server:
        with pytest.raises(ServerProblem, match="in 2 attempts, the last time because: an answer"):
            ask(server, retries=1)
        server.raw = {"/v1/models": (200, {}, body)}
        with pytest.raises(ServerProblem, match=r"is not JSON|answers, but not as an OpenAI-compatible server"):
            connect(server.url)
        server.raw = {"/v1/chat/completions": (400, {}, body)}
        with pytest.raises(BadRequest, match="answers with status 400: ") as refusal:
            ask(server)
        assert len(str(refusal.value)) < 500


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", ["/v1/models", "/v1/chat/completions"])
def test_an_answer_that_is_too_large_is_not_read(path: str, stream: bool, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(http_module, "MOST_BYTES", 2**20)
    bomb = gzip.compress(b"data: " + b"a" * 2**24)
    for status in (200, 400):
        bombing = FakeServer(raw={path: (status, {"Content-Encoding": "gzip"}, bomb)}).started()
        with bombing as server, pytest.raises(ServerProblem, match="cannot be read: it answers with more than 1 MiB"):
            ask(server, stream=stream)


def test_a_stream_that_does_not_end_is_not_kept(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(client_module, "MOST_BYTES", 1000)
    monkeypatch.setattr(client_module, "MOST_TOKENS", 100)
    for delta in ({"content": "a" * 50}, {"content": "", "reasoning": "a" * 50}, {"content": "a"}):
        chunk = {"choices": [{"delta": delta, "token_ids": [1] * 5 if delta == {"content": "a"} else None}]}
        body = f"data: {json.dumps(chunk)}\n\n".encode() * 30
        endless = FakeServer(raw={"/v1/chat/completions": (200, {}, body)}).started()
        with endless as server, pytest.raises(ServerProblem, match="its answer to one request does not end"):
            ask(server, stream=True)
    with FakeServer(engine="sglang", words=400).started() as server:  # whose chunks have all so far
        assert ask(server, [3], native=True, decoding=Decoding(300))[0].tokens == 300


@pytest.mark.parametrize("end", ["\n", "\r", "\r\n"])
def test_lines_of_a_stream_end_with_cr_and_lf_only(end: str):
    text = "a\u2028b\u2029c\x85d\x0be\x1cf"
    chunks = [{"choices": [{"delta": {"content": text}}]}, {"choices": [{"delta": {}, "finish_reason": "stop"}]}]
    body = "".join(f"data: {json.dumps(chunk, ensure_ascii=False)}{end}{end}" for chunk in chunks) + "data: [DONE]"
    with FakeServer(raw={"/v1/chat/completions": (200, {}, body.encode())}).started() as server:
        assert ask(server, stream=True)[0].text == text


def test_redirects_lead_to_the_same_server_only():
    with FakeServer().started() as other, FakeServer(key="secret").started() as server:
        for place in (other.url, other.url.replace("127.0.0.1", "localhost"), "http://127.0.0.1:99999999"):
            server.raw = {"/v1/chat/completions": (307, {"Location": f"{place}/v1/chat/completions"}, b"")}
            with pytest.raises(ServerProblem, match=r"it redirects to http|a dropped connection"):
                ask(server, api_key="secret", retries=0)
        server.raw = {"/v1/models": (302, {"Location": f"{other.url.replace('//', '//u:pw@')}/v1/models"}, b"")}
        with pytest.raises(ServerProblem, match=f"it redirects to {other.url}; give the address of") as refusal:
            connect(server.url)
        assert "pw" not in str(refusal.value) and not other.asked
        server.raw = {"/v1/chat/completions": (307, {"Location": "/v1/completions"}, b"")}
        assert ask(server, api_key="secret", retries=0)[0].tokens and len(server.asked) == 5
