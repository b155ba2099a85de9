"""Damaged and hostile inputs for every command: each case gives a result or a one-sentence error, never a traceback.

The table INPUTS names the inputs (chats, prompts, a draft's config and weights, a run's files, a target's files,
options). For each, hypothesis draws the damage, and a command that reads the input runs in this process.

    make fuzz                                   # 3,230 cases
    FUZZ_CASES=500 pytest tests/test_fuzz.py    # 500 cases of each kind of input
"""

from __future__ import annotations

import gzip
import json
import os
import shutil
import tempfile
import unicodedata
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from support.chats import tiny_chats
from support.openai_server import FakeServer
from support.targets import tiny_target_directory

CASES = int(os.environ.get("FUZZ_CASES", "12"))  # cases per input; a few with a fixed seed by default
LONGEST = 20_000  # most characters that a failing command may print

# unusual JSON texts that replace a value
ODD = (
    "null", "true", "0", "-1", "3.5", "1000000000000", "1e30", "1e400", "NaN", "-Infinity", '""', '"x"', '"32"',
    '"\\ud83d"', '"\\u001b[31mred\\u001b]0;title\\u0007"', '"\\u202egnirts"', '"\\u0000"', "[]", '[""]', "{}",
    json.dumps("wings " * 20_000), '[1, "a", null]', '{"a": {"b": []}}', "[" * 5000 + "]" * 5000,
    '{"a":' * 5000 + "1" + "}" * 5000, "[" * 400 + "]" * 400, "1" + "0" * 30, "1" + "0" * 400, '"a\u2028b\u2029c\x85d"',
    '[{"type": "text", "text": "the bird"}]', '[{"type": "image", "url": "x"}]', '[{"type": "text"}]', '["a", "b"]',
)  # fmt: skip
TEMPLATES = (
    "{% for m in messages %}", "{{ messages.__class__.__mro__ }}", "{{ 'a' * 10**15 }}", "{{ undefined.x }}", "",
    "{% for i in range(99999) %}{% for j in range(99999) %}x{% endfor %}{% endfor %}",
    "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "{{ raise_exception('\x1b[31mno') }}", "constant",
    "{% for m in messages %}{{ m['content'] | trim }}{% endfor %}", "{{ messages | tojson }}", "{{ 1 / 0 }}",
)  # fmt: skip
MARK = "@odd@"
# answers of a server to the paths that a command asks
CARD = {"id": "bird", "owned_by": "vllm", "max_model_len": 512}
USAGE = {"prompt_tokens": 3, "completion_tokens": 2}
META = USAGE | {"finish_reason": {"type": "stop"}, "spec_verify_ct": 2, "spec_num_correct_drafts": 1}
CHOICE = {"finish_reason": "stop", "token_ids": [5, 6], "logprobs": {"token_logprobs": [-0.5]}}
CHAT = {"choices": [CHOICE | {"message": {"content": "it can"}}], "usage": USAGE, "prompt_token_ids": [3, 4]}
ANSWERS = {
    "/v1/models": {"data": [CARD]},
    "/v1/chat/completions": CHAT,
    "/v1/completions": {"choices": [CHOICE | {"text": "it can"}], "kv_transfer_params": {"hidden_states_path": "x"}},
    "/generate": {"text": "it can", "output_ids": [5, 6], "meta_info": META},
    "/server_info": {"version": "0.5", "internal_states": [{"avg_spec_accept_length": 2.5}]},
}


@dataclass(frozen=True)
class Input:
    """An input: `damage(draw, directory)` damages it in a copy of the fixtures, and `commands` read it there."""

    damage: Callable[[Any, Path], list[str] | None]
    commands: tuple[tuple[str, ...], ...]


TRAIN = "train --target target --data chats.jsonl --out new --max-length 64 --row-length 128 --steps 1".split()
TRAIN += "--depth 2 --eval-tokens 2 --device cpu".split()
FEATURES = "features --target target --data chats.jsonl --out features --max-length 64 --device cpu".split()
FROM_FEATURES = "train --features features --target target --out new --row-length 128 --steps 1 --depth 2".split()
FROM_FEATURES += "--draft-vocab 100 --device cpu".split()
GENERATE = "generate --target target --prompt wings --max-new-tokens 3 --device cpu".split()
EVAL = "eval --target target --draft run/draft --prompts prompts.jsonl --max-new-tokens 3 --limit 2".split()
SERVER = FakeServer()
EVAL_ENDPOINT = "eval --target target --prompts prompts.jsonl --max-new-tokens 3 --limit 2".split()
REGENERATE = "regenerate --target target --data chats.jsonl --out own.jsonl --limit 3 --max-new-tokens 2".split()


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with a target, chats, prompts, and a run that was trained on them."""
    from fledge.commands.features import FeaturesOptions
    from fledge.commands.features import run as write_features
    from fledge.commands.train import run
    from fledge.io.display import ProgressDisplay
    from fledge.train.setup.options import TrainOptions

    root = tmp_path_factory.mktemp("made")
    tiny_target_directory(root)
    tiny_chats(root / "chats.jsonl", 6)
    (root / "prompts.jsonl").write_text('{"turns": ["the young bird", "wings"]}\n{"prompt": "it can fly"}\n')
    show = ProgressDisplay(quiet=True)
    options = TrainOptions(
        target=str(root / "target"), data=[str(root / "chats.jsonl")], out=str(root / "run"), max_length=64,
        row_length=128, steps=1, depth=2, draft_vocab=100, device="cpu", eval_tokens=2,
    )  # fmt: skip
    run(options, show.say, show)
    features = FeaturesOptions(
        target=str(root / "target"), data=[str(root / "chats.jsonl")], out=str(root / "features"), max_length=64,
        device="cpu",
    )  # fmt: skip
    write_features(features, show.say, show)
    return root


def places(value: Any, path: tuple = ()) -> Iterator[tuple]:
    """The path to every value within a JSON value."""
    yield path
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in items:
        yield from places(inner, (*path, key))


def with_odd_value(draw: Any, value: Any) -> str:
    """A JSON value as text, with an odd value added or in place of another value, or with a value removed."""
    path = draw(st.sampled_from(list(places(value))))
    how = draw(st.sampled_from(["replace", "remove", "add"]))
    odd = draw(st.sampled_from(ODD))
    if not path:
        return odd
    value = json.loads(json.dumps(value))
    holder = value
    for key in path[:-1]:
        holder = holder[key]
    if how == "replace":
        holder[path[-1]] = MARK
    elif how == "remove":
        del holder[path[-1]]
    elif isinstance(holder, dict):
        names = "tools name system input completion history rope_scaling auto_map method chat_template".split()
        holder[draw(st.sampled_from(names))] = MARK
    else:
        holder.append(MARK)
    return json.dumps(value).replace(json.dumps(MARK), odd)


def damage_text(draw: Any, text: bytes) -> bytes:
    """Bytes that are truncated, changed, repeated or have a flipped bit."""
    at = draw(st.integers(0, max(len(text) - 1, 0)))
    how = draw(st.sampled_from(["cut", "change", "double", "flip"]))
    if how == "cut":
        return text[:at]
    if how == "change":
        return text[:at] + draw(st.binary(min_size=1, max_size=4)) + text[at + 1 :]
    if how == "double":
        return text[:at] + text
    return text[:at] + bytes([text[at] ^ (1 << draw(st.integers(0, 7)))]) + text[at + 1 :] if text else b"x"


def damage_lines(name: str) -> Callable[[Any, Path], None]:
    """Damages a file of JSON lines: one odd record, or damaged bytes."""

    def damage(draw: Any, root: Path) -> None:
        file = root / name
        if draw(st.integers(0, 4)) == 0:
            file.write_bytes(damage_text(draw, file.read_bytes()))
            return
        lines = file.read_text().splitlines()
        i = draw(st.integers(0, len(lines) - 1))
        lines[i] = with_odd_value(draw, json.loads(lines[i]))
        file.write_text("\n".join(lines) + "\n")

    return damage


def damage_json(name: str) -> Callable[[Any, Path], None]:
    """Damages a JSON file: one odd value, or damaged bytes."""

    def damage(draw: Any, root: Path) -> None:
        file = root / name
        text = damage_text(draw, file.read_bytes()) if draw(st.integers(0, 4)) == 0 else None
        file.write_bytes(with_odd_value(draw, json.loads(file.read_text())).encode() if text is None else text)

    return damage


def damage_recipe(name: str) -> Callable[[Any, Path], None]:
    """Damages a YAML file: one odd value (JSON is YAML), or damaged bytes."""

    def damage(draw: Any, root: Path) -> None:
        file = root / name
        text = damage_text(draw, file.read_bytes()) if draw(st.integers(0, 1)) == 0 else None
        file.write_bytes(with_odd_value(draw, yaml.safe_load(file.read_text())).encode() if text is None else text)

    return damage


def damage_bytes(name: str) -> Callable[[Any, Path], None]:
    def damage(draw: Any, root: Path) -> None:
        (root / name).write_bytes(damage_text(draw, (root / name).read_bytes()))

    return damage


def damage_table(draw: Any, root: Path) -> list[str]:
    """Writes chats as a table whose columns have the types that tables can contain."""
    import datetime

    import datasets

    columns = {
        "text": ["wings"] * 3, "day": [datetime.date(2020, 1, 1)] * 3, "raw": [b"\xff\x00"] * 3, "number": [1, 2, 3],
        "messages": [[{"role": "user", "content": "wings"}, {"role": "assistant", "content": "it can fly"}]] * 3,
        "conversations": [[{"from": "human", "value": "wings"}, {"from": "gpt", "value": "it can fly"}]] * 3,
    }  # fmt: skip
    names = draw(st.lists(st.sampled_from(sorted(columns)), min_size=1, unique=True))
    values = {name: columns[draw(st.sampled_from(sorted(columns)))] for name in names}
    datasets.Dataset.from_dict(values).to_parquet(str(root / "chats.parquet"))
    return ["--data", "chats.parquet"]


def damage_weights(draw: Any, root: Path) -> None:
    """Changes names, shapes, dtypes or values of a draft's tensors, or replaces the file by another pickle."""
    from safetensors.torch import load_file, save_file

    file = root / "run/draft/model.safetensors"
    tensors = load_file(file)
    name = draw(st.sampled_from(sorted(tensors)))
    how = draw(st.sampled_from(["nan", "huge", "zero", "shape", "dtype", "gone", "name", "pickle", "bytes"]))
    x = tensors.pop(name)
    if how == "bytes":
        file.write_bytes(damage_text(draw, file.read_bytes()))
        return
    if how == "pickle":
        file.unlink()
        odd = draw(st.sampled_from([[], {}, {"fc.weight": 3}, torch.zeros(3), {3: torch.zeros(3)}, "text"]))
        torch.save(odd, file.with_name("pytorch_model.bin"))
        return
    values = {"nan": x.double() * float("nan"), "huge": x.double() * 1e30, "zero": x * 0, "dtype": x.to(torch.int32)}
    if how in values:
        tensors[name] = values[how].to(x.dtype) if how == "zero" else values[how].contiguous()
    elif how == "shape":
        tensors[name] = torch.zeros(3)
    elif how == "name":
        tensors[draw(st.sampled_from(["model.", "\x1b[31m", "layers.7.", "x" * 9000])) + name] = x
    save_file(tensors, file)


def damage_template(draw: Any, root: Path) -> None:
    (root / "target/chat_template.jinja").write_text(draw(st.sampled_from(TEMPLATES)))


NAMES = "\x1b[31mred.jsonl", "b[1].jsonl", "a@0.5", "a b.jsonl", "x\ny.jsonl", "-", "\xfc\u202e.json"
CONTENTS = "", "{}", "[1]", '{"text": "the young bird tries"}', "\x1b[31m"
SHARES = "", "", "@0.5", "@99999999", "@nan", "@-1", ":train"


def damage_names(draw: Any, root: Path) -> list[str]:
    """Makes a file whose name contains control characters, patterns or separators."""
    name = draw(st.sampled_from(NAMES))
    (root / name).write_text(draw(st.sampled_from(CONTENTS)))
    return ["--data", name + draw(st.sampled_from(SHARES))]


def damage_answer(draw: Any, root: Path) -> list[str]:
    """Lets a server answer with one odd value, damaged bytes, compressed zeros, or a redirect."""
    SERVER.engine = draw(st.sampled_from(["vllm", "sglang"]))
    path = draw(st.sampled_from(sorted(ANSWERS)))
    body, status, headers = (
        with_odd_value(draw, ANSWERS[path]).encode(),
        draw(st.sampled_from([200] * 9 + [400, 500])),
        {},
    )
    how = draw(st.sampled_from(["odd"] * 6 + ["bytes", "gzip", "redirect"]))
    if how == "bytes":
        body = damage_text(draw, body)
    elif how == "gzip":
        body, headers = gzip.compress(bytes(2**22)), {"Content-Encoding": "gzip"}
    elif how == "redirect":
        ports = draw(st.sampled_from(["1", "99999999", "-1", "x", ""]))
        status, headers = 307, {"Location": f"http://127.0.0.1:{ports}{path}"}
    if draw(st.booleans()) and how == "odd":
        body, headers = b"data: " + body.replace(b"\n", b" ") + b"\n\ndata: [DONE]\n\n", {}
    SERVER.raw = {path: (status, headers, body)}
    return []


def damage_address(draw: Any, root: Path) -> list[str]:
    """An address with a port, host, user or query that is not allowed."""
    host = draw(
        st.sampled_from(
            ["127.0.0.1", "", "[::1", "a b", "me:secret-key@127.0.0.1", "\x1b[31m", "x" * 9000, "127.0.0.1\n"]
        )
    )
    port = draw(st.sampled_from([":1", ":0", ":99999999", ":x", ":-1", ""]))
    url = draw(st.sampled_from(["http://", "https://", "", "ftp://"])) + host + port
    return ["--endpoint", url + draw(st.sampled_from(["", "/v1", "?key=secret-key", "/\u2028"]))]


def damage_compressed(draw: Any, root: Path) -> list[str]:
    """Compressed chats with a line or record that does not end."""
    name = draw(st.sampled_from(["long.jsonl.gz", "long.json.gz", "long.csv.gz", "long.txt.gz"]))
    beginning = draw(st.sampled_from(["", "[", '{"text": "', 'text\n"', '{"text": "wings"}\n']))
    (root / name).write_bytes(gzip.compress(beginning.encode() + b"a" * 2**20))
    return ["--data", name]


FLAGS = """row-length max-length seed depth slots lr device dtype epochs draft-vocab aux-layers eval-prompts init-from
           resume template-kwargs rows-per-step layers gamma method loss impl log""".split()
VALUES = (
    "-1", "0", "1000000000", str(2**70), "nan", "inf", "x", "", "mps", "cuda", "meta", "1,1,1", "chats.jsonl", "[1]",
    '{"chat_template": "x"}', "run", "run/draft", ".", "/dev/null", "\x1b[31m", "owner/name@rev",
)  # fmt: skip


def damage_options(draw: Any, root: Path) -> list[str]:
    """An option with a senseless value; if the option is given twice, the last value counts."""
    return [f"--{draw(st.sampled_from(FLAGS))}={draw(st.sampled_from(VALUES))}"]


INPUTS: dict[str, Input] = {
    "chats": Input(damage_lines("chats.jsonl"), (tuple(TRAIN), (*TRAIN, "--skip-bad"), tuple(REGENERATE))),
    "prompts": Input(damage_lines("prompts.jsonl"), (tuple(EVAL),)),
    "chats as a table": Input(damage_table, (tuple(TRAIN),)),
    "names of files": Input(damage_names, (tuple(TRAIN), tuple(REGENERATE))),
    "a draft's config": Input(
        damage_json("run/draft/config.json"),
        (("inspect", "run/draft"), (*GENERATE, "--draft", "run/draft"), (*TRAIN, "--init-from", "run/draft")),
    ),
    "a draft's weights": Input(damage_weights, (("inspect", "run/draft"), (*GENERATE, "--draft", "run/draft"))),
    "a run's recipe": Input(
        damage_recipe("run/recipe.yaml"),
        (("train", "--resume", "run"), ("train", "--config", "run/recipe.yaml", "--out", "new")),
    ),
    "a run's state": Input(damage_bytes("run/checkpoint/progress.json"), (("train", "--resume", "run"),)),
    "a manifest of features": Input(damage_json("features/manifest.json"), (tuple(FROM_FEATURES), tuple(FEATURES))),
    "documents of features": Input(damage_bytes("features/documents.safetensors"), (tuple(FROM_FEATURES),)),
    "a shard of features": Input(damage_bytes("features/shard-00000.safetensors"), (tuple(FROM_FEATURES),)),
    "a target's config": Input(damage_json("target/config.json"), (tuple(GENERATE), tuple(TRAIN))),
    "a target's tokenizer": Input(damage_json("target/tokenizer_config.json"), (tuple(GENERATE),)),
    "a server's answers": Input(
        damage_answer,
        tuple(
            tuple(words)
            for words in (
                [*EVAL_ENDPOINT, "--endpoint", "SERVER"],
                [*REGENERATE, "--endpoint", "SERVER"],
                [*REGENERATE[:1], *REGENERATE[3:], "--endpoint", "SERVER"],
                [*TRAIN, "--features-from", "SERVER"],
            )
        ),
    ),
    "an address": Input(damage_address, (tuple(EVAL_ENDPOINT), tuple(REGENERATE))),
    "compressed chats": Input(damage_compressed, (tuple(TRAIN),)),
    "a chat template": Input(damage_template, (tuple(GENERATE), tuple(TRAIN))),
    "options": Input(damage_options, (tuple(TRAIN),)),
}


@pytest.mark.timeout(0)
@pytest.mark.parametrize("name", INPUTS)
def test_no_input_ends_in_a_traceback(name: str, made: Path, fledge, monkeypatch: pytest.MonkeyPatch) -> None:
    """The exit status is 0, 1 or 2, and the message has bounded length, no control characters and no traceback."""
    given_input = INPUTS[name]
    monkeypatch.setattr("fledge.data.template.RENDER_SECONDS", 0.5)
    for limit, value in (
        ("data.rows.LONGEST", 2**18),
        ("data.rows.LONGEST_TEXT", 2**18),
        ("io.http.MOST_BYTES", 2**20),
    ):
        monkeypatch.setattr(f"fledge.{limit}", value)
    for delay in ("FIRST_DELAY", "LAST_DELAY"):
        monkeypatch.setattr(f"fledge.io.http.{delay}", 0.001)
    monkeypatch.setattr("fledge.measure.endpoint.SETTLING", {"vllm": 0.1, "sglang": 0.1})

    @settings(
        max_examples=CASES, deadline=None, derandomize=True, database=None, phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )  # fmt: skip
    @given(data=st.data())
    def check(data: st.DataObject) -> None:
        with tempfile.TemporaryDirectory() as directory:
            root = Path(directory) / "made"
            shutil.copytree(made, root)
            monkeypatch.chdir(root)
            more = given_input.damage(data.draw, root) or []
            command = data.draw(st.sampled_from(given_input.commands))
            with SERVER.started():
                ended = fledge(*(SERVER.url if word == "SERVER" else word for word in command), *more)
            monkeypatch.chdir(made)
        assert "secret-key" not in ended.err, "a password or key is in a message"
        assert ended.code in (0, 1, 2), ended
        assert "Traceback" not in ended.err
        if ended.code:
            sentence = "fledge: " in ended.err or ended.err.startswith("Usage: ") or command[0] == "inspect"
            assert sentence, ended
        assert len(ended.err) <= LONGEST, len(ended.err)
        said = ended.err + (ended.out if command[0] == "inspect" else "")
        raw = {c for c in said if unicodedata.category(c) in ("Cc", "Cs") and c not in "\n\t\r"}
        assert not raw, raw

    check()
