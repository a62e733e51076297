"""A program as source: it does in Python what the program does."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any

import pytest
import torch

from checked_backend.fuzz.build import build, function_source, make_inputs, run_eager
from checked_backend.fuzz.generate.draft import Choices
from checked_backend.fuzz.generate.make import make_program
from checked_backend.fuzz.program import FuzzProgram, Input, Ref, Statement, merge
from checked_backend.fuzz.text import describe_inputs, render_check, render_script
from tests.support.fuzz_tools import program_of
from tests.support.warm_process import WarmPython

pytestmark = pytest.mark.filterwarnings("ignore")  # torch warns of what random programs do


@pytest.fixture(scope="module")
def programs() -> list[FuzzProgram]:
    return [make_program(8, number, Choices()) for number in range(40)]


def _equal(one: Any, other: Any) -> bool:
    if not isinstance(one, torch.Tensor):
        return type(one) is type(other)
    return torch.equal(torch.nan_to_num(one.detach()), torch.nan_to_num(other.detach())) and one.dtype == other.dtype


def test_the_text_and_the_function_do_what_the_program_does(programs: list[FuzzProgram]) -> None:
    for program in programs:
        with torch.set_grad_enabled(program.gradients):
            torch.manual_seed(0)
            values = run_eager(program)
            expected = [values[place] for place in program.returns]
            torch.manual_seed(0)
            built = build(program)(*make_inputs(program.inputs))
            names: dict[str, Any] = {"torch": torch, "F": torch.nn.functional}
            exec(function_source(program), names)
            torch.manual_seed(0)
            from_source = names["program"](*make_inputs(program.inputs))
        assert all(map(_equal, expected, built)), function_source(program)
        assert all(map(_equal, expected, from_source)), function_source(program)


def test_programs_in_one_function_are_as_alone(programs: list[FuzzProgram]) -> None:
    some = [program for program in programs if not program.gradients and "dropout" not in str(program.ops)][:6]
    with torch.no_grad():
        torch.manual_seed(0)
        one = merge(some)
        together = iter(build(one)(*make_inputs(one.inputs)))
        for program in some:
            results = [next(together) for _ in program.returns]
            alone = run_eager(program)
            random = any("rand" in op or "bernoulli" in op for op in program.ops)
            assert random or all(map(_equal, [alone[place] for place in program.returns], results))


def test_scripts_are_python_and_describe_their_inputs(programs: list[FuzzProgram]) -> None:
    for program in programs:
        compile(render_script(program, about=['a """quote"""', 'C:\\new \x1b[2J """"']), "repro.py", "exec")
        assert len(describe_inputs(program)) == len(program.inputs)


def test_inputs_are_described_with_layout_and_memory() -> None:
    inputs = (Input("int8", (2, 3), (1, 2), fill="edges"), Input("int8", (2,), (1,), offset=1, shares=0))
    program = FuzzProgram(inputs, (Statement("Tensor.add_", (Ref(0), 1)),), (2,))
    assert describe_inputs(program) == [
        "x0: int8[2, 3], strides (1, 2), edge values",
        "x1: int8[2], strides (1,), offset 1, shares memory with x0",
    ]
    first, second = make_inputs(program.inputs)
    assert first.untyped_storage().data_ptr() == second.untyped_storage().data_ptr()


Ended = Callable[[str], "CompletedProcess[str]"]


@pytest.fixture
def ended(tmp_path: Path, warm_python: WarmPython) -> Ended:
    def run(script: str) -> CompletedProcess[str]:
        path = tmp_path / "repro.py"
        path.write_text(script)
        return warm_python.run(path, cwd=tmp_path, timeout=300)

    return run


@pytest.mark.process
@pytest.mark.parametrize(("compiler", "status"), [("eager", 0), ("wrong_in_the_small", 1)])
def test_a_script_ends_by_whether_the_bug_is_there(ended: Ended, compiler: str, status: int) -> None:
    small = Input("float32", (4,), (1,), fill="range", low=1e-9, high=2e-9)
    source = render_script(FuzzProgram((small,), (Statement("torch.sin", (Ref(0),)),), (1,)), compiler)
    wrong = "from torch._dynamo import register_backend\n\n\n@register_backend\ndef wrong_in_the_small(gm, _):\n"
    source = source.replace(
        "import torch\n", f"import torch\n{wrong}    return lambda *a: [r * 0 for r in gm(*a)]\n", 1
    )
    done = ended(source)
    assert done.returncode == status, done.stderr
    assert ("value 0" in done.stdout) == bool(status)


@pytest.mark.process
@pytest.mark.parametrize(("compiler", "status"), [("eager", 0), ("without_signs_of_zero", 1)])
def test_what_a_plain_script_does_not_show_one_that_checks_does(ended: Ended, compiler: str, status: int) -> None:
    many = Input("float32", (70,), (1,), fill="range", low=-2.0, high=2.0)
    program = FuzzProgram((many,), (Statement("torch.trunc", (Ref(0),)),), (1,))
    wrong = "from torch._dynamo import register_backend\n\n\n@register_backend\ndef without_signs_of_zero(gm, _):\n"
    wrong += "    return lambda *a: [r + 0.0 for r in gm(*a)]\n"
    plain, checked = render_script(program, compiler), render_check(program, compiler, {}, ["another sign"])
    for source, expected in ((plain, 0), (checked, status)):
        done = ended(source.replace("import torch\n", f"import torch\n{wrong}", 1))
        assert done.returncode == expected, done.stdout + done.stderr
    assert ("FAIL: " in done.stdout) == bool(status)


@pytest.mark.process
@pytest.mark.parametrize("gradients", [False, True])
def test_a_script_of_a_right_program_with_random_numbers_shows_nothing(ended: Ended, gradients: bool) -> None:
    x = Input("float32", (40, 3), (3, 1), requires_grad=gradients)
    z = Input("complex64", (100,), (1,))
    drawn = Statement("F.dropout", (Ref(0), 0.5)), Statement("torch.rand_like", (Ref(0),))
    program = FuzzProgram((x, z), (*drawn, Statement("torch.neg", (Ref(1),))), (2, 3, 4), gradients)
    done = ended(render_script(program, "eager"))
    assert done.returncode == 0, done.stdout


WRONG_LATER = """
def second(gm, _):
    calls = []

    def run(*args):
        calls.append(1)
        return [r * 2 if len(calls) == 2 else r for r in gm(*args)]

    return run


def overwrites(gm, _):
    kept = []

    def run(*args):
        results = gm(*args)
        kept.extend(r.clone() for r in results) if not kept else None
        return [memory.copy_(r) for memory, r in zip(kept, results)]

    return run


def raises(gm, _):
    raise KeyError("no lowering")
"""


@pytest.mark.process
@pytest.mark.parametrize("fault", ["second", "overwrites"])
def test_a_script_that_calls_again_shows_what_one_call_does_not(ended: Ended, tmp_path: Path, fault: str) -> None:
    (tmp_path / "mine.py").write_text(WRONG_LATER)
    program, compiler = program_of("torch.exp"), f"{tmp_path / 'mine.py'}:{fault}"
    assert ended(render_script(program, compiler)).returncode == 0
    done = ended(render_script(program, compiler, again=True))
    assert done.returncode == 1, done.stderr
    assert done.stdout.endswith("eager and compiled differ\n")
    right = ended(render_script(program, "eager", again=True))
    assert (right.returncode, right.stdout) == (0, "eager and compiled agree\n")
    assert "FAIL: " in ended(render_check(program, compiler, {}, again=True)).stdout


ROUNDS_OTHERWISE = """
from torch import fx


class _Run(fx.Interpreter):
    factor = 1 + 2**-23

    def run_node(self, n):
        value = super().run_node(n)
        return value * self.factor if n.op == "call_function" else value


class _FarOff(_Run):
    factor = 1 + 2**-11


def rounds(gm, _):
    return _Run(gm).run


def far_off(gm, _):
    return _FarOff(gm).run
"""


@pytest.mark.process
@pytest.mark.parametrize(("again", "gradients"), [(False, True), (True, False)])
def test_a_script_does_not_accuse_rounding_where_large_numbers_cancel(
    ended: Ended, tmp_path: Path, again: bool, gradients: bool
) -> None:
    (tmp_path / "mine.py").write_text(ROUNDS_OTHERWISE)
    x = Input("float32", (4,), (1,), requires_grad=gradients)
    calls = Statement("torch.add", (Ref(0), 1000.0)), Statement("torch.sub", (Ref(1), 1000.0))
    program = FuzzProgram((x,), (*calls, Statement("torch.mul", (Ref(2), Ref(2)))), (3,), gradients)
    for compiler, status in (("rounds", 0), ("far_off", 1)):
        done = ended(render_script(program, f"{tmp_path / 'mine.py'}:{compiler}", again=again))
        assert done.returncode == status, done.stdout + done.stderr


@pytest.mark.process
def test_a_script_names_a_planted_fault(ended: Ended) -> None:
    done = ended(render_script(program_of("torch.exp"), "planted:later", again=True))
    assert done.returncode == 1, done.stderr
    assert done.stdout.endswith("eager and compiled differ\n")


@pytest.mark.process
def test_a_script_shows_an_exception_that_only_one_side_raises(ended: Ended, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(WRONG_LATER)
    done = ended(render_script(program_of("torch.exp"), f"{tmp_path / 'mine.py'}:raises"))
    assert done.returncode == 1
    assert "eager: no exception" in done.stdout
    assert "no lowering" in done.stdout
    refused = FuzzProgram((Input("float32", (2,), (1,)),), (Statement("torch.mm", (Ref(0), Ref(0))),), (1,))
    done = ended(render_script(refused, "eager"))
    assert done.returncode == 0, done.stdout  # both raise


def test_a_script_gives_inductor_the_random_numbers_of_eager() -> None:
    assert "fallback_random" in render_script(program_of("torch.rand_like"))
    assert "fallback_random" not in render_script(program_of("torch.exp"))


@pytest.mark.parametrize(
    ("compiler", "named"),
    [("/home/me/mine.py:wrong", "run_path('/home/me/mine.py')['wrong']"), ("inductor", "'inductor'")],
)
def test_scripts_name_the_candidate(compiler: str, named: str) -> None:
    program = program_of("torch.exp")
    for script in (render_script(program, compiler), render_check(program, compiler, {})):
        compile(script, "script.py", "exec")
        assert named in script


@pytest.mark.parametrize(
    "message",
    [
        "cannot lower C:\\users\\new",
        'cannot lower op "add"',
        'two ""',
        "ends in \\",
        "a NUL \0 and \ud800",
        'three """ of them"""',
    ],
)
def test_scripts_are_python_whatever_a_compiler_says(message: str) -> None:
    program = program_of("torch.exp")
    for script in (render_script(program, "eager", [message]), render_check(program, "eager", {}, [message])):
        compile(script.encode("utf-8"), "script.py", "exec")
