"""The modes of a chat template in which a draft was trained, such as thinking and not thinking, and a warning when the
draft is used in an untrained mode.

A mode is given by variables of the chat template. Two sets of variables are the same mode for a prompt if the template
renders the prompt to the same text with both sets: often, a variable's default does not have to be named.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from fledge.config import Provenance

if TYPE_CHECKING:
    from fledge.data.template import ChatTemplate


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
