"""A root cause in one line, the operator first, as linters say it."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from checked_backend.findings import Finding
from checked_backend.findings.paths import is_in_library, shown_path
from checked_backend.report.causes import OF_VALUES, Cause, place_of
from checked_backend.report.clean import first_line, plural
from checked_backend.report.operator_names import operator_name
from checked_backend.report.words import named, said_of, stage_words
from checked_backend.subjects import SubjectKind

_SOURCE = re.compile(
    r"^(?P<file>[^\n]+?):(?P<line>[0-9]{1,9})(?: in (?P<function>[^\s:]+))?(?:: (?P<code>.*))?$", re.DOTALL
)
_LONGEST_CODE = 80
_LONGEST = 100


class Line(NamedTuple):
    """A line of the user's program."""

    file: str
    number: int
    function: str
    code: str

    @property
    def place(self) -> str:
        """``model.py:52``."""
        return f"{self.file}:{self.number}"


def operator_words(cause: Cause) -> str:
    """The operator of a cause as people write it, or its gradient: ``the gradient of convolution``.

    In Dynamo's graph an operator and its gradient are one node.
    """
    main = cause.main
    are_gradients = main.graph == "dynamo" and all(one.about.kind is SubjectKind.GRADIENT for one in cause.findings)
    return f"{'the gradient of ' if are_gradients else ''}{operator_name(main.op or '')}"


def user_line(source: str | None) -> Line | None:
    """Read a finding's source: ``model.py:41 in forward: x = torch.relu(x)``."""
    found = _SOURCE.match(source or "")
    if found is None:
        return None
    file, number, function, code = found.groups(default="")
    return Line(file, int(number), function, code)


def is_line_blamed(finding: Finding) -> bool:
    """Whether a line is at fault: that of wrong values is where they were made, until an operator is named."""
    return finding.op is not None or finding.kind not in OF_VALUES


def line_label(finding: Finding) -> str:
    """What the source line of a finding is called."""
    if not is_line_blamed(finding):
        return "made at"
    return "library" if is_in_library(finding.source) else "your line"


def one_line(cause: Cause, *, remedies: bool = True) -> str:
    """``model.py:52: relu is wrong (compiled code): repro repro.py, workaround torch.compiler.disable``."""
    said = f"{_place(cause)}{_said(cause)}"
    told = [*_remedies(cause.findings)] if remedies else []
    whole = f"{said}: {', '.join(told)}" if told else said
    if len(whole) > _LONGEST and told and told[0].startswith("repro "):
        whole = f"{said}: repro{' and workaround' * (len(told) > 1)} in the report"
    return first_line(whole)


def annotation(cause: Cause) -> str:
    """The same as a command that GitHub Actions shows at the line in the pull request.

    Everything that could end the command, or begin another, is written as GitHub asks for it.
    """
    main = cause.main
    line = user_line(main.source)
    blamed = "" if line is None or is_line_blamed(main) else " (it is made here; the operator is not known)"
    level = "warning" if cause.is_warning else "error"
    where = f"file={_property(_in_repository(line.file))},line={line.number}," if line is not None else ""
    text = f"{one_line(cause)}{blamed}".replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")
    return f"::{level} {where}title={_property(f'checked_backend: {main.kind.value}')}::{text}"


def _in_repository(file: str) -> str:
    """The file as GitHub wants it, from the top of the repository, where the program ran in a folder of that."""
    top = os.environ.get("GITHUB_WORKSPACE", "")
    file = os.path.abspath(file)
    inside = top and file.startswith(os.path.join(os.path.abspath(top), ""))
    return os.path.relpath(file, top if inside else os.curdir)


def _property(text: str) -> str:
    for character, written in (("%", "%25"), ("\r", "%0D"), ("\n", "%0A"), (":", "%3A"), (",", "%2C")):
        text = text.replace(character, written)
    return text


def _place(cause: Cause) -> str:
    main = cause.main
    line = user_line(main.caller or main.source) if is_line_blamed(main) else None
    if line is not None:
        return f"{line.place}: "
    return f"{place_of(main)}: " if main.region else ""


def _said(cause: Cause) -> str:
    main = cause.main
    stage = f" ({words})" if (words := stage_words(main)) else ""
    if main.op is not None:
        return f"{operator_words(cause)} {said_of(main)}{stage}"
    subjects = cause.subjects
    more = f" and {plural(len(subjects) - 1, 'other result')}" if len(subjects) > 1 else ""
    where = f" in {cause.regions} regions" if cause.regions > 1 and not cause.is_named else ""
    return f"{named(main.subject)}{more} {said_of(main, len(subjects))}{where}{stage}"


def _remedies(findings: Sequence[Finding]) -> Iterator[str]:
    repro, confirmed = next(((one.repro, one.repro_confirmed) for one in findings if one.repro), (None, False))
    if repro is not None:
        yield f"repro {shown_path(repro)}" if confirmed else "no confirmed repro"
    workaround = next((finding.workaround for finding in findings if finding.workaround), None)
    if workaround is not None:
        lines = [line.strip() for line in workaround.splitlines() if line.strip() and not line.startswith("#")]
        short = len(lines) == 1 and len(lines[0]) <= _LONGEST_CODE
        yield f"workaround {lines[0]}" if short else "workaround in the report"
