"""Acceptance and speed of a running vLLM or SGLang, beside fledge's own decoder: `fledge eval --endpoint`."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import itertools
import warnings
from collections.abc import Callable
from typing import Any

from fledge.config import DraftConfig
from fledge.data.template import ChatTemplate, ModeWarning, untrained_mode
from fledge.decode.drafting import Drafting
from fledge.decode.engine import Engine
from fledge.decode.options import AUTO
from fledge.drafts.weights import open_draft
from fledge.engines.client import Client, Decoding, Server
from fledge.engines.export import trained_depth
from fledge.io.fingerprints import draft_sha256
from fledge.io.http import key_in, root_of
from fledge.io.machine import environment, restoring_signals
from fledge.measure.endpoint import Measurement, causes, decode_own, identical, measure
from fledge.measure.options import EvalOptions, ways
from fledge.measure.prompts import answers_of, conversation, prompt_set_name, read_prompts
from fledge.measure.record import check_record_path, write_record
from fledge.options import parse_template_kwargs
from fledge.targets.compatibility import check_fits
from fledge.targets.distributed import out_of_memory
from fledge.targets.loading import load_target

NEW_TOKENS = 128
MOST_LIKELY_CHAIN = 16  # drafted tokens of a round; a server that drafts more probably drafts trees

_Place = tuple[str, int]  # a set of prompts, and a concurrency


def measure_server(options: EvalOptions, progress: Any, show: Callable[[dict[str, Any]], None]) -> dict[str, Any]:
    """Returns a record, or {label: record} for several sets of prompts or concurrencies.

    `show` is called with the result before the result is written to --out. Raises ValueError if a server cannot be
    used, refuses a prompt, or has requests of other clients during a measurement. All finished measurements are shown
    and written before a ValueError, a KeyboardInterrupt, or an error of fledge's own decoder is raised.
    """
    _check(options)
    work = _ServerEvaluation(options, progress)
    with restoring_signals() as ignore_signals:  # until the measurements are shown and written
        try:
            asyncio.run(work.measure_all())
            if work.config is not None:
                work.add_own(work.config)
        finally:
            ignore_signals()
            record, finished = work.record(), len(work.measured)
            if finished:
                if finished < len(work.planned):
                    progress.say(f"{finished} of {len(work.planned)} measurements were finished")
                try:
                    show(record)
                finally:
                    if options.out:
                        write_record(options.out, record)
    return record


def _check(options: EvalOptions) -> None:
    """Checks the options of server measurements."""
    if options.draft and not options.target:
        raise ValueError("--draft without --target: fledge decodes with both, or with neither; give --target too")
    if len(options.draft) > 1 or len(ways(options)) > 1:
        raise ValueError(
            "a server has one draft and one way of drafting; with --endpoint give --draft, --draft-mode, --depth, "
            "--tree-nodes and --tree-width once"
        )
    if AUTO in (*options.depth, *options.tree_nodes):
        raise ValueError("a server drafts fixed amounts; with --endpoint give --depth and --tree-nodes as numbers")
    if options.baseline_endpoint and root_of(options.baseline_endpoint) == root_of(options.endpoint):
        raise ValueError(
            f"--endpoint and --baseline-endpoint are both {options.endpoint}; the second is to be a server of the same "
            "model without a draft"
        )
    if options.out:
        check_record_path(options.out, "--out")


@dataclasses.dataclass
class _Found:
    """One set of prompts at one concurrency, measured with the draft, without (`baseline`) and by fledge (`own`)."""

    server: Server
    version: str | None
    decoding: Decoding
    measurement: Measurement
    baseline: Measurement | None = None
    baseline_server: dict[str, Any] | None = None  # the record's field `baseline_server`
    own: dict[str, Any] | None = None


class _ServerEvaluation:
    """The measurements of a server: `planned` sets and concurrencies, and `measured` results."""

    def __init__(self, options: EvalOptions, progress: Any):
        """Reads the draft's config, the target's sizes and tokenizer, and the prompts. Raises ValueError for a draft
        that is damaged, does not fit the target, or does not support the drafting options."""
        self.options, self.progress = options, progress
        self.config: DraftConfig | None = None
        self.kwargs = parse_template_kwargs(options.template_kwargs)
        self.template: ChatTemplate | None = None
        for way in ways(options):  # one way, or none without a draft
            drafting = Drafting(**way.drafting(way.draft_mode))
            drafting.check_sampling(options.sampling())
            self.config = open_draft(way.draft).config
            drafting.for_method(self.config.family)
            if self.kwargs is None:
                self.kwargs = self.config.provenance.template_kwargs
        if options.target:
            longest = None if self.config is None else self.config.target_max_length
            trust = options.trust_remote_code
            target = load_target(options.target, weights=False, max_length=longest, trust_remote_code=trust)
            if self.config is not None:
                check_fits(self.config, target)  # before anything is asked
            self.template = ChatTemplate(target.tokenizer, target.stop_ids, self.kwargs)
        self.sets = {prompt_set_name(p): read_prompts(p, options.limit, options.columns) for p in options.prompts}
        if self.config is not None and self.template is not None:  # warns once about an untrained mode
            chats = (p for prompts in self.sets.values() for p in prompts if p.text is None)
            trained = self.config.provenance
            found = (untrained_mode(self.template, trained, conversation(p, ()), tools=p.tools) for p in chats)
            if problem := next(filter(None, found), None):
                warnings.warn(problem, ModeWarning, stacklevel=3)
        self.planned = list(itertools.product(self.sets, options.concurrency or [1]))
        self.measured: dict[_Place, _Found] = {}

    def record(self) -> dict[str, Any]:
        """The record of a single planned measurement; for several planned measurements, the records of the finished
        measurements, by set name, concurrency or both."""
        several = tuple(len(set(names)) > 1 for names in zip(*self.planned, strict=True))
        records = {
            " ".join(itertools.compress((name, f"{n} in flight"), several)): _finished(found, self.options)
            for (name, n), found in self.measured.items()
        }
        return records if any(several) else next(iter(records.values()), {})

    async def measure_all(self) -> None:
        """Measures all sets of prompts at all concurrencies, on the server with the draft and on the baseline server if
        --baseline-endpoint is given."""
        options = self.options
        async with contextlib.AsyncExitStack() as stack:
            key, most = key_in(options.api_key_env), max(concurrency for _, concurrency in self.planned)

            async def connect(url: str, model: str | None) -> Client:
                # the server would count a repeated request twice
                client = Client(url, api_key=key, connections=most + 1, timeout=options.request_timeout, retries=0)
                await stack.enter_async_context(client)
                await client.connect(model)
                return client

            client, plain = await connect(options.endpoint, options.model), None
            if options.baseline_endpoint:
                plain = await connect(options.baseline_endpoint, options.model)
                if (ours := client.server.model) != (theirs := plain.server.model):
                    self.progress.say(
                        f"the servers call their models {ours} and {theirs}; a speedup means something only if these "
                        "are two names of the same one"
                    )
            version = await client.version()
            second = dataclasses.asdict(plain.server) | {"version": await plain.version()} if plain else None
            sampling = options.sampling()
            new = options.max_new_tokens or min(NEW_TOKENS, (client.server.context or 2 * NEW_TOKENS) // 2)
            decoding = Decoding(
                new, sampling.temperature, sampling.top_p, sampling.top_k, sampling.repetition_penalty, self.kwargs
            )
            seed = options.seed if options.was_given("seed") else None
            for name, concurrency in self.planned:
                prompts = self.sets[name]
                total = sum(map(answers_of, prompts)) * (2 if plain else 1)
                label = f"answers to {name}, {concurrency} in flight"
                with self.progress.count(label, total, unit="answers") as advance:
                    ask = dict(concurrency=concurrency, template=self.template, seed=seed, advance=advance)
                    without = await measure(plain, prompts, decoding, drafts=False, **ask) if plain else None
                    histories = without.answers if without else None
                    with_draft = await measure(client, prompts, decoding, histories=histories, **ask)
                found = _Found(client.server, version, decoding, with_draft, without, second)
                self.measured[name, concurrency] = found
                if options.out and len(self.measured) < len(self.planned):
                    with contextlib.suppress(OSError, ValueError):  # reported when the final record is written
                        write_record(options.out, self.record())

    def add_own(self, config: DraftConfig) -> None:
        """Decodes the prompts of the measurements with fledge's own decoder, at --depth (default: the server's depth),
        and adds τ, α and the number of equal answers. Raises ValueError if decoding fails; the message says that the
        server was measured."""
        (way,) = ways(self.options)
        try:
            depth = way.depth or _depth_of(self.measured, trained_depth(config), way.draft_mode)
            engine = dataclasses.replace(way, depth=depth).load_engine(way.draft, way.draft_mode, self.progress.say)
            self._decode(engine, {"depth": depth, "method": config.method})
        except (ValueError, OSError, FloatingPointError, RuntimeError, MemoryError) as e:
            if isinstance(e, RuntimeError) and not out_of_memory(e):
                raise
            reason = str(e)
            if out_of_memory(e):
                reason = (
                    "there is not enough memory for the target and the draft beside what else is there, such as the "
                    f"server ({next(iter(reason.splitlines()), type(e).__name__)}); decode elsewhere with --device "
                    "cpu, or give the server less of the GPU (vLLM: --gpu-memory-utilization, SGLang: "
                    "--mem-fraction-static)"
                )
            raise ValueError(f"the server was measured, but fledge's own τ is missing: {reason}") from e

    def _decode(self, engine: Engine, names: dict[str, Any]) -> None:
        """Decodes the prompts of each measurement, and sets the measurement's `own` to the figures and `names`."""
        done: dict[str, Any] = {}
        for (name, _), found in self.measured.items():
            requests = found.measurement.requests
            ids = [asked.ids for asked in requests]
            if done.get("ids") != ids:  # without --baseline-endpoint, later turns follow each measurement's own answers
                with self.progress.count(f"answers to {name} by fledge", len(ids), unit="answers") as advance:
                    done = decode_own(
                        engine, ids, sampling=self.options.sampling(), max_new_tokens=found.decoding.max_new_tokens,
                        batch=self.options.batch, advance=advance,
                    )  # fmt: skip
            pairs = zip(done["completions"], requests, strict=True)
            same = sum(ours.text == asked.answer.text for ours, asked in pairs)
            found.own = done["figures"] | names | {"identical": same if self.options.temperature == 0 else None}


def _depth_of(measured: dict[_Place, _Found], trained: int, mode: str | None) -> int:
    """The depth at which fledge decodes: the server's number of drafted tokens per round, or `trained` if the number is
    unknown or the mode is tree (SGLang counts all nodes of a tree). Raises ValueError for a chain if SGLang's number is
    too large for a chain."""
    depths = [found.measurement.acceptance.depth for found in measured.values() if found.measurement.acceptance]
    known = [round(depth) for depth in depths if depth]
    if mode == "tree" or not known:
        return trained
    engine = next(iter(measured.values())).server.engine
    if engine == "sglang" and known[0] > max(trained, MOST_LIKELY_CHAIN):
        raise ValueError(
            f"the server drafts {known[0]} tokens a round, which is probably a tree; give --draft-mode tree with "
            "--depth, --tree-nodes and --tree-width as the server has them, or --depth for a chain"
        )
    return known[0]


def _finished(found: _Found, options: EvalOptions) -> dict[str, Any]:
    """The record of a measurement."""
    sampled = {name: getattr(options, name) for name in ("temperature", "top_p", "top_k", "repetition_penalty")}
    record = found.measurement.record() | {
        "own": found.own,
        "baseline": found.baseline.record() if found.baseline else None,
        "speedup": None,
        "identical": None,
        "compared": None,
        "sampling": sampled | ({"seed": options.seed} if options.was_given("seed") else {}),
        "max_new_tokens": found.decoding.max_new_tokens,
        "template_kwargs": found.decoding.template_kwargs,
        "target": options.target,
        "draft": options.draft[0] if options.draft else None,
        "draft_sha256": draft_sha256(open_draft(options.draft[0]).tensors) if options.draft else None,
        "endpoint": options.endpoint,
        "server": dataclasses.asdict(found.server) | {"version": found.version},
        "baseline_endpoint": options.baseline_endpoint,
        "baseline_server": found.baseline_server,
        "environment": environment("cpu", "the server's"),
    }  # fmt: skip
    if found.baseline:
        plain = record["baseline"]["tokens_per_s"]
        if plain and record["tokens_per_s"]:
            record["speedup"] = record["tokens_per_s"] / plain
        if options.temperature == 0:
            pair = [[a.answer for a in m.requests] for m in (found.measurement, found.baseline)]
            record["identical"], record["compared"] = identical(*pair)
    record["causes"] = causes(record)
    return record
