"""Loading: a target and a draft, of files or loaded already, become an engine that reads text and chats."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from fledge.config import Provenance
from fledge.data.template import ChatTemplate, ModeWarning, untrained_mode
from fledge.decode.drafting import Drafting
from fledge.decode.engine import Engine
from fledge.drafts.draft import Draft
from fledge.drafts.weights import load_draft, read_draft_config
from fledge.io.machine import resolve_device
from fledge.targets.interface import DecodingTarget
from fledge.targets.loading import load_target, target_of
from fledge.types import Prompt, check_type


class PromptReader:
    """Tokenizes text prompts, and renders chats with a target's chat template.

    `trained`: how the draft was trained that decodes the prompts; None without a draft.
    """

    def __init__(self, template: ChatTemplate, trained: Provenance | None = None):
        self.template, self.trained = template, trained
        self._warned = False

    def read(self, asked: str | Sequence[Any]) -> Prompt:
        """The prompt of a text, or of the messages of a chat. Raises ValueError like `ChatTemplate.prompt_ids` and for
        an empty prompt, and warns as `warn_of_mode`."""
        if not asked:
            raise ValueError("the prompt is empty")
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


def load(
    target: str | Path | PreTrainedModel | DecodingTarget,
    draft: str | Path | Draft | None = None,
    *,
    tokenizer: PreTrainedTokenizerBase | None = None,
    device: str = "auto",
    draft_device: str | None = None,
    dtype: torch.dtype | str | None = None,
    template_kwargs: dict[str, Any] | None = None,
    trust_remote_code: bool = False,
    target_impl: str = "auto",
    **drafting: Any,
) -> Engine:
    """Loads a target and optionally a draft for it, and returns an engine.

    Both are a directory or a hub id, which may have a revision (owner/name@revision), or are loaded already. The target
    may also be a transformers model, which is not copied, and is frozen. `tokenizer` is for a transformers model; None
    loads it from the model's `name_or_path`. `device` "auto" is the GPU if there is one. `draft_device` None is the
    target's device. `dtype` is a torch dtype or a name such as "bf16"; None is float32 on the CPU, and the
    checkpoint's dtype otherwise. Code in the target's files runs only with `trust_remote_code`; a draft has no code.
    `target_impl` is as `implementation` in `fledge.targets.loading.target_of`. `template_kwargs` are arguments of the
    chat template, added to the arguments with which the draft was trained. `drafting` are as in `Engine`. Raises
    ValueError if files are missing or damaged, if draft and target do not belong together, or for options that would
    have no effect; raises TypeError for arguments of a wrong type.
    """
    check_type("draft", draft, str | Path | Draft | None, "the directory of a draft, or a loaded draft")
    check_type("template_kwargs", template_kwargs, dict | None, "a dict")
    Drafting.from_options(drafting, has_draft=bool(draft))  # raises before a target is loaded
    if draft_device and not draft:
        raise ValueError("draft_device= has no effect without a draft; give draft=, or leave it out")
    if draft_device and isinstance(draft, Draft):
        raise ValueError("this draft is loaded already: move it with draft.to(..), and leave draft_device out")
    draft_device = resolve_device(draft_device) if draft_device else None  # before a target is loaded
    config = draft.config if isinstance(draft, Draft) else read_draft_config(draft) if draft else None
    max_length = None if config is None else config.target_max_length
    loaded: DecodingTarget
    if isinstance(target, str | Path):
        if tokenizer is not None:
            raise ValueError("tokenizer= goes with a loaded model; a target's directory has its own")
        loaded = load_target(
            target,
            device=resolve_device(device),
            dtype=dtype,
            max_length=max_length,
            trust_remote_code=trust_remote_code,
            implementation=target_impl,
        )
    elif isinstance(target, PreTrainedModel):
        if device != "auto" or dtype is not None:
            raise ValueError("this model is loaded already: move it with model.to(..), and leave device and dtype out")
        loaded = target_of(target, tokenizer, max_length=max_length, implementation=target_impl)
    else:
        check_type(
            "target",
            target,
            DecodingTarget,
            "a directory, a hub id, a transformers model or a fledge.Target that decodes",
        )
        given = dict(
            tokenizer=tokenizer, device=device, dtype=dtype, trust_remote_code=trust_remote_code,
            target_impl=target_impl,
        )  # fmt: skip
        if unused := [f"{n}=" for n, x in given.items() if x != inspect.signature(load).parameters[n].default]:
            raise ValueError(f"{' and '.join(unused)} has no effect on a target that is loaded already; leave it out")
        loaded = target
    if isinstance(draft, str | Path) and draft:
        draft = load_draft(draft, device=draft_device or loaded.device, dtype=loaded.dtype)
    trained = None if config is None else config.provenance
    variables = {**(trained.template_kwargs if trained else {}), **(template_kwargs or {})}
    reader = PromptReader(ChatTemplate(loaded.tokenizer, loaded.stop_ids, variables), trained)
    return Engine(loaded, draft or None, reader=reader, **drafting)
