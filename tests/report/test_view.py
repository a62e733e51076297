"""The first lines of a report, and its blocks: no more is claimed than is known."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from checked_backend.findings import Coverage, Finding, Kind, Metrics, NoiseScale
from checked_backend.report import Report
from tests.support.report_tools import RELU

CHECKED = Coverage(checked={"outputs": 1})


def headline(*findings: Finding, coverage: Coverage = CHECKED) -> str:
    return str(Report(findings, coverage)).partition("\n")[0]


def test_how_many_causes_there_are_is_said_only_where_it_is_known() -> None:
    vague = [replace(RELU, op=None, node=None, region=f"Net [{place}/0]") for place in range(50)]
    named = [RELU, replace(RELU, subject="output[1]")]

    def title(*findings: Finding) -> str:
        return str(Report(findings, CHECKED, "Net")).split("\n")[1]

    assert title(RELU) == "Net: 1 finding"
    assert title(*named) == "Net: 2 findings, 1 cause"
    assert title(*named, replace(RELU, node="relu_1")) == "Net: 3 findings, 2 causes"
    assert title(*vague) == "Net: 50 findings in 50 regions, no operator named"
    assert title(*named, vague[0]) == "Net: 3 findings, 2 parts"
    assert headline(*vague).endswith("; 49 other parts below")
    assert headline(*named, vague[0]).endswith("; 1 other part below")


def test_wrong_values_of_code_that_was_compiled_many_times_are_one_block() -> None:
    vague = [replace(RELU, op=None, node=None, region=f"Net [0/{place}]") for place in range(50)]
    text = str(Report(tuple(vague), CHECKED, "Net"))
    assert text.startswith("FAIL: Net: output[0] is wrong in 50 regions")
    assert "\n1. output[0] in Net, 50 regions, compiled code\n" in text
    assert "\n2. " not in text


def test_what_is_ignored_is_no_agreement() -> None:
    ignored = replace(CHECKED, ignored=(RELU,))
    assert headline(coverage=ignored) == (
        "PASS: the compiled program agrees with eager, but for 1 finding that is ignored (outputs: 1)"
    )
    assert ", but for 2 findings that are ignored (" in headline(coverage=replace(ignored, ignored=(RELU, RELU)))


def test_findings_that_were_not_traced_by_themselves_are_told_with_an_assumption() -> None:
    left = replace(RELU, op=None, node=None, stage=None, searched=True, subject="grad[w]")
    text = str(Report((RELU, left), CHECKED))
    assert text.count("\n1. ") == 1
    assert "\n2. " not in text
    assert "   assumed     that it explains 1 finding of the same code, whose own operator is not known" in text
    assert "assumed" not in str(Report((RELU,), CHECKED))


def test_the_candidate_is_called_the_compiled_program() -> None:
    crash = Finding(Kind.CRASH, "candidate", "boom", region="Net [0/0]")
    assert headline(crash) == "FAIL: Net: the compiled program fails where eager runs"
    assert "\n1. the compiled program in Net\n" in str(Report((crash,), CHECKED))


@pytest.mark.parametrize(
    ("detail", "said"),
    [
        ("structure.dtype", "has another dtype than in eager"),
        ("structure.shape", "has another shape than in eager"),
        ("structure.device", "is on another device than in eager"),
        ("structure.type", "has another type, dtype, shape or device than in eager"),
    ],
)
def test_structure_is_said_as_exactly_as_it_is_known(detail: str, said: str) -> None:
    assert headline(Finding(Kind.STRUCTURE, "output[0]", "m", detail=detail)) == f"FAIL: output[0] {said}"


def test_a_script_that_does_not_show_it_is_not_called_a_repro() -> None:
    written = replace(RELU, repro="r.py")
    assert "   repro       python r.py" in str(Report((written,), CHECKED))
    text = str(Report((replace(written, repro_confirmed=False),), CHECKED))
    assert "   script      python r.py" in text
    assert "repro       python" not in text


METRICS = Metrics(256, 240, 0.5, 0.5, None, 0.3, 1.0, 1.0, 0, 0, 0, 0, 0, (0,), 1.0, 1.5)
NOISE = NoiseScale(1e-7, 5e-7, "made up")


def lines_of_results(*findings: Finding) -> list[str]:
    text = str(Report(findings, CHECKED)).split("\n   wrong       ")[1]
    return text.split("\n   greatest")[0].replace("\n               ", "\n").split("\n")


def test_each_of_many_results_has_a_line_and_the_one_that_is_named_is_the_first() -> None:
    output = replace(RELU, op=None, node=None, metrics=METRICS, noise=NOISE)
    layers = [
        replace(output, subject=f"grad[model.layers.{n}.self_attn.q_proj.weight]", metrics=replace(METRICS, rmse=n))
        for n in range(1, 13)
    ]
    few = replace(layers[2], subject="grad[bias]", metrics=replace(METRICS, mismatched=3))
    assert lines_of_results(output, layers[0], few) == [
        "logic, output[0]: 240 of 256 elements, 30% off, 1e+06 times its rounding noise",
        "grad[model.layers.1.self_attn.q_proj.weight]: 100% off, 1e+06 times its noise",
        "grad[bias]: 3 of 256 elements, 30% off, 1e+06 times its noise",
    ]
    cut = lines_of_results(output, *layers)
    assert cut[0].startswith("logic, output[0]: ")
    assert cut[1].startswith("grad[model.layers.12.")
    assert cut[-1] == "and 5 more; report -v lists them all"
    assert len(cut) == 9
    changed = replace(output, kind=Kind.MUTATION, subject="mutated[mean]", detail="mutation.wrong")
    assert lines_of_results(output, changed)[1].startswith("mutation.wrong, mutated[mean]: 30% off")


def test_of_nan_is_said_how_many_and_not_how_far_the_rest_is_off() -> None:
    nan = replace(METRICS, nonfinite_mismatched=1, nan_candidate=1)
    assert lines_of_results(replace(RELU, kind=Kind.NONFINITE, metrics=nan, noise=NOISE)) == [
        "nonfinite, output[0]: 1 of 256 elements is NaN or infinite on one side only"
    ]


def test_advice_on_a_kind_is_said_once_and_names_the_line_if_one_finding_has_it() -> None:
    vague = replace(RELU, op=None, node=None, region="f [1/0]")
    text = str(Report((vague, RELU), CHECKED))
    assert text.count("  - logic: ") == 1
    assert "Else keep the code at 'your line'" in text
    assert "Which line is to blame is not known." not in text


@pytest.mark.parametrize(
    ("kind", "detail", "dtype"),
    [(Kind.LOGIC, "logic", "float32"), (Kind.CRASH, "crash.running", "float32"), (Kind.PRECISION, "", "bfloat16")],
)
def test_nothing_is_advised_that_was_tried_in_vain(kind: Kind, detail: str, dtype: str) -> None:
    open_to_try = replace(RELU, kind=kind, detail=detail, workaround=None, metrics=replace(METRICS, dtype=dtype))
    advised = " ".join(str(Report((open_to_try,), CHECKED)).split())
    assert "keep the code at 'your line' out of the compiler" in advised
    assert ("emulate_precision_casts" in advised) == (kind is Kind.PRECISION)
    in_vain = replace(open_to_try, workaround_confirmed=False)
    text = " ".join(str(Report((in_vain,), CHECKED)).split())
    assert "No setting helped, nor did keeping 'your line' out of the compiler." in text
    assert "torch.compiler.disable" not in text
    assert "emulate_precision_casts" not in text


def test_a_report_of_findings_names_the_command_that_draws_it() -> None:
    at = Path("my reports/net.json")
    text = str(Report((RELU,), CHECKED, "Net", {}, at))
    assert text.endswith("\nPage:   checked-backend report 'my reports/net.json' --html page.html")
    assert "Page:" not in str(Report((), CHECKED, "Net", {}, at))
