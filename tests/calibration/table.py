"""The confusion table and the margins, as text."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from .run import Outcome

ABOVE_NOISE = 8.0
"""A bug's effect exceeds the program's noise if it is this many times the greatest of 8 draws of that noise."""


def detectable(outcome: Outcome) -> bool:
    """Whether a planted bug must be caught.

    In half precision the float64 twin shows any change of logic, also where rounding hides it bit for bit. Otherwise it
    must change something at the program's precision, and its effect must exceed the noise. A missing upcast changes no
    logic: its effect in float64 is 0.
    """
    if outcome.effect > 0 and outcome.case.dtype in ("bfloat16", "float16"):
        return True
    return outcome.visible > 0 and max(outcome.effect, outcome.visible) > ABOVE_NOISE


def _line(words: Iterable[object], widths: Sequence[int]) -> str:
    return "  ".join(f"{word!s:<{width}}" for word, width in zip(words, widths, strict=False)).rstrip()


def render(outcomes: Sequence[Outcome]) -> tuple[str, bool]:
    """The text of a run, and whether every clean case passed and every detectable bug was caught."""
    clean = [outcome for outcome in outcomes if not outcome.case.bug]
    bugs = [outcome for outcome in outcomes if outcome.case.bug]
    lines = ["", "Confusion table"]
    widths = (10, 11, 8, 8, 14, 10, 10, 10)
    lines.append(_line(("dtype", "mode", "planted", "pass", "inconclusive", "fail", "of these", "above noise"), widths))
    for dtype, mode in sorted({(outcome.case.dtype, outcome.case.mode) for outcome in outcomes}):
        for label, group in (("clean", clean), ("bug", bugs)):
            cell = [each for each in group if (each.case.dtype, each.case.mode) == (dtype, mode)]
            counts = [sum(each.verdict == word for each in cell) for word in ("pass", "inconclusive", "fail")]
            must = [each for each in cell if label == "bug" and detectable(each)]
            share = f"{sum(each.failed for each in must)}/{len(must)} caught" if label == "bug" else ""
            lines.append(_line((dtype, mode, label, *counts, "", share), widths))
    alarms = [outcome for outcome in clean if outcome.verdict != "pass"]
    missed = [outcome for outcome in bugs if detectable(outcome) and not outcome.failed]
    below = [outcome for outcome in bugs if not detectable(outcome) and not outcome.failed]
    lines += ["", "Margins (1 is what the verdict allows, unless said otherwise)"]
    lines += _margins(clean, bugs)
    for title, group in (
        ("FALSE ALARMS", alarms),
        ("MISSED, above the noise", missed),
        ("not seen, below the noise", below),
    ):
        lines += ["", f"{title}: {len(group)}"]
        lines += [_describe(outcome) for outcome in group]
    lines += ["", f"{len(clean)} clean cases, {len(bugs)} planted bugs, {sum(o.seconds for o in outcomes):.0f} s"]
    return "\n".join(lines), not alarms and not missed


def _margins(clean: Sequence[Outcome], bugs: Sequence[Outcome]) -> Iterable[str]:
    for dtype in sorted({outcome.case.dtype for outcome in (*clean, *bugs)}):
        fine = [outcome for outcome in clean if outcome.case.dtype == dtype]
        wrong = [outcome for outcome in bugs if outcome.case.dtype == dtype and outcome.failed]
        logical = [outcome for outcome in wrong if outcome.effect > 0 and outcome.twin_relative > 0]
        for word, title in (
            ("twin_relative", "float64 twin, relative (not a ratio)"),
            ("twin_ratio", "float64 twin, of what is allowed"),
            ("noise_ratio", "Monte Carlo arithmetic, first look"),
            ("closeness", "distance from float64 over eager's, where Monte Carlo arithmetic did not settle it"),
            ("steady", "later calls over the scale remembered from earlier ones"),
        ):
            group = logical if word.startswith("twin") else [each for each in wrong if detectable(each)]
            worst = max(fine, key=lambda each: getattr(each, word), default=None)
            least = min(
                (each for each in group if getattr(each, word) > 0), key=lambda each: getattr(each, word), default=None
            )
            if not any(getattr(each, word) for each in (*fine, *group)):
                continue
            yield f"{dtype}: {title}"
            for label, each in (("worst clean", worst), ("smallest caught bug", least)):
                if each is not None:
                    yield f"    {label:<20} {getattr(each, word):<10.3g} {_name(each)}"


def _name(outcome: Outcome) -> str:
    case = outcome.case
    return " / ".join(word for word in (case.family, case.mode, case.compiler, case.bug) if word)


def _describe(outcome: Outcome) -> str:
    numbers = (
        f"effect {outcome.effect:.3g} (visible {outcome.visible:.3g}) noise {outcome.noise_ratio:.3g} "
        f"twin {outcome.twin_relative:.2g} ({outcome.twin_ratio:.2g}) closeness {outcome.closeness:.3g}"
    )
    where = f"  {outcome.case.dtype} {_name(outcome)}: {outcome.verdict}"
    return f"{where} {numbers} {outcome.findings[:2]} {outcome.skips[:2]}"
