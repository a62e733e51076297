"""Confirmed miscompiles, each as a program: on which torch it shows, and where it is told upstream."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from checked_backend.fuzz.examine import check_program
from checked_backend.fuzz.program import FuzzProgram, decode_program
from checked_backend.sweep.status import Status

__all__ = ["FILE", "Entry", "here", "order", "read", "write"]

FILE = Path(__file__).with_name("miscompiles.json")


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
        """Check it with this torch."""
        return self.look()[0] is True

    def look(self) -> tuple[bool | None, str]:
        """Whether it shows with this torch, None if nothing can be said, and what the check says."""
        found = check_program(self.decoded(), self.compiler)
        shows = True if found.kind == self.kind else False if found.status is Status.PASS else None
        return shows, found.message


def here() -> str:
    """This torch: ``2.13``."""
    return ".".join(torch.__version__.split(".")[:2])


def order(version: str) -> tuple[int, ...]:
    """By which versions are sorted."""
    return tuple(map(int, version.split(".")))


def read() -> list[Entry]:
    return [Entry(**raw) for raw in json.loads(FILE.read_text(encoding="utf-8"))]


def write(entries: list[Entry]) -> None:
    FILE.write_text(json.dumps([asdict(entry) for entry in entries], indent=1) + "\n", encoding="utf-8")
