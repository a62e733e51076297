"""A group as an issue to paste upstream, in Markdown."""

from __future__ import annotations

import re
from collections.abc import Mapping
from types import MappingProxyType

from checked_backend.fuzz.groups import Group
from checked_backend.fuzz.text import describe_inputs, render_function
from checked_backend.report.clean import clean

__all__ = ["render_issue"]

_DIFFERS: Mapping[str, str] = MappingProxyType(
    {
        "crash": "raises or crashes, eager does not",
        "structure": "returns other metadata than eager",
    }
)
_FENCES = re.compile(r"`+")


def render_issue(group: Group, settings: Mapping[str, str]) -> str:
    """The issue: what differs, the program, the script, versions and hardware.

    Args:
        settings: What the results depend on.
    """
    compiler = settings.get("compiler", "?")
    inputs = "\n".join(f"# {line}" for line in describe_inputs(group.program))
    code = f"{inputs}\n{render_function(group.program)}"
    what = _DIFFERS.get(group.kind, "gives other results than eager")
    parts = [
        "# " + _line(f"torch.compile(backend={compiler!r}): {group.op} {what}") + "\n",
        f"{_fenced(group.result.message, 'text')}\n",
        f"{_fenced(code)}\n",
    ]
    if group.script:
        shown = "exits 1 while the bug is there" if group.script_shows else "shows it to the eye alone"
        parts.append(f"Script ({shown}):\n\n{_fenced(group.script.rstrip())}\n")
    versions = "\n".join(f"- {_line(name)}: {_line(value)}" for name, value in settings.items() if name != "choices")
    parts.append(f"Versions:\n\n{versions}\n")
    return "\n".join(parts)


def _line(text: str) -> str:
    return " ".join(clean(text).split())


def _fenced(code: str, language: str = "python") -> str:
    """A block of code, whose fence is longer than any in it."""
    longest = max((len(found) for found in _FENCES.findall(code)), default=0)
    fence = "`" * max(3, longest + 1)
    return f"{fence}{language}\n{clean(code)}\n{fence}"
