"""Mistakes put into the code, for tests that say whether they are noticed."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest

from fledge.models.draft import Draft


class AlteredDraft:
    """A draft some of whose methods are replaced, for tests of what a mistake on one side alone would do.

    `AlteredDraft(draft, split_output=wrong)` calls `wrong(draft.split_output, *args)` for each call of that method.
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
    """Replaces a function or method by `wrong`, which is called with the original first, then its arguments."""
    right = getattr(owner, name)

    @functools.wraps(right)
    def replacement(*args: Any, **kwargs: Any) -> Any:
        return wrong(right, *args, **kwargs)

    monkeypatch.setattr(owner, name, replacement)
