"""Generated programs run in eager, repeat themselves, and are what was asked for."""

from __future__ import annotations

import random
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from checked_backend.fuzz.generate import make
from checked_backend.fuzz.generate.defined import runs_alike
from checked_backend.fuzz.generate.draft import Choices
from checked_backend.fuzz.generate.make import due, make_program, matches, rules_for
from checked_backend.fuzz.generate.rules import COMMON, RULES
from checked_backend.fuzz.known import is_known, plain
from checked_backend.fuzz.program import FuzzProgram, decode_program, encode_program, refs_of
from checked_backend.fuzz.shrink import straightened
from tests.support.started_programs import finished

pytestmark = pytest.mark.filterwarnings("ignore")  # torch warns of what random programs do

COUNT = 60


@pytest.fixture(scope="module")
def programs() -> list[FuzzProgram]:
    return [make_program(3, number, Choices()) for number in range(COUNT)]


SAME = """
from checked_backend.fuzz.generate.draft import Choices
from checked_backend.fuzz.generate.make import make_program, rules_for
from checked_backend.fuzz.program import encode_program
made = [encode_program(make_program(3, number, Choices())) for number in (7, 1, 0)]
print(*made, sep="\\n")
"""


@pytest.mark.process
def test_the_same_seed_gives_the_same_programs_in_another_process(
    programs: list[FuzzProgram], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONHASHSEED", "7")
    code, out, err = finished((sys.executable, "-c", SAME), tmp_path)
    assert code == 0, err
    assert out.split("\n")[:3] == [encode_program(programs[number]) for number in (7, 1, 0)]
    other = [encode_program(make_program(4, number, Choices())) for number in range(5)]
    assert not {*other} & {encode_program(program) for program in programs}


def test_programs_survive_the_disk_and_run_from_there(programs: list[FuzzProgram]) -> None:
    for program in programs:
        read = decode_program(encode_program(program))
        assert encode_program(read) == encode_program(program)
        assert runs_alike(read)


def test_programs_have_variety(programs: list[FuzzProgram]) -> None:
    ops = {op for program in programs for op in program.ops}
    assert len(ops) > COUNT
    inputs = [given for program in programs for given in program.inputs]
    assert len({given.dtype for given in inputs}) > 6
    assert any(0 in given.stride and given.shape for given in inputs)
    assert any(given.shares is not None for given in inputs)
    assert any(given.fill == "edges" for given in inputs)
    assert {program.gradients for program in programs} == {True, False}
    assert {"for", "if"} <= ops


def test_loops_and_branches_run_and_are_straight_lines_too(programs: list[FuzzProgram]) -> None:
    blocked = [program for program in programs if {"for", "if"} & set(program.ops)]
    assert len(blocked) > COUNT / 12
    for program in blocked:
        straight = straightened(program)
        assert not {"for", "if"} & set(straight.ops)
        assert runs_alike(straight)


def test_wishes_are_followed() -> None:
    choices = Choices(ops=("add*", "F.relu"), dtypes=("bfloat16",), training=True, dynamic=True, longest=3)
    for number in range(8):
        program = make_program(0, number, choices)
        assert any(matches(op, choices.ops) for op in program.ops)
        assert program.gradients
        assert program.dynamic
        assert any(given.dtype == "bfloat16" for given in program.inputs)


def test_each_operator_has_its_turn_before_one_comes_again() -> None:
    operators = {plain(op) for rule in rules_for(()) for op in rule.ops}
    turns = [{plain(rule.ops[0]) for rule in forms} for n in range(len(operators)) for forms in due(0, n)[:-1]]
    assert all(len(forms) == 1 for forms in turns)
    named = [name for forms in turns for name in forms]
    assert set(named[: len(operators)]) == operators
    assert len(operators) < 3 * 200  # within that many programs
    assert named[:9] != [plain(forms[0].ops[0]) for n in range(3) for forms in due(1, n)[:-1]]


def test_common_operators_have_turns_of_their_own() -> None:
    assert {plain(op) for rule in rules_for(()) for op in rule.ops} >= set(COMMON)
    named = [plain(due(0, number)[-1][0].ops[0]) for number in range(2 * len(COMMON))]
    assert sorted(named) == sorted(2 * COMMON)
    assert 3 * len(COMMON) < 200


def test_most_common_operators_are_between_others() -> None:
    """What they read is computed in the program or what they give is read by another call, and not returned."""
    inner = 0
    for number in range(COUNT):
        program = make_program(6, number, Choices(training=False))
        name, first = plain(due(6, number)[-1][0].ops[0]), len(program.inputs)
        places = {first + place for place, call in enumerate(program.calls) if plain(call.op) == name}
        read = {ref.value for call in program.calls for ref in refs_of(call)}
        inner += bool((places & read) - set(program.returns))
    assert inner > COUNT / 3


def test_most_operators_whose_turn_it_is_come(programs: list[FuzzProgram]) -> None:
    met = [{plain(op) for op in program.ops} for program in programs]
    wanted = [{plain(rule.ops[0]) for forms in due(3, n) for rule in forms} for n in range(COUNT)]
    assert sum(len(ops & asked) for ops, asked in zip(met, wanted, strict=True)) > 0.8 * sum(map(len, wanted))


def test_random_numbers_are_left_as_they_were() -> None:
    for seed_all in (torch.manual_seed, random.seed, np.random.seed):
        seed_all(1)
    before = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()
    make_program(0, 1, Choices())
    assert (random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()) == before
    assert torch.is_grad_enabled()


def test_a_number_without_a_program_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(make, "draw_program", lambda *_: None)
    with pytest.raises(LookupError, match="none in 100 attempts"):
        make_program(0, 0, Choices())


def test_every_operation_of_every_rule_is_known() -> None:
    assert not {op for rule in RULES for op in rule.ops if not is_known(op)}
