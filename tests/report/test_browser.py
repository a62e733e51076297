"""Pages in a browser: nothing scrolls sideways, no text is cut, and a picture of each is kept.

The pictures go to the test's folder, or to the one that ``TEST_ARTIFACTS`` names.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import checked_backend as cb
from checked_backend.findings import (
    Coverage,
    Distribution,
    Finding,
    Kind,
    Metrics,
    NodeError,
    NoiseScale,
    RegionInfo,
    WorstElement,
)
from checked_backend.report.session import Session
from tests.support import faults, models
from tests.support.browser import BROWSER, check_page
from tests.support.faults import Compiler, with_nan
from tests.support.region_tools import checked


def wrong_gradient(folder: Path) -> cb.Report:
    """A training step of a BERT with four layers, the backward pass of whose GELU is 10 % off."""
    case = models.bert_classifier(dropout=0.0, layers=4)
    with _recorded() as session:
        compiled = _compiled(case.model, faults.wrong_operator("aten.gelu_backward.default", _scaled, "aot"), folder)
        case.loss(compiled(**case.inputs)).backward()
    return session.report


def nan(folder: Path) -> cb.Report:
    """The same model in inference, whose softmax has a NaN."""
    case = models.bert_classifier(attention="eager", dropout=0.0, layers=4)
    with _recorded() as session, torch.no_grad():
        compiled = _compiled(case.model.eval(), faults.wrong_operator("aten._softmax.default", with_nan, "aot"), folder)
        compiled(**case.inputs)
    return session.report


def stride(folder: Path) -> cb.Report:
    """A model whose result lies otherwise in memory than in eager."""
    with _recorded() as session:
        _compiled(nn.Linear(6, 4), faults.wrong_stride(), folder)(torch.randn(3, 6))
    return session.report


def clean(folder: Path) -> cb.Report:
    """A training step of a BERT in bfloat16, by a compiler without a fault."""
    case = models.bert_classifier(dropout=0.0, layers=2)
    with _recorded() as session:
        case.loss(_compiled(case.model.to(torch.bfloat16), faults.clean("aot"), folder)(**case.inputs)).backward()
    return session.report


def fifty(folder: Path) -> cb.Report:
    """A model of fifty layers, each compiled by itself, and each wrong."""
    layers = nn.Sequential(*(nn.Linear(8, 8) for _ in range(50)))
    with _recorded() as session, torch.no_grad(), torch._dynamo.config.patch(recompile_limit=100):
        for place, layer in enumerate(layers):
            layers[place] = _compiled(layer, faults.wrong_value(), folder, localize=False)
        layers(torch.randn(4, 8))
    return session.report


REPORTED: Mapping[str, Callable[[Path], cb.Report]] = MappingProxyType(
    {function.__name__: function for function in (wrong_gradient, nan, stride, clean, fifty)}
)
"""The programs. Each gets the folder for its reports."""


def reported(name: str, folder: Path) -> cb.Report:
    """Run a program, always with the same random numbers, and return its report."""
    torch.manual_seed(0)
    return REPORTED[name](folder)


def _scaled(gradient: Tensor) -> Tensor:
    return gradient * 1.1


def _compiled(program: Callable[..., Any], compiler: Compiler, folder: Path, *, localize: bool = True) -> Any:
    return checked(program, compiler, localize=localize, report_dir=folder, progress=False)


def _recorded() -> contextlib.AbstractContextManager[Session]:
    return cb.collect(closing=False)


pytestmark = [pytest.mark.slow, pytest.mark.skipif(BROWSER is None, reason="no Chromium here")]

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
    "gradient": cb.Report((WRONG,), CHECKED, "a wrong gradient"),
    "nan": cb.Report(
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
    "fifty": cb.Report(
        tuple(replace(WRONG, subject=f"output[{place}]", op=f"aten.op_{place}.default") for place in range(50)),
        CHECKED,
        "t" * 300,
    ),
}


PICTURES = {"wrong_gradient": 4, "nan": 1, "stride": 0, "clean": 0, "fifty": 3}
"""How many pictures the page of each program shows at least, none of them twice."""


@pytest.mark.parametrize("width", [390, 1280])
@pytest.mark.parametrize("name", PAGES)
def test_a_page_of_long_names_and_many_findings_is_as_wide_as_its_window(name: str, width: int, tmp_path: Path) -> None:
    check_page(PAGES[name].to_html(), name, width, tmp_path)


@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", REPORTED)
def test_the_page_of_a_real_run_fits_a_phone_and_a_desktop_in_light_and_dark(name: str, tmp_path: Path) -> None:
    report = reported(name, tmp_path / "reports")
    assert report.verdict is (cb.Verdict.PASS if name in ("stride", "clean") else cb.Verdict.FAIL)
    page = report.to_html()
    shown = {
        check_page(page, f"real-{name}", width, tmp_path, dark=dark) for width in (390, 1280) for dark in (False, True)
    }
    assert len(shown) == 1, "a picture is missing at some width"
    assert shown.pop() >= PICTURES[name]
