"""Draw the README's picture: the page of the quickstart's wrong compiler. ``python -m tests.report.draw_readme``."""

from __future__ import annotations

import os
import runpy
import subprocess
import tempfile
from pathlib import Path

import torch

import checked_backend as cb
from tests.support.browser import BROWSER

ROOT = Path(__file__).parents[2]
PICTURE = ROOT / "examples" / "report.png"
WIDTH, HEIGHT = 900, 1180


def main() -> None:
    """Run the quickstart's second program with its wrong compiler, and take a picture of the top of the page."""
    example = runpy.run_path(str(ROOT / "examples" / "quickstart.py"))
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        torch.manual_seed(0)
        try:
            example["train_checked"](example["ConvNet"], torch.randn(8, 3, 16, 16), compiler=example["wrong_compiler"])
        except cb.DivergenceError as error:
            Path("report.html").write_text(error.report.to_html(), encoding="utf-8")
        flags = ("--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars")
        light = ("--blink-settings=preferredColorScheme=1", f"--window-size={WIDTH},{HEIGHT}")
        page = Path("report.html").absolute().as_uri()
        words = [str(BROWSER), *flags, *light, "--user-data-dir=profile", f"--screenshot={PICTURE}", page]
        subprocess.run(words, check=True, timeout=120)
        os.chdir(ROOT)


if __name__ == "__main__":
    main()
