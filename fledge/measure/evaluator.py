"""Measures τ during training: the decoder runs on held-out prompts, in the dtype of the training."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import zip_longest
from typing import Any

from fledge.data.record import Record
from fledge.data.spans import text_prompt
from fledge.decode.engine import Engine
from fledge.decode.load import load
from fledge.drafts.draft import Draft
from fledge.measure.metrics import committed_per_round, drafted_and_accepted, quotients
from fledge.measure.prompts import first_prompt, prompt_of, quiet_traces, read_prompts
from fledge.train.ranks import Ranks
from fledge.train.setup.data import EVAL_RECORDS
from fledge.train.setup.recipe import Recipe
from fledge.train.setup.target import PreparedTarget
from fledge.types import Trace

PROMPTS = 32  # at most so many prompts of --eval-prompts are used


def make_evaluator(
    recipe: Recipe, prepared: PreparedTarget, held_out: list[Record], ranks: Ranks, say: Callable[[str], None]
) -> Callable[[Draft], dict[str, Any]] | None:
    """A function that measures the τ of a draft, each rank on a part of the prompts. The function returns a dict with
    the `tau` of all prompts and the list `alpha` (see `measure.metrics`); an empty dict if all answers ended before the
    first round of drafting. Ranks that hold only the target, if any, measure alone, with a copy of rank 0's draft.

    Returns None, after a message with the reason, if τ cannot be measured. Raises ValueError, before training starts,
    if a prompt of --eval-prompts does not fit in the target's context.
    """
    if not prepared.decodes:
        return None
    prompts = _prompts(recipe, prepared, held_out)
    if not prompts and recipe.options.eval_every:
        raise ValueError(
            f"--eval-every needs held-out prompts, and data of fewer than {10 * EVAL_RECORDS} records is used for "
            "training only; give --eval-prompts"
        )
    if not prompts:
        why = "no held-out chat fits in the target's context with --eval-tokens"
        if not held_out:
            why = "the data has too few records to hold some out"
        say(f"{why}, so τ is not measured; give --eval-prompts FILE to measure it")
        return None
    if len(prompts) < len(held_out):
        others = "the others are too long or refused by the chat template"
        say(f"τ is measured on {len(prompts)} of the {len(held_out)} held-out records; {others}")
    if prepared.eval_tokens < 2:
        say("an answer of one token needs no draft, so τ is not measured; give --eval-tokens 2 or more to measure it")
        return None

    def evaluate(draft: Draft) -> dict[str, Any]:
        decoders, place = ranks.size, ranks.rank
        if ranks.target_ranks:
            decoders, place = ranks.target_ranks, ranks.rank - ranks.size
            ranks.meet("before τ was measured", None)  # for a rank that failed after the previous meeting
            with ranks.collective("before τ was measured"):
                ranks.copy_from_first([*draft.parameters(), *draft.buffers()], to_all=True)
        counts, failure = (0, 0, [], []), None
        try:
            if place >= 0:
                engine = load(prepared.target, draft.eval(), template_kwargs=prepared.template.kwargs)
                # the ranks of a sharded target decode together, so every rank has the traces of all prompts
                own = prompts if prepared.target.sharded else prompts[place::decoders]
                traces = greedy_traces(engine, own, prepared.eval_tokens)
                counts = (*committed_per_round(traces), *drafted_and_accepted(traces))
        except Exception as e:  # `meet` tells all ranks of the failure
            failure = e
        committed, rounds, reached, passed = zip(*ranks.meet("while τ was measured", counts, failure), strict=True)
        if not sum(rounds):
            say(
                "every held-out answer ended with its first token, before the first round of drafting: there is no "
                "decoded τ"
            )
            return {}
        sums = ([*map(sum, zip_longest(*lists, fillvalue=0))] for lists in (reached, passed))
        return {"tau": sum(committed) / sum(rounds), "alpha": quotients(*sums)}

    return evaluate


def _prompts(recipe: Recipe, prepared: PreparedTarget, held_out: list[Record]) -> list[Record]:
    """The prompts of --eval-prompts, or else of the held-out records. Of held-out records, plain texts are shortened,
    too long chats are left out, and with --skip-bad also chats that the chat template refuses. Raises ValueError if a
    prompt of --eval-prompts is too long, or if the context has no room for any prompt."""
    template, source = prepared.template, recipe.options.eval_prompts
    target, new = prepared.target, prepared.eval_tokens
    # a target with a table of positions needs an entry for every drafted token too
    longest = target.context - new - (0 if target.rotary else recipe.depth)
    if longest < 1:
        raise ValueError(
            f"--eval-tokens {new} leaves no room for a prompt in the target's context of {target.context} tokens"
        )

    def fits(prompt: Record) -> bool:
        own = template.of(prompt.template_kwargs)
        return len(own.prompt_ids(first_prompt(prompt), tools=prompt.tools)) <= longest

    def usable(prompt: Record) -> bool:
        try:
            return fits(prompt)
        except ValueError:
            if not recipe.options.skip_bad:
                raise
            return False

    def start(record: Record) -> str:
        text = record.text[: record.prompt_length or None]
        n = len(template.prompt_ids(text))
        shorter = min(n if record.prompt_length else n // 2, prepared.max_length // 2, longest)
        return text_prompt(template, text, shorter)[1]

    if source:
        prompts = read_prompts(source, PROMPTS)
        if not all(map(fits, prompts)):
            raise ValueError(
                f"{source} has a prompt of over {longest} tokens, which is too long for the target's context"
            )
        return prompts
    texts = [replace(r, text=start(r), prompt_length=0) for r in held_out if r.text is not None]
    return [p for p in texts if p.text] + [p for p in (prompt_of(r) for r in held_out if r.text is None) if usable(p)]


def greedy_traces(engine: Engine, prompts: Sequence[Record], max_new_tokens: int) -> list[Trace]:
    """The traces of greedy decoding. A prompt is rendered with the prompt's own template variables, if any."""
    templates = [engine.reader.template.of(p.template_kwargs) for p in prompts]
    inputs = [t.prompt_ids(first_prompt(p), tools=p.tools) for t, p in zip(templates, prompts, strict=True)]
    return quiet_traces(engine, inputs, max_new_tokens)
