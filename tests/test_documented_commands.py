"""Every command of the documentation runs, with small stand-ins for what it names; so does every Python block that is
marked `<!-- run -->`. What they print fits a pipe and a terminal of 60 columns. Lines for several GPUs run with fewer
processes, on a CPU.

The blocks of a page run in order and in one directory, so that what one writes is what the next one reads. The options
of `smaller` are added to the commands; all else is as documented.
"""

from __future__ import annotations

import io
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from huggingface_hub.utils import disable_progress_bars, enable_progress_bars

from support.commands import Ran
from support.files import metrics_of
from support.methods import registered
from support.narrow import NarrowTerminal, misfits
from support.pages import BLOCKS, SHELL, Block, commands_of, lines_of
from support.ranks import free_ports
from support.stand_ins import (
    make_data,
    make_models,
    make_results,
    replace_engines,
    replace_hub_data,
    servers,
    uploads,
)  # fmt: skip

DEMO = ["demo"]  # takes minutes: tests/test_package.py runs it from the wheel, with fewer steps and prompts
EXACT = ("generate", "chat")  # their standard output is a model's text, as it is


def runs(block: Block) -> bool:
    return block.runs or block in SHELL


PAGES = list(dict.fromkeys(b.page for b in BLOCKS if runs(b)))


def smaller(words: list[str]) -> list[str]:
    """The words of a command, with options that keep a training or answer short and fit the tiny models."""
    command, given, added = words[0], set(words), {}
    if command == "train" and "--resume" not in given:
        added = {"--steps": "2", "--max-length": "64"}
        if "--config" in given:  # recipes for large models and data
            added |= {"--draft-vocab": "400", "--eval-prompts": "prompts.jsonl", "--eval-tokens": "2"}
        if "--features" in given:
            del added["--max-length"]  # of the features
    elif command == "features":
        added = {"--max-length": "64"}
    elif command in ("eval", "generate", "regenerate", "chat"):
        added = {"--max-new-tokens": "4"}
    options = [word for flag, value in added.items() if flag not in given for word in (flag, value)]
    end = words.index("--") if "--" in words else len(words)
    return [*words[:end], *options, *words[end:]]


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with everything that the pages name, and that they do not all make themselves."""
    root = tmp_path_factory.mktemp("inputs")
    make_models(root)
    make_data(root)
    make_results(root)
    return root


@pytest.fixture
def place(inputs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current directory, with a copy of the inputs."""
    copy = tmp_path / "here"
    shutil.copytree(inputs, copy, symlinks=True)
    monkeypatch.chdir(copy)
    monkeypatch.setenv("HOME", str(tmp_path))  # for --install-completion
    return copy


@pytest.fixture
def stand_ins(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fledge: Callable[..., Ran]
) -> Iterator[Callable[[list[str]], list[str]]]:
    """Replaces the hub, engines and what else is not on this machine. Gives the function of `servers`."""
    replace_hub_data(monkeypatch)
    replace_engines(monkeypatch, fledge)
    monkeypatch.setattr("shellingham.detect_shell", lambda: ("bash", "/bin/bash"))
    monkeypatch.syspath_prepend(place)
    with uploads(monkeypatch, tmp_path / "hub"), servers(place) as addressed, registered():
        yield addressed
    enable_progress_bars()


@pytest.mark.parametrize("page", PAGES)
def test_the_commands_of_a_page_run(page, place, stand_ins, fledge, monkeypatch, request):
    if page == "docs/report.md":
        request.getfixturevalue("drawing")
    narrow = NarrowTerminal(monkeypatch)
    for block in (b for b in BLOCKS if b.page == page and runs(b)):
        if file := re.match(r"# (\w+\.py)\b", block.text):
            Path(file[1]).write_text(block.text)
            continue
        if block.language == "python":
            exec(compile(block.text, f"{page}:{block.line}", "exec"), {"__name__": "__main__"})
            continue
        commands = [words[_command(words) :] for words in lines_of(block) if not starts_ranks(words)]
        assert commands or not block.runs, f"{page}:{block.line} is marked to run, but has nothing that runs"
        for words in (c for c in commands if c != DEMO):
            remove_output(words)
            (enable_progress_bars if words[0] == "push" else disable_progress_bars)()  # as the command's own process
            monkeypatch.setattr("sys.stdin", io.StringIO("the young bird\n"))
            ran = fledge(*smaller(stand_ins(words)))
            assert ran.code == 0, f"{page}:{block.line}: {shlex.join(words)}\n{ran.err}"
            piped = ran.err + (ran.out if words[0] not in EXACT else "")
            assert not re.search("[\x00-\x09\x0b-\x1f\x7f]", piped), piped
            assert not (cut := misfits(narrow.take())), "\n".join([shlex.join(words), *cut])


def remove_output(words: list[str]) -> None:
    """Removes what the command shall write anew: the commands of a page are often alternatives."""
    for name in (words[i + 1] for i, word in enumerate(words) if word == "--out"):
        out = Path(name)
        if out.is_dir():
            shutil.rmtree(out)
        else:
            out.unlink(missing_ok=True)


def _command(words: list[str]) -> int:
    """Where the arguments of `fledge` begin in the words of a line."""
    return words.index("fledge") + 1


def starts_ranks(words: list[str]) -> bool:
    """Whether a line starts processes for several GPUs."""
    return words[0] == "torchrun" or ("--gpus" in words and "--dry-run" not in words)


RANKS = [(b.page, words) for b in SHELL for words in lines_of(b) if starts_ranks(words)]
PROCESSES = ("--gpus", "--target-gpus", "--nproc-per-node")
MOST = 4  # processes in all


def hosts_of(words: list[str]) -> int:
    """The number of hosts on which a line is started."""
    return int(words[words.index("--nnodes") + 1]) if "--nnodes" in words else 1


def on_cpu(words: list[str]) -> list[str]:
    """A line for several GPUs with fewer processes and small amounts."""
    counts = {flag: int(words[words.index(flag) + 1]) for flag in PROCESSES if flag in words}
    by = max(2, hosts_of(words) * max(counts.values()) // MOST)
    fewer = list(words)
    for flag, count in counts.items():
        fewer[words.index(flag) + 1] = str(max(1, count // by))
    at = _command(words)
    return [*fewer[:at], *smaller(fewer[at:])]


@pytest.mark.parametrize(("page", "line"), RANKS, ids=[shlex.join(words)[:60] for _, words in RANKS])
def test_commands_for_several_gpus_run(page, line, place, fledge, monkeypatch):
    """As processes of this machine, which compute on the CPU; those of several hosts meet at a port of it."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")  # of the processes that are started
    monkeypatch.setattr("torch.cuda.device_count", lambda: MOST)  # asked before the processes are started
    words = on_cpu(line)
    at = words.index("--out") + 1
    words[at] = Path(words[at]).name  # not in the root directory
    remove_output(words)
    if words[0] == "fledge":
        ran = fledge(*words[1:])
        assert ran.code == 0, ran.err
    else:
        (port,) = free_ports(1)
        here = {"torchrun": [sys.executable, "-m", "torch.distributed.run"], "host0:29400": [f"localhost:{port}"]}
        command = [new for word in words for new in here.get(word, [word])]
        files = [place / f"host-{n}.txt" for n in range(hosts_of(words))]
        with ExitStack() as stack:
            outputs = [stack.enter_context(file.open("w")) for file in files]
            hosts = [stack.enter_context(subprocess.Popen(command, stderr=output)) for output in outputs]
            for host in hosts:
                stack.callback(host.kill)
            ended = [host.wait(timeout=240) for host in hosts]
        told = "\n".join(file.read_text() for file in files)
        ranks = len(hosts) * int(words[words.index("--nproc-per-node") + 1])
        assert not any(ended) and told.count(f"on {ranks} ranks") == 1, told
    out = place / words[at]
    assert len(metrics_of(out)) == 2 and (out / "draft" / "config.json").exists()


def test_every_command_runs():
    """What is left out above is run elsewhere, and the lines for several GPUs are those of one page."""
    documented = [(b.page, words) for b in SHELL for words in commands_of(b)]
    assert [page for page, words in documented if words == DEMO] == ["docs/first-draft.md"]
    assert {page for page, _ in RANKS} == {"docs/growing.md"} and len(RANKS) == 5
