"""Text that is safe to show: a name from a stranger's file must not be able to rewrite what a person reads."""

from __future__ import annotations

import re
from collections.abc import Sequence

# Terminal escapes, other control characters, line separators, halves of surrogate pairs and bidirectional overrides.
_UNSAFE = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")
_ENDS_DOCSTRING = re.compile('"(?="")|"$')
_FENCES = re.compile("`+")


def clean(text: str) -> str:
    """Return text with every character that could steer a terminal or a browser's text direction written out."""
    text = text.replace("\r\n", "\n").expandtabs(4)
    return _UNSAFE.sub(lambda match: match[0].encode("unicode_escape", "surrogatepass").decode("ascii"), text)


def in_docstring(text: str) -> str:
    """Text that can stand in one line of a docstring, or of a comment, of code that is written down."""
    return _ENDS_DOCSTRING.sub("'", clean(text).replace("\n", " ").replace("\\", "/"))


def first_line(text: str) -> str:
    """The first line of a text, safe to show."""
    return clean(text).partition("\n")[0]


def plural(count: int, noun: str) -> str:
    """``1 call``, ``2 calls``."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def fenced(code: str, language: str = "") -> str:
    """A block of code in Markdown, whose fence is longer than any in it."""
    fence = "`" * max(3, 1 + max(map(len, _FENCES.findall(code)), default=0))
    return f"{fence}{language}\n{code}\n{fence}"


def listed(parts: Sequence[str]) -> str:
    """``one``, ``one and two``, ``one, two and three``."""
    return " and ".join(part for part in (", ".join(parts[:-1]), *parts[-1:]) if part)


def percent(share: float) -> str:
    """``0.56%``, ``429%``: two digits, and no exponent where a person can read the number."""
    hundredths = 100 * share
    return f"{hundredths:.0f}%" if 99.5 <= hundredths < 1e6 else f"{hundredths:.2g}%"
