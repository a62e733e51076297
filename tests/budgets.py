"""Lines of each room beside its budget and its goal (``budgets.toml``): ``python -m tests.budgets``.

The exit code is 1 if a room is above its budget, or if a source file of the package is not in exactly one room.
``--set`` writes the numbers of today into the table, for a commit of its own that says why. ``--importers`` lists the
files of the package that only one other file imports: they may be merged with it.
"""

from __future__ import annotations

import argparse
import ast
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib  # pytest needs it there

ROOT = Path(__file__).parents[1]
PACKAGE, TABLE = "checked_backend", "tests/budgets.toml"
SOURCES = (".py", ".pyi", ".pyx", ".c", ".cpp", ".cu", ".h")


@dataclass(frozen=True)
class Row:
    """A room, all of the package, or the tests: the lines that it has, may have and is to have."""

    name: str
    lines: int
    budget: int
    goal: int


def main(words: Sequence[str] | None = None, root: Path = ROOT) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    task = parser.add_mutually_exclusive_group()
    task.add_argument("--set", action="store_true", help="write the numbers of today into the table")
    task.add_argument("--importers", action="store_true", help="list the files that only one other file imports")
    chosen = parser.parse_args(words)
    if chosen.importers:
        print_importers(root)
        return 0
    if chosen.set:
        text = root.joinpath(TABLE).read_text(encoding="utf-8")
        sizes = {row.name: row.lines for row in rows(root)}
        root.joinpath(TABLE).write_text(set_to_today(text, sizes), encoding="utf-8")
    print(f"{'room':<10} {'lines':>8} {'budget':>8} {'over':>8} {'goal':>8} {'to go':>8}")
    for row in rows(root):
        over, to_go = row.lines - row.budget, max(0, row.lines - row.goal)
        print(f"{row.name:<10} {row.lines:>8,} {row.budget:>8,} {over:>+8,} {row.goal:>8,} {to_go:>8,}")
    found = [*problems(root)]
    print(*found, sep="\n", file=sys.stderr, end="\n" if found else "")
    return 1 if found else 0


def read(root: Path) -> dict[str, Any]:
    return tomllib.loads(root.joinpath(TABLE).read_text(encoding="utf-8"))


def sources(folder: Path) -> dict[str, int]:
    """The lines of each source file in a folder, by its path from there."""
    files = sorted(path for path in folder.rglob("*") if path.suffix in SOURCES)
    return {path.relative_to(folder).as_posix(): path.read_bytes().count(b"\n") for path in files}


def rooms_of(file: str, table: Mapping[str, Any]) -> list[str]:
    return [name for name, room in table["rooms"].items() if any(f"{file}/".startswith(f"{p}/") for p in room["paths"])]


def rows(root: Path) -> list[Row]:
    """The rooms, the package, and the tests."""
    table, package = read(root), sources(root / PACKAGE)
    lines = dict.fromkeys(table["rooms"], 0)
    for file, size in package.items():
        for name in rooms_of(file, table):
            lines[name] += size
    lines |= {"package": sum(package.values()), "tests": sum(sources(root / "tests").values())}
    limits = table | table["rooms"]
    return [Row(name, size, limits[name]["lines"], limits[name]["goal"]) for name, size in lines.items()]


def problems(root: Path) -> Iterator[str]:
    """What is wrong, and what to do about it."""
    table = read(root)
    for file in sources(root / PACKAGE):
        rooms = rooms_of(file, table)
        if len(rooms) != 1:
            where = f"is in the rooms {' and '.join(rooms)}" if rooms else "is in no room"
            yield f"{PACKAGE}/{file} {where}. Name it, or its folder, in the `paths` of one room of {TABLE}."
    for name, room in table["rooms"].items():
        for path in room["paths"]:
            if room["lines"] and not root.joinpath(PACKAGE, path).exists():  # a room of the house to come has none
                yield f"{PACKAGE}/{path} of the room {name} is gone. Take it out of the `paths` in {TABLE}."
    for row in rows(root):
        if row.lines > row.budget:
            yield (
                f"{row.name} has {row.lines:,} lines, {row.lines - row.budget:,} above its budget. Make it smaller, "
                f"or raise its number in {TABLE} in a commit of its own that says why."
            )


def set_to_today(text: str, sizes: Mapping[str, int]) -> str:
    """The table with other numbers of lines; its comments and goals stay."""

    def written(match: re.Match[str]) -> str:
        return f"{match[1]}{sizes[match[2]]:_}"

    return re.sub(r"(?ms)(^\[(?:rooms\.)?(\w+)\](?:(?!^\[).)*?^lines = )[\d_]+", written, text)


def print_importers(root: Path) -> None:
    found = single_importers(root / PACKAGE)
    for file, (importer, lines) in found.items():
        print(f"{lines:>6,}  {file}  is imported by  {importer}")
    print(f"{sum(lines for _, lines in found.values()):>6,}  lines in {len(found)} files that only one file imports")


def single_importers(package: Path) -> dict[str, tuple[str, int]]:
    """The files that exactly one other file imports, each with that file and its own lines.

    What an ``__init__.py`` hands on is imported by it, whoever takes it from there.
    """
    sizes = {file: size for file, size in sources(package).items() if file.endswith(".py")}
    modules = {module_name(f"{package.name}/{file}"): file for file in sizes}
    importers: dict[str, set[str]] = {file: set() for file in sizes}
    for module, file in modules.items():
        tree = ast.parse(package.joinpath(file).read_text(encoding="utf-8"))
        for name in imported(tree, module if file.endswith("__init__.py") else module.rpartition(".")[0], modules):
            importers[modules[name]].add(file)
    others = {file: importers[file] - {file} for file in sizes}
    return {file: (min(others[file]), sizes[file]) for file in sizes if len(others[file]) == 1}


def module_name(file: str) -> str:
    return file.removesuffix(".py").removesuffix("/__init__").replace("/", ".")


def imported(tree: ast.Module, package: str, modules: Mapping[str, str]) -> Iterator[str]:
    """The modules that a file of a package imports, in functions too, or names whole in a string, to import them."""
    for node in ast.walk(tree):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            parents = package.split(".")[: -(node.level - 1) or None] if node.level else []
            base = ".".join([*parents, *([node.module] if node.module else [])])
            inner = [f"{base}.{alias.name}" for alias in node.names]
            names = [name if name in modules else base for name in inner]
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            names = [node.value]
        yield from (name for name in names if name in modules)


if __name__ == "__main__":
    sys.exit(main())
