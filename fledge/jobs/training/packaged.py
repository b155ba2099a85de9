"""The recipes that come with fledge, which `--config` finds by name."""

from __future__ import annotations

import difflib
from pathlib import Path

RECIPES = Path(__file__).parents[2] / "recipes"


def recipe_names() -> list[str]:
    """The names of the recipes."""
    return sorted(file.stem for file in RECIPES.glob("*.yaml"))


def find_recipe_file(given: str) -> Path:
    """The file that --config names: one that exists, or else the recipe of this name.

    Raises ValueError, listing the names, if the text looks like a name and there is no such recipe. A path that does
    not exist is returned as it is.
    """
    file = Path(given)
    if file.is_file() or len(file.parts) != 1 or file.suffix in (".yaml", ".yml"):
        return file
    names = recipe_names()
    if given in names:  # even if a directory has this name, such as that of a run
        return RECIPES / f"{given}.yaml"
    if file.exists():
        return file
    close = difflib.get_close_matches(given.lower(), names, n=1)
    meant = f"; did you mean {close[0]}?" if close else ""
    raise ValueError(f"--config {given} is neither a file nor one of fledge's recipes, {', '.join(names)}{meant}")
