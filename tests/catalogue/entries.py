"""Confirmed miscompiles, each as a program: on which torch it shows, and where it is told upstream."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import torch

from checked_backend.findings import Kind
from checked_backend.fuzz.examine import check_program
from checked_backend.fuzz.program import FuzzProgram, decode_program
from checked_backend.fuzz.results import ProgramResult
from checked_backend.runs.case import Status

FILE = Path(__file__).with_name("miscompiles.json")
COMPILERS = ("eager", "aot_eager", "inductor")
_VERSION = re.compile(r"\d{1,4}\.\d{1,4}")
_SECONDS = 300.0


@dataclass(frozen=True)
class Entry:
    """A miscompile.

    Attributes:
        name: What is wrong, in a few words.
        op: The operator.
        compiler: The first backend of torch at which it shows: ``eager``, ``aot_eager`` or ``inductor``.
        kind: The kind of finding.
        upstream: A thread about it; empty if none was found.
        shows: Whether it shows, by version of torch.
        program: The program.
    """

    name: str
    op: str
    compiler: str
    kind: str
    upstream: str
    shows: Mapping[str, bool]
    program: Any

    def decoded(self) -> FuzzProgram:
        return decode_program(json.dumps(self.program))

    def shows_now(self) -> bool:
        """Check it with this torch, in this process."""
        return self.meaning(check_program(self.decoded(), self.compiler)) is True

    def meaning(self, found: ProgramResult) -> bool | None:
        """Whether it shows if this came out; None if nothing can be said."""
        return True if found.kind == self.kind else False if found.status is Status.PASS else None


def look(entries: Sequence[Entry]) -> Iterator[tuple[Entry, ProgramResult]]:
    """Check entries with this torch, each in a process of its own: one that ends it ends no other."""
    for entry in entries:
        yield entry, check_program(entry.decoded(), entry.compiler, isolate=_SECONDS)


def here() -> str:
    """This torch: ``2.13``."""
    return ".".join(torch.__version__.split(".")[:2])


def order(version: str) -> tuple[int, ...]:
    """By which versions are sorted."""
    return tuple(map(int, version.split(".")))


def read(path: Path = FILE) -> list[Entry]:
    """The entries of a file; ValueError if one is not what it must be."""
    return [_entry(raw) for raw in json.loads(path.read_text(encoding="utf-8"))]


def _entry(raw: Any) -> Entry:
    names = {field.name for field in fields(Entry)}
    if not isinstance(raw, dict) or set(raw) != names:
        raise ValueError(f"an entry has {', '.join(sorted(names))}; got {raw!r:.80}")
    texts = [raw[name] for name in names - {"shows", "program"}]
    if not all(isinstance(text, str) and text.isprintable() for text in texts):
        raise ValueError(f"an entry has plain texts; got {texts!r:.200}")
    shows = raw["shows"]
    if not isinstance(shows, dict) or not all(
        _VERSION.fullmatch(version) and isinstance(value, bool) for version, value in shows.items()
    ):
        raise ValueError(f"{raw['name']}: shows is by version, as 2.13; got {shows!r:.80}")
    if raw["compiler"] not in COMPILERS or raw["kind"] not in set(Kind):
        raise ValueError(f"{raw['name']}: got {raw['compiler']!r} and {raw['kind']!r}")
    if raw["upstream"] and not raw["upstream"].startswith("https://github.com/"):
        raise ValueError(f"{raw['name']}: upstream got {raw['upstream']!r}")
    decode_program(json.dumps(raw["program"]))
    return Entry(**raw)


def write(entries: list[Entry]) -> None:
    FILE.write_text(json.dumps([asdict(entry) for entry in entries], indent=1) + "\n", encoding="utf-8")
