"""The commands that start vLLM and SGLang with a draft."""

from __future__ import annotations

import importlib.util
import json
import re
import shutil
import sys
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from fledge.config import DraftConfig
from fledge.io.hub import split_revision

ENGINES = ("vllm", "sglang")
SWITCHES = {"--enable-metrics"}  # flags without a value, harmless when repeated
PROGRAMS = {"vllm": ("vllm", "serve"), "sglang": ("python3", "-m", "sglang.launch_server")}
NAMES_OF_TARGET = {"vllm": ("--model",), "sglang": ("--model-path", "--model")}  # further flags of the target
DEPTH = 5  # drafted tokens of a round, for a draft without a recorded depth


@dataclass(frozen=True)
class Serving:
    """A target served with a draft: `depth` drafted tokens a round, or a tree of `nodes` nodes, including the root,
    with at most `width` children per node (SGLang only)."""

    target: str
    draft: str
    config: DraftConfig
    depth: int
    nodes: int | None = None
    width: int | None = None


def trained_depth(config: DraftConfig) -> int:
    """The number of tokens that a draft was trained to draft in a round; DEPTH if not recorded."""
    return config.provenance.depth or DEPTH


def serve_command(engine: str, serving: Serving, arguments: Sequence[str] = ()) -> list[str]:
    """The words of the command that starts an engine's server with a draft, followed by `arguments`.

    Raises ValueError for a tree that the engine does not draft, and for arguments that set the served model or the
    drafting again.
    """
    command = engine_command(engine, serving)
    fixed = {word for word in command if word.startswith("--")} - SWITCHES | {*NAMES_OF_TARGET[engine]}
    if given := next((word for word in arguments if _replaces(word, fixed)), None):
        raise ValueError(
            f"{given.partition('=')[0]} is among the words after --, but fledge serve gives the target and what the "
            "draft needs; say which target by --target, and what is drafted by --depth, --tree-nodes and --tree-width"
        )
    return [*program(engine), *command[len(PROGRAMS[engine]) :], *arguments]


def _replaces(word: str, flags: Collection[str]) -> bool:
    """Whether argparse reads a word as a flag in `flags` or as a flag of speculative decoding, such as vLLM's -sc.
    argparse accepts shortened flags, and engines accept underscores for hyphens."""
    name = re.split(r"[=.]", word, maxsplit=1)[0].replace("_", "-")
    if not name.startswith("--"):
        return name.startswith("-s")
    return name.startswith("--spec") or (name != "--" and any(flag.startswith(name) for flag in flags))


def engine_command(engine: str, serving: Serving) -> list[str]:
    """The words of `serve_command` on a machine on which the engine is installed, without further arguments."""
    return [*PROGRAMS[engine], *(_vllm if engine == "vllm" else _sglang)(serving)]


def program(engine: str) -> list[str]:
    """The words that start an engine's server on this machine: the engine's script, or a module of this Python."""
    importable = importlib.util.find_spec(engine) is not None
    if importable and engine == "sglang":
        return [sys.executable, *PROGRAMS[engine][1:]]
    if importable and shutil.which("vllm") is None:
        return [sys.executable, "-m", "vllm.entrypoints.cli.main", "serve"]
    return list(PROGRAMS[engine])


def available(engine: str) -> bool:
    """Whether an engine can be started on this machine: by the engine's script, or by this Python."""
    return importlib.util.find_spec(engine) is not None or (engine == "vllm" and shutil.which("vllm") is not None)


def _vllm(serving: Serving) -> list[str]:
    if serving.nodes is not None or serving.width is not None:
        raise ValueError("vLLM drafts chains, no trees; leave --tree-nodes and --tree-width out, or use SGLang")
    target, revision = split_revision(serving.target)
    draft, draft_revision = split_revision(serving.draft)
    # without a method, vLLM takes the draft for an independent small language model, unless the path contains eagle
    method = "eagle3" if serving.config.family.reads_layers else "eagle"
    speculative = {"method": method, "model": draft, "num_speculative_tokens": serving.depth}
    speculative |= {"revision": draft_revision} if draft_revision else {}
    speculative |= {"parallel_drafting": True} if serving.config.family.one_pass else {}
    words = [target, *(["--revision", revision] if revision else [])]
    return [*words, "--speculative-config", json.dumps(speculative)]


def _sglang(serving: Serving) -> list[str]:
    target, revision = split_revision(serving.target)
    draft, draft_revision = split_revision(serving.draft)
    width = serving.width or (1 if serving.nodes is None else 10)
    most = 1 + width + (serving.depth - 1) * width**2  # scored nodes: `width` nodes a level have `width` children each
    nodes = serving.nodes or (serving.depth + 1 if width == 1 else min(60, most))
    if width > 1 and nodes > most:
        raise ValueError(
            f"a tree of {serving.depth} levels, {width} wide, has at most {most} nodes; give --tree-nodes {most} or "
            "fewer, a larger --tree-width or more --depth"
        )
    if width == 1 and nodes != serving.depth + 1:
        raise ValueError(
            f"a tree with one child per node is a chain: for {serving.depth} tokens it has {serving.depth + 1} nodes, "
            f"not {nodes}; leave --tree-nodes out, or give a larger --tree-width"
        )
    words = ["--model-path", target, *(["--revision", revision] if revision else [])]
    words += ["--speculative-algorithm", "EAGLE3" if serving.config.family.reads_layers else "EAGLE"]
    words += ["--speculative-draft-model-path", draft]
    words += ["--speculative-draft-model-revision", draft_revision] if draft_revision else []
    amounts = {"--speculative-num-steps": serving.depth, "--speculative-eagle-topk": width}
    amounts["--speculative-num-draft-tokens"] = nodes
    words += [str(word) for flag in amounts.items() for word in flag]
    return [*words, "--enable-metrics"]  # the counters that `fledge eval --endpoint` reads
