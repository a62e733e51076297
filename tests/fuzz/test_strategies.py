"""Hypothesis draws programs in users' tests: evenly, smaller on failure, and from its database again."""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path

import hypothesis
import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from hypothesis.database import InMemoryExampleDatabase
from hypothesis.errors import Unsatisfiable

from checked_backend.errors import FuzzError, OptionError
from checked_backend.fuzz import strategies
from checked_backend.fuzz.examine import compiler_of
from checked_backend.fuzz.generate.defined import runs_alike
from checked_backend.fuzz.generate.make import matches
from checked_backend.fuzz.program import FuzzProgram, Input, Ref, Statement
from checked_backend.fuzz.results import DOCUMENTED, ProgramResult
from checked_backend.fuzz.strategies import _Drawn, assert_passes, programs
from checked_backend.runs.case import Status
from tests.support.started_programs import finished

pytestmark = pytest.mark.filterwarnings("ignore")  # torch warns of what random programs do

ADD = FuzzProgram((Input("float32", (2, 3), (3, 1)),), (Statement("torch.add", (Ref(0), 1)),), (1,))
QUICK = settings(
    deadline=None,
    database=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much],
)


def test_programs_of_the_strategy_run_and_are_as_asked() -> None:
    seen: list[FuzzProgram] = []

    @settings(QUICK, max_examples=15, phases=[Phase.generate])
    @given(programs(ops=["relu*", "F.gelu"], dtypes=["float64"], training=True, dynamic=True, longest=3))
    def look(program: FuzzProgram) -> None:
        assert program.gradients
        assert program.dynamic
        assert any(matches(op, ["relu*", "F.gelu"]) for op in program.ops)
        assert runs_alike(program)
        seen.append(program)

    look()
    assert len(seen) == 15
    assert len({repr(program) for program in seen}) > 7
    assert {given.dtype for program in seen for given in program.inputs} >= {"float64"}


def test_what_is_unknown_is_refused() -> None:
    with pytest.raises(FuzzError, match="ops names no operation that is known"):
        programs(ops=["no_such_operation"])
    with pytest.raises(FuzzError, match="dtypes has 'float33'; expected float32, "):
        programs(dtypes=["float33"])


@pytest.mark.process
def test_hypothesis_keeps_its_profile(tmp_path: Path) -> None:
    lines = (
        "from hypothesis import settings",
        "settings.register_profile('mine', max_examples=7)",
        "settings.load_profile('mine')",
        "from checked_backend.fuzz.strategies import programs",
        "programs()",
        "assert settings.get_current_profile_name() == 'mine'",
        "assert settings().max_examples == 7",
    )
    code, _, err = finished((sys.executable, "-c", "\n".join(lines)), tmp_path)
    assert code == 0, err


def test_a_failing_program_comes_first_from_the_database() -> None:
    database = InMemoryExampleDatabase()
    seen: list[FuzzProgram] = []

    @settings(QUICK, database=database, derandomize=False, max_examples=200, phases=[Phase.reuse, Phase.generate])
    @hypothesis.seed(1)
    @given(programs())
    def fail(program: FuzzProgram) -> None:
        seen.append(program)
        assert not any(op.startswith("torch.") and not op.endswith("_") for op in program.ops), "not wanted"

    with pytest.raises(AssertionError, match="not wanted"):
        fail()
    failing = seen[-1]
    seen.clear()
    with pytest.raises(AssertionError, match="not wanted"):
        fail()
    assert seen[0] == failing


def test_a_wrong_compiler_fails_a_users_test_with_a_small_program() -> None:
    seen: list[FuzzProgram] = []

    @settings(QUICK, max_examples=100, phases=[Phase.generate])
    @given(programs(training=False, dynamic=False, longest=3))
    def test_my_compiler(program: FuzzProgram) -> None:
        seen.append(program)
        assert_passes(program, compiler_of("planted:alias"))

    with pytest.raises(AssertionError) as raised:
        test_my_compiler()
    text = str(raised.value)
    assert text.startswith("alias")
    assert "x0: " in text
    assert "def program(x0" in text
    assert len(text[text.index("def program") :].splitlines()) <= 4


@pytest.mark.more
def test_a_right_compiler_fails_no_users_test() -> None:
    @settings(QUICK, max_examples=6, phases=[Phase.generate])
    @given(programs())
    def test_my_compiler(program: FuzzProgram) -> None:
        assert_passes(program, compiler_of("planted:none"))

    test_my_compiler()


def test_a_documented_difference_is_no_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    wrong = ProgramResult(Status.FAIL, "an output is another object", kind="alias", detail="alias.identity")
    monkeypatch.setattr(strategies, "check_program", lambda *_: wrong)
    with pytest.raises(AssertionError, match="an output is another object"):
        assert_passes(ADD, "eager", seconds=0)
    monkeypatch.setattr(strategies, "documented", lambda _: DOCUMENTED["alias.identity"])
    assert_passes(ADD, "eager", seconds=0)


def test_a_program_without_a_verdict_has_not_passed(monkeypatch: pytest.MonkeyPatch) -> None:
    undecided = ProgramResult(Status.INCONCLUSIVE, "the check itself failed")
    monkeypatch.setattr(strategies, "check_program", lambda *_: undecided)

    @settings(QUICK, max_examples=3, phases=[Phase.generate])
    @given(st.just(ADD))
    def test_my_compiler(program: FuzzProgram) -> None:
        assert_passes(program, "eager")

    with pytest.raises(Unsatisfiable):
        test_my_compiler()


def test_outside_of_hypothesis_the_reason_of_no_verdict_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    undecided = ProgramResult(Status.INCONCLUSIVE, "no C++ compiler")
    monkeypatch.setattr(strategies, "check_program", lambda *_: undecided)
    with pytest.raises(FuzzError, match=r"says nothing about the compiler: without a verdict: no C\+\+ compiler"):
        assert_passes(ADD, "eager")


def test_a_misspelt_backend_is_refused_at_once() -> None:
    with pytest.raises(OptionError, match="inductr"):
        assert_passes(ADD, "inductr")


def test_what_dynamo_alone_gets_wrong_is_not_the_compilers_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    wrong = ProgramResult(Status.FAIL, "only the compiled program raises", kind="crash", detail="crash.running")
    right = ProgramResult(Status.PASS)

    @settings(QUICK, max_examples=3, phases=[Phase.generate])
    @given(st.just(ADD))
    def test_my_compiler(program: FuzzProgram) -> None:
        assert_passes(program, "inductor", seconds=0)

    monkeypatch.setattr(strategies, "check_program", lambda *_: wrong)
    with pytest.raises(Unsatisfiable):
        test_my_compiler()
    monkeypatch.setattr(strategies, "check_program", lambda _, compiler, *__: right if compiler == "eager" else wrong)
    with pytest.raises(AssertionError, match="only the compiled program raises"):
        test_my_compiler()


def test_choices_are_even_and_have_their_weights() -> None:
    counts: Counter[str] = Counter()
    numbers: list[float] = []

    @settings(QUICK, max_examples=200, phases=[Phase.generate])
    @given(st.data())
    def draw(data: st.DataObject) -> None:
        rng = _Drawn(data.draw)
        for _ in range(10):
            counts[rng.choices("abc", [80, 15, 5])[0]] += 1
            numbers.append(rng.random())
            assert 0 <= rng.getrandbits(31) < 2**31
            assert rng.randrange(7) in range(7)
        assert rng.getrandbits(0) == 0
        assert rng.getrandbits(100) < 2**100

    draw()
    total = counts.total()
    assert counts["a"] / total == pytest.approx(0.8, abs=0.06)
    assert counts["c"] / total == pytest.approx(0.05, abs=0.04)
    assert np.quantile(numbers, [0.25, 0.5, 0.75]) == pytest.approx([0.25, 0.5, 0.75], abs=0.08)
