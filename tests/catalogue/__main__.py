"""Check every miscompile of the catalogue with this torch: ``python -m tests.catalogue [--write | --page FILE]``.

It says what shows, what was fixed and what came back; the exit code is 1 if something came back, and 2 if of something
nothing can be said. ``--write`` notes it in the data. ``--page FILE`` checks nothing, and writes the data as a page.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from checked_backend.report.clean import clean
from tests.catalogue.entries import Entry, here, look, order, read, write
from tests.catalogue.page import render_page


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    task = parser.add_mutually_exclusive_group()
    task.add_argument("--write", action="store_true", help="note what shows in the data")
    task.add_argument("--page", type=Path, metavar="FILE", help="write the data as an HTML page, and check nothing")
    chosen = parser.parse_args(words)
    entries = read()
    if chosen.page:
        chosen.page.write_text(render_page(entries), encoding="utf-8")
        return 0
    version, back, unclear = here(), 0, 0
    updated = {entry.name: entry for entry in entries}
    for entry, found in look(entries):
        shows = entry.meaning(found)
        if shows is None:
            unclear += 1
            _tell(version, "NO VERDICT", entry, f": {clean(found.message)}")
            continue
        earlier = max((key for key in entry.shows if order(key) < order(version)), key=order, default=None)
        was = entry.shows.get(version, entry.shows[earlier] if earlier is not None else None)
        word = {(True, False): "CAME BACK", (False, True): "fixed"}.get((shows, was), "shows" if shows else "is right")
        back += word == "CAME BACK"
        _tell(version, word, entry)
        now = {**entry.shows, version: shows}
        updated[entry.name] = replace(entry, shows={key: now[key] for key in sorted(now, key=order)})
    if chosen.write:
        write([*updated.values()])
    return 1 if back else 2 if unclear else 0


def _tell(version: str, word: str, entry: Entry, why: str = "") -> None:
    print(f"torch {version}  {word:<10} {entry.compiler:<10} {entry.kind:<10} {entry.name}{why}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
