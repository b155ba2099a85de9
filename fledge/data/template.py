"""Chat templates: rendering conversations and tokenizing prompts; and the modes of a template in which a draft was
trained, such as thinking and not thinking."""

from __future__ import annotations

import copy
import difflib
import functools
import json
import re
import signal
import threading
import warnings
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import takewhile
from typing import TYPE_CHECKING, Any

from fledge.data.messages import RenderedFields, ask_template, check_messages, check_text, prepared
from fledge.io.fields import check_template_kwargs

if TYPE_CHECKING:
    from fledge.config import Provenance

RENDER_SECONDS = 10.0  # limit of CPU time for one rendering; the longest chats take a few hundredths of a second
MOST_KNOWN = 64  # sets of arguments whose fields are remembered


class TemplateWarning(UserWarning):
    """A chat template does not read a variable that was given for it, or a prompt has a special token twice."""


class EndlessTemplate(ValueError):
    """A chat template was stopped after RENDER_SECONDS of CPU time. No further record is rendered with the template."""


class ComputeTimeout(Exception):
    """Raised by `limit_compute_time` inside a block that has used up its CPU time."""


class ChatTemplate:
    """The chat template of a tokenizer, with fixed keyword arguments such as enable_thinking=False.

    `stop_ids` are the token ids that end a turn. A `TemplateWarning` names arguments that the template does not read.
    Raises ValueError for arguments that `check_template_kwargs` refuses, and for a tokenizer without character offsets
    (not a "fast" one).
    """

    def __init__(self, tokenizer: Any, stop_ids: Collection[int], kwargs: dict[str, Any] | None = None):
        self.tokenizer, self.stop_ids = tokenizer, frozenset(stop_ids)
        self.kwargs = dict(check_template_kwargs(kwargs or {}, "the template's arguments"))
        self._known_fields: dict[str, RenderedFields] = {}  # by the arguments, as JSON; shared with `with_exactly`
        if not getattr(tokenizer, "is_fast", False):
            raise ValueError(f"{type(tokenizer).__name__} provides no character offsets; fledge needs a fast tokenizer")
        if problem := _unread(tokenizer.chat_template, self.kwargs):
            warnings.warn(problem, TemplateWarning, stacklevel=1)  # a constant location: Python shows the warning once

    def with_exactly(self, kwargs: dict[str, Any]) -> ChatTemplate:
        """The same template with other arguments; arguments that the template does not read cause no warning."""
        other = copy.copy(self)
        other.kwargs = dict(check_template_kwargs(kwargs, "the template's arguments"))
        return other

    def of(self, kwargs: dict[str, Any] | None) -> ChatTemplate:
        """The template for a record or prompt with the arguments `kwargs`, which take precedence over `self.kwargs`."""
        return self.with_exactly({**self.kwargs, **kwargs}) if kwargs else self

    @property
    def fields(self) -> RenderedFields:
        """Whether the template renders tools, tool calls and reasoning, and the form that the template expects."""
        return self._fields("chat")

    def _fields(self, where: str) -> RenderedFields:
        """`fields`. Raises EndlessTemplate, naming `where`."""
        key = json.dumps(self.kwargs, sort_keys=True)
        if key not in self._known_fields:
            if len(self._known_fields) == MOST_KNOWN:  # each row of some data has arguments of its own
                self._known_fields.clear()
            self._known_fields[key] = ask_template(lambda messages, tools: self._unless_refused(messages, tools, where))
        return self._known_fields[key]

    def _unless_refused(self, messages: list[dict[str, Any]], tools: list[Any] | None, where: str) -> str | None:
        """Rendered messages; None if the template refuses the messages. Raises EndlessTemplate, since the next chat
        would take as long."""
        try:
            return self._apply(messages, False, tools, where)
        except EndlessTemplate:
            raise
        except ValueError:
            return None

    def render(
        self, messages: Sequence[dict[str, Any]], *, prompt: bool, tools: list[Any] | None = None, where: str = "chat"
    ) -> str:
        """Renders the messages to text; with `prompt`, followed by the generation prompt of the assistant's turn. Tool
        calls and reasoning are passed on in the form that the template expects.

        Raises ValueError, naming `where`, if the tokenizer has no template or the template raises an exception, and
        EndlessTemplate if rendering uses more than RENDER_SECONDS of CPU time.
        """
        return self._apply(prepared(messages, self._fields(where)), prompt, tools, where)

    def _apply(self, messages: list[dict[str, Any]], prompt: bool, tools: list[Any] | None, where: str) -> str:
        """Renders messages as they are. Raises ValueError like `render`."""
        if self.tokenizer.chat_template is None:
            raise ValueError(
                f"{where} is a conversation, but the tokenizer has no chat template; use an instruction-tuned target, "
                "or data with plain `text`"
            )
        try:
            with limit_compute_time(RENDER_SECONDS):
                return self.tokenizer.apply_chat_template(
                    messages, tokenize=False, add_generation_prompt=prompt, tools=tools, **self.kwargs
                )
        except ComputeTimeout as e:
            raise EndlessTemplate(
                f"{where}: the tokenizer's chat template does not terminate: it was stopped after {RENDER_SECONDS:g} s "
                f"of CPU time; fix it, or use a tokenizer with another template"
            ) from e
        except Exception as e:  # templates raise jinja errors, and any exception type on unexpected contents
            roles = " ".join(m.get("role", "?") for m in messages)
            reason = str(e) or type(e).__name__
            raise ValueError(f"{where}: the chat template refuses this conversation ({roles}): {reason}") from e

    def prompt_ids(
        self, prompt: str | Sequence[dict[str, Any]], *, tools: list[Any] | None = None, where: str = "chat"
    ) -> list[int]:
        """The token ids of a text prompt, or of messages rendered with the assistant's generation prompt.

        Raises ValueError, naming `where`, for messages whose contents are not text (see `check_messages`), and for
        conversations that the template refuses.
        """
        if isinstance(prompt, str):
            coded, doubled = self.plain(check_text(prompt, where))
            if doubled:
                shown = self.tokenizer.decode(doubled)
                message = f"a prompt writes out {shown}, which the tokenizer adds too; one of the two is dropped"
                warnings.warn(message, TemplateWarning, stacklevel=1)
            return coded["input_ids"]
        return self.rendered_ids(self.prompt_text(prompt, tools=tools, where=where))

    def prompt_text(
        self, messages: Sequence[dict[str, Any]], *, tools: list[Any] | None = None, where: str = "chat"
    ) -> str:
        """Messages rendered with the assistant's generation prompt. Raises ValueError like `prompt_ids`."""
        return self.render(check_messages(messages, where), prompt=True, tools=tools, where=where)

    def rendered_ids(self, text: str) -> list[int]:
        """The token ids of a rendered text, whose special tokens are written out."""
        return self.tokenizer(text, add_special_tokens=False)["input_ids"]

    def decode(self, ids: Sequence[int]) -> str:
        """The text of token ids, with the special tokens written out."""
        return self.tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)

    def plain(self, text: str, **options: Any) -> tuple[dict[str, list[Any]], list[int]]:
        """The fields of a tokenized plain text, and the tokens left out: a special token that the text writes out and
        the tokenizer adds too, such as BOS, is kept once. `options` are arguments of the tokenizer."""
        # verbose=False: no warning for texts longer than the model's context, which are split into windows
        coded, doubled = self.tokenizer(text, verbose=False, **options), []
        (before, after), ids = self.added, coded["input_ids"]
        first, end = 0, len(ids)
        if before and ids[len(before) : 2 * len(before)] == before:
            first, doubled = len(before), before
        if after and ids[first : -len(after)][-len(after) :] == after:
            end, doubled = end - len(after), doubled + after
        return {name: values[first:end] for name, values in coded.items()}, doubled

    @functools.cached_property
    def added(self) -> tuple[list[int], list[int]]:
        """The tokens that the tokenizer adds before and after a text."""
        coded = self.tokenizer("a", return_special_tokens_mask=True)
        pairs = list(zip(coded["input_ids"], coded["special_tokens_mask"], strict=True))
        before, after = (list(takewhile(lambda pair: pair[1], each)) for each in (pairs, reversed(pairs)))
        return [token for token, _ in before], [token for token, _ in reversed(after)]


@contextmanager
def limit_compute_time(seconds: float) -> Iterator[None]:
    """Context manager: raises ComputeTimeout inside the block once the block has used `seconds` of CPU time.

    The timer counts only the process's user CPU time, so a suspended or busy machine does not trigger the timeout.
    Python delivers signals to the main thread, and Windows lacks the timer: other threads and Windows have no limit.
    """
    if threading.current_thread() is not threading.main_thread() or not hasattr(signal, "setitimer"):
        yield
        return

    def stop(*_: Any) -> None:
        raise ComputeTimeout

    signal.signal(signal.SIGVTALRM, stop)
    signal.setitimer(signal.ITIMER_VIRTUAL, seconds, min(seconds, 1.0))  # repeats, in case the block catches the error
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)


def _unread(template: Any, names: Collection[str]) -> str:
    """A message about the variables `names` that a chat template does not read. `template` is a text or several texts
    by name. Empty if the template reads all variables, or is not text."""
    texts = [*template.values()] if isinstance(template, dict) else [template]
    if not all(isinstance(text, str) for text in texts):
        return ""
    words = {word for text in texts for word in re.findall(r"\w+", text)}
    unread = [name for name in names if name not in words]
    if not unread:
        return ""
    alike = difflib.get_close_matches(unread[0], sorted(words), n=1, cutoff=0.85)
    meant = f"; did you mean {alike[0]}?" if alike else ""
    return f"the chat template reads no variable {' and no '.join(unread)}, which has no effect{meant}"


# A mode of a template, such as thinking, is given by variables of the template. Two sets of variables are the same mode
# for a prompt if the template renders the prompt to the same text with both sets: often, a variable's default does not
# have to be named.


class ModeWarning(UserWarning):
    """A draft is used in a mode of the chat template in which it was not trained."""


def shared_variables(modes: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The variables that have the same value in all modes."""
    first, *others = modes
    return {name: value for name, value in first.items() if all(name in m and m[name] == value for m in others)}


def several_modes(trained: Provenance, used: Mapping[str, Any]) -> str | None:
    """A message on a draft of several modes, for a user who chose no mode; None for a draft trained in one mode.

    `used` are the variables with which prompts are rendered.
    """
    if not trained.template_modes:
        return None
    return (
        f"the draft was trained with {' and with '.join(map(shown_mode, trained.modes))}; prompts are rendered with "
        f"{shown_mode(used)}, and --template-kwargs chooses another of its modes"
    )


def untrained_mode(template: ChatTemplate, trained: Provenance, messages: Sequence[Any], **chat: Any) -> str | None:
    """A warning if the template renders a prompt differently than in every trained mode; None if a trained mode gives
    the same text, or without the hash of the trained template. `chat` are arguments of `ChatTemplate.render`."""
    if trained.template_sha256 is None or template.kwargs in trained.modes:
        return None
    now = template.render(messages, prompt=True, **chat)
    before = []
    for mode in trained.modes:
        try:
            before.append(template.with_exactly(mode).render(messages, prompt=True, **chat))
        except ValueError:  # the template refuses this chat in that mode
            continue
    if now in before:
        return None
    modes = " or with ".join(map(shown_mode, trained.modes))
    return (
        f"the draft was trained with {modes}, but this prompt is rendered with {shown_mode(template.kwargs)}, which "
        "gives another text. The output stays right, but acceptance can fall to a third, and with it the speedup. Give "
        "the template_kwargs of its training, or train a draft on chats of this mode too"
    )


def shown_mode(kwargs: Mapping[str, Any]) -> str:
    """A mode as text for messages."""
    return f"template_kwargs {json.dumps(kwargs, ensure_ascii=False)}" if kwargs else "the template's defaults"
