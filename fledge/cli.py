"""The command line. Each job is a command whose flags are the job's options; it imports torch only when it runs."""

from __future__ import annotations

import atexit
import contextlib
import contextvars
import dataclasses
import functools
import inspect
import itertools
import json
import os
import signal
import sys
import threading
import warnings
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import Annotated, Any, NoReturn, get_origin, get_type_hints

import typer
import typer.core

from fledge import __version__
from fledge.commands.chat import ChatOptions
from fledge.commands.check import CheckOptions
from fledge.commands.demo import DemoOptions
from fledge.commands.evaluate import EvalOptions
from fledge.commands.export import ExportOptions
from fledge.commands.features import FeaturesOptions
from fledge.commands.generate import GenerateOptions
from fledge.commands.inspect import InspectOptions
from fledge.commands.plain_help import Group, PlainHelp
from fledge.commands.push import PushOptions
from fledge.commands.report import ReportOptions
from fledge.commands.serve import ServeOptions
from fledge.familiar import flags_of, same_option, values_of
from fledge.io.display import (
    ProgressDisplay,
    ResultPrinter,
    fit_stream,
    format_message,
    print_error,
    redirect_to_devnull,
)
from fledge.io.hub import show_progress
from fledge.io.machine import ignore_signals, is_assembler_error, stopping_signals
from fledge.options import Options, default_of, flag_of, option_fields, panels_of
from fledge.regenerate.options import RegenerateOptions
from fledge.train.setup.options import TrainOptions

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


def _command(name: str, options: type[Options]) -> Callable[[Callable[[Any], None]], None]:
    """Decorator: registers a job as the command `name`, with a flag for each of its options."""
    hints = get_type_hints(options)
    fields = option_fields(options)
    shown = [_parameter(options, f, hints[f.name]) for f in fields]
    # a command with --config has a negation of each switch, which turns off what the file turns on
    negations = {f"no_{f.name}": f.name for f in fields if "config" in hints and hints[f.name] is bool}
    context = inspect.Parameter("context", inspect.Parameter.KEYWORD_ONLY, annotation=typer.Context)

    def register(job: Callable[[Any], None]) -> None:
        def run(context: typer.Context, **values: Any) -> None:
            given = {k: v for k, v in values.items() if context.get_parameter_source(k).name == "COMMANDLINE"}
            given = _apply_negations(given, negations)
            defaults = {f.name: values[f.name] for f in fields}
            try:
                # in a context of its own, as what shows the loading of models belongs to this job
                contextvars.copy_context().run(job, options(**defaults | given, given=frozenset(given)))
                sys.stdout.flush()
            except BrokenPipeError:  # the reader, e.g. `| head`, has closed the pipe
                redirect_to_devnull(sys.stdout)
                raise typer.Exit(128 + signal.SIGPIPE) from None

        hidden = [_hidden_parameter(no, bool) for no in negations]
        run.__signature__ = inspect.Signature([context, *shown, *hidden])
        app.command(name, cls=_Command, help=options.__doc__)(run)

    return register


class _Command(PlainHelp, typer.core.TyperCommand):
    """A command that refuses two names of one option, of which the parser would take the last. One that passes words on
    says where they go if it does not know an option."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        words = list(args)  # the parser empties the list
        try:
            rest = super().parse_args(ctx, args)
        except Exception as e:  # NoSuchOption is click's or typer's own, by the version of typer
            passes_on = any(isinstance(p, typer.core.TyperArgument) and p.nargs == -1 for p in self.params)
            if type(e).__name__ == "NoSuchOption" and passes_on:
                e.message = f"{e.message.rstrip('.')}; options that are passed on go after --"
            raise
        options = [p for p in self.params if isinstance(p, typer.core.TyperOption)]
        given = set(_flags_in(words, [flag for option in options if option.is_flag for flag in option.opts]))
        for option in options:
            names = sorted(given.intersection(option.opts))
            if len(names) > 1 and not option.multiple and not ctx.resilient_parsing:
                raise ValueError(same_option(*names[:2]))
        return rest


def _flags_in(words: list[str], switches: Collection[str]) -> Iterator[str]:
    """The flags among the words of a command, without the values that look like one. `switches` take no value."""
    rest = iter(words)
    for word in itertools.takewhile(lambda word: word != "--", rest):
        flag, equals, _ = word.partition("=")
        if flag.startswith("--"):
            yield flag
            if not equals and flag not in switches:
                next(rest, None)


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


def _display(quiet: bool = False) -> ProgressDisplay:
    """A display that also shows downloads and the loading of targets."""
    display = ProgressDisplay(quiet)
    show_progress(functools.partial(display.count, passing=True))
    return display


def _number_if_one(text: str | int) -> str | int:
    """The integer that a text is, or the text."""
    try:
        return int(text)
    except ValueError:
        return text


def _hidden_parameter(name: str, hint: Any) -> inspect.Parameter:
    """A flag that --help does not list."""
    annotation = Annotated[hint | None, typer.Option(flag_of(name), hidden=True)]
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation)


def _apply_negations(given: dict[str, Any], negations: dict[str, str]) -> dict[str, Any]:
    """The given values, with each negated flag replaced by its switch set to False. Raises ValueError if a switch and
    its negation were both given."""
    off = {negations[name]: False for name in given.keys() & negations.keys()}
    if both := sorted(off.keys() & given.keys()):
        raise ValueError(f"{flag_of(both[0])} and {flag_of('no_' + both[0])} contradict each other; give one")
    return {name: value for name, value in given.items() if name not in negations} | off


@_command("train", TrainOptions)
def train(options: TrainOptions) -> None:
    from fledge.commands.train import run
    from fledge.train.setup.launch import needs_processes, start_processes

    display = _display(quiet=os.environ.get("RANK", "0") != "0")
    if options.dry_run:
        from fledge.train.setup.dry_run import dry_run

        raise typer.Exit(dry_run(options, sys.argv[1:], ResultPrinter(), display))
    if needs_processes(options):
        raise typer.Exit(start_processes(options.gpus, sys.argv[1:]))
    run(options, display.say, display)
    display.close()


@_command("demo", DemoOptions)
def demo(options: DemoOptions) -> None:
    from fledge.commands.demo import run

    run(options, ResultPrinter(), ProgressDisplay())


@_command("generate", GenerateOptions)
def generate(options: GenerateOptions) -> None:
    from fledge.commands.generate import run

    run(options, _display())


@_command("chat", ChatOptions)
def chat(options: ChatOptions) -> None:
    from fledge.commands.chat import run

    run(options, _display())


@_command("eval", EvalOptions)
def evaluate(options: EvalOptions) -> None:
    if options.endpoint:
        from fledge.commands.evaluate import run
        from fledge.commands.evaluate_endpoint import print_table
    else:
        from fledge.commands.evaluate import print_table, run
    from fledge.measure.record import record_text

    def show(record: dict[str, Any]) -> None:
        if options.json:
            print(record_text(record), flush=True)
        else:
            print_table(record, ResultPrinter())

    from fledge.commands.evaluate import refuse_changed_output

    if options.report:
        from fledge.report.page import check_report_path

        check_report_path(options.report, "--report")
    from fledge.report.page import report_file, report_record

    display = _display(quiet=options.json)
    record = run(options, display, show)
    if options.report:
        report_record(record, options.report)
    elif options.out:
        report_file(Path(options.out), display.say)
    refuse_changed_output(record)


@_command("regenerate", RegenerateOptions)
def regenerate(options: RegenerateOptions) -> None:
    from fledge.commands.regenerate import run

    display = _display()
    run(options, display.say, display)


@_command("features", FeaturesOptions)
def features(options: FeaturesOptions) -> None:
    from fledge.commands.features import run

    display = _display()
    run(options, display.say, display)


@_command("serve", ServeOptions)
def serve(options: ServeOptions) -> None:
    from fledge.commands.serve import run

    run(options, ProgressDisplay().say)


@_command("inspect", InspectOptions)
def inspect_draft(options: InspectOptions) -> None:
    from fledge.commands.inspect import run

    if not run(options, ResultPrinter().print):
        raise typer.Exit(1)


@_command("check", CheckOptions)
def check(options: CheckOptions) -> None:
    from fledge.commands.check import TOO_LARGE, TargetTooLarge, as_json, print_report, run

    try:
        report = run(options, _display(quiet=options.json))
    except TargetTooLarge as e:
        print_error(e)
        raise typer.Exit(TOO_LARGE) from None
    if options.json:
        print(json.dumps(as_json(report), indent=2), flush=True)
    else:
        print_report(report, ResultPrinter())
    if report.findings:
        raise typer.Exit(1)


@_command("report", ReportOptions)
def report(options: ReportOptions) -> None:
    from fledge.commands.report import run

    run(options, ResultPrinter().print)


@_command("export", ExportOptions)
def export(options: ExportOptions) -> None:
    from fledge.commands.export import run

    run(options, ResultPrinter().print)


@_command("push", PushOptions)
def push(options: PushOptions) -> None:
    from fledge.commands.push import run

    run(options, ResultPrinter().print, ProgressDisplay().say)


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
    """The ends of a pipe, from which signals are read and to which Python writes each that it receives."""
    ends = os.pipe()
    for end in ends:
        os.set_blocking(end, False)
    os.register_at_fork(after_in_child=lambda: signal.set_wakeup_fd(-1))  # a child's signals are not this process's
    return ends


def _watch_signals() -> None:
    if threading.current_thread() is threading.main_thread():
        _was_interrupted()  # forgets what came earlier
        signal.set_wakeup_fd(_received_signals()[1], warn_on_full_buffer=False)


def _was_interrupted() -> bool:
    """Whether a signal was received, which most likely was to stop the command."""
    with contextlib.suppress(BlockingIOError):  # nothing to read
        received = os.read(_received_signals()[0], 4096)
        return any(number in received for number in stopping_signals())
    return False


def _end_as_interrupted() -> NoReturn:
    _end_at_once_if_stopped_again()
    sys.exit(130)


def _fail(reason: object) -> None:
    """Prints an error to standard error, if that is open, and exits with code 2. Of several ranks, one prints it."""
    if os.environ.get("WORLD_SIZE", "1") == "1":
        print_error(reason)
    else:
        from fledge.train.ranks import error_sentence, first_to_say

        if first_to_say(sentence := error_sentence(reason)):
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
    """Another Ctrl-C while the process ends has no traceback: while it waits for threads, it ends at once; later it is
    ignored, since Python, when it frees what is left, would be killed by the signal and not exit with code 130."""
    for number in stopping_signals():
        signal.signal(number, lambda *signal_and_frame: os._exit(130))
    atexit.register(ignore_signals)
    with contextlib.suppress(OSError):  # which the end of the process reports
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
    if sys.argv[1:2] != ["push"]:  # whose upload takes long; on a terminal, the hub's own bars show it
        os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")


if __name__ == "__main__":
    main()
