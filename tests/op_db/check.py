"""Every sample of ``op_db`` through `checked_backend.check` with the ``nop`` compiler.

In float32 with gradients, in bfloat16 and int64 forward only. One line per operator, dtype and range of samples: how
many got which verdict, ``fails`` (AOT autograd does something else than eager), ``reasons`` (why a verdict is
inconclusive) and ``errors`` (the check raised, ran out of time or died: always a bug here).
"""

from __future__ import annotations

import itertools
import json
import signal
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch._dynamo

import checked_backend as cb

from .entries import name_of, operators
from .results import append, read

KNOWN = Path(__file__).parent / "known_check_fails.json"
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "int64": torch.int64}
SECONDS_PER_SAMPLE = 600
_LAST = 10**9


class TooSlow(BaseException):
    """A sample ran out of time. No ``Exception``: the check must not take it for the program's own."""


def _called(info: Any) -> Callable[..., Any]:
    """The operator as a function of its own, as a user would have it."""
    operator = info.op

    def call(first: Any, *args: Any, **kwargs: Any) -> Any:
        return operator(first, *args, **kwargs)

    return call


def check_sample(info: Any, sample: Any, *, gradients: bool) -> cb.Report:
    """Check one sample of an entry."""
    given = (sample.input, *sample.args)
    with _traceable():
        return cb.check(_called(info), given, sample.kwargs, compiler=cb.nop, gradients=gradients)


@contextmanager
def _traceable() -> Iterator[None]:
    """Let Dynamo trace what it can.

    Operators whose output's size depends on data break the graph by default, and so do those that warn; and ``op_db``
    seeds random operators itself, by what Dynamo cannot trace. A check runs both sides from the same random state
    anyway.
    """
    captured: dict[str, Any] = {"capture_dynamic_output_shape_ops": True, "capture_scalar_outputs": True}
    captured["reorderable_logging_functions"] = {warnings.warn}
    seeding = "torch.testing._internal.common_methods_invocations.wrapper_set_seed"
    with torch._dynamo.config.patch(**captured), mock.patch(seeding, _not_seeded):
        yield


def _not_seeded(operator: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return operator(*args, **kwargs)


@contextmanager
def _limited(seconds: int) -> Iterator[None]:
    def stop(_signal: int, _frame: Any) -> None:
        raise TooSlow(f"more than {seconds} s")

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def _check_operator(info: Any, dtype: str, start: int, stop: int) -> dict[str, Any]:
    gradients = dtype == "float32" and info.supports_autograd
    torch.manual_seed(0)
    samples = info.sample_inputs("cpu", DTYPES[dtype], requires_grad=gradients)
    verdicts: Counter[str] = Counter()
    reasons: Counter[str] = Counter()
    fails: dict[tuple[str, str], dict[str, Any]] = {}
    errors: list[dict[str, Any]] = []
    number = start - 1
    for number, sample in enumerate(itertools.islice(samples, start, stop), start):
        try:
            with _limited(SECONDS_PER_SAMPLE):
                report = check_sample(info, sample, gradients=gradients)
        except (Exception, TooSlow) as error:
            where = "".join(traceback.format_tb(error.__traceback__)[-2:])
            errors.append({"sample": number, "error": f"{type(error).__name__}: {error}"[:500], "where": where})
            continue
        verdicts[str(report.verdict)] += 1
        for finding in report.findings:
            if finding.kind.fails:
                fails.setdefault((finding.detail, finding.subject), {"sample": number, **_told(finding)})
            else:
                reasons[f"{finding.detail}: {finding.message}"[:200]] += 1
        if report.verdict is cb.Verdict.INCONCLUSIVE:
            reasons.update(f"{skip.subject}: {skip.reason}"[:200] for skip in report.coverage.skipped if skip.matters)
    return {
        "name": name_of(info),
        "dtype": dtype,
        "from": start,
        "to": _LAST if number < stop - 1 else stop,
        "verdicts": dict(verdicts),
        "reasons": dict(reasons),
        "fails": list(fails.values()),
        "errors": errors,
    }


def _told(finding: cb.Finding) -> dict[str, Any]:
    return {
        "detail": finding.detail,
        "subject": finding.subject,
        "message": finding.message[:300],
        "expected": (finding.expected or "")[:300],
        "actual": (finding.actual or "")[:300],
    }


def _progress(lines: list[dict[str, Any]]) -> dict[tuple[str, str], int]:
    """How many samples of each operator and dtype are done. One that was begun and not ended killed the process."""
    done: dict[tuple[str, str], int] = {}
    for line in lines:
        done[line["name"], line["dtype"]] = line["to"]
    return done


def sweep(
    path: Path, *, seconds: float, samples: int | None = None, every: int = 1, dtypes: tuple[str, ...] = tuple(DTYPES)
) -> Iterator[dict[str, Any]]:
    """Go on where the file ends, until the time is up, with every k-th operator and so many samples of each."""
    began = time.monotonic()
    lines = read(path)
    if lines and "begun" in lines[-1]:  # it killed the process
        last = lines[-1]
        died = {"sample": last["from"], "error": "the process died", "where": ""}
        lost = {**last, "to": _LAST, "verdicts": {}, "reasons": {}, "fails": [], "errors": [died]}
        del lost["begun"]
        append(path, lost)
        lines.append(lost)
        yield lost
    done = _progress(lines)
    stop = _LAST if samples is None else samples
    work = [(info, dtype) for dtype in dtypes for info in operators(DTYPES[dtype])[::every]]
    for info, dtype in sorted(work, key=lambda pair: name_of(pair[0])):
        start = done.get((name_of(info), dtype), 0)
        if start >= stop:
            continue
        if time.monotonic() - began > seconds:
            return
        append(path, {"begun": True, "name": name_of(info), "dtype": dtype, "from": start, "to": start})
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            result = _check_operator(info, dtype, start, stop)
        append(path, result)
        yield result


def interesting(result: dict[str, Any]) -> bool:
    """Whether a person would want to see it now."""
    return bool(result["fails"] or result["errors"])


def summary(path: Path) -> str:
    """How far the sweep is, and what came out."""
    lines = [line for line in read(path) if "begun" not in line]
    complete = {key for key, to in _progress(lines).items() if to >= _LAST}
    seen = {(line["name"], line["dtype"]) for line in lines}
    every = sum(len(operators(dtype)) for dtype in DTYPES.values())
    verdicts: Counter[str] = Counter()
    for line in lines:
        verdicts.update(line["verdicts"])
        verdicts["errors"] += len(line["errors"])
    return (
        f"{len(seen)} of {every} operators and dtypes begun, {len(complete)} complete; "
        f"samples: {dict(verdicts)}; failing: {len(_failing(lines))}"
    )


def _failing(lines: list[dict[str, Any]]) -> dict[tuple[str, str], list[dict[str, Any]]]:
    found: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for line in lines:
        for fail in line.get("fails", ()):
            found.setdefault((line["name"], line["dtype"]), []).append(fail)
    return found


def known() -> dict[str, Any]:
    """The listed fails."""
    return json.loads(KNOWN.read_text(encoding="utf-8"))


def document(path: Path) -> dict[str, Any]:
    """The fails that were found, each with the reason that the list has for it so far; and what was inconclusive."""
    reasons = {}
    if KNOWN.exists():
        reasons = {(e["name"], e["dtype"], e["detail"], e["subject"]): e["reason"] for e in known()["fails"]}
    fails = []
    for (name, dtype), found in sorted(_failing(read(path)).items()):
        for fail in {(one["detail"], one["subject"]): one for one in reversed(found)}.values():
            key = (name, dtype, fail["detail"], fail["subject"])
            fails.append({"name": name, "dtype": dtype, **fail, "reason": reasons.get(key, "")})
    lines = [line for line in read(path) if "begun" not in line]
    least = min(_progress(lines).values(), default=0)
    verdicts: Counter[str] = Counter()
    for line in lines:
        verdicts.update(line["verdicts"])
    return {
        "torch": torch.__version__.partition("+")[0],
        "compiler": "nop",
        "samples": dict(sorted(verdicts.items())),
        "least samples of an operator and dtype": "all" if least >= _LAST else least,
        "fails": fails,
        "inconclusive": _inconclusive(lines),
    }


def _inconclusive(lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Why verdicts are inconclusive, the most frequent reason first."""
    counts: Counter[str] = Counter()
    operators_of: dict[str, set[str]] = {}
    for line in lines:
        for reason, count in line["reasons"].items():
            counts[reason] += count
            operators_of.setdefault(reason, set()).add(f"{line['name']} {line['dtype']}")
    return [
        {"reason": reason, "samples": count, "operators": sorted(operators_of[reason])}
        for reason, count in counts.most_common()
    ]
