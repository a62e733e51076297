"""Each planted fault that a program of one process can meet is found within 200 generated programs."""

from __future__ import annotations

import functools
import inspect
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import pytest
import torch

from checked_backend.fuzz.examine import check_program
from checked_backend.fuzz.generate.draft import Choices
from checked_backend.fuzz.generate.make import make_program
from checked_backend.fuzz.program import FuzzProgram
from checked_backend.fuzz.results import ProgramResult, documented
from tests.support import faults

pytestmark = pytest.mark.filterwarnings("ignore")  # torch warns of what random programs do

MOST = 200
SEED = 22


LEFT_OUT: Mapping[str, str] = MappingProxyType(
    {
        "clean": "it has no fault: the control",
        "run_in_python": "how a fault is made, as those that follow",
        "run_nodes": "",
        "interpreted": "",
        "through_aot": "",
        "through_aot_pair": "",
        "compiled_by_aot": "",
        "every_output": "",
        "instead": "",
        "runs": "",
        "forgets_to_count": "selftest plants it",
        "stale_parameters": "no parameter of a program changes",
    }
)
"""Names of `tests.support.faults` that are not planted here, and why."""


CLEAN = faults.clean()


@dataclass(frozen=True)
class Planted:
    """A planted fault.

    Attributes:
        make: Makes the wrong compiler, anew for each program.
        kinds: The kinds of findings that say what it is.
        training: Whether it is looked for in programs that are differentiated; None for either.
        dynamic: Whether it is looked for in programs of symbolic sizes.
        isolate: Whether it ends the process.
        control: A compiler without the fault.
    """

    make: Callable[[], faults.Compiler]
    kinds: frozenset[str]
    training: bool | None = None
    dynamic: bool = False
    isolate: bool = False
    control: faults.Compiler = CLEAN


def where_it_fits(faulty: faults.Compiler, needs: Callable[[list[Any]], bool] = bool) -> faults.Compiler:
    """The wrong compiler for graphs whose results, as they were traced, it can spoil; a right one for others."""

    def compiler(gm: torch.fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        returned = gm.graph.find_nodes(op="output")[0].all_input_nodes
        if not needs([node.meta.get("example_value") for node in returned]):
            return gm.forward
        try:
            return faulty(gm, example_inputs)
        except (LookupError, ValueError):  # no such input, or it is not changed in place
            return gm.forward

    return compiler


def _starts_with_floats(returned: list[Any]) -> bool:
    first = returned[0] if returned else None
    return isinstance(first, torch.Tensor) and first.is_floating_point() and first.is_contiguous() and first.numel() > 0


def _has_nan(args: Sequence[Any]) -> bool:
    return any(isinstance(arg, torch.Tensor) and arg.is_floating_point() and bool(arg.isnan().any()) for arg in args)


def _larger(tensor: torch.Tensor) -> torch.Tensor:
    return tensor * 1.01


def _adds(gm: torch.fx.GraphModule) -> bool:
    return any("aten.add" in str(node.target) for node in gm.graph.nodes)


VALUES = frozenset({"logic", "precision", "nonfinite", "mutation", "alias"})
RELU, MUL, EXP, SUM = "aten.relu.default", "aten.mul.Tensor", "aten.exp.default", "aten.sum.dim_IntList"


def _planted(make: Callable[[], faults.Compiler], kinds: str = "", how: faults.How = "python", **more: Any) -> Planted:
    return Planted(make, frozenset(kinds.split()) or VALUES, control=faults.clean(how), **more)


def _both(
    name: str,
    make: Callable[[faults.How], faults.Compiler],
    kinds: str = "",
    needs: Callable[[list[Any]], bool] = bool,
    **more: Any,
) -> dict[str, Planted]:
    """A fault in both of its variants."""

    def planted(how: faults.How) -> Planted:
        return _planted(lambda: where_it_fits(make(how), needs), kinds, how, **more)

    return {f"{name}, python": planted("python"), f"{name}, aot": planted("aot")}


def _of_operator(name: str, make: Callable[[str], faults.Compiler], *ops: str, **more: Any) -> dict[str, Planted]:
    """A fault of one operator of AOT autograd's graphs."""
    return {f"{name}, {op}": _planted(lambda op=op: make(op), how="aot", **more) for op in ops}


PLANTED: dict[str, Planted] = {
    **_both("wrong_value", lambda how: faults.wrong_value(how=how)),
    **_both("one_element", lambda how: faults.one_element(how=how)),
    **_both(
        "spoiled_output", lambda how: faults.spoiled_output(lambda one: one * 1.01, how=how), "", _starts_with_floats
    ),
    **_both("wrong_dtype", lambda how: faults.wrong_dtype(how=how), "structure"),
    **_both("wrong_shape", lambda how: faults.wrong_shape(how=how), "structure"),
    **_both("wrong_stride", lambda how: faults.wrong_stride(how=how), "structure"),
    **_both("made_nan", lambda how: faults.made_nan(how=how), "", _starts_with_floats),
    "lost_alias": _planted(lambda: where_it_fits(faults.lost_alias()), "alias mutation"),
    "missing_output": _planted(faults.missing_output, "structure crash"),
    "extra_output": _planted(lambda: where_it_fits(faults.extra_output()), "structure crash"),
    "returns_none": _planted(faults.returns_none, "structure crash"),
    "not_a_function": _planted(faults.not_a_function, "structure crash"),
    **_both("dropped_mutation", lambda how: faults.dropped_mutation("x0", how)),
    **_both("wrong_mutation", lambda how: faults.wrong_mutation("x0", how)),
    "unwanted_mutation": _planted(lambda: where_it_fits(faults.unwanted_mutation("x0"))),
    **_both("zeroed_gradient", lambda how: faults.zeroed_gradient("x0", how), training=True),
    **_both("scaled_gradient", lambda how: faults.scaled_gradient("x0", how), training=True),
    **_both("spoiled_gradient", lambda how: faults.spoiled_gradient("x0", faults.changed, how), training=True),
    "spoiled_tangents": _planted(lambda: faults.spoiled_tangents(faults.changed), training=True),
    "overwritten_cotangent": _planted(
        lambda: where_it_fits(faults.overwritten_cotangent(), _starts_with_floats), training=True
    ),
    **_both("crash_when_compiling", faults.crash_when_compiling, "crash"),
    **_both("crash_when_running", faults.crash_when_running, "crash"),
    "crash_in_backward, running": _planted(faults.crash_in_backward, "crash", "aot", training=True),
    "crash_in_backward, compiling": _planted(
        lambda: faults.crash_in_backward("compiling"), "crash", "aot", training=True
    ),
    "dies_on": _planted(lambda: faults.dies_on(_adds, RELU), "crash", "aot", isolate=True),
    **_both("too_many_random_numbers", faults.too_many_random_numbers, "rng"),
    **_both("reseeded", faults.reseeded, "rng"),
    **_both("other_random_numbers", faults.other_random_numbers, "rng logic structure"),
    "leaves_setting": _planted(
        lambda: faults.leaves_setting(lambda: torch.set_default_dtype(torch.float64)), "mutation"
    ),
    "on_data": _planted(lambda: where_it_fits(faults.on_data(_has_nan, faults.wrong_value()))),
    "from_call": _planted(lambda: where_it_fits(faults.from_call(2, faults.wrong_value()))),
    "only_in_call": _planted(lambda: where_it_fits(faults.only_in_call(3, faults.wrong_value()))),
    "remembers_its_first_results": _planted(
        lambda: where_it_fits(faults.remembers_its_first_results, _starts_with_floats)
    ),
    "writes_to_earlier_inputs": _planted(lambda: faults.writes_to_earlier_inputs, training=False),
    "remembers_by_address": _planted(lambda: where_it_fits(faults.remembers_by_address, _starts_with_floats)),
    "same_memory_for_all_calls": _planted(
        lambda: where_it_fits(faults.same_memory_for_all_calls, _starts_with_floats), "alias structure"
    ),
    "once": _planted(lambda: where_it_fits(faults.spoiled_output(faults.once(1, faults.changed)))),
    **_of_operator("wrong_operator", lambda op: faults.wrong_operator(op, how="aot"), RELU, MUL, EXP, SUM),
    "wrong_operator, python": _planted(lambda: faults.wrong_operator(str(operator.add))),
    **_of_operator("left_out", faults.left_out, RELU, EXP),
    **_of_operator("refuses", faults.refuses, RELU, EXP, kinds="crash"),
    **_of_operator("wrong_if_unseen", faults.wrong_if_unseen, RELU, MUL, EXP),
    **_of_operator("wrong_if_fused", faults.wrong_if_fused, RELU, MUL, EXP),
    **_of_operator("wrong_for_readers", faults.wrong_for_readers, MUL, EXP),
    **_of_operator("wrong_if_symbolic", faults.wrong_if_symbolic, MUL, dynamic=True),
    "wrong_if_compiled_together": _planted(
        lambda: faults.wrong_if_compiled_together(EXP, MUL), how="aot", training=True
    ),
}


@functools.cache
def _program(number: int, training: bool | None, dynamic: bool) -> FuzzProgram:
    return make_program(SEED, number, Choices(training=training, dynamic=dynamic))


def _found_after(planted: Planted, most: int) -> tuple[int, ProgramResult] | None:
    """After how many programs a fault is found, and what came out; None if it is not."""
    for number in range(most):
        program = _program(number, planted.training, planted.dynamic)
        result = check_program(program, planted.make(), isolate=60.0 if planted.isolate else None)
        if result.kind in planted.kinds and not check_program(program, planted.control).kind:
            return number + 1, result
    return None


def test_each_fault_is_planted_or_left_out_for_a_reason() -> None:
    planted = {name.partition(",")[0] for name in PLANTED}
    makers = {
        name
        for name, value in vars(faults).items()
        if inspect.isfunction(value)
        and value.__module__ == faults.__name__
        and not name.startswith("_")
        and value.__annotations__.get("return") in ("Compiler", "Spoil", "Callable[..., Any]")
    }
    assert planted | LEFT_OUT.keys() == makers
    assert not planted & LEFT_OUT.keys()


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", ["wrong_value, aot", "zeroed_gradient, python", "reseeded, aot"])
def test_a_fault_is_found_soon(name: str) -> None:
    assert _found_after(PLANTED[name], 30) is not None


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("name", PLANTED)
def test_each_fault_is_found_within_200_programs(name: str) -> None:
    found = _found_after(PLANTED[name], MOST)
    assert found is not None
    after, result = found
    print(f"{name}: after {after} programs: {result.message}")
    assert (documented(result) is not None) == name.startswith("wrong_stride")  # a class of its own, and no failure
