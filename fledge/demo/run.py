"""The demo: trains a draft for the bundled model, then measures how much faster the model decodes with it.

    python -m fledge.demo.run

Every step is a `fledge` command, which is printed before it runs. The results are written to build/demo/result.json.
"""

import json
import sys
import time
from pathlib import Path

from fledge import cli
from fledge.demo import data

WORK = Path("build/demo")
TARGET, SHIPPED = Path("fledge/demo/target"), Path("fledge/demo/draft")
PROMPTS = 16
SHARE = 0.4  # of the training text, which is more than twice what the steps below use
TRAIN = (
    "--aux-layers 2,6,11 --fc-norm --norm-output --steps 680 --depth 2 --draft-vocab 1280 --max-length 256 "
    "--row-length 512 --lr 2e-3 --gamma 0.6 --eval-tokens 32"
).split()
DECODE = "--depth auto --confidence 0.12".split()


def main() -> None:
    if not TARGET.is_dir():
        sys.exit("run the demo from the root of the repository, where fledge/demo/target is")
    start = time.monotonic()
    say(f"Writing training text and {PROMPTS} prompts from the standard library's source to {WORK}.")
    data.write(WORK, PROMPTS)
    run = fresh_directory(WORK / "run")
    say("Training a draft for the bundled model.")
    fledge("train", "--target", TARGET, "--data", f"{WORK / 'train.jsonl'}@{SHARE}", "--out", run, *TRAIN)
    if not (run / "draft").is_dir():
        sys.exit(130)  # interrupted; the command has printed how to continue
    drafts = {"trained just now": run / "draft", "shipped": SHIPPED}
    results = {}
    for temperature, limit, length in ((0, PROMPTS, 128), (1, PROMPTS // 4, 64)):
        say(f"Decoding continuations of held-out files without a draft and with each draft, temperature {temperature}.")
        out = WORK / f"eval-{temperature}.json"
        fledge(
            "eval", "--target", TARGET, *(arg for draft in drafts.values() for arg in ("--draft", draft)),
            "--prompts", WORK / "prompts.jsonl", "--limit", limit, "--max-new-tokens", length,
            "--temperature", temperature, "--out", out, *DECODE,
        )  # fmt: skip
        records = json.loads(out.read_text())
        results |= {f"{name}, temperature {temperature}": records[str(draft)] for name, draft in drafts.items()}
    seconds = time.monotonic() - start
    (WORK / "result.json").write_text(json.dumps({"seconds": seconds, "results": results}, indent=2) + "\n")
    summarize(results, seconds)


def fresh_directory(path: Path) -> Path:
    """The path, or a variant of it with a number if it exists, so that the demo can run again."""
    existing = [path, *path.parent.glob(path.name + "-*")]
    return path if not path.exists() else path.with_name(f"{path.name}-{len(existing)}")


def fledge(*arguments: object) -> None:
    """Prints and runs a fledge command; if it fails, the demo ends. The commands run in this process, because a new
    process would need seconds to import torch again."""
    command = [str(a) for a in arguments]
    print("$ fledge " + " ".join(command), flush=True)
    sys.argv = ["fledge", *command]
    try:
        cli.main()
    except SystemExit as e:
        if e.code:
            raise


def say(line: str) -> None:
    print(f"\n{line}", flush=True)


def summarize(results: dict, seconds: float) -> None:
    say(f"In {seconds / 60:.1f} minutes:")
    for name, r in results.items():
        print(
            f"  draft {name}: {r['speedup']:.2f} times as fast ({r['baseline_tokens_per_s']:.0f} to "
            f"{r['tokens_per_s']:.0f} tokens/s), τ {r['tau']:.2f} "
            f"({_tau_without_loops(r)}; {r['repeated_8grams']:.0%} of 8-grams are repeats), "
            f"{r['identical']} of {r['prompts']} identical"
            + (f", {r['near_ties']} differing within rounding noise" if r["near_ties"] else "")
        )
    say(f"Try it: .venv/bin/fledge generate --target {TARGET} --draft {SHIPPED} --stats --prompt 'import json'")


def _tau_without_loops(r: dict) -> str:
    if not r["not_looping"]:
        return "every answer loops"
    return f"{r['tau_not_looping']:.2f} on the {r['not_looping']} answers that do not loop"


if __name__ == "__main__":
    main()
