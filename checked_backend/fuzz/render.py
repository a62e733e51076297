"""What fuzzing found, as text, as JSON, and as issues to paste."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from checked_backend.findings import Verdict
from checked_backend.fuzz.database import Corpus
from checked_backend.fuzz.groups import Group
from checked_backend.fuzz.program import encode_program
from checked_backend.fuzz.text import describe_inputs, render_function
from checked_backend.report.clean import clean

__all__ = ["render_issue", "render_json", "render_text", "standing", "verdict_of"]

_MEANING = {
    "new": "wrong, and not known before",
    "known": "wrong, and known before",
    "documented": "a documented difference of compiled programs",
    "unconfirmed": "did not show again in a fresh process",
}


def standing(group: Group, known: set[str]) -> str:
    """``new``, ``known``, ``documented`` or ``unconfirmed``.

    Args:
        group: The group.
        known: Signatures of groups that were known before.
    """
    if group.reason:
        return "documented"
    if not group.confirmed:
        return "unconfirmed"
    return "known" if group.signature in known else "new"


def verdict_of(corpus: Corpus, known: set[str]) -> Verdict:
    """*Fail* if there is a new group. *Inconclusive* if no program was checked."""
    if any(standing(group, known) == "new" for group in corpus.groups()):
        return Verdict.FAIL
    return Verdict.PASS if corpus.totals().checked else Verdict.INCONCLUSIVE


def render_text(corpus: Corpus, known: set[str]) -> str:
    """The report as text: what was checked, then each group with its program."""
    totals, groups = corpus.totals(), corpus.groups()
    counts: dict[str, int] = {}
    for group in groups:
        counts[standing(group, known)] = counts.get(standing(group, known), 0) + 1
    settings = corpus.settings()
    told = ", ".join(f"{counts[word]} {word}" for word in _MEANING if word in counts) or "none"
    lines = [
        f"{verdict_of(corpus, known).value.upper()}: {settings.get('compiler', '?')} on torch"
        f" {settings.get('torch', '?')}: groups: {told}",
        f"{totals.checked} programs ({', '.join(f'{n} {status}' for status, n in sorted(totals.statuses.items()))}),"
        f" {totals.compiled} of them compiled; {totals.ops} operations, {totals.pairs} with dtypes",
    ]
    waiting = len(corpus.failures())
    if waiting:
        lines.append(f"{waiting} failures are not confirmed yet: run again with the same --db")
    if corpus.unconfirmed():
        lines.append(f"{corpus.unconfirmed()} failures did not show again in a fresh process")
    for number, group in enumerate(groups, 1):
        lines += ["", *_told(number, group, known)]
    undecided = corpus.inconclusive()
    if undecided:
        lines += ["", f"{len(undecided)} programs without a verdict, for example:"]
        lines += [f"  {name}: {clean(reason)[:200]}" for name, reason in undecided[:5]]
    return "\n".join(lines)


def _told(number: int, group: Group, known: set[str]) -> list[str]:
    word = standing(group, known)
    met = f"met {group.met} time{'s' * (group.met != 1)}"
    lines = [f"{number}. {clean(group.signature)} ({word}: {group.reason or _MEANING[word]}; {met})"]
    lines.append(f"   {clean(group.result.message)[:300]}")
    lines += [f"     # {line}" for line in describe_inputs(group.program)]
    lines += [f"     {line}" for line in render_function(group.program).splitlines()]
    how = [name for name in ("gradients", "dynamic") if getattr(group.program, name)]
    if how:
        lines.append(f"   with {' and '.join(how)}")
    if group.script:
        shows = "fails in a fresh process" if group.script_shows else "does not show it by itself; the check does"
        lines.append(f"   the script {shows}: fuzz --repros DIR writes it")
    return lines


def render_json(corpus: Corpus, known: set[str]) -> str:
    """The report as JSON."""
    totals = corpus.totals()
    raw = {
        "verdict": verdict_of(corpus, known).value,
        "settings": corpus.settings(),
        "programs": dict(totals.statuses),
        "compiled": totals.compiled,
        "operations": totals.ops,
        "operations_with_dtypes": totals.pairs,
        "waiting": len(corpus.failures()),
        "not_shown_again": corpus.unconfirmed(),
        "groups": [_as_data(group, known) for group in corpus.groups()],
    }
    return json.dumps(raw, indent=2, sort_keys=True)


def _as_data(group: Group, known: set[str]) -> Mapping[str, Any]:
    result = asdict(group.result)
    return {
        "signature": group.signature,
        "standing": standing(group, known),
        "kind": group.kind,
        "detail": group.detail,
        "stage": group.stage,
        "op": group.op,
        "met": group.met,
        "message": group.result.message,
        "status": result["status"].value,
        "source": render_function(group.program),
        "inputs": describe_inputs(group.program),
        "program": json.loads(encode_program(group.program)),
        "script": group.script,
        "script_shows": group.script_shows,
    }


def render_issue(group: Group, settings: Mapping[str, str]) -> str:
    """A group as an issue to paste upstream, in Markdown."""
    compiler = settings.get("compiler", "?")
    what = {"crash": "raises or crashes, eager does not", "structure": "returns other metadata than eager"}.get(
        group.kind, "gives other results than eager"
    )
    inputs = "\n".join(f"# {line}" for line in describe_inputs(group.program))
    parts = [
        f"# torch.compile(backend={compiler!r}): {group.op} {what}\n",
        f"{group.result.message}\n",
        f"```python\n{inputs}\n{render_function(group.program)}\n```\n",
    ]
    if group.script:
        shown = "exits 1 while the bug is there" if group.script_shows else "shows it to the eye alone"
        parts.append(f"Script ({shown}):\n\n```python\n{group.script.rstrip()}\n```\n")
    versions = "\n".join(f"- {name}: {value}" for name, value in settings.items() if name != "choices")
    parts.append(f"Versions:\n\n{versions}\n")
    return "\n".join(parts)
