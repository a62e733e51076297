"""The JSON schema of a report, made of the same limits and words that reading a report holds it to.

The text of it is beside this file, in ``report.schema.json``, for programs that read reports.
"""

from __future__ import annotations

from typing import Any

from checked_backend.findings import DETAILS, EvidenceKey, Kind, Severity, Verdict
from checked_backend.report.schema import (
    GREATEST,
    MOST_BLOCKS,
    MOST_CODE,
    MOST_DIMENSIONS,
    MOST_ELEMENTS,
    MOST_NODES,
    MOST_ULPS,
    SCHEMA,
    VERSION,
)

__all__ = ["json_schema"]

_TEXT: dict[str, Any] = {"type": "string"}
_BOOL: dict[str, Any] = {"type": "boolean"}
_COUNT: dict[str, Any] = {"type": "integer", "minimum": 0, "maximum": GREATEST}
_FLOAT: dict[str, Any] = {"$ref": "#/$defs/float"}
_NUMBER: dict[str, Any] = {"$ref": "#/$defs/number"}


def json_schema() -> dict[str, Any]:
    """The schema (JSON Schema 2020-12) of what `Report.to_json` writes."""
    members = {
        "schema": {"const": SCHEMA},
        "version": {"const": VERSION},
        "verdict": {"enum": [verdict.value for verdict in Verdict]},
        "title": _TEXT,
        "findings": _list_of(_ref("finding")),
        "coverage": _ref("coverage"),
        "environment": _map_of(_TEXT),
    }
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": f"{SCHEMA}, version {VERSION}",
        "description": "What a check found, and what it did and did not look at.",
        **_object(members, ["schema", "version", "findings", "coverage"]),
        "$defs": {
            "float": {"anyOf": [{"type": "number"}, {"enum": ["nan", "inf", "-inf"]}]},
            "number": {"anyOf": [_FLOAT, _BOOL, _object({"re": _FLOAT, "im": _FLOAT}, ["re", "im"])]},
            "finding": _finding(),
            "metrics": _metrics(),
            "noise": _object(
                {"rms": _FLOAT, "max": _FLOAT, "source": _TEXT, "detection_limit": _or_null(_FLOAT)},
                ["rms", "max", "source"],
            ),
            "evidence": _evidence(),
            "distribution": _distribution(),
            "node": _node(),
            "kernel": _kernel(),
            "coverage": _coverage(),
        },
    }


def _finding() -> dict[str, Any]:
    names = ("expected", "actual", "graph", "stage", "node", "op", "source", "workaround", "repro", "script")
    members = {
        "kind": {"enum": [kind.value for kind in Kind]},
        "subject": _TEXT,
        "message": _TEXT,
        "detail": {"type": "string", "examples": sorted(DETAILS)},
        "region": _TEXT,
        "metrics": _or_null(_ref("metrics")),
        "noise": _or_null(_ref("noise")),
        "evidence": _ref("evidence"),
        "severity": {"enum": [severity.value for severity in Severity]},
        **dict.fromkeys(names, _or_null(_TEXT)),
        **dict.fromkeys(("more_than_layout", "ignored", "at_fault"), _TEXT),
        **dict.fromkeys(("inherited", "searched", "repro_confirmed", "workaround_confirmed"), _BOOL),
        **dict.fromkeys(("explains", "ranks"), _list_of(_TEXT)),
        "distribution": _or_null(_ref("distribution")),
        "flow": _list_of(_ref("node"), MOST_NODES),
        "kernel": _or_null(_ref("kernel")),
    }
    return _object(members, ["kind", "subject", "message"])


def _evidence() -> dict[str, Any]:
    """Evidence may be anything; its keys are stable, and a later release may add some."""
    return {"type": "object", "properties": {key.value: {"description": key.phrase} for key in EvidenceKey}}


def _metrics() -> dict[str, Any]:
    counts = ("total", "mismatched", "nonfinite_mismatched", "nan_reference", "nan_candidate")
    floats = ("max_abs_diff", "max_rel_diff", "rmse", "reference_rms", "reference_max")
    members = {
        **dict.fromkeys((*counts, "inf_reference", "inf_candidate"), _COUNT),
        **dict.fromkeys(floats, _FLOAT),
        "max_ulp": _or_null(_COUNT),
        "index": _or_null(_list_of({"type": "integer"})),
        "reference_value": _or_null(_NUMBER),
        "candidate_value": _or_null(_NUMBER),
        "dtype": _TEXT,
    }
    return _object(members, [name for name in members if name != "dtype"])


def _distribution() -> dict[str, Any]:
    place = _list_of({"type": "integer"}, MOST_DIMENSIONS)
    element = {"index": place, "expected": _NUMBER, "actual": _NUMBER, "float64": _or_null(_NUMBER)}
    members = {
        "shape": _list_of(_COUNT, MOST_DIMENSIONS),
        "matrix": {**_list_of(_COUNT, 2), "minItems": 2},
        "blocks": _list_of(_list_of(_FLOAT, MOST_BLOCKS), MOST_BLOCKS),
        "ulps": _list_of(_COUNT, MOST_ULPS),
        "worst": _list_of(_object(element, ["index", "expected", "actual"]), MOST_ELEMENTS),
    }
    return _object(members, ["shape", "matrix", "blocks"])


def _node() -> dict[str, Any]:
    members = {
        **dict.fromkeys(("name", "op", "source"), _TEXT),
        "inputs": _list_of(_TEXT, MOST_NODES),
        "error": _FLOAT,
        "own": _or_null(_FLOAT),
        "noise": _or_null(_FLOAT),
    }
    return _object(members, ["name", "op", "inputs", "error"])


def _kernel() -> dict[str, Any]:
    members = {
        **dict.fromkeys(("name", "language"), _TEXT),
        "code": {"type": "string", "maxLength": MOST_CODE},
        "lines_left_out": _COUNT,
        **dict.fromkeys(("computes", "others"), _list_of(_TEXT, MOST_NODES)),
    }
    return _object(members, ["name", "language", "code"])


def _coverage() -> dict[str, Any]:
    counts = ("nodes", "calls", "checked_calls", "checked_backwards", "last_checked_call")
    region = {"name": _TEXT, "sources": _list_of(_TEXT), **dict.fromkeys(counts, _COUNT)}
    skip = {"subject": _TEXT, "reason": _TEXT, "matters": _BOOL, "region": _TEXT}
    return _object(
        {
            "regions": _list_of(_object(region, ["name"])),
            "checked": _map_of(_COUNT),
            "skipped": _list_of(_object(skip, ["subject", "reason"])),
            "ignored": _list_of(_ref("finding")),
            "notes": _list_of(_TEXT),
            "detection_limit": _map_of(_FLOAT),
            "own_precision_limit": _map_of(_FLOAT),
        },
        [],
    )


def _object(members: dict[str, Any], required: list[str]) -> dict[str, Any]:
    return {"type": "object", "properties": members, "required": required, "additionalProperties": False}


def _list_of(entry: dict[str, Any], most: int | None = None) -> dict[str, Any]:
    return {"type": "array", "items": entry, **({} if most is None else {"maxItems": most})}


def _map_of(entry: dict[str, Any]) -> dict[str, Any]:
    return {"type": "object", "additionalProperties": entry}


def _or_null(entry: dict[str, Any]) -> dict[str, Any]:
    return {"anyOf": [entry, {"type": "null"}]}


def _ref(name: str) -> dict[str, Any]:
    return {"$ref": f"#/$defs/{name}"}
