"""The types of a report's members, with the limits to which a file of a stranger is held."""

from __future__ import annotations

import math
import numbers
from typing import Annotated, Any, TypeVar

from pydantic import BeforeValidator, FailFast, Field, PlainValidator, Strict, WithJsonSchema

_GREATEST = 2**64  # no count and no element of a tensor is greater
_NONFINITE = ("nan", "inf", "-inf")
_REAL: Any = {"anyOf": [{"type": "number"}, {"enum": [*_NONFINITE]}]}
_PARTS: Any = {"type": "object", "properties": {"re": _REAL, "im": _REAL}, "required": ["re", "im"]}
_T = TypeVar("_T")


def read_real(value: Any) -> Any:
    """A number as JSON has it; what has no digits is a string there."""
    return float(value) if isinstance(value, str) and value in _NONFINITE else value


def read_number(value: Any) -> float | int | bool | complex:
    """An element of a tensor as JSON has it.

    Raises:
        ValueError: It is none.
    """
    if isinstance(value, dict) and set(value) == {"re", "im"}:
        real, imaginary = read_real(value["re"]), read_real(value["im"])
        if _is_real(real) and _is_real(imaginary):
            return complex(real, imaginary)
    number = read_real(value)
    if isinstance(number, bool) or _is_real(number):
        return number  # type: ignore[no-any-return]
    raise ValueError('expected a number, "nan", "inf", "-inf", or an object of re and im')


def _is_real(value: object) -> bool:
    return isinstance(value, float) or (type(value) is int and abs(value) <= _GREATEST)


def encode_number(value: Any) -> Any:
    """A number as JSON has it, the inverse of `read_number`."""
    if isinstance(value, bool):
        return value
    if isinstance(value, numbers.Integral):
        return int(value)
    if isinstance(value, numbers.Real):
        return float(value) if math.isfinite(value) else repr(float(value))
    number = complex(value)
    return {"re": encode_number(number.real), "im": encode_number(number.imag)}


Many = Annotated[tuple[_T, ...], FailFast()]  # a file of millions of errors is to cost no memory for each of them
Flag = Annotated[bool, Strict()]
Count = Annotated[int, Field(strict=True, ge=0, le=_GREATEST)]
Index = Annotated[tuple[Count, ...], Field(max_length=64)]
Real = Annotated[float, Strict(), BeforeValidator(read_real), WithJsonSchema(_REAL)]
Number = Annotated[
    float | int | bool | complex,
    PlainValidator(read_number),
    WithJsonSchema({"anyOf": [_REAL, {"type": "boolean"}, {**_PARTS, "additionalProperties": False}]}),
]
"""The value of one element."""
