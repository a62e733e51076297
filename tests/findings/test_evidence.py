"""Evidence has stable identifiers, and a phrase for people."""

from __future__ import annotations

import ast
import copy
import json
import re
from pathlib import Path

import pytest

import checked_backend
from checked_backend.findings import EvidenceKey, Finding, Kind

PACKAGE = Path(checked_backend.__file__).parent


def test_identifiers_are_snake_case_and_phrases_are_told_apart() -> None:
    assert all(re.fullmatch(r"[a-z][a-z0-9_]*", key.value) for key in EvidenceKey)
    assert len({key.phrase for key in EvidenceKey}) == len(EvidenceKey)


def test_a_key_is_its_identifier_wherever_it_goes() -> None:
    key = EvidenceKey.TWIN_ERROR
    assert json.loads(json.dumps({key: 1})) == {"float64_twin_error": 1} == {key: 1}
    assert {key: 1}["float64_twin_error"] == 1  # type: ignore[index]
    assert copy.deepcopy(key) is key
    assert f"{key}" == str(key) == "float64_twin_error"


def test_a_key_of_another_release_is_its_own_phrase() -> None:
    assert EvidenceKey.phrase_of("at_fault") == "likely at fault"
    assert EvidenceKey.phrase_of("of another release") == "of another release"


@pytest.mark.more
def test_no_code_names_evidence_by_a_text_of_its_own() -> None:
    """Nor reads evidence back but to show it: what code reads is a field."""
    texts, reads = [], []
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            where = f"{path.relative_to(PACKAGE)}:{getattr(node, 'lineno', 0)}"
            if isinstance(node, ast.keyword) and node.arg == "evidence" and isinstance(node.value, ast.Dict):
                texts += [where for key in node.value.keys if isinstance(key, ast.Constant)]
            if isinstance(node, ast.Subscript) and _is_evidence(node.value):
                texts += [where] if isinstance(node.slice, ast.Constant) else []
                reads += [where] if isinstance(node.ctx, ast.Load) else []
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and _is_evidence(node.func.value):
                texts += [where] if node.args and isinstance(node.args[0], ast.Constant) else []
                reads += [where] if node.func.attr in ("get", "pop") else []
    assert not texts
    assert {read.partition(":")[0] for read in reads} <= {
        "diagnose/bug_report.py",  # shows them
        "diagnose/investigate.py",  # adds to one
        "report/html.py",
        "report/view.py",
    }


def _is_evidence(node: ast.expr) -> bool:
    return "evidence" in (getattr(node, "attr", ""), getattr(node, "id", ""))


def test_a_person_reads_the_phrase_and_a_program_the_identifier() -> None:
    report = checked_backend.Report(
        (Finding(Kind.LOGIC, "output[0]", "wrong", evidence={EvidenceKey.EAGER_REPEATS: "bit for bit"}),),
        checked_backend.Coverage(checked={"outputs": 1}),
    )
    assert "eager repeats itself: bit for bit" in report.to_text(verbose=True)
    assert "eager repeats itself: bit for bit" in report.to_html()
    assert json.loads(report.to_json())["findings"][0]["evidence"] == {"eager_repeats": "bit for bit"}
