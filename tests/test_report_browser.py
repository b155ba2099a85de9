"""A report in a real browser: every figure is visible, at desktop and phone width, light and dark."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from fledge.report import page
from fledge.report.read import read, sections_of
from support.reports import record, sweep, write_records, write_run

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium on this machine")
IDS = (
    "loss", "tau", "acceptance", "schedule", "step-parts", "speed", "vocabulary", "alpha", "tau-decoded",
    "speedup", "round", "sample-1",
)  # fmt: skip
FLAGS = ["--no-sandbox", "--disable-gpu", "--disable-background-networking"]


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    api = pytest.importorskip("playwright.sync_api")
    with api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        yield browser
        browser.close()


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("report")
    runs = [write_run(path / f"a-run-with-a-rather-long-name-{i}") for i in range(2)]
    long = {"a/draft/with/a/very/long/path/and-an-even-longer-name-without-any-space " + "x" * 80: record()}
    files = [write_records(path / "sweep.json", sweep()), write_records(path / "long.json", long)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(page, "write_page", page.write_page.__wrapped__)  # see conftest.py
        page.write_page(path / "report.html", lambda: sections_of(read([*runs, *files])))
    return path / "report.html"


@pytest.mark.parametrize("width", [1280, 390])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_every_figure_is_visible(browser: Any, report: Path, width: int, scheme: str) -> None:
    context = browser.new_context(viewport={"width": width, "height": 850}, color_scheme=scheme)
    page, errors, requests = context.new_page(), [], []
    page.on("console", lambda message: errors.append(message.text) if message.type == "error" else None)
    page.on("pageerror", lambda error: errors.append(str(error)))
    page.on("request", lambda request: requests.append(request.url))
    page.goto(report.as_uri())
    for name in IDS:
        box = page.locator(f"#{name}").bounding_box()
        assert box and box["width"] > 200 and box["height"] > 100, name
        assert box["x"] >= 0 and box["x"] + box["width"] <= width, name
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    paper = page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert (int(paper.split("(")[1].split(",")[0]) < 60) == (scheme == "dark")
    assert errors == [] and requests == [report.as_uri()]
    context.close()


def test_the_drawings_have_colours_of_the_theme(browser: Any, report: Path) -> None:
    """The placeholders of matplotlib are all replaced, and each variable is defined."""
    page = browser.new_page()
    page.goto(report.as_uri())
    undefined = page.evaluate(
        """() => [...new Set(document.documentElement.outerHTML.match(/var\\((--[a-z0-9]+)\\)/g))]
        .map(v => v.slice(4, -1)).filter(v => !getComputedStyle(document.documentElement).getPropertyValue(v))"""
    )
    assert undefined == []
    assert page.evaluate("!/#0[1-5]0[0-9][0-9]{2}/.test(document.body.innerHTML)")
    page.close()


def test_the_button_changes_the_colours_and_they_are_kept(browser: Any, report: Path) -> None:
    context = browser.new_context(color_scheme="light")
    page = context.new_page()
    page.goto(report.as_uri())
    paper = "getComputedStyle(document.body).backgroundColor"
    light = page.evaluate(paper)
    page.click("#theme")
    assert page.evaluate(paper) != light
    page.reload()
    assert page.evaluate(paper) != light
    page.click("#theme")
    assert page.evaluate(paper) == light
    context.close()


def test_without_scripts_the_colours_follow_the_system(browser: Any, report: Path) -> None:
    papers = []
    for scheme in ("light", "dark"):
        context = browser.new_context(color_scheme=scheme, java_script_enabled=False)
        page = context.new_page()
        page.goto(report.as_uri())
        papers.append(page.screenshot(clip={"x": 0, "y": 0, "width": 4, "height": 4}))
        context.close()
    assert papers[0] != papers[1]
