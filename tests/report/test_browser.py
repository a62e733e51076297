"""Pages in a browser: nothing scrolls sideways, no text is cut, and a picture of each is kept.

The pictures go to the test's folder, or to the one that ``TEST_ARTIFACTS`` names.
"""

from __future__ import annotations

import math
import os
import re
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from checked_backend.findings import (
    Coverage,
    Distribution,
    Finding,
    Kind,
    Metrics,
    NodeError,
    NoiseScale,
    RegionInfo,
    Severity,
    WorstElement,
)
from checked_backend.report import Report

_BROWSER = next((found for name in ("chromium", "google-chrome") if (found := shutil.which(name))), None)

pytestmark = [pytest.mark.slow, pytest.mark.skipif(_BROWSER is None, reason="no Chromium here")]

METRICS = Metrics(4096, 4000, 0.25, 0.25, 12_345, 0.01, 1.0, 3.0, 0, 0, 0, 0, 0, (3, 17), 1.0, 1.25, "float32")
BLOCKS = tuple(tuple(1e-3 * (1 + math.sin(x * y)) for x in range(48)) for y in range(32))
SPREAD = Distribution(
    (64, 64),
    (64, 64),
    BLOCKS,
    tuple(round(1000 * math.exp(-(((place - 12) / 5) ** 2))) for place in range(28)),
    tuple(WorstElement((place, 17), 1.0 + place, 1.25 + place, 1.0000001 + place) for place in range(8)),
)
FLOW = tuple(
    NodeError(
        f"mul_{place}" if place != 20 else "a_name_that_is_far_too_long_for_its_row_of_the_picture",
        "aten.mul.Tensor",
        tuple(f"mul_{before}" for before in (place - 1, place - 6) if before >= 0),
        0.0 if place < 24 else 0.02 / (place - 22),
        0.0 if place != 24 else 0.01,
        1e-7 * (1 + place % 5),
    )
    for place in range(60)
)
WRONG = Finding(
    Kind.LOGIC,
    "grad[bert.encoder.layer.3.attention.self.query.weight]",
    "wrong also when compiled in float64, so this is no rounding error",
    region="BertForSequenceClassification [0/0]",
    metrics=METRICS,
    noise=NoiseScale(1e-7, 5e-7, "Monte Carlo arithmetic on eager, 4 runs"),
    stage="compiled",
    graph="backward",
    node="mul_24",
    op="aten.mul.Tensor",
    source="modeling_bert.py:362 in forward: attention_scores = attention_scores / math.sqrt(self.head_size)",
    workaround="import torch\n\n" + "options = {" + "'long': 1, " * 30 + "}",
    repro="checked_backend_reports/" + "repro_long_" * 20 + ".py",
    distribution=SPREAD,
    flow=FLOW,
)
CHECKED = Coverage(
    (RegionInfo("BertForSequenceClassification [0/0]", ("modeling_bert.py:362 in forward",), 300, 4, 4, 4, 4),),
    {"outputs": 4, "gradients": 80},
    detection_limit={f"grad[layers.{number}.weight]": 10.0**-number for number in range(1, 9)},
)
NAN = replace(METRICS, nonfinite_mismatched=7, nan_candidate=7, candidate_value=math.nan)
PAGES = {
    "gradient": Report((WRONG,), CHECKED, "a wrong gradient"),
    "nan": Report(
        (
            replace(
                WRONG,
                kind=Kind.NONFINITE,
                metrics=NAN,
                distribution=replace(SPREAD, blocks=((math.inf, 0.0), (0.0, 1.0)), ulps=()),
                flow=tuple(replace(node, error=math.inf if node.error else 0.0) for node in FLOW),
            ),
        ),
        CHECKED,
        "a NaN",
    ),
    "stride": Report(
        (
            Finding(
                Kind.STRUCTURE,
                "output[0]",
                "stride differs from eager's",
                "structure.stride",
                expected="(8, 1)",
                actual="(1, 4)",
                severity=Severity.WARNING,
            ),
        ),
        CHECKED,
        "strides",
    ),
    "clean": Report((), replace(CHECKED, own_precision_limit={"grad[layers.1.weight]": 0.02}), "bfloat16"),
    "fifty": Report(
        tuple(replace(WRONG, subject=f"output[{place}]", op=f"aten.op_{place}.default") for place in range(50)),
        CHECKED,
        "t" * 300,
    ),
}


def browser(profile: Path, *words: str) -> str:
    command = [str(_BROWSER), "--headless", "--no-sandbox", "--disable-gpu", "--allow-file-access-from-files"]
    done = subprocess.run(
        [*command, f"--user-data-dir={profile}", *words], capture_output=True, text=True, timeout=120, check=True
    )
    return done.stdout


@pytest.mark.parametrize("width", [390, 1280])
@pytest.mark.parametrize("name", PAGES)
def test_a_page_is_as_wide_as_its_window(name: str, width: int, tmp_path: Path) -> None:
    page = tmp_path / f"{name}.html"
    page.write_text(PAGES[name].to_html(), encoding="utf-8")
    # a page that measures the other one: headless windows are at least 500 wide
    frame = tmp_path / "frame.html"
    frame.write_text(
        f'<iframe src="{page.name}" style="width:{width}px;height:3000px;border:0"></iframe><script>'
        "onload = () => { const d = frames[0].document, e = d.documentElement;"
        ' const cut = [...d.querySelectorAll("svg text")].filter(t => { const b = t.getBBox(),'
        " v = t.ownerSVGElement.viewBox.baseVal; return b.x < v.x - 1 || b.x + b.width > v.x + v.width + 1; });"
        ' document.body.append("W" + e.scrollWidth + " " + e.clientWidth + " " + cut.map(t => t.textContent) + "W"); }'
        "</script>",
        encoding="utf-8",
    )
    said = browser(tmp_path / "profile", "--virtual-time-budget=3000", "--dump-dom", frame.as_uri())
    found = re.search(r"W(\d+) (\d+) (.*?)W", said, re.DOTALL)
    assert found is not None, said
    assert int(found[1]) <= int(found[2])
    assert not found[3], "a text reaches beyond its picture"
    kept = Path(os.environ.get("TEST_ARTIFACTS", tmp_path))
    kept.mkdir(parents=True, exist_ok=True)
    picture = kept / f"{name}-{width}.png"
    size = f"--window-size={max(width, 500)},3000"
    browser(tmp_path / "profile", size, "--hide-scrollbars", f"--screenshot={picture}", frame.as_uri())
    assert picture.stat().st_size > 10_000
