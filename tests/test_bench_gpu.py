"""bench/gpu.py: its stages are commands that exist, and one that fails or takes too long does not end the others."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

BENCH = Path(__file__).parents[1] / "bench"
sys.path.insert(0, str(BENCH))

import gpu  # noqa: E402


@pytest.mark.parametrize("name", gpu.STAGES)
def test_the_flags_of_a_stage_exist(name: str):
    script, *words = shlex.split(gpu.STAGES[name].command)
    flags = {word for word in words if word.startswith("--") and word != "--"}
    if script == "-m":
        files = [word for word in words if word.startswith("tests/")]
        assert all((BENCH.parent / file).exists() for file in files if file != "tests")
        return
    source = (BENCH.parent / script).read_text()
    own = flags - set(words[words.index("--") :]) if "--" in words else flags  # what follows goes to the engine
    assert all(re.search(rf'add_argument\(\s*"{flag}"', source) for flag in own), (own, script)


def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *words: object) -> tuple[int, dict]:
    monkeypatch.setattr(sys, "argv", ["gpu.py", *map(str, words), "--out", str(tmp_path / "out")])
    with pytest.raises(SystemExit) as end:
        gpu.main()
    return end.value.code, json.loads((tmp_path / "out" / "stages.json").read_text())


def test_stages_that_fail_hang_or_do_not_fit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    stages = {
        "fails": gpu.Stage("-c 'print(5); raise SystemExit(3)'", 5),
        "hangs": gpu.Stage("-c 'import time; time.sleep(600)'", 1),
        "long": gpu.Stage("-c 'print(1)'", 10_000),
        "works": gpu.Stage('-c \'open("{out}", "w").write("done")\'', 5),
    }
    monkeypatch.setattr(gpu, "STAGES", stages)
    code, results = run(tmp_path, monkeypatch, *stages)
    assert code == 1 and [results[name]["exit_code"] for name in stages] == [3, -15, None, 0]
    assert (tmp_path / "out" / "works.json").read_text() == "done"
    assert "5\n" in (tmp_path / "out" / "log.txt").read_text()


def test_what_a_stage_needs_is_asked_for():
    words = [sys.executable, BENCH / "gpu.py", "prompt_sets", "--out", "nowhere"]
    done = subprocess.run(words, capture_output=True, text=True)
    assert done.returncode == 2 and "needs --target and --prompts" in done.stderr
    assert not Path("nowhere").exists()
