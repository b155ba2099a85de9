"""fledge trains EAGLE draft models for any causal language model and decodes with them, losslessly and faster.

>>> import fledge
>>> fledge.train_draft(target="path/to/target", data=["chats.jsonl"], out="run")
>>> engine = fledge.load("path/to/target", draft="run/draft")
>>> print(engine.generate("Once upon a time", max_new_tokens=100).text)
>>> for text in engine.stream([{"role": "user", "content": "Hello"}], temperature=0.7):
...     print(text, end="", flush=True)
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fledge.commands.train import TrainedDraft as TrainedDraft
    from fledge.commands.train import train_draft as train_draft
    from fledge.decode.engine import Engine as Engine
    from fledge.decode.load import load as load
    from fledge.decode.request import Completion as Completion
    from fledge.decode.request import Request as Request
    from fledge.targets.interface import Target as Target
    from fledge.targets.loading import load_target as load_target
    from fledge.types import Prompt as Prompt
    from fledge.types import Sampling as Sampling
    from fledge.types import TreeShape as TreeShape

__version__ = "0.1.0"
# the module of each name, imported on first use: torch and transformers take seconds to import
_MODULES = {
    "Completion": "fledge.decode.request",
    "Engine": "fledge.decode.engine",
    "Prompt": "fledge.types",
    "Request": "fledge.decode.request",
    "Sampling": "fledge.types",
    "Target": "fledge.targets.interface",
    "TrainedDraft": "fledge.commands.train",
    "TreeShape": "fledge.types",
    "load": "fledge.decode.load",
    "load_target": "fledge.targets.loading",
    "train_draft": "fledge.commands.train",
}


if not TYPE_CHECKING:  # a type checker would take every name of fledge for an attribute of any type
    __all__ = ["__version__", *_MODULES]

    def __getattr__(name: str) -> Any:
        if name not in _MODULES:
            raise AttributeError(f"module 'fledge' has no attribute {name!r}")
        return getattr(importlib.import_module(_MODULES[name]), name)

    def __dir__() -> list[str]:
        return __all__
