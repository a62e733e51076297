"""Planted compiler faults are found, and right compilers have no finding."""

from __future__ import annotations

import pytest

from checked_backend.errors import FuzzError
from checked_backend.fuzz.examine import Examined, check_program, compiler_of, examine
from checked_backend.fuzz.generate.draft import Choices
from checked_backend.fuzz.generate.make import make_program, rules_for
from checked_backend.fuzz.generate.rules import Rule
from checked_backend.fuzz.planted import FAULTS
from checked_backend.fuzz.program import FuzzProgram, Input, Ref, Statement
from checked_backend.sweep.status import Status
from tests.support import faults

pytestmark = pytest.mark.filterwarnings("ignore")  # torch warns of what random programs do

X = Input("float32", (2, 3), (3, 1))
ADD = FuzzProgram((X,), (Statement("torch.add", (Ref(0), 1)),), (1,))
NEG = FuzzProgram((X,), (Statement("torch.neg", (Ref(0),)),), (1,))
LETHAL = ("dies", "hangs")


@pytest.fixture(scope="module")
def rules() -> list[Rule]:
    return rules_for(())


@pytest.mark.parametrize("name", [name for name, fault in FAULTS.items() if fault.kinds and name not in LETHAL])
def test_each_planted_fault_is_found_within_200_programs(name: str, rules: list[Rule]) -> None:
    fault = FAULTS[name]
    choices = Choices(training=fault.gradients, dynamic=False, longest=4)
    for number in range(200):
        found = check_program(make_program(1, number, choices, rules), fault.compiler)
        if found.kind:
            assert found.kind in {kind.value for kind in fault.kinds}
            return
    pytest.fail(f"{name} was not found")


def test_one_wrong_operator_of_aot_graphs_is_found(rules: list[Rule]) -> None:
    compiler = faults.wrong_operator("aten.relu.default", how="aot")
    choices = Choices(ops=("relu",), training=False, dynamic=False, longest=3)
    wanted = rules_for(choices.ops)
    programs = (make_program(0, number, choices, rules, wanted) for number in range(200))
    assert any(check_program(program, compiler).kind for program in programs)


@pytest.mark.parametrize("compiler", ["eager", "aot_eager"])
def test_a_right_compiler_passes_what_shares_a_compile(compiler: str) -> None:
    found = dict(examine([ADD, NEG], compiler))
    assert {place: (one.status, one.alone) for place, one in found.items()} == {
        0: (Status.PASS, False),
        1: (Status.PASS, False),
    }


def test_blame_is_clear_in_a_batch_that_fails() -> None:
    noted: list[str] = []
    found = dict(examine([NEG, ADD, NEG], FAULTS["logic"].compiler, note=noted.append))
    assert [found[place].status for place in range(3)] == [Status.PASS, Status.FAIL, Status.PASS]
    assert all(one.alone for one in found.values())
    assert noted == ["batch", "program 0", "program 1", "program 2"]
    assert found[1].kind == "logic"
    assert found[1].subject == "output[0]"


def test_a_check_that_raises_is_no_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_args: object, **_kwargs: object) -> None:
        raise RuntimeError("the check broke")

    monkeypatch.setattr("checked_backend.fuzz.examine.check", broken)
    found = check_program(ADD, "eager")
    assert found.status is Status.INCONCLUSIVE
    assert "the check itself failed: RuntimeError: the check broke" in found.message


def test_what_came_out_survives_json() -> None:
    found = Examined(Status.FAIL, "no", 1.5, True, kind="logic", detail="logic.this_call", subject="output[0]")
    assert Examined.from_json(found.to_json()) == found
    with pytest.raises(FuzzError, match="a result of fuzz"):
        Examined.from_json("{}")


def test_planted_compilers_have_names() -> None:
    assert compiler_of("planted:alias") is FAULTS["alias"].compiler
    assert compiler_of("inductor") == "inductor"
    with pytest.raises(FuzzError, match="planted:logic"):
        compiler_of("planted:nothing")
