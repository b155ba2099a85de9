"""What commands print: messages, errors, help and progress on a terminal of 60 columns, and plain lines in a pipe. What
the documented commands print is checked where they run, in `test_documented_commands.py`."""

from __future__ import annotations

import ast
import contextvars
import itertools
import json
import re
from contextlib import contextmanager

import pytest
import typer.rich_utils
from hypothesis import given
from hypothesis import strategies as st
from rich.cells import cell_len

import fledge.io.display as display_module
from fledge.cli import TABLE_WIDTH, app
from fledge.drafts.weights import save_draft
from fledge.io.display import LINE_INTERVAL, ProgressDisplay, fit
from fledge.io.hub import show_progress
from fledge.targets.loading import counting_tensors, load_target
from support.chats import tiny_chats
from support.files import write_rows
from support.narrow import WIDTH, misfits
from support.pages import ROOT
from support.targets import tiny_draft, tiny_target, tiny_target_directory
from support.terminal import TerminalOf

COMMANDS = [command.name for command in app.registered_commands]
# runs several commands in one process, which saves their imports; a command that fails says so
SCRIPT = """
import json, sys
from fledge.cli import main
for words in json.loads(sys.argv[1]):
    sys.argv = ["fledge", *words]
    try:
        main()
    except SystemExit as end:
        if end.code:
            print("exit code", end.code, flush=True)
"""


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    root = tmp_path_factory.mktemp("made")
    target = tiny_target()
    save_draft(tiny_draft(target), root / "draft")
    tiny_target_directory(root)
    tiny_chats(root / "chats.jsonl", 6)
    write_rows(root / "prompts.jsonl", [{"prompt": "the young bird"}] * 3)
    return root


def commands(made, out) -> dict[str, list[str]]:
    """Each command with a bar."""
    target, data = ["--target", made / "target"], ["--data", made / "chats.jsonl"]
    draft, cpu = ["--draft", made / "draft"], ["--device", "cpu"]
    listed = {
        "train": [*target, *data, "--steps", 2, "--max-length", 64, "--out", out / "run", *cpu],
        "eval": [*target, *draft, "--prompts", made / "prompts.jsonl", "--max-new-tokens", 2, *cpu],
        "regenerate": [*target, *data, "--out", out / "own.jsonl", "--max-new-tokens", 2, *cpu],
        "features": [*target, *data, "--out", out / "features", "--max-length", 64, *cpu],
        "check": [*target, "--draft", out / "run" / "draft", *cpu],
    }
    return {name: [name, *map(str, words)] for name, words in listed.items()}


def failures(made) -> list[list[str]]:
    """Commands that fail: with an error of the job, of the options, and of the command line."""
    target, prompts = ["--target", made / "target"], ["--prompts", made / "prompts.jsonl"]
    listed = [
        ["train", *target, "--data", made / "nothing.jsonl"],
        ["train", *target, "--data", made / "chats.jsonl", "--out", made / "no-run", "--draft-vocab", 5000],
        ["eval", *target, *prompts],
        ["eval", *target, *prompts, "--draft", made / "target"],
        ["generate", *target, "--draft", made / "draft", "--prompt", "a", "--depth", "never"],
        ["serve", *target, "--draft", made / "draft", "--engine", "trtllm"],
        ["report", made / "nothing"],
        ["inspect"],
        ["train", "--dept", 3],
    ]
    return [[str(word) for word in words] for words in listed]


BARS = [  # what stays of them, once each
    r"\d+/\? counting chats [\d.,]+ records/(s|min)",
    r"2/2 \d:\d\d:\d\d left loss \d+\.\d{3}  τ \d\.\d\d [\d,]+ tokens/s",
    r"6/6 \d:\d\d:\d\d left answers to prompts in 2 ways [\d.,]+ answers/(s|min)",
    r"12/12 \d:\d\d:\d\d left answers [\d.,]+ answers/(s|min)",
    r"\d+/\d+ \d:\d\d:\d\d left tokens [\d.,]+ tokens/(s|min)",
]


def test_bars_fit_a_narrow_terminal_and_leave_one_line(made, tmp_path):
    draft, more = str(tmp_path / "run" / "draft"), ["--device", "cpu", "--dry-run"]
    words = json.dumps([
        *commands(made, tmp_path).values(),
        ["inspect", draft],
        ["train", "--target", str(made / "target"), "--data", str(made / "chats.jsonl"), "--max-length", "64", *more],
        *failures(made),
    ])  # fmt: skip
    with TerminalOf(words, width=WIDTH, program=["-c", SCRIPT], FLEDGE_CACHE=str(tmp_path / "cache")) as terminal:
        assert terminal.wait_for_end(120) == 0
    lines = terminal.lines
    said = re.sub(r"\s+", " ", terminal.text)
    assert terminal.text.count("exit code 2") == terminal.text.count("exit code") == len(failures(made)), said
    assert "The draft is sound." in said and "Nothing is wrong with it." in said and "Memory: fits" in said, said
    for bar in BARS:
        assert sum(bool(re.fullmatch(bar, line)) for line in lines) == 1, f"{bar}\n{terminal.text}"
    drawn = re.sub(rb"\x1b\[[\d;?]*[A-Za-z]", b"", terminal.written).decode()
    bars = [line for line in re.split(r"[\r\n]+", drawn) if re.match(r" *\d+/[\d?]+ ", line)]
    assert len(bars) > len(BARS) and max(map(len, bars)) <= WIDTH, "a bar that wraps leaves lines behind"
    assert not (cut := misfits([line for line in re.split(r"[\r\n]+", drawn) if line not in bars])), "\n".join(cut)
    assert any(re.search(r"left tensors of \S* [\d.,]+ tensors/(s|min)", line.strip()) for line in bars)
    assert not any("tensors of" in line for line in lines), "nothing stays of the bars of loading"
    assert sum(line.strip() != "" for line in lines) < 200


def test_in_a_pipe_there_are_plain_lines(made, tmp_path, fledge, monkeypatch):
    monkeypatch.setenv("FLEDGE_CACHE", str(tmp_path / "cache"))
    for name, words in commands(made, tmp_path).items():
        went = fledge(*words)
        assert went.code == 0 and not re.search("[\x00-\x09\x0b-\x1f\x7f]", went.out + went.err), went.err
        progress = [line for line in went.err.splitlines() if re.search(r"\d:\d\d:\d\d elapsed", line)]
        labels = [re.match(r"\D*", line)[0] for line in progress]
        assert len(set(labels)) == len(labels), "a short job has one line for each bar"
        assert bool(progress) == (name != "check") and not any("tensors" in line for line in progress)


def test_errors_go_to_standard_error(made, fledge):
    for words in failures(made):
        went = fledge(*words)
        assert went.code == 2 and not went.out and went.err, words
        assert not re.search("[\x00-\x09\x0b-\x1f\x7f…]", went.err), went.err
        assert went.err.count("\n") == 1 or went.err.startswith("Usage: "), went.err


WORDS = st.text(st.sampled_from("ab.,:;/鳥τ-$"), min_size=1, max_size=30)


@given(
    st.lists(WORDS, min_size=1),
    st.sampled_from(["", "; continue with: fledge train --resume a/run/with/a/path --seed 1"]),
)
def test_a_message_is_broken_at_spaces_alone(words, command):
    text = " ".join(words) + command
    lines = fit(text, WIDTH).split("\n")
    assert " ".join(lines) == text
    assert not misfits(lines)
    pairs = itertools.pairwise(lines[:-1] if command else lines)
    assert all(cell_len(f"{a} {b.split(' ')[0]}") > WIDTH for a, b in pairs), "no line is too short"
    assert lines[-1].endswith(command.partition(": ")[2]), "a command can be copied"


def test_messages_have_no_other_way():
    """Whatever a job prints goes through `fledge.io.display`, except results that are exact: JSON, a shell command,
    the version."""
    exact = {"record_text(record)", "json.dumps(as_json(report), indent=2)", "shlex.join(command)"}
    found = set()
    for file in [ROOT / "fledge/cli.py", *(ROOT / "fledge/io").glob("*.py"), *(ROOT / "fledge/commands").rglob("*.py")]:
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "print":
                found.add(ast.unparse(node.args[0]))
    assert found - exact == {"f'fledge {__version__}'", "fit_stream(f'fledge: {format_message(error)}', stream)"}


@pytest.mark.parametrize("command", ["", *COMMANDS])
def test_help_is_whole_on_every_width(command, fledge, monkeypatch):
    words = [*command.split(), "--help"]
    monkeypatch.setenv("COLUMNS", str(WIDTH))
    narrow = fledge(*words)
    assert narrow.code == 0 and not re.search("[\x00-\x09\x0b-\x1f\x7f…]", narrow.out)
    assert max(map(len, narrow.out.splitlines())) <= WIDTH, "also options and addresses"
    monkeypatch.setenv("COLUMNS", str(TABLE_WIDTH))
    monkeypatch.setattr(typer.rich_utils, "FORCE_TERMINAL", True)
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    wide = fledge(*words).out
    assert "╭" in wide and "…" not in wide
    flags = set(re.findall(r"--[\w-]+", narrow.out))
    assert flags and flags == set(re.findall(r"--[\w-]+", re.sub(r"\x1b\[[\d;]*m", "", wide)))


@pytest.mark.parametrize("seconds", [2, 50])
def test_a_passing_bar_prints_lines_only_if_it_takes_long(seconds, monkeypatch, capsys):
    clock = [0.0]
    display = ProgressDisplay()
    monkeypatch.setattr(display.console, "get_time", lambda: clock[0])
    monkeypatch.setattr(display_module.time, "monotonic", lambda: clock[0])
    with display.count("tensors of it", 100, unit="tensors", passing=True) as advance:
        for _ in range(100):
            clock[0] += seconds / 100
            advance()
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == (0 if seconds < LINE_INTERVAL else seconds // LINE_INTERVAL + 1)
    assert all(re.fullmatch(r"tensors of it \d+/100, .* left  2\.0 tensors/s", line) for line in lines)


def test_slow_work_is_shown_by_the_minute(monkeypatch, capsys):
    clock = [0.0]
    display = ProgressDisplay()
    monkeypatch.setattr(display.console, "get_time", lambda: clock[0])
    with display.count("answers", 2, unit="answers") as advance:
        for _ in range(2):
            clock[0] += 40
            advance()
    assert capsys.readouterr().err.endswith("1.5 answers/min\n")


def test_loading_counts_every_tensor_where_it_is_shown(made):
    counted: list[tuple[str, int, list[int]]] = []

    @contextmanager
    def counter(label, total, *, unit):
        counted.append((label, total, steps := []))
        assert unit == "tensors"
        yield steps.append

    def load() -> None:
        show_progress(counter)
        load_target(made / "target")

    contextvars.copy_context().run(load)
    ((label, total, steps),) = counted
    assert label == f"tensors of {made / 'target'}" and len(steps) == total > 50
    load_target(made / "target")
    assert len(counted) == 1, "only in the context that asked for it"
    with pytest.raises(OSError), counting_tensors("a"):
        raise OSError
