"""Check every miscompile of the catalogue with this torch: ``python -m tests.catalogue [--write]``.

It says what shows, what was fixed and what came back; the exit code is 1 if something came back. ``--write`` notes it.
"""

from __future__ import annotations

import sys
import warnings
from dataclasses import replace

from tests.catalogue.entries import here, read, write


def main(words: list[str]) -> int:
    warnings.simplefilter("ignore")
    version, updated, back = here(), [], 0
    for entry in read():
        shows = entry.shows_now()
        earlier = max((key for key in entry.shows if _order(key) < _order(version)), key=_order, default=None)
        was = entry.shows.get(version, entry.shows[earlier] if earlier is not None else None)
        word = {(True, False): "CAME BACK", (False, True): "fixed"}.get((shows, was), "shows" if shows else "is right")
        back += word == "CAME BACK"
        print(f"torch {version}  {word:<10} {entry.compiler:<10} {entry.kind:<10} {entry.name}", flush=True)
        updated.append(replace(entry, shows=dict(sorted({**entry.shows, version: shows}.items()))))
    if "--write" in words:
        write(updated)
    return 1 if back else 0


def _order(version: str) -> tuple[int, ...]:
    return tuple(map(int, version.split(".")))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
