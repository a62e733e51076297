"""Planted compiler faults are found, and right compilers have no finding."""

from __future__ import annotations

import sys
from dataclasses import replace
from typing import Any

import pytest

from checked_backend import Coverage, Finding, Kind, Report
from checked_backend.errors import FuzzError
from checked_backend.fuzz import examine as examining
from checked_backend.fuzz.examine import alike, check_program, compiler_of, examine, named_in, owners_of
from checked_backend.fuzz.generate.draft import Choices
from checked_backend.fuzz.generate.make import make_program
from checked_backend.fuzz.planted import FAULTS
from checked_backend.fuzz.program import Constant, FuzzProgram, Input, Ref, Statement, decode_program
from checked_backend.fuzz.results import ProgramResult, documented
from checked_backend.runs.case import Status
from tests.support import faults
from tests.support.raising import raising

pytestmark = pytest.mark.filterwarnings("ignore")  # torch warns of what random programs do

X = Input("float32", (2, 3), (3, 1))
ADD = FuzzProgram((X,), (Statement("torch.add", (Ref(0), 1)),), (1,))
NEG = FuzzProgram((X,), (Statement("torch.neg", (Ref(0),)),), (1,))
EXP = FuzzProgram((X,), (Statement("torch.exp", (Ref(0),)),), (1,))
OTHERWISE = ("dies", "hangs", "shared")  # tests of their own
FIRST = {"nonfinite": 1, "logic": 4, "precision": 5, "mutation": 8, "uncounted": 4, "later": 2, "overwrites": 2}
"""Numbers of the first programs that show a fault: those before take half a minute together, and show nothing."""


def together(
    programs: list[FuzzProgram], compiler: Any, noted: list[list[int]] | None = None
) -> dict[int, ProgramResult]:
    """What comes out for programs that share a compile; ``noted`` gets which are checked at a time."""
    note = list[int] if noted is None else lambda now: noted.append([*now])
    return dict(examine(dict(enumerate(programs)), compiler, note=note))


@pytest.mark.smoke
@pytest.mark.parametrize("name", [name for name, fault in FAULTS.items() if fault.kind and name not in OTHERWISE])
def test_each_planted_fault_is_found_within_200_programs(name: str) -> None:
    fault = FAULTS[name]
    choices = Choices(training=fault.gradients, dynamic=fault.dynamic, longest=4)
    for number in range(FIRST.get(name, 0), 200):
        found = check_program(make_program(1, number, choices), fault.compiler)
        # A program may show the fault as another kind: a wrong value becomes a NaN, a copied input is a lost alias.
        if fault.is_told_by(found.kind, found.detail):
            return
    pytest.fail(f"{name} was not found")


@pytest.mark.parametrize("compiler", ["eager", "aot_eager"])
def test_a_right_compiler_passes_what_shares_a_compile(compiler: str) -> None:
    found = together([ADD, NEG], compiler)
    assert {place: one.status for place, one in found.items()} == {0: Status.PASS, 1: Status.PASS}


@pytest.mark.sampled(1)
@pytest.mark.parametrize("turn", [2, 3])
@pytest.mark.parametrize("programs", [[EXP], [NEG, EXP]], ids=["alone", "shared"])
def test_a_fault_that_shows_in_a_later_call_is_found(programs: list[FuzzProgram], turn: int) -> None:
    found = together(programs, faults.only_in_call(turn, faults.wrong_value()))
    assert found[0].status is Status.FAIL  # the others of a compile may be right
    assert found[0].kind == "logic"


@pytest.mark.parametrize("programs", [[EXP], [NEG, EXP]], ids=["alone", "shared"])
def test_results_that_a_later_call_overwrites_are_found(programs: list[FuzzProgram]) -> None:
    found = together(programs, faults.same_memory_for_all_calls)
    assert {one.detail for one in found.values()} == {"alias.overwritten"}


def test_a_result_of_the_first_call_that_later_ones_return_is_found() -> None:
    found = together([EXP], faults.remembers_its_first_results)[0]
    assert (found.status, found.kind) == (Status.FAIL, "logic")
    assert "; in call 2 of 3" in found.message


def test_blame_is_clear_in_a_batch_that_fails() -> None:
    noted: list[list[int]] = []
    found = together([NEG, ADD, NEG], FAULTS["logic"].compiler, noted)
    assert [found[place].status for place in range(3)] == [Status.PASS, Status.FAIL, Status.PASS]
    assert noted == [[0, 1, 2], [0, 2], [1]]  # the others share another compile
    assert found[1].kind == "logic"
    assert found[1].subject == "output[0]"


def test_where_blame_is_not_clear_each_program_is_checked_alone() -> None:
    noted: list[list[int]] = []
    found = together([NEG, ADD, NEG], FAULTS["refuses"].compiler, noted)
    assert [found[place].status for place in range(3)] == [Status.PASS, Status.FAIL, Status.PASS]
    assert noted == [[0, 1, 2], [0], [1], [2]]


def test_what_the_check_of_operators_alone_shows_is_found_beside_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where results differ, operators are not checked by themselves, so the others are checked again without them."""
    asked: list[int] = []

    def checked(programs: Any, *_args: Any) -> Any:
        asked.append(len(programs))
        at_fault = programs.index(ADD) if ADD in programs else programs.index(EXP) if EXP in programs else None
        if at_fault is None:
            return ProgramResult(Status.PASS, compiled=True), Report([], Coverage())
        report = Report([Finding(kind=Kind.LOGIC, subject=f"output[{at_fault}]", message="wrong")], Coverage())
        return examining._examined(report, 1.0), report

    monkeypatch.setattr(examining, "_checked", checked)
    found = together([NEG, EXP, ADD, NEG], "eager")
    assert [found[place].status for place in range(4)] == [Status.PASS, Status.FAIL, Status.FAIL, Status.PASS]
    assert asked == [4, 3, 2, 1, 1]


def test_one_fault_hides_no_other_in_a_batch() -> None:
    gradient = faults.scaled_gradient("x2", factor=2.0)

    def compiler(gm: Any, inputs: Any) -> Any:
        try:
            run = gradient(gm, inputs)
        except LookupError:  # there is but one program
            run = faults.scaled_gradient("x0", factor=2.0)(gm, inputs)
            return run if "exp" in gm.code else gm.forward
        return lambda *args: [result.double() if not place else result for place, result in enumerate(run(*args))]

    grad = replace(X, requires_grad=True)
    programs = [
        FuzzProgram((grad,), (Statement(f"torch.{op}", (Ref(0),)),), (1,), True) for op in ("neg", "sin", "exp")
    ]
    found = together(programs, compiler)
    assert found[1].status is Status.PASS
    assert (found[2].status, found[2].kind) == (Status.FAIL, "logic")
    assert (found[0].status, found[0].detail) == (Status.FAIL, "structure.dtype")  # alone it passes
    assert decode_program(found[0].program).ops == ("torch.neg", "torch.sin")  # the third is wrong by itself


@pytest.mark.parametrize("raises", [True, False])
def test_what_is_wrong_only_together_is_a_failure_of_all_as_one(raises: bool) -> None:
    def compiler(gm: Any, _inputs: Any) -> Any:
        if len(gm.graph.nodes) < 6:
            return gm.forward
        if raises:
            raise RuntimeError("too large")
        return lambda *args: [result * 1.5 for result in gm(*args)]

    programs = [FuzzProgram((X,), (Statement(f"torch.{op}", (Ref(0),)),), (1,)) for op in ("neg", "sin", "exp")]
    found = together(programs, compiler)
    assert set(found) == {0, 1, 2}
    assert found[0].status is Status.FAIL
    assert check_program(decode_program(found[0].program), compiler).kind == found[0].kind
    assert {found[place].status for place in (1, 2)} == {Status.PASS}


restrided = faults.every_output(lambda one: faults.restrided(one) if one.dim() > 1 else one)


def test_a_documented_difference_needs_no_compile_of_its_own() -> None:
    noted: list[list[int]] = []
    found = together([FuzzProgram((X,), (Statement("Tensor.sum", (Ref(0), 0)),), (1,)), ADD], restrided, noted)
    assert noted == [[0, 1], [0]]
    assert found[0].status is Status.PASS
    assert (found[1].status, found[1].detail, found[1].subject) == (Status.FAIL, "structure.stride", "output[0]")
    assert documented(found[1]) is not None


@pytest.mark.parametrize(
    ("text", "places"),
    [
        ("output[1]", {1}),
        ("grad[x2]", {2}),
        ("mutated[x0]", {0}),
        ("output[2] the same object: output[0]", {0, 2}),
        ("output[3]", set()),
        ("rng state", set()),
        ("grad[x12]", set()),
    ],
)
def test_subjects_name_the_program_of_a_shared_compile(text: str, places: set[int]) -> None:
    assert named_in(text, owners_of(dict(enumerate([NEG, ADD, EXP])))) == places


def test_a_check_that_raises_is_no_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("checked_backend.fuzz.examine.check", raising(RuntimeError("the check broke")))
    found = check_program(ADD, "eager")
    assert found.status is Status.INCONCLUSIVE
    assert "the check itself failed: RuntimeError: the check broke" in found.message


def test_planted_compilers_have_names() -> None:
    assert compiler_of("planted:alias") is FAULTS["alias"].compiler
    assert compiler_of("inductor") == "inductor"
    with pytest.raises(FuzzError, match="planted:logic"):
        compiler_of("planted:nothing")


def test_where_dynamo_gives_up_on_one_program_the_others_share_a_compile_still() -> None:
    loop = (Statement("for", (2,)), Statement("Tensor.swapaxes_", (Ref(0), 0, 1)), Statement("end"))
    transposed = FuzzProgram((X,), loop, (0,))
    noted: list[list[int]] = []
    found = together([NEG, ADD, NEG, transposed], "eager", noted)
    assert [found[place].status for place in range(4)] == [Status.PASS] * 3 + [Status.INCONCLUSIVE]
    assert noted == [[0, 1, 2, 3], [0, 1], [2, 3], [2], [3]]


@pytest.mark.parametrize(
    ("changed", "text"),
    [
        ({}, "0000"),
        ({"inputs": (replace(X, dtype="bfloat16"),)}, "1000"),
        ({"calls": (Statement("Tensor.to", (Ref(0), Constant("float16"))),)}, "1000"),
        ({"calls": (Statement("Tensor.half", (Ref(0),)),)}, "1000"),
        ({"calls": (Statement("torch.rand_like", (Ref(0),)),)}, "0100"),
        ({"gradients": True}, "0010"),
        ({"dynamic": True}, "0001"),
    ],
)
def test_programs_that_need_more_compiles_share_none_with_others(changed: dict[str, Any], text: str) -> None:
    assert alike(replace(ADD, **changed)) == text


def test_the_level_of_a_failure_is_looked_for_where_a_program_is_alone() -> None:
    found = together([ADD, NEG], restrided)
    assert [found[place].detail for place in range(2)] == ["structure.stride"] * 2
    assert {one.stage for one in found.values()} == {""}
    assert check_program(ADD, restrided).stage == "compiled"


@pytest.mark.parametrize("compiling", [True, False])
def test_a_compiler_that_exits_fails(compiling: bool) -> None:
    def compiler(_gm: Any, _inputs: Any) -> Any:
        if compiling:
            sys.exit(0)
        return lambda *_: sys.exit(0)

    found = check_program(NEG, compiler)
    assert (found.status, found.detail, found.actual) == (Status.FAIL, "crash.exit", "SystemExit")
    assert "called sys.exit(0), eager does not" in found.message
