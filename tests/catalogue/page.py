"""The catalogue as one self-contained HTML page without scripts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from jinja2 import ChoiceLoader, Environment, FileSystemLoader, PackageLoader, StrictUndefined

from checked_backend.fuzz.text import describe, render_check, render_script
from tests.catalogue.entries import Entry, order


@dataclass(frozen=True)
class _Part:
    """An entry's row and section.

    Attributes:
        entry: The entry.
        status: Where it shows, in words.
        code: Its inputs, as comments, and its program.
        script: A script that needs torch alone.
        check: A script that checks it.
    """

    entry: Entry
    status: str
    code: str
    script: str
    check: str

    def word(self, version: str) -> str:
        return {True: "shows", False: "right", None: "not tried"}[self.entry.shows.get(version)]

    def colour(self, version: str) -> str:
        return {True: "fail", False: "pass", None: "quiet"}[self.entry.shows.get(version)]


def render_page(entries: Sequence[Entry]) -> str:
    """A table of all entries, then each with its program and scripts. Nothing is loaded, and every text is escaped."""
    environment = Environment(
        loader=ChoiceLoader([FileSystemLoader(Path(__file__).parent), PackageLoader("checked_backend.report")]),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    versions = sorted({version for entry in entries for version in entry.shows}, key=order)
    return environment.get_template("page.html.j2").render(
        heading=f"{len(entries)} confirmed miscompiles of torch.compile",
        versions=versions,
        parts=[_part(entry) for entry in entries],
    )


def _part(entry: Entry) -> _Part:
    program = entry.decoded()
    return _Part(
        entry,
        status(entry),
        describe(program),
        render_script(program, entry.compiler, [entry.name]),
        render_check(program, entry.compiler, {}, [entry.name]),
    )


def status(entry: Entry) -> str:
    """``Shows on torch 2.11 and 2.13; fixed in 2.15``."""
    tried = sorted(entry.shows, key=order)
    shows = [version for version in tried if entry.shows[version]]
    if not shows:
        return f"Shows on no torch that was tried ({', '.join(tried)})"
    words = f"Shows on torch {' and '.join(shows) if len(shows) < 3 else ', '.join(shows)}"
    fixed = [version for version in tried if order(version) > order(shows[-1])]
    since = [version for version in tried if order(version) < order(shows[0])]
    words += f"; not yet on {since[-1]}" if since else ""
    return words + (f"; fixed in {fixed[0]}" if fixed else "")
