"""`fledge train --dry-run`: plans a run without beginning it, and times a few steps where its devices are there.

Nothing is written but the cache of tokenized data. The plan needs the target's config and tokenizer, the draft's
config, and the data.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch

from fledge.data.pack import Rows
from fledge.drafts.draft import Draft
from fledge.io.display import ProgressDisplay, ResultPrinter, format_bytes, format_duration
from fledge.io.machine import resolve_device
from fledge.states.source import ROWS_AHEAD
from fledge.targets.distributed import target_bytes
from fledge.targets.source import FeatureSource
from fledge.train.checkpoint import RunDirectory
from fledge.train.feed import AFTER, BEFORE, feed
from fledge.train.memory import DoesNotFit, Machine, Work
from fledge.train.optim import MasterOptimizer
from fledge.train.ranks import Ranks, local_rank, started_by_torchrun
from fledge.train.setup.data import check_files, make_rows, pack_rows, total_memory, training_data
from fledge.train.setup.draft import draft_sizes, make_draft
from fledge.train.setup.implementation import choose_implementation, implementations
from fledge.train.setup.launch import check_ranks, needs_processes, run_ranks, start_processes
from fledge.train.setup.options import TrainOptions
from fledge.train.setup.plan import Plan, format_count, heaviest_slots, print_plan
from fledge.train.setup.recipe_file import check_settled, complete_options, resolve_recipe
from fledge.train.setup.schedule import make_schedule
from fledge.train.setup.settle import settle
from fledge.train.setup.target import plan_target, prepare_shared_target, quantization_note, reads_features_only
from fledge.train.trainer import Progress, Schedule, optimizer_step, upcoming_rows

GB = 10**9
WARM_UP, TIMED = 2, 3  # steps; the first ones compile kernels

Say = Callable[[str], None]
# seconds of the timed steps, their tokens without filler, and the peak of a GPU's allocated bytes (None on a CPU)
Timed = tuple[float, int, int | None]


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
    if not (plan.fits_memory and plan.fits_disk):
        return 1
    if not machine.there or not plan.left:
        return 0
    if starts:
        return start_processes(machine.ranks, arguments)
    with run_ranks(options) as ranks:
        try:
            timed = _time(plan, recorded, ranks, display.say if ranks.leads else lambda line: None, display)
        except (DoesNotFit, torch.OutOfMemoryError) as e:
            printer.print(f"Memory: does not fit, as steps show that were tried: {e}")
            return 1
        if ranks.leads:
            print_timing(plan, timed, printer)
    return 0


def find_machine(options: TrainOptions) -> Machine:
    """The machine that complete options name: this one, or one that is not there. Raises ValueError if they do not
    say enough about it."""
    started = started_by_torchrun()
    ranks = int(os.environ["WORLD_SIZE"]) if started else options.gpus or 1
    check_ranks(options, ranks)
    count, first = torch.cuda.device_count(), torch.device("cuda", 0)
    device, there = torch.device("cuda"), False
    if options.gpu_memory is not None:
        if started:
            raise ValueError("--gpu-memory plans for GPUs that are not there; start it without torchrun")
        memory = int(options.gpu_memory * GB)
    elif not started and ranks > max(count, 1):
        if not count:
            raise ValueError(
                f"--gpus {ranks}, but this machine has no GPU; give --gpu-memory, the GB of memory of each of those "
                "that the plan is for"
            )
        memory = total_memory(first)
    else:
        device, there = torch.device(resolve_device(options.device)), True
        if device.type == "cpu":
            memory = total_memory(device) // int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        elif started or ranks == 1:
            memory = torch.cuda.mem_get_info(local_rank() if started else device.index or 0)[0]
        else:
            memory = total_memory(first)
    return Machine(ranks, device.type, memory, there, options.target_gpus or 0, options.shard_target)


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
    draft = draft_sizes(recipe, target)
    documents, _ = training_data(recipe, target, say, progress)
    rows = pack_rows(recipe, target, documents, say)
    ranks = Ranks(size=machine.trains, placement="shard")
    lockstep = machine.split and not machine.apart
    schedule = make_schedule(recipe, rows, draft.config.hidden_size, ranks, lockstep, say)
    saved = directory.load_progress() if options.resume else None
    work = Work(
        weights=target_bytes(target.target),
        draft=draft,
        tokens=rows.row_length,
        slots=heaviest_slots(rows, schedule.objective),
        document=rows.longest(),
        rows=-(-schedule.rows_per_step // machine.trains),
        optimizer=schedule.optimizer,
        runs=not reads_features_only(recipe),
        staged=ROWS_AHEAD * recipe.features.layout.bytes(1, 1) if recipe.features else 0,
    )
    done, asked = min(int((saved or {}).get("step", 0)), schedule.steps), tuple(implementations(recipe.options))
    return Plan(machine, work, asked, recipe, rows, schedule, directory, options.resume is not None, done)


def _time(plan: Plan, recorded: dict[str, Any] | None, ranks: Ranks, say: Say, progress: Any) -> Timed:
    """The time of a few steps of a planned run, whose target is loaded for them. `recorded` are the settled values of
    the run that is resumed; raises ValueError if they are others now."""
    recipe, rows = plan.recipe, plan.rows
    with ranks.together("while the target was loaded"):
        target = prepare_shared_target(recipe, ranks, plan.machine.target_shares > 1, say)
        if target.decodes != (not reads_features_only(recipe)):  # as the plan assumed; no records are held out then
            rows = make_rows(recipe, target, training_data(recipe, target, say, progress)[0], say)
        draft = make_draft(recipe, target, rows.documents, say)
        implementation = choose_implementation(recipe.options, draft, rows, target.source, plan.schedule, ranks, say)
    schedule = replace(plan.schedule, implementation=ranks.from_first(implementation))
    with ranks.together("before the first step"):
        if recorded is not None:
            check_settled(recorded, settle(recipe, target, draft, rows, schedule), plan.directory)
    return time_steps(draft, rows, target.source, schedule, ranks, progress)


def time_steps(
    draft: Draft, rows: Rows, source: FeatureSource, schedule: Schedule, ranks: Ranks, progress: Any
) -> Timed:
    """Times TIMED optimizer steps on the first rows, after WARM_UP steps; the draft is trained by all of them.

    Every rank calls this; one that holds only the target times nothing. Raises FloatingPointError as `optimizer_step`
    does."""
    gpu = draft.device.type == "cuda"
    synchronize: Callable[[], Any] = (lambda: torch.cuda.synchronize(draft.device)) if gpu else (lambda: None)
    schedule = replace(schedule, steps=WARM_UP + TIMED + 1)  # the last step too computes the next row's features
    state = Progress()
    if not ranks.trains:
        lockstep, done = source.target.sharded, WARM_UP + TIMED
        feed(source, rows, draft, schedule, state, ranks, lockstep=lockstep, until=done)
        return 0.0, 0, None
    with ranks.collective(BEFORE):
        ranks.copy_from_first([*draft.parameters(), *draft.buffers()])
    given = schedule.betas, schedule.weight_decay, ranks, schedule.optimizer
    optimizer = MasterOptimizer(draft.named_parameters(), *given)
    tokens, began = 0, 0.0
    with (
        upcoming_rows(rows, state, schedule, source, draft.device, ranks) as upcoming,
        progress.count("timing steps", WARM_UP + TIMED) as advance,
    ):
        for step in range(WARM_UP + TIMED):
            if step == WARM_UP:
                if gpu:
                    torch.cuda.reset_peak_memory_stats(draft.device)
                synchronize()
                ranks.sum(torch.zeros(()))  # so that all begin together
                tokens, began = 0, time.perf_counter()
            tokens += optimizer_step(draft, rows, upcoming, source, schedule, optimizer, state, ranks).tokens
            state.step += 1
            advance()
    synchronize()
    seconds = time.perf_counter() - began
    if ranks.target_ranks:
        source.finish(state.step)
        ranks.meet(AFTER, None)
    return seconds, tokens, torch.cuda.max_memory_allocated(draft.device) if gpu else None


def print_timing(plan: Plan, timed: Timed, printer: ResultPrinter) -> None:
    """Prints the speed of the timed steps, and the hours of the steps to do."""
    seconds, tokens, peak = timed
    used = "" if peak is None else f"; their peak on a GPU was {format_bytes(peak)}"
    tokens_left = plan.tokens / len(plan.rows.epoch(0)) * plan.schedule.rows_per_step * plan.left
    left = format_duration(tokens_left * seconds / max(tokens, 1))
    printer.print(f"{TIMED} steps took {seconds / TIMED:.2f} s each, {tokens / seconds:,.0f} tokens/s{used}.")
    printer.print(
        f"{format_count(plan.left, 'step')} would take about {left}, without the start, checkpoints and measurements "
        "of τ."
    )
