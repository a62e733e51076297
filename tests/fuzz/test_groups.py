"""One bug is one row, however its operator is spelled and whatever else a program does."""

from __future__ import annotations

import pytest

from checked_backend.fuzz.groups import may_be, signature_of
from checked_backend.fuzz.known import plain
from tests.support.fuzz_tools import STRIDES, failing, group_of, program_of


@pytest.mark.parametrize("op", ["torch.add", "Tensor.add_", "+", "+=", "aten.add.Tensor", "aten.add_.Tensor"])
def test_spellings_of_an_operator_are_one(op: str) -> None:
    assert plain(op) == "add"


def test_what_differs_makes_another_group() -> None:
    first = signature_of(program_of("torch.add"), failing("logic"))
    assert first.signature == signature_of(program_of("Tensor.add_"), failing("logic")).signature
    assert first.signature != signature_of(program_of("torch.mul"), failing("logic")).signature
    assert first.signature != signature_of(program_of("torch.add"), failing("alias")).signature
    assert first.signature != signature_of(program_of("torch.add"), failing("logic", "logic.this_dtype")).signature


def test_crashes_are_told_apart_by_their_exception() -> None:
    one = failing("crash", "crash.compiling", actual="KeyError: 'x'")
    other = failing("crash", "crash.compiling", actual="AssertionError: y")
    made = [signature_of(program_of("torch.add"), result).detail for result in (one, other)]
    assert made == ["crash.compiling: KeyError", "crash.compiling: AssertionError"]


def test_the_operator_that_was_found_names_the_group() -> None:
    found = signature_of(program_of("torch.exp", "torch.add"), failing(op="aten.exp.default"))
    assert found.op == "exp"
    assert signature_of(program_of("torch.exp", "torch.add"), failing()).op == "exp > add"


def test_a_failure_with_all_operations_of_a_known_group_may_be_that() -> None:
    group = group_of("torch.exp", "torch.add")
    assert may_be(group, program_of("torch.neg", "Tensor.exp_", "torch.add"), failing())
    assert not may_be(group, program_of("torch.neg", "torch.add"), failing())
    assert not may_be(group, program_of("torch.exp", "torch.add"), failing("alias"))


def test_the_smallest_confirmed_program_is_kept() -> None:
    large, small = group_of("torch.exp", "torch.add"), group_of("torch.exp")
    joined = large.joined(small)
    assert joined.program == small.program
    assert joined.met == 2
    assert small.joined(group_of("torch.exp", confirmed=False)).confirmed


def test_documented_differences_are_one_group_whatever_the_operator() -> None:
    first, second = (signature_of(program_of(op), failing(**STRIDES)) for op in ("torch.exp", "torch.add"))
    assert first.signature == second.signature
    assert first.difference is not None
    assert signature_of(program_of("torch.exp"), failing(**{**STRIDES, "subject": "mutated[x0]"})).difference is None


@pytest.mark.parametrize(
    ("detail", "expected", "actual"),
    [
        ("alias.identity", "the same object: output[0]", "shared memory: output[0]"),
        ("structure.type", "None", "Tensor"),
    ],
)
def test_what_is_made_at_the_edge_of_a_program_is_one_group(detail: str, expected: str, actual: str) -> None:
    kind = detail.partition(".")[0]
    results = [failing(kind, detail, expected=have, actual=actual) for have in (expected, "other")]
    first, second = (signature_of(program_of(op), results[0]) for op in ("torch.exp", "torch.add"))
    assert first.signature == second.signature
    assert first.difference is None
    assert signature_of(program_of("torch.exp"), results[1]).signature != first.signature


def test_what_is_not_counted_is_one_bug_whatever_the_program() -> None:
    one = failing("mutation", "mutation.uncounted")
    first, second = (signature_of(program_of(op), one) for op in ("torch.exp", "torch.add"))
    assert first.signature == second.signature
    wrong = [signature_of(program_of(op), failing("mutation", "mutation.wrong")) for op in ("torch.exp", "torch.add")]
    assert wrong[0].signature != wrong[1].signature


def test_a_setting_that_is_left_changed_is_one_bug_whatever_the_program() -> None:
    left = failing("mutation", "mutation.default_dtype", subject="state[default_dtype]")
    assert (
        signature_of(program_of("torch.exp"), left).signature == signature_of(program_of("torch.add"), left).signature
    )


def test_a_wrong_number_of_results_is_one_bug_whatever_the_program() -> None:
    many, few = (
        signature_of(program_of(op), failing("structure", "structure.outputs", expected=f"{count} values", actual="1"))
        for op, count in (("torch.exp", 2), ("torch.add", 3))
    )
    assert many.signature == few.signature
    assert may_be(many, few.program, few.result)


def test_deaths_that_could_not_be_made_small_are_one_row() -> None:
    long = ("torch.exp", "torch.add", "torch.neg", "torch.sin"), ("torch.mul", "torch.cos", "torch.tan", "torch.abs")
    died = failing("crash", "crash.signal", status="crash", actual="SIGSEGV")
    first, second = (signature_of(program_of(*ops), died) for ops in long)
    assert first.signature == second.signature
    assert first.op == "several operators"
    small = signature_of(program_of("torch.exp", "torch.add"), died)
    assert small.op == "exp > add"  # that of a small one tells which bug it is
    assert not may_be(first, program_of(*long[1]), died)  # so the next one is looked into
    raised = failing("crash", "crash.compiling", actual="KeyError: 'x'")
    assert signature_of(program_of(*long[0]), raised).op == "exp > add > neg > sin"
