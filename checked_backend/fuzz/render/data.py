"""Render the findings of fuzzing as JSON."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from checked_backend.fuzz.program import encode_program
from checked_backend.fuzz.render.summary import Shown, Summary
from checked_backend.fuzz.text import describe_inputs, render_function

__all__ = ["render_json"]


def render_json(summary: Summary) -> str:
    """The report as JSON."""
    raw = {
        "schema": "checked_backend.fuzz",
        "verdict": summary.verdict.value,
        "settings": dict(summary.settings),
        "programs": dict(summary.totals.statuses),
        "compiled": summary.totals.compiled,
        "operations": summary.totals.ops,
        "operations_with_dtypes": summary.totals.pairs,
        "doubts": summary.doubts,
        "waiting": summary.waiting,
        "not_shown_again": len(summary.gone),
        "groups": [_as_data(shown) for shown in summary.groups],
    }
    return json.dumps(raw, indent=2, sort_keys=True)


def _as_data(shown: Shown) -> Mapping[str, Any]:
    group = shown.group
    result = asdict(group.result)
    return {
        "signature": group.signature,
        "standing": shown.standing,
        "why": shown.why,
        "documented_at": shown.source,
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
