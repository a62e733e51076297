"""The names of evidence: a stable identifier for JSON, and a phrase for people.

A report file has the identifiers. They are part of its schema: one that is renamed makes a new version of it.
"""

from __future__ import annotations

import math
import numbers
from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import AfterValidator, WithJsonSchema

from checked_backend.findings.kinds import Word
from checked_backend.findings.values import encode_number, read_number, read_real

_MAX_DEPTH = 40  # deeper nesting is not something a person wrote down
_MAX_INT_BITS = 8192  # Python refuses to print or parse integers of more than 4300 digits


class EvidenceKey(Word):
    """A piece of evidence. Evidence is for people; what code reads is a field of the finding.

    Attributes:
        phrase: The phrase for people.
    """

    phrase: str

    def __new__(cls, identifier: str, phrase: str) -> EvidenceKey:
        """Make a key of its identifier and its phrase."""
        key = str.__new__(cls, identifier)
        key._value_ = identifier
        key.phrase = phrase
        return key

    # the verdict's control runs
    EAGER_REPEATS = "eager_repeats", "eager repeats itself"
    EAGER_SPREAD = "eager_spread", "eager's own spread between two runs, rms"
    EAGER_SPREAD_OF_FLOAT64 = "eager_spread_of_float64", "eager's own spread between two runs in float64, rms"
    NOISE_IN_FLOAT64 = "noise_in_float64", "the same in float64"
    EAGER_DISTANCE = "eager_distance", "eager's distance from float64, rms"
    CANDIDATE_DISTANCE = "candidate_distance", "candidate's distance from float64, rms"
    TWIN = "float64_twin", "float64 twin"
    TWIN_ERROR = "float64_twin_error", "float64 twin differs from float64 reference, relative"
    DIFFERENCE_REPEATS = "difference_repeats", "the difference repeats"
    ELEMENTS_OUTSIDE_NOISE = "elements_outside_noise", "elements outside of the noise"
    OTHER_THREADS = "other_threads", "another thread"
    FLOAT64_MISSING = "float64_missing", "high-precision reference could not run"
    TWIN_MISSING = "float64_twin_missing", "float64 twin could not run"
    MONTE_CARLO_MISSING = "monte_carlo_missing", "Monte Carlo arithmetic could not run"

    # an operator that was checked by itself
    CHECKED = "checked", "checked"
    OPERATOR_ERROR = "operator_error", "relative error of the operator"
    OPERATOR_BIAS = "operator_bias", "common factor"
    OPERATOR_LIMIT = "operator_limit", "found from a relative error of"
    OPERATOR_ERROR_IN_NOISE = "operator_error_in_noise", "error, in units of its own noise"
    ALSO_WRONG = "also_wrong", "also wrong"
    WRONG_ELEMENTS = "wrong_elements", "elements that are wrong"

    # where and when
    COMPARED = "compared", "compared"
    LEVEL = "level", "level"
    STEP = "step", "step"
    FAILING_CALLS = "failing_calls", "calls that show it"
    SEEN_IN_CALLS = "seen_in_calls", "seen in calls"
    FIRST_CALL = "first_call", "first seen in call"
    RANK = "rank", "rank"
    HOST = "host", "host"
    DEVICE = "device", "device"
    TIME = "time", "time"
    WHERE = "where", "the process was at"
    BEFORE_CALL = "before_call", "before the call"
    KERNELS = "kernels", "kernels that show it"
    OTHER_KERNELS = "other_kernels", "kernels that do not"
    EXPLAINS = "explains", "explains"
    GRADIENTS_LOST = "gradients_lost", "gradients are lost"

    # a node whose metadata is wrong
    AT_FAULT = "at_fault", "likely at fault"
    DEPENDED_ON = "depended_on", "depended on"
    INHERITED = "inherited", "inherited"
    IGNORED = "ignored", "ignored"
    REMARK = "remark", "remark"
    SCRIPT = "script", "script"

    # looking for the operator
    LOCALIZED = "localized", "localized"
    LOCALIZATION = "localization", "how it was localized"
    AT_OPERATOR = "at_operator", "at the operator"
    DECOMPOSITION = "decomposition", "decomposition"
    BROKEN_BY = "broken_by", "broken by"
    GENERATED_CODE = "generated_code", "generated code"
    REDUCED = "reduced", "reduced"
    REPRO = "repro", "repro"
    ONE_KERNEL = "one_kernel", "repro of the generated kernel alone"
    SETTINGS = "settings", "settings"
    WORKAROUND = "workaround", "workaround"
    BUG_REPORT = "bug_report", "to be pasted into a bug report"
    STOPPED = "stopped", "stopped"

    @classmethod
    def phrase_of(cls, key: str) -> str:
        """The phrase for a key. A key of another release, or of a user's own, is its own phrase."""
        known = cls._value2member_map_.get(key)
        return known.phrase if isinstance(known, cls) else key


def encode_evidence(value: Any, depth: int = 0) -> Any:
    """A piece of evidence, which may be anything, as JSON values. What JSON has no word for becomes text."""
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, str):
        return str(value)
    if depth >= _MAX_DEPTH:
        return _describe(value)
    if isinstance(value, numbers.Integral):
        return int(value) if int(value).bit_length() <= _MAX_INT_BITS else hex(int(value))
    if isinstance(value, numbers.Real):
        return float(value) if math.isfinite(value) else {"$float": repr(float(value))}
    if isinstance(value, numbers.Complex):
        return {"$complex": encode_number(value)}
    if isinstance(value, Mapping):
        # A key of the user's own that looks like one of ours gets one more "$", which reading takes off again.
        keyed = ((str(key), entry) for key, entry in value.items())
        return {"$" * key.startswith("$") + key: encode_evidence(entry, depth + 1) for key, entry in keyed}
    if isinstance(value, list | tuple):
        return [encode_evidence(entry, depth + 1) for entry in value]
    if isinstance(value, set | frozenset):
        return sorted(_describe(entry) for entry in value)
    return _describe(value)


def _describe(value: object) -> str:
    try:
        return str(value)
    except Exception:  # a user's __str__ must not cost the report
        return f"<{type(value).__name__}>"


def _read(value: Any, depth: int = 0) -> Any:
    """The inverse of `encode_evidence`, as far as there is one."""
    if depth > _MAX_DEPTH + 1:  # one more for {"$float": ...}
        raise ValueError(f"expected at most {_MAX_DEPTH} levels of lists and objects")
    if isinstance(value, list):
        return [_read(entry, depth + 1) for entry in value]
    if not isinstance(value, dict):
        return value
    if set(value) == {"$float"}:
        number = read_real(value["$float"])
        if isinstance(number, float):
            return number
        raise ValueError('expected "nan", "inf" or "-inf" as $float')
    if set(value) == {"$complex"}:
        return complex(read_number(value["$complex"]))
    return {key.removeprefix("$"): _read(entry, depth + 1) for key, entry in value.items()}


Evidence = Annotated[
    Mapping[str, Annotated[Any, AfterValidator(_read)]],
    WithJsonSchema({"type": "object", "properties": {key.value: {"description": key.phrase} for key in EvidenceKey}}),
]
"""Pieces of evidence by their names: `EvidenceKey`, or any that another release knows."""
