"""fledge trains EAGLE draft models for any causal language model and decodes with them, losslessly and faster.

>>> import fledge
>>> engine = fledge.load("path/to/target", draft="path/to/draft")
>>> print(engine.generate("Once upon a time", max_new_tokens=100).text)
>>> for piece in engine.stream([{"role": "user", "content": "Hello"}], sampling=fledge.Sampling(temperature=0.7)):
...     print(piece, end="", flush=True)
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fledge.decode.engine import Completion, Engine, load
    from fledge.types import Sampling, TreeShape

__all__ = ["Completion", "Engine", "Sampling", "TreeShape", "__version__", "load"]
__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    # torch and transformers take seconds to import, and `fledge --help` needs neither
    if name in ("Completion", "Engine", "load"):
        from fledge.decode import engine

        return getattr(engine, name)
    if name in ("Sampling", "TreeShape"):
        from fledge import types

        return getattr(types, name)
    raise AttributeError(f"module 'fledge' has no attribute {name!r}")
