"""Plant a fault of every kind in a compiler, and say which are caught: whether the tool can be trusted here."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from types import MappingProxyType

from checked_backend.errors import FuzzError
from checked_backend.fuzz.database import Entry
from checked_backend.fuzz.planted import CONTROL, FAULTS
from checked_backend.fuzz.program import FuzzProgram, Input, Ref, Statement, encode_program
from checked_backend.fuzz.tasks import Asked, CheckTask, Reins
from checked_backend.fuzz.try_faults import Tried
from checked_backend.fuzz.worker import WORK
from checked_backend.process.job import Job, JobResources, run

__all__ = ["render_json", "render_text", "run_selftest"]

_SEED = 20
_MOST_PROGRAMS = 200
_CONTROL_PROGRAMS = 25
_HANG_SECONDS = 20.0
_SECONDS = 300.0
_LETHAL = MappingProxyType({"dies": "crash.signal", "hangs": "crash.hang"})
_SMALLEST = FuzzProgram((Input("float32", (2, 3), (3, 1)),), (Statement("torch.add", (Ref(0), 1)),), (1,))


def run_selftest(place: JobResources) -> list[Tried]:
    """Try each fault of `checked_backend.fuzz.planted`, in processes of their own.

    Args:
        place: The resources of a process.

    Raises:
        FuzzError: A process did not answer.
    """
    names = [name for name in FAULTS if name not in _LETHAL]
    with ThreadPoolExecutor(len(_LETHAL)) as pool:  # one of them waits all the time
        lethal = [pool.submit(_lethal, name, place) for name in _LETHAL]
        found = _in_one_process(names, place)
        return [*found, *(future.result() for future in lethal)]


def _in_one_process(names: Sequence[str], place: JobResources) -> list[Tried]:
    question = {"ask": "selftest", "faults": names, "seed": _SEED, "most": _MOST_PROGRAMS, "control": _CONTROL_PROGRAMS}
    answer = run(Job(WORK, question, _SECONDS), place)
    if not answer.answer:
        raise FuzzError(f"selftest: the process {answer.words} while {answer.stage}\n{answer.log}")
    found = [Tried(**raw) for raw in json.loads(answer.answer)]
    why = f"its process {answer.words} while {answer.stage}"
    return [*found, *(Tried(name, FAULTS[name].words, False, 0, finding=why) for name in names[len(found) :])]


def _lethal(name: str, place: JobResources) -> Tried:
    """Try a fault that ends or stops its process."""
    asked = Asked(compiler=f"planted:{name}", timeout=_HANG_SECONDS, place=place)
    began = time.monotonic()
    entry = Entry(0, name, encode_program(_SMALLEST), "00")
    found, _ = CheckTask([entry], 1).run(asked, Reins())
    result = found.get(0)
    caught = result is not None and result.detail == _LETHAL[name]
    told = f"{result.detail}: {result.message}" if result is not None and caught else ""
    seconds = time.monotonic() - began
    return Tried(name, FAULTS[name].words, caught, 1, finding=told, seconds=seconds)


def render_text(results: Sequence[Tried]) -> str:
    """The results as text, the verdict first."""
    wrong = [result for result in results if not result.right]
    faults = [result for result in results if result.fault != CONTROL]
    caught = sum(result.caught for result in faults)
    head = "FAIL" if wrong else "PASS"
    lines = [f"{head}: {caught} of {len(faults)} planted faults were caught"]
    for result in results:
        if result.fault == CONTROL:
            said = f"reported where nothing is wrong: {result.finding}" if result.caught else "nothing was reported"
            said = said if result.programs else result.finding
            lines.append(f"  {'ok' if result.right else 'WRONG':<6} control     {result.tried_words}: {said}")
            continue
        told = result.finding if result.caught or not result.programs else "not caught"
        verdict = "ok" if result.right else "MISSED"
        lines.append(f"  {verdict:<6} {result.fault:<11} {result.words}: after {result.tried_words}: {told}")
    return "\n".join(lines)


def render_json(results: Sequence[Tried]) -> str:
    """The results as JSON."""
    faults = [{**asdict(result), "right": result.right} for result in results]
    return json.dumps({"verdict": "pass" if all(one.right for one in results) else "fail", "faults": faults}, indent=2)
