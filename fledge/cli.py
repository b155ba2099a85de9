"""The command line: one command a job, its flags from the job's options, its imports when it runs."""

from __future__ import annotations

import dataclasses
import inspect
import json
import os
import signal
import sys
import warnings
from collections.abc import Callable
from typing import Annotated, Any, get_type_hints

import typer

from fledge import __version__
from fledge.jobs.evaluate import EvalOptions
from fledge.jobs.generate import GenerateOptions
from fledge.jobs.inspect import InspectOptions
from fledge.jobs.options import Options, by_current_names, default_of, flag_of, flags
from fledge.jobs.regenerate import RegenerateOptions
from fledge.jobs.show import Paper, Show, complain, drop, message
from fledge.jobs.train import TrainOptions

app = typer.Typer(
    help="Train EAGLE draft models for any language model and decode with them, losslessly and faster.",
    no_args_is_help=True,
    pretty_exceptions_show_locals=False,
)


def _print_version(asked: bool) -> None:
    if asked:
        print(f"fledge {__version__}")
        raise typer.Exit


@app.callback()
def fledge(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version and exit.", callback=_print_version, is_eager=True)
    ] = False,
) -> None:
    """The options that go before a command."""


def _command(name: str, options: type[Options]) -> Callable[[Callable[[Any], None]], None]:
    """Registers a job under `name` with a flag for each field of its options."""
    hints = get_type_hints(options)
    shown = [_parameter(f, hints[f.name]) for f in flags(options)]
    former = [_hidden(f.metadata["formerly"], hints[f.name]) for f in flags(options) if f.metadata["formerly"]]
    # what a file of options can have turned on, a flag turns off
    negations = {f"no_{f.name}": f.name for f in flags(options) if "config" in hints and hints[f.name] is bool}
    context = inspect.Parameter("context", inspect.Parameter.KEYWORD_ONLY, annotation=typer.Context)

    def register(job: Callable[[Any], None]) -> None:
        def run(context: typer.Context, **values: Any) -> None:
            given = {k: v for k, v in values.items() if context.get_parameter_source(k).name == "COMMANDLINE"}
            given = _without_negations(by_current_names(options, given), negations)
            defaults = {f.name: values[f.name] for f in flags(options)}
            try:
                job(options(**defaults | given, given=frozenset(given)))
                sys.stdout.flush()
            except BrokenPipeError:  # `| head` has read enough
                drop(sys.stdout)
                raise typer.Exit(128 + signal.SIGPIPE) from None

        hidden = [*former, *(_hidden(no, bool) for no in negations)]
        run.__signature__ = inspect.Signature([context, *shown, *hidden])
        app.command(name, help=options.__doc__)(run)

    return register


def _parameter(f: dataclasses.Field, hint: Any) -> inspect.Parameter:
    if f.metadata["flag"] == "argument":
        info = typer.Argument(help=f.metadata["help"])
    else:
        info = typer.Option(flag_of(f.name), help=f.metadata["help"])
    default = inspect.Parameter.empty if default_of(f) is dataclasses.MISSING else default_of(f)
    return inspect.Parameter(f.name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=Annotated[hint, info])


def _hidden(name: str, hint: Any) -> inspect.Parameter:
    """A flag that --help does not show."""
    annotation = Annotated[hint | None, typer.Option(flag_of(name), hidden=True)]
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation)


def _without_negations(given: dict[str, Any], negations: dict[str, str]) -> dict[str, Any]:
    """The values that were given, a negation as its switch turned off. Raises ValueError where both were given."""
    off = {negations[name]: False for name in given.keys() & negations.keys()}
    if both := sorted(off.keys() & given.keys()):
        raise ValueError(f"{flag_of(both[0])} and {flag_of('no_' + both[0])} contradict each other; give one")
    return {name: value for name, value in given.items() if name not in negations} | off


@_command("train", TrainOptions)
def train(options: TrainOptions) -> None:
    from fledge.jobs.train import run

    show = Show()
    run(options, show.say, show)
    show.close()


@_command("generate", GenerateOptions)
def generate(options: GenerateOptions) -> None:
    from fledge.jobs.generate import run

    run(options, Show().say)


@_command("eval", EvalOptions)
def evaluate(options: EvalOptions) -> None:
    from fledge.jobs.evaluate import run, table

    def show(record: dict[str, Any]) -> None:
        if options.json:
            print(json.dumps(record, indent=2), flush=True)
        else:
            table(record, Paper())

    record = run(options, Show(quiet=options.json), show)
    if any(r["different"] for r in ([record] if "tau" in record else record.values())):
        raise ValueError("decoding with the draft changed the output beyond numerical noise; please report this")


@_command("regenerate", RegenerateOptions)
def regenerate(options: RegenerateOptions) -> None:
    from fledge.jobs.regenerate import run

    show = Show()
    run(options, show.say, show)


@_command("inspect", InspectOptions)
def inspect_draft(options: InspectOptions) -> None:
    from fledge.jobs.inspect import run

    if not run(options, Paper().print):
        raise typer.Exit(1)


def main() -> None:
    """Runs the command line. What a user can mend is told in a sentence on standard error, with exit code 2."""
    _open_closed_streams()
    _end_as_by_ctrl_c()
    try:
        _quiet_transformers()
        warnings.formatwarning = _sentence
        app()
    except (ValueError, OSError, FloatingPointError) as e:
        _fail(e)
    except KeyboardInterrupt:
        sys.exit(130)
    except RuntimeError as e:
        if type(e).__name__ != "OutOfMemoryError":  # torch's, which is not imported for this
            raise
        _fail(f"the GPU has not enough memory for this: {e}")


def _fail(reason: object) -> None:
    """Ends with exit code 2 and a line on standard error, if that can be written."""
    complain(reason)
    try:
        sys.stdout.flush()
    except OSError:  # the reason itself may be a full disk; Python would try again
        drop(sys.stdout)
    sys.exit(2)


def _open_closed_streams() -> None:
    """A standard stream that is closed (`>&-`) is read and written as /dev/null: no file that is opened later gets its
    number, and with it what libraries print."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode))  # noqa: SIM115 (open as long as the process)


def _end_as_by_ctrl_c() -> None:
    """A termination request, or a terminal that goes away (but not under nohup), cleans up as an interruption does."""
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, signal.default_int_handler)


def _sentence(warning: Warning, category: type[Warning], *where: Any, **line: Any) -> str:
    """How a warning reads: ours as a sentence, without the line of code that it came from."""
    if category.__module__.startswith("fledge."):
        return f"fledge: {message(warning)}\n"
    return _formatwarning(warning, category, *where, **line)


_formatwarning = warnings.formatwarning


def _quiet_transformers() -> None:
    """Leaves the terminal to fledge's own progress, before transformers is first imported."""
    import os

    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")


if __name__ == "__main__":
    main()
