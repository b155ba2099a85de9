"""Speculative decoding of one request or many: propose, verify, commit, until each one's turn ends."""

from __future__ import annotations

import copy
import functools
import inspect
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import fields, replace
from numbers import Integral
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from fledge.data.template import ChatTemplate
from fledge.decode.batch import Batch, Lanes, NoDrafter
from fledge.decode.chance import Acceptance
from fledge.decode.prompt import Prompt, check_prompt, check_prompts, is_several
from fledge.decode.propose import Drafting
from fledge.decode.request import Completion, Request
from fledge.decode.text import TextStream
from fledge.decode.verify import TargetSampler
from fledge.models.draft import Draft
from fledge.models.weights import load_draft, read_draft_config
from fledge.targets.compatibility import connect_draft
from fledge.targets.interface import DecodingTarget
from fledge.targets.loading import load_target, target_of
from fledge.types import Sampling, check_type

BATCH = 16  # requests decoded together by default
NEW_TOKENS = 256  # most new tokens of a request by default


class Engine:
    """A target, and a draft that speeds it up without changing its output.

    `drafting` are the fields of `fledge.decode.propose.Drafting`: `mode="tree", depth=6`. A draft whose tokens turn out
    to be accepted no more often than by chance is reported once, by a `ChanceWarning`. Raises ValueError where draft
    and target do not belong together, the target cannot do what verification needs, or the options contradict each
    other, and TypeError for arguments of another type.
    """

    def __init__(
        self,
        target: DecodingTarget,
        draft: Draft | None = None,
        *,
        template_kwargs: dict[str, Any] | None = None,
        **drafting: Any,
    ):
        check_type("target", target, DecodingTarget, "a loaded fledge.Target (fledge.load makes an engine of a path)")
        check_type("draft", draft, Draft | None, "a loaded draft (fledge.load makes an engine of paths)")
        check_type("template_kwargs", template_kwargs, dict | None, "a dict")
        self.drafting = Drafting(**drafting)
        self.target, self.draft = target, draft
        if draft is not None:
            self.drafting = self.drafting.for_draft(draft.config)
            self.layers = connect_draft(draft, target)
            target.check_rollback()
            if self.drafting.tree:
                target.check_masks()
            template_kwargs = {**draft.config.provenance.template_kwargs, **(template_kwargs or {})}
        self._acceptance = Acceptance()
        self.template = ChatTemplate(target.tokenizer, target.stop_ids, template_kwargs)

    def generate(self, prompt: Prompt | Sequence[Prompt], **options: Any) -> Completion | list[Completion]:
        """Decodes to the end of the turn: one prompt with the options of `stream`, or a list of prompts with those of
        `generate_all`, whose answers it returns as a list.

        A list of integers is one prompt's token ids, and a list of messages one chat.
        """
        if is_several(prompt):
            return self.generate_all(prompt, **options)
        options.pop("batch", None)  # at most so many together, which one prompt always is
        completion = options.pop("into", None) or Completion()
        for _ in self.stream(prompt, into=completion, **options):
            pass
        return completion

    def generate_all(
        self,
        prompts: Sequence[Prompt],
        *,
        batch: int | None = None,
        max_new_tokens: int | None = None,
        sampling: Sampling | None = None,
        stop: str | Sequence[str] = (),
        speculate: bool = True,
        request: int | Sequence[int] = 0,
        answered: Callable[[int], None] = lambda place: None,
        **sampling_options: Any,
    ) -> list[Completion]:
        """Decodes many prompts, at most `batch` together (None: 16, or one by one where the target keeps requests apart
        no other way); where one ends, the next takes its place. Each answer is what the prompt alone would get, as
        request number `request`, + 1, + 2 .. (or those given), with logits processors of its own, copies of those
        given, since they may remember what they saw. `answered` is told of each prompt's place when its answer is over.
        Other options are those of `stream`. Raises TypeError and ValueError, before any is decoded, for what is no list
        of prompts, or where one is empty or does not fit."""
        sampling, prompts = _sampling(sampling, sampling_options), check_prompts(prompts)
        check_type("batch", batch, Integral | None, "an integer")
        if batch is not None and batch < 1:
            raise ValueError(f"a batch of {batch} decodes nothing; 1 is least")
        if batch != 1 and (refusal := self._refusal):
            if batch:
                raise ValueError(refusal)
            batch = 1
        numbers = range(request, request + len(prompts)) if isinstance(request, int) else request
        requests = []
        for number, prompt in zip(numbers, prompts, strict=True):
            own = replace(sampling, processors=copy.deepcopy(sampling.processors))
            requests.append(self._request(prompt, number, max_new_tokens=max_new_tokens, sampling=own, stop=stop))
        places = {asked: place for place, asked in enumerate(requests)}
        for asked in self._decode(requests, batch or BATCH, speculate):
            asked.hand_out()
            if asked.over:
                answered(places[asked])
        for asked in requests:
            asked.close()
        self._watch(requests)
        return [asked.done for asked in requests]

    @functools.cached_property
    def _refusal(self) -> str:
        """Why the target does not decode several requests together; empty where it does."""
        try:
            self.target.check_masks(requests=2)
        except ValueError as e:
            return str(e)
        return ""

    def stream(
        self,
        prompt: Prompt,
        *,
        max_new_tokens: int | None = None,
        sampling: Sampling | None = None,
        stop: str | Sequence[str] = (),
        speculate: bool = True,
        request: int = 0,
        into: Completion | None = None,
        **sampling_options: Any,
    ) -> Iterator[str]:
        """Yields text as it is committed, for a raw string, chat messages, or token ids.

        `max_new_tokens` None is 256, or as many as the target still reads after the prompt where that is less.
        `sampling` says how tokens are chosen, or `sampling_options`, which are the fields of `Sampling`:
        `temperature=0.7, top_p=0.9`. `stop` are strings that end the text before themselves. `request` numbers requests
        that share a seed. `speculate` False decodes token by token, the baseline. `into` receives tokens, text and
        trace. Raises, when it is called, TypeError for what is no prompt or no option, and ValueError for a prompt that
        is empty or does not fit the target's context.
        """
        asked = self._request(
            prompt, request, max_new_tokens=max_new_tokens, sampling=_sampling(sampling, sampling_options), stop=stop,
            into=into,
        )  # fmt: skip
        return self._pieces(asked, speculate)

    def _pieces(self, asked: Request, speculate: bool) -> Iterator[str]:
        for _ in self._decode([asked], 1, speculate):
            if piece := asked.hand_out():
                yield piece
        rest = asked.close()
        self._watch([asked])
        if rest:
            yield rest

    def _watch(self, requests: Sequence[Request]) -> None:
        """Warns of a draft whose words are accepted no more often than by chance."""
        if self.draft is not None and requests:
            traces, sampling = [r.done.trace for r in requests], requests[0].sampler.sampling
            self._acceptance.add(traces, sampling, self.draft.config, self.target.name)

    def _request(
        self, prompt: Prompt, number: int, *, max_new_tokens: int | None, sampling: Sampling, stop: str | Sequence[str],
        into: Completion | None = None,
    ) -> Request:  # fmt: skip
        prompt, stop = check_prompt(prompt), (stop,) if isinstance(stop, str) else stop
        check_type("stop", stop, Sequence, "a string or a list of strings")
        for string in stop:
            check_type("stop", string, str, "a string or a list of strings")
        check_type("max_new_tokens", max_new_tokens, Integral | None, "an integer")
        ids = isinstance(prompt, list) and isinstance(prompt[0], int)
        prefix = list(prompt if ids else self.template.prompt_ids(prompt))
        if max_new_tokens is None:
            max_new_tokens = max(1, min(NEW_TOKENS, self._positions - len(prefix)))
        self.check_length(len(prefix), max_new_tokens)
        vocabulary = self.target.embedding.shape[0]
        if not 0 <= min(prefix) <= max(prefix) < vocabulary:
            raise ValueError(f"the prompt has token ids outside 0..{vocabulary - 1}, the target's vocabulary")
        return Request(
            number, prefix, TargetSampler(sampling, number), TextStream(self.target.tokenizer, stop),
            max_new_tokens, self.target.stop_ids, into if into is not None else Completion(),
        )  # fmt: skip

    def check_length(self, prompt: int, new: int) -> None:
        """Raises ValueError where so many tokens and so many new ones are not what the target reads."""
        limit = self.target.context
        if prompt == 0:
            raise ValueError("the prompt is empty")
        if new < 1:
            raise ValueError(f"max_new_tokens is {new}; ask for at least one")
        if prompt + new > limit:
            fewer = f", or ask for at most {limit - prompt} new tokens" if prompt < limit else ""
            raise ValueError(
                f"the prompt has {prompt} tokens and {new} are to be generated, but {self.target.name or 'the target'} "
                f"reads at most {limit}; shorten the prompt{fewer}"
            )

    @property
    def _positions(self) -> int:
        """Most tokens of a request: the target's context, less the drafts that go beyond a text where its positions
        are a table."""
        beyond = self.drafting.depth if self.draft is not None and not self.target.rotary else 0
        return self.target.context - beyond

    def _decode(self, requests: Sequence[Request], batch: int, speculate: bool) -> Iterator[Request]:
        """Yields a request whenever something was committed to it, until it is over: its reader has it `say` that."""
        if not requests:
            return
        drafts = speculate and self.draft is not None
        sampling = requests[0].sampler.sampling
        most = max(len(r.prefix) + r.limit for r in requests)
        if drafts and most > self._positions:
            raise ValueError(
                f"{self.target.name or 'the target'} has {self.target.context} positions, but the prompt, the new "
                f"tokens and a draft of {self.drafting.depth} need {most + self.drafting.depth}; ask for fewer new "
                "tokens, or draft fewer"
            )

        def new_batch() -> Batch:
            if not drafts:
                return Batch(self.target, NoDrafter(), None)
            return Batch(self.target, self.drafting.proposer(self.draft, sampling), self.layers)

        together, waiting = Lanes(new_batch), deque(requests)
        while waiting or together.running:
            free = min(batch - together.running, len(waiting))
            yield from together.enter([waiting.popleft() for _ in range(free)])
            yield from together.round()


def _sampling(given: Sampling | None, options: dict[str, Any]) -> Sampling:
    """How tokens are chosen, from a `Sampling` or from its fields as keywords."""
    known = [*inspect.signature(Engine.generate_all).parameters][2:-1] + [f.name for f in fields(Sampling)]
    if unknown := [name for name in options if name not in known]:
        raise TypeError(f"{unknown[0]} is no option of decoding; there are {', '.join(known)}")
    check_type("sampling", given, Sampling | None, "a fledge.Sampling")
    if given is not None and options:
        raise ValueError(f"give sampling=Sampling(..) or {' and '.join(options)}, not both")
    return given or Sampling(**options)


def load(
    target: str | Path | PreTrainedModel | DecodingTarget,
    draft: str | Path | None = None,
    *,
    tokenizer: PreTrainedTokenizerBase | None = None,
    device: str = "auto",
    draft_device: str | None = None,
    dtype: torch.dtype | None = None,
    template_kwargs: dict[str, Any] | None = None,
    trust_remote_code: bool = False,
    **drafting: Any,
) -> Engine:
    """Loads a target and a draft for it, each from a directory or by a hub id, which may end in a revision
    (owner/name@revision).

    Code that comes with the target's files runs only with `trust_remote_code`; a draft has none. The target may be
    loaded already: a `Target`, or a transformers model, which is used in place, frozen. Its tokenizer is then
    `tokenizer`, or None to load the one that lies where the model came from. `device` "auto" is the GPU where there is
    one; `draft_device` None is the target's. `dtype` None is float32 on the CPU and the checkpoint's own elsewhere.
    `drafting` are `Engine`'s options. Raises ValueError with the cause where something is missing, damaged, or does not
    fit, and TypeError for arguments of another kind.
    """
    check_type("draft", draft, str | Path | None, "the directory of a draft")
    draft_device = resolve_device(draft_device) if draft_device else None  # before a target is loaded
    config = read_draft_config(draft) if draft else None
    longrope = config is not None and config.rope.rope_type == "longrope"
    most = config.provenance.max_length if longrope else None
    if isinstance(target, str | Path):
        if tokenizer is not None:
            raise ValueError("tokenizer= goes with a loaded model; a target's directory has its own")
        loaded = load_target(
            target, device=resolve_device(device), dtype=dtype, max_length=most, trust_remote_code=trust_remote_code
        )
    elif isinstance(target, PreTrainedModel):
        if device != "auto" or dtype is not None:
            raise ValueError("this model is loaded already: move it with model.to(..), and leave device and dtype out")
        loaded = target_of(target, tokenizer, max_length=most)
    else:
        check_type("target", target, DecodingTarget, "a directory, a hub id, a transformers model or a fledge.Target")
        loaded = target
    if config is None:
        return Engine(loaded, template_kwargs=template_kwargs, **drafting)
    made = load_draft(draft, device=draft_device or loaded.device, dtype=loaded.dtype)
    return Engine(loaded, made, template_kwargs=template_kwargs, **drafting)


def resolve_device(device: str) -> str:
    """ "auto" to what this machine has. Raises ValueError for a device that is no CPU or CUDA GPU, or is not there."""
    if device == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    try:
        named = torch.device(device)
    except RuntimeError as e:
        raise ValueError(f"{device!r} is no device; use auto, cpu, cuda, cuda:1, ..") from e
    if named.type not in ("cpu", "cuda"):
        raise ValueError(f"fledge runs on CPUs and CUDA GPUs, not on {device}; use auto, cpu, cuda, cuda:1, ..")
    there = torch.cuda.device_count()
    if named.type == "cuda" and (named.index or 0) >= there:
        shows = f"{there} of them, from cuda:0 on" if there else "no CUDA device; use cpu"
        raise ValueError(f"device {device}: this machine shows {shows}")
    return device
