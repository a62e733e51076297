"""Render the findings of fuzzing as text: what was checked, then each group with its program."""

from __future__ import annotations

from checked_backend.fuzz.render.summary import Shown, Summary
from checked_backend.fuzz.text import describe_inputs, render_function
from checked_backend.report.clean import clean

__all__ = ["render_text", "ways"]

_SHOWN = 5


def render_text(summary: Summary) -> str:
    """The report as text."""
    lines = [_line(summary.title), _line(summary.counts), *summary.doubts]
    for number, shown in enumerate(summary.groups, 1):
        lines += ["", *_told(number, shown)]
    for programs, words in (
        (summary.gone, "failures that did not show again"),
        (summary.undecided, "programs without a verdict"),
    ):
        if programs:
            lines += ["", f"{len(programs)} {words}, for example:"]
            lines += [f"  {name}: {_line(reason)[:200]}" for name, reason in programs[:_SHOWN]]
    return "\n".join(lines)


def _line(text: str) -> str:
    """A stranger's text in one line: it forges no other."""
    return clean(text).replace("\n", " ")


def ways(shown: Shown) -> str:
    """How the program of a group is compiled: ``gradients and dynamic``; empty if it is neither."""
    return " and ".join(name for name in ("gradients", "dynamic") if getattr(shown.group.program, name))


def _told(number: int, shown: Shown) -> list[str]:
    group = shown.group
    met = f"met {group.met} time{'s' * (group.met != 1)}"
    lines = [f"{number}. {_line(group.signature)} ({shown.standing}: {shown.why}; {met})"]
    lines.append(f"   {_line(group.result.message)[:300]}")
    if shown.source:
        lines.append(f"   documented at {shown.source}")
    lines += [f"     # {line}" for line in describe_inputs(group.program)]
    lines += [f"     {line}" for line in render_function(group.program).splitlines()]
    if ways(shown):
        lines.append(f"   with {ways(shown)}")
    if group.script:
        shows = "fails in a fresh process" if group.script_shows else "does not show it by itself; the check does"
        lines.append(f"   the script {shows}: fuzz --repros DIR writes it")
    return lines
