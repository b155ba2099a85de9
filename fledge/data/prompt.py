"""Reading prompts: text and chats become the token ids that a target continues."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

from fledge.config import Provenance
from fledge.data.template import ChatTemplate, ModeWarning, untrained_mode
from fledge.types import Prompt


class PromptReader:
    """Tokenizes text prompts, and renders chats with a target's chat template.

    `trained`: how the draft was trained that decodes the prompts; None without a draft.
    """

    def __init__(self, template: ChatTemplate, trained: Provenance | None = None):
        self.template, self.trained = template, trained
        self._warned = False

    def read(self, asked: str | Sequence[Any]) -> Prompt:
        """The prompt of a text, or of the messages of a chat. Raises ValueError like `ChatTemplate.prompt_ids`, and
        warns as `warn_of_mode`."""
        ids = self.template.prompt_ids(asked)
        if not isinstance(asked, str):
            self.warn_of_mode(asked)
        return Prompt(ids)

    def warn_of_mode(self, messages: Sequence[Any], template: ChatTemplate | None = None, **chat: Any) -> None:
        """Issues a `ModeWarning`, once, if a chat is rendered in a mode in which the draft was not trained. `template`
        renders the chat (None: the reader's template), with `chat`, further arguments of `ChatTemplate.render`."""
        if self.trained is None or self._warned:
            return
        if problem := untrained_mode(template or self.template, self.trained, messages, **chat):
            self._warned = True
            warnings.warn(problem, ModeWarning, stacklevel=5)
