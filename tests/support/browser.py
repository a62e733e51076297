"""Pages in headless Chromium: how wide they are, what is cut, and a picture of each."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

BROWSER = next((found for name in ("chromium", "google-chrome") if (found := shutil.which(name))), None)
"""The browser; None where there is none."""

_HEIGHT = 3000

# headless windows are at least 500 wide: a page that holds the other one, and measures it
_FRAME = """<body style="margin:0"><iframe src="{page}" style="width:{width}px;height:{height}px;border:0"></iframe>
<script>
onload = () => {{ const d = frames[0].document, e = d.documentElement;
const cut = [...d.querySelectorAll("svg text")].filter(t => {{ const b = t.getBBox(),
 v = t.ownerSVGElement.viewBox.baseVal; return b.x < v.x - 1 || b.x + b.width > v.x + v.width + 1; }});
const seen = [...d.querySelectorAll("svg")].filter(s => s.getBoundingClientRect().width > 0).length;
d.body.parentElement.title = "W" + [e.scrollWidth, e.clientWidth, seen, cut.map(t => t.textContent)].join(" ") + "W";
document.documentElement.title = d.documentElement.title; }}
</script>"""


def check_page(text: str, name: str, width: int, folder: Path, *, dark: bool = False) -> int:
    """Open a page in a window of some width: nothing of it may be cut, and it may not scroll sideways.

    A picture of it is kept, in the folder that ``TEST_ARTIFACTS`` names, else in the test's folder. Returns how many
    pictures the page shows at that width.
    """
    page, frame = folder / f"{name}.html", folder / f"frame-{name}-{width}.html"
    page.write_text(text, encoding="utf-8")
    frame.write_text(_FRAME.format(page=page.name, width=width, height=_HEIGHT), encoding="utf-8")
    kept = Path(os.environ.get("TEST_ARTIFACTS", folder))
    kept.mkdir(parents=True, exist_ok=True)
    picture = kept / f"{name}-{width}{'-dark' if dark else ''}.png"
    said = _run(
        folder,
        f"--blink-settings=preferredColorScheme={0 if dark else 1}",
        f"--window-size={max(width, 500)},{_HEIGHT}",
        "--hide-scrollbars",
        "--virtual-time-budget=3000",
        "--dump-dom",
        f"--screenshot={picture}",
        frame.as_uri(),
    )
    found = re.search(r"W(\d+) (\d+) (\d+) (.*?)W", said, re.DOTALL)
    assert found is not None, said
    assert int(found[1]) <= int(found[2]), "it scrolls sideways"
    assert not found[4], f"a text reaches beyond its picture: {found[4]}"
    assert picture.stat().st_size > 10_000
    return int(found[3])


def _run(folder: Path, *words: str) -> str:
    command = [str(BROWSER), "--headless", "--no-sandbox", "--disable-gpu", "--allow-file-access-from-files"]
    done = subprocess.run(
        [*command, f"--user-data-dir={folder / 'profile'}", *words],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    return done.stdout
