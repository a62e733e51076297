"""Reports to JSON text."""

from __future__ import annotations

import json
import math
import numbers
from collections.abc import Mapping
from dataclasses import fields
from typing import TYPE_CHECKING, Any

from checked_backend.findings import (
    Coverage,
    Distribution,
    Finding,
    Kernel,
    Metrics,
    NodeError,
    NoiseScale,
    RegionInfo,
    Skip,
    WorstElement,
)
from checked_backend.report.schema import MAX_DEPTH, SCHEMA, VERSION

if TYPE_CHECKING:
    from checked_backend.report.report import Report

__all__ = ["dumps", "encode"]

_MAX_INT_BITS = 8192  # Python refuses to print or parse integers of more than 4300 digits


def encode(report: Report) -> dict[str, Any]:
    """Return a report as JSON values. ``path`` is left out: where a file lies is not what it says."""
    return {
        "schema": SCHEMA,
        "version": VERSION,
        "verdict": report.verdict.value,
        "title": str(report.title),
        "findings": [_encode_finding(finding) for finding in report.findings],
        "coverage": _encode_coverage(report.coverage),
        "environment": {str(key): str(value) for key, value in report.environment.items()},
    }


def dumps(value: Mapping[str, Any]) -> str:
    """Return JSON values as strict JSON text in ASCII, so that no reader's encoding can break it."""
    return json.dumps(value, indent=2, allow_nan=False, ensure_ascii=True)


def _encode_finding(finding: Finding) -> dict[str, Any]:
    out: dict[str, Any] = {entry.name: getattr(finding, entry.name) for entry in fields(finding)}
    out["kind"] = finding.kind.value
    out["metrics"] = None if finding.metrics is None else _encode_metrics(finding.metrics)
    out["noise"] = None if finding.noise is None else _encode_noise(finding.noise)
    out["evidence"] = {str(key): _encode_any(value, 0) for key, value in finding.evidence.items()}
    out["distribution"] = None if finding.distribution is None else _encode_distribution(finding.distribution)
    out["flow"] = [_encode_node(node) for node in finding.flow]
    out["kernel"] = None if finding.kernel is None else _encode_kernel(finding.kernel)
    out["explains"] = [str(subject) for subject in finding.explains]
    out["ranks"] = [str(rank) for rank in finding.ranks]
    return {key: str(value) if isinstance(value, str) else value for key, value in out.items()}


def _encode_metrics(metrics: Metrics) -> dict[str, Any]:
    out: dict[str, Any] = {}
    for entry in fields(metrics):
        value = getattr(metrics, entry.name)
        if value is None or isinstance(value, tuple):
            out[entry.name] = None if value is None else [int(axis) for axis in value]
        elif isinstance(value, str):
            out[entry.name] = str(value)
        else:
            out[entry.name] = _encode_number(value)
    return out


def _encode_distribution(distribution: Distribution) -> dict[str, Any]:
    return {
        "shape": [int(size) for size in distribution.shape],
        "matrix": [int(size) for size in distribution.matrix],
        "blocks": [[_encode_float(float(value)) for value in row] for row in distribution.blocks],
        "ulps": [int(count) for count in distribution.ulps],
        "worst": [_encode_element(element) for element in distribution.worst],
    }


def _encode_element(element: WorstElement) -> dict[str, Any]:
    return {
        "index": [int(axis) for axis in element.index],
        "expected": _encode_number(element.expected),
        "actual": _encode_number(element.actual),
        "float64": None if element.float64 is None else _encode_number(element.float64),
    }


def _encode_node(node: NodeError) -> dict[str, Any]:
    return {
        "name": str(node.name),
        "op": str(node.op),
        "inputs": [str(name) for name in node.inputs],
        "error": _encode_float(float(node.error)),
        "own": None if node.own is None else _encode_float(float(node.own)),
        "noise": None if node.noise is None else _encode_float(float(node.noise)),
        "source": str(node.source),
    }


def _encode_kernel(kernel: Kernel) -> dict[str, Any]:
    return {
        "name": str(kernel.name),
        "language": str(kernel.language),
        "code": str(kernel.code),
        "lines_left_out": int(kernel.lines_left_out),
        "computes": [str(name) for name in kernel.computes],
        "others": [str(name) for name in kernel.others],
    }


def _encode_noise(noise: NoiseScale) -> dict[str, Any]:
    limit = noise.detection_limit
    return {
        "rms": _encode_float(float(noise.rms)),
        "max": _encode_float(float(noise.max)),
        "source": str(noise.source),
        "detection_limit": None if limit is None else _encode_float(float(limit)),
    }


def _encode_coverage(coverage: Coverage) -> dict[str, Any]:
    return {
        "regions": [_encode_plain(region) for region in coverage.regions],
        "checked": {str(key): int(count) for key, count in coverage.checked.items()},
        "skipped": [_encode_plain(skip) for skip in coverage.skipped],
        "ignored": [_encode_finding(finding) for finding in coverage.ignored],
        "notes": [str(note) for note in coverage.notes],
        "detection_limit": {str(key): _encode_float(float(v)) for key, v in coverage.detection_limit.items()},
        "own_precision_limit": {str(key): _encode_float(float(v)) for key, v in coverage.own_precision_limit.items()},
    }


def _encode_plain(record: RegionInfo | Skip) -> dict[str, Any]:
    values = {entry.name: getattr(record, entry.name) for entry in fields(record)}
    return {name: list(value) if isinstance(value, tuple) else value for name, value in values.items()}


def _encode_float(value: float) -> float | str:
    return value if math.isfinite(value) else repr(value)


def _encode_number(value: Any) -> Any:
    if isinstance(value, bool):
        return value
    if isinstance(value, numbers.Integral):
        return int(value)
    if isinstance(value, numbers.Real):
        return _encode_float(float(value))
    number = complex(value)
    return {"re": _encode_float(number.real), "im": _encode_float(number.imag)}


def _encode_any(value: Any, depth: int) -> Any:
    """Encode evidence, which may be anything. What JSON has no word for becomes text; nothing raises."""
    if value is None or isinstance(value, bool | str):
        return value if not isinstance(value, str) else str(value)
    if depth >= MAX_DEPTH:
        return _describe(value)
    if isinstance(value, numbers.Integral):
        return int(value) if int(value).bit_length() <= _MAX_INT_BITS else hex(int(value))
    if isinstance(value, numbers.Real):
        number = float(value)
        return number if math.isfinite(number) else {"$float": repr(number)}
    if isinstance(value, numbers.Complex):
        return {"$complex": _encode_number(value)}
    if isinstance(value, Mapping):
        # A key of the user's own that looks like one of ours gets one more "$", which reading takes off again.
        keyed = ((str(key), entry) for key, entry in value.items())
        return {("$" + key if key.startswith("$") else key): _encode_any(entry, depth + 1) for key, entry in keyed}
    if isinstance(value, list | tuple):
        return [_encode_any(entry, depth + 1) for entry in value]
    if isinstance(value, set | frozenset):
        return sorted(_describe(entry) for entry in value)
    return _describe(value)


def _describe(value: object) -> str:
    try:
        return str(value)
    except Exception:  # a user's __str__ must not cost the report
        return f"<{type(value).__name__}>"
