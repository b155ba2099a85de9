"""Prompts that a caller may pass: text to continue, token ids, a chat, or a list of several of these."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

Prompt = str | Sequence[int] | Sequence[Mapping[str, Any]]  # text to continue, token ids, or the messages of a chat

KINDS = "a prompt is a string, a list of token ids or a list of messages"


def is_several(asked: Any) -> bool:
    """Whether the argument is a list of prompts: of strings, of chats, or of lists of token ids."""
    asked = _plain(asked)
    return isinstance(asked, list) and asked != [] and isinstance(asked[0], str | list)


def check_prompts(asked: Any) -> list[Any]:
    """The prompts of a list, not yet checked one by one. Raises TypeError for anything but a list of prompts."""
    asked = _plain(asked)
    if isinstance(asked, list) and (not asked or is_several(asked)):
        return asked
    what = "one prompt" if isinstance(asked, str | list) else _kind(asked)
    raise TypeError(f"a list of prompts is needed, but this is {what}; {KINDS}")


def check_prompt(asked: Any) -> str | list[int] | list[Mapping[str, Any]]:
    """One prompt, with tensors, arrays and tuples of token ids as lists. Raises TypeError for anything that is not a
    prompt, and ValueError where it is empty or not valid Unicode."""
    asked = _plain(asked)
    if is_several(asked):
        raise TypeError("this is a list of several prompts, but one prompt is needed; use generate")
    if isinstance(asked, str):
        return _encodable(asked)
    if not isinstance(asked, list):
        raise TypeError(f"{KINDS}, but this is {_kind(asked)}")
    if not asked:
        raise ValueError("the prompt is empty")
    if _are_ids(asked):
        return asked
    wanted, items = (Mapping, "messages") if isinstance(asked[0], Mapping) else (int, "token ids")
    odd = [x for x in asked if not isinstance(x, wanted) or isinstance(x, bool)]
    if odd:
        raise TypeError(f"{KINDS}, but this list of {items} holds {_kind(odd[0])}")
    return asked


def _plain(asked: Any) -> Any:
    """The same with every tensor, array and sequence as a list."""
    asked = asked.tolist() if hasattr(asked, "tolist") else asked
    if isinstance(asked, Sequence) and not isinstance(asked, str | bytes):
        return list(asked) if _are_ids(asked) else [x if type(x) is int else _plain(x) for x in asked]
    return asked


def _are_ids(asked: Sequence[Any]) -> bool:
    """Whether all are integers of Python's own type, which is found fast, as a prompt may have many."""
    return set(map(type, asked)) == {int}


def _encodable(text: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError as e:  # a lone surrogate, which no tokenizer accepts
        raise ValueError(f"the prompt is not valid Unicode ({e.reason} at character {e.start})") from e
    return text


def _kind(x: Any) -> str:
    return f"a value of type {type(x).__name__}"
