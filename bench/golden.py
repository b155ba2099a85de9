"""Runs the same commands with two commits on one machine and compares their output files to the bit.

    python bench/golden.py --base main                 # against this working tree, uncommitted changes included
    python bench/golden.py --base main --only decode resume --work build/golden --out build/golden.json

Processors sum in different orders, so no stored file can be the reference: both trees run here, side by side, on the
CPU with one thread each, with the same models, data and seeds. Compared are exit codes, standard output and files:
weights by tensor; JSON and text without times, speeds, commits, paths and versions; a report without its drawings.
Both trees read the drafts, runs and features that the base wrote, so a difference in training stays in training.

Each case prints a line: equal, differs with the first difference, or missing where a tree lacks an option, a command
or a name in Python. The exit code is 1 unless all cases are equal. A case with several scripts runs the first script
that a tree has: after renaming an option, add the new spelling. `--work` keeps all files, also standard error.
"""

from __future__ import annotations

import argparse
import contextlib
import html
import json
import os
import random
import re
import runpy
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
SIDES = ("base", "here")  # of equal length: tables and line breaks may depend on the length of a path
ABSENT = re.compile(
    r"(No such (option|command)|has no attribute|cannot import name|No module named|unexpected keyword)[^\n│]*"
)

# Commands run in WORK/base/CASE and WORK/here/CASE. Besides those of fledge: copy FROM TO; python FILE ..; stop ..,
# a training that is stopped after three steps.
FILES, BASE = "../../files", "../../base"
TARGET, DEMO = f"--target {FILES}/target --device cpu", f"--target {FILES}/demo/target --device cpu"
EAGLE3, EAGLE1, PEAGLE = (f"{BASE}/train-{method}/run/draft" for method in ("eagle3", "eagle1", "peagle"))
PAIR, DEMO_PAIR = f"{TARGET} --draft {EAGLE3}", f"{DEMO} --draft {FILES}/demo/draft"
DATA, PROMPTS = f"--data {FILES}/chats.jsonl --max-length 128", f"--prompts {FILES}/prompts.jsonl --max-new-tokens 24"
STEPS = (
    f"{TARGET} {DATA} --row-length 256 --lr 0.03 --eval-prompts {FILES}/prompts.jsonl --eval-every 12 --eval-tokens 16 "
    "--save-every 12 --out run --steps"
)
CASES: dict[str, str | tuple[str, ...]] = {
    "train-eagle3": f"train {STEPS} 24 --method eagle3 --depth 3 --draft-vocab 200",
    "train-eagle1": f"train {STEPS} 24 --method eagle1 --depth 3 --feature-noise 0.2 --loss kl",
    "train-peagle": f"train {STEPS} 24 --config peagle --layers 2 --depth 4",
    "train-fp64": f"train {STEPS} 12 --method eagle3.1 --depth 3 --dtype fp64 --optimizer adamw --loss mixed --qk-norm "
    "--cod-rate 0.8 --layers 2 --rows-per-step 2",
    "train-init": f"train {STEPS} 4 --init-from {EAGLE3}",
    "resume": f"copy {BASE}/stopped/run run; train --resume run",
    "features": f"features {TARGET} {DATA} --out features; features --verify features",
    "train-features": f"train --device cpu --features {BASE}/features/features --row-length 256 --lr 0.03 --steps 8 "
    "--depth 3 --out run",
    "dry-run": f"train {STEPS} 8 --dry-run",
    "decode": f"python {FILES}/decode.py {FILES}/target {FILES}/prompts.jsonl {EAGLE3} {EAGLE1} {PEAGLE}",
    "generate": f"generate {PAIR} --prompt 'young bird' --raw --max-new-tokens 40; "
    f"generate {PAIR} --prompt 'small river' --max-new-tokens 40 --draft-mode tree --temperature 1 --top-p 0.9",
    "eval": f"eval {PAIR} {PROMPTS} --batch 3 --depth 3 --draft-mode chain --draft-mode tree --tree-nodes 16 "
    f"--out e.json; eval {TARGET} --draft {PEAGLE} {PROMPTS} --temperature 1 --draft-sampling sample --dtype fp64 "
    "--out sampled.json",
    "chat": f"chat {PAIR} --max-new-tokens 24",  # standard input is the file said.txt
    "regenerate": f"regenerate {PAIR} --data {FILES}/prompts.jsonl --out answers.jsonl --max-new-tokens 16 --batch 4 "
    "--temperature 1",
    "check": f"check {PAIR} --engine vllm; check {TARGET} --draft {PEAGLE} --json",
    "inspect": f"inspect {EAGLE3}; inspect {EAGLE1}; inspect {PEAGLE}",
    "export": "; ".join(f"export --draft {EAGLE3} --to {e} --out {e}" for e in ("vllm", "safeailab", "speculators")),
    "push": f"push owner/name --draft {EAGLE3} --dry-run",
    "report": f"report {BASE}/train-eagle3/run {BASE}/eval/e.json --out report.html",
    "serve": f"serve --target {FILES}/target --draft {PEAGLE} --dry-run -- --port 8001; "
    f"serve --target {FILES}/target --draft {EAGLE3} --engine sglang --tree-nodes 16 --dry-run --skip-check",
    "errors": "train; train --target nowhere --data d --depth 0; generate --target nowhere --prompt a; report nowhere; "
    "train --resume nowhere; inspect nowhere",
    "demo-train": f"train {DEMO} --data {FILES}/demo/chats.jsonl.gz --steps 2 --depth 4 --draft-vocab 2048 "
    "--max-length 256 --row-length 512 --eval-tokens 8 --data-workers 1 --out run",
    "demo-decode": f"python {FILES}/decode.py {FILES}/demo/target {FILES}/demo-prompts.jsonl {FILES}/demo/draft",
    "demo-generate": f"generate {DEMO_PAIR} --prompt 'What is 5 + 2?' --max-new-tokens 60; "
    f"generate {DEMO_PAIR} --prompt 'What is 5 + 2?' --max-new-tokens 60 --temperature 1 --draft-mode tree",
    "demo-eval": f"eval {DEMO_PAIR} --prompts {FILES}/demo/prompts.jsonl --limit 4 --max-new-tokens 32 --depth 5 "
    "--out e.json",
}
PREPARED = {"stopped": f"stop train {STEPS} 48 --method eagle3 --depth 3 --optimizer adamw"}  # by the base, for both
# prints the ids, the end, and each round's drafted and accepted tokens, of many ways to decode
DECODE = """
import json, sys, fledge
target, prompts, *drafts = sys.argv[1:]
chats = [json.loads(line)["messages"][:1] for line in open(prompts)][:4]
ways = dict(none={}, chain=dict(depth=3), unstable=dict(depth=3, draft_cache="unstable"),
            tree=dict(mode="tree", depth=4, nodes=20, width=4), wide=dict(mode="tree", depth=4, nodes=20),
            confidence=dict(depth=4, confidence=0.3),
            transformers=dict(depth=3, target_impl="transformers"), fp64=dict(depth=3, dtype="fp64"))
samplings = dict(greedy={}, temperature=dict(temperature=1.0, seed=3), sampled=dict(temperature=1.0, draft="sample"),
                 filtered=dict(temperature=0.8, top_k=20, top_p=0.9, repetition_penalty=1.1))
for number, draft in enumerate(drafts):
    for way, options in ways.items():
        try:
            engine = fledge.load(target, draft=draft if options else None, device="cpu", **options)
        except (TypeError, ValueError) as e:
            print(number, way, type(e).__name__)
            continue
        for name, sampling in samplings.items():
            for batch in (1, 3):
                try:
                    answers = engine.generate(chats, batch=batch, max_new_tokens=24, **sampling)
                except (TypeError, ValueError) as e:
                    print(number, way, name, batch, type(e).__name__)
                    continue
                for done in answers:
                    rounds = [(r.drafted, r.accepted) for r in done.trace.rounds]
                    print(number, way, name, batch, done.tokens, done.finish, rounds)
"""


def main() -> None:
    if sys.argv[1:2] == ["serve"]:
        return serve(Path(sys.argv[2]))
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--base", required=True, metavar="REV", help="the commit to compare this working tree with")
    parser.add_argument("--only", nargs="+", default=list(CASES), choices=CASES, metavar="NAME", help=", ".join(CASES))
    parser.add_argument("--out", type=Path, help="JSON file for all differences")
    parser.add_argument("--work", type=Path, help="directory to keep everything in; it must not exist")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # removes the worktree
    with tempfile.TemporaryDirectory(prefix="fledge-golden-") as scratch:
        work, trees = (options.work or Path(scratch) / "work").resolve(), (Path(scratch) / "tree", ROOT)
        make_files(work / "files")
        git("worktree", "add", "--detach", trees[0], options.base)
        try:
            commits = [git("-C", tree, "describe", "--always", "--dirty") for tree in trees]
            results = compare_trees(work, trees, options.only)
        finally:
            git("worktree", "remove", "--force", trees[0])
    if options.out:
        options.out.write_text(json.dumps({"commits": commits, "cases": results}, indent=2) + "\n")
    sys.exit(any(result["found"] != "equal" for result in results.values()))


def git(*words: object) -> str:
    return subprocess.check_output(["git", *map(str, words)], cwd=ROOT, text=True, stderr=subprocess.PIPE).strip()


def compare_trees(work: Path, trees: tuple[Path, Path], names: list[str]) -> dict[str, dict[str, Any]]:
    """Runs the cases with both trees, each case side by side; prints and returns what was found."""
    scripts = PREPARED | CASES
    needed = set(names)  # by the base: also the cases whose files others read
    while more := {n for n in scripts for m in needed if f"{BASE}/{n}/" in "".join(scripts[m])} - needed:
        needed |= more
    results: dict[str, dict[str, Any]] = {}
    with contextlib.ExitStack() as stack:
        sides = [stack.enter_context(server(work / side, tree)) for side, tree in zip(SIDES, trees, strict=True)]
        for name in (n for n in scripts if n in needed):
            running = sides if name in names else sides[:1]
            for side in running:
                print(name, file=side.stdin, flush=True)
            codes = [json.loads(side.stdout.readline()) for side in running]
            ran = [Ran(work / side / name, c) for side, c in zip(SIDES, codes, strict=False)]
            if name in names:
                results[name] = found = judge(*ran)
                print(f"{name}: {found['found']}", *found["differences"][:1], sep="  ", flush=True)
    return results


def server(folder: Path, tree: Path) -> subprocess.Popen[str]:
    """Starts this program as the process that runs the cases of a tree in a folder."""
    folder.mkdir()
    environment = os.environ | {
        "PYTHONPATH": str(tree), "FLEDGE_COMMIT": "golden", "FLEDGE_CACHE": str(folder / "cache"), "NO_COLOR": "1",
        "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1",
        "COLUMNS": "200", "PYTHONDONTWRITEBYTECODE": "",  # or each command would compile the whole package
    }  # fmt: skip
    words = [sys.executable, __file__, "serve", str(folder)]
    return subprocess.Popen(words, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def serve(folder: Path) -> None:
    """Runs the cases named on standard input, and answers with their exit codes. Each command is a forked child:
    torch and transformers, which take seconds to import, are imported once."""
    import torch._dynamo  # noqa: F401
    from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM  # noqa: F401

    for name in map(str.strip, sys.stdin):
        scripts = (PREPARED | CASES)[name]
        for script in (scripts,) if isinstance(scripts, str) else scripts:
            shutil.rmtree(folder / name, ignore_errors=True)
            (folder / name).mkdir()
            os.chdir(folder / name)
            codes = []
            for words in map(shlex.split, script.split("; ")):
                if words[0] == "copy":
                    shutil.copytree(*words[1:])
                elif child := os.fork():
                    if words[0] == "stop":
                        stop_after_three_steps(child)
                    codes.append(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
                else:
                    return become(words[words[0] == "stop" :])
            if not Ran(Path.cwd(), codes).absent:
                break
        print(json.dumps(codes), flush=True)


def stop_after_three_steps(child: int) -> None:
    while os.waitid(os.P_PID, child, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
        with contextlib.suppress(OSError):
            if Path("run/metrics.jsonl").read_text().count("\n") >= 3:
                return os.kill(child, signal.SIGTERM)
        time.sleep(0.02)


def become(words: list[str]) -> None:
    """Runs a command in this process, with its output in files."""
    for number, (file, flags) in enumerate({
        f"{FILES}/said.txt": os.O_RDONLY, "stdout": os.O_WRONLY | os.O_CREAT | os.O_APPEND,
        f"{os.getcwd()}.stderr": os.O_WRONLY | os.O_CREAT | os.O_APPEND,
    }.items()):  # fmt: skip
        os.dup2(os.open(file, flags, 0o644), number)
    if words[0] == "python":
        sys.argv = words[1:]
        runpy.run_path(words[1], run_name="__main__")
    else:
        sys.argv = ["fledge", *words]
        runpy.run_module("fledge", run_name="__main__", alter_sys=True)


@dataclass(frozen=True)
class Ran:
    """What a case left: its directory, and the exit code of each command."""

    folder: Path
    codes: list[int]

    @property
    def errors(self) -> str:
        return Path(f"{self.folder}.stderr").read_text(errors="replace").strip()

    @property
    def absent(self) -> bool:
        """Whether the tree lacks something that the case names."""
        return any(self.codes) and bool(ABSENT.search(self.errors))


def judge(base: Ran, here: Ran) -> dict[str, Any]:
    """What to say of a case, `found`, and all `differences`, of which the first is printed."""
    absent = [f"{ran.folder.parent.name}: {ABSENT.search(ran.errors)[0].strip()}" for ran in (base, here) if ran.absent]
    if absent:
        return {"found": "missing", "differences": absent}
    failed = here if any(here.codes) else base
    said = f"exit codes {base.codes} and {here.codes}: {failed.errors.splitlines()[-1:]}"
    if base.codes == here.codes and any(base.codes) and base.folder.name != "errors":
        return {"found": "fails with both", "differences": [said]}
    differences = [said] * (base.codes != here.codes) + compare_folders(base.folder, here.folder)
    return {"found": "differs" if differences else "equal", "differences": differences}


def compare_folders(base: Path, here: Path) -> list[str]:
    """The first difference of each file that differs: weights first, then records, then text."""
    files = {p.relative_to(side) for side in (base, here) for p in side.rglob("*") if p.is_file()}
    kinds, found = (".safetensors", ".jsonl", ".json"), []
    for file in sorted(files, key=lambda f: (kinds.index(f.suffix) if f.suffix in kinds else 3, f)):
        if not ((base / file).exists() and (here / file).exists()):
            found.append(f"{file}: only one side writes it")
        elif file.name != "SHA256SUMS" and (difference := compare_files(base / file, here / file)):
            found.append(f"{file}: {difference}")
    return found


def compare_files(base: Path, here: Path) -> str:
    """The first difference of two files that counts; empty if there is none."""
    if base.suffix == ".safetensors":
        return compare_tensors(base, here)
    try:
        texts = [re.sub(r"/[^\s\"']*/(base|here)\b", "SIDE", file.read_text()) for file in (base, here)]
    except UnicodeDecodeError:
        return "" if base.read_bytes() == here.read_bytes() else "the bytes differ"
    if base.suffix == ".json":
        return compare_values(*map(json.loads, texts))
    if base.suffix == ".jsonl":
        return compare_values(*([json.loads(line) for line in text.splitlines()] for text in texts))
    return compare_values(*(list(stable_lines(html_text(t) if base.suffix == ".html" else t)) for t in texts))


def compare_tensors(base: Path, here: Path) -> str:
    """The tensor of two files with the largest difference, relative to its largest value."""
    import torch
    from safetensors.torch import load_file

    a, b = load_file(base), load_file(here)
    if other := sorted(a.keys() ^ b.keys()):
        return f"{other[0]}: only one side has it"
    if other := [k for k in a if (a[k].dtype, a[k].shape) != (b[k].dtype, b[k].shape)]:
        return f"{other[0]}: another dtype or shape"
    pairs = {k: (a[k].double(), b[k].double()) for k in a if not torch.equal(a[k], b[k])}
    worst = [(float((x - y).abs().max() / x.abs().max()), k) for k, (x, y) in pairs.items()]
    return "{1}: largest relative difference {0:.1e}".format(*max(worst)) if worst else ""


def compare_values(a: Any, b: Any, at: str = "") -> str:
    """The first difference of two JSON values, and where it is. Floats have to be equal to the bit."""
    if isinstance(a, dict) and isinstance(b, dict):
        a, b = ({k: v for k, v in x.items() if not UNSTABLE_KEY.search(k)} for x in (a, b))
        if other := sorted(a.keys() ^ b.keys()):
            return f"{at}.{other[0]}: only one side has it"
        return next(filter(None, (compare_values(a[k], b[k], f"{at}.{k}") for k in a)), "")
    if isinstance(a, list) and isinstance(b, list):
        pairs = enumerate(zip(a, b, strict=False))
        found = next(filter(None, (compare_values(*pair, f"{at}[{i}]") for i, pair in pairs)), "")
        return found or f"{at}: {len(a)} → {len(b)} items" * (len(a) != len(b))
    if isinstance(a, str) and isinstance(b, str):
        a, b = stable(a), stable(b)
        part = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
        common = a[: min(part, 40)]
        shown = [text[max(part - 20, len(common)) : part + 40] for text in (a, b)]
        return f"{at}: {common!r}.. {shown[0]!r} → {shown[1]!r}" * (a != b)
    same = type(a) is type(b) and (a == b or (a != a and b != b))
    return "" if same else f"{at}: {a!r} → {b!r}"


# what depends on the clock, the machine or the commit: keys of JSON objects, parts of texts, lines and columns
UNSTABLE_KEY = re.compile(r"seconds|_per_s$|_ms$|speedup|^baseline|^(environment|versions|fledge_version|parts|round)$")
UNSTABLE_TEXT = re.compile(
    r"\x1b\[[0-9;?]*[a-zA-Z]|\d+:\d\d:\d\d|[\d.,]+ (\w+/s|s|ms|seconds|minutes|hours)\b|[\d.]+[x×]|sha256 [0-9a-f]{64}"
    r"|fledge \d[\w.]*( \(\w+\))?|[\d.,]+ [kKMGT]i?B(?= [^.\n]*free)"
)
UNSTABLE_LINE = re.compile(
    r"tokens/s|baseline|with draft|speedup|faster|slower|as long as|\btimes?\b|\bms\b|minute|second", re.I
)


def stable(text: str) -> str:
    return UNSTABLE_TEXT.sub("#", text)


def stable_lines(text: str) -> Iterator[str]:
    """The lines of a printed text without columns of times and speeds, and without lines about these."""
    columns, hidden = 0, set()
    for line in text.splitlines():
        cells = [cell.strip() for cell in re.split(r"\s{2,}|[|│]", line) if cell.strip()]
        unstable = {i for i, cell in enumerate(cells) if UNSTABLE_LINE.search(cell)}
        if len(cells) > 2 and not any(re.match(r"[-\d#]", stable(cell)) for cell in cells):  # a table's header
            columns, hidden = len(cells), unstable
        elif unstable:
            continue
        if cells:
            yield stable("  ".join(c for i, c in enumerate(cells) if len(cells) != columns or i not in hidden))


def html_text(text: str) -> str:
    """The words and tables of a page, without drawings."""
    text = re.sub(r"<(svg|style|script)\b.*?</\1>", "", text, flags=re.S)
    text = re.sub(r"</(?:p|tr|li|h\d|table|figcaption|section|summary)>", "\n", re.sub(r"</t[dh]>", "  ", text))
    return html.unescape(re.sub(r"<[^>]+>", "", text))


def make_files(folder: Path) -> None:
    """A tiny chat model, whose texts a draft learns in a few steps; chats with its answers; the bundled pair."""
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, set_seed

    torch.set_num_threads(1)
    words = "young bird tries its wings falls again until can fly small river stone green leaf morning song".split()
    bpe, special = Tokenizer(models.BPE()), ["<|pad|>", "<|im_end|>", "<|im_start|>"]
    bpe.pre_tokenizer, bpe.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    trainer = trainers.BpeTrainer(special_tokens=special, initial_alphabet=pre_tokenizers.ByteLevel.alphabet())
    bpe.train_from_iterator([" ".join(["", *words, "system user assistant"])] * 4, trainer)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=bpe, eos_token=special[1], pad_token=special[0])
    tokenizer.chat_template = (
        "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
    )
    set_seed(0)
    model = LlamaForCausalLM(LlamaConfig(
        hidden_size=32, intermediate_size=48, num_hidden_layers=8, num_attention_heads=4, num_key_value_heads=2,
        head_dim=8, vocab_size=len(tokenizer), max_position_embeddings=512, pad_token_id=0, bos_token_id=None,
        eos_token_id=1,
    ))  # fmt: skip
    for name, weight in model.named_parameters():
        if weight.dim() > 1:
            weight.data.normal_(0, 1 if "embed" in name or "lm_head" in name else 0.7 * weight.shape[-1] ** -0.5)
    for token in range(len(tokenizer)):
        if token != 1 and tokenizer.decode([token]).strip() not in words:
            model.lm_head.weight.data[token] *= 0.05  # answers are words: decoding and encoding them keeps the tokens
    for part in (model, tokenizer):
        part.save_pretrained(folder / "target")
    draw, chats = random.Random(0), ""
    for _ in range(40):
        chat = [{"role": "user", "content": " ".join(draw.choices(words, k=draw.randint(3, 8)))}]
        asked = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=True)
        made = model.generate(**asked, max_new_tokens=24, do_sample=False)[0, asked["input_ids"].shape[1] :]
        chat.append({"role": "assistant", "content": tokenizer.decode(made, skip_special_tokens=True)})
        chats += json.dumps({"messages": chat}) + "\n"
    shutil.copytree(ROOT / "fledge" / "demo", folder / "demo")
    demo = (folder / "demo" / "prompts.jsonl").read_text()
    for name, text, lines in (("chats", chats, 40), ("prompts", chats, 6), ("demo-prompts", demo, 4)):
        (folder / f"{name}.jsonl").write_text("".join(text.splitlines(keepends=True)[:lines]))
    (folder / "said.txt").write_text("small river\nand the bird\n")
    (folder / "decode.py").write_text(DECODE)


if __name__ == "__main__":
    main()
