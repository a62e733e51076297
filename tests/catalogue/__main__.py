"""Check every miscompile of the catalogue with this torch: ``python -m tests.catalogue [--write]``.

It says what shows, what was fixed and what came back; the exit code is 1 if something came back, and 2 if of something
nothing can be said. ``--write`` notes it, in the data and in the page (``miscompiles.html``).
"""

from __future__ import annotations

import sys
import warnings
from dataclasses import replace

from tests.catalogue.entries import here, order, read, write
from tests.catalogue.page import PAGE, render_page


def main(words: list[str]) -> int:
    warnings.simplefilter("ignore")
    version, updated, back, unclear = here(), [], 0, 0
    for entry in read():
        shows, message = entry.look()
        if shows is None:
            unclear += 1
            print(
                f"torch {version}  NO VERDICT {entry.compiler:<10} {entry.kind:<10} {entry.name}: {message}", flush=True
            )
            updated.append(entry)
            continue
        earlier = max((key for key in entry.shows if order(key) < order(version)), key=order, default=None)
        was = entry.shows.get(version, entry.shows[earlier] if earlier is not None else None)
        word = {(True, False): "CAME BACK", (False, True): "fixed"}.get((shows, was), "shows" if shows else "is right")
        back += word == "CAME BACK"
        print(f"torch {version}  {word:<10} {entry.compiler:<10} {entry.kind:<10} {entry.name}", flush=True)
        updated.append(replace(entry, shows=dict(sorted({**entry.shows, version: shows}.items()))))
    if "--write" in words:
        write(updated)
        PAGE.write_text(render_page(updated), encoding="utf-8")
    return 1 if back else 2 if unclear else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
