"""Check every miscompile of the catalogue with this torch: ``python -m tests.catalogue [--write]``.

It says what shows, what was fixed and what came back; the exit code is 1 if something came back, and 2 if of something
nothing can be said. ``--write`` notes it, in the data and in the page (``miscompiles.html``).
"""

from __future__ import annotations

import sys
from dataclasses import replace

from checked_backend.report.clean import clean
from tests.catalogue.entries import Entry, here, look, order, read, write
from tests.catalogue.page import PAGE, render_page


def main(words: list[str]) -> int:
    entries = read()
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
    if "--write" in words:
        write([*updated.values()])
        PAGE.write_text(render_page([*updated.values()]), encoding="utf-8")
    return 1 if back else 2 if unclear else 0


def _tell(version: str, word: str, entry: Entry, why: str = "") -> None:
    print(f"torch {version}  {word:<10} {entry.compiler:<10} {entry.kind:<10} {entry.name}{why}", flush=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
