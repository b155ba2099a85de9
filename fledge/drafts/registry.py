"""The networks of the draft methods, and the registration of methods that are defined elsewhere."""

from __future__ import annotations

from fledge.config import DraftConfig
from fledge.drafts.draft import Draft
from fledge.drafts.eagle import EagleDraft
from fledge.drafts.eagle1 import Eagle1Draft
from fledge.drafts.peagle import ParallelDraft
from fledge.methods import CHOICES, EAGLE1, EAGLE3, METHODS, PEAGLE, Choice, Method

NETWORKS: dict[str, type[Draft]] = {EAGLE1.name: Eagle1Draft, EAGLE3.name: EagleDraft, PEAGLE.name: ParallelDraft}


def register(method: Method, network: type[Draft]) -> None:
    """Adds a method. Drafts of the method can then be trained (`fledge.train_draft(method=NAME)`), saved, loaded,
    checked and decoded with. Raises ValueError if another method has the same name."""
    if METHODS.get(method.name, method) is not method:
        raise ValueError(f"there is another method named {method.name!r}; choose another name")
    METHODS[method.name], NETWORKS[method.name] = method, network
    CHOICES[method.name] = Choice(method, method.title)


def new_draft(config: DraftConfig) -> Draft:
    """A draft with this config, and weights that `Draft.initialize` has yet to set."""
    return NETWORKS[config.method](config)
