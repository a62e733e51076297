"""Scripts that show a bug in a fresh process, and their text."""

from __future__ import annotations

import ast
import importlib
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.backends import registry

from checked_backend import Finding, Kind, NoiseScale, measure
from checked_backend.diagnose.oracle import verdict_oracle
from checked_backend.diagnose.reduce.failing_case import FailingCase
from checked_backend.diagnose.reduce.sequence import reduce
from checked_backend.diagnose.repro.compile_code import PROCESS_SETTINGS, matters, process_lines, write_compile
from checked_backend.diagnose.repro.repro import (
    BUG_GONE,
    BUG_THERE,
    Repro,
    _tolerance,
    is_drowned,
    script_path,
    write_repro,
)
from checked_backend.options import CheckOptions
from checked_backend.regions.graph_case import GraphCase
from checked_backend.regions.process_state import ProcessState
from tests.support import faults
from tests.support.reduce_tools import case_of, targets

OTHER_BACKENDS = """
import os

import torch


def restrided(gm, example_inputs):
    return lambda *args: tuple(value.t().contiguous().t() for value in gm(*args))


def aliased(gm, example_inputs):
    return lambda *args: (args[0],)


def raises(gm, example_inputs):
    raise RuntimeError("cannot compile this")


def dies(gm, example_inputs):
    return lambda *args: os.abort()


def mutates(gm, example_inputs):
    return lambda *args: (args[0].add_(1),)


def draws(gm, example_inputs):
    return lambda *args: (torch.rand(()), gm(*args))[1]


def makes_nan(gm, example_inputs):
    return lambda *args: tuple(value / 0 * 0 for value in gm(*args))


def uncounted(gm, example_inputs):
    return lambda *args: gm(*(value.data for value in args))


def drops(gm, example_inputs):
    return lambda *args: gm(*(value.clone() for value in args))


def writes_wrongly(gm, example_inputs):
    return lambda *args: (gm(*args), args[0].add_(1))[0]


def rounds(gm, example_inputs):
    return lambda *args: (gm(*args), args[0].mul_(1.000001))[0]
"""


def backend_of(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """One of these backends, in a module of its own."""
    (tmp_path / "other_backends.py").write_text(OTHER_BACKENDS)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "other_backends", raising=False)
    return getattr(__import__("other_backends"), name)


def wrote(case: GraphCase, folder: Path, kind: Kind, detail: str = "", **further: Any) -> Repro:
    """A script for a finding that is taken for granted."""
    finding = Finding(kind, "output[0]", "planted", detail)

    def oracle(_case: GraphCase, _timeout: float) -> tuple[Finding, ...]:
        return (finding,)

    return write_repro(case, folder, name=f"{kind}", subject="output[0]", kind=kind, oracle=oracle, **further)


aten = torch.ops.aten

WRONG_BACKEND = '''
import torch
from torch import fx


class Spoiled(fx.Interpreter):
    def run_node(self, n):
        value = super().run_node(n)
        return value + 1 if "{word}" in str(n.target) else value


def wrong(gm, example_inputs):
    """A backend that is wrong about one operator."""
    return Spoiled(gm).run
'''


@pytest.fixture
def wrong_backend(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Any]:
    """A backend in a module of its own, wrong about the operators whose name contains a word."""

    def make(word: str) -> Any:
        folder = tmp_path / "somewhere"
        folder.mkdir(exist_ok=True)
        name = f"wrong_{word}"
        (folder / f"{name}.py").write_text(WRONG_BACKEND.format(word=word))
        monkeypatch.syspath_prepend(str(folder))
        monkeypatch.delitem(sys.modules, name, raising=False)  # another test's, from another folder
        return __import__(name).wrong

    return make


def relu_then(x: Tensor) -> tuple[Tensor]:
    return (aten.relu.default(x),)


@pytest.mark.process
def test_a_difference_that_may_be_rounding_confirms_nothing(
    wrong_backend: Callable[[str], Any], tmp_path: Path
) -> None:
    case = case_of(relu_then, torch.tensor([0.1, -2.0]), compiler=wrong_backend("relu"))
    repro = write_repro(
        case, tmp_path, name="relu", subject="output[0]", kind=Kind.LOGIC, oracle=lambda _case, _seconds: ()
    )
    assert not repro.confirmed
    assert "did not show" in repro.output


@pytest.mark.parametrize(
    ("name", "file"),
    [("_softmax.default", "repro_softmax_default.py"), ("relu_.default", "repro_relu_default.py"), ("!", "repro.py")],
)
def test_a_script_is_named_after_the_operator(name: str, file: str, tmp_path: Path) -> None:
    assert script_path(tmp_path, name).name == file


@pytest.mark.process
def test_a_script_runs_alone_and_shows_the_bug(wrong_backend: Callable[[str], Any], tmp_path: Path) -> None:
    case = case_of(relu_then, torch.tensor([[0.1, -2.0]]), compiler=wrong_backend("relu"))
    repro = write_repro(
        case, tmp_path / "reports", name="relu.default", subject="output[0]", kind=Kind.LOGIC, source="m.py:3 in f"
    )
    assert repro.confirmed, repro.output
    text = repro.path.read_text()
    for words in ("torch.relu(x)", "torch.tensor([[0.1, -2.0]])", "m.py:3 in f"):
        assert words in text
    assert "checked_backend" not in text
    assert BUG_THERE in repro.output
    assert repro.path == tmp_path / "reports" / "repro_relu_default.py"
    assert [path.name for path in repro.path.parent.iterdir()] == [repro.path.name]  # nothing half written
    # with the bug repaired, the same file says so
    module = tmp_path / "somewhere" / "wrong_relu.py"
    module.write_text(module.read_text().replace("value + 1", "value"))
    done = subprocess.run([sys.executable, str(repro.path)], capture_output=True, text=True)
    assert (done.returncode, BUG_GONE in done.stdout) == (0, True), done.stdout + done.stderr


@pytest.mark.process
def test_a_backend_without_a_name_is_said_to_have_none(tmp_path: Path) -> None:
    case = case_of(relu_then, torch.ones(2), compiler=faults.wrong_operator("aten.relu.default"))
    repro = write_repro(case, tmp_path, name="relu", subject="output[0]", kind=Kind.LOGIC)
    assert not repro.confirmed
    assert "cannot be imported" in repro.output
    assert "not named" in repro.output


def test_a_backend_is_found_by_any_name_that_a_module_has_for_it(
    wrong_backend: Callable[[str], Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = sys.modules[wrong_backend("relu").__module__]
    file = tmp_path / "somewhere" / "wrong_relu.py"
    file.write_text(
        file.read_text() + "class Backends:\n    def method(self, gm, inputs):\n        return wrong(gm, inputs)\n\n"
        "some = Backends()\nnameless = lambda gm, inputs: wrong(gm, inputs)\n"
    )
    module = importlib.reload(module)
    monkeypatch.setitem(registry._COMPILER_FNS, "planted", module.wrong)
    program = FailingCase.of(case_of(relu_then, torch.ones(2)), "output[0]")
    for compiler, name in (
        (module.wrong, "wrong"),
        ("planted", "wrong"),  # a fresh process does not know it by the name it was registered under
        (module.some.method, "some.method"),
        (module.nameless, "nameless"),
    ):
        code = write_compile(replace(program, case=replace(program.case, options=CheckOptions(compiler=compiler))))
        assert code.arguments == f"backend={name}"
        assert code.lines[-1] == f"from wrong_relu import {name.partition('.')[0]}"
        assert not code.problem


SHIFT = 2.0


class Shifted(torch.fx.Interpreter):
    def run_node(self, n: torch.fx.Node) -> Any:
        return super().run_node(n) + SHIFT if "relu" in str(n.target) else super().run_node(n)


@pytest.mark.process
def test_a_backend_that_no_module_has_is_written_into_the_script(tmp_path: Path) -> None:
    factor = 3

    def made_here(gm: torch.fx.GraphModule, _example_inputs: NotImported) -> Callable[..., Any]:  # noqa: F821
        return lambda *args: tuple(result * factor for result in Shifted(gm).run(*args))

    case = case_of(relu_then, torch.tensor([1.0]), compiler=made_here)
    repro = write_repro(case, tmp_path, name="relu", subject="output[0]", kind=Kind.LOGIC)
    assert repro.confirmed, repro.output
    text = repro.path.read_text()
    assert "factor = 3" in text
    assert "SHIFT = 2.0" in text
    assert text.index("class Shifted") < text.index("def made_here") < text.index("backend=made_here")
    assert "test_repro" not in text


@pytest.mark.process
def test_a_script_that_does_not_show_the_bug_is_not_confirmed(tmp_path: Path) -> None:
    repro = write_repro(case_of(relu_then, torch.ones(2)), tmp_path, name="relu", subject="output[0]", kind=Kind.LOGIC)
    assert not repro.confirmed
    assert BUG_GONE in repro.output


@pytest.mark.process
def test_values_that_are_too_many_are_in_a_file(wrong_backend: Callable[[str], Any], tmp_path: Path) -> None:
    x = torch.rand(7, 9).t()
    repro = wrote(case_of(relu_then, x, compiler=wrong_backend("relu")), tmp_path / "reports", Kind.LOGIC)
    assert repro.confirmed, repro.output
    assert "safetensors" in repro.path.read_text()
    assert repro.path.with_suffix(".safetensors").exists()
    assert "(63,)" not in repro.output


@pytest.mark.slow
@pytest.mark.ci_sample
def test_a_noisy_result_needs_more_than_noise(wrong_backend: Callable[[str], Any], tmp_path: Path) -> None:
    case = case_of(lambda x: (aten._softmax.default(x, 0, False),), torch.randn(5), compiler=wrong_backend("softmax"))
    [found] = verdict_oracle(case, 60) or ()
    repro = write_repro(case, tmp_path, name="softmax", subject="output[0]", kind=found.kind)
    assert repro.confirmed, repro.output
    [tolerance] = [
        node.value.value
        for node in ast.walk(ast.parse(repro.path.read_text()))
        if isinstance(node, ast.keyword) and node.arg == "tolerance" and isinstance(node.value, ast.Constant)
    ]
    assert 1e-7 < tolerance < 1e-2


@pytest.mark.slow
@pytest.mark.ci_sample
def test_where_rounding_differs_as_much_as_the_bug_the_script_is_in_float64(
    wrong_backend: Callable[[str], Any], tmp_path: Path
) -> None:
    """Mended, such a script must not go on about rounding."""

    x = torch.tensor([3e8, 1.7, -3e8]).repeat(500)
    case = case_of(lambda x: (aten.sum.dim_IntList(aten.mul.Tensor(x, 0.1), [0]),), x, compiler=wrong_backend("sum"))
    [found] = verdict_oracle(case, 60) or ()
    assert is_drowned(found), found
    repro = write_repro(case, tmp_path, name="sum", subject="output[0]", kind=found.kind)
    assert repro.confirmed, repro.output
    text = repro.path.read_text()
    assert "float64" in text
    assert "In float64: in lower precision rounding differs as much." in text
    module = tmp_path / "somewhere" / "wrong_sum.py"
    module.write_text(module.read_text().replace("value + 1", "value * (1 + 1e-14)"))  # as rounding may
    done = subprocess.run([sys.executable, str(repro.path)], capture_output=True, text=True)
    assert (done.returncode, BUG_GONE in done.stdout) == (0, True), done.stdout + done.stderr


def test_a_script_that_takes_too_long_is_not_run_again(
    wrong_backend: Callable[[str], Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs: list[float] = []

    def slow(*_args: Any, timeout: float, **_kwargs: Any) -> Any:
        runs.append(timeout)
        raise subprocess.TimeoutExpired(["python"], timeout)

    monkeypatch.setattr(subprocess, "run", slow)
    repro = wrote(case_of(relu_then, torch.ones(2), compiler=wrong_backend("relu")), tmp_path, Kind.LOGIC, timeout=9)
    assert (repro.confirmed, runs) == (False, [9])
    assert "timed out after 9 seconds" in repro.output


@pytest.mark.slow
@pytest.mark.inductor
@pytest.mark.ci_sample
def test_a_float_floor_division_that_inductor_rounds_wrong(tmp_path: Path) -> None:
    # https://github.com/pytorch/pytorch/issues/197895
    def divided(x: Tensor, y: Tensor) -> tuple[Tensor]:
        return (aten.neg.default(aten.floor_divide.default(aten.abs.default(x), y)),)

    inputs = (torch.arange(1, 65).float() / 2, torch.tensor([0.1, 0.2, 0.3, 0.7]).repeat(16))
    case = case_of(divided, *inputs, compiler="inductor")
    found = verdict_oracle(case, 300) or ()
    if not found:
        pytest.skip("this version of torch divides right")
    reduction = reduce(case, subject="output[0]", kind=found[0].kind, deadline=time.monotonic() + 400)
    assert targets(reduction) == ["aten.floor_divide.default"]
    assert reduction.size.elements <= 4
    repro = write_repro(reduction.best.case, tmp_path, name="floor", subject=reduction.best.subject, kind=found[0].kind)
    assert repro.confirmed, repro.output
    assert " // " in repro.path.read_text()


def adds_one(x: Tensor) -> tuple[Tensor]:
    aten.add_.Tensor(x, 1)
    return (aten.neg.default(x),)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "detail", "shows"),
    [
        ("uncounted", "mutation.uncounted", True),
        ("rounds", "mutation.uncounted", False),  # counted, and other values: not this bug
        ("drops", "mutation.uncounted", False),  # not written at all
        ("drops", "mutation.dropped", True),
        ("rounds", "mutation.dropped", False),
        ("writes_wrongly", "mutation.wrong", True),
        ("writes_wrongly", "mutation.unexpected", False),  # eager changes it too
    ],
)
def test_a_script_about_a_mutation_shows_that_one_alone(
    name: str, detail: str, shows: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = case_of(adds_one, torch.tensor([0.3, 0.7]), compiler=backend_of(name, tmp_path, monkeypatch))
    repro = wrote(case, tmp_path / "reports", Kind.MUTATION, detail)
    assert repro.confirmed is shows, repro.output
    assert (BUG_THERE if shows else BUG_GONE) in repro.output


@pytest.mark.slow
def test_inputs_without_elements_do_not_matter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def both(x: Tensor, empty: Tensor) -> tuple[Tensor]:
        aten.add_.Tensor(x, 1)
        return (aten.neg.default(empty),)

    backend = backend_of("writes_wrongly", tmp_path, monkeypatch)
    case = case_of(both, torch.tensor([0.3, 0.7]), torch.empty(0), compiler=backend)
    repro = wrote(case, tmp_path / "reports", Kind.MUTATION, "mutation.wrong")
    assert repro.confirmed, repro.output


@pytest.mark.slow
@pytest.mark.ci_sample
@pytest.mark.parametrize(
    ("name", "kind", "detail"),
    [
        ("restrided", Kind.STRUCTURE, "structure.stride"),
        ("aliased", Kind.ALIAS, "alias.memory"),
        ("raises", Kind.CRASH, "crash.compiling"),
        ("dies", Kind.CRASH, "crash.signal"),
        ("mutates", Kind.MUTATION, "mutation.unexpected"),
        ("makes_nan", Kind.NONFINITE, "nonfinite"),
        ("draws", Kind.RNG, "rng.state"),
    ],
)
def test_every_kind_of_finding_has_its_script(
    name: str, kind: Kind, detail: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend = backend_of(name, tmp_path, monkeypatch)
    case = case_of(lambda x: (aten.clone.default(x),), torch.ones(2, 3), compiler=backend)
    repro = wrote(case, tmp_path / "reports", kind, detail)
    assert repro.confirmed, repro.output


def test_a_tolerance_is_between_rounding_and_the_bug() -> None:
    def tolerance(noise: float | None, bug: float) -> float:
        metrics = replace(measure(reference=torch.zeros(1), candidate=torch.ones(1)), max_abs_diff=bug)
        scale = None if noise is None else NoiseScale(noise, noise, "made up")
        return _tolerance(Finding(Kind.LOGIC, "output[0]", "", metrics=metrics, noise=scale))[0]

    assert tolerance(0.0, 1.0) == 0.0
    assert tolerance(1e-6, 1.0) == pytest.approx(1e-3)
    assert tolerance(1e-6, float("inf")) == pytest.approx(1e-4)
    for noise in (None, 5.0):  # not known, or more than the bug: the bug shows, and what is much less does not
        assert 0.04 < tolerance(noise, 1.0) < 1.0


def test_a_process_as_torch_makes_it_needs_no_line() -> None:
    assert process_lines(ProcessState.capture()) == []


def test_torch_has_each_of_the_settings() -> None:
    assert not PROCESS_SETTINGS.keys() - ProcessState.capture().values.keys()


def test_a_script_has_the_settings_that_may_change_results() -> None:
    assert all(map(matters, ("epilogue_fusion", "prologue_fusion", "cpp.inject_log1p_bug_TESTING_ONLY", "cpp.simdlen")))
    others = ("fx_graph_cache", "force_disable_caches", "trace.enabled", "log_file_name", "compile_threads")
    assert not any(map(matters, others))


@pytest.mark.parametrize(("name", "code"), [(name, code) for name, (_, code) in PROCESS_SETTINGS.items()])
def test_a_line_sets_what_it_says(name: str, code: str) -> None:
    value = ProcessState.capture().values[name]
    others = {False: True, True: False, "highest": "high", "none": "ieee", "tf32": "ieee"}
    wanted = (True, True) if isinstance(value, tuple) else others[value]
    with torch.backends.__allow_nonbracketed_mutation():  # torch's own test module, if imported, forbids it
        exec(code.format(wanted), {"torch": torch})
    after = ProcessState.capture()
    assert after.values[name] == wanted
    assert process_lines(after) == [code.format(wanted)]  # and not what follows from it


@pytest.mark.process
def test_a_script_computes_with_the_users_precision(tmp_path: Path) -> None:
    torch.set_float32_matmul_precision("high")
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
    case = case_of(lambda x: (torch.ops.aten.mm.default(x, x),), torch.ones(2, 2))
    text = wrote(case, tmp_path, Kind.LOGIC).path.read_text()
    assert "torch.set_float32_matmul_precision('high')" in text
    assert "torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False" in text
    assert text.index("set_float32_matmul_precision") < text.index("def program")
