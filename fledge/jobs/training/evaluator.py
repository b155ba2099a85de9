"""τ while training: the real decoder on held-out prompts, in the dtype that trains."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from fledge.data.record import Record
from fledge.decode.engine import Engine
from fledge.eval.prompts import EvalPrompt, prompt_of, read_prompts
from fledge.eval.run import acceptance, first_prompt
from fledge.jobs.training.data import EVAL_RECORDS
from fledge.jobs.training.recipe import Recipe
from fledge.jobs.training.target import Prepared
from fledge.models.draft import Draft

PROMPTS = 32  # most prompts of --eval-prompts

Say = Callable[[str], None]


def make_evaluator(
    recipe: Recipe, prepared: Prepared, held_out: list[Record], say: Say
) -> Callable[[Draft], dict[str, float]] | None:
    """A function that measures τ of a draft (a dict with `tau`, empty where no draft was asked for), or None, with the
    reason said, where there is nothing to measure it on.

    Raises ValueError, before training starts, for prompts given by name that do not fit the target's context.
    """
    if not prepared.decodes:
        return None
    fitting = _Fitting(prepared, _room(recipe, prepared), recipe.data.skip_bad)
    named = recipe.evaluation.prompts
    prompts = fitting.named(named) if named else fitting.held_out(held_out)
    if not prompts:
        _say_no_prompts(recipe, held_out, say)
        return None
    if len(prompts) < len(held_out):
        others = "the others are too long or refused"
        say(f"τ is decoded on {len(prompts)} of the {len(held_out)} held-out records; {others}")
    if prepared.eval_tokens < 2:
        say("an answer of one token needs no draft, so τ is not decoded; --eval-tokens 2 or more would")
        return None

    def evaluate(draft: Draft) -> dict[str, float]:
        engine = Engine(prepared.target, draft, template_kwargs=prepared.template.kwargs)
        found = acceptance(engine, prompts, prepared.eval_tokens)
        if not found:
            say("every held-out answer ended with its first token, before a draft was asked for: there is no decoded τ")
        return found

    return evaluate


def _say_no_prompts(recipe: Recipe, held_out: list[Record], say: Say) -> None:
    if recipe.evaluation.every:
        raise ValueError(
            f"--eval-every needs prompts that are held out, and data of under {10 * EVAL_RECORDS} records are all "
            "trained on; give --eval-prompts"
        )
    few, long = "so few records leave none to hold out", "no held-out chat fits the target with --eval-tokens"
    say(f"{long if held_out else few}, so τ is not decoded; --eval-prompts FILE would")


def _room(recipe: Recipe, prepared: Prepared) -> int:
    """Most tokens of a prompt that leave room for the answer. Raises ValueError where none is left."""
    target, new = prepared.target, prepared.eval_tokens
    beyond = 0 if target.rotary else recipe.depth  # drafts too must stay within a table of positions
    room = target.context - new - beyond
    if room < 1:
        raise ValueError(f"--eval-tokens {new} leaves no room in the {target.context} the target reads")
    return room


@dataclass(frozen=True)
class _Fitting:
    """Prompts of at most `room` tokens. `skip_bad`: those that the template refuses are left out."""

    prepared: Prepared
    room: int
    skip_bad: bool

    def named(self, source: str) -> list[EvalPrompt]:
        """Those of --eval-prompts. Raises ValueError where one does not fit."""
        prompts = read_prompts(source, PROMPTS)
        if not all(map(self._fits, prompts)):
            raise ValueError(f"{source} has a prompt of over {self.room} tokens, more than the target can read")
        return prompts

    def held_out(self, records: list[Record]) -> list[EvalPrompt]:
        """Those of held-out records: texts are cut short, chats that do not fit are left out."""
        tokenizer = self.prepared.target.tokenizer
        starts = [self._start(r) for r in records if r.text is not None]
        texts = [EvalPrompt(text=tokenizer.decode(ids, skip_special_tokens=True)) for ids in starts if ids]
        return texts + [p for p in (prompt_of(r) for r in records if r.text is None) if self._usable(p)]

    def _fits(self, prompt: EvalPrompt) -> bool:
        return len(self.prepared.template.prompt_ids(first_prompt(prompt))) <= self.room

    def _usable(self, prompt: EvalPrompt) -> bool:
        try:
            return self._fits(prompt)
        except ValueError:
            if not self.skip_bad:
                raise
            return False

    def _start(self, record: Record) -> list[int]:
        ids = self.prepared.template.prompt_ids(record.text[: record.given or None])
        longest = min(self.prepared.max_length // 2, self.room)
        return ids[: min(len(ids) if record.given else len(ids) // 2, longest)]
