"""Reading data: every layout and format, shares of a file, and errors that name the file and line of bad data."""

from __future__ import annotations

import datetime
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fledge.data.read import absolute_source, check_source, read_records
from fledge.data.record import Record, parse_record
from fledge.data.spans import training_documents
from fledge.data.template import ChatTemplate
from fledge.measure.prompts import first_prompt, prompt_of
from support.files import write_rows
from support.targets import tiny_tokenizer

USER, ANSWER = {"role": "user", "content": "Can it fly?"}, {"role": "assistant", "content": "Soon."}
SYSTEM = {"role": "system", "content": "Be brief."}


def jsonl(path, rows):
    path.parent.mkdir(parents=True, exist_ok=True)
    return str(write_rows(path, rows))


def texts(records: list[Record]) -> list[str | None]:
    return [r.text for r in records]


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    """Each test has its own cache for the files that `datasets` converts."""
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")


def one(tmp_path, row) -> Record:
    (record,) = read_records([jsonl(tmp_path / "one.jsonl", [row])])
    return record


# -- layouts ------------------------------------------------------------------------------------------------------


def test_messages_are_taken_as_they_are(tmp_path):
    record = one(tmp_path, {"messages": [SYSTEM, USER, ANSWER], "tools": [{"name": "look"}], "source": "x"})
    assert record.messages == [SYSTEM, USER, ANSWER]
    assert record.tools == [{"name": "look"}] and record.text is None
    assert record.where.endswith("one.jsonl, line 1")


def test_sharegpt_speakers_become_roles(tmp_path):
    turns = [("system", "S"), ("human", "U"), ("gpt", "A"), ("observation", "T"), ("chatgpt", "B")]
    record = one(tmp_path, {"conversations": [{"from": f, "value": v} for f, v in turns]})
    assert [(m["role"], m["content"]) for m in record.messages] == [
        ("system", "S"), ("user", "U"), ("assistant", "A"), ("tool", "T"), ("assistant", "B")
    ]  # fmt: skip


def test_conversations_may_name_roles(tmp_path):
    assert one(tmp_path, {"conversations": [USER, ANSWER]}).messages == [USER, ANSWER]


@pytest.mark.parametrize("turns", [[USER, ANSWER], [{"from": "human", "value": "Can it fly?"}]], ids=["role", "from"])
def test_the_system_field_comes_first(tmp_path, turns):
    record = one(tmp_path, {"conversations": turns, "system": "Be brief."})
    assert record.messages[:2] == [SYSTEM, USER]


def test_a_system_message_is_not_doubled(tmp_path):
    record = one(tmp_path, {"conversations": [SYSTEM, USER, ANSWER], "system": "Be long."})
    assert record.messages == [SYSTEM, USER, ANSWER]


def test_null_fields_are_absent_but_content_stays(tmp_path):
    """Tables fill missing fields with null; a message that only calls a tool has the content null, which stays."""
    call = {"role": "assistant", "content": None, "tool_calls": [{"name": "look"}]}
    record = one(tmp_path, {"messages": [{**USER, "tool_calls": None}, call]})
    assert record.messages == [USER, call]


def test_text(tmp_path):
    assert one(tmp_path, {"text": "Once upon a time"}).text == "Once upon a time"


def test_a_filled_layout_wins_over_an_empty_one(tmp_path):
    assert one(tmp_path, {"messages": [], "conversations": None, "text": "kept"}).text == "kept"


# -- the layouts of trainers ------------------------------------------------------------------------------------------


def test_a_prompt_and_its_completion_are_one_text(tmp_path):
    """In TRL's plain rows, the prompt is only read and the completion is trained on."""
    record = one(tmp_path, {"prompt": "The sky is", "completion": " blue."})
    assert (record.text, record.prompt_length, record.messages) == ("The sky is blue.", 10, None)
    assert one(tmp_path, {"prompt": "def f", "text": None}).prompt_length == len("def f")  # a prompt alone


def test_a_prompt_and_completion_of_messages_are_one_conversation(tmp_path):
    record = one(tmp_path, {"prompt": [SYSTEM, USER], "completion": [ANSWER], "tools": [{"name": "look"}]})
    assert (record.messages, record.prompt_length, record.tools) == ([SYSTEM, USER, ANSWER], 2, [{"name": "look"}])
    assert one(tmp_path, {"prompt": [USER], "completion": [ANSWER], "system": "Be brief."}).prompt_length == 2
    assert one(tmp_path, {"prompt": [USER]}).messages == [USER]


def test_a_row_has_template_variables_of_its_own(tmp_path):
    """They take precedence over those of the source; tables may have them as JSON text."""
    kwargs = {"enable_thinking": False}
    for own in (kwargs, json.dumps(kwargs)):
        for layout in ({"messages": [USER, ANSWER]}, {"turns": ["a"]}, {"instruction": "a", "output": "b"}):
            row = layout | {"chat_template_kwargs": own}
            assert one(tmp_path, row).template_kwargs == kwargs
        source = {"source": str(tmp_path / "one.jsonl"), "template_kwargs": {"enable_thinking": True, "date": "now"}}
        assert read_records([source])[0].template_kwargs == {"enable_thinking": False, "date": "now"}
        mapped = jsonl(tmp_path / "mapped.jsonl", [{"dialog": [USER, ANSWER], "chat_template_kwargs": own}])
        assert read_records([{"source": mapped, "columns": {"messages": "dialog"}}])[0].template_kwargs == kwargs
    for absent in ({}, None, ""):
        assert one(tmp_path, {"messages": [USER, ANSWER], "chat_template_kwargs": absent}).template_kwargs is None
    for bad, reason in (
        ("{", "a text that is not JSON"),
        ([1], "a list, not an object"),
        ({"tools": []}, "sets tools"),
    ):
        with pytest.raises(ValueError, match=f"one.jsonl, line 1: its `chat_template_kwargs`.* {reason}"):
            one(tmp_path, {"messages": [USER, ANSWER], "chat_template_kwargs": bad})


def test_alpaca_rows_are_conversations(tmp_path):
    row = {"instruction": "Add.", "input": "1 and 2", "output": "3", "text": "Below is an instruction"}
    assert one(tmp_path, row).messages == [
        {"role": "user", "content": "Add.\n1 and 2"}, {"role": "assistant", "content": "3"}
    ]  # fmt: skip
    asked = {"role": "user", "content": "Add."}
    assert one(tmp_path, {"instruction": "Add.", "input": "", "output": None}).messages == [asked]
    record = one(tmp_path, {"instruction": "Add.", "output": "3", "system": "Be brief.", "history": [["Hi", "Ho"]]})
    assert [m["content"] for m in record.messages] == ["Be brief.", "Hi", "Ho", "Add.", "3"]


def test_turns_without_answers_are_read(tmp_path):
    record = one(tmp_path, {"turns": ["One?", "Two?"], "category": "writing"})
    assert record.turns == ("One?", "Two?") and record.messages is record.text is None


def test_the_first_layout_that_is_filled_in_counts(tmp_path):
    """Many data sets contain the same chat in several layouts, or a prompt in addition to the chat."""
    assert one(tmp_path, {"prompt": "a", "messages": [USER, ANSWER]}).messages == [USER, ANSWER]
    assert one(tmp_path, {"prompt": "a", "text": "a b"}).text == "a b"
    assert one(tmp_path, {"turns": 2, "text": "a b"}).text == "a b"


# -- contents -----------------------------------------------------------------------------------------------------


def parts(*texts):
    return [{"type": "text", "text": t} for t in texts]


def test_text_parts_are_joined_by_line_ends(tmp_path):
    """vLLM joins them in the same way for templates that expect strings."""
    record = one(tmp_path, {"messages": [{"role": "user", "content": parts("Look:", "a wing.")}, ANSWER]})
    assert record.messages == [{"role": "user", "content": "Look:\na wing."}, ANSWER]
    record = one(tmp_path, {"conversations": [{"from": "human", "value": parts("Can it fly?")}], "system": parts("S")})
    assert [m["content"] for m in record.messages] == ["S", "Can it fly?"]
    filled = [{"type": "text", "text": "Can it fly?", "image": None}]  # as a table fills missing fields
    assert one(tmp_path, {"messages": [{"role": "user", "content": filled}]}).messages == [USER]
    thought = one(tmp_path, {"messages": [USER, {**ANSWER, "reasoning_content": parts("Hm.", "Yes.")}]})
    assert thought.messages[1]["reasoning_content"] == "Hm.\nYes."


NO_TEXT = [
    [{"type": "image_url", "image_url": {"url": "a.png"}}], [*parts("Look:"), {"type": "input_audio"}], ["Look"],
    [{"type": "text"}], [{"type": "text", "text": 5}], {"text": "Look"}, 5, 2.5, True,
]  # fmt: skip


@pytest.mark.parametrize("content", NO_TEXT, ids=str)
def test_contents_that_are_not_text_are_refused(tmp_path, content):
    """A template would print Python's representation of such a value, and the draft would be trained on it."""
    place = r"a\.jsonl, line 2, message 2: its content is .* fledge only reads text"
    answer, told = {"role": "assistant", "content": content}, {"from": "gpt", "value": content}
    for bad in ({"messages": [USER, answer]}, {"conversations": [{"from": "human", "value": "x"}, told]}):
        refused(jsonl(tmp_path / "a.jsonl", [{"text": "good"}, bad]), place)
    refused(jsonl(tmp_path / "a.jsonl", [{"instruction": "x", "output": content}]), "line 1, message 2: its content is")
    refused(jsonl(tmp_path / "a.jsonl", [{"messages": [USER], "system": content}]), "line 1, `system`, message 1: its")
    thought = {**ANSWER, "reasoning_content": content}
    refused(jsonl(tmp_path / "a.jsonl", [{"messages": [USER, thought]}]), "message 2: its reasoning_content is")


@pytest.mark.parametrize("message", [{"content": None}, {}, {"content": None, "tool_calls": []}], ids=str)
@pytest.mark.parametrize("role", ["user", "assistant"])
def test_a_message_without_content_is_refused(tmp_path, role, message):
    row = {"messages": [USER, {"role": role, **message}]}
    refused(jsonl(tmp_path / "a.jsonl", [row]), "line 1, message 2 needs a `role` and a `content`")
    if role == "assistant":
        call = {**row["messages"][1], "tool_calls": [{"name": "look"}]}
        assert one(tmp_path, {"messages": [USER, call]}).messages == [USER, call]


HALF = "a \ud83d b"


@pytest.mark.parametrize(
    "row",
    [
        {"text": HALF},
        {"messages": [{"role": "user", "content": HALF}, ANSWER]},
        {"messages": [{"role": HALF, "content": "x"}, ANSWER]},
        {"messages": [{**USER, "name": HALF}, ANSWER]},
        {"messages": [{**USER, HALF: "x"}, ANSWER]},
        {"messages": [USER, {**ANSWER, "tool_calls": [{"name": HALF}]}]},
        {"messages": [{"role": "user", "content": parts(HALF)}, ANSWER]},
        {"messages": [USER, ANSWER], "tools": [{"name": HALF}]},
        {"messages": [USER, ANSWER], "system": HALF},
        {"conversations": [{"from": "human", "value": HALF}, {"from": "gpt", "value": "x"}]},
        {"prompt": HALF, "completion": "x"},
        {"prompt": "x", "completion": HALF},
        {"prompt": [USER], "completion": [{"role": "assistant", "content": HALF}]},
        {"instruction": HALF, "output": "x"},
        {"turns": ["x", HALF]},
        {"prompt": HALF},
    ],
    ids=str,
)
def test_an_unpaired_surrogate_is_refused_with_its_place(tmp_path, row):
    """JSON can escape one half of a surrogate pair alone, which no tokenizer accepts."""
    said = refused(
        jsonl(tmp_path / "a.jsonl", [{"text": "good"}, row]), r"a\.jsonl, line 2.*: the escape \\ud83d after"
    )
    assert said.encode()  # and can be printed
    whole = jsonl(tmp_path / "a.jsonl", [json.loads(json.dumps(row).replace("\\ud83d", "\\ud83d\\ude00"))])
    assert read_records([whole])


@pytest.mark.parametrize(
    ("value", "kind"),
    [(datetime.datetime(2026, 1, 1), "datetime"), (datetime.date(2026, 1, 1), "date"), (b"x", "bytes")],
)
def test_dates_and_bytes_of_tables_are_refused_with_their_row(tmp_path, value, kind):
    import pyarrow
    from pyarrow import parquet

    def table(**columns):
        parquet.write_table(pyarrow.table(columns), tmp_path / f"{len(list(tmp_path.iterdir()))}.parquet")
        return tmp_path / f"{len(list(tmp_path.iterdir())) - 1}.parquet"

    chat = [USER, ANSWER]
    refused(table(messages=[chat, chat], tools=[[], [value]]), f"row 2, `tools`: it contains a {kind}")
    refused(table(messages=[[{**m, "at": value} for m in chat]]), f"row 1, message 1: it contains a {kind}, which")
    refused(table(messages=[[{"role": "user", "content": value}]]), "row 1, message 1: its content is")
    refused(table(text=[value]), rf"row 1 has none of .* fields are text \({kind}\)")
    assert texts(read_records([str(table(text=["a"], at=[value]))])) == ["a"]  # unread fields may have any type


@pytest.mark.parametrize("depth", [900, 5_000, 100_000])
def test_deep_nesting_is_refused_with_its_line(tmp_path, depth):
    deep = "[" * depth + "]" * depth
    for row in ('{"messages": %s}', '{"messages": [{"role": "user", "content": %s}]}', '{"text": "x", "more": %s}'):
        (tmp_path / "a.jsonl").write_text('{"text": "good"}\n' + row % deep)
        try:
            assert texts(read_records([str(tmp_path / "a.jsonl")])) == ["good", "x"]  # if this Python reads that depth
        except ValueError as e:
            assert "a.jsonl, line 2" in str(e)
    (tmp_path / "a.json").write_text(deep)
    refused(tmp_path / "a.json", r"a\.json(, record 1)? is (nested too deeply to be read|a list)")


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(st.characters(), max_size=5)
    | st.sampled_from(["a\ud83d", "user", "assistant", "human", "gpt", "text", b"x", datetime.date(2026, 1, 1)]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=2)
    | st.fixed_dictionaries({"role": inner, "content": inner}) | st.fixed_dictionaries({"from": inner, "value": inner})
    | st.fixed_dictionaries({"type": st.just("text"), "text": inner}),
    max_leaves=8,
)  # fmt: skip
FIELDS = st.sampled_from(
    "messages conversations turns prompt completion instruction input output history text system tools".split()
)


@settings(max_examples=300, deadline=None)
@given(st.dictionaries(FIELDS, VALUES, max_size=4) | VALUES)
def test_any_row_is_read_or_refused(row):
    """Every row gives a record, documents and a prompt, or a ValueError that starts with the row's place."""
    chats = ChatTemplate(tiny_tokenizer(), [1])
    try:
        record = parse_record(row, "the row")
        chats.prompt_ids(first_prompt(prompt_of(record)), where=record.where)
        training_documents(chats, record)
    except ValueError as e:
        assert str(e).startswith("the row")


# -- skipped records --------------------------------------------------------------------------------------------------


def test_bad_records_are_skipped_on_request(tmp_path):
    """Bad records can be skipped; a line that is not JSON cannot."""
    rows = [{"text": "a"}, {"text": HALF}, {"messages": [{"role": "user", "content": 5}]}, [], {"text": "b"}]
    why: list[str] = []
    assert texts(read_records([jsonl(tmp_path / "a.jsonl", rows)], skip=why.append)) == ["a", "b"]
    assert [w.split(", ")[1].split(":")[0][:6] for w in why] == ["line 2", "line 3", "line 4"]
    with pytest.raises(ValueError, match=r"every record of .*bad\.jsonl was refused, the first because: .*line 1"):
        read_records([jsonl(tmp_path / "bad.jsonl", rows[1:2])], skip=why.append)
    (tmp_path / "a.jsonl").write_text('{"text": "a"}\n{"text": ')
    with pytest.raises(ValueError, match="line 2 is not JSON"):
        read_records([str(tmp_path / "a.jsonl")], skip=why.append)


# -- formats ------------------------------------------------------------------------------------------------------


def test_json_lists_and_single_objects(tmp_path):
    (tmp_path / "list.json").write_text(json.dumps([{"text": "a"}, {"text": "b"}]))
    (tmp_path / "single.json").write_text(json.dumps({"text": "c"}))
    records = read_records([str(tmp_path / "list.json"), str(tmp_path / "single.json")])
    assert texts(records) == ["a", "b", "c"]
    assert records[1].where.endswith("list.json, record 2")


def test_txt_is_one_text(tmp_path):
    (tmp_path / "a.txt").write_text("one\n\ntwo Ünïcødé\n", encoding="utf-8")
    assert texts(read_records([str(tmp_path / "a.txt")])) == ["one\n\ntwo Ünïcødé\n"]


def test_a_byte_order_mark_is_no_text(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"text": "a"}\n', encoding="utf-8-sig")
    assert texts(read_records([str(tmp_path / "a.jsonl")])) == ["a"]


def test_blank_lines_are_skipped(tmp_path):
    (tmp_path / "a.jsonl").write_text('\n{"text": "a"}\n  \n{"text": "b"}')
    assert [r.where[-6:] for r in read_records([str(tmp_path / "a.jsonl")])] == ["line 2", "line 4"]


def test_csv(tmp_path):
    (tmp_path / "a.csv").write_text('text,label\n"one, two",1\nthree,2\n')
    records = read_records([str(tmp_path / "a.csv")])
    assert texts(records) == ["one, two", "three"] and records[1].where.endswith("a.csv, row 2")


def test_parquet(tmp_path):
    import datasets

    rows = [{"messages": [USER, ANSWER], "tools": None}, {"messages": [SYSTEM, USER, ANSWER], "tools": None}]
    datasets.Dataset.from_list(rows).to_parquet(tmp_path / "a.parquet")
    assert [r.messages for r in read_records([str(tmp_path / "a.parquet")])] == [r["messages"] for r in rows]


# -- sources ------------------------------------------------------------------------------------------------------


def test_globs_directories_and_many_sources_in_order(tmp_path):
    for name in ("b", "a", "deep/c"):
        jsonl(tmp_path / "d" / f"{name}.jsonl", [{"text": name}])
    (tmp_path / "d" / "e.txt").write_text("e")
    (tmp_path / "d" / "README.md").write_text("not data")
    single = jsonl(tmp_path / "z.jsonl", [{"text": "z"}])
    assert texts(read_records([single, str(tmp_path / "d" / "*.jsonl")])) == ["z", "a", "b"]
    assert texts(read_records([str(tmp_path / "d"), single])) == ["a", "b", "deep/c", "e", "z"]
    assert texts(read_records([str(tmp_path / "**" / "c.jsonl")])) == ["deep/c"]


def test_directories_of_save_to_disk(tmp_path):
    """Only the rows that the directory lists, whatever else is in it; of several splits, `train`."""
    import datasets

    def saved(text: str) -> datasets.Dataset:
        return datasets.Dataset.from_list([{"text": text}, {"text": "b"}])

    saved("a").save_to_disk(tmp_path / "all" / "one", num_shards=2)
    saved("cached").save_to_disk(tmp_path / "other")
    (tmp_path / "other" / "data-00000-of-00001.arrow").rename(tmp_path / "all" / "one" / "cache-1.arrow")
    assert texts(read_records([str(tmp_path / "all" / "one")])) == ["a", "b"]
    splits = datasets.DatasetDict({"test": saved("test"), "train": saved("train")})
    splits.save_to_disk(tmp_path / "all" / "splits")
    assert texts(read_records([str(tmp_path / "all" / "splits")])) == ["train", "b"]
    assert texts(read_records([str(tmp_path / "all" / "splits" / "test")])) == ["test", "b"]
    jsonl(tmp_path / "all" / "z.jsonl", [{"text": "z"}])
    assert texts(read_records([str(tmp_path / "all")])) == ["a", "b", "train", "b", "z"]
    datasets.DatasetDict({"dev": saved("dev")}).save_to_disk(tmp_path / "dev")
    assert texts(read_records([str(tmp_path / "dev")])) == ["dev", "b"]
    datasets.DatasetDict({"dev": saved("dev"), "test": saved("test")}).save_to_disk(tmp_path / "two")
    with pytest.raises(ValueError, match=r"two has the splits dev, test; give one of them, such as .*two/dev"):
        read_records([str(tmp_path / "two")])


@pytest.mark.parametrize(("share", "count"), [("0.25", 25), ("0.5", 50), ("1", 100), ("2", 200), ("1.5", 150)])
def test_a_share_takes_that_many(tmp_path, share, count):
    source = jsonl(tmp_path / "a.jsonl", [{"text": str(i)} for i in range(100)]) + f"@{share}"
    records = read_records([source], seed=3)
    assert len(records) == count
    assert set(texts(records)) <= {str(i) for i in range(100)}
    assert len(set(texts(records))) == min(count, 100)


def test_shares_are_drawn_by_the_seed(tmp_path):
    source = jsonl(tmp_path / "a.jsonl", [{"text": str(i)} for i in range(100)]) + "@0.3"
    first, again, other = (texts(read_records([source], seed=s)) for s in (1, 1, 2))
    assert first == again != other


def test_a_share_of_nothing_is_refused(tmp_path):
    source = jsonl(tmp_path / "a.jsonl", [{"text": str(i)} for i in range(40)]) + "@0.01"
    with pytest.raises(ValueError, match="takes none of its 40 records"):
        read_records([source])


def test_equal_records_have_equal_content_keys(tmp_path):
    """The key depends on the content only, so a chat that is held out is held out of every file that contains it."""
    rows = [{"messages": [{"role": "user", "content": str(i // 2)}]} for i in range(6)]
    records = read_records([jsonl(tmp_path / "a.jsonl", rows), jsonl(tmp_path / "b.jsonl", rows[:2])])
    assert len({r.content_key() for r in records}) == 3 and len({r.where for r in records}) == 8


@pytest.mark.parametrize(("source", "whole"), [("a.jsonl@0.5", True), ("*.jsonl", True), ("owner/name:train@2", False)])
def test_local_sources_become_absolute(source, whole, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert absolute_source(source) == (f"{tmp_path}/{source}" if whole else source)


def test_an_at_sign_in_a_path_is_no_share(tmp_path):
    plain = jsonl(tmp_path / "me@home" / "a.jsonl", [{"text": "a"}])
    named = jsonl(tmp_path / "b@2.jsonl", [{"text": "b"}])
    assert texts(read_records([plain, f"{plain}@2", named])) == ["a", "a", "a", "b"]


def test_an_existing_path_is_not_a_glob(tmp_path, monkeypatch):
    """An existing path is read as it is, even if its name or its directories contain glob characters."""
    jsonl(tmp_path / "b1.jsonl", [{"text": "b1"}])
    assert texts(read_records([str(tmp_path / "b[1].jsonl")])) == ["b1"]  # no file has that name, so it is a glob
    jsonl(tmp_path / "b[1].jsonl", [{"text": "b[1]"}])
    assert texts(read_records([str(tmp_path / "b[1].jsonl")])) == ["b[1]"]
    assert texts(read_records([str(tmp_path / "b[1].jsonl@2")])) == ["b[1]", "b[1]"]
    for directory in ("run1", "run[1]"):
        jsonl(tmp_path / directory / "a.jsonl", [{"text": directory}])
    assert texts(read_records([str(tmp_path / "run[1]")])) == ["run[1]"]
    assert texts(read_records([str(tmp_path / "run[1]" / "*.jsonl")])) == ["run[1]"]
    monkeypatch.chdir(tmp_path / "run[1]")
    assert texts(read_records([absolute_source("*.jsonl")])) == ["run[1]"]


@pytest.mark.parametrize("share", ["0", "100.5", "99999999", "9" * 200])
def test_a_share_outside_its_limits_is_refused(tmp_path, share):
    refused(
        jsonl(tmp_path / "a.jsonl", [{"text": "a"}]) + f"@{share}", "the share after @ must be above 0 and at most 100"
    )


@pytest.mark.parametrize(
    ("source", "asked"),
    [
        ("owner/name", ("owner/name", "train", None, 1)),
        ("owner/name@2", ("owner/name", "train", None, 2)),
        ("owner/name@main", ("owner/name", "train", "main", 1)),
        ("owner/name@main@2", ("owner/name", "train", "main", 2)),
        ("owner/name@refs/pr/1:test", ("owner/name", "test", "refs/pr/1", 1)),
        ("owner/name@1.0:train[:10]@2", ("owner/name", "train[:10]", "1.0", 2)),
    ],
)
def test_hub_ids_name_a_revision_and_a_split(monkeypatch, source, asked):
    """The text after @ is a share if it is a number, otherwise a revision."""
    import datasets

    name, split, revision, times = asked
    calls = []
    monkeypatch.setattr(datasets, "load_dataset", lambda n, **k: calls.append((n, k)) or [{"text": "a"}])
    check_source(source, "--data")
    assert texts(read_records([source])) == ["a"] * times
    assert (
        calls == [(name, {"split": split, "revision": revision, "trust_remote_code": False})]
        and absolute_source(source) == source
    )


def test_a_missing_source_is_named_with_its_flag(tmp_path):
    for source in (tmp_path / "none.jsonl", tmp_path / "none*.jsonl@0.5"):
        with pytest.raises(ValueError, match=r"^--eval-prompts .*none.* does not exist"):
            check_source(str(source), "--eval-prompts")


@pytest.mark.parametrize("name", ["owner/nothing", "owner/Nothing-2.5", "owner/nothing:test", "owner/n:train[:10]"])
def test_an_unreachable_hub_id_gives_a_one_line_error(monkeypatch, tmp_path, name):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match="is not a local file and cannot be loaded from the hub") as error:
        read_records([name])
    assert str(error.value).startswith(f"{name} is") and "\n" not in str(error.value)


# -- refusals ---------------------------------------------------------------------------------------------------------


def refused(source, match):
    with pytest.raises(ValueError, match=match) as error:
        read_records([str(source)])
    return str(error.value)


def test_missing_and_empty_files(tmp_path):
    refused(tmp_path / "none.jsonl", r"none\.jsonl does not exist")
    refused(tmp_path / "none*.jsonl", "does not exist")
    (tmp_path / "empty.jsonl").touch()
    refused(tmp_path / "empty.jsonl", r"empty\.jsonl is empty")
    (tmp_path / "blank.jsonl").write_text("\n\n")
    refused(tmp_path / "blank.jsonl", "contains no records")
    (tmp_path / "void").mkdir()
    refused(tmp_path / "void", "contains no records")


def test_broken_json_names_its_line(tmp_path):
    lines = [json.dumps({"text": str(i)}) for i in range(10_000)]
    lines[6_999] = '{"text": "cut o'
    (tmp_path / "a.jsonl").write_text("\n".join(lines))
    assert "nothing was skipped" in refused(tmp_path / "a.jsonl", r"a\.jsonl, line 7000 is not JSON")
    (tmp_path / "a.json").write_text('[{"text": "a"},')
    refused(tmp_path / "a.json", r"a\.json, record 2 is not JSON")


@pytest.mark.parametrize(
    ("row", "match"),
    [
        ({"question": "a", "answer": 5}, r"line 1 has none of .* fields are answer \(int\), question \(str\)"),
        ({"messages": []}, "line 1 has none of"),
        ({"text": 5}, "line 1 has none of"),
        (["text"], "line 1 is a list, not an object"),
        ({"messages": "hello"}, "line 1: its messages are a str, not a list"),
        ({"conversations": {"from": "human", "value": "x"}}, "line 1: its messages are a dict, not a list"),
        ({"messages": [USER, {"content": "no role"}]}, "line 1, message 2 needs a `role` and a `content`"),
        ({"messages": [{"role": None, "content": "null role"}]}, "line 1, message 1 needs a `role`"),
        ({"messages": ["hello"]}, "line 1, message 1 needs a `role`"),
        (
            {"conversations": [{"from": "martian", "value": "x"}]},
            "line 1: unknown speaker 'martian'; the known ones are human",
        ),
        (
            {"conversations": [{"from": ["human"], "value": "x"}]},
            r"line 1: unknown speaker \['human'\]; the known ones are human",
        ),
        ({"turns": ["a", 5]}, "line 1: its `turns` are not a list of strings"),
        ({"prompt": "a", "completion": [ANSWER]}, "line 1: its prompt is a str and its completion a list; give two"),
        ({"prompt": [], "completion": []}, "line 1: its prompt is a list and its completion a list; give two"),
        ({"instruction": "a", "input": 5, "output": "b"}, "line 1: its `input` is a int, not a string"),
        (
            {"instruction": "a", "history": ["b"], "output": "b"},
            r"line 1: its `history` is not a list of \[instruction, ",
        ),
        ({"instruction": "a", "history": 5, "output": "b"}, "line 1: its `history` is not a list of .*: 5"),
        ({"conversations": [{"from": "human"}]}, "line 1: a ShareGPT turn needs `from` and `value`"),
    ],
)
def test_odd_rows_are_refused_with_their_place(tmp_path, row, match):
    refused(jsonl(tmp_path / "a.jsonl", [row]), match)


def test_unreadable_files_are_named(tmp_path):
    (tmp_path / "a.md").write_text("# hello")
    refused(tmp_path / "a.md", r"a\.md: fledge reads \.jsonl")
    (tmp_path / "a.parquet").write_bytes(b"PAR1 and nothing more")
    refused(tmp_path / "a.parquet", r"a\.parquet cannot be read as parquet")
    (tmp_path / "a.jsonl").write_bytes('{"text": "é"}'.encode("latin-1"))
    refused(tmp_path / "a.jsonl", r"a\.jsonl is not UTF-8")


@pytest.mark.parametrize("share", ["half", "-1", "", "0.5x"])
def test_a_share_that_is_no_number_is_refused(tmp_path, share):
    source = jsonl(tmp_path / "a.jsonl", [{"text": "a"}])
    refused(f"{source}@{share}", "the text after @ must be the share")


def test_json_lines_named_json(tmp_path):
    """Many hub files named .json contain JSON lines; errors name the line too."""
    file = tmp_path / "chats.json"
    file.write_text('{"text": "one"}\n{"text": "two"}\n')
    assert [r.text for r in read_records([str(file)])] == ["one", "two"]
    file.write_text('{"text": "one"}\n{"text": \n')
    with pytest.raises(ValueError, match="line 2 is not JSON"):
        read_records([str(file)])
