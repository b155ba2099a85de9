"""Small conversations as training data."""

from __future__ import annotations

import json
import random
from pathlib import Path


def tiny_chats(file: Path, n: int) -> Path:
    """Writes n conversations of two turns, in words that the tiny tokenizer was trained on."""
    words = "the young bird tries its wings falls and tries again until it can fly".split()
    draw = random.Random(0)

    def text() -> str:
        return " ".join(draw.choices(words, k=draw.randint(3, 8)))

    roles = ("user", "assistant") * 2
    lines = [json.dumps({"messages": [{"role": r, "content": text()} for r in roles]}) for _ in range(n)]
    file.write_text("\n".join(lines) + "\n")
    return file
