"""How much of a package stands behind its entry points, by its own import statements (those inside functions too).

    python tools/reach.py [--package fledge] [ENTRY ...]

Prints for each entry the modules and the lines that are not blank which it imports, itself included, the size of the
package, and the circles of imports. TYPE_CHECKING blocks are left out. The default entries are the modules behind
`fledge train` and `fledge generate`, the training loop and the engine.
"""

import argparse
import ast
import pathlib

ENTRIES = (
    "jobs.train",
    "commands.train",
    "jobs.generate",
    "commands.generate",
    "train.trainer",
    "train.loop",
    "decode.engine",
)


def modules(root):
    found = {}
    for path in sorted(root.rglob("*.py")):
        parts = list(path.relative_to(root.parent).with_suffix("").parts)
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def imports(name, path, known):
    package = name if path.name == "__init__.py" else name.rpartition(".")[0]
    wanted, stack = set(), [ast.parse(path.read_text(encoding="utf-8"))]
    while stack:
        node = stack.pop()
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            stack += node.orelse
            continue
        if isinstance(node, ast.Import):
            wanted |= {a.name for a in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                above = package.split(".")[: len(package.split(".")) - node.level + 1]
                base = ".".join([*above, base]).strip(".")
            wanted |= {base, *(f"{base}.{a.name}" for a in node.names)}
        stack += ast.iter_child_nodes(node)
    return {w for w in wanted if w in known and w != name}


def reach(entry, graph):
    seen, stack = set(), [entry]
    while stack:
        name = stack.pop()
        if name not in seen:
            seen.add(name)
            stack += graph[name]
    return seen


def circles(graph):
    """Strongly connected groups of two modules or more (Tarjan, with reachability, as the package is small)."""
    back = {n: {m for m in graph if n in graph[m]} for n in graph}
    left, groups = set(graph), []
    while left:
        n = left.pop()
        group = reach(n, graph) & reach(n, back)
        if len(group) > 1:
            groups.append(sorted(group))
        left -= group
    return groups


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("entries", nargs="*")
    parser.add_argument("--package", default="fledge")
    options = parser.parse_args()
    root = pathlib.Path(options.package)
    known = modules(root)
    lines = {n: sum(bool(x.strip()) for x in p.read_text(encoding="utf-8").split("\n")) for n, p in known.items()}
    graph = {n: imports(n, p, known) for n, p in known.items()}
    print(f"{options.package}: {len(known)} modules, {sum(lines.values())} lines that are not blank")
    for entry in options.entries or [f"{options.package}.{e}" for e in ENTRIES]:
        if entry in graph:
            seen = reach(entry, graph)
            print(f"{entry}: {len(seen)} modules, {sum(lines[n] for n in seen)} lines")
    groups = circles(graph)
    print(f"circles of imports: {len(groups)}, the largest of {max(map(len, groups), default=0)} modules")


if __name__ == "__main__":
    main()
