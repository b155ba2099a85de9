"""Reads and writes a safe subset of YAML: mappings, lists, strings, numbers, true, false and null.

Tags, anchors, aliases (which let a short file expand to any size), duplicate keys, several documents and files of more
than MAX_BYTES are refused. Plain scalars follow YAML 1.2: `1e-4` is a number, and `yes` and `12:30` are strings.
"""

from __future__ import annotations

import re
from typing import Any

import yaml

MAX_BYTES = 2**20
BREAKS = re.compile("[\x85\u2028\u2029]")
NULL, BOOL, INT, FLOAT = (f"tag:yaml.org,2002:{name}" for name in ("null", "bool", "int", "float"))
FLOATS = re.compile(r"[-+]?(\.[0-9]+|[0-9]+\.[0-9]*|[0-9]+(\.[0-9]*)?[eE][-+]?[0-9]+|\.[0-9]+[eE][-+]?[0-9]+)$")
SCALARS = {
    NULL: (re.compile(r"(~|null|Null|NULL|)$"), ["~", "n", "N", ""]),
    BOOL: (re.compile(r"(true|True|TRUE|false|False|FALSE)$"), list("tTfF")),
    INT: (re.compile(r"[-+]?[0-9]+$"), list("-+0123456789")),
    FLOAT: (FLOATS, list("-+.0123456789")),
}


class _Loader(yaml.SafeLoader):
    yaml_implicit_resolvers: dict[str, Any] = {}  # noqa: RUF012 (PyYAML's own attribute)

    def compose_node(self, parent: Any, index: Any) -> yaml.Node:
        event = self.peek_event()
        line = event.start_mark.line + 1
        if isinstance(event, yaml.AliasEvent) or event.anchor is not None:
            raise ValueError(f"line {line}: anchors (&) and aliases (*) are not allowed; repeat the value")
        if event.tag is not None:
            raise ValueError(f"line {line}: tags (!) are not allowed; write the plain value, in quotes if necessary")
        return super().compose_node(parent, index)


class _Dumper(yaml.SafeDumper):
    """Quotes every string that YAML 1.1 or 1.2 would read as another type."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


for _tag, (_pattern, _first_characters) in SCALARS.items():
    _Loader.add_implicit_resolver(_tag, _pattern, _first_characters)
_Dumper.add_implicit_resolver(FLOAT, FLOATS, SCALARS[FLOAT][1])


def read_yaml(text: str) -> Any:
    """The value of a YAML document. Raises ValueError, with the line number if known, if it is not valid or refused."""
    if len(text.encode(errors="surrogatepass")) > MAX_BYTES:
        raise ValueError(f"it has more than {MAX_BYTES:,} bytes, which is too large for a recipe")
    try:
        node = yaml.compose(text, _Loader)
        return None if node is None else _value(node)
    except yaml.YAMLError as e:
        raise ValueError(f"it is not YAML: {' '.join(str(e).split())}") from e
    except RecursionError as e:
        raise ValueError("it is nested too deeply") from e


def write_yaml(value: dict[str, Any]) -> str:
    """A mapping as YAML that `read_yaml` reads back, in the same order. Raises ValueError if it would be too long."""

    def dumped(unicode: bool) -> str:
        return yaml.dump(value, Dumper=_Dumper, sort_keys=False, allow_unicode=unicode, width=120)

    text = dumped(unicode=True)
    text = dumped(unicode=False) if BREAKS.search(text) else text  # PyYAML does not escape these line breaks
    if len(text.encode()) > MAX_BYTES:
        raise ValueError(f"the recipe would have more than {MAX_BYTES:,} bytes; give the data as directories or globs")
    return text


def _value(node: yaml.Node) -> Any:
    if isinstance(node, yaml.SequenceNode):
        return [_value(item) for item in node.value]
    if isinstance(node, yaml.MappingNode):
        return _mapping(node)
    if node.tag == INT and len(node.value) > 400:
        raise ValueError(f"line {node.start_mark.line + 1}: a number of {len(node.value):,} digits")
    convert = {NULL: lambda _: None, BOOL: lambda x: x.lower() == "true", INT: int, FLOAT: float}
    return convert.get(node.tag, str)(node.value)


def _mapping(node: yaml.MappingNode) -> dict[str, Any]:
    mapping: dict[str, Any] = {}
    for key_node, value_node in node.value:
        line = key_node.start_mark.line + 1
        key = _value(key_node) if isinstance(key_node, yaml.ScalarNode) else None
        if not isinstance(key, str):
            raise ValueError(f"line {line}: a key must be a string; put it in quotes")
        if key in mapping:
            raise ValueError(f"line {line}: duplicate key {key}; keep one")
        mapping[key] = _value(value_node)
    return mapping
