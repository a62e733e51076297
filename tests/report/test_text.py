"""What a person reads. These words are the product: a change here is a change of the interface."""

from __future__ import annotations

import io
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from checked_backend.findings import Coverage, Finding, Kind, Metrics, NoiseScale, RegionInfo, Skip
from checked_backend.report import Report
from checked_backend.report.advice import ADVICE
from checked_backend.report.text import render_rich
from tests.support.report_tools import RELU

METRICS = Metrics(4096, 12, 0.25, 1.2, 4096, 0.01, 1.0, 3.0, 0, 0, 0, 0, 0, (3, 5), 1.0, 1.25)
WRONG = Finding(
    Kind.LOGIC,
    "grad[layer.weight]",
    "The gradient differs from eager's, and so does the compiled program's in float64: rounding does not explain it.",
    region="region 0",
    metrics=METRICS,
    noise=NoiseScale(
        1e-7, 5e-7, "Monte Carlo arithmetic, 3 runs of eager with each operator perturbed by one roundoff"
    ),
    evidence={"fp64 twin": "relative difference 1.5e-05, allowed 1e-09"},
    graph="backward",
    stage="compiled",
    node="relu_3",
    op="aten.relu.default",
    source="model.py:41 in forward: x = torch.relu(x)",
    workaround='torch.compile(model, options={"max_fusion_size": 1})',
    repro="checked_backend_reports/repro-0/repro.py",
)
STRIDE = Finding(
    Kind.STRUCTURE,
    "output[0]",
    "The output lies in memory in another order.",
    detail="structure.stride",
    region="region 0",
    expected="float32[4, 8], stride (8, 1)",
    actual="float32[4, 8], stride (1, 4)",
)
CHECKED = Coverage(checked={"outputs": 1})
COVERAGE = Coverage(
    regions=(RegionInfo("region 0", ("model.py:39 in forward",), 34, 3, 2, 1),),
    checked={"outputs": 12, "gradients": 4, "mutated inputs": 0},
    skipped=(
        Skip("timing", "not asked for", region="region 0"),
        Skip("gradients", "backward did not run", matters=True, region="region 1"),
    ),
    ignored=(Finding(Kind.ALIAS, "output[1]", "is the input itself", "alias.identity"),),
    notes=("fusion-rounding: clears under emulate_precision_casts",),
    detection_limit={"output[0]": 1e-4},
    own_precision_limit={"output[0]": 0.02, "output[1]": 1e-6},
)


def test_what_is_unsupported_says_itself_why_nothing_was_checked() -> None:
    finding = Finding(Kind.UNSUPPORTED, "candidate", "no compiler here", detail="unsupported.compiler")
    assert "Call the compiled function at least once" not in str(Report((finding,), Coverage()))


def headline(*findings: Finding, coverage: Coverage = COVERAGE) -> str:
    return str(Report(findings, coverage)).partition("\n")[0]


def test_headlines() -> None:
    crash = Finding(Kind.CRASH, "region 0", "boom", region="region 0")
    raised = replace(crash, kind=Kind.EXCEPTION, region="region 1")
    vague = replace(crash, kind=Kind.NONDETERMINISTIC)
    assert headline(crash) == "FAIL: region 0: region 0 fails where eager runs"
    assert headline(crash, raised) == "FAIL: region 0: region 0 fails where eager runs; 1 other cause below"
    assert headline(replace(crash, kind=Kind.PRECISION, region="")) == "FAIL: region 0 is less precise than in eager"
    assert headline(vague, WRONG) == headline(WRONG)
    skipped = "1 part that could hide an error was skipped (gradients: backward did not run)"
    assert headline(vague) == f"INCONCLUSIVE: 1 finding could not be decided and {skipped}"
    both = (Skip("a", "b", matters=True), Skip("c", "d", matters=True))
    told = "INCONCLUSIVE: 2 parts that could hide an error were skipped (the first: a: b)"
    assert headline(coverage=replace(CHECKED, skipped=both)) == told
    assert len(headline(coverage=replace(CHECKED, skipped=(Skip("a", "b" * 500, matters=True),)))) < 220


def test_a_librarys_line_and_the_users_own_are_told_apart() -> None:
    library = replace(RELU, source="site-packages/library/layer.py:5 in forward: return act(x)")
    alone = str(Report((library,), COVERAGE))
    assert "   library     site-packages/library/layer.py:5 in forward\n     | return act(x)\n" in alone
    assert "your line" not in alone
    called = replace(library, caller="train.py:12 in step: loss = model(x)")
    assert headline(called).startswith("FAIL: train.py:12: relu is wrong")
    assert "\n   your line   train.py:12 in step: loss = model(x)\n" in str(Report((called,), COVERAGE))


def test_many_findings_are_counted() -> None:
    apart = [replace(WRONG, node=f"relu_{line}", source=f"model.py:{line} in forward: x.relu()") for line in range(11)]
    text = str(Report((*apart, *[STRIDE] * 2), COVERAGE))
    assert "\n10. relu" in text
    assert "\n11. " not in text
    assert "\nand 3 more findings: 2 structure, 1 logic; the JSON report lists them all\n" in text
    assert "  - stride: " in text, "advice covers findings that are not shown"


def test_nonfinite_rows_and_close_values() -> None:
    ones: dict[str, Any] = dict.fromkeys(("total", "mismatched", "nonfinite_mismatched", "nan_candidate"), 1)
    values: dict[str, Any] = {"index": (), "reference_value": 0.1, "candidate_value": 0.1 + 1e-16}
    metrics = replace(METRICS, **ones, max_ulp=None, **values)
    text = Report((Finding(Kind.NONFINITE, "output[0]", "m", metrics=metrics),), COVERAGE).to_text(verbose=True)
    assert "     difference  1 of 1 element (100%)\n     greatest    absolute 0.25, relative 1.2\n" in text
    assert "     at index    []: reference 0.1, candidate 0.1000000000000001\n" in text
    assert "     nonfinite   1 element on one side only; reference 0 NaN, 0 infinite; candidate 1 NaN" in text


def test_prose_wraps_and_code_does_not() -> None:
    code = "torch.compile(model, options={" + ", ".join(f'"option_{i}": True' for i in range(10)) + "})\nsecond()"
    text = str(Report((replace(WRONG, message="word " * 100, workaround=code),), COVERAGE))
    first, second = code.split("\n")
    assert f"\n   workaround  {first}\n               {second}\n" in text
    assert max(len(line) for line in text.split("\n")[1:] if first not in line) <= 100


def test_a_name_cannot_steer_the_terminal() -> None:
    hostile = replace(
        WRONG, subject="\x1b[2Jgrad\u202e", message="a\r\nb\rc\td", source="\x1b[0m.py:1: \x1b[2J", op="\x1b"
    )
    text = Report((hostile,), COVERAGE, "\x1b").to_text(verbose=True)
    assert "Finding 1 of 1: logic, \\x1b[2Jgrad\\u202e\n     a\n     b\\rc   d\n" in text
    assert "\x1b" not in text


@pytest.mark.parametrize("kind", list(Kind))
def test_every_kind_has_advice(kind: Kind) -> None:
    assert kind.value in ADVICE
    text = str(Report((Finding(kind, "x", "m", detail=f"{kind.value}.something.new"),), COVERAGE))
    assert f"  - {kind.value}: " in text


def test_what_is_right_when_compiled_once_more_is_looked_for_in_caches() -> None:
    finding = replace(WRONG, detail="logic.this_compilation")
    assert "TORCHINDUCTOR_FORCE_DISABLE_CACHES=1" in str(Report((finding,), COVERAGE))
    assert "TORCHINDUCTOR_FORCE_DISABLE_CACHES=1" not in str(Report((WRONG,), COVERAGE))


def test_rich_says_the_same_and_reads_no_markup() -> None:
    stream = io.StringIO()
    report = Report((replace(WRONG, message="[red]not markup[/red] :smile:"), STRIDE), COVERAGE, "[bold]title")
    Console(file=stream, width=100).print(render_rich(report, width=100), soft_wrap=True)
    assert stream.getvalue() == f"{report}\n"


def test_how_to_find_the_operator_is_said_until_it_was_looked_for() -> None:
    finding = Finding(Kind.LOGIC, "output[0]", "wrong", region="f [0/0]")
    assert "localize=True" in str(Report((finding,), CHECKED))
    found = replace(finding, op="aten.relu.default", graph="forward")
    sought = replace(CHECKED, notes=("f [0/0]: could not be localized: it died",))
    for report in (Report((found,), CHECKED), Report((finding,), sought), Report((), CHECKED)):
        assert "localize=True" not in str(report)


def test_a_workaround_that_was_not_tried_is_not_said_to_help() -> None:
    finding = Finding(Kind.LOGIC, "output[0]", "wrong", workaround="f = torch.compiler.disable(f)")
    assert "was seen to make the finding vanish" in str(Report((finding,), CHECKED))
    text = str(Report((replace(finding, workaround_confirmed=False),), CHECKED))
    assert "It was not tried" in text
    assert "was seen" not in text


def advice_of(kind: Kind, dtype: str, *, op: str | None = None) -> str:
    metrics = replace(METRICS, dtype=dtype)
    finding = Finding(kind, "output[0]", "wrong", region="0", metrics=metrics, op=op, source="model.py:41 in f: x")
    return " ".join(Report((finding,), COVERAGE).to_text(verbose=True).split())


@pytest.mark.parametrize("kind", [Kind.PRECISION, Kind.NONFINITE])
def test_float32_is_advice_to_lower_precision_alone(kind: Kind) -> None:
    for dtype in ("bfloat16", "float16"):
        assert "loat32 " in advice_of(kind, dtype)
    for dtype in ("float32", "float64", "complex64"):
        text = advice_of(kind, dtype)
        assert "in float32" not in text
        assert "Float32 reaches" not in text
        assert "emulate_precision_casts" not in text.partition("What to do next")[2].partition("Checked")[0]


@pytest.mark.parametrize("kind", [Kind.LOGIC, Kind.PRECISION, Kind.NONFINITE])
def test_a_line_is_blamed_only_where_an_operator_was_found(kind: Kind) -> None:
    text = advice_of(kind, "float32")
    assert "your line" not in text
    assert "made at model.py:41" in text
    assert "Which line is to blame is not known." in text
    text = advice_of(kind, "float32", op="aten.relu.default")
    assert "your line model.py:41" in text
    assert "keep the code at 'your line' out of the compiler" in text


# -- no more is claimed than is known


def test_how_many_causes_there_are_is_said_only_where_it_is_known() -> None:
    vague = [replace(RELU, op=None, node=None, region=f"Net [{place}/0]") for place in range(50)]
    named = [RELU, replace(RELU, subject="output[1]")]

    def title(*findings: Finding) -> str:
        return str(Report(findings, CHECKED, "Net")).split("\n")[1]

    assert title(RELU) == "Net: 1 finding"
    assert title(*named) == "Net: 2 findings, 1 cause"
    another = replace(RELU, node="relu_1", source="model.py:4 in forward: y.relu()")
    assert title(*named, another) == "Net: 3 findings, 2 causes"
    assert title(*vague) == "Net: 50 findings in 50 regions, no operator named"
    assert title(*named, vague[0]) == "Net: 3 findings, 2 parts"
    assert headline(*vague, coverage=CHECKED).endswith("; 49 other parts below")
    assert headline(*named, vague[0], coverage=CHECKED).endswith("; 1 other part below")


def test_what_is_ignored_is_no_agreement() -> None:
    ignored = replace(CHECKED, ignored=(RELU,))
    told = "PASS: the compiled program agrees with eager, but for 1 finding that is ignored (1 output)"
    assert headline(coverage=ignored) == told
    assert ", but for 2 findings that are ignored (" in headline(coverage=replace(ignored, ignored=(RELU, RELU)))


def test_findings_that_were_not_traced_by_themselves_are_told_with_an_assumption() -> None:
    text = str(Report((RELU, replace(RELU, op=None, node=None, stage=None, searched=True, subject="grad[w]")), CHECKED))
    assert text.count("\n1. ") == 1
    assert "\n2. " not in text
    assert "   assumed     that it explains 1 finding of the same code, whose own operator is not known" in text
    assert "assumed" not in str(Report((RELU,), CHECKED))


def test_a_script_that_does_not_show_it_is_not_called_a_repro() -> None:
    written = replace(RELU, repro="r.py")
    assert "   repro       python r.py" in str(Report((written,), CHECKED))
    text = str(Report((replace(written, repro_confirmed=False),), CHECKED))
    assert "   script      python r.py" in text
    assert "repro       python" not in text


MOST = Metrics(256, 240, 0.5, 0.5, None, 0.3, 1.0, 1.0, 0, 0, 0, 0, 0, (0,), 1.0, 1.5)
NOISE = NoiseScale(1e-7, 5e-7, "made up")


def lines_of_results(*findings: Finding) -> list[str]:
    text = str(Report(findings, CHECKED)).split("\n   wrong       ")[1]
    return text.split("\n   greatest")[0].replace("\n               ", "\n").split("\n")


def test_each_of_many_results_has_a_line_and_the_one_that_is_named_is_the_first() -> None:
    output = replace(RELU, op=None, node=None, metrics=MOST, noise=NOISE)
    layers = [
        replace(output, subject=f"grad[model.layers.{n}.self_attn.q_proj.weight]", metrics=replace(MOST, rmse=n))
        for n in range(1, 13)
    ]
    few = replace(layers[2], subject="grad[bias]", metrics=replace(MOST, mismatched=3))
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
    nan = replace(MOST, nonfinite_mismatched=1, nan_candidate=1)
    [told] = lines_of_results(replace(RELU, kind=Kind.NONFINITE, metrics=nan, noise=NOISE))
    assert told == "nonfinite, output[0]: 1 of 256 elements is NaN or infinite on one side only"


def test_advice_on_a_kind_is_said_once_and_names_the_line_if_one_finding_has_it() -> None:
    text = str(Report((replace(RELU, op=None, node=None, region="f [1/0]"), RELU), CHECKED))
    assert text.count("  - logic: ") == 1
    assert "Else keep the code at 'your line'" in text
    assert "Which line is to blame is not known." not in text


@pytest.mark.parametrize(
    ("kind", "detail", "dtype"),
    [(Kind.LOGIC, "logic", "float32"), (Kind.CRASH, "crash.running", "float32"), (Kind.PRECISION, "", "bfloat16")],
)
def test_nothing_is_advised_that_was_tried_in_vain(kind: Kind, detail: str, dtype: str) -> None:
    open_to_try = replace(RELU, kind=kind, detail=detail, workaround=None, metrics=replace(MOST, dtype=dtype))
    advised = " ".join(str(Report((open_to_try,), CHECKED)).split())
    assert "keep the code at 'your line' out of the compiler" in advised
    assert ("emulate_precision_casts" in advised) == (kind is Kind.PRECISION)
    text = " ".join(str(Report((replace(open_to_try, workaround_confirmed=False),), CHECKED)).split())
    assert "No setting helped, nor did keeping 'your line' out of the compiler." in text
    assert "torch.compiler.disable" not in text
    assert "emulate_precision_casts" not in text
    tried = {"workaround": "with that line outside of the compiler too, output[0] is wrong"}
    other = str(Report((replace(open_to_try, workaround="import torch", evidence=tried),), CHECKED))
    assert "torch.compiler.disable" not in other
    assert "Today: paste the workaround" in other


def test_a_report_of_findings_names_the_command_that_draws_it() -> None:
    at = Path("my reports/net.json")
    text = str(Report((RELU,), CHECKED, "Net", {}, at))
    assert text.endswith("\nPage:   checked-backend report 'my reports/net.json' --html page.html")
    assert "Page:" not in str(Report((), CHECKED, "Net", {}, at))
