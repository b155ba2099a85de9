"""Helpers that put a mistake into the code, for tests that check that it is noticed."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest

from fledge.drafts.draft import Draft


class AlteredDraft:
    """A draft with replaced methods, for tests in which only training or only decoding makes a mistake.

    With `AlteredDraft(draft, split_output=wrong)`, each call of `split_output(*args)` becomes
    `wrong(draft.split_output, *args)`.
    """

    def __init__(self, draft: Draft, **replaced: Callable[..., Any]):
        self._draft = draft
        for name, wrong in replaced.items():
            setattr(self, name, functools.partial(wrong, getattr(draft, name)))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._draft, name)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._draft(*args, **kwargs)


def replace_function(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, wrong: Callable[..., Any]) -> None:
    """Replaces a function or method by `wrong`, which is called with the original function and then its arguments."""
    right = getattr(owner, name)

    @functools.wraps(right)
    def replacement(*args: Any, **kwargs: Any) -> Any:
        return wrong(right, *args, **kwargs)

    monkeypatch.setattr(owner, name, replacement)
