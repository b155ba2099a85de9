"""Parsing and validating data rows: each becomes a conversation, a text, or user turns without answers. The columns of
a row may have other names than those of fledge's layouts."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from fledge.data.messages import check_json, check_messages, check_text, shown
from fledge.io.fields import check_template_kwargs, parse_json

SHAREGPT_ROLES = {
    "human": "user", "user": "user", "gpt": "assistant", "chatgpt": "assistant", "assistant": "assistant",
    "bing": "assistant", "bard": "assistant", "model": "assistant", "bot": "assistant", "function_call": "assistant",
    "system": "system", "tool": "tool", "observation": "tool", "tool_response": "tool", "function_response": "tool",
}  # fmt: skip
ROLE_NAMES, CONTENT_NAMES = ("role", "from", "speaker"), ("content", "value", "text")  # of the fields of a message
LAYOUTS = "`messages`, `conversations`, `turns`, `prompt`, `instruction` or `text`"
TEMPLATE_FIELDS = ("reasoning_content", "reasoning", "thinking", "tool_calls", "tool_call_id", "name")


@dataclass(frozen=True)
class Record:
    """One data row: a conversation (`messages`, optionally with `tools`), a plain `text`, or unanswered user `turns`.

    The first `prompt_length` messages, or characters of the text, are a prompt: context, not supervised. `where` is the
    record's location in the data, for error messages. `template_kwargs` are variables of the chat template for this
    record; the record's variables take precedence over the command's.
    """

    where: str
    messages: list[dict[str, Any]] | None = None
    text: str | None = None
    tools: list[Any] | None = None
    turns: tuple[str, ...] = ()
    prompt_length: int = 0
    template_kwargs: dict[str, Any] | None = None

    def content_key(self) -> str:
        """A key that is equal for records with the same content, regardless of their location."""
        return json.dumps([self.messages, self.text, self.tools, self.turns], sort_keys=True)


def parse_record(row: Any, where: str) -> Record:
    """Parses a row into a record.

    If a row has the fields of several layouts, the first non-empty one in this order is used: `messages`,
    `conversations`, `turns`, `prompt` with `completion`, `instruction` with `output`, `text`, `instruction` alone,
    `prompt` alone. A row may have `chat_template_kwargs`, the record's `template_kwargs`. Raises ValueError, naming the
    location, for rows without any layout and for contents that are not text.
    """
    if not isinstance(row, dict):
        raise ValueError(f"{where} is a {type(row).__name__}, not an object with {LAYOUTS}")
    record = _parse_layout(row, where)
    if record.text is not None or not (kwargs := row.get("chat_template_kwargs")):
        return record
    what = f"{where}: its `chat_template_kwargs`"
    kwargs = _json_value(kwargs, dict, what)
    return replace(record, template_kwargs=check_template_kwargs(kwargs, what) or None)


def _parse_layout(row: dict[str, Any], where: str) -> Record:
    prompt, completion = row.get("prompt"), row.get("completion")
    has_instruction = isinstance(row.get("instruction"), str)
    if listed := row.get("messages") or row.get("conversations"):
        return _chat(row, _message_list(row, listed, where), where)
    if isinstance(turns := row.get("turns"), list) and turns:
        if not all(isinstance(t, str) for t in turns):
            raise ValueError(f"{where}: its `turns` are not a list of strings: {shown(turns)}")
        return Record(where, turns=tuple(check_text(t, where) for t in turns))
    if prompt is not None and completion is not None:
        return _prompt_completion(row, prompt, completion, where)
    if has_instruction and row.get("output") is not None:
        return _chat(row, [*_instruction(row, where), {"role": "assistant", "content": row["output"]}], where)
    if isinstance(row.get("text"), str):
        return Record(where, text=check_text(row["text"], where))
    if has_instruction:
        return _chat(row, _instruction(row, where), where)
    if prompt and isinstance(prompt, str | list):
        return _prompt_completion(row, prompt, type(prompt)(), where)
    found = ", ".join(f"{k} ({type(row[k]).__name__})" for k in sorted(row)[:12])
    raise ValueError(
        f"{where} has none of {LAYOUTS}, or they are empty; its fields are {found or 'none'}. Name the right ones with "
        "--columns messages=COLUMN, or --columns instruction=COLUMN,output=COLUMN"
    )


def _chat(row: dict[str, Any], messages: list[Any], where: str, prompt_length: int = 0) -> Record:
    """A conversation, with the row's `system` prompt prepended and its `tools`."""
    checked, tools = check_messages(messages, where), _tools(row.get("tools"), where)
    if row.get("system") and checked[0]["role"] != "system":
        checked = [*check_messages([{"role": "system", "content": row["system"]}], f"{where}, `system`"), *checked]
        prompt_length += bool(prompt_length)  # the system message is part of the prompt
    if tools:
        check_json(tools, f"{where}, `tools`")
    return Record(where, messages=checked, tools=tools, prompt_length=prompt_length)


def _tools(tools: Any, where: str) -> list[Any] | None:
    """The tools of a row: a list, or a list as JSON text, as in tables, where a column cannot hold every schema."""
    if tools is None or (isinstance(tools, str) and not tools.strip()):
        return None
    return _json_value(tools, list, f"{where}: its `tools`") or None


def _message_list(row: dict[str, Any], listed: Any, where: str) -> list[Any]:
    """The value of `messages` or `conversations` as messages with `role` and `content`."""
    if isinstance(listed, str) and not listed.lstrip().startswith("["):
        raise ValueError(f"{where}: its messages are a str, not a list: {shown(listed)}")
    listed = _json_value(listed, list, f"{where}: its messages")
    if all(map(_has_role, listed)):
        return [_known_role(m) for m in listed]
    return listed if row.get("messages") and not any(map(_is_turn, listed)) else [_sharegpt(t, where) for t in listed]


def _json_value(given: Any, kind: type, what: str) -> Any:
    """The value `given`, or the value that the JSON text `given` encodes (tables store lists as JSON text). Raises
    ValueError, calling the value `what`, for text that is not JSON and for a value whose type is not `kind`."""
    try:
        value = parse_json(given) if isinstance(given, str) else given
    except ValueError as e:
        raise ValueError(f"{what} are a text that is not JSON: {shown(given)}") from e
    if not isinstance(value, kind):
        wanted = "a list" if kind is list else "an object"
        raise ValueError(f"{what} are a {type(value).__name__}, not {wanted}: {shown(given)}")
    return value


def _known_role(message: dict[str, Any]) -> dict[str, Any]:
    """A message whose role has the name that chat templates use; roles not in SHAREGPT_ROLES stay as given."""
    role = message["role"]
    known = SHAREGPT_ROLES.get(role, role) if isinstance(role, str) else role
    return message if known == role else message | {"role": known}


def _has_role(message: Any) -> bool:
    """Whether a message names its role as chat templates do."""
    return isinstance(message, dict) and "role" in message and ("content" in message or "value" not in message)


def _is_turn(message: Any) -> bool:
    """Whether a message names its speaker or text as ShareGPT does."""
    return isinstance(message, dict) and not _has_role(message) and not message.keys().isdisjoint(ROLE_NAMES)


def _sharegpt(turn: Any, where: str) -> dict[str, Any]:
    """A ShareGPT turn, with fields of any known name, as a message; the turn's TEMPLATE_FIELDS are kept."""
    fields = turn if isinstance(turn, dict) else {}
    role, content = (next((n for n in known if n in fields), None) for known in (ROLE_NAMES, CONTENT_NAMES))
    if role is None or (content is None and not fields.get("tool_calls")):
        raise ValueError(f"{where}: a ShareGPT turn needs `from` and `value`, got {shown(turn)}")
    speaker = turn[role]
    if not isinstance(speaker, str) or speaker not in SHAREGPT_ROLES:
        raise ValueError(f"{where}: unknown speaker {shown(speaker)}; the known ones are {', '.join(SHAREGPT_ROLES)}")
    kept = {field: turn[field] for field in TEMPLATE_FIELDS if turn.get(field) is not None}
    if speaker == "function_call" and "tool_calls" not in kept:
        return {"role": "assistant", "content": None, "tool_calls": _called(turn[content], where)} | kept
    return {"role": SHAREGPT_ROLES[speaker], "content": turn.get(content)} | kept


def _called(value: Any, where: str) -> list[dict[str, Any]]:
    """The tool calls of a ShareGPT turn `function_call`: a JSON object with `name` and `arguments`, or several."""
    try:
        found = parse_json(value) if isinstance(value, str) else value
    except ValueError:
        found = None
    calls = found if isinstance(found, list) else [found]
    if not calls or not all(isinstance(call, dict) and isinstance(call.get("name"), str) for call in calls):
        raise ValueError(
            f"{where}: a function_call turn needs a JSON object with `name` and `arguments`, got {shown(value)}"
        )
    named = [{"name": call["name"], "arguments": call.get("arguments", {})} for call in calls]
    return [{"type": "function", "function": function} for function in named]


def _prompt_completion(row: dict[str, Any], prompt: Any, completion: Any, where: str) -> Record:
    """TRL's prompt-completion layout: two strings, or two lists of messages. The answer to messages may be a string."""
    if isinstance(prompt, str) and isinstance(completion, str):
        return Record(where, text=check_text(prompt + completion, where), prompt_length=len(prompt))
    if isinstance(prompt, list) and isinstance(completion, str) and prompt and completion:
        completion = [{"role": "assistant", "content": completion}]
    if isinstance(prompt, list) and isinstance(completion, list) and prompt:
        prompt, completion = ([_known_role(m) if _has_role(m) else m for m in part] for part in (prompt, completion))
        return _chat(row, prompt + completion, where, prompt_length=len(prompt))
    raise ValueError(
        f"{where}: its prompt is a {type(prompt).__name__} and its completion a {type(completion).__name__}; give "
        "two strings or two lists of messages"
    )


def _instruction(row: dict[str, Any], where: str) -> list[Any]:
    """Alpaca's layout: the turns of `history`, then `instruction` and `input` as one user message.

    Instruction and input are joined by a newline, as in LLaMA-Factory.
    """
    messages: list[Any] = []
    history = row.get("history") or []
    for pair in history if isinstance(history, list) else [history]:
        if not isinstance(pair, list) or len(pair) != 2:
            raise ValueError(f"{where}: its `history` is not a list of [instruction, output] pairs: {shown(pair)}")
        messages += [{"role": "user", "content": pair[0]}, {"role": "assistant", "content": pair[1]}]
    extra = row.get("input")
    if not isinstance(extra, str | None):
        raise ValueError(f"{where}: its `input` is a {type(extra).__name__}, not a string: {shown(extra)}")
    content = row["instruction"] + (f"\n{extra}" if extra else "")
    return [*messages, {"role": "user", "content": content}]


COLUMNS = (
    "messages", "conversations", "turns", "prompt", "completion", "instruction", "input", "output", "history", "text",
    "system", "tools", "chat_template_kwargs",
)  # fmt: skip
BESIDE = ("system", "tools", "chat_template_kwargs")  # columns that are read even if `columns` does not map the names
MOST_SHOWN = 20  # at most so many columns are listed in an error message


def parse_columns(text: str) -> dict[str, str]:
    """--columns as a mapping of names in fledge's layouts to names of columns. Raises ValueError unless the option is a
    list of NAME=COLUMN pairs."""
    mapping: dict[str, str] = {}
    for pair in text.split(","):
        name, _, column = (part.strip() for part in pair.partition("="))
        if not (name and column):
            raise ValueError(
                f"--columns {text} is not a list of NAME=COLUMN, such as messages=dialog, or "
                "prompt=question,completion=answer"
            )
        if name in mapping:
            raise ValueError(f"--columns {text} has {name} twice")
        mapping[name] = column
    return check_columns(mapping, "--columns")


def check_columns(columns: dict[str, str], what: str) -> dict[str, str]:
    """Returns the mapping. Raises ValueError, calling the mapping `what`, for a key that no layout of fledge has."""
    if unknown := next((name for name in columns if name not in COLUMNS), None):
        swapped = f"; write {columns[unknown]}={unknown}" if columns[unknown] in COLUMNS else ""
        raise ValueError(f"{what}: {unknown} is not a name that fledge reads ({', '.join(COLUMNS)}){swapped}")
    return columns


def map_columns(row: Any, columns: Mapping[str, str], where: str) -> Any:
    """A row under the names of fledge's layouts: the mapped columns, and BESIDE.

    Raises ValueError, listing the row's columns, if the row lacks a mapped column.
    """
    if not isinstance(row, dict):
        return row
    if missing := next((column for column in columns.values() if column not in row), None):
        found = ", ".join(list(row)[:MOST_SHOWN])
        raise ValueError(f"{where} has no column {missing}, which `columns` names; its columns are {found}")
    beside = {name: row[name] for name in BESIDE if name in row and name not in columns}
    return beside | {name: row[column] for name, column in columns.items()}
