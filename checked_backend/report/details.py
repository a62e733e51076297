"""Everything that is known of one finding, as labelled lines."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from checked_backend.findings import EvidenceKey, Finding, Kernel, Kind, Metrics, Number, Severity
from checked_backend.findings.paths import shown_path
from checked_backend.report.clean import clean, first_line, percent, plural
from checked_backend.report.flow_chart import flow_sentence
from checked_backend.report.one_line import line_label

_SHOWN_NODES = 8

_HEADS = {Severity.ERROR: "Finding", Severity.WARNING: "Warning"}


@dataclass(frozen=True, slots=True)
class Row:
    """A labelled line. ``code`` is for pasting: it must not be wrapped."""

    label: str
    text: str
    code: bool = False


@dataclass(frozen=True, slots=True)
class FindingView:
    """One finding, laid out with all that is known of it."""

    title: str
    message: str
    rows: tuple[Row, ...]


def what(finding: Finding) -> str:
    """``logic, output[0]``."""
    kind = finding.kind.value
    detail = finding.detail if finding.detail.startswith(kind) else f"{kind} {finding.detail}".strip()
    return f"{clean(detail)}, {first_line(finding.subject)}"


def how_wrong(finding: Finding, *, briefly: bool = False) -> str:
    """The distance of the two sides in a few words; empty if it is not known.

    Args:
        briefly: Leave out how many elements differ where most do: one of many results has a line at most.
    """
    metrics, noise = finding.metrics, finding.noise
    if metrics is None:
        if finding.expected is None or finding.actual is None:
            return ""
        return clean(f"{finding.actual} instead of {finding.expected}")
    if metrics.mismatched == 0:
        return "no element differs"
    if metrics.nonfinite_mismatched and finding.kind is Kind.NONFINITE:  # how far numbers differ is not the matter
        verb = "is" if metrics.nonfinite_mismatched == 1 else "are"
        counted = f"{metrics.nonfinite_mismatched} of {plural(metrics.total, 'element')}"
        return f"{counted} {verb} NaN or infinite on one side only"
    most = 2 * metrics.mismatched > metrics.total
    parts = [] if briefly and most else [f"{metrics.mismatched} of {plural(metrics.total, 'element')}"]
    if metrics.nonfinite_mismatched:
        parts.append(f"{metrics.nonfinite_mismatched} NaN or infinite on one side only")
    if metrics.reference_rms > 0 and metrics.rmse > 0:
        parts.append(f"{percent(metrics.rmse / metrics.reference_rms)} off")
    if noise is not None and noise.max > 0 and metrics.max_abs_diff > 0:
        parts.append(f"{metrics.max_abs_diff / noise.max:.3g} times its {'' if briefly else 'rounding '}noise")
    return ", ".join(parts)


_SIDES: Mapping[str, tuple[str, str]] = {
    "precision.batch": ("in the batch", "alone"),
    "precision.runs": ("in the first run", "in another"),
    "precision.choices": ("with the first kernels", "with others"),
}
"""The two sides of a program that is compared with itself."""


def values_at(finding: Finding) -> str:
    """Both values where they differ most: ``output[0][4, 2] is -0.484 in eager, -0.479 compiled``."""
    metrics = finding.metrics
    if metrics is None or metrics.index is None:
        return ""
    reference, candidate = _values(metrics)
    at = f"[{', '.join(map(str, metrics.index))}]" if metrics.index else ""
    first, second = _SIDES.get(finding.detail, ("in eager", "compiled"))
    return f"{first_line(finding.subject)}{at} is {reference} {first}, {candidate} {second}"


def side_by_side(finding: Finding, *, region: bool = False) -> tuple[str, str, str, str] | None:
    """The place of the greatest difference, both values there, and the difference; None if nothing is known."""
    metrics = finding.metrics
    if metrics is None or metrics.index is None or finding.detail in _SIDES:
        return None
    at = f"[{', '.join(map(str, metrics.index))}]" if metrics.index else ""
    where = f" of {clean(finding.region)}" if region else ""
    one_side = "NaN or infinity on one side" if metrics.nonfinite_mismatched else f"{metrics.max_abs_diff:.4g}"
    return f"{first_line(finding.subject)}{at}{where}", *_values(metrics), one_side


def finding_view(finding: Finding, number: int, total: int) -> FindingView:
    """Lay a finding out."""
    rows = [row("expected", finding.expected), row("actual", finding.actual)]
    if finding.metrics is not None:
        rows.extend(_metrics(finding.metrics))
    if (noise := finding.noise) is not None:
        times = ""
        if finding.metrics is not None and noise.max > 0 and finding.metrics.max_abs_diff > 0:
            times = f"; the greatest difference is {finding.metrics.max_abs_diff / noise.max:.3g} times that"
        rows.append(Row("noise", f"rms {noise.rms:.4g}, greatest {noise.max:.4g}{times}"))
        rows.append(Row("noise from", clean(noise.source)))
    rows.extend(
        Row("evidence", f"{clean(EvidenceKey.phrase_of(str(key)))}: {clean(str(value))}")
        for key, value in finding.evidence.items()
    )
    if finding.flow:
        rows.append(Row("error flow", flow_sentence(finding.flow, finding.node)))
    if finding.kernel is not None:
        rows.append(Row("kernel", f"{kernel_words(finding.kernel)}; its source is on the HTML page"))
    graph, stage = finding.graph and f"{finding.graph} graph", finding.stage and f"stage {finding.stage}"
    place = (finding.region, finding.module, graph, stage, finding.node, finding.op)
    rows.append(row("where", ", ".join(part for part in place if part)))
    rows.append(row(line_label(finding), finding.source, code=True))
    rows.append(row("your line", finding.caller, code=True))
    rows.append(row("workaround", finding.workaround, code=True))
    rows.append(row("repro", finding.repro and shown_path(finding.repro), code=True))
    return FindingView(
        title=f"{_HEADS[finding.severity]} {number} of {total}: {what(finding)}",
        message=clean(finding.message),
        rows=tuple(one for one in rows if one is not None and one.text),
    )


def kernel_words(kernel: Kernel) -> str:
    """What a kernel is: ``cpp_fused_add_relu_0 (C++), which computes add, relu``."""
    shown = [first_line(name) for name in kernel.computes[:_SHOWN_NODES]]
    rest = len(kernel.computes) - len(shown)
    computes = f", which computes {', '.join(shown)}{f' and {rest} more' if rest else ''}" if shown else ""
    said = "a call of a library function" if kernel.language == "call" else first_line(kernel.language)
    return f"{first_line(kernel.name)} ({said}){computes}"


def row(label: str, text: str | None, *, code: bool = False) -> Row | None:
    """A row of a text that may be missing."""
    return None if text is None else Row(label, clean(text), code)


def _metrics(metrics: Metrics) -> list[Row]:
    if metrics.mismatched == 0:
        return [Row("difference", f"none in {plural(metrics.total, 'element')}")]
    share = f"{100 * metrics.mismatched / max(metrics.total, 1):.3g}%"
    ulp = "" if metrics.max_ulp is None else f", {metrics.max_ulp} ulp"
    rows = [
        Row("difference", f"{metrics.mismatched} of {plural(metrics.total, 'element')} ({share})"),
        Row("greatest", f"absolute {metrics.max_abs_diff:.4g}, relative {metrics.max_rel_diff:.4g}{ulp}"),
        Row("rms", f"{metrics.rmse:.4g} of the difference, {metrics.reference_rms:.4g} of the reference"),
    ]
    if metrics.index is not None:
        reference, candidate = _values(metrics)
        rows.append(Row("at index", f"{list(metrics.index)}: reference {reference}, candidate {candidate}"))
    if metrics.nonfinite_mismatched:
        counts = (
            f"reference {metrics.nan_reference} NaN, {metrics.inf_reference} infinite; "
            f"candidate {metrics.nan_candidate} NaN, {metrics.inf_candidate} infinite"
        )
        rows.append(Row("nonfinite", f"{plural(metrics.nonfinite_mismatched, 'element')} on one side only; {counts}"))
    return rows


def _values(metrics: Metrics) -> tuple[str, str]:
    return told_apart(metrics.reference_value, metrics.candidate_value)


def told_apart(reference: Number | None, candidate: Number | None) -> tuple[str, str]:
    """Two values with as many digits as it takes to see that they differ."""
    if isinstance(reference, float) and isinstance(candidate, float):
        # Nine digits tell any two float32 numbers apart; float64 may need them all.
        short = f"{reference:.9g}", f"{candidate:.9g}"
        return short if short[0] != short[1] else (repr(reference), repr(candidate))
    return str(reference), str(candidate)
