"""The model card of a draft, README.md in its directory: Hugging Face metadata and a text in Markdown.

A card that nobody has edited ends with a signature, the hash of the text above it. Two sections are between markers and
can be written again: what was measured, and the commands that serve the draft. All else belongs to whoever edits it.
"""

from __future__ import annotations

import hashlib
import re
import shlex
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from fledge.config import DraftConfig
from fledge.engines.command import Serving, engine_command, trained_depth
from fledge.engines.support import TITLES, minimum_version, unsupported
from fledge.eval.metrics import alpha_text
from fledge.hub import hub_id
from fledge.jobs.inspect import describe, method_title

CARD = "README.md"
ENGINES = ("vllm", "sglang")
DRAFT = "YOUR-NAME/THIS-DRAFT"  # stands for the draft in commands; `for_repository` replaces it
TARGET = "TARGET"  # stands for a target that has no hub id
MEASURED, SERVING = "measured", "serving"  # the sections that can be written again
LONGEST_NAME = 200  # characters of a name that are shown
NOT_MEASURED = "Nothing is recorded. `fledge eval --out eval.json`, then `fledge card --eval eval.json`, fill this in."

_SIGNATURE = re.compile(r"\n<!-- fledge card, sha256 ([0-9a-f]{64}) -->\n*\Z")
_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069\ud800-\udfff]")


@dataclass(frozen=True)
class Training:
    """What is known of a draft's training. `datasets` are the hub ids of its data, and `facts` the rows of a table:
    labels and Markdown."""

    datasets: tuple[str, ...] = ()
    facts: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True)
class Measurement:
    """A measurement of acceptance. `alpha` are the acceptance rates by position, `speedup` is None where speed was not
    measured. The other fields are text that is shown as it is, escaped: what was decoded, how, and on what."""

    prompts: str
    decoding: str
    tau: float
    alpha: tuple[float | None, ...] = ()
    speedup: float | None = None
    device: str = ""


# -- the whole card ---------------------------------------------------------------------------------------------------


def card_text(
    config: DraftConfig,
    *,
    exports: Callable[[str], bool],
    training: Training | None = None,
    measurements: Sequence[Measurement] = (),
    revision: str | None = None,
) -> str:
    """A signed card. `exports` tells whether an engine needs other files than the draft has; `revision` is the commit
    of the target, if it is known. No path of this machine is in it, and no name can break its YAML or Markdown."""
    from huggingface_hub import ModelCard, ModelCardData

    training = training or Training()
    data = ModelCardData(
        base_model=hub_id(config.provenance.target),
        datasets=list(training.datasets) or None,
        library_name="fledge",
        pipeline_tag="text-generation",
        tags=_tags(config),
    )
    body = "\n\n".join(filter(None, (
        _introduction(config, revision), _description(config), _training(training),
        "## Measured acceptance\n\n" + _section(MEASURED, measured_text(measurements)),
        "## Use\n\n" + _section(SERVING, serving_text(config, exports)), _limits(config),
    )))  # fmt: skip
    return sign(str(ModelCard(f"---\n{data.to_yaml()}\n---\n\n{body}\n")))


def _tags(config: DraftConfig) -> list[str]:
    served = [engine for engine in ENGINES if unsupported(config, engine) is None]
    title = method_title(config).lower().replace("-", "", 1) if config.family.name != "peagle" else "p-eagle"
    return ["speculative-decoding", "draft-model", *dict.fromkeys((config.method, title)), *served]


def _introduction(config: DraftConfig, revision: str | None) -> str:
    title, family = method_title(config), config.family
    paper = re.sub(r"^(.*), arXiv:(.*)$", r"[\1](https://arxiv.org/abs/\2)", family.paper)
    name = target_name(config)
    of = f" for {plain(name)}" if name else ""
    target = _link(config, revision) if name else "its target, which is not recorded"
    return (
        f"# {title} draft{of}\n\nA draft model for speculative decoding with {target}, of the method {title} "
        f"({paper}). It proposes the next few tokens, and the target checks them in one forward pass and keeps those "
        "that it would have generated itself: the text is the target's, and it comes faster.\n\n"
        "The draft is not a language model to be used alone."
    )


def _link(config: DraftConfig, revision: str | None) -> str:
    """The target as Markdown, linked to the hub if it is there."""
    name = hub_id(config.provenance.target)
    commit = f" (revision {code(revision)})" if revision else ""
    return (f"[{plain(name)}](https://huggingface.co/{name})" if name else code(target_name(config))) + commit


def target_name(config: DraftConfig) -> str:
    """The target's hub id, or the last part of its path; empty if it is not recorded."""
    name = config.provenance.target
    return hub_id(name) or re.split(r"[/\\]", name.rstrip("/\\"))[-1]


def _description(config: DraftConfig) -> str:
    shown = replace(config, provenance=replace(config.provenance, target=target_name(config)))
    return "## The draft\n\n" + "\n".join(f"- {plain(sentence)}" for sentence in describe(shown))


def _training(training: Training) -> str:
    if not training.facts:
        return ""
    rows = "\n".join(f"| {label} | {cell(text)} |" for label, text in training.facts)
    return f"## Training\n\n| | |\n|---|---|\n{rows}"


def _limits(config: DraftConfig) -> str:
    known, name = config.provenance, target_name(config)
    lines = [
        f"It was trained for {code(name) if name else 'one target'}. With another model, even a fine-tuned one, fewer "
        "tokens are accepted, down to none; the text stays that of the model.",
    ]
    if known.template_kwargs:
        lines.append(
            f"Its chats were rendered with the template variables {code(str(known.template_kwargs))}. In another mode, "
            "e.g. with thinking turned on or off, fewer tokens are accepted."
        )
    if known.max_length:
        lines.append(f"It has seen texts of up to {known.max_length:,} tokens; acceptance may fall beyond.")
    if config.draft_vocab_size < config.vocab_size:
        lacking = config.vocab_size - config.draft_vocab_size
        lines.append(
            f"It never proposes the {lacking:,} tokens that its vocabulary lacks: text full of them, e.g. in another "
            "language, gains less."
        )
    lines.append("Where little is accepted, drafting costs time: measure on prompts like your own.")
    return "## Limits\n\n" + "\n".join(f"- {line}" for line in lines)


# -- measured ---------------------------------------------------------------------------------------------------------


def measured_text(measurements: Sequence[Measurement]) -> str:
    """The section with a table of measurements."""
    if not measurements:
        return NOT_MEASURED
    lines = ["| prompts | decoding | τ | α by position | speedup | measured on |", "|---|---|---|---|---|---|"]
    for m in measurements:
        rates = alpha_text(m.alpha) or "-"
        speedup = "-" if m.speedup is None else f"{m.speedup:.2f}x"
        texts = [cell(plain(text)) or "-" for text in (m.prompts, m.decoding, m.device)]
        lines.append(f"| {texts[0]} | {texts[1]} | {m.tau:.2f} | {rates} | {speedup} | {texts[2]} |")
    meaning = (
        "τ is the mean number of tokens committed per forward pass of the target, its own included (1: nothing is "
        "gained). α is the share of the first, second, .. drafted tokens that are accepted if those before them were."
    )
    return "\n".join(lines) + f"\n\n{meaning}"


def measurement_of(record: dict[str, Any], label: str = "") -> Measurement:
    """A measurement from a record of `fledge eval`. Raises ValueError if it is not one of a draft."""
    try:
        tau, alpha, n = float(record["tau"]), _alpha_of(record), int(record["prompts"])
        chip = str(record["environment"]["device"])
        speedup = None if record.get("speedup") is None else float(record["speedup"])
    except (KeyError, TypeError, ValueError) as e:
        raise ValueError(f"it is not a record of fledge eval with a draft ({type(e).__name__}: {e})") from e
    prompts = record.get("prompt_set") or label or "prompts"
    return Measurement(f"{prompts}, {n}", _decoding(record), tau, alpha, speedup, chip)


def _alpha_of(record: dict[str, Any]) -> tuple[float | None, ...]:
    return tuple(None if a is None else float(a) for a in record["alpha"])


def _decoding(record: dict[str, Any]) -> str:
    sampling = record.get("sampling") or {}
    temperature = sampling.get("temperature", 0)
    words = ["greedy" if not temperature else f"temperature {temperature}"]
    words += [str(record["mode"])] if record.get("mode") else []
    words += [f"{name} {record[name]}" for name in ("depth", "nodes") if record.get(name)]
    words += [f"batch {record['batch']}"] if record.get("batch", 1) != 1 else []
    return ", ".join(words)


# -- serving ----------------------------------------------------------------------------------------------------------


def serving_text(config: DraftConfig, exports: Callable[[str], bool]) -> str:
    """The section with the commands that serve the draft, or why an engine cannot."""
    name = config.provenance.target
    target = name if hub_id(name) else TARGET
    stands = f"{code(DRAFT)} stands for this draft: its directory, or its id on the hub."
    if target == TARGET:
        stands += f" {code(TARGET)} stands for the target."
    parts = [stands]
    for engine in ENGINES:
        if reason := unsupported(config, engine):
            parts.append(f"{plain(reason)}.")
            continue
        if exports(engine):
            parts.append(
                f"{TITLES[engine]} needs other files than these, which `fledge export --to {engine}` writes. Serve "
                "those."
            )
        version = minimum_version(config, engine)
        words = engine_command(engine, Serving(target, DRAFT, config, trained_depth(config)))
        parts.append(f"{TITLES[engine]}{f' ({version} or later)' if version else ''}:\n\n{_block(shlex.join(words))}")
    own = f"fledge generate --target {target} --draft {DRAFT} --prompt Hello"
    parts.append(f"fledge, which also measures what the draft gains (`fledge eval`):\n\n{_block(own)}")
    return "\n\n".join(parts)


def _block(command: str) -> str:
    return f"```sh\n{command}\n```"


# -- editing ----------------------------------------------------------------------------------------------------------


def sign(text: str) -> str:
    """A card with its signature."""
    text = _normal(text)
    return f"{text}\n<!-- fledge card, sha256 {_sha256(text)} -->\n"


def is_unedited(text: str) -> bool:
    """Whether a card is as fledge wrote it."""
    text = _normal(text)
    found = _SIGNATURE.search(text)
    return found is not None and _sha256(_normal(text[: found.start()])) == found[1]


def with_section(text: str, name: str, content: str) -> str:
    """A card with another content between the markers of a section. It is signed again if nobody had edited it. Raises
    ValueError if the card has no such markers."""
    first, last = _markers(name)
    before, found, rest = text.partition(first)
    _, ends, after = rest.partition(last)
    if not found or not ends:
        raise ValueError(f"it has no section between {first} and {last}; add these two lines where it should be")
    return _edited(text, before + _section(name, content) + after)


def for_repository(text: str, repository: str) -> str:
    """A card with a repository's id in its commands, if nobody has edited it."""
    return _edited(text, text.replace(DRAFT, repository)) if is_unedited(text) else text


def _edited(text: str, edited: str) -> str:
    return sign(_SIGNATURE.sub("", _normal(edited))) if is_unedited(text) else edited


def _markers(name: str) -> tuple[str, str]:
    return f"<!-- fledge: {name} -->", f"<!-- fledge: end of {name} -->"


def _section(name: str, content: str) -> str:
    first, last = _markers(name)
    return f"{first}\n{content}\n{last}"


def _normal(text: str) -> str:
    """The text as it is hashed: editors and git may change line ends."""
    return "\n".join(text.splitlines()).rstrip("\n") + "\n" if "\r" in text else text.rstrip("\n") + "\n"


def _sha256(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8", errors="replace")).hexdigest()


# -- Markdown ---------------------------------------------------------------------------------------------------------


def _shortened(text: str) -> str:
    text = _CONTROL.sub("?", text)
    return text if len(text) <= LONGEST_NAME else text[:LONGEST_NAME] + ".."


def plain(text: str) -> str:
    """Text in which Markdown and HTML have no meaning."""
    text = re.sub(r"([\\`*_\[\]{}~#!])", r"\\\1", _CONTROL.sub("?", text))
    return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")


def code(text: str) -> str:
    """A name as a code span."""
    text = _shortened(text)
    fence = "`" * (1 + max(map(len, re.findall("`+", text)), default=0))
    space = " " if text[:1] == "`" or text[-1:] == "`" else ""
    return f"{fence}{space}{text}{space}{fence}"


def cell(text: str) -> str:
    """Markdown in a cell of a table."""
    return text.replace("|", "\\|")
