"""The documentation: every command in it parses, every Python block compiles, links lead somewhere,
messages exist, pictures and navigation are up to date. `test_documented_commands.py` runs the commands."""

from __future__ import annotations

import ast
import contextlib
import importlib
import importlib.util
import io
import os
import pkgutil
import re
import subprocess
import sys
import warnings
from functools import cache
from pathlib import Path
from xml.etree import ElementTree

import pytest

from support.pages import BLOCKS, DOCS, FENCE, PAGES, ROOT, SHELL, Block, commands_of

GENERATED = {"options.md"}  # by docs/hooks.py, when the site is built


def named(blocks: list[Block]) -> list:
    return [pytest.param(b, id=f"{b.page}:{b.line}") for b in blocks]


PYTHON = [b for b in BLOCKS if b.language == "python"]


class Reached(Exception):
    """The command line has accepted its arguments and has started the job."""


@pytest.fixture
def parse(monkeypatch, tmp_path):
    """Runs the command line up to the start of the job: all its flags, values and their contradictions are checked."""
    import fledge.commands
    from fledge import cli

    def reached(*arguments, **options):
        raise Reached

    monkeypatch.setattr("torch.cuda.device_count", lambda: 8)  # for commands with --gpus
    monkeypatch.setenv("HOME", str(tmp_path))  # where --install-completion writes
    monkeypatch.setattr("shellingham.detect_shell", lambda: ("bash", "/bin/bash"))  # it writes for this one
    monkeypatch.setattr("fledge.train.setup.dry_run.dry_run", reached)
    monkeypatch.setattr("fledge.train.setup.launch.start_processes", reached)
    for module in pkgutil.walk_packages(fledge.commands.__path__, "fledge.commands."):
        job = importlib.import_module(module.name)
        if callable(getattr(job, "run", None)):
            monkeypatch.setattr(job, "run", reached)

    def parse(arguments: list[str]) -> None:
        error = io.StringIO()
        with contextlib.redirect_stderr(error), warnings.catch_warnings():
            warnings.simplefilter("error", FutureWarning)  # a former name of an option
            try:
                cli.app(arguments, standalone_mode=True)
            except Reached:
                return
            except SystemExit as e:
                assert e.code == 0, error.getvalue()

    return parse


@pytest.mark.parametrize("block", named(SHELL))
def test_every_command_is_accepted_by_the_command_line(block, parse):
    for command in commands_of(block):
        parse(command)


def test_a_command_with_a_wrong_flag_or_value_is_not(parse):
    for wrong in ("train --target t --data d --dept 3", "eval --depth never", "generate --target t --top-p 0.5", "fly"):
        with pytest.raises((AssertionError, ValueError)):
            parse(wrong.split())


@pytest.mark.parametrize("block", named(PYTHON))
def test_every_python_block_compiles(block):
    compile(block.text, f"{block.page}:{block.line}", "exec")


LINK = re.compile(r"(?<!\!)\[[^\]]*\]\(([^)\s]+)\)|!\[[^\]]*\]\(([^)\s]+)\)")


@cache
def anchors_of(page: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub and the site make them."""
    prose = FENCE.sub("", page.read_text(encoding="utf-8"))
    titles = re.findall(r"^#+ (.*)$", prose, re.M)
    return {re.sub(r"[^\w\- ]", "", t.replace("`", "").lower()).strip().replace(" ", "-") for t in titles}


@pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(ROOT)))
def test_every_link_leads_somewhere(page):
    prose = re.sub(r"<!--.*?-->", "", FENCE.sub("", page.read_text(encoding="utf-8")), flags=re.S)
    for match in LINK.finditer(prose):
        url = match[1] or match[2]
        if "://" in url or url in GENERATED or url.split("#")[0] in GENERATED:
            continue
        path, _, anchor = url.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), f"{page.name} links to {url}, which does not exist"
        assert target.is_file() or page.name == "README.md", f"{page.name} links to {url}: the site has no folders"
        if anchor:
            assert anchor in anchors_of(target), (
                f"{page.name} links to {url}; its anchors are {sorted(anchors_of(target))}"
            )


def test_every_page_is_in_the_navigation_once():
    config = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    listed = re.findall(r"^\s+- .*: (\S+\.md)$", config, re.M)
    outside = {"contributing.md", "tests.md", "changelog.md", "security.md"}  # of the repository; see docs/hooks.py
    assert len(listed) == len(set(listed))
    assert set(listed) - outside - GENERATED == {p.name for p in DOCS.glob("*.md")}


@cache
def literals() -> list[str]:
    """All string constants of the package; those of an f-string as its constant parts."""
    found = []
    for file in (ROOT / "fledge").rglob("*.py"):
        nodes = ast.walk(ast.parse(file.read_text(encoding="utf-8")))
        found += [n.value for n in nodes if isinstance(n, ast.Constant) and isinstance(n.value, str)]
    return found


def test_quoted_messages_exist_in_the_source():
    quoted = re.findall(r"^> (.*)$", (DOCS / "errors.md").read_text(encoding="utf-8"), re.M)
    parts = [part.strip(" .;:()") for message in quoted for part in message.split("…")]
    parts = [part for part in parts if len(part) > 8]
    missing = [part for part in parts if not any(part in text for text in literals())]
    assert len(quoted) > 30 and not missing


def test_figures_are_linked_to_records():
    """Every table of benchmarks.md has a record near it."""
    sections = re.split(r"^## ", (DOCS / "benchmarks.md").read_text(encoding="utf-8"), flags=re.M)[1:]
    assert all("](../bench/results/" in s or "](family.md)" in s for s in sections if "\n|" in s)


@pytest.mark.skipif(not importlib.util.find_spec("matplotlib"), reason="needs matplotlib (pip install '.[docs]')")
def test_pictures_are_up_to_date(tmp_path):
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    subprocess.run([sys.executable, DOCS / "pictures/draw.py", tmp_path], check=True, env=env)
    drawn = sorted(p.name for p in tmp_path.iterdir())
    assert len(drawn) == 5
    for name in drawn:
        committed, now = (DOCS / "pictures" / name).read_text(), (tmp_path / name).read_text()
        if version(committed) == version(now):
            assert committed == now, f"{name} is out of date: python docs/pictures/draw.py"
        else:  # another matplotlib may write the same picture otherwise
            assert structure(committed) == structure(now), f"{name} is out of date: python docs/pictures/draw.py"


def version(svg: str) -> str:
    return re.search(r"Matplotlib v([\d.]+)", svg)[1]


def structure(svg: str) -> tuple:
    """The texts of a picture, and the number of its shapes of each colour."""
    elements = list(ElementTree.fromstring(svg).iter())
    texts = [e.text.strip() for e in elements if e.tag.endswith("text") and e.text]
    fills = sorted(m for e in elements for m in re.findall(r"fill: (#\w+)", e.get("style", "")))
    return texts, fills


@pytest.mark.skipif(not importlib.util.find_spec("material"), reason="needs mkdocs-material (pip install '.[docs]')")
def test_the_site_builds_and_needs_no_network(tmp_path):
    # without --quiet, which would hide the warnings that --strict counts
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", tmp_path / "site"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    options = (tmp_path / "site/options.html").read_text(encoding="utf-8")
    assert "--draft-vocab" in options and 'id="fledge-train"' in options
    for page in (tmp_path / "site").glob("*.html"):
        text = page.read_text(encoding="utf-8")
        assert not re.findall(r'<(?:script|link|img)[^>]+(?:src|href)="(?:https?:)?//[^"]+"', text), page.name


def test_the_recipes_of_examples_exist():
    """A --config names a recipe that comes with fledge, one that a run writes, or one of the reader's own."""
    known = {file.stem for file in (ROOT / "fledge" / "recipes").glob("*.yaml")}
    pages = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *DOCS.glob("*.md")]
    named = {name for page in pages for name in re.findall(r"--config ([\w./-]+)", page.read_text(encoding="utf-8"))}
    assert named & known, "there are examples"
    others = {name for name in named - known if not re.fullmatch(r"(my-)?run/recipe\.yaml|[\w-]+\.yaml", name)}
    assert others <= {"NAME", "file"}, others
