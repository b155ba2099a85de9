"""How options name data sources: as a text, as a mapping, and as JSON; and that each form is read back."""

import json

import pytest

from fledge.data.sources import Source

THINKING, COLUMNS = {"enable_thinking": True}, {"messages": "dialog"}


@pytest.mark.parametrize(
    ("written", "source"),
    [
        ("chats.jsonl", Source("chats.jsonl")),
        ("chats.jsonl@0.5", Source("chats.jsonl", 0.5)),
        ("data/*.jsonl@2", Source("data/*.jsonl", 2.0)),
        ("owner/name@1.0@1", Source("owner/name@1.0")),
        ("owner/name@main:train[:100]", Source("owner/name@main:train[:100]")),
        ({"source": "chats.jsonl"}, Source("chats.jsonl")),
        ({"source": "chats.jsonl", "share": None, "template_kwargs": {}, "columns": {}}, Source("chats.jsonl")),
        ({"source": "chats.jsonl@0.5"}, Source("chats.jsonl", 0.5)),
        ({"source": "owner/name@1.0", "share": 0.5}, Source("owner/name@1.0", 0.5)),
        ({"source": "a.jsonl", "template_kwargs": THINKING}, Source("a.jsonl", template_kwargs=THINKING)),
        ({"source": "a.jsonl", "share": 2, "columns": COLUMNS}, Source("a.jsonl", 2.0, columns=COLUMNS)),
    ],
)
def test_every_form_of_a_source_is_read_and_written_back(written, source):
    assert Source.parse(written) == source
    assert Source.parse(source.as_option()) == source
    assert Source.parse(str(source)) == source
    if isinstance(written, dict):
        assert Source.parse(json.dumps(written)) == source


def test_a_source_without_options_is_written_as_a_text():
    assert Source.parse({"source": "chats.jsonl", "share": 0.5}).as_option() == "chats.jsonl@0.5"
    assert Source("owner/name@1.0").as_option() == "owner/name@1.0@1"
    assert Source("a.jsonl", 0.5, THINKING).as_option() == {
        "source": "a.jsonl", "share": 0.5, "template_kwargs": THINKING,
    }  # fmt: skip


def test_an_existing_file_is_never_read_as_json(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "{x}.jsonl").write_text("{}")
    assert Source.parse("{x}.jsonl") == Source("{x}.jsonl")


@pytest.mark.parametrize(
    ("written", "message"),
    [
        ({"source": "a.jsonl", "kwargs": {}}, "'kwargs' is not an option of a source; it has source, share"),
        ({"share": 0.5}, "names no source"),
        ({"source": ["a.jsonl"]}, "names no source"),
        ({"source": "a.jsonl@0.5", "share": 0.5}, "gives the share twice"),
        ({"source": "a.jsonl", "share": 0}, "`share` must be a number above 0"),
        ({"source": "a.jsonl", "share": True}, "`share` must be a number above 0"),
        ({"source": "a.jsonl", "share": "half"}, "`share` must be a number above 0"),
        ({"source": "a.jsonl", "template_kwargs": "thinking"}, "must be a mapping"),
        ({"source": "a.jsonl", "template_kwargs": {"chat_template": "x"}}, "sets chat_template"),
        ({"source": "a.jsonl", "columns": {"messages": 1}}, "must map names to names"),
        ('{"source": "a.jsonl"', "neither a file nor JSON"),
        ("a.jsonl@half", "must be the share"),
    ],
)
def test_what_is_no_source_is_refused(written, message):
    with pytest.raises(ValueError, match=message):
        Source.parse(written)


def test_a_long_mapping_is_no_file_name():
    """File names end at 255 bytes; asking for such a file raises an OSError of its own."""
    given = {"source": "a.jsonl", "template_kwargs": {"system": "x" * 300}}
    assert Source.parse(json.dumps(given)).template_kwargs == given["template_kwargs"]
    assert Source.parse("y" * 300).path == "y" * 300
