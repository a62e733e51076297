"""Plant a fault of every kind in a compiler, and say which are caught: whether the tool can be trusted here."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from checked_backend.errors import FuzzError
from checked_backend.fuzz import examine as examining
from checked_backend.fuzz.generate.draft import Choices
from checked_backend.fuzz.generate.make import make_program
from checked_backend.fuzz.planted import CONTROL, FAULTS, SHARED, Fault
from checked_backend.fuzz.program import Constant, FuzzProgram, Input, Ref, Statement
from checked_backend.fuzz.results import ProgramResult
from checked_backend.fuzz.worker import begin, death_of
from checked_backend.process.job import AnswerFolder, Job, JobResources, run
from checked_backend.runs.case import Status

_DYNAMO_ALONE = "eager"
_SEED = 20
_MOST_PROGRAMS = 200
_CONTROL_PROGRAMS = 25
SECONDS = 300.0
_LETHAL: Mapping[str, tuple[str, float]] = {"dies": ("crash.signal", 120.0), "hangs": ("crash.hang", 10.0)}
"""Faults that end or stop their process: the finer kind of what is found, and the seconds after which it hangs."""

_SMALLEST = FuzzProgram((Input("float32", (2, 3), (3, 1)),), (Statement("torch.add", (Ref(0), 1)),), (1,))


@dataclass(frozen=True, slots=True)
class Tried:
    """The result for one planted fault.

    Attributes:
        fault: Its name; `CONTROL` is the right compiler.
        programs: After how many programs; of the control, how many there were.
        left_out: How many of them say nothing, because Dynamo alone gets them wrong in the same way: bugs of torch.
    """

    fault: str
    words: str
    caught: bool
    programs: int
    left_out: int = 0
    undecided: int = 0
    finding: str = ""
    seconds: float = 0.0

    @property
    def right(self) -> bool:
        """Whether the outcome is the wanted one: a fault is found; the control has no finding, and mostly passes."""
        if self.fault != CONTROL:
            return self.caught
        return not self.caught and 2 * (self.left_out + self.undecided) < self.programs

    @property
    def tried_words(self) -> str:
        """How many programs there were, and how many of them say nothing."""
        without = f", {self.left_out} left out: torch alone gets them wrong in the same way" if self.left_out else ""
        unclear = f", {self.undecided} without a verdict" if self.undecided else ""
        return f"{self.programs} programs{without}{unclear}"


def _plain(*calls: tuple[Any, ...], dtype: str = "float32", **more: Any) -> FuzzProgram:
    """A program in which each call takes the result of the one before, and what else is given."""
    given = Input(dtype, (4, 4), (4, 1), seed=1, requires_grad=bool(more.get("gradients")))
    statements = [Statement(op, (Ref(place), *others)) for place, (op, *others) in enumerate(calls)]
    return FuzzProgram((given,), tuple(statements), (len(calls),), **more)


PLAIN: Mapping[str, FuzzProgram] = {
    "sums": _plain(("torch.exp",), ("torch.add", 1), ("torch.sum", 1)),
    "views": _plain(("Tensor.t",), ("Tensor.mul_", 2)),
    "hyperbolic": _plain(("torch.sinh",)),
    "integers": _plain(("torch.mul", 3), ("torch.clamp", -2, 5), dtype="int64"),
    "half": _plain(("torch.matmul", Ref(0)), ("torch.relu",), dtype="bfloat16"),
    "casts": _plain(("Tensor.to", Constant("float64")), ("torch.neg",)),
    "gradients": _plain(("torch.tanh",), ("torch.mul", Ref(0)), gradients=True),
    "sizes": _plain(("torch.sin",), ("torch.mean", 0), gradients=False, dynamic=True),
}
"""Programs that each torch and each right compiler get right. What is reported of them is a false alarm."""

_IN_ONE_COMPILE = {name: PLAIN[name] for name in ("sums", "hyperbolic", "integers", "views")}
_WRONG_IN_ONE_COMPILE = "hyperbolic"


def try_faults(
    names: Sequence[str], *, seed: int, most: int, control: int, note: Callable[[str], None]
) -> Iterator[Tried]:
    """Check programs with each fault until one shows it; the right compiler with so many random ones after `PLAIN`."""
    for name in names:
        note(f"trying {name}")
        fault, began = FAULTS[name], time.monotonic()

        def programs(fault: Fault = fault) -> Iterator[FuzzProgram]:
            if fault.dynamic:
                yield PLAIN["sizes"]  # one of them takes as long as ten of fixed sizes
                return
            wanted = Choices(training=fault.gradients, dynamic=False)
            for number in range(most if fault.kind else control):
                yield make_program(seed, number, wanted)

        if name == SHARED:
            tried = _in_one_compile(fault)
        elif name in _LETHAL:
            detail, seconds = _LETHAL[name]
            caught = death_of(_SMALLEST, fault.compiler, {}, seconds) == detail
            tried = Tried(name, fault.words, caught, 1, finding=detail if caught else "")
        elif name == CONTROL:
            tried = _accused(fault, programs())
        else:
            tried = _until_told(Tried(name, fault.words, caught=False, programs=0), fault, programs())
        yield replace(tried, seconds=time.monotonic() - began)


def _until_told(tried: Tried, fault: Fault, programs: Iterator[FuzzProgram]) -> Tried:
    for program in programs:
        result = examining.check_program(program, fault.compiler)
        tried = _one_more(tried, result)
        if not fault.is_told_by(result.kind, result.detail):
            continue
        if not examining.check_program(program, _DYNAMO_ALONE).fails_as(result):
            return replace(tried, caught=True, finding=result.message)
        tried = replace(tried, left_out=tried.left_out + 1)
    return tried


def _accused(fault: Fault, programs: Iterator[FuzzProgram]) -> Tried:
    """Whether anything is reported of a right compiler. Nothing excuses a report of plain programs."""
    tried = Tried(CONTROL, fault.words, caught=False, programs=0)
    plain = [(name, examining.check_program(program, fault.compiler)) for name, program in PLAIN.items()]
    together = examining.examine(_IN_ONE_COMPILE, fault.compiler)
    plain += [(f"{name}, in one compile with others", result) for name, result in together]
    for name, result in plain:
        tried = _one_more(tried, result)
        if result.status is not Status.PASS or result.kind:
            told = f"a plain program ({name}): {result.status.value}: {result.message}"
            return replace(tried, caught=True, finding=told)
    return _until_told(tried, fault, programs)


def _in_one_compile(fault: Fault) -> Tried:
    """Whether one wrong program is found among others that share its compile, and no other is accused."""
    found = dict(examining.examine(_IN_ONE_COMPILE, fault.compiler))
    wrong = found[_WRONG_IN_ONE_COMPILE]
    others = [name for name, one in found.items() if one.status is not Status.PASS and name != _WRONG_IN_ONE_COMPILE]
    caught = fault.is_told_by(wrong.kind, wrong.detail) and not others
    told = wrong.message if caught else f"accused beside it: {', '.join(others)}" if others else ""
    return Tried(SHARED, fault.words, caught, len(found), finding=told)


def _one_more(tried: Tried, result: ProgramResult) -> Tried:
    undecided = tried.undecided + (result.status is Status.INCONCLUSIVE)
    return replace(tried, programs=tried.programs + 1, undecided=undecided)


def run_selftest(place: JobResources) -> list[Tried]:
    """Try each fault of `checked_backend.fuzz.planted`, in a process of its own, which must answer."""
    question = {"names": list(FAULTS), "seed": _SEED, "most": _MOST_PROGRAMS, "control": _CONTROL_PROGRAMS}
    end = run(Job(f"{__name__}:answer", question, SECONDS), place)
    if not end.answer:
        raise FuzzError(f"selftest: the process {end.words} while {end.stage}\n{end.log}")
    found = [Tried(**raw) for raw in json.loads(end.answer)]
    why = f"its process {end.words} while {end.stage}"
    return [*found, *(Tried(name, FAULTS[name].words, False, 0, finding=why) for name in list(FAULTS)[len(found) :])]


def answer(question: Mapping[str, Any], answers: AnswerFolder) -> None:
    """Do `try_faults` in a process of its own."""
    begin(answers.path / "reports")
    found = []
    for tried in try_faults(**question, note=answers.note):
        found.append(asdict(tried))
        answers.answer(json.dumps(found))  # a fault that takes all the time hides no other result


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
