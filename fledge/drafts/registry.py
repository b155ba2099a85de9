"""The networks of the draft methods, and the registration of methods that are defined elsewhere."""

from __future__ import annotations

from fledge.config import DraftConfig
from fledge.drafts.block import BlockDraft
from fledge.drafts.dflash import DFlashDraft
from fledge.drafts.draft import Draft
from fledge.drafts.eagle import EagleDraft
from fledge.drafts.eagle1 import Eagle1Draft
from fledge.drafts.peagle import ParallelDraft
from fledge.methods import CHOICES, DFLASH, EAGLE1, EAGLE3, METHODS, PEAGLE, Choice, Method

NETWORKS: dict[str, type[Draft]] = {
    EAGLE1.name: Eagle1Draft,
    EAGLE3.name: EagleDraft,
    PEAGLE.name: ParallelDraft,
    DFLASH.name: DFlashDraft,
}

BUILT_IN = frozenset({*METHODS, *CHOICES})


def register(method: Method, network: type[Draft]) -> None:
    """Adds a method, or replaces one that was added before. Drafts of the method can then be trained
    (`fledge.train_draft(method=NAME)`), saved, loaded, checked and decoded with in this process. Raises ValueError if
    fledge has a method of that name, and if the network is not what the method says."""
    if method.name in BUILT_IN:
        raise ValueError(f"{method.name!r} is a method of fledge; choose another name")
    block, masked = issubclass(network, BlockDraft), issubclass(network, ParallelDraft)
    if not (block or issubclass(network, EagleDraft)):
        raise ValueError(f"{network.__name__} must be a subclass of EagleDraft or BlockDraft")
    if method.one_pass != (block or masked):
        drafts = "a block of tokens" if block or masked else "one token"
        raise ValueError(f"{network.__name__} drafts {drafts} a pass, and its method has one_pass={method.one_pass}")
    if masked and not method.masks:
        raise ValueError(f"{network.__name__} reads a mask token, and its method has masks=False")
    METHODS[method.name], NETWORKS[method.name] = method, network
    CHOICES[method.name] = Choice(method, method.title)


def new_draft(config: DraftConfig) -> Draft:
    """A draft with this config, and weights that `Draft.initialize` has yet to set."""
    return NETWORKS[config.method](config)
