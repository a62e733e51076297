"""Programs of two ranks, clean and wrong: an answer for each program and rank."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

from tests.ledger.answer import Answer, Answers, Case, line_of
from tests.support.ranks import run_ranks, values_of

Programs = Mapping[str, tuple[str, dict[str, Any]]]
"""By name: a function of ``tests.support.rank_programs``, and its arguments."""

_SAME = "sending_the_same"
_LOCALIZED = {"localize": True, "steps": 1}

PROGRAMS: Mapping[str, Programs] = MappingProxyType(
    {
        "clean": {
            "sharded": ("sharded", {}),
            "unlike": ("unlike", {}),
            "exchanging": ("exchanging", {}),
            "exchanging again": ("exchanging", {"recomputed": True}),
            "replicated": ("replicated", {"drifts": False}),
            "half precision": ("half_precision", {}),
        },
        "kinds": {
            "tensor parallel": ("alike", {"kind": "tensor parallel", "steps": 3}),
            "fsdp": ("alike", {"kind": "fsdp", "steps": 3}),
            "ddp": ("alike", {"kind": "ddp", "steps": 3}),
            "split ddp": ("alike", {"kind": "split ddp", "steps": 3}),
            "piped by hand": ("piped", {"handmade": True}),
            "piped": ("piped", {"handmade": False}),
        },
        "wrong": {
            "before": ("sharded", {"fault": "before"}),
            "after": ("sharded", {"fault": "after", "gradients": False}),
            "reduction": ("sharded", {"fault": "reduction", "on": None, "gradients": False}),
            "falls back": ("sharded", {"fault": "before", "on_divergence": "fallback"}),
            "merged": ("sharded", {"fault": "merged", "on": None}),
            "drifts": ("replicated", {"drifts": True}),
            "gelu in float16": ("half_precision", {"fault": "aten.gelu.default"}),
            "gelu backward in float16": ("half_precision", {"fault": "aten.gelu_backward.default"}),
        },
        "orders": {
            "sends the same": (_SAME, {"fault": "after", "on": 0}),
            "receives the same": (_SAME, {"fault": "after", "on": 0, "receives": True}),
            "in another order": (_SAME, {}),
        },
        "localized": {
            "dropped": ("sharded", {"fault": "dropped", "on": None, "localize": True}),
            "relu": ("sharded", {**_LOCALIZED, "fault": "aten.relu.default"}),
            "tanh backward": ("sharded", {**_LOCALIZED, "fault": "aten.tanh_backward.default"}),
        },
    }
)
"""Those of a case run one after the other in the same ranks."""


def cases() -> Iterator[Case]:
    """The groups of programs, and three that end."""
    for name, programs in PROGRAMS.items():
        yield Case(f"ranks/{name}", partial(_told, programs), seconds=600)
    before = {"fault": "before", "on_divergence": "raise"}
    yield Case("ranks/raises", partial(_ended, "tests.support.rank_programs:sharded", **before))
    yield Case("ranks/crashing", partial(_ended, "tests.support.rank_programs:crashing", at="tanh_backward", on=1))
    yield Case("ranks/killed", partial(_ended, "tests.support.rank_programs:killed"))


def _told(programs: Programs) -> Answers:
    given = [*programs.values()]
    ranks = values_of(run_ranks("tests.support.rank_programs:several", Path("ranks").resolve(), programs=given))
    return {
        f"{name}, rank {rank}": _answer(told)
        for rank, values in enumerate(ranks)
        for name, told in zip(programs, values, strict=True)
    }


def _answer(told: Mapping[str, Any]) -> Answer:
    equal = "" if told.get("equal", True) else ", other weights"
    answer = {"verdict": told["verdict"] + equal, "findings": _findings(told["findings"])}
    places = {(subject, f"{op}", line_of(source)) for subject, op, source in told["located"] if op}
    return {**answer, "where": sorted([*place] for place in places)} if places else answer


def _findings(told: Sequence[Sequence[str]]) -> list[list[str]]:
    return [[detail.partition(".")[0], detail, subject] for detail, subject in told]


def _ended(program: str, **given: Any) -> Answers:
    """How ranks end that do not return: with which verdict, if they raise one; else with which exit code."""
    answers = {}
    for number, rank in enumerate(run_ranks(program, Path("ranks").resolve(), **given)):
        raised = re.search(r"DivergenceError: (\w+)", rank.output)
        found = {("logic", "logic", subject) for subject in re.findall(r"logic, (\w+\[\w+\])", rank.output)}
        verdict = f"raises DivergenceError, {raised[1]}" if raised else f"exit {rank.code}"
        answers[f"rank {number}"] = {"verdict": verdict, "findings": sorted([*row] for row in found)}
    return answers
