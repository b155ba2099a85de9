"""Decodes prompts with and without a draft in one run and reports what was gained, and whether a word changed."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

import torch

from fledge.decode.chance import ChanceWarning
from fledge.decode.engine import Completion, Engine
from fledge.decode.verify import TargetSampler
from fledge.eval.environment import environment
from fledge.eval.metrics import alpha, repeated_ngrams, tau
from fledge.eval.prompts import EvalPrompt
from fledge.models.draft import Draft
from fledge.models.size import weight_bytes
from fledge.targets.interface import ReferenceDecoding
from fledge.types import Sampling, Tree, without_processors

BASELINE = None  # the way of token by token, beside the engines' names
LOOPING = 0.2  # a generation loops where more than this share of its 8-grams it has already said


def evaluate(
    engines: Mapping[str, Engine],
    prompts: Sequence[EvalPrompt],
    *,
    sampling: Sampling,
    max_new_tokens: int,
    batch: int = 1,
    advance: Callable[[], None] = lambda: None,
) -> dict[str, dict[str, Any]]:
    """Every prompt by every engine, all of one target, and without a draft, `batch` of them together; one by one, the
    ways take turns at going first. Returns a JSON-ready record for each engine, all against the same baseline.
    `advance` is called for each answer: every turn of every prompt, by each engine and by the baseline.

    Output must be identical where the rule promises it (greedy, and sampling with greedy drafts); a difference is
    allowed only where the target's two best scores are closer than the noise of its batch shapes, measured in the
    same run, and is counted under `near_ties` (SPEC: verification is lossless). Raises ValueError for a prompt that
    does not fit, before any is decoded, or when earlier answers have made it too long.
    """
    ways = _AllWays(engines)
    for prompt in prompts:
        ways.ids_of(prompt, (), max_new_tokens)
    options = dict(max_new_tokens=max_new_tokens, sampling=sampling)
    ways.warm([first_prompt(p) for p in prompts[:batch]], options | dict(max_new_tokens=8), batch)
    ways.decode(prompts, options, batch, advance)
    plain = None
    if sampling.greedy and batch == 1 and isinstance(ways.plain.target, ReferenceDecoding):
        # a few prompts are enough to show that the baseline is not slow
        plain = compare_with_transformers(ways.plain, ways.ids[:4], min(max_new_tokens, 64))
    records = {}
    for name, engine in engines.items():
        records[name] = _record(engine, ways, name, sampling, batch) | {"max_new_tokens": max_new_tokens}
        if plain is not None:
            records[name]["baseline_over_transformers"] = plain
    return records


def _record(engine: Engine, ways: _AllWays, name: str, sampling: Sampling, batch: int) -> dict[str, Any]:
    with_draft, without, ids = ways.made[name], ways.made[BASELINE], ways.ids
    differing = [i for i, (a, b) in enumerate(zip(with_draft, without, strict=True)) if a.tokens != b.tokens]
    promised = sampling.greedy or sampling.draft == "greedy"
    ties, noise = (0, None)
    if promised:
        shapes = (1, engine.drafting.verified), batch
        ties, noise = near_ties(engine, differing, ids, with_draft, without, sampling, *shapes)
    fast, slow = ways.speed(name), ways.speed(BASELINE)
    return {
        "tau": tau([c.trace for c in with_draft]),
        "alpha": alpha([c.trace for c in with_draft]),
        "tokens_per_s": fast,
        "baseline_tokens_per_s": slow,
        "speedup": fast / slow,
        "identical": len(ids) - len(differing) if promised else None,
        "near_ties": ties if promised else None,
        "different": len(differing) - ties if promised else None,
        "batch_noise": noise,
        "prompts": len(ids),
        **_loops(with_draft),
        # together, a request's time is that of others' prompts too
        "round": _round_split(engine, with_draft, without, fast / slow, ways.seconds[name]) if batch == 1 else None,
        "sampling": asdict(without_processors(sampling)),
        "batch": batch,
        **engine.drafting.record(),
        "target": engine.target.name,
        "trust_remote_code": engine.target.trust_remote_code,
        "draft_for": engine.draft.config.provenance.target,
        "template_kwargs": engine.template.kwargs,
        "environment": environment(engine.target.device.type, str(engine.target.dtype)),
    }


def acceptance(engine: Engine, prompts: Sequence[EvalPrompt], max_new_tokens: int) -> dict[str, float]:
    """τ of greedy decoding alone, for choosing checkpoints; empty where no round was decoded. A draft that has learnt
    nothing yet is no news there."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ChanceWarning)
        done = engine.generate_all([first_prompt(p) for p in prompts], max_new_tokens=max_new_tokens)
    traces = [c.trace for c in done]
    return {"tau": tau(traces)} if any(t.rounds for t in traces) else {}


def _prompt(prompt: EvalPrompt, answers: Sequence[str]) -> Any:
    """The raw text, or the messages up to the next answer."""
    if prompt.text is not None:
        return prompt.text
    messages = list(prompt.messages)
    for i, turn in enumerate(prompt.turns[: len(answers) + 1]):
        messages.append({"role": "user", "content": turn})
        if i < len(answers):
            messages.append({"role": "assistant", "content": answers[i]})
    return messages


def first_prompt(prompt: EvalPrompt) -> Any:
    """What the engine is asked first: the raw text, or the messages up to the first answer."""
    return _prompt(prompt, ())


class _AllWays:
    """What was said by each engine and by the baseline, the prompts' ids, and the seconds that each way took. A
    completion's place is its request's number."""

    def __init__(self, engines: Mapping[str, Engine]):
        self.engines = engines
        self.plain = next(iter(engines.values()))  # any of them, asked without its draft, is the baseline
        self.made: dict[str | None, list[Completion]] = {way: [] for way in (*engines, BASELINE)}
        self.seconds = dict.fromkeys(self.made, 0.0)
        self.ids: list[list[int]] = []

    def _generate(self, way: str | None, asked: list[Any], batch: int, options: dict[str, Any]) -> list[Completion]:
        engine = self.engines.get(way, self.plain)
        return engine.generate_all(asked, batch=batch, speculate=way is not BASELINE, **options)

    def ids_of(self, prompt: EvalPrompt, answers: Sequence[str], new: int) -> list[int]:
        """Token ids of the prompt's next turn. Raises ValueError, naming it, where so many more do not fit."""
        where = prompt.where + f", turn {len(answers) + 1}" * bool(answers)
        ids = list(self.plain.template.prompt_ids(_prompt(prompt, answers), where=where))
        try:
            self.plain.check_length(len(ids), new)
        except ValueError as e:
            raise ValueError(f"{where}: {e}") from e
        return ids

    def warm(self, asked: list[Any], options: dict[str, Any], batch: int) -> None:
        """First calls pay for memory, threads and kernels."""
        for way in self.made:
            self._generate(way, asked, batch, options)

    def decode(
        self, prompts: Sequence[EvalPrompt], options: dict[str, Any], batch: int, advance: Callable[[], None]
    ) -> None:
        """A turn of every prompt, then the next of those that have one, which follows the baseline's answers."""
        options = options | dict(answered=lambda place: advance())
        answers: list[list[str]] = [[] for _ in prompts]
        for turn in range(max(p.answers for p in prompts)):
            asking = [i for i, p in enumerate(prompts) if turn < p.answers]
            together = 1 if batch == 1 else 4 * batch  # so that others take the place of those that end
            for group in (asking[i : i + together] for i in range(0, len(asking), together)):
                asked = [self.ids_of(prompts[i], answers[i], options["max_new_tokens"]) for i in group]
                first = len(self.ids) % len(self.made)
                for way in [*self.made][first:] + [*self.made][:first]:
                    began = time.perf_counter()
                    done = self._generate(way, asked, batch, options | dict(request=len(self.ids)))
                    self.seconds[way] += time.perf_counter() - began
                    self.made[way] += done
                for i, completion in zip(group, self.made[BASELINE][-len(group) :], strict=True):
                    answers[i].append(completion.text)
                self.ids += asked

    def speed(self, way: str | None) -> float:
        """Tokens a second."""
        return sum(len(c.tokens) for c in self.made[way]) / self.seconds[way]


def _loops(completions: list[Completion]) -> dict[str, Any]:
    counts = [repeated_ngrams(c.tokens) for c in completions]
    straight = [c.trace for c, (said, n) in zip(completions, counts, strict=True) if said <= LOOPING * n]
    return {
        "repeated_8grams": sum(said for said, _ in counts) / max(sum(n for _, n in counts), 1),
        "not_looping": len(straight),
        "tau_not_looping": tau(straight),
        "mean_new_tokens": sum(len(c.tokens) for c in completions) / len(completions),
    }


def _round_split(
    engine: Engine, with_draft: list[Completion], without: list[Completion], speedup: float, seconds: float
) -> dict[str, float]:
    """Milliseconds of a mean round by part, and a ceiling of the `speedup` that was measured over so many `seconds`:
    what it would have been without overhead, and with drafting at the price of its bytes, d vanilla tokens, d being the
    bytes that drafting reads over those the target reads. Where drafting cost less than that (weights that stay in a
    cache), it keeps its own price, so that the ceiling is never below what was measured."""
    traces = [c.trace for c in with_draft]
    n = max(sum(len(t.rounds) for t in traces), 1)
    draft = sum(r.t_draft for t in traces for r in t.rounds) / n
    verify = sum(r.t_verify for t in traces for r in t.rounds) / n
    overhead = sum(t.t_total - t.t_prefill for t in traces) / n - draft - verify
    steps = sum(max(len(c.tokens) - 1, 1) for c in without)
    token = sum(c.trace.t_total - c.trace.t_prefill for c in without) / steps
    drafted = sum(r.drafted for t in traces for r in t.rounds) / n
    once, each = _bytes_drafting(engine.draft)
    by_bytes = token * (once + drafted * each) / engine.target.weight_bytes
    spared = n * (max(draft - by_bytes, 0.0) + max(overhead, 0.0))
    return {
        "draft_ms": draft * 1e3,
        "verify_ms": verify * 1e3,
        "overhead_ms": overhead * 1e3,
        "vanilla_token_ms": token * 1e3,
        "drafted": drafted,
        "prefill_share": sum(t.t_prefill for t in traces) / sum(t.t_total for t in traces),
        "ceiling": speedup * seconds / (seconds - spared),
    }


def _bytes_drafting(draft: Draft) -> tuple[int, int]:
    """Bytes of the weights that drafting reads once a round, and once more for every drafted token.

    A one-pass draft reads all of them once a round. Otherwise `fc` is read once a round where it fuses the target's
    states, and every token where it fuses the embedding. A head borrowed from the target counts like an own one.
    """
    whole = weight_bytes(draft)
    if draft.family.borrows_head:
        whole += draft.head.numel() * draft.head.element_size()
    if draft.family.one_pass:
        return whole, 0
    once = 0 if draft.family.fuses_embedding else draft.fc.weight.numel() * draft.fc.weight.element_size()
    return once, whole - once


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
    """How many first differences are ties within the noise that another batch shape makes, and that noise.

    The noise is the largest change of the gap between the two best-ranked tokens when the same text goes through the
    target in passes of the `widths` that the runs had (one token at a time, a round's), alone and, where several
    prompts were decoded together, beside as many, over all the text on which both runs agree.
    """
    gaps, noise = [], 0.0
    for i in differing:
        a, b = with_draft[i].tokens, without[i].tokens
        agreed = next((j for j, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)) - 1)
        shapes = {(width, beside) for width in widths for beside in (1, batch)}
        found = [_gaps(engine, ids[i], b[: agreed + 1], *shape, TargetSampler(sampling, i)) for shape in sorted(shapes)]
        noise = max([noise, *(float((found[0] - other).abs().max()) for other in found[1:])])
        gaps.append(min(float(gap[agreed]) for gap in found))
    return sum(gap <= noise for gap in gaps), noise if differing else None


@torch.inference_mode()
def _gaps(
    engine: Engine, prefix: list[int], tokens: list[int], width: int, batch: int, sampler: TargetSampler
) -> torch.Tensor:
    """The gap between the two best-ranked tokens at each of `tokens`, which are fed `width` at a time, in each of
    `batch` equal requests. float64."""
    target = engine.target
    first, _, cache = target.prefill([prefix] * batch)
    logits, done = [first[:1]], len(prefix)
    for at in range(0, len(tokens) - 1, width):
        piece = tokens[at : min(at + width, len(tokens) - 1)]
        ids = torch.tensor([piece] * batch, device=target.device)
        logits.append(target.verify(Tree.chain(ids), cache)[0][0])
        cache.keep([done] * batch, [range(len(piece))] * batch)
        done += len(piece)
    rankings = [sampler.ranking([*prefix, *tokens[:j]], row) for j, row in enumerate(torch.cat(logits))]
    top = torch.stack(rankings).double().topk(2, dim=-1).values.cpu()
    return top[:, 0] - top[:, 1]


def compare_with_transformers(engine: Engine, ids: list[list[int]], max_new_tokens: int) -> float:
    """Vanilla tokens per second over those of transformers' own greedy `generate`, on the same prompts. Before it is
    timed it answers once, on a GPU each prompt at full length: there torch may plan anew for every length."""
    target = engine.target
    seconds, tokens, own_seconds, own_tokens = 0.0, 0, 0.0, 0
    asked = [(prefix, max_new_tokens) for prefix in ids]
    warming = [(ids[0], 8)] if target.device.type == "cpu" else asked
    for i, (prefix, limit) in enumerate(warming + asked):
        began = time.perf_counter()
        n = len(target.reference_generate(prefix, limit))  # token ids on the host: the device is done
        if i < len(warming):
            continue
        seconds, tokens = seconds + time.perf_counter() - began, tokens + n
        done = engine.generate(prefix, speculate=False, max_new_tokens=n)
        own_seconds, own_tokens = own_seconds + done.trace.t_total, own_tokens + len(done.tokens)
    return (own_tokens / own_seconds) / (tokens / seconds)
