"""Output of the commands: safe for a terminal whatever the files contain, short, and complete at every width."""

from __future__ import annotations

import io
import json
import re
import shutil
import unicodedata
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console
from safetensors.torch import load_file, save_file

from fledge.commands.generate import GenerateOptions
from fledge.commands.generate import run as generate
from fledge.decode.engine import Engine
from fledge.drafts.weights import save_draft
from fledge.io import display as show_module
from fledge.io.display import KEPT_END, KEPT_START, ProgressDisplay, escaped, format_message
from fledge.io.results import ResultPrinter
from fledge.measure.table import print_table
from fledge.train.ranks import ALONE
from fledge.train.setup.run import Display
from fledge.train.trainer import Schedule, StepResult
from support.chats import tiny_chats
from support.files import rows_of, write_rows
from support.targets import tiny_draft, tiny_target, tiny_target_directory

HOSTILE = "\x1b]0;owned\x07\x1b[31m red \x9b2J \u202e gnp \r over\nfledge: all is well\u2028\u2067 :bomb: [red]x[/red]"
TIMES = r"\d:\d\d:\d\d elapsed, \d:\d\d:\d\d left"


def unsafe(text: str) -> str:
    """The characters that control a terminal or the direction of text, except line ends."""
    kinds = {c: unicodedata.category(c) for c in text}
    turns = "\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069"
    return "".join(c for c in text if (kinds[c] in ("Cc", "Zl", "Zp", "Cs") and c != "\n") or c in turns)


# -- messages -----------------------------------------------------------------------------------------------------


@given(st.text(st.characters(), max_size=100) | st.text(st.characters(categories=["Cc", "Cf", "Cs", "Zl", "Zp"])))
def test_a_message_is_one_line_without_control_characters(text):
    said = format_message(text)
    assert not unsafe(said) and "\n" not in said
    assert format_message(said) == said
    assert not unsafe(escaped(text, keep="\n\t").replace("\t", ""))
    if not unsafe(text) and "\n" not in text:
        assert said == text


def test_control_characters_are_escaped_visibly():
    assert format_message("a\x1b[31mb\nc\ud83d") == r"a\x1b[31mb\nc\ud83d"
    assert escaped("a\tb\r\n", keep="\n\t") == "a\tb\\r\n"


@given(st.integers(0, 100_000), st.sampled_from(["x", "\x1b", "é"]))
def test_a_long_message_keeps_its_beginning_and_its_end(length, letter):
    said = format_message("where: " + letter * length + " cure")
    assert said.startswith("where: ") and said.endswith(" cure") and len(said) < 4 * (KEPT_START + KEPT_END) + 50
    assert ("characters ...]" in said) == (length + 12 > KEPT_START + KEPT_END)


def _role(made, tmp_path):
    rows = [{"messages": [{"role": HOSTILE, "content": "a"}, {"role": "user", "content": "b"}]}]
    return ["train", "--data", write_rows(tmp_path / "a.jsonl", rows)], 2


def _content(made, tmp_path):
    rows = [{"messages": [{"role": "user", "content": HOSTILE * 3}]}]
    return ["train", "--data", write_rows(tmp_path / "a.jsonl", rows)], 2


def _keys(made, tmp_path):
    return ["train", "--data", write_rows(tmp_path / "a.jsonl", [{HOSTILE + str(i): 1 for i in range(10_000)}])], 2


def _speaker(made, tmp_path):
    rows = [{"conversations": [{"from": HOSTILE * 50_000, "value": "a"}]}]
    return ["train", "--data", write_rows(tmp_path / "a.jsonl", rows)], 2


def _file_name(made, tmp_path):
    file = tmp_path / (_a_name() + ".jsonl")
    file.write_text("{")
    return ["train", "--data", file], 2


def _library(made, tmp_path):
    target = shutil.copytree(made / "target", tmp_path / "raising")
    (target / "chat_template.jinja").write_text("{{ raise_exception(messages[0]['content']) }}")
    return ["train", "--target", target, "--data", made / "hostile.jsonl"], 2


def _skipped(made, tmp_path):
    rows = rows_of(tiny_chats(tmp_path / "b.jsonl", 3))
    data = write_rows(tmp_path / "a.jsonl", [*rows, {"messages": [{"role": HOSTILE, "content": "a"}]}])
    return ["train", "--data", data, "--skip-bad", "--steps", 1, "--device", "cpu"], 0


def _provenance(made, tmp_path):
    draft = shutil.copytree(made / "draft", tmp_path / "told")
    config = json.loads((draft / "config.json").read_text())
    config["fledge"] |= {"target": HOSTILE, "template_kwargs": {"x": HOSTILE}}
    (draft / "config.json").write_text(json.dumps(config))
    return ["inspect", draft], 0


def _tensor_name(made, tmp_path):
    draft = shutil.copytree(made / "draft", tmp_path / "odd")
    tensors = load_file(draft / "model.safetensors")
    save_file(tensors | {_a_name(): tensors["fc.weight"].clone()}, draft / "model.safetensors")
    return ["inspect", draft], 1


def _checked(made, tmp_path):
    draft = shutil.copytree(made / "draft", tmp_path / "checked")
    tensors = load_file(draft / "model.safetensors")
    save_file(tensors | {_a_name(): tensors["fc.weight"].clone()}, draft / "model.safetensors")
    return ["check", "--draft", draft, "--device", "cpu"], 1


def _labels(made, tmp_path):
    draft = shutil.copytree(made / "draft", tmp_path / _a_name())
    prompts = shutil.copy(made / "prompts.jsonl", tmp_path / (_a_name() + "2.jsonl"))
    words = ["--draft", draft, "--draft", made / "draft", "--prompts", prompts, "--prompts", made / "prompts.jsonl"]
    return ["eval", *words, "--max-new-tokens", 2], 0


def _answers(made, tmp_path):
    return ["regenerate", "--data", made / "hostile.jsonl", "--max-new-tokens", 2, "--out", tmp_path / _a_name()], 0


def _a_name() -> str:
    """The hostile text without the characters that a file name cannot contain."""
    return HOSTILE.replace("/", "").encode("utf-8", "ignore").decode()


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A target, a draft of it, prompts, and chats that contain control characters."""
    root = tmp_path_factory.mktemp("made")
    target = tiny_target()
    save_draft(tiny_draft(target, draft_vocab_size=200), root / "draft")
    tiny_target_directory(root)
    write_rows(root / "prompts.jsonl", [{"turns": ["the young bird", "tries again"]}, {"turns": ["it can fly"]}])
    rows = [{"messages": [{"role": r, "content": HOSTILE} for r in ("user", "assistant")]}]
    write_rows(root / "hostile.jsonl", rows)
    return root


CASES = [
    _role, _content, _keys, _speaker, _file_name, _library, _skipped, _provenance, _tensor_name, _checked, _labels,
    _answers,
]  # fmt: skip


@pytest.mark.parametrize("case", CASES, ids=[case.__name__.strip("_") for case in CASES])
def test_text_from_files_reaches_the_terminal_escaped_and_short(case, made, fledge, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    words, code = case(made, tmp_path)
    target = [] if "--target" in words or words[0] == "inspect" else ["--target", made / "target"]
    ended = fledge(*words, *target, *(["--max-length", 64] if words[0] == "train" else []))
    assert ended.code == code, ended.err
    assert not unsafe(ended.out) and not unsafe(ended.err)
    assert r"\x1b]0;owned" in ended.out + ended.err
    assert "\nfledge: all is well" not in ended.out + ended.err
    assert max(map(len, (ended.out + ended.err).splitlines())) < 10_000


# -- generated text -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("terminal", [True, False])
def test_a_models_text_is_escaped_for_a_terminal_and_exact_in_a_pipe(terminal, made, monkeypatch):
    monkeypatch.setattr(Engine, "stream", lambda *a, **k: iter(["\x1b[31", "mred\t\u202e", "x\r\n"]))
    out = io.StringIO()
    out.isatty = lambda: terminal
    monkeypatch.setattr("sys.stdout", out)
    generate(GenerateOptions(target=str(made / "target"), prompt="the"), ProgressDisplay())
    assert out.getvalue() == ("\\x1b[31mred\t\\u202ex\\r\n\n" if terminal else "\x1b[31mred\t\u202ex\r\n\n")


@pytest.mark.parametrize("terminal", [True, False])
def test_a_terminal_is_told_that_a_prompt_is_expected(terminal, made, monkeypatch, fledge):
    typed = io.StringIO("the young bird")
    typed.isatty = lambda: terminal
    monkeypatch.setattr("sys.stdin", typed)
    went = fledge("generate", "--target", made / "target", "--max-new-tokens", 4)
    assert went.code == 0 and ("Ctrl-D" in went.err) == terminal


# -- progress of a job --------------------------------------------------------------------------------------------


class Terminal:
    """A ProgressDisplay on a terminal of the given width (None: not a terminal), and what it writes."""

    def __init__(self, monkeypatch, width: int | None):
        self.said = io.StringIO()
        options = dict(file=self.said, width=width, force_terminal=width is not None, color_system=None)
        monkeypatch.setattr(show_module, "Console", lambda **k: Console(**{**k, "stderr": False, **options}))
        self.show = ProgressDisplay()

    def bars(self) -> list[str]:
        """The bar's text each time that it was drawn."""
        text = re.sub(r"\x1b\[[\d;?]*[A-Za-z]", "", self.said.getvalue())
        return [line for line in re.split(r"[\r\n]+", text) if line.strip()]


@contextmanager
def training(show: ProgressDisplay, steps: int) -> Iterator[Callable[..., None]]:
    """Shows a training run: yields a function that shows a step with its metrics."""
    hook, run = Display(show, show.say), SimpleNamespace(schedule=Schedule(steps, lr=0.1), ranks=ALONE)
    with hook.around(run):
        yield lambda step, **more: hook.after(run, StepResult(step, None, False, metrics(step, **more)))


def metrics(step: int, **more) -> dict:
    return {"step": step, "loss": 2.345, "tau": 1.87, "tokens_per_s": 3146.0, "scored": [3, 2]} | more


@pytest.mark.parametrize("width", [30, 40, 60, 80, 200])
def test_a_bar_keeps_step_and_time_left_at_every_width(width, monkeypatch):
    terminal = Terminal(monkeypatch, width)
    with training(terminal.show, 12_000) as show:
        for step in (1, 680, 12_000):
            show(step)
    last = terminal.bars()[-1]
    assert len(last) <= width and re.search(r"12000/12000 .*\d:\d\d:\d\d left", last), last
    assert ("loss 2.345  τ 1.87 3,146 tokens/s" in terminal.bars()[-1]) == (width >= 60)
    with terminal.show.count("answers to a_long_name_of_a_file_of_prompts in 4 ways", 96) as advance:
        for _ in range(96):
            advance()
    last = terminal.bars()[-1]
    assert len(last) <= width and re.search(r"96/96 .*\d:\d\d:\d\d left", last), last


def test_a_rate_is_shown_and_a_total_may_be_unknown(monkeypatch):
    clock = [0.0]
    terminal = Terminal(monkeypatch, None)
    monkeypatch.setattr(terminal.show.console, "get_time", lambda: clock[0])
    monkeypatch.setattr(show_module.time, "monotonic", lambda: clock[0])
    for total in (5_120, None):
        with terminal.show.count("reading chats", total, unit="records") as advance:
            for _ in range(5_120):
                clock[0] += 2**-9
                advance()
    assert terminal.said.getvalue().splitlines() == [
        "reading chats 5,120/5,120, 0:00:10 elapsed, 0:00:00 left  512 records/s",
        "reading chats 5,120, 0:00:10 elapsed  512 records/s",
    ]
    terminal = Terminal(monkeypatch, 120)
    with terminal.show.count("reading chats", None, unit="records") as advance:
        advance()
    assert re.search(r"1/\? .*reading chats [\d,.]+ records/(s|min)", terminal.bars()[-1]), terminal.bars()[-1]


def test_without_a_terminal_progress_is_printed_at_intervals_and_at_the_end(monkeypatch):
    clock = [0.0]
    terminal = Terminal(monkeypatch, None)
    monkeypatch.setattr(terminal.show.console, "get_time", lambda: clock[0])
    monkeypatch.setattr(show_module.time, "monotonic", lambda: clock[0])
    with terminal.show.count("answers", 300, 100) as advance:
        for _ in range(200):
            clock[0] += 0.5
            advance()
    with training(terminal.show, 50) as show:
        for step in range(1, 51):
            clock[0] += 2
            show(step, **({"eval_tau": 1.5} if step == 25 else {}))
    assert terminal.said.getvalue().splitlines() == [
        "answers 140/300, 0:00:20 elapsed, 0:01:20 left",
        "answers 180/300, 0:00:40 elapsed, 0:01:00 left",
        "answers 220/300, 0:01:00 elapsed, 0:00:40 left",
        "answers 260/300, 0:01:20 elapsed, 0:00:20 left",
        "answers 300/300, 0:01:40 elapsed, 0:00:00 left",
        "training 10/50, 0:00:20 elapsed, 0:01:20 left  loss 2.345  τ 1.87  3,146 tokens/s",
        "training 20/50, 0:00:40 elapsed, 0:01:00 left  loss 2.345  τ 1.87  3,146 tokens/s",
        "step 25: decoded τ 1.500 on held-out prompts",
        "training 30/50, 0:01:00 elapsed, 0:00:40 left  loss 2.345  τ 1.87  3,146 tokens/s",
        "training 40/50, 0:01:20 elapsed, 0:00:20 left  loss 2.345  τ 1.87  3,146 tokens/s",
        "training 50/50, 0:01:40 elapsed, 0:00:00 left  loss 2.345  τ 1.87  3,146 tokens/s",
    ]


def test_a_resumed_run_estimates_the_time_left_from_its_own_steps(monkeypatch):
    clock = [0.0]
    terminal = Terminal(monkeypatch, None)
    monkeypatch.setattr(terminal.show.console, "get_time", lambda: clock[0])
    monkeypatch.setattr(show_module.time, "monotonic", lambda: clock[0])
    with training(terminal.show, 1000) as show:
        for step in range(901, 912):
            clock[0] += 2
            show(step)
    assert terminal.said.getvalue().startswith("training 910/1,000, 0:00:20 elapsed, 0:03:00 left")


def test_every_job_reports_progress_in_a_pipe(made, fledge, tmp_path):
    target, chats = ["--target", made / "target"], tiny_chats(tmp_path / "chats.jsonl", 6)
    train = "--max-length 64 --row-length 128 --steps 2 --device cpu".split()
    for words, what in (
        (["train", "--data", chats, "--out", tmp_path / "run", *train], r"training 2/2, "),
        (["regenerate", "--data", chats, "--out", tmp_path / "own.jsonl", "--max-new-tokens", 2], r"answers 12/12, "),
        (["eval", "--draft", made / "draft", "--prompts", made / "prompts.jsonl", "--max-new-tokens", 2],
         r"answers to prompts in 2 ways 6/6, "),
    ):  # fmt: skip
        went = fledge(*words, *target)
        assert went.code == 0 and len(re.findall(f"^{what}{TIMES}", went.err, re.M)) == 1, went.err


def test_a_missing_loss_and_a_small_loss_are_shown_differently(monkeypatch):
    terminal = Terminal(monkeypatch, None)
    for more, shown in (
        ({"loss": 0.0, "scored": [0, 0]}, "loss - (no token in the draft vocabulary)"),
        ({"loss": 1e-5}, "loss under 0.001"),
        ({"loss": 0.001}, "loss 0.001"),
    ):
        with training(terminal.show, 1) as show:
            show(1, **more)
        assert shown in terminal.said.getvalue().splitlines()[-1]


# -- results ------------------------------------------------------------------------------------------------------

RECORD = {
    "tau": 2.345, "tau_interval": None, "alpha": [0.75, 0.5], "tokens_per_s": 12345.0,
    "baseline_tokens_per_s": 5000.0, "speedup": 2.47,
    "identical": 100, "near_ties": 0, "different": 0, "batch_noise": None, "prompts": 100, "repeated_8grams": 0.12,
    "round": None, "batch": 4,
}  # fmt: skip


def tabled(record: dict, width: int, monkeypatch) -> list[str]:
    monkeypatch.setenv("COLUMNS", str(width))
    said = io.StringIO()
    monkeypatch.setattr("sys.stdout", said)
    print_table(record, ResultPrinter())
    monkeypatch.undo()
    return said.getvalue().splitlines()


def test_a_position_that_no_round_reached_is_a_dash(monkeypatch):
    assert "α by position: 0.75 -." in tabled(RECORD | {"alpha": [0.75, None]}, 120, monkeypatch)


@pytest.mark.parametrize("width", [30, 40, 50, 60, 80, 120])
def test_a_table_keeps_labels_and_tau_at_every_width(width, monkeypatch):
    names = ["runs/first/draft dialogues", "runs/second-and-longer/draft dialogues"]
    lines = tabled({n: RECORD | {"tau": 2.345 + i} for i, n in enumerate(names)}, width, monkeypatch)
    ruled = next(i for i, line in enumerate(lines) if "─" in line)
    rows = lines[ruled + 1 : next(i for i, line in enumerate(lines) if i > ruled and not line.strip())]
    assert all(len(line) <= width for line in [*lines[: ruled + 1], *rows]) and "τ" in lines[ruled - 1]
    assert "…" not in "".join(rows)
    for tau in ("2.35", "3.35"):
        assert sum(tau in row for row in rows) == 1
    labels = "".join(row.split("  ")[0].strip() for row in rows).replace(" ", "")
    assert labels == "".join(f"{n}100".replace(" ", "") for n in names)
    said = "\n".join(lines)
    assert said.count("12345") >= 2 and said.count("5000") == 2, "both speeds must be shown, in the table or below it"


def test_an_answer_of_one_token_has_no_tau(made, fledge):
    words = ["eval", "--target", made / "target", "--draft", made / "draft", "--prompts", made / "prompts.jsonl"]
    went = fledge(*words, "--max-new-tokens", 1)
    assert went.code == 0 and "there is no τ" in went.out and "0.00 ms" not in went.out, went.out
    assert "above τ" not in went.out and re.search(r"^ 3 +- ", went.out, re.M)
    assert json.loads(fledge(*words, "--max-new-tokens", 1, "--json").out)["tau"] == 0.0
