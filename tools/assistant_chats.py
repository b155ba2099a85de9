"""The conversations that the bundled assistant is trained on, and the held-out conversations to measure drafts on.

`conversations` reads dialogues and stories from a directory of JSON lines files with `messages`, and makes up small
sums. The files are those of Schema-Guided Dialogue (CC BY-SA 4.0), Taskmaster (CC BY 4.0) and TinyStories
(CDLA-Sharing-1.0):

    sgd_train.jsonl sgd_dev.jsonl taskmaster.jsonl stories.jsonl
"""

from __future__ import annotations

import hashlib
import json
import random
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

Chat = list[dict[str, str]]

HELD_OUT_ONE_IN = 40
JOINED = (2, 3, 4)  # exchanges of a dialogue that become one exchange with a longer answer
SUMS = 20_000
NAMES = "Ada Ben Carla Dev Emma Femi Grace Hugo Ines Jan Kira Leo Maya Noor Omar Pia Quinn Rosa Sam Tara Vera".split()
THINGS = "apples pears pencils stickers marbles cookies books eggs tickets shells cups stamps balloons cards".split()
SENTENCE = re.compile(r"(?<=[.!?])\s+")
QUESTION = re.compile(r"\?$|confirm|^(?:so|ok|okay|alright)\b|sorry", re.IGNORECASE)  # answered within the exchange


def held_out(chat: Chat) -> bool:
    """Whether the conversation is kept for measurements. The rule reads only the first message, so that conversations
    which begin alike are either all trained on or all held out."""
    return int.from_bytes(hashlib.sha256(chat[0]["content"].encode()).digest()[:8]) % HELD_OUT_ONE_IN == 0


def conversations(directory: Path, seed: int) -> tuple[dict[str, list[Chat]], dict[str, list[Chat]]]:
    """The conversations to train on and the held-out conversations, by kind: bookings, orders, stories, sums."""
    draw = random.Random(seed)
    dialogues = [*read(directory / "sgd_train.jsonl"), *read(directory / "sgd_dev.jsonl")]
    chats = {
        "bookings": dialogues,
        "orders": list(read(directory / "taskmaster.jsonl")),
        "stories": list(read(directory / "stories.jsonl")),
        "sums": [small_sum(draw) for _ in range(SUMS)],
    }
    seen = {kind: [c for c in of_kind if not held_out(c)] for kind, of_kind in chats.items()}
    kept = {kind: [c for c in of_kind if held_out(c)] for kind, of_kind in chats.items()}
    seen["bookings"] = [joined(chat, draw) for chat in seen["bookings"] for _ in range(2)]
    kept["bookings"] = [joined(chat, draw) for chat in kept["bookings"]]
    return seen, {kind: list(with_own_beginning(of_kind)) for kind, of_kind in kept.items()}


def with_own_beginning(chats: Iterable[Chat]) -> Iterator[Chat]:
    """The conversations without those whose first message an earlier conversation has."""
    asked = set()
    for chat in chats:
        if chat[0]["content"] not in asked:
            asked.add(chat[0]["content"])
            yield chat


def read(file: Path) -> Iterator[Chat]:
    """The conversations of a file that alternate between user and assistant, with their white space tidied."""
    for line in file.read_text(encoding="utf-8").splitlines():
        chat = [{"role": m["role"], "content": tidy(m["content"])} for m in json.loads(line)["messages"]]
        roles = [m["role"] for m in chat]
        if (
            len(chat) > 1
            and roles == (["user", "assistant"] * len(chat))[: len(chat)]
            and all(m["content"] for m in chat)
        ):
            yield chat if len(chat) % 2 == 0 else chat[:-1]


def tidy(text: str) -> str:
    """The text with plain quotation marks and without repeated spaces."""
    for typographic, plain in (("\u2019", "'"), ("\u2018", "'"), ("\u201c", '"'), ("\u201d", '"'), ("\u2013", "-")):
        text = text.replace(typographic, plain)
    return re.sub(r"[ \t]+", " ", text).strip()


def joined(chat: Chat, draw: random.Random) -> Chat:
    """The dialogue with two to four consecutive exchanges joined into one exchange with a longer answer.

    Earlier answers lose their questions, confirmations and apologies, to which the user has replied by then.
    """
    result: Chat = []
    pairs = list(zip(chat[::2], chat[1::2], strict=True))
    while pairs:
        part, pairs = pairs[: (size := draw.choice(JOINED))], pairs[size:]
        answers = [SENTENCE.split(ended(answer["content"])) for _, answer in part]
        said = [s for sentences in answers[:-1] for s in sentences if not QUESTION.search(s)] + answers[-1]
        result.append({"role": "user", "content": " ".join(ended(asked["content"]) for asked, _ in part)})
        result.append({"role": "assistant", "content": " ".join(dict.fromkeys(said))})
    return result


def beginning(chat: Chat, draw: random.Random) -> Chat:
    """The conversation up to one of its first two questions."""
    return chat[: draw.choice([1, 3]) if len(chat) > 3 else 1]


def ended(text: str) -> str:
    """The text with a full stop if it has no sign at its end."""
    return text if text[-1] in ".!?" else f"{text}."


def small_sum(draw: random.Random) -> Chat:
    """A question about small numbers and its answer, worked step by step."""
    question, answer = draw.choice([_add, _subtract, _multiply, _shop, _share, _collect, _travel, _save])(draw)
    return [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]


def _add(draw: random.Random) -> tuple[str, str]:
    a, b = draw.randint(11, 99), draw.randint(11, 99)
    tens, ones = a // 10 * 10 + b // 10 * 10, a % 10 + b % 10
    question = draw.choice(["What is {} + {}?", "Please add {} and {}.", "How much is {} plus {}?"]).format(a, b)
    return question, (
        f"Let us add the tens first: {a // 10 * 10} + {b // 10 * 10} = {tens}.\n"
        f"Then the ones: {a % 10} + {b % 10} = {ones}.\n"
        f"Together, {tens} + {ones} = {a + b}.\nSo {a} + {b} = {a + b}."
    )


def _subtract(draw: random.Random) -> tuple[str, str]:
    b = draw.randint(11, 60)
    a = b + draw.randint(5, 39)
    tens = b // 10 * 10
    question = draw.choice(["What is {} - {}?", "Please take {1} away from {0}.", "How much is {} minus {}?"])
    return question.format(a, b), (
        f"Let us take away the tens first: {a} - {tens} = {a - tens}.\n"
        f"Then the ones: {a - tens} - {b % 10} = {a - b}.\nSo {a} - {b} = {a - b}."
    )


def _multiply(draw: random.Random) -> tuple[str, str]:
    a, b = draw.randint(12, 49), draw.randint(2, 9)
    tens, ones = a // 10 * 10, a % 10
    question = draw.choice(["What is {} x {}?", "Please multiply {} by {}.", "How much is {} times {}?"])
    return question.format(a, b), (
        f"Let us split {a} into {tens} and {ones}.\n{tens} x {b} = {tens * b}.\n{ones} x {b} = {ones * b}.\n"
        f"Together, {tens * b} + {ones * b} = {a * b}.\nSo {a} x {b} = {a * b}."
    )


def _shop(draw: random.Random) -> tuple[str, str]:
    name, thing, count, price = draw.choice(NAMES), draw.choice(THINGS), draw.randint(2, 9), draw.randint(2, 9)
    cost = count * price
    paid = next(note for note in (20, 50, 100) if note >= cost)
    return (
        f"{name} buys {count} {thing} for {price} dollars each and pays with {paid} dollars. How much change is there?",
        f"The {thing} cost {count} x {price} = {cost} dollars.\n{name} pays with {paid} dollars.\n"
        f"The change is {paid} - {cost} = {paid - cost} dollars.\nSo {name} gets {paid - cost} dollars back.",
    )


def _share(draw: random.Random) -> tuple[str, str]:
    name, thing, friends, each = draw.choice(NAMES), draw.choice(THINGS), draw.randint(2, 9), draw.randint(2, 9)
    total = friends * each
    return (
        f"{name} shares {total} {thing} equally among {friends} friends. How many does each friend get?",
        f"There are {total} {thing} for {friends} friends.\n{total} / {friends} = {each}.\n"
        f"To check: {friends} x {each} = {total}.\nSo each friend gets {each} {thing}.",
    )


def _collect(draw: random.Random) -> tuple[str, str]:
    name, other = draw.sample(NAMES, 2)
    thing, has, more, lost = draw.choice(THINGS), draw.randint(5, 40), draw.randint(5, 40), draw.randint(2, 9)
    return (
        f"{name} has {has} {thing}. {other} gives {name} {more} more, and then {name} loses {lost}. "
        f"How many {thing} does {name} have now?",
        f"{name} starts with {has} {thing}.\nWith those of {other}, {name} has {has} + {more} = {has + more}.\n"
        f"After losing {lost}, {name} has {has + more} - {lost} = {has + more - lost}.\n"
        f"So {name} has {has + more - lost} {thing} now.",
    )


def _travel(draw: random.Random) -> tuple[str, str]:
    name, speed, hours, rest = draw.choice(NAMES), 10 * draw.randint(2, 9), draw.randint(2, 6), draw.randint(5, 30)
    far = speed * hours
    return (
        f"{name} drives for {hours} hours at {speed} miles an hour, and then {rest} miles more. How far is that?",
        f"In {hours} hours, {name} drives {speed} x {hours} = {far} miles.\n"
        f"With the last {rest} miles, that is {far} + {rest} = {far + rest}.\nSo {name} drives {far + rest} miles.",
    )


def _save(draw: random.Random) -> tuple[str, str]:
    name, a_week, weeks, has = draw.choice(NAMES), draw.randint(2, 9), draw.randint(2, 9), draw.randint(5, 40)
    saved = a_week * weeks
    return (
        f"{name} has {has} dollars and saves {a_week} dollars a week. How many dollars are there after {weeks} weeks?",
        f"{name} saves {a_week} x {weeks} = {saved} dollars in {weeks} weeks.\n"
        f"With the first {has} dollars, that is {has} + {saved} = {has + saved}.\n"
        f"So {name} has {has + saved} dollars after {weeks} weeks.",
    )
