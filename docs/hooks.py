"""What mkdocs builds besides the pages in this folder.

`options.md` is generated from the commands themselves. CONTRIBUTING.md, tests/README.md and other pages of the
repository become pages of the site, and the files outside of docs/ to which pages link, such as the records under
bench/results, are copied into it: a link works on the site as it does in the repository.
"""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files
from options_page import options_page

ROOT = Path(__file__).parent.parent

# pages of the repository, and the names under which the site has them
PAGES = {
    "CONTRIBUTING.md": "contributing.md",
    "tests/README.md": "tests.md",
    "CHANGELOG.md": "changelog.md",
    "SECURITY.md": "security.md",
}
LINK = re.compile(r"(\]\()([^)#\s]+)((?:#[^)\s]*)?\))")


def on_files(files: Files, config: Any) -> Files:
    """Adds the generated pages, the pages of the repository, and the files that pages link to."""
    sys.path.insert(0, str(ROOT))  # the checkout's fledge, whether or not another one is installed
    files.append(File.generated(config, "options.md", content=options_page()))
    for source, name in PAGES.items():
        if (ROOT / source).is_file():
            files.append(File.generated(config, name, content=(ROOT / source).read_text(encoding="utf-8")))
    for page in [f for f in files if f.is_documentation_page()]:
        for path in sorted(_repository_files(page)):
            if files.get_file_from_path(f"repository/{path}") is None:
                files.append(File.generated(config, f"repository/{path}", abs_src_path=str(ROOT / path)))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """Turns links to files of the repository into links to where the site has them."""

    def moved(link: re.Match) -> str:
        path = _in_repository(page.file, link[2])
        if path is None:
            return link[0]
        name = PAGES.get(path, path.removeprefix("docs/") if path.startswith("docs/") else f"repository/{path}")
        return link[1] + os.path.relpath(name, Path(page.file.src_uri).parent) + link[3]

    return LINK.sub(moved, markdown)


def _repository_files(page: File) -> set[str]:
    paths = {_in_repository(page, link[2]) for link in LINK.finditer(page.content_string)}
    return {path for path in paths if path and path not in PAGES and not path.startswith("docs/")}


def _in_repository(page: File, url: str) -> str | None:
    """The path of a linked file that lies outside of docs/, or is linked from there; None for all other links."""
    source = next((s for s, name in PAGES.items() if name == page.src_uri), f"docs/{page.src_uri}")
    path = os.path.normpath(Path(source).parent / url)
    outside = not (source.startswith("docs/") and path.startswith("docs/"))
    return path if "://" not in url and outside and (ROOT / path).is_file() else None
