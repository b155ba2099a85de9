"""Writes the demo's data: training records and prompts from the running interpreter's standard library.

python -m fledge.demo.data --out build/demo
"""

import argparse
import json
from pathlib import Path

from fledge.demo.corpus import held_out, stdlib_files

PROMPT_CHARACTERS = 900  # about 250 tokens of the bundled target
NEEDED_CHARACTERS = (
    2 * PROMPT_CHARACTERS
)  # minimum length of a file for a prompt: as much text again follows the prompt


def write(out: Path, prompts: int) -> None:
    """Writes train.jsonl (rows with `text`) and prompts.jsonl (rows with `prompt`, from held-out files). Raises
    ValueError if this Python comes without the source of its standard library."""
    files = stdlib_files()
    train = [{"text": text} for path, text in files if not held_out(path)]
    candidates = [(path, text) for path, text in files if held_out(path) and len(text) >= NEEDED_CHARACTERS]
    chosen = [candidates[i * len(candidates) // prompts] for i in range(min(prompts, len(candidates)))]
    if not train or not chosen:
        raise ValueError(
            "this Python has no source files of its standard library, which the demo trains on; run it with a Python "
            "from python.org, your system's packages or uv"
        )
    out.mkdir(parents=True, exist_ok=True)
    write_lines(out / "train.jsonl", train)
    write_lines(out / "prompts.jsonl", [{"prompt": beginning(text), "path": path} for path, text in chosen])


def beginning(text: str) -> str:
    """The first lines of a text, about PROMPT_CHARACTERS characters. The last newline is removed, because the tokenizer
    joins a newline and the following indentation into one token."""
    return text[: text.index("\n", PROMPT_CHARACTERS)]


def write_lines(file: Path, records: list[dict[str, str]]) -> None:
    file.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("build/demo"), help="output directory (default: build/demo)")
    parser.add_argument("--prompts", type=int, default=24, help="number of prompts (default: 24)")
    options = parser.parse_args()
    write(options.out, options.prompts)


if __name__ == "__main__":
    main()
