"""Measures a running server: acceptance by the server's counters, speed, latency, and causes of differences."""

from __future__ import annotations

import asyncio
import itertools
import math
import operator
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any

from fledge.data.answering import history_message
from fledge.data.messages import as_sent
from fledge.data.record import Record
from fledge.engines.client import Answer, Client, Decoding, run_together
from fledge.engines.metrics import Acceptance, Counters, of_requests, sglang_counters, vllm_counters
from fledge.io.http import BadRequest, ServerProblem
from fledge.measure import metrics
from fledge.measure.prompts import answers_of, conversation

if TYPE_CHECKING:
    from fledge.data.template import ChatTemplate
    from fledge.decode.engine import Engine
    from fledge.types import Sampling

TOLERANCE = 0.03  # relative difference of τ up to which two decoders count as equal
CHANCE = 2.0  # standard errors below which a difference of τ is within chance
WARM_UP_TOKENS = 8
# an idle server has updated its counters after so many seconds; SGLang updates the number of requests every 30 s
SETTLING = {"vllm": 5.0, "sglang": 35.0}
POLL = 0.1  # seconds between two readings of the counters


@dataclass(frozen=True)
class Asked:
    """A request: the prompt's token ids by the target's tokenizer (None without a tokenizer), the answer, and the
    answer as a message for later turns."""

    ids: list[int] | None
    answer: Answer
    message: dict[str, Any]

    @property
    def mismatch(self) -> str:
        """The difference between the server's prompt and the target's template's; empty for equal prompts."""
        return "" if self.ids is None else self.answer.prompt_difference(self.ids)


@dataclass(frozen=True)
class Measurement:
    """The requests of a measurement, by prompt and turn, and the server's counts of these requests.

    If the server does not count acceptance, `acceptance` is None, and `note` is the reason. `mismatched` are the
    differences of prompts tokenized differently.
    """

    asked: list[list[Asked]]
    seconds: float
    concurrency: int
    acceptance: Acceptance | None
    note: str = ""
    mismatched: list[str] = field(default_factory=list)

    @property
    def requests(self) -> list[Asked]:
        """All requests in order."""
        return [asked for of_prompt in self.asked for asked in of_prompt]

    @property
    def answers(self) -> list[list[dict[str, Any]]]:
        """The answers to each prompt's turns, as messages."""
        return [[asked.message for asked in of_prompt] for of_prompt in self.asked]

    def record(self) -> dict[str, Any]:
        """The figures as JSON-ready data. Times are in milliseconds, each the median and the 90th percentile over the
        requests: `ttft_ms` until the first token, `itl_ms` per later token."""
        answers = [a.answer for a in self.requests]
        tokens = _tokens(answers)
        later = [(a.last - a.first) / (a.tokens - 1) for a in answers if a.tokens and a.tokens > 1]
        tau, alpha = (self.acceptance.tau, self.acceptance.alpha) if self.acceptance else (None, None)
        return {
            "tau": tau,
            "alpha": alpha,
            "depth": self.acceptance.depth if self.acceptance else None,
            "counted": asdict(self.acceptance) if self.acceptance else None,
            "note": self.note,
            "concurrency": self.concurrency,
            "tokens_per_s": tokens / self.seconds if tokens is not None else None,
            "ttft_ms": _spread([a.first - a.started for a in answers]),
            "itl_ms": _spread(later),
            "prompts": len(self.asked),
            "requests": len(answers),
            "mean_new_tokens": tokens / len(answers) if tokens is not None else None,
            "truncated": sum(a.finish == "length" for a in answers),
            "mismatched_prompts": self.mismatched,
        }


def _tokens(answers: Sequence[Answer]) -> int | None:
    """The number of tokens of all answers; None if the server does not count tokens."""
    return None if any(a.tokens is None for a in answers) else sum(a.tokens for a in answers)


def _spread(seconds: list[float]) -> dict[str, float] | None:
    if not seconds:
        return None
    ordered = sorted(seconds)
    return {"median": 1e3 * statistics.median(ordered), "p90": 1e3 * ordered[int(0.9 * (len(ordered) - 1))]}


async def measure(
    client: Client,
    prompts: Sequence[Record],
    decoding: Decoding,
    *,
    concurrency: int,
    template: ChatTemplate | None = None,
    seed: int | None = None,
    histories: Sequence[Sequence[dict[str, Any]]] | None = None,
    drafts: bool = True,
    advance: Callable[[], None] = lambda: None,
) -> Measurement:
    """Sends all prompts to a connected server, `concurrency` at a time, and measures by the server's counters.

    `template` is the target's template: with a template, prompts are compared, and SGLang gets prompts as token ids,
    since /generate alone counts acceptance by request. `histories` are the answers that later turns follow (None: the
    server's own answers). Warms up first: the first `concurrency` prompts get short answers, which are not counted.
    Raises ValueError for a refused prompt (with its location), for requests of other clients, and without `drafts` if
    the server drafts.
    """
    asking = _Asking(client, decoding, template, seed)
    short = replace(decoding, max_new_tokens=min(WARM_UP_TOKENS, decoding.max_new_tokens))
    warm_up = _Asking(client, short, template, seed)
    await asyncio.gather(*(warm_up.ask(p, []) for p in prompts[:concurrency]))
    mismatched = await asking.check_template(prompts)
    before = await settled_counters(client, None)
    if before.running:
        raise ServerProblem(
            f"{client.root} has {before.running:.0f} other requests; measure when nobody else uses the server"
        )
    if not drafts:
        check_plain(client.root, before.acceptance)
    asked: list[list[Asked]] = [[] for _ in prompts]
    remaining = iter(range(len(prompts)))
    start = time.perf_counter()

    async def work() -> None:
        for i in remaining:
            said: list[dict[str, Any]] = []
            for turn in range(answers_of(prompts[i])):
                asked[i].append(await asking.ask(prompts[i], said))
                said.append(histories[i][turn] if histories else asked[i][-1].message)
                advance()

    await run_together(work() for _ in range(concurrency))
    seconds = time.perf_counter() - start
    answers = [a.answer for of_prompt in asked for a in of_prompt]
    tokens = _tokens(answers)
    spent = (await settled_counters(client, None if before.tokens is None else before.tokens + (tokens or 0))).since(
        before
    )
    check_alone(client.root, spent, tokens)
    acceptance = of_requests([a.meta for a in answers]) or spent.acceptance
    if acceptance is not None and not acceptance.rounds:
        acceptance = None
    if not drafts:
        check_plain(client.root, acceptance)
    mismatched += [a.mismatch for of_prompt in asked for a in of_prompt if a.mismatch]
    note = "" if acceptance else _why_unknown(client, spent, asking.by_ids)
    return Measurement(asked, seconds, concurrency, acceptance, note, mismatched)


class _Asking:
    """Sends prompts to a server: as text, token ids or messages, or as token ids to SGLang's /generate (`by_ids`)."""

    def __init__(self, client: Client, decoding: Decoding, template: ChatTemplate | None, seed: int | None):
        self.client, self.decoding, self.template, self.seed = client, decoding, template, seed
        self.by_ids = client.server.engine == "sglang" and template is not None

    async def ask(self, prompt: Record, answers: Sequence[dict[str, Any]]) -> Asked:
        """The request of a prompt's next turn, after `answers` to the earlier turns, with the server's answer."""
        said, where = conversation(prompt, answers), prompt.where + f", turn {len(answers) + 1}" * bool(answers)
        template = self.template and self.template.of(prompt.template_kwargs)
        ids = None if template is None else template.prompt_ids(said, tools=prompt.tools, where=where)
        sent = said if isinstance(said, str) else [as_sent(message) for message in said]
        if ids is not None and (self.by_ids or isinstance(said, str)):
            sent = ids
        try:
            if self.by_ids:
                answer = await self.client.generate(ids, self.decoding, seed=self.seed)
            else:
                answer = await self.client.ask(
                    sent, self.decoding.of(prompt.template_kwargs), tools=prompt.tools, seed=self.seed, stream=True,
                    token_ids=True,
                )  # fmt: skip
        except BadRequest as e:
            raise ValueError(f"{where}: {e}") from e
        return Asked(ids, answer, self._message(prompt, said, ids, answer, len(answers)))

    def _message(
        self, prompt: Record, said: Any, ids: list[int] | None, answer: Answer, turn: int
    ) -> dict[str, Any]:  # fmt: skip
        """The answer as a message. If a further turn follows, the message is made from the answer's tokens, where
        known, since servers leave special tokens out of the text."""
        if self.template is None or ids is None or answer.token_ids is None or turn + 1 == answers_of(prompt):
            return {"role": "assistant", "content": answer.text}
        template = self.template.of(prompt.template_kwargs)
        return history_message(template, said, ids, answer.token_ids, prompt.tools)

    async def check_template(self, prompts: Sequence[Record]) -> list[str]:
        """If prompts are sent as token ids, sends the first conversation as messages too, to compare the number of
        tokens. Returns a list with the difference, or an empty list."""
        chat = next((p for p in prompts if p.text is None), None)
        if not self.by_ids or chat is None:
            return []
        asking = _Asking(self.client, replace(self.decoding, max_new_tokens=1), self.template, None)
        asking.by_ids = False
        return list(filter(None, [(await asking.ask(chat, [])).mismatch]))


async def settled_counters(client: Client, expected: float | None) -> Counters:
    """The server's counters, once unchanged between two readings and, with `expected`, once the generated tokens have
    reached `expected`; after at most SETTLING seconds. Empty for servers without counters."""
    read = {"vllm": vllm_counters, "sglang": sglang_counters}.get(client.server.engine)
    if read is None:
        return Counters()
    latest, end = None, time.monotonic() + SETTLING[client.server.engine]
    while True:
        try:
            counters = read(await client.text("/metrics"))
        except ServerProblem:  # SGLang without --enable-metrics
            return Counters()
        unchanged = latest is not None and counters == latest
        reached = expected is None or counters.tokens is None or counters.tokens >= expected
        idle = expected is not None or not counters.running  # after our requests, only other clients' requests can run
        if (unchanged and reached and idle) or time.monotonic() > end:
            return counters
        latest = counters
        await asyncio.sleep(POLL)


def check_alone(root: str, spent: Counters, tokens: int | None) -> None:
    """Raises ServerProblem if the server has generated more tokens, or verified more drafts, than our requests explain:
    other clients used the server during the measurement, and the counters include their requests."""
    if tokens is None:
        return
    if spent.tokens is not None and spent.tokens > tokens:
        found = f"{spent.tokens:.0f} tokens, of which {tokens} are ours"
    elif spent.acceptance is not None and spent.acceptance.rounds > tokens:
        found = f"{spent.acceptance.rounds:.0f} drafts for {tokens} tokens of ours"
    else:
        return
    raise ServerProblem(
        f"{root} counted {found}: others used the server during the measurement; measure when nobody else does"
    )


def check_plain(root: str, counted: Acceptance | None) -> None:
    """Raises ServerProblem if a server's counters show drafting: a server that drafts is no baseline."""
    if counted is not None and counted.tau is not None:
        raise ServerProblem(
            f"{root} (--baseline-endpoint) drafts itself: it counts {counted.tau:.2f} tokens per verification; start "
            "it without a draft, or leave --baseline-endpoint out"
        )


def _why_unknown(client: Client, spent: Counters, by_ids: bool) -> str:
    """The reason why a server gave no figures of acceptance. `by_ids` tells whether SGLang got prompts as token ids."""
    match client.server.engine:
        case "vllm" if spent.tokens is None:
            return "vLLM's /metrics has no counters; start it without --disable-log-stats"
        case "vllm":
            return "vLLM counted no drafts: it was started without a draft"
        case "sglang" if by_ids or spent.requests is not None:
            return "SGLang counted no verifications: it was started without a draft"
        case "sglang":
            return (
                "SGLang was started without --enable-metrics, so acceptance is known by request only; give --target, "
                "so that prompts can be sent as token ids to /generate, which tells it"
            )
    return "the server is neither vLLM nor SGLang, whose counters fledge reads"


def decode_own(
    engine: Engine, prompts: Sequence[list[int]], *, sampling: Sampling, max_new_tokens: int, batch: int = 1,
    advance: Callable[[], None] = lambda: None,
) -> dict[str, Any]:  # fmt: skip
    """Decodes prompts of token ids with an engine's draft.

    Returns the prompts (`ids`), the `completions` in the order of the prompts, and the `figures`: tau, alpha, rounds,
    batch, device, dtype and drafting options. `advance` is called after each answer.
    """
    done = engine.generate_all(
        list(prompts), batch=batch, max_new_tokens=max_new_tokens, sampling=sampling, answered=lambda index: advance()
    )
    traces = [c.trace for c in done]
    figures = {
        "tau": metrics.tau(traces), "alpha": metrics.alpha(traces), "rounds": sum(len(t.rounds) for t in traces),
        "batch": batch, "device": str(engine.target.device), "dtype": str(engine.target.dtype).removeprefix("torch."),
        **engine.drafting.record(),
    }  # fmt: skip
    return {"ids": list(prompts), "completions": done, "figures": figures}


def identical(ours: Sequence[Answer], theirs: Sequence[Answer]) -> tuple[int, str]:
    """The number of equal answers, and the compared values: "tokens", or "text" if a server returns no token ids."""
    by_tokens = all(a.token_ids is not None for a in (*ours, *theirs))
    values = [[a.token_ids if by_tokens else a.text for a in answers] for answers in (ours, theirs)]
    return sum(a == b for a, b in zip(*values, strict=True)), "tokens" if by_tokens else "text"


def causes(record: dict[str, Any]) -> list[str]:
    """The causes of a difference between a server's τ and the τ of fledge's decoder that the record shows, as
    sentences. Empty if τ differs by at most TOLERANCE."""
    own, theirs = record["own"], record["tau"]
    if not own or not theirs or not own["tau"] or abs(theirs / own["tau"] - 1) <= TOLERANCE:
        return []
    shown: list[str] = []
    if prompts := mismatch_sentence(record):
        shown.append(prompts)
    if record["depth"] and own["mode"] != "tree" and abs(record["depth"] - own["depth"]) > 0.05:
        shown.append(f"The server drafts {record['depth']:.2f} tokens a round and fledge {own['depth']}: give --depth.")
    if record["sampling"]["temperature"] > 0:
        shown.append("At this temperature both draw other texts: compare greedily, or over many more prompts.")
    elif own["identical"] < record["requests"]:
        shown.append(
            f"{record['requests'] - own['identical']} of {record['requests']} answers differ from fledge's: near ties "
            "fall differently by dtype and batch size, or the server has another model."
        )
    error, difference = tau_error(record), abs(theirs - own["tau"])
    if error is not None and difference < CHANCE * error:
        within = f"The difference of {difference:.2f} is within chance: its standard error is {error:.2f}"
        return [*shown, f"{within}, with rounds taken as independent. Measure more prompts."]
    return [*shown, "For causes that cannot be seen from here, see docs/serving.md, section When τ differs."]


def tau_error(record: dict[str, Any]) -> float | None:
    """The standard error of the difference between the τ of a server and of fledge's decoder, with the rounds taken as
    independent; None if the server or fledge's decoder has no α, or no rounds."""
    own, counted = record["own"], record.get("counted") or {}
    sides = [(record.get("alpha"), counted.get("rounds")), (own.get("alpha"), own.get("rounds"))]
    if not all(rates and rounds for rates, rounds in sides):
        return None
    return math.sqrt(sum(_variance(rates) / rounds for rates, rounds in sides))


def _variance(alpha: Sequence[float | None]) -> float:
    """The variance of a round's number of accepted tokens."""
    shares = list(itertools.accumulate((a or 0.0 for a in alpha), operator.mul))  # [k]: share of more than k accepted
    return sum((2 * k + 1) * share for k, share in enumerate(shares)) - sum(shares) ** 2


def mismatch_sentence(record: dict[str, Any]) -> str:
    """A sentence about prompts that the server tokenized differently; empty if no prompt differs."""
    found = record["mismatched_prompts"]
    if not found:
        return ""
    return (
        f"{len(found)} prompts are other tokens on the server ({found[0]}): it uses another chat template, system "
        "prompt or thinking mode, or serves another model."
    )
