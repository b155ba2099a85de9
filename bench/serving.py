"""Measures drafts in a serving engine and in fledge on the same prompts, and records τ and α of both.

    python bench/serving.py --engine vllm --target DIR --draft eagle3=DIR peagle=DIR --prompts FILE \
        --k 3 5 7 --concurrency 1 4 16 --out bench/results/serving_vllm.json -- --max-model-len 2048

For each draft (method=DIR) and K, it starts the engine with the command of `fledge serve`, waits until it is healthy,
measures as `fledge eval --endpoint` does at each concurrency, and ends the engine. fledge decodes the same token ids as
soon as the first concurrency was measured, so that later ones share the GPU with it. Arguments after `--` go to the
engine. A start takes a minute or two: with `--parallel N`, N engines start and are measured together, each with a part
of the GPU's memory that the arguments have to limit; then `tokens_per_s`, `ttft_ms` and `itl_ms` are those of an engine
that shares its machine.
Cases can also be run one by one: rows are added to an existing record of the same commit and target, and replace those
of the same method, K, tree and concurrency. A case whose engine does not start has no rows; the exit status is then 1.
`--plain` measures the engine without a draft too (method "none", K 0), once. `--tree 5:16:4` drafts trees of 5 levels
and 16 nodes, the root included, with 4 children a node (SGLang), in both decoders, besides the chains of `--k`.

`own_rounds` is the number of fledge's rounds, and `z` has for each position the difference of α_k (the engine's less
fledge's) in standard errors, from the rounds that reached it on both sides; null where a side has none. `steps` is the
step of the training at which the draft was written, if the draft has a probe.
`tau` and `alpha` are fledge's, `vllm_tau` and `vllm_alpha` (or `sglang_..`) the engine's; `fledge_identical` counts the
answers that are equal, of `requests`, and `identical_to_first` those that are equal at the first concurrency.
`equal_answers` has both τ over the equal answers alone, where rounding has changed no text, and in `difference_se` the
standard error of `engine_rounds` less `rounds`; null where none is equal, or the engine does not count by request
(vLLM).
"""

import argparse
import asyncio
import contextlib
import itertools
import json
import math
import os
import random
import shlex
import signal
import socket
import statistics
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from fledge.check.read_probe import read_probe
from fledge.commands.serve import ServeOptions, command_of
from fledge.data.record import Record
from fledge.data.template import ChatTemplate
from fledge.decode.load import load
from fledge.decode.request import Completion
from fledge.drafts.weights import read_draft_config
from fledge.engines.client import Answer, Client, Decoding
from fledge.engines.export import program
from fledge.engines.metrics import Acceptance, of_requests
from fledge.io.fields import parse_dtype
from fledge.io.machine import environment, resolve_device
from fledge.measure.endpoint import Measurement, decode_own, identical, measure
from fledge.measure.metrics import committed_per_round, drafted_and_accepted, tau
from fledge.measure.prompts import read_prompts
from fledge.measure.record import check_record_path, write_record
from fledge.targets.loading import load_target
from fledge.targets.transformers import TransformersTarget
from fledge.types import Sampling

PLAIN = "none"  # the method of rows without a draft
LOG_LINES = 150  # that are printed of an engine that does not start
STOPPING = 60  # seconds after which an engine that was asked to end is killed
Own = Future[dict[str, Any]]  # fledge's own decoding of a case's prompts


def main() -> None:
    words = sys.argv[1:]
    at = words.index("--") if "--" in words else len(words)
    words, arguments = words[:at], words[at + 1 :]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engine", choices=["vllm", "sglang"], default="vllm")
    parser.add_argument("--target", required=True)
    parser.add_argument("--draft", nargs="*", default=[], metavar="METHOD=DIR")
    parser.add_argument("--plain", action="store_true", help="also measure the engine without a draft")
    parser.add_argument("--prompts", nargs="+", required=True, metavar="FILE")
    parser.add_argument("--limit", type=int, default=48, help="the most prompts of a file")
    parser.add_argument("--k", type=int, nargs="*", default=[3, 5, 7])
    parser.add_argument("--tree", type=parse_tree, nargs="*", default=[], metavar="K:NODES:WIDTH")
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 4, 16])
    parser.add_argument("--new", type=int, default=128, help="the most new tokens of a prompt")
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--parallel", type=int, default=1, help="engines that run at a time")
    parser.add_argument("--start-timeout", type=float, default=480, help="seconds until the engine must be healthy")
    parser.add_argument("--device", default="auto", help="of fledge's decoder")
    parser.add_argument("--dtype", default=None, help="of fledge's decoder (default: the target's)")
    parser.add_argument("--out", type=Path, default=None)
    options = parser.parse_args(words)
    options.out = options.out or Path(f"bench/results/serving_{options.engine}.json")
    check_record_path(options.out, "--out")
    if options.tree and options.engine == "vllm":
        parser.error("--tree is for SGLang; vLLM drafts chains")
    if not options.plain and not (options.draft and (options.k or options.tree)):
        parser.error("nothing to measure: give --draft with --k or --tree, or --plain")
    drafts = dict(text.split("=", 1) for text in options.draft)
    record = _record(options, arguments)
    shapes = [(k, None, None) for k in options.k] + options.tree
    cases = [Case(method, draft, *shape) for method, draft in drafts.items() for shape in shapes]
    if options.plain:
        cases.insert(0, Case(PLAIN, None, 0))
    head = load_target(options.target, weights=False)
    prompts, failed = [prompt for file in options.prompts for prompt in read_prompts(file, options.limit)], False
    decoder = ThreadPoolExecutor(1)  # decodes one case at a time

    def measured(case: Case, starts: int = 2) -> tuple[list[Measurement], str | None, Own | None]:
        decode = partial(decoder.submit, _decode, options, case) if case.draft else None
        with started(options, case, arguments) as server:
            try:
                server.wait(options.start_timeout)
            except ChildProcessError:
                if starts == 1:
                    raise
            else:
                return asyncio.run(_measure(server.url, prompts, options, case.template(head), decode))
        return measured(case, starts - 1)

    with decoder, ThreadPoolExecutor(options.parallel) as threads:
        for case, done in [(case, threads.submit(measured, case)) for case in cases]:
            try:
                rows = rows_of(options, case, *done.result())
            except ChildProcessError as e:
                print(f"{case.name}: {e}", flush=True)
                failed = True
                continue
            asked = {identity(row) for row in rows}
            record["rows"] = [row for row in record["rows"] if identity(row) not in asked] + rows
            write_record(options.out, record)
    if failed:
        sys.exit(1)


def parse_tree(text: str) -> tuple[int, int, int]:
    """The K, nodes and width of a tree. Raises ValueError, which argparse reports."""
    k, nodes, width = map(int, text.split(":"))
    return k, nodes, width


def identity(row: dict[str, Any]) -> tuple[Any, ...]:
    """What a row measures: a later row of the same replaces it."""
    return tuple(row[name] for name in ("method", "k", "nodes", "width", "concurrency"))


@dataclass(frozen=True)
class Case:
    """A draft that is served with K drafted tokens a round, or with trees of K levels; none for the engine alone."""

    method: str
    draft: str | None
    k: int
    nodes: int | None = None
    width: int | None = None

    @property
    def name(self) -> str:
        """The case in a file's name and in messages."""
        return f"{self.method}_{self.k}" + (f"_{self.nodes}_{self.width}" if self.nodes else "")

    @property
    def drafting(self) -> dict[str, Any]:
        """How fledge drafts it."""
        return dict(mode="tree", depth=self.k, nodes=self.nodes, width=self.width) if self.nodes else {"depth": self.k}

    def template(self, target: TransformersTarget) -> ChatTemplate:
        """The target's chat template as the draft was trained on it."""
        kwargs = read_draft_config(self.draft).provenance.template_kwargs if self.draft else {}
        return ChatTemplate(target.tokenizer, target.stop_ids, kwargs)


def _record(options: argparse.Namespace, arguments: list[str]) -> dict[str, Any]:
    """The record to which rows are added: the one at --out if it is of this commit and target, else a new one."""
    here = environment(resolve_device(options.device), options.dtype or "the target's")
    fixed = {
        "engine": options.engine, "target": Path(options.target).name,
        "prompts": ", ".join(Path(file).name for file in options.prompts),
        "limit": options.limit, "new": options.new, "temperature": options.temperature,
        "parallel": options.parallel, "arguments": shlex.join(arguments),
    }  # fmt: skip
    if options.out.exists() and options.out.stat().st_size:
        found = json.loads(options.out.read_text())
        if found["environment"]["commit"] == here["commit"] and fixed.items() <= found.items():
            return found
        raise SystemExit(f"{options.out} is of another commit or other settings; move it away, or choose another --out")
    return {"environment": here, **fixed, "rows": []}


def rows_of(
    options: argparse.Namespace, case: Case, measured: list[Measurement], version: str | None, decoded: Own | None
) -> list[dict[str, Any]]:
    """The rows of a draft at one K, one for each concurrency, with fledge's own figures for the same prompts."""
    own = decoded.result() if decoded else None
    probe = read_probe(Path(case.draft)) if case.draft else None
    rows = []

    def answers(m: Measurement) -> list[Answer]:
        return [asked.answer for asked in m.requests]

    for found in measured:
        shown = found.record()
        row = {
            "method": case.method, "k": case.k, "nodes": case.nodes, "width": case.width,
            "concurrency": found.concurrency,
            "tau": own["figures"]["tau"] if own else None, "alpha": own["figures"]["alpha"] if own else None,
            f"{options.engine}_tau": shown["tau"], f"{options.engine}_alpha": shown["alpha"],
            "fledge_identical": sum(same(own, found)) if own else None, "requests": shown["requests"],
            "equal_answers": of_equal_answers(own, found) if own else None,
            "identical_to_first": identical(answers(found), answers(measured[0]))[0],
            "own_rounds": own["figures"]["rounds"] if own else None,
            "z": z_values(found.acceptance, own["completions"]) if own else None,
            "steps": probe.record.step if probe else None,
            "rounds": shown["counted"]["rounds"] if shown["counted"] else None,
            "source": shown["counted"]["source"] if shown["counted"] else shown["note"],
            "mismatched_prompts": len(shown["mismatched_prompts"]), "tokens_per_s": shown["tokens_per_s"],
            "ttft_ms": shown["ttft_ms"], "itl_ms": shown["itl_ms"], "version": version,
        }  # fmt: skip
        print(json.dumps({name: round(v, 3) if isinstance(v, float) else v for name, v in row.items()}), flush=True)
        rows.append(row)
    return rows


def z_values(acceptance: Acceptance | None, completions: list[Completion]) -> list[float | None] | None:
    """For each position, the difference of α_k in standard errors of two independent proportions; None where a side has
    no rounds that reached it, or all rounds of both ended alike."""
    if acceptance is None or not acceptance.by_position:
        return None
    theirs = list(itertools.pairwise([acceptance.rounds, *acceptance.by_position]))
    ours = list(zip(*drafted_and_accepted([c.trace for c in completions]), strict=True))
    return [_z(*one, *other) for one, other in zip(theirs, ours, strict=False)]


def _z(reached: float, passed: float, own_reached: float, own_passed: float) -> float | None:
    if not reached or not own_reached:
        return None
    share = (passed + own_passed) / (reached + own_reached)
    error = math.sqrt(share * (1 - share) * (1 / reached + 1 / own_reached))
    return (passed / reached - own_passed / own_reached) / error if error else None


async def _measure(
    url: str, prompts: list[Record], options: argparse.Namespace, template: ChatTemplate,
    decode: Callable[[Measurement], Own] | None,
) -> tuple[list[Measurement], str | None, Own | None]:  # fmt: skip
    """The measurements, the engine's version, and what `decode` makes of the first one while the others are made."""
    own = None
    async with Client(url, connections=max(options.concurrency) + 1, retries=0) as client:
        await client.connect()
        decoding = Decoding(options.new, options.temperature, template_kwargs=template.kwargs)
        found: list[Measurement] = []
        for concurrency in options.concurrency:
            # later turns follow the answers of the first measurement, so that all have the same prompts
            histories = found[0].answers if found else None
            found.append(
                await measure(
                    client, prompts, decoding, concurrency=concurrency, template=template, histories=histories
                )
            )
            if len(found) == 1 and decode:
                own = decode(found[0])
        return found, await client.version(), own


def _decode(options: argparse.Namespace, case: Case, measurement: Measurement) -> dict[str, Any]:
    """fledge's own decoding of the prompts of a measurement."""
    dtype = parse_dtype(options.dtype)
    engine = load(options.target, case.draft, device=options.device, dtype=dtype, **case.drafting)
    ids = [asked.ids for asked in measurement.requests]
    sampling = Sampling(temperature=options.temperature)
    return decode_own(engine, ids, sampling=sampling, max_new_tokens=options.new, batch=min(8, len(ids)))


def same(own: dict[str, Any], measurement: Measurement) -> list[bool]:
    """For each answer, whether its text is fledge's."""
    pairs = zip(own["completions"], measurement.requests, strict=True)
    return [ours.text == asked.answer.text for ours, asked in pairs]


def of_equal_answers(own: dict[str, Any], measurement: Measurement) -> dict[str, Any] | None:
    """τ and rounds of fledge and of the engine over the answers with the same text, and the standard error of the
    difference of the rounds, from the differences of the single answers."""
    equal = same(own, measurement)
    metas = [asked.answer.meta for asked in itertools.compress(measurement.requests, equal)]
    theirs = of_requests(metas)
    if theirs is None:
        return None
    ours = [c.trace for c in itertools.compress(own["completions"], equal)]
    differences = [
        (one.rounds if (one := of_requests([meta])) else 0) - committed_per_round([trace])[1]
        for meta, trace in zip(metas, ours, strict=True)
    ]
    error = statistics.stdev(differences) * math.sqrt(len(differences)) if len(differences) > 1 else None
    return {
        "answers": len(ours), "tau": tau(ours), "engine_tau": theirs.tau, "rounds": committed_per_round(ours)[1],
        "engine_rounds": theirs.rounds, "difference_se": error,
    }  # fmt: skip


# -- the engine ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Server:
    """An engine that was started, and the file with its output."""

    url: str
    process: subprocess.Popen
    log: Path
    began: float  # of time.monotonic()

    def wait(self, seconds: float) -> None:
        """Waits until the engine is healthy. Raises ChildProcessError, after the end of its output was printed, if it
        ended or is not healthy so many seconds after its start."""
        while time.monotonic() - self.began < seconds and self.process.poll() is None:
            with contextlib.suppress(OSError), urllib.request.urlopen(f"{self.url}/health", timeout=5) as response:
                if response.status == 200:
                    print(f"healthy after {time.monotonic() - self.began:.0f} s", flush=True)
                    return
            time.sleep(0.3)
        print("\n".join(self.log.read_text(errors="replace").splitlines()[-LOG_LINES:]), flush=True)
        ended = "ended" if self.process.poll() is not None else f"was not healthy after {seconds:g} s"
        raise ChildProcessError(f"the engine {ended}; its output is in {self.log}")


def free_port() -> int:
    """A port that nothing listens on, below the range from which the system takes the ports of other programs: one of
    them could take the port before the engine does, and answer for it."""
    for port in random.SystemRandom().sample(range(10_000, 32_000), 100):
        with socket.socket() as s, contextlib.suppress(OSError):
            s.bind(("127.0.0.1", port))
            return port
    raise OSError("a hundred ports from 10000 to 32000 are all taken")


@contextlib.contextmanager
def started(options: argparse.Namespace, case: Case, arguments: list[str]) -> Iterator[Server]:
    """Context manager: runs the engine in a process group of its own. Its output goes to a file beside --out."""
    port = free_port()
    arguments = [*arguments, "--host", "127.0.0.1", "--port", str(port)]
    if case.draft is None:
        target = [options.target] if options.engine == "vllm" else ["--model-path", options.target]
        command = [*program(options.engine), *target, *arguments]
    else:
        command = command_of(
            ServeOptions(
                target=options.target,
                draft=case.draft,
                engine=options.engine,
                depth=case.k,
                tree_nodes=case.nodes,
                tree_width=case.width,
                arguments=arguments,
            )
        )
    log = options.out.with_name(f"{options.out.stem}_{case.name}.log")
    print("starting", *command, flush=True)
    with log.open("w") as output:
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, start_new_session=True)
    try:
        yield Server(f"http://127.0.0.1:{port}", process, log, time.monotonic())
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(STOPPING)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # also what it left behind
        process.wait()


if __name__ == "__main__":
    main()
