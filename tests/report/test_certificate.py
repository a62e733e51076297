"""What a maintainer pastes to say what was checked."""

from __future__ import annotations

from dataclasses import replace

from checked_backend.findings import Coverage, Finding, Kind, RegionInfo, Severity, Skip
from checked_backend.report import Report
from checked_backend.report.certificate import render_certificate

COVERAGE = Coverage(
    regions=(RegionInfo("Net [0/0]", ("model.py:3 in forward",), 34, 3, 3, 1),),
    checked={"outputs": 12, "gradients": 4},
    skipped=(Skip("timing", "not asked for"),),
    detection_limit={"output[0]": 1e-4, "grad[w]": 3e-9},
    own_precision_limit={"output[0]": 0.02},
)
CLEAN = Report((), COVERAGE, "Net", {"torch": "2.13.0", "cpu": "some_cpu"})

TEXT = """\
## checked_backend: PASS (Net)

The compiled program agrees with eager in everything that was compared.

Compared: 12 outputs and 4 gradients.
- Net: 34 nodes, 3 of 3 calls, 1 backward checked; model.py:3 in forward

An error greater than this, relative to the tensor's root mean square, would have been caught:

| tensor | of the logic | in its own precision |
|---|---|---|
| output\\[0\\] | 0.0001 | 0.02 |
| grad\\[w\\] | 3e-09 |  |

Not checked:
- timing: not asked for

On: torch 2.13.0; cpu some\\_cpu
"""


def test_text() -> None:
    assert render_certificate([CLEAN]) == TEXT


def test_calls_that_were_drawn_state_how_rare_a_fault_they_would_have_shown() -> None:
    """1 - (1 - p)^n is the probability, so n = 58 calls and 95 % give p = 5 %."""
    region = replace(COVERAGE.regions[0], calls=900, checked_calls=63, drawn_calls=58)
    sampled = replace(CLEAN, coverage=replace(COVERAGE, regions=(region, COVERAGE.regions[0])))
    stated = (
        "A fault in so many calls, above the detection limits, would have been seen with 95% probability, assuming "
        "that such calls are spread over the run as the calls are that were drawn at random to be checked:\n"
        "- Net: in at least 5% of the calls (58 calls drawn)\n"
    )
    text = render_certificate([sampled])
    assert text.count("probability") == 1
    assert stated in text
    failed = replace(sampled, findings=(Finding(Kind.LOGIC, "output[0]", "wrong"),))
    assert "probability" not in render_certificate([failed])


def test_what_is_no_pass_is_no_certificate() -> None:
    failed = replace(CLEAN, findings=(Finding(Kind.LOGIC, "output[0]", "wrong"),))
    missed = replace(CLEAN, coverage=replace(COVERAGE, skipped=(Skip("gradients", "not run", matters=True),)))
    for report, verdict in ((failed, "FAIL"), (missed, "INCONCLUSIVE"), (Report((), Coverage()), "INCONCLUSIVE")):
        text = render_certificate([report])
        assert text.startswith(f"## checked_backend: {verdict}")
        assert "This is no certificate" in text
        assert "agrees" not in text


def test_names_are_no_markup() -> None:
    hostile = "<img src=x> | `a` [b](http://c)\n# d"
    text = render_certificate([Report((), replace(COVERAGE, detection_limit={hostile: 1.0}), hostile)])
    assert "<img" not in text.replace("\\<img", "")
    assert "\n# d" not in text
    assert "[b](" not in text.replace("\\[b\\](", "")


def test_what_is_left_out_is_counted() -> None:
    many = replace(COVERAGE, detection_limit={f"output[{i}]": float(i) for i in range(50)})
    text = render_certificate([replace(CLEAN, coverage=many)])
    assert "and 20 more tensors" in text
    assert "output\\[49\\]" in text


def test_what_differs_and_was_ignored_or_is_layout_is_named() -> None:
    ignored = Finding(Kind.LOGIC, "output[1]", "far off")
    stride = Finding(Kind.STRUCTURE, "output[0]", "other strides", "structure.stride", severity=Severity.WARNING)
    text = render_certificate([replace(CLEAN, findings=(stride,), coverage=replace(COVERAGE, ignored=(ignored,)))])
    assert "in everything that was compared, but for 1 finding that is ignored.\n" in text
    assert "Differs, with the same values:\n- structure.stride, output\\[0\\]: other strides\n" in text
    assert "Differs, and is ignored by option:\n- logic, output\\[1\\]: far off\n" in text
