"""JSON text to the parts of a report. Every field is checked: a report file may come from a stranger."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import MISSING, fields
from typing import Any, NoReturn, TypeVar

from checked_backend.errors import CheckedBackendError
from checked_backend.findings import (
    Coverage,
    Distribution,
    Finding,
    Kernel,
    Kind,
    Metrics,
    NodeError,
    NoiseScale,
    RegionInfo,
    Severity,
    Skip,
    Verdict,
    WorstElement,
)
from checked_backend.report.schema import (
    GREATEST,
    MAX_DEPTH,
    MOST_BLOCKS,
    MOST_CODE,
    MOST_DIMENSIONS,
    MOST_ELEMENTS,
    MOST_NODES,
    MOST_ULPS,
    SCHEMA,
    VERSION,
)

__all__ = ["check_verdict", "decode", "loads"]

_NONFINITE = ("nan", "inf", "-inf")

_T = TypeVar("_T")
_Decoder = Callable[[object, str], Any]


def loads(text: str) -> object:
    """Parse strict JSON.

    Raises:
        CheckedBackendError: The text is not JSON, uses the constants NaN or Infinity, or is nested too deeply.
    """
    try:
        return json.loads(text, parse_constant=_refuse_constant)
    except (ValueError, TypeError, RecursionError) as error:
        raise CheckedBackendError(f"not a report: not JSON: {error}") from None


def decode(raw: object) -> dict[str, Any]:
    """Check JSON values and return the arguments of a `Report`.

    Raises:
        CheckedBackendError: With the place, what was expected there, and what was found.
    """
    top = _mapping(raw, "report")
    schema = top.get("schema")
    if schema != SCHEMA:
        _fail("report.schema", repr(SCHEMA), schema)
    version = top.get("version")
    if type(version) is not int or version != VERSION:
        _fail("report.version", f"{VERSION}, which this release reads", version)
    given = {key: value for key, value in top.items() if key not in ("schema", "version", "verdict")}
    return _members(given, "report", _REPORT, required=("findings", "coverage"))


def check_verdict(raw: object, verdict: Verdict) -> None:
    """Check that the verdict in the file, if it has one, is the one that follows from its findings and coverage.

    Raises:
        CheckedBackendError: It is not: somebody edited the file.
    """
    said = _mapping(raw, "report").get("verdict", verdict.value)
    if said != verdict.value:
        _fail("report.verdict", f"{verdict.value!r}, which follows from its findings and coverage", said)


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"the constant {name} is not JSON; a report writes it as a string")


def _fail(where: str, expected: str, got: object) -> NoReturn:
    shown = repr(got)
    shown = shown if len(shown) <= 60 else shown[:57] + "..."
    raise CheckedBackendError(f"not a report: {where}: expected {expected}, got {shown}")


def _mapping(value: object, where: str) -> dict[str, Any]:
    return value if isinstance(value, dict) else _fail(where, "an object", value)


def _list(value: object, where: str) -> list[Any]:
    return value if isinstance(value, list) else _fail(where, "a list", value)


def _text(value: object, where: str) -> str:
    return value if isinstance(value, str) else _fail(where, "text", value)


def _code(value: object, where: str) -> str:
    text = _text(value, where)
    if len(text) > MOST_CODE:
        raise CheckedBackendError(f"not a report: {where}: expected at most {MOST_CODE} characters, got {len(text)}")
    return text


def _bool(value: object, where: str) -> bool:
    return value if isinstance(value, bool) else _fail(where, "true or false", value)


def _int(value: object, where: str) -> int:
    return value if type(value) is int and abs(value) <= GREATEST else _fail(where, "an integer", value)


def _count(value: object, where: str) -> int:
    return value if type(value) is int and 0 <= value <= GREATEST else _fail(where, "an integer from 0 up", value)


def _float(value: object, where: str) -> float:
    if type(value) in (int, float) or (isinstance(value, str) and value in _NONFINITE):
        try:
            return float(value)  # type: ignore[arg-type]
        except OverflowError:
            pass
    return _fail(where, 'a number, "nan", "inf" or "-inf"', value)


def _number(value: object, where: str) -> float | int | bool | complex:
    if isinstance(value, bool):
        return value
    if isinstance(value, int):
        return _int(value, where)
    if isinstance(value, dict) and set(value) == {"re", "im"}:
        return complex(_float(value["re"], f"{where}.re"), _float(value["im"], f"{where}.im"))
    return _float(value, where)


def _kind(value: object, where: str) -> Kind:
    known = [kind.value for kind in Kind]
    return Kind(value) if isinstance(value, str) and value in known else _fail(where, f"one of {known}", value)


def _severity(value: object, where: str) -> Severity:
    known = [severity.value for severity in Severity]
    return Severity(value) if isinstance(value, str) and value in known else _fail(where, f"one of {known}", value)


def _any(value: object, where: str, depth: int = 0) -> Any:
    if depth > MAX_DEPTH + 1:  # writing turns deeper evidence into text; one more for {"$float": ...}
        raise CheckedBackendError(f"not a report: {where}: nested more than {MAX_DEPTH} deep")
    if isinstance(value, list):
        return [_any(entry, f"{where}[{position}]", depth + 1) for position, entry in enumerate(value)]
    if not isinstance(value, dict):
        return value
    if set(value) == {"$float"}:
        return _float(value["$float"], f"{where}.$float")
    if set(value) == {"$complex"}:
        return complex(_number(value["$complex"], f"{where}.$complex"))
    return {key.removeprefix("$"): _any(entry, f"{where}.{key}", depth + 1) for key, entry in value.items()}


def _evidence(value: object, where: str) -> dict[str, Any]:
    return {key: _any(entry, f"{where}.{key}") for key, entry in _mapping(value, where).items()}


def _optional(decoder: _Decoder) -> _Decoder:
    return lambda value, where: None if value is None else decoder(value, where)


def _tuple_of(decoder: _Decoder, most: int | None = None) -> _Decoder:
    def decode_all(value: object, where: str) -> tuple[Any, ...]:
        entries = _list(value, where)
        if most is not None and len(entries) > most:
            raise CheckedBackendError(f"not a report: {where}: expected at most {most} entries, got {len(entries)}")
        return tuple(decoder(entry, f"{where}[{place}]") for place, entry in enumerate(entries))

    return decode_all


def _pair(value: object, where: str) -> tuple[int, int]:
    if not isinstance(value, list) or len(value) != 2:
        _fail(where, "two integers", value)
    return _count(value[0], f"{where}[0]"), _count(value[1], f"{where}[1]")


def _mapping_of(decoder: _Decoder) -> _Decoder:
    return lambda value, where: {k: decoder(v, f"{where}[{k!r}]") for k, v in _mapping(value, where).items()}


def _members(
    given: Mapping[str, Any], where: str, table: Mapping[str, _Decoder], required: tuple[str, ...]
) -> dict[str, Any]:
    for key in given:
        if key not in table:
            _fail(where, f"only the keys {sorted(table)}", key)
    for key in required:
        if key not in given:
            raise CheckedBackendError(f"not a report: {where}: {key!r} is missing")
    return {key: table[key](value, f"{where}.{key}") for key, value in given.items()}


def _record(cls: Callable[..., _T], table: Mapping[str, _Decoder]) -> _Decoder:
    required = tuple(
        entry.name
        for entry in fields(cls)  # type: ignore[arg-type]
        if entry.default is MISSING and entry.default_factory is MISSING
    )

    def decoder(value: object, where: str) -> _T:
        return cls(**_members(_mapping(value, where), where, table, required))

    return decoder


_METRICS: Mapping[str, _Decoder] = {
    "total": _count,
    "mismatched": _count,
    "max_abs_diff": _float,
    "max_rel_diff": _float,
    "max_ulp": _optional(_count),
    "rmse": _float,
    "reference_rms": _float,
    "reference_max": _float,
    "nonfinite_mismatched": _count,
    "nan_reference": _count,
    "nan_candidate": _count,
    "inf_reference": _count,
    "inf_candidate": _count,
    "index": _optional(_tuple_of(_int)),
    "reference_value": _optional(_number),
    "candidate_value": _optional(_number),
    "dtype": _text,
}
_NOISE: Mapping[str, _Decoder] = {
    "rms": _float,
    "max": _float,
    "source": _text,
    "detection_limit": _optional(_float),
}
_ELEMENT: Mapping[str, _Decoder] = {
    "index": _tuple_of(_int, MOST_DIMENSIONS),
    "expected": _number,
    "actual": _number,
    "float64": _optional(_number),
}
_DISTRIBUTION: Mapping[str, _Decoder] = {
    "shape": _tuple_of(_count, MOST_DIMENSIONS),
    "matrix": _pair,
    "blocks": _tuple_of(_tuple_of(_float, MOST_BLOCKS), MOST_BLOCKS),
    "ulps": _tuple_of(_count, MOST_ULPS),
    "worst": _tuple_of(_record(WorstElement, _ELEMENT), MOST_ELEMENTS),
}
_NODE: Mapping[str, _Decoder] = {
    "name": _text,
    "op": _text,
    "inputs": _tuple_of(_text, MOST_NODES),
    "error": _float,
    "own": _optional(_float),
    "noise": _optional(_float),
    "source": _text,
}
_KERNEL: Mapping[str, _Decoder] = {
    "name": _text,
    "language": _text,
    "code": _code,
    "lines_left_out": _count,
    "computes": _tuple_of(_text, MOST_NODES),
    "others": _tuple_of(_text, MOST_NODES),
}
_FINDING: Mapping[str, _Decoder] = {
    "kind": _kind,
    "subject": _text,
    "message": _text,
    "detail": _text,
    "region": _text,
    "metrics": _optional(_record(Metrics, _METRICS)),
    "noise": _optional(_record(NoiseScale, _NOISE)),
    "evidence": _evidence,
    "severity": _severity,
    "more_than_layout": _text,
    "inherited": _bool,
    "ignored": _text,
    "script": _optional(_text),
    "at_fault": _text,
    "explains": _tuple_of(_text),
    "ranks": _tuple_of(_text),
    "searched": _bool,
    "repro_confirmed": _bool,
    "workaround_confirmed": _bool,
    "distribution": _optional(_record(Distribution, _DISTRIBUTION)),
    "flow": _tuple_of(_record(NodeError, _NODE), MOST_NODES),
    "kernel": _optional(_record(Kernel, _KERNEL)),
    **dict.fromkeys(
        ("expected", "actual", "graph", "stage", "node", "op", "source", "workaround", "repro"), _optional(_text)
    ),
}
_REGION: Mapping[str, _Decoder] = {
    "name": _text,
    "sources": _tuple_of(_text),
    **dict.fromkeys(("nodes", "calls", "checked_calls", "checked_backwards", "last_checked_call"), _count),
}
_SKIP: Mapping[str, _Decoder] = {"subject": _text, "reason": _text, "matters": _bool, "region": _text}
_finding = _record(Finding, _FINDING)
_COVERAGE: Mapping[str, _Decoder] = {
    "regions": _tuple_of(_record(RegionInfo, _REGION)),
    "checked": _mapping_of(_count),
    "skipped": _tuple_of(_record(Skip, _SKIP)),
    "ignored": _tuple_of(_finding),
    "notes": _tuple_of(_text),
    "detection_limit": _mapping_of(_float),
    "own_precision_limit": _mapping_of(_float),
}
_REPORT: Mapping[str, _Decoder] = {
    "title": _text,
    "findings": _tuple_of(_finding),
    "coverage": _record(Coverage, _COVERAGE),
    "environment": _mapping_of(_text),
}
