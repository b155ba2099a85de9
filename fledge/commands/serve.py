"""`fledge serve`: starts vLLM or SGLang with a draft, with the flags that the draft needs."""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from fledge.options import Options, flag_of, opt, trust_remote_code_option


@dataclass(frozen=True, kw_only=True)
class ServeOptions(Options):
    """Start vLLM or SGLang with a draft. Words after -- are passed on, e.g. -- --port 8001 --max-model-len 8192."""

    target: str = opt("target model: a directory or hub id (owner/name or owner/name@revision)")
    trust_remote_code: bool = trust_remote_code_option()
    draft: str = opt("draft of the target: a directory or hub id")
    engine: str = opt("vllm or sglang", "vllm", choices=("vllm", "sglang"))
    depth: int | None = opt("tokens drafted in a round (default: as the draft was trained)", None, minimum=1)
    tree_nodes: int | None = opt(
        "draft a tree of this many nodes, its root included (SGLang; default: a chain)", None, minimum=2, maximum=1024
    )
    tree_width: int | None = opt(
        "maximum number of children of a tree node (SGLang; default with --tree-nodes: 10)", None,
        minimum=2, maximum=64,
    )  # fmt: skip
    dry_run: bool = opt("print the command instead of running it", False)
    skip_check: bool = opt(
        "start without `fledge check`, which loads the target here first, or checks only files if that does not fit; "
        "with --dry-run: without looking at the target",
        False,
    )
    arguments: list[str] = opt(
        "arguments of the engine, after --", repeatable=True, flag="argument", may_be_empty=True
    )  # fmt: skip


def run(options: ServeOptions, say: Callable[[str], None]) -> None:
    """Checks the draft, and replaces this process by the engine; with --dry-run, prints the engine's command instead.

    Raises ValueError for a draft that the engine cannot serve, that does not fit the target, or that fails `fledge
    check`, and if the engine is not installed.
    """
    from fledge.engines.export import available

    command = command_of(options)
    if options.dry_run:
        if not options.skip_check:
            check_config(options)
        print(shlex.join(command), flush=True)
        return
    if not available(options.engine):
        raise ValueError(
            f"{options.engine} is not installed here; install it, or take the command of --dry-run to where it is"
        )
    if not options.skip_check:
        check(options, say)
    say(f"starting {options.engine}: {shlex.join(command)}")
    sys.stdout.flush()
    sys.stderr.flush()
    os.execvp(command[0], command)


def check_config(options: ServeOptions) -> None:
    """Raises ValueError if the target is a missing directory, or if the draft does not fit the model in the directory.
    A target on the hub is not checked."""
    if not Path(options.target).is_dir():
        if options.target.startswith((".", "/", "~")):
            raise ValueError(
                f"{options.target} does not exist here; with --skip-check the command for another machine is printed"
            )
        return
    from fledge.drafts.weights import open_draft
    from fledge.targets.compatibility import check_fits
    from fledge.targets.loading import load_target

    config = open_draft(options.draft).config
    target = load_target(
        options.target, weights=False, max_length=config.target_max_length,
        trust_remote_code=options.trust_remote_code,
    )  # fmt: skip
    check_fits(config, target)


def check(options: ServeOptions, say: Callable[[str], None]) -> None:
    """Runs `fledge check` in a separate process, so that the process's end frees the GPU's memory for the engine.
    Checks only the files if the target does not fit in memory. Raises ValueError if the check finds a problem."""
    from fledge.commands.check import TOO_LARGE

    words = [sys.executable, "-m", "fledge", "check", "--target", options.target, "--draft", options.draft]
    words += ["--engine", options.engine, *(["--trust-remote-code"] if options.trust_remote_code else [])]
    code = subprocess.run(words).returncode
    if code in (TOO_LARGE, -signal.SIGKILL):  # Linux ends a process by SIGKILL for want of memory
        say(f"{options.target} does not fit in memory as fledge check loads it; what needs no weights of it is checked")
        code = subprocess.run([*words, flag_of("files_only")]).returncode
    if code:
        raise ValueError(
            f"{options.draft} is not served, as fledge check failed; correct what it names, or start with --skip-check"
        )


def command_of(options: ServeOptions) -> list[str]:
    """The words of the command that starts the engine with the draft. Raises ValueError if the engine cannot serve the
    draft, or needs different files (`fledge export`)."""
    from fledge.drafts.weights import open_draft
    from fledge.engines.export import Serving, export, serve_command, trained_depth
    from fledge.engines.support import TITLES

    draft = open_draft(options.draft)
    if differences := export(draft, options.engine).differences:
        raise ValueError(
            f"{TITLES[options.engine]} needs other files than {options.draft} has: {'; '.join(differences)}; write "
            f"them with fledge export --draft {options.draft} --to {options.engine} --out DIR, and serve DIR"
        )
    trained = trained_depth(draft.config)
    if draft.config.family.layout == "dflash" and options.depth and options.depth > trained:
        raise ValueError(f"--depth {options.depth} is above {trained}, the tokens of a block in the draft's training")
    serving = Serving(
        options.target, options.draft, draft.config, options.depth or trained, options.tree_nodes, options.tree_width
    )
    trust = ["--trust-remote-code"] if options.trust_remote_code else []  # both engines have this flag
    return serve_command(options.engine, serving, [*trust, *options.arguments])
