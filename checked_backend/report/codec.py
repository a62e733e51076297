"""Reports to JSON text and back. The text may come from a stranger: it is data only, and every member is checked."""

from __future__ import annotations

import json
import reprlib
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, is_dataclass
from functools import cache
from typing import TYPE_CHECKING, Any, Literal, NoReturn, TypeVar

from pydantic import ConfigDict, TypeAdapter, ValidationError
from pydantic.json_schema import GenerateJsonSchema

from checked_backend.errors import CheckedBackendError
from checked_backend.findings import Coverage, Finding, Verdict
from checked_backend.findings.evidence import encode_evidence
from checked_backend.findings.values import Many, encode_number

if TYPE_CHECKING:
    from checked_backend.report.report import Report

_T = TypeVar("_T")
_MOST_MEMBERS = 2**17
_SAID = {
    "tuple_type": "expected a list",
    "dict_type": "expected an object",
    "dataclass_type": "expected an object",
    "missing": "it is missing",
    "unexpected_keyword_argument": "there is no such member",
}
"""Words of JSON, where pydantic has those of Python."""


@dataclass(frozen=True, slots=True)
class ReportFile:
    """The members of a report's file: what a check found, and what it did and did not look at."""

    __pydantic_config__ = ConfigDict(extra="forbid")  # here, and in all that is in it

    schema: Literal["checked_backend.report"]
    version: Literal[2]
    findings: Many[Finding]
    coverage: Coverage
    verdict: Verdict | None = None
    title: str = ""
    environment: Mapping[str, str] = field(default_factory=dict)


def encode(report: Report) -> dict[str, Any]:
    """Return a report as JSON values. ``path`` is left out: where a file lies is not what it says."""
    return {
        "schema": "checked_backend.report",
        "version": 2,
        "verdict": report.verdict.value,
        "title": str(report.title),
        "findings": json_values(report.findings),
        "coverage": json_values(report.coverage),
        "environment": json_values(report.environment),
    }


def json_values(value: Any) -> Any:
    """What a report has in it, or another dataclass of such members, as JSON values."""
    if value is None:
        return None
    if isinstance(value, str):
        return str(value)
    if isinstance(value, list | tuple):
        return [json_values(entry) for entry in value]
    if isinstance(value, Mapping):
        return {str(key): json_values(entry) for key, entry in value.items()}
    if is_dataclass(value):
        members = ((entry.name, getattr(value, entry.name)) for entry in fields(value))
        return {
            name: {str(key): encode_evidence(value) for key, value in entry.items()}
            if name == "evidence"
            else json_values(entry)
            for name, entry in members
        }
    return encode_number(value)


def dumps(value: Mapping[str, Any]) -> str:
    """Return JSON values as strict JSON text in ASCII, so that no reader's encoding can break it."""
    return json.dumps(value, indent=2, allow_nan=False, ensure_ascii=True)


def read_file(text: str) -> ReportFile:
    """Read what a file says, of strict JSON.

    Raises:
        CheckedBackendError: With the place, what was expected there, and what was found.
    """
    try:
        raw = json.loads(text, parse_constant=_refuse_constant, object_pairs_hook=_bounded)
    except (ValueError, TypeError, RecursionError) as error:
        raise CheckedBackendError(f"not a report: not JSON: {error}") from None
    try:
        return validated(_adapter(), raw, "report")
    except CheckedBackendError as error:
        raise CheckedBackendError(f"not a report: {error}") from None


def validated(adapter: TypeAdapter[_T], raw: object, name: str) -> _T:
    """Make an object of JSON values, called by its name where it is refused; it raises as `read_file` does."""
    try:
        return adapter.validate_python(raw)
    except ValidationError as errors:
        error = errors.errors(include_url=False)[0]
    except (RecursionError, OverflowError) as problem:
        raise CheckedBackendError(f"{name}: {problem}") from None
    place = name + "".join(f".{part}" if str(part).isidentifier() else f"[{part!r}]" for part in error["loc"])
    said = error["msg"].removeprefix("Value error, ").replace("Input should be", "expected")
    got = "" if error["type"] == "missing" else f", got {reprlib.repr(error['input'])}"
    raise CheckedBackendError(f"{place}: {_SAID.get(error['type'], said)}{got}")


def json_schema() -> dict[str, Any]:
    """The schema (JSON Schema 2020-12) of what `Report.to_json` writes."""
    schema = _adapter().json_schema()
    for part in schema["$defs"].values():
        if "properties" in part:
            part["additionalProperties"] = False  # pydantic 2.11 and before say it of the outermost alone
    return {"$schema": GenerateJsonSchema.schema_dialect, **schema}


@cache
def _adapter() -> TypeAdapter[ReportFile]:
    return TypeAdapter(ReportFile)


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"the constant {name} is not JSON; a report writes it as a string")


def _bounded(members: list[tuple[str, Any]]) -> dict[str, Any]:
    if len(members) > _MOST_MEMBERS:  # each that is wrong costs a kilobyte
        raise CheckedBackendError(f"not a report: an object has {len(members)} members")
    return dict(members)
