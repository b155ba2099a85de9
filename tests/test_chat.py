"""`fledge chat`: the conversation and its commands, through pipes, and on a terminal."""

from __future__ import annotations

import io
import json
import re
import shutil
from pathlib import Path

import pytest
from prompt_toolkit.application import create_app_session
from prompt_toolkit.data_structures import Size
from prompt_toolkit.input import DummyInput
from prompt_toolkit.output import DummyOutput
from rich.color import Color
from transformers import AutoTokenizer

from fledge.data.answering import AnswerWarning
from fledge.data.read import read_records
from fledge.decode.engine import Engine
from fledge.jobs.chat import converse
from fledge.jobs.chatting.commands import COMMANDS, Outcome, execute, help_text, is_command, text_of
from fledge.jobs.chatting.conversation import Conversation, Exchange, save
from fledge.jobs.chatting.screen import Pipes, Terminal
from fledge.jobs.chatting.session import Session, Settings, summary
from fledge.jobs.chatting.tints import TINTS
from fledge.models.weights import save_draft
from fledge.types import Sampling
from support.files import rows_of
from support.targets import (
    CHANNEL,
    CHANNEL_TOKENS,
    IN_CHANNEL,
    scripted_target_directory,
    tiny_draft,
    tiny_target,
    tiny_target_directory,
)
from support.terminal import TerminalOf

PAIR = Path(__file__).parents[1] / "fledge" / "demo"
BUNDLED = ["--target", PAIR / "target", "--draft", PAIR / "draft"]
NEVER = dict(show=lambda pieces: None, stopped=lambda: False)


def session_of(draft: bool = True, new: int = 8, **target) -> Session:
    model = tiny_target(**target)
    engine = Engine(model, tiny_draft(model) if draft else None)
    return Session(engine, Conversation(), Settings(Sampling(), new))


def ask(session: Session, asked: str, said: list[str] | None = None):
    return session.answer(asked, **NEVER, say=(said if said is not None else []).append)


def said(content: str) -> dict[str, str]:
    return {"role": "assistant", "content": content}


# -- the conversation ---------------------------------------------------------------------------------------------


def test_the_model_sees_the_conversation_so_far():
    session = session_of()
    session.set_system("Be short.")
    first = ask(session, "the young bird")
    ask(session, "tries again")
    messages = [
        {"role": "system", "content": "Be short."}, {"role": "user", "content": "the young bird"},
        {"role": "assistant", "content": first.text}, {"role": "user", "content": "tries again"},
    ]  # fmt: skip
    alone = session.engine.generate(messages, max_new_tokens=8)
    assert session.conversation.exchanges[1].answer["content"] == alone.text
    assert session.tokens == len(session.engine.template.prompt_ids(messages)) + len(alone.tokens)


def test_a_raw_conversation_continues_each_text_on_its_own():
    session = session_of()
    session.conversation = Conversation(raw=True)
    for asked in ("the young bird", "tries again"):
        assert ask(session, asked).text == session.engine.generate(asked, max_new_tokens=8).text
    with pytest.raises(ValueError, match="chat template"):
        session.set_system("a")


def test_a_full_context_drops_the_first_exchanges_and_says_so():
    session, said = session_of(max_position_embeddings=100, new=16), []
    for n in range(6):
        before = session.conversation.dropped
        ask(session, f"try {n}", said)
        assert session.tokens <= 100
        assert len(said) == len({e for e in said}) and bool(said) == bool(session.conversation.dropped)
        if session.conversation.dropped > before:
            dropped = session.conversation.dropped
            assert ("first exchange" if dropped == 1 else f"first {dropped} exchanges") in said[-1]
    assert said and session.conversation.prompt("x")[0]["content"] != "try 0"
    assert len(session.conversation.exchanges) == 6, "what was said is kept"
    before = list(session.conversation.exchanges)
    with pytest.raises(ValueError, match=r"was not sent\. Shorten it"):
        ask(session, "the young bird " * 50)
    assert session.conversation.exchanges == before
    session.conversation.reset()
    assert not session.conversation.dropped and not session.tokens


def test_a_stopped_answer_is_kept_and_a_failed_retry_changes_nothing():
    session, given = session_of(new=40), []
    answer = session.answer("the", given.append, lambda: len(given) >= 3, say=print)
    assert answer.ended == "stopped" and 0 < answer.tokens < 40
    assert "".join(text for pieces in given for text, _ in pieces) == answer.text
    assert session.conversation.exchanges == [Exchange("the", said(answer.text), session.tokens)]
    with pytest.raises(OSError), session.retrying() as asked:
        assert asked == "the" and not session.conversation.exchanges
        raise OSError
    assert session.conversation.exchanges[0].answer == said(answer.text)
    session.conversation.dropped = 1
    with pytest.raises(OSError), session.retrying():
        raise OSError
    assert session.conversation.dropped == 1, "what the model does not see is as before"


def test_the_line_below_an_answer_compares_with_and_without_the_draft():
    session = session_of(new=24)
    with_draft = ask(session, "the young bird")
    assert re.fullmatch(
        r"τ \d\.\d\d · [\d,.]+ tokens/s · \d+ tokens? · (complete|token limit)", summary(with_draft, None)
    )
    session.toggle_draft()
    with session.retrying() as asked:
        without = ask(session, asked)
    assert without.text == with_draft.text and without.tau is None
    line = summary(without, session.speeds[True])
    assert re.match(r"[\d,.]+ tokens/s \([\d,.]+ with\) · ", line) and len(line) < 60


def test_conversations_are_saved_as_training_data(tmp_path):
    session, file = session_of(), tmp_path / "chats.jsonl"
    with pytest.raises(ValueError, match="nothing was asked"):
        save(session.conversation, file)
    with pytest.raises(ValueError, match="nothing was asked"):
        save(session.conversation, tmp_path)
    ask(session, "the young bird")
    assert execute(session, f"/save {file}") == Outcome(f"saved; {file} has 1 row for fledge train --data")
    file.write_text(file.read_text().rstrip())  # without its last newline
    assert save(Conversation(raw=True, exchanges=[Exchange("a", said("b"))]), file) == 2
    chat, text = read_records([str(file)])
    assert [m["role"] for m in chat.messages] == ["user", "assistant"] and rows_of(file)[1]["completion"] == "b"
    assert text.text == "ab"
    with pytest.raises(ValueError, match="is a directory; choose another name"):
        save(session.conversation, tmp_path)
    assert save(session.conversation, tmp_path / "new" / "chats.jsonl") == 1
    (tmp_path / "notes.txt").write_text("to do\n")
    with pytest.raises(ValueError, match="not a JSON lines file"):
        save(session.conversation, tmp_path / "notes.txt")


# -- commands -----------------------------------------------------------------------------------------------------


def test_commands_change_the_settings_of_the_next_answer():
    session = session_of()
    for line, said in (
        ("/temperature 0.7", "temperature 0.7"), ("/top-p .9", "top-p 0.9"), ("/top-k 5", "top-k 5"),
        ("/seed 3", "seed 3"), ("/repetition-penalty 1.1", "repetition-penalty 1.1"),
        ("/max-new-tokens 3", "answers have at most 3 tokens"), ("/depth 2", "depth 2"), ("/depth auto", "depth auto"),
        ("/system Be short.", "system prompt set; it applies from now on"), ("/system", "system prompt: Be short."),
        ("/draft off", "the next answers are decoded without the draft"),
    ):  # fmt: skip
        assert execute(session, line).said == said
    assert session.settings == Settings(Sampling(0.7, 5, 0.9, 1.1, 3), 3, drafts=False)
    assert session.engine.chooser is not None and not session.drafts
    assert ask(session, "the").tokens <= 3
    assert execute(session, "/draft").said.endswith("without the draft") and not session.drafts, "only shown"
    assert execute(session, "/draft on").said == execute(session, "/draft").said
    assert session.drafts and "the" in execute(session, "/undo").said and not session.conversation.exchanges
    assert execute(session, "/system none").said == "system prompt removed"
    assert all(execute(session, f"/{name}").ends for name in ("quit", "exit", "bye"))
    assert execute(session, "/retry").retries
    assert all(f"/{name}" in help_text() for name in COMMANDS)


def test_settings_are_shown_exactly():
    session = session_of()
    for line in ("temperature 0.1234567", "temperature 1", "seed 12345678", "top-p 0.9999999", "top-k 1234567"):
        assert execute(session, f"/{line}").said == line
    assert execute(session, "/seed").said == "seed 12345678"


def test_a_sampled_answer_repeats_with_its_seed():
    session = session_of()
    execute(session, "/temperature 1")
    first = ask(session, "the").text
    for seed, same in ((0, True), (1, False)):
        execute(session, f"/seed {seed}")
        with session.retrying() as asked:
            assert (ask(session, asked).text == first) == same


@pytest.mark.parametrize(
    "line, problem",
    [("/temp 1", "no command /temp"), ("/top-k x", "a whole number"), ("/temperature -1", "at least 0"),
     ("/top-p 2", "outside"), ("/depth x", "or auto"), ("/depth 0", "drafts nothing"), ("/draft maybe", "on, off"),
     ("/reset now", "nothing behind it"), ("/save", "name of a file"), ("/undo", "nothing was asked"),
     ("/max-new-tokens 0", "at least one token")],
)  # fmt: skip
def test_wrong_commands_change_nothing(line, problem):
    session = session_of()
    before = session.settings, session.engine
    with pytest.raises(ValueError, match=problem):
        execute(session, line)
    assert (session.settings, session.engine) == before


def test_a_text_may_begin_with_a_slash():
    assert is_command("/help") and not is_command("//usr/bin") and text_of("//usr/bin") == "/usr/bin"


def test_without_a_draft_its_commands_say_so():
    session = session_of(draft=False)
    for line in ("/draft on", "/depth 3"):
        with pytest.raises(ValueError, match="there is no draft"):
            execute(session, line)
    assert execute(session, "/draft") == execute(session, "/depth") == Outcome("there is no draft")
    assert ask(session, "the").tau is None


# -- pipes --------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    root = tmp_path_factory.mktemp("made")
    target = tiny_target()
    save_draft(tiny_draft(target), root / "draft")
    tiny_target_directory(root)
    return root


def test_piped_lines_are_turns_and_answers_are_plain(made, fledge, monkeypatch):
    words = ["chat", "--target", made / "target", "--draft", made / "draft", "--max-new-tokens", 6, "--depth", 3]
    monkeypatch.setattr("sys.stdin", io.StringIO("the young bird\n\n/draft off\n/retry\ntries again\n"))
    went = fledge(*words)
    assert went.code == 0 and "\x1b" not in went.out + went.err
    assert len(re.findall(r"^τ .* · [1-6] tokens? · ", went.err, re.M)) == 1
    assert len(re.findall(r"^[\d,.]+ tokens/s \([\d,.]+ with\)", went.err, re.M)) == 2
    generated = fledge("generate", "--target", made / "target", "--prompt", "the young bird", "--max-new-tokens", 6)
    assert went.out.startswith(2 * generated.out), "with and without the draft"
    monkeypatch.setattr("sys.stdin", io.StringIO("/nothing\nthe\n"))
    assert fledge(*words).code == 2, "nobody is there to correct it"


def test_the_bundled_pair_answers(fledge, monkeypatch):
    monkeypatch.setattr("sys.stdin", io.StringIO("What is 12 + 13?"))
    went = fledge("chat", *BUNDLED, "--max-new-tokens", 12)
    generated = fledge("generate", *BUNDLED, "--prompt", "What is 12 + 13?", "--max-new-tokens", 12)
    assert went.code == 0 and went.out == generated.out


def test_a_target_without_a_chat_template_takes_no_system_prompt(made, fledge, monkeypatch, tmp_path):
    target = shutil.copytree(made / "target", tmp_path / "target")
    tokenizer = AutoTokenizer.from_pretrained(target)
    tokenizer.chat_template = None
    (target / "chat_template.jinja").unlink(missing_ok=True)
    tokenizer.save_pretrained(target)
    monkeypatch.setattr("sys.stdin", io.StringIO("a"))
    refused = fledge("chat", "--target", target, "--system", "a")
    assert refused.code == 2 and "no chat template; leave --system out" in refused.err


class Shown(Pipes):
    """Pipes with one line of input, which remember the messages."""

    def __init__(self, line: str):
        super().__init__(lambda text: None)
        self.left, self.failed = [line], []

    def ask(self):
        return self.left.pop() if self.left else None

    def fail(self, error):
        self.failed.append(str(error))


def test_an_error_keeps_the_conversation_and_goes_on(capsys):
    session, screen = session_of(max_position_embeddings=64), Shown("the young bird " * 60)
    converse(session, screen)
    assert "was not sent" in screen.failed[0] and not session.conversation.exchanges


# -- a terminal ---------------------------------------------------------------------------------------------------


def _luminance(colour: str) -> float:
    parts = [c / 255 for c in Color.parse(colour).triplet]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in parts]
    return sum(w * c for w, c in zip((0.2126, 0.7152, 0.0722), linear, strict=True))


@pytest.mark.parametrize("tint", TINTS)
def test_tints_are_readable_on_light_and_dark_terminals(tint):
    light = _luminance(tint)
    assert min(1.05 / (light + 0.05), (light + 0.05) / 0.05) > 3.5


def wait_for_prompt(terminal: TerminalOf) -> None:
    """Waits for the input line, which has the bar below it."""
    shown = terminal.screen
    terminal.wait(lambda: "F2: o" in ([line for line in shown.display if line.strip()] or [""])[-1])


def test_a_conversation_on_a_narrow_terminal():
    asked = "Tell me a story about a cat."
    words = [*BUNDLED, "--max-new-tokens", 400, "--temperature", 4]  # so hot that no answer ends soon

    def answer() -> list[str]:
        shown = [line for line in terminal.lines if line.strip()]
        return shown[next(i for i, line in enumerate(shown) if line.startswith(f"> {asked}")) + 1 :]

    with TerminalOf("chat", *words, width=60) as terminal:
        terminal.wait_for("/help lists the commands", "draft on (depth", "F2: off")
        wait_for_prompt(terminal)
        terminal.type(f"{asked}\r")
        terminal.wait(lambda: f"> {asked}" in terminal.text and len(answer()) > 2)
        terminal.type("\x03")
        terminal.wait_for("· stopped")
        wait_for_prompt(terminal)
        assert re.search(r"^τ \d.* tokens/s · \d+ tokens", terminal.text, re.M)
        terminal.type("\x1bOQ")
        terminal.wait_for("draft off, F2: on")
        terminal.type("/max-new-tokens 20\r")
        terminal.wait_for("at most 20 tokens")
        wait_for_prompt(terminal)
        terminal.type("\x1b[A\x1b[A\r")  # the first text again
        compared = r"^[\d,.]+ tokens/s \([\d,.]+ with\) · 20 tokens · token limit"
        terminal.wait(lambda: re.search(compared, terminal.text, re.M))
        wait_for_prompt(terminal)
        terminal.type("a\x1b\rb")  # two lines
        terminal.wait(lambda: re.search(r"^> a\n  b", terminal.text, re.M))
        terminal.type("\x03")
        terminal.wait(lambda: terminal.screen.display[terminal.screen.cursor.y].strip() == ">")
        terminal.type("\x1bOQ")
        terminal.wait_for("draft on")
        wait_for_prompt(terminal)
        terminal.type("/reset\r")
        terminal.wait_for("a new conversation")
        wait_for_prompt(terminal)
        terminal.type("/temperature 0\r")
        terminal.wait_for("temperature 0 ·")
        wait_for_prompt(terminal)
        terminal.type("What is 12 + 13?\r")
        terminal.wait(lambda: re.search(r"^> What is 12 \+ 13\?\n(.*\n)+τ \d", terminal.text, re.M))
        start = next(i for i, line in enumerate(terminal.lines) if line.startswith("> What is 12"))
        tints = {tint.removeprefix("#") for tint in TINTS}
        assert any(tints & terminal.colours(line) for line in terminal.lines[start:]), "tinted by who proposed it"
        wait_for_prompt(terminal)
        terminal.type("\x04")
        assert terminal.wait_for_end() == 0
        assert terminal.text.count(asked) >= 2


def test_the_bar_of_a_narrow_terminal_shows_whole_parts(monkeypatch):
    session = session_of(max_position_embeddings=2048)
    monkeypatch.setattr(Session, "tokens", 1130)
    monkeypatch.setattr(Session, "longest", 2048)
    with create_app_session(input=DummyInput(), output=DummyOutput()):
        screen = Terminal(session)

    def bar(columns: int) -> str:
        monkeypatch.setattr(screen._line.output, "get_size", lambda: Size(rows=24, columns=columns))
        return screen._bar()

    rest = "temperature 0 · 1,130/2,048 tokens"
    assert bar(80) == f"draft on (depth 5), F2: off · {rest}"
    assert bar(60) == f"draft on, F2: off · {rest}"
    assert bar(40) == rest


def test_without_colours_and_with_hostile_text(made, tmp_path):
    script = "import sys; from fledge.decode.proposers import AttributedText as A; from fledge.cli import main\n" + (
        "A.finish = lambda self: [('<think>\\x1b[31mred</think>', 1)]\nsys.argv[0] = 'fledge'\nmain()"
    )
    module = tmp_path / "hostile.py"
    module.write_text(script)
    words = ["chat", "--target", made / "target", "--draft", made / "draft", "--max-new-tokens", 4]
    with TerminalOf(*words, program=[str(module)], NO_COLOR="1") as terminal:
        wait_for_prompt(terminal)
        terminal.type("the\r")
        terminal.wait_for(r"\x1b[31mred")
        wait_for_prompt(terminal)
        assert terminal.colours(r"\x1b[31m") == {"default"} and b"\x1b[31m" not in terminal.written
        terminal.type("\x04")
        assert terminal.wait_for_end() == 0


def test_rows_are_json(tmp_path):
    conversation = Conversation(system="é", exchanges=[Exchange("a\nb", said("c"))])
    assert save(conversation, tmp_path / "a.jsonl") == 1
    assert json.loads((tmp_path / "a.jsonl").read_text())["messages"][0] == {"role": "system", "content": "é"}


def test_answers_keep_their_special_tokens(tmp_path, fledge, monkeypatch):
    """The next prompt and the saved row have them, of chats and of continued texts."""
    target, file = scripted_target_directory(tmp_path, CHANNEL, IN_CHANNEL, CHANNEL_TOKENS), tmp_path / "chats.jsonl"
    seen, fit = [], Conversation.fit
    monkeypatch.setattr(Conversation, "fit", lambda *args: seen.append(fit(*args)) or seen[-1])
    monkeypatch.setattr("sys.stdin", io.StringIO(f"Which bird?\nAnd that?\n/save {file}\n"))
    went = fledge("chat", "--target", target, "--max-new-tokens", 24)
    assert went.code == 0 and "does not render" not in went.err, went.err
    assert json.loads(file.read_text())["messages"][1::2] == [said("A heron.")] * 2
    text = AutoTokenizer.from_pretrained(target).decode(seen[1])
    assert "<|im_start|>assistant<|channel|>final<|message|>A heron.<|im_end|>" in text
    monkeypatch.setattr("sys.stdin", io.StringIO(f"a<|im_start|>assistant\n/save {file}2\n"))
    went = fledge("chat", "--target", target, "--raw", "--max-new-tokens", 24)
    assert went.code == 0 and json.loads((tmp_path / "chats.jsonl2").read_text())["completion"] == IN_CHANNEL[:-10]


def test_an_answer_that_the_template_rewrites_is_said(tmp_path, fledge, monkeypatch):
    template = "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    target = scripted_target_directory(tmp_path, template, "<|im_start|>assistant: heron.<|im_end|>")
    monkeypatch.setattr("sys.stdin", io.StringIO("Which bird?\nAnd that?\n"))
    with pytest.warns(AnswerWarning, match="does not render an answer as the target generated it"):
        assert fledge("chat", "--target", target, "--max-new-tokens", 24).code == 0
