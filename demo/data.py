"""The demo's text: training records and prompts from the standard library that is running it.

python -m demo.data --out build/demo
"""

import argparse
import json
from pathlib import Path

from demo.corpus import held_out, stdlib_files

PROMPT_CHARACTERS = 900  # about 250 tokens of the bundled target
NEEDED_CHARACTERS = 2 * PROMPT_CHARACTERS  # a file that goes on for as long as the prompt again


def write(out: Path, prompts: int) -> None:
    """Writes train.jsonl (`text`) and prompts.jsonl (`prompt`, of files that no model was trained on)."""
    files = stdlib_files()
    train = [{"text": text} for path, text in files if not held_out(path)]
    unseen = [(path, text) for path, text in files if held_out(path) and len(text) >= NEEDED_CHARACTERS]
    chosen = [unseen[i * len(unseen) // prompts] for i in range(min(prompts, len(unseen)))]
    out.mkdir(parents=True, exist_ok=True)
    write_lines(out / "train.jsonl", train)
    write_lines(out / "prompts.jsonl", [{"prompt": beginning(text), "path": path} for path, text in chosen])


def beginning(text: str) -> str:
    """The first lines of a text, whole, up to about PROMPT_CHARACTERS; without the last line's end, which is one token
    with the indentation that follows it."""
    return text[: text.index("\n", PROMPT_CHARACTERS)]


def write_lines(file: Path, records: list[dict]) -> None:
    file.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("build/demo"))
    parser.add_argument("--prompts", type=int, default=24)
    options = parser.parse_args()
    write(options.out, options.prompts)


if __name__ == "__main__":
    main()
