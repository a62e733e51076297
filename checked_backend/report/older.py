"""Report files of older versions, by the names of the present one. Whether they are right is checked afterwards."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

from checked_backend.errors import CheckedBackendError
from checked_backend.findings import EvidenceKey
from checked_backend.report.schema import RENAMED

__all__ = ["upgraded"]

_PHRASES: Mapping[str, str] = MappingProxyType({key.phrase: key.value for key in EvidenceKey})
"""The identifiers of evidence, by the phrases of older versions."""

_RENAMED_EVIDENCE: Mapping[str, str] = MappingProxyType({"judged": EvidenceKey.CHECKED.value})
"""Evidence that version 2 named in another way before its first release; the phrases of version 1 were the same."""

_LAYOUT_REASONS = (EvidenceKey.DEPENDED_ON, EvidenceKey.GRADIENTS_LOST)
"""Evidence of older files that says why a difference in layout matters."""

_SEARCHED = frozenset({EvidenceKey.LOCALIZATION, EvidenceKey.LOCALIZED, EvidenceKey.AT_OPERATOR})
"""Evidence that only a finding has whose operator was looked for."""

_Change = Callable[[dict[str, Any], str], dict[str, Any]]


def upgraded(report: Mapping[str, Any], version: int) -> dict[str, Any]:
    """The members of a report by their present names.

    Args:
        report: The members of the report. They may be anything.
        version: The version of its schema.

    Raises:
        CheckedBackendError: The report has members that its version does not know.
    """
    result = dict(report)
    if version == 1:
        result = _with_findings(result, _from_version_1)
        if isinstance(result.get("coverage"), dict):
            result["coverage"] = _renamed(result["coverage"], "report.coverage")
    return _with_findings(_with_findings(result, _from_phrases), _with_present_evidence)


def _with_findings(report: dict[str, Any], change: _Change) -> dict[str, Any]:
    result = dict(report)
    if "findings" in result:
        result["findings"] = _changed(result["findings"], "report.findings", change)
    coverage = result.get("coverage")
    if isinstance(coverage, dict) and "ignored" in coverage:
        ignored = _changed(coverage["ignored"], "report.coverage.ignored", change)
        result["coverage"] = {**coverage, "ignored": ignored}
    return result


def _changed(findings: object, where: str, change: _Change) -> object:
    if not isinstance(findings, list):
        return findings
    return [
        change(finding, f"{where}[{place}]") if isinstance(finding, dict) else finding
        for place, finding in enumerate(findings)
    ]


def _from_version_1(finding: dict[str, Any], where: str) -> dict[str, Any]:
    noise = finding.get("noise")
    return {**finding, "noise": _renamed(noise, f"{where}.noise")} if isinstance(noise, dict) else finding


def _renamed(members: Mapping[str, Any], where: str) -> dict[str, Any]:
    for key in RENAMED.values():
        if key in members:
            raise CheckedBackendError(f"not a report: {where}: expected only the keys of version 1, got {key!r}")
    return {RENAMED.get(key, key): entry for key, entry in members.items()}


def _from_phrases(finding: dict[str, Any], _where: str) -> dict[str, Any]:
    """A finding whose evidence has phrases. What they say to code becomes members, which such a finding lacks."""
    if "searched" in finding:
        return finding
    phrases = finding.get("evidence", {})
    if not isinstance(phrases, dict):
        return finding
    evidence = {_PHRASES.get(phrase, phrase): value for phrase, value in phrases.items()}
    told = {"evidence": evidence, **_told(evidence)}
    looked_at = finding.get("stage") is not None and EvidenceKey.LEVEL not in evidence
    told["searched"] = looked_at or not _SEARCHED.isdisjoint(evidence)
    told["repro_confirmed"] = EvidenceKey.REPRO not in evidence
    told["workaround_confirmed"] = EvidenceKey.WORKAROUND not in evidence
    given = {name: value for name, value in finding.items() if name != "more_than_layout" or value}
    return {**told, **given, "evidence": evidence}


def _with_present_evidence(finding: dict[str, Any], _where: str) -> dict[str, Any]:
    evidence = finding.get("evidence")
    if not isinstance(evidence, dict):
        return finding
    return {**finding, "evidence": {_RENAMED_EVIDENCE.get(key, key): value for key, value in evidence.items()}}


def _told(evidence: Mapping[str, object]) -> dict[str, Any]:
    members: dict[str, Any] = {}
    fault, explains = evidence.get(EvidenceKey.AT_FAULT), evidence.get(EvidenceKey.EXPLAINS)
    if isinstance(fault, str):
        members["at_fault"] = fault
    if isinstance(explains, list):
        members["explains"] = [one for one in explains if isinstance(one, str)]
    rank = evidence.get(EvidenceKey.RANK)
    if rank is not None:
        members["ranks"] = [str(rank)]
    reasons = [key for key in _LAYOUT_REASONS if evidence.get(key)]
    if reasons:
        reason = evidence[reasons[0]]
        members["more_than_layout"] = reason if isinstance(reason, str) else reasons[0].phrase
    return members
