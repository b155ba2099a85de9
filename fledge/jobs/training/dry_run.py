"""`fledge train --dry-run`: plans a run without beginning it, and times a few steps where its devices are there.

Nothing is written but the cache of tokenized data. The plan needs the target's config and tokenizer, the draft's
config, and the data.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch

from fledge.decode.engine import resolve_device
from fledge.features.source import ROWS_AHEAD
from fledge.jobs.display import ProgressDisplay, ResultPrinter
from fledge.jobs.train import complete_options, resolve_recipe
from fledge.jobs.training.data import check_files, make_rows, pack_rows, total_memory, training_data
from fledge.jobs.training.draft import draft_sizes, make_draft
from fledge.jobs.training.implementation import choose_implementation, implementations
from fledge.jobs.training.launch import check_ranks, needs_processes, run_ranks, start_processes
from fledge.jobs.training.options import TrainOptions
from fledge.jobs.training.plan import Machine, Plan, work_of
from fledge.jobs.training.plan_report import print_plan, print_timing
from fledge.jobs.training.recipe_file import check_settled
from fledge.jobs.training.schedule import make_schedule
from fledge.jobs.training.settle import settle
from fledge.jobs.training.target import plan_target, prepare_shared_target, quantization_note, reads_features_only
from fledge.jobs.training.timing import Timing, time_steps
from fledge.targets.size import target_bytes
from fledge.train.checkpoint import RunDirectory
from fledge.train.estimate import Placement, Sizes
from fledge.train.memory import DoesNotFit
from fledge.train.ranks import Ranks, local_rank, started_by_torchrun

GB = 10**9

Say = Callable[[str], None]


def dry_run(options: TrainOptions, arguments: Sequence[str], printer: ResultPrinter, display: ProgressDisplay) -> int:
    """Prints the plan of a run and, where its devices are there, the time of its steps. Returns the command's exit
    code: 0, or 1 if the run does not fit.

    `arguments` are those of the command, with which it starts a process for each of several GPUs. Raises ValueError for
    options that a run would refuse, and for machines that cannot be planned.
    """
    if options.gpu_memory is not None and options.device not in ("auto", "cuda"):  # a recipe's device does not matter
        raise ValueError(f"--gpu-memory with --device {options.device}; leave one of them out")
    follows = started_by_torchrun() and options.gpus is not None  # the process that started this one printed the plan
    say: Say = (lambda line: None) if follows else display.say
    options, recorded, directory = complete_options(options, True, say)
    machine = find_machine(options)
    starts = machine.there and needs_processes(options)
    plan = make_plan(options, directory, machine, say, display)
    if not follows and os.environ.get("RANK", "0") == "0":
        print_plan(plan, printer)
    if not plan.fits:
        return 1
    if not machine.there or not plan.left:
        return 0
    if starts:
        return start_processes(machine.ranks, arguments)
    with run_ranks(options) as ranks:
        try:
            timing = _time(plan, recorded, ranks, display.say if ranks.leads else lambda line: None, display)
        except (DoesNotFit, torch.OutOfMemoryError) as e:
            printer.print(f"Memory: does not fit, as steps show that were tried: {e}")
            return 1
        if ranks.leads:
            print_timing(plan, timing, printer)
    return 0


def find_machine(options: TrainOptions) -> Machine:
    """The machine that complete options name: this one, or one that is not there. Raises ValueError if they do not
    say enough about it."""
    ranks = int(os.environ["WORLD_SIZE"]) if started_by_torchrun() else options.gpus or 1
    check_ranks(options, ranks)
    if options.gpu_memory is not None:
        if started_by_torchrun():
            raise ValueError("--gpu-memory plans for GPUs that are not there; start it without torchrun")
        return Machine(ranks, "cuda", int(options.gpu_memory * GB), there=False)
    count = torch.cuda.device_count()
    if not started_by_torchrun() and ranks > max(count, 1):
        if not count:
            raise ValueError(
                f"--gpus {ranks}, but this machine has no GPU; give --gpu-memory, the GB of memory of each of those "
                "that the plan is for"
            )
        return Machine(ranks, "cuda", total_memory(torch.device("cuda", 0)), there=False)
    device = torch.device(resolve_device(options.device))
    if device.type == "cpu":
        return Machine(ranks, "cpu", total_memory(device) // int(os.environ.get("LOCAL_WORLD_SIZE", "1")), there=True)
    if started_by_torchrun() or ranks == 1:
        index = local_rank() if started_by_torchrun() else device.index or 0
        return Machine(ranks, "cuda", torch.cuda.mem_get_info(index)[0], there=True)
    return Machine(ranks, "cuda", total_memory(torch.device("cuda", 0)), there=True)


def make_plan(options: TrainOptions, directory: RunDirectory, machine: Machine, say: Say, progress: Any) -> Plan:
    """The plan of a run with complete options. Loads no weights. Raises ValueError as a run would, for what can be
    known without them."""
    recipe = resolve_recipe(options, directory, imagined=not machine.there)
    if options.resume:
        check_files(recipe.data, directory)
    target = plan_target(recipe)
    if target.target.quantization:
        say(quantization_note(target.target))
        say(f"the plan counts its weights in {target.target.dtype}, and they take less")
    runs = not reads_features_only(recipe)
    staged = ROWS_AHEAD * recipe.features.layout.bytes(1, 1) if recipe.features else 0
    sizes = Sizes(
        target.target, target_bytes(target.target), draft_sizes(recipe, target), runs, staged,
        recipe.schedule.optimizer,
    )  # fmt: skip
    documents, _ = training_data(recipe, target, say, progress)
    rows = pack_rows(recipe, target, documents, say)
    apart = options.target_gpus or 0
    ranks = Ranks(size=machine.ranks - apart, placement="shard")
    lockstep = options.shard_target and not apart
    schedule = make_schedule(recipe, rows, sizes.draft.config.hidden_size, ranks, lockstep, say)
    saved = directory.load_progress() if options.resume else None
    return Plan(
        machine=machine,
        recipe=recipe,
        rows=rows,
        schedule=schedule,
        sizes=sizes,
        work=work_of(rows, schedule, machine, ranks.size),
        placed=Placement(
            (apart or machine.ranks) if options.shard_target else 1, ranks.size if ranks.shards else 1, apart
        ),
        asked=tuple(implementations(recipe.compute)),
        directory=directory,
        resumed=options.resume is not None,
        done=min(int((saved or {}).get("step", 0)), schedule.steps),
    )


def _time(plan: Plan, recorded: dict[str, Any] | None, ranks: Ranks, say: Say, progress: Any) -> Timing:
    """The time of a few steps of a planned run, whose target is loaded for them. `recorded` are the settled values of
    the run that is resumed; raises ValueError if they are others now."""
    recipe, rows = plan.recipe, plan.rows
    with ranks.together("while the target was loaded"):
        target = prepare_shared_target(recipe, ranks, plan.placed.target > 1, say)
        if target.decodes != (not reads_features_only(recipe)):  # as the plan assumed; no records are held out then
            rows = make_rows(recipe, target, training_data(recipe, target, say, progress)[0], say)
        draft = make_draft(recipe, target, rows.documents, say)
        implementation = choose_implementation(recipe.compute, draft, rows, target.source, plan.schedule, ranks, say)
    schedule = replace(plan.schedule, implementation=ranks.from_first(implementation))
    with ranks.together("before the first step"):
        if recorded is not None:
            check_settled(recorded, settle(recipe, target, draft, rows, schedule), plan.directory)
    return time_steps(draft, rows, target.source, schedule, ranks, progress)
