"""`fledge chat`: the conversation and its commands, through pipes, and on a terminal."""

from __future__ import annotations

import io
import re
import shutil
from pathlib import Path

import pytest
from rich.color import Color
from transformers import AutoTokenizer

from fledge.chat import Pipes, Reply, Session
from fledge.commands.chat import converse, execute
from fledge.data.answering import AnswerWarning
from fledge.decode.load import load
from fledge.drafts.weights import save_draft
from fledge.io.results import TINTS
from fledge.types import Sampling
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


def session_of(draft: bool = True, new: int = 8, sampling: Sampling | None = None, chat: dict | None = None, **target):
    model = tiny_target(**target)
    engine = load(model, tiny_draft(model) if draft else None)
    return Session(engine, sampling or Sampling(), new, **chat or {})


def ask(session: Session, asked: str, said: list[str] | None = None) -> tuple[str, Reply]:
    """The text of an answer, and its figures."""
    given = []
    answer = session.answer(asked, given.extend, lambda: False, say=(said if said is not None else []).append)
    return "".join(text for text, _ in given), answer


def said(content: str) -> dict[str, str]:
    return {"role": "assistant", "content": content}


# -- the conversation ---------------------------------------------------------------------------------------------


def test_the_model_sees_the_conversation_so_far():
    session = session_of(chat=dict(system="Be short."))
    first, _ = ask(session, "the young bird")
    ask(session, "tries again")
    messages = [
        {"role": "system", "content": "Be short."}, {"role": "user", "content": "the young bird"}, said(first),
        {"role": "user", "content": "tries again"},
    ]  # fmt: skip
    alone = session.engine.generate(messages, max_new_tokens=8)
    assert session.messages == [*messages, said(alone.text)]
    assert execute(session, "/reset") == "a new conversation" and session.messages == messages[:1]


def test_a_raw_conversation_continues_each_text_on_its_own():
    session = session_of(chat=dict(raw=True))
    for asked in ("the young bird", "tries again"):
        assert ask(session, asked)[0] == session.engine.generate(asked, max_new_tokens=8).text


@pytest.mark.parametrize("system", [None, "Be short."])
def test_a_full_context_drops_the_first_messages_and_says_so(system):
    session, dropped = session_of(max_position_embeddings=100, new=16, chat=dict(system=system)), []
    for n in range(6):
        before, told = len(session.messages), len(dropped)
        _, answer = ask(session, f"try {n}", dropped)
        assert len(session.engine.reader.template.prompt_ids(session.messages[:-1])) + answer.tokens <= 100
        lost = before + 2 - len(session.messages)
        assert (f"its first {lost} messages were dropped" in dropped[-1]) if lost else len(dropped) == told
    assert dropped and session.messages[0] != {"role": "user", "content": "try 0"}
    assert session.messages[0]["role"] == ("system" if system else "user")
    before = list(session.messages)
    with pytest.raises(ValueError, match=r"was not sent\. Shorten it"):
        ask(session, "the young bird " * 50)
    assert session.messages == before


def test_a_stopped_answer_is_kept():
    session, given = session_of(new=40), []
    answer = session.answer("the", given.append, lambda: len(given) >= 3, say=print)
    assert answer.ended == "stopped" and 0 < answer.tokens < 40
    text = "".join(text for pieces in given for text, _ in pieces)
    assert session.messages == [{"role": "user", "content": "the"}, said(text)]


def test_the_draft_changes_the_line_below_an_answer_and_not_the_text():
    session = session_of(new=24)
    text, with_draft = ask(session, "the young bird")
    figures = r"[\d,.]+ tokens/s · draft {} · \d+ tokens? · (complete|token limit)"
    assert re.fullmatch(r"τ \d\.\d\d · " + figures.format("on"), with_draft.summary)
    session.reset()
    session.switch_draft(False)
    again, without = ask(session, "the young bird")
    assert again == text and without.tau is None
    assert re.fullmatch(figures.format("off"), without.summary) and len(without.summary) < 60


def test_a_sampled_answer_repeats_with_its_seed_and_not_within_a_conversation():
    session = session_of(sampling=Sampling(1.0), new=16, chat=dict(raw=True))
    first, second = ask(session, "the")[0], ask(session, "the")[0]
    session.reset()
    assert [ask(session, "the")[0] for _ in range(2)] == [first, second] and first != second
    assert ask(session_of(sampling=Sampling(1.0, seed=1), new=16, chat=dict(raw=True)), "the")[0] != first


# -- commands -----------------------------------------------------------------------------------------------------


def test_a_command_switches_the_draft():
    session = session_of()
    assert execute(session, "/draft off").endswith("without the draft") and not session.drafts
    assert execute(session, "/draft on").endswith("with the draft") and session.drafts
    assert all(command in execute(session, "/help") for command in ("/draft on", "/reset", "/help", "/exit"))


@pytest.mark.parametrize("line", ["/temp 1", "/draft", "/draft maybe", "/reset now", "/usr/bin"])
def test_wrong_commands_change_nothing(line):
    session = session_of()
    ask(session, "the")
    before = session.drafts, list(session.messages)
    with pytest.raises(ValueError, match=r"is no command; there are .* with /, put a space before it"):
        execute(session, line)
    assert (session.drafts, session.messages) == before


def test_without_a_draft_the_command_says_so():
    session = session_of(draft=False)
    with pytest.raises(ValueError, match="there is no draft"):
        execute(session, "/draft on")
    _, answer = ask(session, "the")
    assert answer.tau is None and "draft" not in answer.summary


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
    monkeypatch.setattr(
        "sys.stdin", io.StringIO("the young bird\n\n/draft off\n/reset\nthe young bird\n/exit\nnot read\n")
    )
    went = fledge(*words)
    assert went.code == 0 and "\x1b" not in went.out + went.err
    assert len(re.findall(r"^τ .* · draft on · [1-6] tokens? · ", went.err, re.M)) == 1
    assert len(re.findall(r"^[\d,.]+ tokens/s · draft off · ", went.err, re.M)) == 1
    generated = fledge("generate", "--target", made / "target", "--prompt", "the young bird", "--max-new-tokens", 6)
    assert went.out == 2 * generated.out, "with and without the draft"
    monkeypatch.setattr("sys.stdin", io.StringIO("/nothing\nthe\n"))
    assert fledge(*words).code == 2, "nobody is there to correct it"
    monkeypatch.setattr("sys.stdin", io.StringIO(" /usr/bin\n"))
    assert fledge(*words).code == 0, "a text that begins with a slash"


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
    assert "was not sent" in screen.failed[0] and not session.messages


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
    """Waits for an empty input line."""
    terminal.wait(lambda: terminal.screen.display[terminal.screen.cursor.y].strip() == ">")


def test_a_conversation_on_a_narrow_terminal():
    asked = "Tell me a story about a cat."

    def answer() -> list[str]:
        shown = [line for line in terminal.lines if line.strip()]
        return shown[next(i for i, line in enumerate(shown) if line.startswith(f"> {asked}")) + 1 :]

    words = [*BUNDLED, "--max-new-tokens", 400, "--temperature", 4]  # so hot that no answer ends soon
    with TerminalOf("chat", *words, width=60) as terminal:
        terminal.wait_for("/help lists the commands", "Tokens that the draft proposed at depth 1 2 3 4+")
        wait_for_prompt(terminal)
        terminal.type(f"{asked}\r")
        terminal.wait(lambda: f"> {asked}" in terminal.text and len(answer()) > 2)
        terminal.type("\x03")
        terminal.wait_for("· stopped")
        wait_for_prompt(terminal)
        assert re.search(r"^τ \d.* tokens/s · draft on · \d+ tokens", terminal.text, re.M)
        terminal.type("/draft off\r")
        terminal.wait_for("decoded without the draft")
        wait_for_prompt(terminal)
        terminal.type("\x1b[A\x1b[A\r")  # the first text again
        terminal.wait(lambda: terminal.text.count(f"> {asked}") == 2 and len(answer()) > 12)
        terminal.type("\x03")
        terminal.wait(lambda: re.search(r"^[\d,.]+ tokens/s · draft off · \d+ tokens · stopped", terminal.text, re.M))
        wait_for_prompt(terminal)
        terminal.type("\x1b[200~a\rb\x1b[201~")  # two lines that are pasted
        terminal.wait(lambda: re.search(r"^> a\nb", terminal.text, re.M))
        terminal.type("\x03")
        wait_for_prompt(terminal)
        terminal.type("\x04")
        assert terminal.wait_for_end() == 0


def test_an_answer_is_tinted_by_who_proposed_it():
    with TerminalOf("chat", *BUNDLED, width=60) as terminal:
        wait_for_prompt(terminal)
        terminal.type("What is 12 + 13?\r")
        terminal.wait(lambda: re.search(r"^> What is 12 \+ 13\?\n(.*\n)+τ \d", terminal.text, re.M))
        start = next(i for i, line in enumerate(terminal.lines) if line.startswith("> What is 12"))
        tints = {tint.removeprefix("#") for tint in TINTS}
        assert any(tints & terminal.colours(line) for line in terminal.lines[start:])
        wait_for_prompt(terminal)
        terminal.type("Tell me a story about a cat.\r")
        terminal.wait(lambda: re.search(r"^> Tell me a story about a cat\.\n\S", terminal.text, re.M))
        terminal.type("/reset\r/exit\r")  # the next input lines get what is typed during an answer
        terminal.wait_for("> /reset\na new conversation\n> /exit")
        assert terminal.text.count("/reset") == 1, "not shown within the answer"
        assert terminal.wait_for_end() == 0


def test_without_colours_and_with_hostile_text(made, tmp_path):
    script = "import sys; from fledge.decode.request import AttributedText as A; from fledge.cli import main\n" + (
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


def test_answers_keep_their_special_tokens(tmp_path, fledge, monkeypatch):
    """The next prompt has them."""
    target = scripted_target_directory(tmp_path, CHANNEL, IN_CHANNEL, CHANNEL_TOKENS)
    seen, fit = [], Session._fit
    monkeypatch.setattr(Session, "_fit", lambda *args: seen.append(fit(*args)) or seen[-1])
    monkeypatch.setattr("sys.stdin", io.StringIO("Which bird?\nAnd that?\n"))
    went = fledge("chat", "--target", target, "--max-new-tokens", 24)
    assert went.code == 0 and "does not render" not in went.err, went.err
    messages, ids = seen[1]
    assert messages[1] == said("A heron.")
    text = AutoTokenizer.from_pretrained(target).decode(ids)
    assert "<|im_start|>assistant<|channel|>final<|message|>A heron.<|im_end|>" in text


def test_an_answer_that_the_template_rewrites_is_said(tmp_path, fledge, monkeypatch):
    template = "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    target = scripted_target_directory(tmp_path, template, "<|im_start|>assistant: heron.<|im_end|>")
    monkeypatch.setattr("sys.stdin", io.StringIO("Which bird?\nAnd that?\n"))
    with pytest.warns(AnswerWarning, match="does not render an answer as the target generated it"):
        assert fledge("chat", "--target", target, "--max-new-tokens", 24).code == 0
