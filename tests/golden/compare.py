"""Compare the golden outputs with what the package makes now, or keep what it makes now."""

from __future__ import annotations

import difflib
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path

from tests.golden.produce import Files

EXPECTED = Path(__file__).with_name("expected")
_LINES = 16
"""How much of a difference is shown."""


def read(folder: Path) -> Files:
    """The files of a folder by their names, with their line ends as they are."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return {path.relative_to(folder).as_posix(): path.read_bytes().decode("utf-8") for path in files}


def differences(stored: Files, made: Files, parts: Collection[str]) -> Mapping[str, tuple[str | None, str | None]]:
    """The files of some parts that are not the same: what is stored, and what is made; None for none."""
    names = sorted(made.keys() | {name for name in stored if name.partition("/")[0] in parts})
    pairs = {name: (stored.get(name), made.get(name)) for name in names}
    return {name: pair for name, pair in pairs.items() if pair[0] != pair[1]}


def shown(name: str, old: str | None, new: str | None) -> Iterator[str]:
    """A line about a file, and the beginning of what is different."""
    yield f"{name}: " + ("new" if old is None else "is not made any more" if new is None else "differs")
    if old is not None and new is not None:
        lines = list(difflib.unified_diff(old.split("\n"), new.split("\n"), "stored", "made", n=1, lineterm=""))
        yield from (f"    {line[:200]}".replace("\x1b", "\\x1b") for line in lines[2 : 2 + _LINES])
        if len(lines) > 2 + _LINES:
            yield f"    ... and {len(lines) - 2 - _LINES} more lines"


def accept(folder: Path, different: Mapping[str, tuple[str | None, str | None]]) -> None:
    """Write the files that are different, and only those."""
    for name, (_, new) in different.items():
        path = folder / name
        if new is None:
            path.unlink()
        else:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(new.encode("utf-8"))
