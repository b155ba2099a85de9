"""The command line: one command a job, its flags from the job's options, its imports when it runs."""

from __future__ import annotations

import dataclasses
import inspect
import json
import sys
from collections.abc import Callable
from typing import Annotated, Any, get_type_hints

import typer

from fledge.jobs.evaluate import EvalOptions
from fledge.jobs.generate import GenerateOptions
from fledge.jobs.inspect import InspectOptions
from fledge.jobs.options import Options, default_of, flag_of, flags
from fledge.jobs.regenerate import RegenerateOptions
from fledge.jobs.show import Paper, Show, complain
from fledge.jobs.train import TrainOptions

app = typer.Typer(
    help="Train EAGLE draft models for any language model and decode with them, losslessly and faster.",
    no_args_is_help=True,
    pretty_exceptions_show_locals=False,
)


def _command(name: str, options: type[Options]) -> Callable[[Callable[[Any], None]], None]:
    """Registers a job under `name` with a flag for each field of its options."""

    def register(job: Callable[[Any], None]) -> None:
        def run(context: typer.Context, **values: Any) -> None:
            given = {name for name in values if context.get_parameter_source(name).name == "COMMANDLINE"}
            job(options(**values, given=frozenset(given)))

        hints = get_type_hints(options)
        context = inspect.Parameter("context", inspect.Parameter.KEYWORD_ONLY, annotation=typer.Context)
        run.__signature__ = inspect.Signature([context, *(_parameter(f, hints[f.name]) for f in flags(options))])
        app.command(name, help=options.__doc__)(run)

    return register


def _parameter(f: dataclasses.Field, hint: Any) -> inspect.Parameter:
    if f.metadata["flag"] == "argument":
        info = typer.Argument(help=f.metadata["help"])
    else:
        info = typer.Option(flag_of(f.name), help=f.metadata["help"])
    default = inspect.Parameter.empty if default_of(f) is dataclasses.MISSING else default_of(f)
    return inspect.Parameter(f.name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=Annotated[hint, info])


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

    record = run(options, Show(quiet=options.json))
    if options.json:
        print(json.dumps(record, indent=2))
    else:
        table(record, Paper())
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
    try:
        _quiet_transformers()
        app()
    except (ValueError, OSError, FloatingPointError) as e:
        complain(e)
        sys.exit(2)
    except KeyboardInterrupt:
        sys.exit(130)
    except RuntimeError as e:
        if type(e).__name__ != "OutOfMemoryError":  # torch's, which is not imported for this
            raise
        complain(f"the GPU has not enough memory for this: {e}")
        sys.exit(2)


def _quiet_transformers() -> None:
    """Leaves the terminal to fledge's own progress, before transformers is first imported."""
    import os

    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")


if __name__ == "__main__":
    main()
