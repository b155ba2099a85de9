"""The page "Every command and option", from the commands and the dataclasses of their options."""

from __future__ import annotations

import dataclasses
import inspect
import types
from typing import Any, get_args, get_origin

INTRO = """# Every command and option

This page is generated from the commands themselves. `fledge COMMAND --help` prints the same for one command. In a
recipe and in `fledge.train_draft`, the options of `fledge train` have their names with underscores: `--draft-vocab` is
`draft_vocab`.
"""
WORDS = {str: "text", int: "integer", float: "number"}


def options_page() -> str:
    """The page as Markdown: a section for each command, with its options in the order of --help."""
    from fledge import cli
    from fledge.options import Options

    kinds = {kind.__doc__: kind for kind in _subclasses(Options)}
    shown = sorted((c for c in cli.app.registered_commands if not c.hidden), key=_name)
    return "\n".join([INTRO, *(_section(c, kinds.get(c.help)) for c in shown)])


def _subclasses(kind: type) -> list[type]:
    return [kind, *(sub for k in kind.__subclasses__() for sub in _subclasses(k))]


def _name(command: Any) -> str:
    return command.name or command.callback.__name__.replace("_", "-")


def _section(command: Any, kind: type | None) -> str:
    """A command's section: what it does, and its options. `kind` is the dataclass of its options, if it has one."""
    metadata = {f.name: f.metadata for f in dataclasses.fields(kind)} if kind else {}
    help = command.help or inspect.getdoc(command.callback) or ""
    lines = [f"## fledge {_name(command)}", "", _escaped(help), "", '<dl class="options">']
    for p in inspect.signature(command.callback, eval_str=True).parameters.values():
        lines += _option(p, metadata.get(p.name, {}))
    return "\n".join([*lines, "</dl>", ""])


def _option(parameter: inspect.Parameter, metadata: Any) -> list[str]:
    """An option as an entry of the list: its flags, what it does, and its values. Nothing if it is hidden."""
    hint, *infos = get_args(parameter.annotation) or (None,)
    info = next((i for i in infos if hasattr(i, "param_decls")), None)
    if info is None or info.hidden:
        return []
    flags = _flags(info) or (parameter.name.upper(),)
    names = ", ".join(f"<code>{_escaped(flag)}</code>" for flag in flags)
    kind = "" if hint is bool else f" <em>{_kind(hint, metadata)}</em>"
    facts = [_default(parameter.default), _bounds(metadata), _repeatable(hint)]
    told = " ".join(f"{fact}." for fact in facts if fact)
    return [f"<dt>{names}{kind}</dt>", f"<dd>{_escaped(info.help or '')}{'<br>' + told if told else ''}</dd>"]


def _flags(info: Any) -> list[str]:
    """The flags of an option; none of an argument. typer keeps the first of those given in Annotated as its default."""
    first = [info.default] if isinstance(info.default, str) else []
    return [text for text in (*first, *(info.param_decls or ())) if text.startswith("-")]


def _kind(hint: Any, metadata: Any) -> str:
    """What kind of value an option takes, as words."""
    if word := metadata.get("word"):
        return f"integer or {word}"
    plain = [h for h in (get_args(hint) or (hint,)) if h is not types.NoneType]
    return " or ".join(WORDS.get(h, getattr(h, "__name__", "value").lower()) for h in plain)


def _default(default: Any) -> str:
    """Whether an option is required, or its default, unless the help text describes that or there is none."""
    if default is inspect.Parameter.empty:
        return "Required"
    shown = isinstance(default, str | int | float) and not isinstance(default, bool) and default != ""
    return f"Default: <code>{_escaped(str(default))}</code>" if shown else ""


def _bounds(metadata: Any) -> str:
    """The bounds of a number, in the words of the message about a value outside of them."""
    words = (("minimum", "at least"), ("greater_than", "above"), ("maximum", "at most"))
    bounds = [f"{text} {metadata[key]}" for key, text in words if metadata.get(key) is not None]
    return " and ".join(bounds).capitalize()


def _repeatable(hint: Any) -> str:
    return "Can be given several times" if get_origin(hint) is list else ""


def _escaped(text: str) -> str:
    """Text for HTML in which Markdown has no meaning either."""
    for character in "&<>*_`[]":
        text = text.replace(character, f"&#{ord(character)};") if character != "&" else text.replace("&", "&amp;")
    return text
