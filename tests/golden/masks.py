"""What of the golden outputs is different in each run or on each machine, and how it is written in the files."""

from __future__ import annotations

import math
import os
import platform
import re
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path

import torch

import checked_backend as cb

_VERSIONS = "|".join(
    map(
        re.escape,
        # a build for CUDA has a longer version than its distribution
        [
            platform.python_version(),
            cb.__version__,
            torch.__version__,
            *map(version, ("torch", "transformers", "numpy")),
        ],
    )
)
_IS = r'("?: "?|</th><td>| )'
"""What stands between a name and its value: in JSON, Markdown, a table of a page, and a sentence."""

MASKS: tuple[tuple[str, str, str], ...] = (
    (r"\d{8}T\d{6}Z([-_])\d+(-\d+(?=\.json))?", r"TIME\1PID", "names of files have time, process and a number"),
    (r"\b\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(\.\d+)?\+00:00", "TIME", "when it ran"),
    (r"\b20\d\d-\d\d-\d\d\b", "DATE", "when it ran"),
    (r'"(cuda|gpu|triton)": "[^"]*",\s*', "", "what only some machines have"),
    (
        rf"\b([pP]ython|torch|checked[_-]backend|transformers|numpy){_IS}({_VERSIONS})(?![\w.+])",
        r"\1\2VERSION",
        "the versions that run, and no others",
    ),
    (rf'\b(platform){_IS}[A-Za-z]+-[^"<;\n]*', r"\1\2PLATFORM", "the system"),
    (rf'\b(cpu){_IS}[^"<;\n]*\([A-Z0-9_ ]+\)', r"\1\2CPU", "the processor"),
    (rf'\b(compiler){_IS}(g|c|clang)\+\+[^"<;\n]*', r"\1\2COMPILER", "the C++ compiler"),
    (r"(torch VERSION, Python VERSION), [^\n\\]*", r"\1, MACHINE", "the system and the processor, in a script"),
    (r'\b(host)(": "|</th><td>)[^"<]*', r"\1\2HOST", "the machine's name"),
    (r"\b\d+(\.\d+)? (s|min|h)\b", "N s", "how long it took"),
    (r"\b\d+(\.\d+)? a second\b", "N a second", "how fast it was"),
    (r'("seconds": |\btime="|,)\d+\.\d{3,}(?=[,"\n])', r"\1SECONDS", "how long it took, in JSON and JUnit"),
    (r'("process_peak": |,)\d{8,}(?=,)', r"\1BYTES", "memory of a process, in JSON"),
    (r"\b\d+(\.\d+)? MiB", "N MiB", "memory of a process"),
    (
        r"(?s)Traceback \(most recent call last\):.*?(?=\n</error>|</pre>|\",\n|\"\n)",
        "TRACEBACK",
        "lines of the package",
    ),
)
"""Pattern, what stands for it, and why its values say nothing of the package."""

_NUMBER = re.compile(r"\d+(?:\.\d+)?(?:e[-+]?\d+)?")
_STABLE_DIGITS = 5
_TOLERANCE = 1e-4


def mask(text: str, masks: Sequence[tuple[str, str, str]] = MASKS) -> str:
    """A text without what is different in each run: the paths of here, and what the table has."""
    for folder, name in ((os.getcwd(), "FOLDER"), (str(Path(__file__).parents[2]), "ROOT")):
        text = text.replace(folder, name)
    for pattern, replacement, _ in masks:
        text = re.sub(pattern, replacement, text, flags=re.MULTILINE)
    return text


def same(old: str, new: str) -> bool:
    """Whether texts are the same but for the last digits of long numbers, which processors may round otherwise.

    Numbers of fewer than five digits, and what is no number, must be the same.
    """
    if _NUMBER.sub("#", old) != _NUMBER.sub("#", new):
        return False
    return all(map(_close, _NUMBER.findall(old), _NUMBER.findall(new)))


def _close(old: str, new: str) -> bool:
    digits = min(sum(map(str.isdigit, text)) for text in (old, new))
    return old == new or (digits >= _STABLE_DIGITS and math.isclose(float(old), float(new), rel_tol=_TOLERANCE))
