"""Data sets by name: those of the hub that drafts are usually trained on, with what is needed to read them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fledge.data.sources import HUB_ID, Source
from fledge.io.fields import first_line
from fledge.io.hub import quiet_hub


@dataclass(frozen=True)
class Preset:
    """A data set of the hub.

    `split` is read unless a source names another one, and `prompt_split` where prompts are asked for (None: the same
    one). `columns` maps names of fledge's layouts to its columns; None if they already have these names. `terms` is
    its licence or what else to know before using it, for the documentation.
    """

    hub_id: str
    split: str
    terms: str
    config: str | None = None
    columns: dict[str, str] | None = None
    prompt_split: str | None = None


PRESETS: dict[str, Preset] = {
    "sharegpt": Preset(
        "Aeala/ShareGPT_Vicuna_unfiltered", "train",
        "conversations that users of ChatGPT shared; OpenAI's terms may apply. Some have no messages, so "
        "fledge train needs --skip-bad",
    ),
    "ultrachat": Preset("HuggingFaceH4/ultrachat_200k", "train_sft", "MIT", prompt_split="test_sft"),
    "perfectblend": Preset("mlabonne/open-perfectblend", "train", "Apache-2.0"),
    "magpie": Preset("Magpie-Align/Magpie-Llama-3.1-Pro-300K-Filtered", "train", "Llama 3.1 community licence"),
    "openhermes": Preset("teknium/OpenHermes-2.5", "train", "a collection; its sources have licences of their own"),
    "nemotron": Preset(
        "nvidia/Llama-Nemotron-Post-Training-Dataset", "chat",
        "CC BY 4.0, a part under other licences (column license). The splits code, math and science are far larger",
        config="SFT", columns={"prompt": "input", "completion": "output", "system": "system_prompt"},
    ),
}  # fmt: skip


@dataclass(frozen=True)
class HubData:
    """A data set of the hub as it is loaded: `name` is what the user wrote, `columns` the mapping of its columns."""

    name: str
    hub_id: str
    split: str
    revision: str | None
    config: str | None = None
    columns: dict[str, str] | None = None

    def load(self) -> Any:
        """The data set, a `datasets.Dataset`. Raises ValueError if it cannot be loaded."""
        import datasets

        arguments = (self.hub_id,) if self.config is None else (self.hub_id, self.config)
        try:
            with quiet_hub():
                return datasets.load_dataset(
                    *arguments, split=self.split, revision=self.revision, trust_remote_code=False
                )
        except Exception as e:  # offline, unknown, gated or moved: each raises another type
            known = "not a local file" if self.hub_id in self.name else f"{self.hub_id} on the hub"
            raise ValueError(
                f"{self.name} is {known} and cannot be loaded from the hub: {first_line(e)}. Check its name, and load "
                "it once where the hub can be reached (the datasets library then keeps it)"
            ) from e


def find_hub_data(name: str, *, prompts: bool = False) -> HubData:
    """What `name[@revision][:split]` stands for: one of PRESETS, or a data set of the hub. With `prompts`, a preset's
    split for prompts is the default."""
    parts = HUB_ID.fullmatch(name)
    asked, revision, split = parts["name"], parts["revision"], parts["split"]
    if (preset := PRESETS.get(asked)) is None:
        return HubData(name, asked, split or "train", revision)
    default = (preset.prompt_split if prompts else None) or preset.split
    return HubData(name, preset.hub_id, split or default, revision, preset.config, preset.columns)


def is_preset(path: str) -> bool:
    """Whether a source's path names one of PRESETS, and no file has that name."""
    parts = HUB_ID.fullmatch(path)
    return parts is not None and parts["name"] in PRESETS and not Path(path).exists()


def shadowed_presets(sources: Sequence[Any]) -> list[str]:
    """A message for each source that is a local file or directory with the name of a preset."""
    paths = [Source.parse(source).path for source in sources]
    return [
        f"{path} is read from the disk; the data set of that name is {PRESETS[path].hub_id}"
        for path in paths
        if path in PRESETS and Path(path).exists()
    ]
