"""Decodes prompts with drafts, each in one or several ways of drafting, and without a draft in one run, and reports the
speedup and whether any token differs."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

import torch

from fledge import __version__
from fledge.data.answering import history_message
from fledge.data.record import Record
from fledge.decode.drafting import Drafting
from fledge.decode.engine import Completion, Engine
from fledge.decode.options import prepare_rounds
from fledge.decode.request import AttributedText
from fledge.decode.sampling import BatchSampling, seen_tokens
from fledge.drafts.weights import open_draft, read_draft_config
from fledge.io.fingerprints import draft_sha256
from fledge.io.machine import command, environment, restoring_signals
from fledge.measure import metrics
from fledge.measure.options import EvalOptions, load_engines, names, ways
from fledge.measure.prompts import answers_of, conversation, first_prompt, prompt_set_name, read_prompts, spread
from fledge.measure.record import check_record_path, speedup_interval, tau_interval, write_record
from fledge.ops.sampling import TOKEN, gumbel
from fledge.options import default_new_tokens
from fledge.targets.interface import ReferenceDecoding
from fledge.types import Prompt, Sampling, Tree

BASELINE = None  # the name of the arm without a draft; every arm with a draft has the name of an engine
SAMPLES = 3  # sample answers in a record
PROMPT_CHARACTERS = 400  # a sample shows so many characters of the prompt's end


class TurnTooLong(ValueError):
    """A turn does not fit the target's context."""


class EvaluationStopped(Exception):
    """The evaluation ended early, by KeyboardInterrupt or TurnTooLong (`__cause__`); `records` cover the requests that
    all arms had answered."""

    def __init__(self, records: dict[str, dict[str, Any]]):
        super().__init__()
        self.records = records


def compare_drafts(options: EvalOptions, progress: Any, show: Callable[[dict[str, Any]], None]) -> dict[str, Any]:
    """Returns a record, or {label: record} for several drafts, ways of drafting or prompt files. A label names the
    values that differ between the records.

    `show` is called with the result before the result is written to --out, so that no result is lost if the disk is
    full. A partial result is shown and written before the function raises KeyboardInterrupt, or ValueError if answers
    have made a later turn too long for the target. Ctrl-C has no effect while a result is shown and written.
    """
    if not options.target:
        raise ValueError("give --target MODEL, or --endpoint URL to measure a running server")
    if not options.draft:
        raise ValueError("give --draft DIR")
    if options.out:
        check_record_path(options.out, "--out")
    compared, sampling = ways(options), options.sampling()
    drafting = [Drafting(**way.drafting(way.draft_mode)) for way in compared]
    for each in drafting:
        each.check_sampling(sampling)
    families = {draft: read_draft_config(draft).family for draft in options.draft}
    for way, each in zip(compared, drafting, strict=True):
        each.for_method(families[way.draft])
    sets = {prompt_set_name(p): read_prompts(p, options.limit, options.columns) for p in options.prompts}
    hashes = {draft: draft_sha256(open_draft(draft).tensors) for draft in options.draft}
    engines = load_engines(options, compared, progress.say)
    first = engines[0]  # this engine also decodes the baseline
    max_new_tokens = options.max_new_tokens or default_new_tokens(128, first.target.context)
    kwargs = {way.draft: engine.reader.template.kwargs for way, engine in zip(compared, engines, strict=True)}
    templated = any(p.text is None for prompts in sets.values() for p in prompts)
    if options.template_kwargs and not templated:
        raise ValueError("--template-kwargs has no effect because no prompt is a chat; leave it out")
    if templated and any(k != kwargs[options.draft[0]] for k in kwargs.values()):
        raise ValueError(
            f"the drafts were trained with different template arguments ({kwargs}), so their prompts would differ; "
            "give --template-kwargs for all, or evaluate them one by one"
        )
    longest = max(longest_request(first, p, max_new_tokens) for prompts in sets.values() for p in prompts)
    arms = [(engine, True) for engine in engines] + [(first, False)]
    prepare_rounds(arms, progress, batch=options.batch, tokens=longest, sampling=sampling)
    records: dict[str, Any] = {}
    stopped: BaseException | None = None
    with restoring_signals() as ignore_signals:  # until the records are shown and written
        for name, prompts in sets.items():
            labels = [f"{way} {name}".strip() if len(sets) > 1 else way for way in names(options, compared)]
            answers = len(arms) * sum(map(answers_of, prompts))
            origin = {"prompt_set": name, "command": command(), "fledge": __version__}
            drafts = {
                label: {"draft": way.draft, "draft_sha256": hashes[way.draft]}
                for label, way in zip(labels, compared, strict=True)
            }
            found: dict[str, Any] = {}
            try:
                if options.out and records:  # results so far; an error is reported when the final record is written
                    with contextlib.suppress(OSError, ValueError):
                        write_record(options.out, records)
                with progress.count(f"answers to {name} in {len(arms)} ways", answers, unit="answers") as advance:
                    found = evaluate(
                        dict(zip(labels, engines, strict=True)), prompts, sampling=sampling, batch=options.batch,
                        max_new_tokens=max_new_tokens, advance=advance, interrupted=ignore_signals,
                    )  # fmt: skip
            except EvaluationStopped as e:
                found, stopped = e.records, e.__cause__
            except KeyboardInterrupt as e:
                ignore_signals()
                if not (records or found):
                    raise
                stopped = e
            records |= {label: record | drafts[label] | origin for label, record in found.items()}
            if stopped:
                break
        ignore_signals()
        record = next(iter(records.values())) if len(records) == 1 else records
        try:
            show(record)
        finally:
            if options.out:
                write_record(options.out, record)
    if stopped:
        raise stopped
    return record


def evaluate(
    engines: Mapping[str, Engine],
    prompts: Sequence[Record],
    *,
    sampling: Sampling,
    max_new_tokens: int,
    batch: int = 1,
    advance: Callable[[], None] = lambda: None,
    interrupted: Callable[[], None] = lambda: None,
) -> dict[str, dict[str, Any]]:
    """Decodes all prompts with every engine, and without a draft, `batch` prompts at a time.

    The engines have the same target. Returns a JSON-ready record for each engine, with the same baseline for all. The
    arms take turns at decoding a prompt (or group of prompts) first. `advance` is called after each answer of each arm.

    With greedy decoding, and with sampling and coupled drafts, the output of all arms must be identical. A different
    token is accepted only if the gap between the target's two best scores at that token is at most the rounding noise
    between batch shapes, measured in the same run (`near_ties`). Raises TurnTooLong if a prompt is too long, before
    decoding. Raises EvaluationStopped if answers have made a later turn too long, and after an interrupt (Ctrl-C) if
    all arms have answered some requests. The records of the exception have `stopped`, the number of planned requests.
    `interrupted` is called first, since a second interrupt would lose the records.
    """
    comparison = _Comparison(engines)
    for prompt in prompts:
        comparison.prompt_ids(prompt, (), max_new_tokens)
    options = dict(max_new_tokens=max_new_tokens, sampling=sampling)
    first = [comparison.prompt_ids(p, (), max_new_tokens) if p.tools else first_prompt(p) for p in prompts[:batch]]
    comparison.warm_up(first, options | dict(max_new_tokens=8), batch)
    more: dict[str, Any] = {"max_new_tokens": max_new_tokens}

    def records() -> dict[str, dict[str, Any]]:
        return {name: _record(engine, comparison, name, sampling, batch) | more for name, engine in engines.items()}

    try:
        comparison.decode(prompts, options, batch, advance)
        if sampling.greedy and batch == 1 and isinstance(comparison.baseline.target, ReferenceDecoding):
            # a few prompts are enough to show that the baseline is not slow
            ids = comparison.ids[:4]
            ratio = compare_with_transformers(comparison.baseline, ids, min(max_new_tokens, 64))
            more["baseline_over_transformers"] = ratio
        return records()
    except (TurnTooLong, KeyboardInterrupt) as e:
        interrupted()
        if not comparison.groups:
            raise
        comparison.keep_complete()
        more["stopped"] = sum(map(answers_of, prompts))
        raise EvaluationStopped(records()) from e


def _record(engine: Engine, comparison: _Comparison, name: str, sampling: Sampling, batch: int) -> dict[str, Any]:
    with_draft, without, ids = comparison.completions[name], comparison.completions[BASELINE], comparison.ids
    differing = [i for i, (a, b) in enumerate(zip(with_draft, without, strict=True)) if a.tokens != b.tokens]
    promised = not sampling.samples_draft
    ties, noise = (0, None)
    if promised:
        shapes = (1, engine.drafting.verified), batch
        ties, noise = near_ties(engine, differing, ids, with_draft, without, sampling, *shapes)
    fast, slow = comparison.speed(name), comparison.speed(BASELINE)
    times = zip(comparison.times[name], comparison.times[BASELINE], strict=True) if batch == 1 else [None] * len(ids)
    requests = [request_record(*each) for each in zip(with_draft, without, times, strict=True)]
    repeated = [repeated_ngrams(c.tokens) for c in with_draft]
    share = metrics.paused([c.trace for c in with_draft])
    return {
        "tau": metrics.tau([c.trace for c in with_draft]),
        "tau_interval": tau_interval(requests),
        "paused": share,
        "pause_reason": engine.chooser.reason if engine.chooser is not None and share else "",
        "alpha": metrics.alpha([c.trace for c in with_draft]),
        "tokens_per_s": fast,
        "baseline_tokens_per_s": slow,
        "speedup": fast / slow,
        "speedup_interval": speedup_interval(requests),
        "identical": len(ids) - len(differing) if promised else None,
        "near_ties": ties if promised else None,
        "different": len(differing) - ties if promised else None,
        "batch_noise": noise,
        "prompts": len(ids),
        "repeated_8grams": sum(n for n, _ in repeated) / max(sum(n for _, n in repeated), 1),
        "mean_new_tokens": sum(len(c.tokens) for c in with_draft) / len(with_draft),
        # in a batch, the time of a request includes the prefill of other requests
        "round": _round_times(with_draft, without) if batch == 1 else None,
        "sampling": asdict(replace(sampling, processors=())),  # JSON has no processors
        "batch": batch,
        **engine.drafting.record(),
        "target": engine.target.name,
        "target_implementation": engine.target.implementation,
        "trust_remote_code": engine.target.trust_remote_code,
        "draft_for": engine.draft.config.provenance.target,
        "template_kwargs": engine.reader.template.kwargs,
        "environment": environment(engine.target.device.type, str(engine.target.dtype)),
        "requests": requests,
        "samples": sample_records(engine, ids, with_draft),
    }


def request_record(
    with_draft: Completion, without: Completion, seconds: tuple[float, float] | None = None
) -> dict[str, Any]:
    """The sums of one request: tokens and rounds, the tokens that the rounds committed and drafted, and the two sums of
    α by depth. `seconds` are the times with the draft and without; None for requests that were decoded together. The
    record has `baseline_tokens` only if the answer without the draft has a different length."""
    committed, rounds = metrics.committed_per_round([with_draft.trace])
    reached, passed = metrics.drafted_and_accepted([with_draft.trace])
    record: dict[str, Any] = {
        "tokens": len(with_draft.tokens),
        "rounds": rounds,
        "committed": committed,
        "drafted": sum(r.drafted for r in with_draft.trace.rounds),
        "reached": reached,
        "passed": passed,
    }
    if len(without.tokens) != len(with_draft.tokens):
        record["baseline_tokens"] = len(without.tokens)
    if seconds is not None:
        record["seconds"], record["baseline_seconds"] = seconds
    return record


def sample_records(engine: Engine, ids: Sequence[list[int]], completions: Sequence[Completion]) -> list[dict[str, Any]]:
    """At most SAMPLES answers, evenly spaced over the requests: the end of the prompt's text, and the answer in pieces,
    each with its proposer (`fledge.decode.request.proposers`)."""
    tokenizer = engine.target.tokenizer
    samples = []
    for i in spread(list(range(len(ids))), SAMPLES):
        text = AttributedText(tokenizer, engine.target.stop_ids)
        pieces = [*text.take(completions[i]), *text.finish()]
        samples.append({"prompt": tokenizer.decode(ids[i])[-PROMPT_CHARACTERS:], "pieces": [list(p) for p in pieces]})
    return samples


def repeated_ngrams(tokens: Sequence[int], n: int = 8) -> tuple[int, int]:
    """(n-grams that occurred earlier in the sequence, all n-grams), a measure of how much a generation loops."""
    seen: set[tuple[int, ...]] = set()
    repeated = 0
    total = max(len(tokens) - n + 1, 0)
    for i in range(total):
        gram = tuple(tokens[i : i + n])
        repeated += gram in seen
        seen.add(gram)
    return repeated, total


def longest_request(engine: Engine, prompt: Record, max_new_tokens: int) -> int:
    """An estimate of the tokens of a prompt's last turn with its answer: the sum of all turns, each rendered alone, and
    of an answer of `max_new_tokens` to each turn."""
    later = (replace(prompt, messages=None, turns=(turn,)) for turn in prompt.turns[1:])
    asked = [first_prompt(p) for p in (prompt, *later)]
    template = engine.reader.template.of(prompt.template_kwargs)
    turns = [template.prompt_ids(p, tools=prompt.tools, where=prompt.where) for p in asked]
    return sum(map(len, turns)) + answers_of(prompt) * max_new_tokens


class _Comparison:
    """The arms of an evaluation: each engine, and the baseline without a draft.

    `completions` and `times` have, for each arm, the completions of all requests, and the seconds of decoding each
    group of requests (one request at batch 1). `ids` are the requests' prompts. The index of a request is the request
    number, which selects the request's random stream.
    """

    def __init__(self, engines: Mapping[str, Engine]):
        self.engines = engines
        self.baseline = next(iter(engines.values()))  # any engine; the baseline does not use the draft
        self.completions: dict[str | None, list[Completion]] = {arm: [] for arm in (*engines, BASELINE)}
        self.times: dict[str | None, list[float]] = {arm: [] for arm in self.completions}
        self.groups: list[list[list[int]]] = []  # the prompts of the requests that all arms have answered

    @property
    def ids(self) -> list[list[int]]:
        return [ids for group in self.groups for ids in group]

    def _generate(self, arm: str | None, prompts: list[Any], batch: int, options: dict[str, Any]) -> list[Completion]:
        engine = self.engines.get(arm, self.baseline)
        return engine.generate_all(prompts, batch=batch, speculate=arm is not BASELINE, **options)

    def prompt_ids(self, prompt: Record, answers: Sequence[dict[str, Any]], new: int) -> list[int]:
        """The token ids of a prompt's next turn. Raises TurnTooLong with the prompt's location if the ids and `new` new
        tokens exceed the target's context."""
        where = prompt.where + f", turn {len(answers) + 1}" * bool(answers)
        template = self.baseline.reader.template.of(prompt.template_kwargs)
        ids = list(template.prompt_ids(conversation(prompt, answers), tools=prompt.tools, where=where))
        try:
            for engine in self.engines.values():
                engine.check_length(len(ids), new, drafts=True)
        except ValueError as e:
            raise TurnTooLong(f"{where}: {e}") from e
        return ids

    def warm_up(self, prompts: list[Any], options: dict[str, Any], batch: int) -> None:
        """Decodes with each arm once, uncounted, since first calls allocate memory and compile kernels."""
        for arm in self.completions:
            self._generate(arm, prompts, batch, options)

    def decode(
        self, prompts: Sequence[Record], options: dict[str, Any], batch: int, advance: Callable[[], None]
    ) -> None:
        """Decodes the first turn of every prompt, then the second, and so on. Later turns follow the baseline's answers
        in all arms."""
        options = options | dict(answered=lambda index: advance())
        answers: list[list[dict[str, Any]]] = [[] for _ in prompts]
        for turn in range(max(map(answers_of, prompts))):
            remaining = [i for i, p in enumerate(prompts) if turn < answers_of(p)]
            group_size = 1 if batch == 1 else 4 * batch  # several batches: new requests replace finished ones
            for group in (remaining[i : i + group_size] for i in range(0, len(remaining), group_size)):
                ids = [self.prompt_ids(prompts[i], answers[i], options["max_new_tokens"]) for i in group]
                arms = [*self.completions]
                number = len(self.ids)
                first = number % len(arms)
                for arm in arms[first:] + arms[:first]:
                    start = time.perf_counter()
                    completed = self._generate(arm, ids, batch, options | dict(request=number))
                    self.times[arm].append(time.perf_counter() - start)
                    self.completions[arm] += completed
                for i, sent, done in zip(group, ids, self.completions[BASELINE][-len(group) :], strict=True):
                    if turn + 1 < answers_of(prompts[i]):
                        said = conversation(prompts[i], answers[i])
                        template = self.baseline.reader.template.of(prompts[i].template_kwargs)
                        answers[i].append(history_message(template, said, sent, done.tokens, prompts[i].tools))
                self.groups.append(ids)

    def keep_complete(self) -> None:
        """Drops the answers of the interrupted group of requests."""
        for arm in self.completions:
            del self.times[arm][len(self.groups) :], self.completions[arm][len(self.ids) :]

    def speed(self, arm: str | None) -> float:
        """Tokens per second."""
        return sum(len(c.tokens) for c in self.completions[arm]) / sum(self.times[arm])


def _round_times(with_draft: list[Completion], without: list[Completion]) -> dict[str, float]:
    """The milliseconds of a mean round by part, and of a token without a draft."""
    traces = [c.trace for c in with_draft]
    n = max(sum(len(t.rounds) for t in traces), 1)
    draft = sum(r.t_draft for t in traces for r in t.rounds) / n
    verify = sum(r.t_verify for t in traces for r in t.rounds) / n
    steps = sum(max(len(c.tokens) - 1, 1) for c in without)
    return {
        "draft_ms": draft * 1e3,
        "verify_ms": verify * 1e3,
        "overhead_ms": 1e3 * (sum(t.t_total - t.t_prefill for t in traces) / n - draft - verify),
        "vanilla_token_ms": 1e3 * sum(c.trace.t_total - c.trace.t_prefill for c in without) / steps,
        "drafted": sum(r.drafted for t in traces for r in t.rounds) / n,
        "prefill_share": sum(t.t_prefill for t in traces) / sum(t.t_total for t in traces),
    }


def near_ties(
    engine: Engine,
    differing: list[int],
    ids: list[list[int]],
    with_draft: list[Completion],
    without: list[Completion],
    sampling: Sampling,
    widths: Sequence[int],
    batch: int,
) -> tuple[int, float | None]:
    """The number of `differing` requests whose first different token is a near tie, and the rounding noise (None if no
    request differs).

    A near tie is a token at which the gap between the target's two best scores is at most the noise. The noise is the
    largest difference of the gap between passes of different shapes, over all tokens up to the first different token.
    The shapes are the `widths` of passes in tokens (one token, and the tokens of a verification), with one sequence and
    with `batch` sequences. `ids` are the prompts, and `with_draft` and `without` the completions, of all requests.
    """
    gaps, noise = [], 0.0
    for i in differing:
        a, b = with_draft[i].tokens, without[i].tokens
        agreed = next((j for j, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)) - 1)
        shapes = {(width, sequences) for width in widths for sequences in (1, batch)}
        found = [_gaps(engine, ids[i], b[: agreed + 1], *shape, sampling, i) for shape in sorted(shapes)]
        noise = max([noise, *(float((found[0] - other).abs().max()) for other in found[1:])])
        gaps.append(min(float(gap[agreed]) for gap in found))
    return sum(gap <= noise for gap in gaps), noise if differing else None


@torch.inference_mode()
def _gaps(
    engine: Engine, prefix: list[int], tokens: list[int], width: int, batch: int, sampling: Sampling, request: int = 0
) -> torch.Tensor:
    """The gap between the target's two best scores at each of `tokens`, float64, if the tokens are run in passes of
    `width` tokens and `batch` copies of the sequence."""
    target = engine.target
    cache = target.new_cache([len(prefix) + len(tokens)] * batch)
    first, _ = target.prefill([Prompt(prefix)] * batch, cache)
    logits = [first[:1]]
    for at in range(0, len(tokens) - 1, width):
        piece = tokens[at : min(at + width, len(tokens) - 1)]
        ids = torch.tensor([piece] * batch, device=target.device)
        logits.append(target.verify(Tree.chain(ids), cache)[0][0])
        cache.keep(None, torch.full((batch,), len(piece), device=target.device))
    cache.select([])
    texts = ([*prefix, *tokens[:j]] for j in range(len(tokens)))
    rankings = [ranking_of(sampling, request, text, row) for text, row in zip(texts, torch.cat(logits), strict=True)]
    top = torch.stack(rankings).double().topk(2, dim=-1).values.cpu()
    return top[:, 0] - top[:, 1]


def ranking_of(sampling: Sampling, request: int, prefix: list[int], logits_V: torch.Tensor) -> torch.Tensor:
    """The values [V] whose argmax is the token that the target chooses after `prefix`: the scores, plus Gumbel noise
    unless `sampling` is greedy."""
    of_request = BatchSampling.of([sampling], [request], logits_V.device)
    seen_BV = seen_tokens([prefix], logits_V.numel(), logits_V.device)
    scores_BV = of_request.penalize(logits_V[None, None], seen_BV[:, None])[0]
    for processor in sampling.processors:
        scores_BV = processor(torch.tensor([prefix], device=logits_V.device), scores_BV)
    scores_V = of_request.warp(scores_BV[None])[0, 0]
    if sampling.greedy:
        return scores_V
    state_BN = of_request.keys(torch.tensor([[len(prefix)]], device=logits_V.device), TOKEN)
    return scores_V.double() + gumbel(state_BN[0, 0], logits_V.numel())


def compare_with_transformers(engine: Engine, ids: list[list[int]], max_new_tokens: int) -> float:
    """The ratio of tokens per second of the baseline to transformers' greedy `generate`, on the same prompts.

    The warm-up decodes each prompt once on a GPU, since cuDNN may compile a kernel for every new length.
    """
    target = engine.target
    for prefix, limit in [(ids[0], 8)] if target.device.type == "cpu" else [(prefix, max_new_tokens) for prefix in ids]:
        target.reference_generate(prefix, limit)
    seconds, tokens, own_seconds, own_tokens = 0.0, 0, 0.0, 0
    for prefix in ids:
        start = time.perf_counter()
        n = len(target.reference_generate(prefix, max_new_tokens))  # returns lists, so the device has finished
        seconds, tokens = seconds + time.perf_counter() - start, tokens + n
        done = engine.generate(prefix, speculate=False, max_new_tokens=n)
        own_seconds, own_tokens = own_seconds + done.trace.t_total, own_tokens + len(done.tokens)
    return (own_tokens / own_seconds) / (tokens / seconds)
