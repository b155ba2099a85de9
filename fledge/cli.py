"""The command line. Each job is a command whose flags are the job's options; it imports torch only when it runs."""

from __future__ import annotations

import atexit
import contextlib
import contextvars
import dataclasses
import functools
import inspect
import os
import shutil
import signal
import sys
import textwrap
import threading
import warnings
from collections.abc import Callable, Iterator
from typing import Annotated, Any, NoReturn, get_origin, get_type_hints

import typer
import typer.core

from fledge import __version__
from fledge.commands import (
    chat,
    check,
    demo,
    evaluate,
    export,
    features,
    generate,
    push,
    regenerate,
    report,
    serve,
    train,
)
from fledge.commands import inspect as inspect_draft
from fledge.io.display import ProgressDisplay, fit, fit_stream, format_message, print_error, redirect_to_devnull
from fledge.io.fields import DTYPES
from fledge.io.hub import show_progress
from fledge.io.machine import ignore_signals, is_assembler_error, stopping_signals
from fledge.io.results import ResultPrinter
from fledge.measure.options import EvalOptions
from fledge.options import Options, aliases_of, default_of, flag_of, option_fields, panels_of
from fledge.regenerate.options import RegenerateOptions
from fledge.train.setup import launch
from fledge.train.setup.options import TrainOptions

# by the name of an option without `choices`: the values that a shell completes
VALUES: dict[str, tuple[str, ...]] = {
    "draft_mode": ("chain", "tree", "parallel"),
    "draft_sampling": ("coupled", "sample"),
    "draft_cache": ("stable", "unstable"),
    "target_impl": ("auto", "native", "transformers"),
    "dtype": tuple(DTYPES),
    "device": ("auto", "cpu", "cuda"),
    "draft_device": ("auto", "cpu", "cuda"),
}
TABLE_WIDTH = 100  # terminal columns; in a narrower table of help, names of options are cut off
MAX_WIDTH = 80  # of plain help


class PlainHelp:
    """A command whose help is plain text, unless a terminal is wide enough for the table of typer, which cuts off words
    in files, pipes and narrow terminals. Lines are broken at spaces alone, so that options and addresses stay
    whole."""

    def format_help(self, ctx: Any, formatter: Any) -> None:
        columns = shutil.get_terminal_size().columns
        if sys.stdout.isatty() and columns >= TABLE_WIDTH:
            super().format_help(ctx, formatter)  # type: ignore[misc]
        else:
            formatter.write("\n".join(_help_lines(self, ctx, min(columns, MAX_WIDTH))))


class Command(PlainHelp, typer.core.TyperCommand):
    """A command."""


class Group(PlainHelp, typer.core.TyperGroup):
    """The commands."""


app = typer.Typer(
    cls=Group,
    help="Train EAGLE draft models for any causal language model and decode with them, losslessly and faster.",
    no_args_is_help=True,
    pretty_exceptions_show_locals=False,
)


def _print_version(requested: bool) -> None:
    if requested:
        print(f"fledge {__version__}")
        raise typer.Exit


@app.callback()
def fledge(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version and exit.", callback=_print_version, is_eager=True)
    ] = False,
) -> None:
    """Options before the command."""


def _command(name: str, options: type[Options], job: Callable[[Any], int | None]) -> None:
    """Registers a job as the command `name`, with a flag for each of its options. The job may return an exit code."""
    hints = get_type_hints(options)
    fields = option_fields(options)
    shown = [_parameter(options, f, hints[f.name]) for f in fields]
    # a command with --config has a negation of each switch, which turns off what the file turns on
    negations = {f"no_{f.name}": f.name for f in fields if "config" in hints and hints[f.name] is bool}
    context = inspect.Parameter("context", inspect.Parameter.KEYWORD_ONLY, annotation=typer.Context)

    def run(context: typer.Context, **values: Any) -> None:
        given = {k: v for k, v in values.items() if context.get_parameter_source(k).name == "COMMANDLINE"}
        given = _apply_negations(given, negations)
        defaults = {f.name: values[f.name] for f in fields}
        try:
            # in a separate context, because the display of model loading is set for this job only
            code = contextvars.copy_context().run(job, options(**defaults | given, given=frozenset(given)))
            sys.stdout.flush()
        except BrokenPipeError:  # the reader, e.g. `| head`, has closed the pipe
            redirect_to_devnull(sys.stdout)
            raise typer.Exit(128 + signal.SIGPIPE) from None
        if code:
            raise typer.Exit(code)

    for no in negations:  # flags that --help does not list
        flag = Annotated[bool | None, typer.Option(flag_of(no), hidden=True)]
        shown.append(inspect.Parameter(no, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=flag))
    run.__signature__ = inspect.Signature([context, *shown])
    app.command(name, cls=Command, help=options.__doc__)(run)


def flags_of(kind: type[Options], f: dataclasses.Field) -> list[str]:
    """The flags of an option, its own name first."""
    return [flag_of(name) for name in (f.name, *aliases_of(kind, f.name))]


def values_of(f: dataclasses.Field) -> Callable[[str], list[str]] | None:
    """The function with which a shell completes an option's values; None if it completes paths."""
    values = f.metadata["choices"] or VALUES.get(f.name)
    return None if values is None else lambda incomplete: [v for v in values if v.startswith(incomplete)]


def _parameter(options: type[Options], f: dataclasses.Field, hint: Any) -> inspect.Parameter:
    flags, shown = flags_of(options, f), {"help": f.metadata["help"], "rich_help_panel": panels_of(options)[f.name]}
    if f.metadata["flag"] == "argument":
        info = typer.Argument(help=f.metadata["help"])
    elif word := f.metadata["word"]:
        info = typer.Option(*flags, **shown, metavar=f"<int|{word}>", parser=_number_if_one)
        hint = list[str] if get_origin(hint) is list else str  # the parser replaces it
    else:
        info = typer.Option(*flags, **shown, autocompletion=values_of(f))
    default = inspect.Parameter.empty if default_of(f) is dataclasses.MISSING else default_of(f)
    return inspect.Parameter(f.name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=Annotated[hint, info])


def _number_if_one(text: str | int) -> str | int:
    """The integer that a text is, or the text."""
    try:
        return int(text)
    except ValueError:
        return text


def _apply_negations(given: dict[str, Any], negations: dict[str, str]) -> dict[str, Any]:
    """The given values, with each negated flag replaced by its switch set to False. Raises ValueError if a switch and
    its negation were both given."""
    off = {negations[name]: False for name in given.keys() & negations.keys()}
    if both := sorted(off.keys() & given.keys()):
        raise ValueError(f"{flag_of(both[0])} and {flag_of('no_' + both[0])} contradict each other; give one")
    return {name: value for name, value in given.items() if name not in negations} | off


def _help_lines(command: Any, ctx: Any, width: int) -> Iterator[str]:
    yield command.get_usage(ctx)
    yield ""
    yield from _indented(inspect.cleandoc(command.help or ""), 2, width)
    sections: dict[str, list[tuple[str, str]]] = {}
    for p in command.get_params(ctx):
        if record := p.get_help_record(ctx):
            title = getattr(p, "rich_help_panel", None) or f"{p.param_type_name}s".capitalize()
            sections.setdefault(title, []).append(record)
    if isinstance(command, Group):
        names = command.list_commands(ctx)
        helps = [inspect.cleandoc(command.get_command(ctx, name).help or "").split("\n\n")[0] for name in names]
        sections["Commands"] = list(zip(names, helps, strict=True))
    for title, entries in sections.items():
        if entries:
            yield ""
            yield f"{title}:"
        for name, text in entries:
            yield f"  {name}"
            yield from _indented(text, 6, width)


def _indented(text: str, by: int, width: int) -> Iterator[str]:
    for paragraph in text.split("\n\n"):
        yield textwrap.indent(fit(" ".join(paragraph.split()), width - by), " " * by)


def _display(quiet: bool = False) -> ProgressDisplay:
    """A display that also shows downloads and the loading of targets."""
    display = ProgressDisplay(quiet)
    show_progress(functools.partial(display.count, passing=True))
    return display


def _train(options: TrainOptions) -> int | None:
    display = _display(quiet=os.environ.get("RANK", "0") != "0")
    if options.dry_run:
        from fledge.train.setup.dry_run import dry_run

        return dry_run(options, sys.argv[1:], ResultPrinter(), display)
    if launch.needs_processes(options):
        return launch.start_processes(options.gpus, sys.argv[1:])
    train.run(options, display.say, display)
    return None


def _showing_progress(run: Callable[[Any, Callable[[str], None], ProgressDisplay], None], options: Any) -> None:
    display = _display()
    run(options, display.say, display)


_command("train", TrainOptions, _train)
_command("demo", demo.DemoOptions, lambda o: demo.run(o, ResultPrinter(), ProgressDisplay()))
_command("generate", generate.GenerateOptions, lambda o: generate.run(o, _display()))
_command("chat", chat.ChatOptions, lambda o: chat.run(o, _display()))
_command("eval", EvalOptions, lambda o: evaluate.command(o, _display(quiet=o.json), ResultPrinter()))
_command("regenerate", RegenerateOptions, lambda o: _showing_progress(regenerate.run, o))
_command("features", features.FeaturesOptions, lambda o: _showing_progress(features.run, o))
_command("serve", serve.ServeOptions, lambda o: serve.run(o, ProgressDisplay().say))
_command("inspect", inspect_draft.InspectOptions, lambda o: int(not inspect_draft.run(o, ResultPrinter().print)))
_command("check", check.CheckOptions, lambda o: check.run(o, _display(quiet=o.json), ResultPrinter()))
_command("report", report.ReportOptions, lambda o: report.run(o, ResultPrinter().print))
_command("export", export.ExportOptions, lambda o: export.run(o, ResultPrinter().print))
_command("push", push.PushOptions, lambda o: push.run(o, ResultPrinter().print, ProgressDisplay().say))


def main() -> None:
    """Runs the command line. Errors that a user can correct are printed as one line to standard error; exit code 2."""
    _open_closed_streams()
    _handle_termination_like_ctrl_c()
    _watch_signals()
    try:
        _quiet_transformers()
        warnings.formatwarning = _format_warning
        app()
    except (ValueError, OSError, FloatingPointError) as e:
        _fail(e)
    except (KeyboardInterrupt, SystemExit) as e:
        if isinstance(e, SystemExit) and e.code != 130:  # typer's for a KeyboardInterrupt
            raise
        _end_as_interrupted()
    except Exception as e:
        if type(e).__name__ == "OutOfMemoryError":  # torch.OutOfMemoryError, by name because torch may not be imported
            _fail(f"not enough GPU memory: {e}")
        # libraries make an ImportError of a KeyboardInterrupt while they are imported; Ctrl-C ends Triton's assembler
        if not ((isinstance(e, ImportError) or is_assembler_error(e)) and _was_interrupted()):
            raise
        _end_as_interrupted()


@functools.cache
def _received_signals() -> tuple[int, int]:
    """The (read, write) ends of a pipe. Python writes the number of each received signal to the pipe."""
    ends = os.pipe()
    for end in ends:
        os.set_blocking(end, False)
    os.register_at_fork(after_in_child=lambda: signal.set_wakeup_fd(-1))  # a child's signals are not this process's
    return ends


def _watch_signals() -> None:
    if threading.current_thread() is threading.main_thread():
        _was_interrupted()  # forgets earlier signals
        signal.set_wakeup_fd(_received_signals()[1], warn_on_full_buffer=False)


def _was_interrupted() -> bool:
    """Whether a stopping signal was received since the last call; the command was then most likely interrupted."""
    with contextlib.suppress(BlockingIOError):  # nothing to read
        received = os.read(_received_signals()[0], 4096)
        return any(number in received for number in stopping_signals())
    return False


def _end_as_interrupted() -> NoReturn:
    _end_at_once_if_stopped_again()
    sys.exit(130)


def _fail(reason: object) -> None:
    """Prints an error to standard error, if open, and exits with code 2. Of several ranks, one prints the error."""
    if os.environ.get("WORLD_SIZE", "1") == "1":
        print_error(reason)
    else:
        from fledge.train.ranks import error_sentence

        if launch.first_to_say(sentence := error_sentence(reason)):
            print_error(sentence)
    try:
        sys.stdout.flush()
    except OSError:  # e.g. a full disk; without this, Python would try to flush again at exit
        redirect_to_devnull(sys.stdout)
    sys.exit(2)


def _open_closed_streams() -> None:
    """Opens /dev/null for each standard stream that is closed (`>&-`). Otherwise the next file to be opened would get
    the file descriptor of the stream, and libraries would print into it."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode))  # noqa: SIM115 (stays open until the process ends)


def _handle_termination_like_ctrl_c() -> None:
    """SIGTERM and SIGHUP raise KeyboardInterrupt, as Ctrl-C does. SIGHUP stays ignored under nohup."""
    for number in stopping_signals():
        if number != signal.SIGINT:
            signal.signal(number, signal.default_int_handler)


def _end_at_once_if_stopped_again() -> None:
    """Makes another Ctrl-C during the end of the process print no traceback. While the process waits for threads, a
    signal ends the process at once. Later signals are ignored: a signal would kill Python while it frees objects, and
    the exit code would not be 130."""
    for number in stopping_signals():
        signal.signal(number, lambda *signal_and_frame: os._exit(130))
    atexit.register(ignore_signals)
    with contextlib.suppress(OSError):  # the end of the process reports the error
        sys.stdout.flush()


def _format_warning(warning: Warning, category: type[Warning], *where: Any, **line: Any) -> str:
    """Formats a warning. Warnings of fledge are printed as messages, without the line of code that issued them."""
    if category.__module__.startswith("fledge."):
        return fit_stream(f"fledge: {format_message(warning)}", sys.stderr) + "\n"
    return _default_formatwarning(warning, category, *where, **line)


_default_formatwarning = warnings.formatwarning


def _quiet_transformers() -> None:
    """Turns off messages and progress bars of transformers and huggingface_hub. Must be called before their import."""
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("HF_HUB_VERBOSITY", "error")  # a line for each attempt to reach it
    if not sys.stderr.isatty():  # on a terminal, the hub library's own bars show downloads
        os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")


if __name__ == "__main__":
    main()
