"""Options that several verbs have."""

from __future__ import annotations

import os
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any

import typer

from checked_backend.errors import CheckedBackendError
from checked_backend.process.memory import whole_memory

Words = list[str] | None
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]
Html = Annotated[Path | None, typer.Option(metavar="FILE", help="Write one HTML page.")]
Junit = Annotated[Path | None, typer.Option(metavar="FILE", help="Write JUnit XML.")]
Certificate = Annotated[bool, typer.Option("--certificate", help="Print what was checked, as Markdown.")]
Verbose = Annotated[bool, typer.Option("--verbose", "-v", help="Tell all that is known.")]
Compiler = Annotated[
    str, typer.Option(metavar="C", help="A backend of torch.compile, or FILE.py:NAME, which is run: trust it.")
]
CompilerOptions = Annotated[
    Words, typer.Option("--compiler-option", metavar="KEY=VALUE", help="Handed to the compiler; may be repeated.")
]
Memory = Annotated[
    float | None, typer.Option(metavar="GIB", help="What a process may hold; default its share of four fifths of all.")
]

_MOST_GIB = 1e6


def compiler_options(words: Words) -> dict[str, Any]:
    """The values of ``--compiler-option``."""
    if not words:
        return {}
    target = import_module("checked_backend.checking.target")  # needs torch
    return dict(target.parse_value(word, "--compiler-option") for word in words)


def parse_sizes(text: str) -> list[int]:
    """The numbers of ``--sizes 1,64,65``."""
    words = text.split(",")
    if not all(word.strip().isdecimal() for word in words):
        raise CheckedBackendError(f"--sizes got {text!r}; expected natural numbers, for example 1,63,64,65")
    return [int(word) for word in words]


def memory_in_bytes(gib: float | None, jobs: int = 1) -> int | None:
    """The bytes that each of several jobs at a time may hold, of ``--memory`` or of four fifths of all."""
    if gib is not None:
        if not 0 < gib < _MOST_GIB:
            raise CheckedBackendError(f"--memory got {gib}; expected GiB, for example 8")
        return int(gib * 2**30)
    there = whole_memory()
    return None if there is None else there * 4 // 5 // jobs


def cores(jobs: int) -> int:
    """The cores that each of several jobs at a time may use; at least one."""
    try:
        there = len(os.sched_getaffinity(0))
    except AttributeError:  # only Linux says which this process may use
        there = os.cpu_count() or 1
    return max(1, there // jobs)
