"""The engine: speculative decoding of one or many requests."""

from __future__ import annotations

import atexit
import copy
import functools
import inspect
import itertools
import threading
import warnings
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import closing, suppress
from dataclasses import fields, replace
from numbers import Integral
from typing import TYPE_CHECKING, Any, cast, overload
from weakref import WeakKeyDictionary, WeakSet

from fledge.decode.batch import Batch
from fledge.decode.draft_size import ChanceWatch
from fledge.decode.drafting import Drafting
from fledge.decode.propose import NoDrafter
from fledge.decode.request import Completion, PromptLike, Request, check_prompt, check_prompts, is_several
from fledge.decode.rounds import EagerWarning, can_capture
from fledge.decode.scheduler import Counter, DecodeLoop, Prepared, no_count, prepare
from fledge.decode.text import TextStream
from fledge.drafts.draft import Draft
from fledge.ops.device import has_kernels
from fledge.targets.compatibility import connect_draft
from fledge.targets.interface import DecodingTarget
from fledge.types import Prompt, Sampling, check_type

if TYPE_CHECKING:
    from fledge.decode.load import PromptReader

BATCH = 16  # default number of requests decoded together
NEW_TOKENS = 256  # default maximum of new tokens per request
# of each target, or of the transformers model that several targets share: see `Engine._decode`
_LOCKS: WeakKeyDictionary[Any, threading.RLock] = WeakKeyDictionary()
_STREAMS: WeakSet[Generator[str, None, None]] = WeakSet()  # streams that may be open: see `_close_streams`


class Engine:
    """A target, and optionally a draft that speeds up decoding without changing the output distribution.

    `fledge.load` makes an engine. `reader` reads text and chats as prompts. `drafting` are fields of
    `fledge.decode.drafting.Drafting`, for example `mode="tree", depth=6`. If the draft's tokens
    are accepted no more often than by chance, a `ChanceWarning` is issued once, and if a chat is rendered in a mode in
    which the draft was not trained, a `ModeWarning`. Where options keep a GPU from running rounds as CUDA graphs, an
    `EagerWarning` is issued once. Several threads may use an engine, or engines of one target: their rounds take turns.
    Raises ValueError if draft and target do not belong together, if the target does not support what verification
    needs, or if options contradict each other; raises TypeError for arguments of a wrong type.
    """

    def __init__(
        self,
        target: DecodingTarget,
        draft: Draft | None = None,
        *,
        reader: PromptReader,
        **drafting: Any,
    ):
        self.drafting = Drafting.from_options(drafting, has_draft=draft is not None)
        self.target, self.draft, self.reader = target, draft, reader
        self._lock = _LOCKS.setdefault(target.shared, threading.RLock())
        if draft is not None:
            self.drafting = self.drafting.for_draft(draft.config)
            with self._lock:  # these run the target
                self.layers = connect_draft(draft, target)
                target.check_rollback()
                if self.drafting.tree:
                    target.check_masks()
        self.chooser = self.drafting.chooser() if draft is not None else None
        self._acceptance, self._warned_of_eager = ChanceWatch(), False
        self.places = BATCH  # the most requests of `add` that are decoded together
        self._added: DecodeLoop | None = None  # the requests of `add`
        self._numbers = itertools.count()
        self._idle_batches: dict[bool, list[Batch]] = {False: [], True: []}  # with and without a draft, with graphs

    def __repr__(self) -> str:
        draft = "none" if self.draft is None else f"{self.draft.family.title}, {self.drafting.mode}"
        return f"<Engine of {self.target!r}, draft: {draft}>"

    @overload
    def generate(self, prompt: PromptLike, **options: Any) -> Completion: ...

    @overload  # a string is a sequence of strings too, and is one prompt: the first signature counts
    def generate(self, prompt: Sequence[PromptLike], **options: Any) -> list[Completion]: ...

    def generate(self, prompt: PromptLike | Sequence[PromptLike], **options: Any) -> Completion | list[Completion]:
        """Decodes one prompt, with the options of `stream`, or a list of prompts, with those of `generate_all`.

        Returns a completion, or a list of completions. A list of integers is one prompt, its token ids, and a list of
        messages is one prompt, a chat.
        """
        if is_several(prompt):
            return self.generate_all(cast(Sequence[PromptLike], prompt), **options)
        _check_batch(options.pop("batch", None))  # has no effect on one prompt
        completion: Completion = options.pop("into", None) or Completion()
        for _ in self.stream(cast(PromptLike, prompt), into=completion, **options):
            pass
        return completion

    def generate_all(
        self,
        prompts: Sequence[PromptLike],
        *,
        batch: int | None = None,
        max_new_tokens: int | None = None,
        sampling: Sampling | Sequence[Sampling] | None = None,
        stop: str | Sequence[str] = (),
        speculate: bool = True,
        request: int | Sequence[int] = 0,
        answered: Callable[[int], None] = lambda index: None,
        **sampling_options: Any,
    ) -> list[Completion]:
        """Decodes many prompts, at most `batch` of them together, and returns their completions.

        When a request ends, the next one starts. Each completion equals the completion of the prompt alone. `batch`
        None is 16, or 1 if the target cannot decode several requests together. `sampling` may also be a list with one
        `Sampling` for each prompt, all with the same `draft`. `request` is the first request's number (the following
        ones count up), or a list of the requests' numbers. Each request gets copies of the logits processors, which may
        have state. `answered` is called with a prompt's index when the answer is complete. All other options are as in
        `stream`. Raises TypeError or ValueError, before decoding, if `prompts` is not a list of prompts, if a prompt is
        empty or exceeds the target's context, if a list of options has not as many entries as prompts, or if `batch`
        is above 1 and the target does not support batches.
        """
        prompts = check_prompts(prompts)
        samplings = _samplings(sampling, sampling_options, prompts)
        _check_batch(batch)
        if batch != 1 and (problem := self._batching_problem):
            if batch:
                raise ValueError(problem)
            batch = 1
        check_type("request", request, Integral | Sequence, "an integer, or a list of them")
        if isinstance(request, Integral):
            request = range(int(request), int(request) + len(prompts))
        numbers = cast(Sequence[int], request)
        _check_length("request", numbers, prompts, "the first prompt's number, or a list with one for each")
        requests, drafts = [], self._drafts(speculate)
        for number, prompt, own in zip(numbers, prompts, samplings, strict=True):
            copied = replace(own, processors=copy.deepcopy(own.processors))
            requests.append(self._request(prompt, number, drafts, max_new_tokens, copied, stop))
        indices = {r: index for index, r in enumerate(requests)}
        with closing(self._decode(requests, batch or BATCH)) as decoding:
            for complete in (r for updated in decoding for r in updated if r.over):
                complete.close()
                answered(indices[complete])
        self._warn_at_chance(requests)
        return [r.done for r in requests]

    def prepare(
        self,
        batch: int = 1,
        *,
        tokens: int | None = None,
        sampling: Sampling | None = None,
        speculate: bool = True,
        count: Counter = no_count,
        **sampling_options: Any,
    ) -> Prepared:
        """Captures the rounds of up to `batch` requests as CUDA graphs, now instead of at the first request. Returns
        the time and memory taken.

        Afterwards, requests with the same options come and go without capturing, while each has at most `tokens`
        tokens, prompt and answer together (None: 2,048, or the target's context); room for the tokens is reserved. The
        sampling parameters, `speculate` and the errors are those of `generate_all`. `count` is as in
        `fledge.decode.scheduler`. Does nothing where rounds are not captured (on a CPU, with a target that transformers
        computes, with logits processors).
        """
        _check_batch(batch)
        check_type("tokens", tokens, Integral | None, "an integer")
        sampling = _sampling(sampling, sampling_options, Engine.prepare)
        with self._lock:
            return prepare([(self, speculate)], batch, tokens=tokens, sampling=sampling, count=count)

    @functools.cached_property
    def _batching_problem(self) -> str:
        """The reason why the target cannot decode several requests together; empty if it can."""
        try:
            with self._lock:
                self.target.check_masks(requests=2)
        except ValueError as e:
            return str(e)
        return ""

    def stream(
        self,
        prompt: PromptLike,
        *,
        max_new_tokens: int | None = None,
        sampling: Sampling | None = None,
        stop: str | Sequence[str] = (),
        speculate: bool = True,
        request: int = 0,
        into: Completion | None = None,
        **sampling_options: Any,
    ) -> Iterator[str]:
        """Yields the generated text in pieces. The prompt is a string, a list of chat messages, or a list of token ids.

        `max_new_tokens` None is 256, or less if the target's context ends before. The sampling parameters are a
        `Sampling`, or its fields as keywords: `temperature=0.7, top_p=0.9`. `stop` is a string or several; the text
        ends before the first of them. `request` is the request's number: requests with the same seed and different
        numbers have different random streams. `speculate` False decodes without the draft, one token per pass. `into`
        receives tokens, text and trace, also of a stream that is closed early. Raises, when called, TypeError for an
        invalid prompt or option, and ValueError if the prompt is empty or exceeds the target's context.
        """
        drafts = self._drafts(speculate)
        own = _sampling(sampling, sampling_options, Engine.stream)
        stream = self._text_pieces(self._request(prompt, request, drafts, max_new_tokens, own, stop, into))
        _STREAMS.add(stream)
        return stream

    def _text_pieces(self, request: Request) -> Generator[str, None, None]:
        try:
            # closed at once, not by a later garbage collection, so that the request's memory is free
            with closing(self._decode([request], 1)) as decoding:
                for _ in decoding:
                    if piece := request.text.take():
                        yield piece
        finally:
            rest = request.close()  # also of a stream that is closed early: `into` has the text of its tokens
        if rest:
            yield rest
        self._warn_at_chance([request])

    def _warn_at_chance(self, requests: Sequence[Request]) -> None:
        """Issues a `ChanceWarning` if the draft's tokens are accepted no more often than by chance."""
        if self.draft is not None and requests:
            traces, samplings = [r.done.trace for r in requests], [r.sampling for r in requests]
            self._acceptance.add(traces, samplings, self.draft.config, self.target.name)

    def _drafts(self, speculate: bool) -> bool:
        """Whether requests are decoded with the draft. Raises TypeError unless `speculate` is a bool."""
        check_type("speculate", speculate, bool, "True or False")
        return speculate and self.draft is not None

    def _request(
        self, asked: PromptLike, number: int, drafts: bool, max_new_tokens: int | None, sampling: Sampling,
        stop: str | Sequence[str], into: Completion | None = None,
    ) -> Request:  # fmt: skip
        """A request that is decoded with the draft, or without it. Raises TypeError and ValueError like `stream`."""
        given, stop = check_prompt(asked), (stop,) if isinstance(stop, str) else stop
        check_type("stop", stop, Sequence, "a string or a list of strings")
        for string in stop:
            check_type("stop", string, str, "a string or a list of strings")
            if not string:
                raise ValueError("a stop string is empty; leave it out")
        check_type("request", number, Integral, "an integer")
        check_type("into", into, Completion | None, "a fledge.Completion")
        if into is not None and (into.tokens or into.finish):
            raise ValueError("into has an answer already; give a new fledge.Completion")
        if drafts:
            self.drafting.check_sampling(sampling)
        check_type("max_new_tokens", max_new_tokens, Integral | None, "an integer")
        prompt = given if isinstance(given, Prompt) else self.reader.read(given)
        if max_new_tokens is None:
            max_new_tokens = max(1, min(NEW_TOKENS, self._max_length - len(prompt)))
        self.check_length(len(prompt), max_new_tokens, drafts)
        vocabulary = self.target.embedding.shape[0]
        if not 0 <= min(prompt.ids) <= max(prompt.ids) < vocabulary:
            raise ValueError(f"the prompt has token ids outside 0..{vocabulary - 1}, the target's vocabulary")
        return Request(
            int(number), prompt, sampling, TextStream(self.target.tokenizer, stop), max_new_tokens,
            self.target.stop_ids, into if into is not None else Completion(), drafts,
        )  # fmt: skip

    def check_length(self, prompt: int, new: int, drafts: bool) -> None:
        """Raises ValueError unless `prompt` and `new`, the numbers of tokens of a prompt and its answer, are positive
        and fit the target's context together. With `drafts`, the limit is `_max_length`."""
        context = self.target.context
        limit = self._max_length if drafts else context
        if prompt == 0:
            raise ValueError("the prompt is empty")
        if new < 1:
            raise ValueError(f"max_new_tokens is {new}; it must be at least 1")
        if prompt + new > limit:
            kept, cures = "", ["shorten the prompt"]
            if prompt < limit:
                cures.append(f"generate at most {limit - prompt} new tokens")
            if limit < context:
                kept = f", the last {context - limit} of which are for drafted tokens"
                cures.append("use a smaller depth")
            raise ValueError(
                f"the prompt has {prompt} tokens and {new} are to be generated, but {self.target.name or 'the target'} "
                f"has a context of {context} tokens{kept}; {', or '.join(cures)}"
            )

    @property
    def _max_length(self) -> int:
        """The maximum tokens of a request: the target's context, minus the draft's depth if the target has a table of
        positions, since drafted tokens after the last position have no embedding."""
        reserved = self.drafting.deepest if self.draft is not None and not self.target.rotary else 0
        return self.target.context - reserved

    def add(
        self,
        prompt: PromptLike,
        *,
        max_new_tokens: int | None = None,
        sampling: Sampling | None = None,
        stop: str | Sequence[str] = (),
        speculate: bool = True,
        request: int | None = None,
        **sampling_options: Any,
    ) -> Request:
        """Adds a request, at any time and from any thread, which `step` decodes together with all others.

        The options are those of `stream`; `request` None is a number that no request of `add` had before. The answer
        equals the answer of the prompt alone. The answer's tokens are in `done`, and `take` returns text in pieces.
        Raises TypeError and ValueError like `stream`.
        """
        own, drafts = _sampling(sampling, sampling_options, Engine.add), self._drafts(speculate)
        number = next(self._numbers) if request is None else request
        added = self._request(prompt, number, drafts, max_new_tokens, own, stop)
        with self._lock:
            if self._added is None:
                self._added = DecodeLoop(self, 1 if self._batching_problem else self.places)
            self._warn_if_eager([added])
            self._added.waiting.append(added)
        return added

    def step(self) -> list[Request]:
        """Runs one prefill or one round of the requests of `add`. Returns the requests that got tokens; an empty list
        without requests. An exception ends all requests of `add`."""
        with self._lock:
            if self._added is None:
                return []
            try:
                updated = self._added.step()
            except BaseException:
                self._added.close()
                self._added = None
                raise
        if complete := [r for r in updated if r.over]:
            self._warn_at_chance(complete)
        return updated

    def abort(self, request: Request) -> None:
        """Ends a request of `add`, at any time and from any thread, and frees its memory."""
        with self._lock:
            if self._added is not None:
                self._added.abort(request)

    def _decode(self, requests: Sequence[Request], batch: int) -> Generator[list[Request], None, None]:
        """Decodes requests, at most `batch` together, until they are complete. Yields the requests that got
        tokens. During a step, no other thread uses the target, its caches or the draft."""
        self._warn_if_eager(requests)
        schedule = DecodeLoop(self, batch)
        schedule.waiting.extend(requests)
        try:
            while True:
                with self._lock:
                    updated = schedule.step()
                if not updated:
                    return
                yield updated
        finally:  # also if the consumer stops early
            with self._lock:
                schedule.close()

    def _warn_if_eager(self, requests: Sequence[Request]) -> None:
        """Issues an `EagerWarning`, once, if rounds cannot be captured because of something other than the target."""
        if self._warned_of_eager or not can_capture(self.target, NoDrafter()):
            return
        reason, draft = "", self.draft if any(r.drafts for r in requests) else None
        if any(r.sampling.processors for r in requests):
            reason = "logits processors run on the host"
        elif draft is not None and self.drafting.mode == "chain" and self.drafting.confidence:
            reason = "with a confidence, the host decides after each drafted token whether to draft another"
        elif draft is not None and not has_kernels(draft.device, draft.dtype):
            reason = f"the draft is in {str(draft.dtype).removeprefix('torch.')} on {draft.device}"
        if reason:
            self._warned_of_eager = True
            message = f"rounds are not captured as CUDA graphs and take several times as long, since {reason}"
            warnings.warn(message, EagerWarning, stacklevel=4)

    def take_batch(self, drafts: bool) -> Batch:
        """A batch without requests, with or without the draft."""
        self.target.prepare_decoding()
        if self.draft is not None:  # the draft may have been moved, or used with another target
            self.draft.share_target_weights(self.target.embedding, self.target.head_weight)
        now = self._weights_at()
        while idle := self._idle_batches[drafts]:
            if (kept := idle.pop()).weights_at == now:
                return kept
        if not drafts or self.draft is None:
            batch = Batch(self.target, NoDrafter(), None)
        else:
            batch = Batch(self.target, self.drafting.proposer(self.draft), self.layers)
        batch.weights_at = now
        return batch

    def _weights_at(self) -> tuple[Any, ...]:
        """A fingerprint of where the weights of target and draft are in memory. The graphs of a kept batch read weights
        by address, so a batch can be used again only while the fingerprint is the same as when the batch was made."""
        draft = self.draft
        if draft is None:
            return (self.target.moves,)
        # the head's address too, since a small first parameter may get the address that it had before
        return self.target.moves, next(draft.parameters()).data_ptr(), draft.head.data_ptr(), draft.device, draft.dtype

    def put_back(self, batch: Batch) -> None:
        """Removes a batch's requests, complete or not. A batch with graphs is kept for later requests."""
        batch.close()
        if batch.captures:
            self._idle_batches[batch.proposer.draft is not None].append(batch)


@atexit.register
def _close_streams() -> None:
    """Closes the streams that are open when the program ends. Python would close open streams later, when torch no
    longer works."""
    for stream in list(_STREAMS):
        with suppress(ValueError):  # another thread is running it
            stream.close()


def _sampling(given: Sampling | None, options: dict[str, Any], method: Callable[..., Any]) -> Sampling:
    """The sampling parameters, given as a `Sampling` or as its fields. Raises TypeError for options that the method
    does not have, and ValueError if both are given."""
    own = [p.name for p in inspect.signature(method).parameters.values() if p.kind == p.KEYWORD_ONLY]
    known = own + [f.name for f in fields(Sampling)]
    if unknown := [name for name in options if name not in known]:
        raise TypeError(f"{unknown[0]} is not an option of decoding; the options are {', '.join(known)}")
    check_type("sampling", given, Sampling | None, "a fledge.Sampling")
    if given is not None and options:
        raise ValueError(f"give sampling=Sampling(..) or {' and '.join(options)}, not both")
    return given or Sampling(**options)


def _samplings(
    given: Sampling | Sequence[Sampling] | None, options: dict[str, Any], prompts: Sequence[Any]
) -> list[Sampling]:  # fmt: skip
    """The sampling parameters of each prompt, given for all or as a list. Raises TypeError and ValueError like
    `_sampling`, and ValueError if a list has not as many entries as prompts, or if entries differ in `draft`."""
    if not isinstance(given, list | tuple):
        return [_sampling(cast(Sampling | None, given), options, Engine.generate_all)] * len(prompts)
    _check_length("sampling", given, prompts, "one for all prompts, or a list with one for each")
    for one in given:
        check_type("sampling", one, Sampling, "a fledge.Sampling, or a list of them")
    samplings = [_sampling(one, options, Engine.generate_all) for one in given]
    if len({s.draft for s in samplings}) > 1:
        raise ValueError(
            "requests that are decoded together choose their drafted tokens by one rule, but some have draft='greedy' "
            "and some draft='sample'; use one of them for all, or decode them in separate calls"
        )
    return samplings


def _check_length(name: str, values: Sequence[Any], prompts: Sequence[Any], use: str) -> None:
    """Raises ValueError unless `values` has an entry for each prompt."""
    if len(values) != len(prompts):
        raise ValueError(f"{name} has {len(values)} values for {len(prompts)} prompts; give {use}")


def _check_batch(batch: int | None) -> None:
    """Raises TypeError or ValueError unless `batch` is None or a positive integer."""
    check_type("batch", batch, Integral | None, "an integer")
    if batch is not None and batch < 1:
        raise ValueError(f"batch is {batch}; it must be at least 1")
