"""The wheel and the sdist: what they hold, and that an installed wheel works without the repository.

The wheel is built with the installed setuptools, and installed into a new virtual environment. Nothing is downloaded:
the environment finds the dependencies of this one through a .pth file. With EMPTY_INSTALL=1, as in CI, it is an empty
one, into which pip installs them.
"""

from __future__ import annotations

import email
import json
import os
import re
import subprocess
import sys
import sysconfig
import tarfile
import venv
import zipfile
from pathlib import Path

import pytest

import fledge

REPOSITORY = Path(__file__).parents[1]
MAX_WHEEL_BYTES = 50_000_000
LICENCES = "Apache-2.0 AND CC-BY-SA-4.0 AND CC-BY-4.0 AND CDLA-Sharing-1.0"  # of the code, and of the bundled models
PROGRAM = """
import fledge

engine: fledge.Engine = fledge.load("target", draft="draft", depth="auto")
done: fledge.Completion = engine.generate("Hello", max_new_tokens=8, temperature=0.7)
text: str = done.text
pieces: list[str] = [piece for piece in engine.stream([{"role": "user", "content": "Hello"}])]
trained: fledge.TrainedDraft = fledge.train_draft(target="target", data=["a.jsonl"], out="run", steps=10)
print(text, trained.draft / "config.json", trained.metrics["loss"])
"""
WRONG = {"engine.generate(3)": "call-overload", "done.texts": "attr-defined", "fledge.loads": "attr-defined"}


@pytest.fixture(scope="module")
def dist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory with the wheel and the sdist that were built from the files of this checkout."""
    pytest.importorskip("build", reason="needs the build package, of the extra dev")
    pytest.importorskip("setuptools", minversion="77")
    out, source = tmp_path_factory.mktemp("dist"), tmp_path_factory.mktemp("source")
    copied = ["fledge", "pyproject.toml", "README.md", "LICENSE", "tests", "bench"]
    subprocess.run(
        ["cp", "-r", *copied, source], cwd=REPOSITORY, check=True  # setuptools writes into the directory that it builds
    )  # fmt: skip
    run(sys.executable, "-m", "build", "--no-isolation", "--outdir", out, source)
    return out


@pytest.fixture(scope="module")
def installed(dist: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of commands of a virtual environment with the wheel."""
    home = tmp_path_factory.mktemp("venv")
    venv.create(home, with_pip=False, symlinks=True)
    empty = os.environ.get("EMPTY_INSTALL") == "1"
    words = ["--quiet", "--disable-pip-version-check", *([] if empty else ["--no-deps", "--no-index"])]
    run(sys.executable, "-m", "pip", "--python", home / "bin" / "python", "install", *words, *dist.glob("*.whl"))
    if empty:
        return home / "bin"
    site = home / "lib" / f"python{sysconfig.get_python_version()}" / "site-packages"
    (site / "dependencies.pth").write_text("".join(f"{path}\n" for path in {
        sysconfig.get_path("purelib"), sysconfig.get_path("platlib")}))  # fmt: skip
    return home / "bin"


def run(*words: object, cwd: Path | None = None) -> str:
    """The output of a program, which must succeed and gets no PYTHONPATH."""
    environment = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "TRITON_INTERPRET")}
    ran = subprocess.run(
        [str(word) for word in words], cwd=cwd, env=environment, text=True, timeout=300,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stdout
    return ran.stdout


def test_the_wheel_has_the_package_and_nothing_else(dist: Path) -> None:
    (wheel,) = dist.glob("*.whl")
    assert wheel.stat().st_size < MAX_WHEEL_BYTES
    with zipfile.ZipFile(wheel) as archive:
        held = {name for name in archive.namelist() if ".dist-info/" not in name}
    tracked = subprocess.run(["git", "ls-files", "fledge"], cwd=REPOSITORY, capture_output=True, text=True)
    if tracked.returncode == 0:
        missing = set(tracked.stdout.split()) - held
        assert not missing, "files of fledge/ that package-data in pyproject.toml does not name"
    assert {"fledge/py.typed", "fledge/demo/target/model.safetensors", "fledge/demo/draft/config.json"} <= held
    assert {"fledge/demo/draft/fledge/probe.safetensors", "fledge/demo/chats.jsonl.gz", "fledge/demo/LICENSE"} <= held
    assert {name.split("/")[0] for name in held} == {"fledge"}


def test_the_sdist_can_be_built_again(dist: Path) -> None:
    (sdist,) = dist.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        held = {name.partition("/")[2] for name in archive.getnames()}
    wanted = "pyproject.toml README.md LICENSE fledge/py.typed fledge/demo/target/model.safetensors fledge/cli.py"
    assert set(wanted.split()) <= held
    assert not any(name.startswith("bench") for name in held)


def test_the_metadata_names_version_licence_and_dependencies(dist: Path) -> None:
    (wheel,) = dist.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        (file,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        metadata = email.message_from_bytes(archive.read(file))
    assert metadata["Version"] == fledge.__version__ and metadata["License-Expression"] == LICENCES
    assert metadata.get_all("License-File") == ["LICENSE", "fledge/demo/LICENSE"]
    assert metadata["Description-Content-Type"] == "text/markdown" and "# fledge" in metadata.get_payload()
    needed = [re.match(r"[\w.-]+", line)[0] for line in metadata.get_all("Requires-Dist") if "extra ==" not in line]
    assert "torch" in needed and len(needed) == len(set(needed)), "each dependency is listed once"


def test_an_installed_wheel_works_without_the_repository(installed: Path, tmp_path: Path) -> None:
    command = installed / "fledge"
    where = run(installed / "python", "-c", "import fledge; print(fledge.__file__)", cwd=tmp_path).strip()
    assert Path(where).is_relative_to(installed.parent)
    assert run(command, "--version", cwd=tmp_path).strip() == f"fledge {fledge.__version__}"
    assert "demo" in run(command, "--help", cwd=tmp_path)
    said = run(command, "demo", "--steps", 2, "--prompts", 2, cwd=tmp_path)
    assert "shipped, sampled" in said and "trained, greedy" in said
    result = json.loads((tmp_path / "fledge-demo" / "result.json").read_text())
    assert all(r["different"] == 0 for r in result["results"].values()) and len(result["results"]) == 4
    pair = "--target", "fledge-demo/target", "--draft", "fledge-demo/draft"
    said = run(command, "generate", *pair, "--prompt", "What is 2 + 3?", "--stats", cwd=tmp_path)
    assert "\u03c4" in said and "was trained for" not in said, "the pair fits together"


def test_a_program_that_uses_the_installed_package_type_checks(installed: Path, tmp_path: Path) -> None:
    pytest.importorskip("mypy", reason="needs mypy, of the extra dev")
    (tmp_path / "program.py").write_text(PROGRAM)
    (tmp_path / "wrong.py").write_text(PROGRAM + "".join(f"{line}\n" for line in WRONG))
    # without torch's and transformers' own types, which take a minute to read
    (tmp_path / "mypy.ini").write_text("[mypy]\n[mypy-torch.*,transformers.*]\nfollow_imports = skip\n")
    words = ["--strict", "--python-executable", installed / "python", "--cache-dir", tmp_path / "cache"]
    checked = subprocess.run(
        [sys.executable, "-m", "mypy", *words, "program.py", "wrong.py"], cwd=tmp_path, capture_output=True, text=True
    )
    lines = [line for line in checked.stdout.splitlines() if ": error:" in line]
    assert len(lines) == len(WRONG) and all(line.startswith("wrong.py:") for line in lines), checked.stdout
    assert [re.search(r"\[([\w-]+)\]$", line)[1] for line in lines] == list(WRONG.values())
