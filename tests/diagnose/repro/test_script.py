"""What scripts say: each shows the finding it was written for, and no other."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from checked_backend.diagnose.repro.compile_code import PROCESS_SETTINGS, matters, process_lines
from checked_backend.diagnose.repro.repro import BUG_GONE, BUG_THERE, _tolerance
from checked_backend.findings import Finding, Kind, NoiseScale
from checked_backend.numerics.measure import measure
from checked_backend.regions.process_state import ProcessState
from tests.support.reduce_tools import case_of
from tests.support.repro_tools import backend_of, wrote

aten = torch.ops.aten


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


# settings of the process


def test_a_process_as_torch_makes_it_needs_no_line() -> None:
    assert process_lines(ProcessState.capture()) == []


def test_torch_has_each_of_the_settings() -> None:
    assert not PROCESS_SETTINGS.keys() - ProcessState.capture().values.keys()


def test_a_script_has_the_settings_that_may_change_results() -> None:
    names = ("epilogue_fusion", "prologue_fusion", "cpp.inject_log1p_bug_TESTING_ONLY", "cpp.simdlen")
    assert all(map(matters, names))
    others = ("fx_graph_cache", "force_disable_caches", "trace.enabled", "log_file_name", "compile_threads")
    assert not any(map(matters, others))


@pytest.mark.parametrize(("name", "code"), [(name, code) for name, (_, code) in PROCESS_SETTINGS.items()])
def test_a_line_sets_what_it_says(name: str, code: str) -> None:
    before = ProcessState.capture()
    value = before.values[name]
    others = {False: True, True: False, "highest": "high", "none": "ieee", "tf32": "ieee"}
    wanted = (True, True) if isinstance(value, tuple) else others[value]
    try:
        with torch.backends.__allow_nonbracketed_mutation():  # torch's own test module, if imported, forbids it
            exec(code.format(wanted), {"torch": torch})
        after = ProcessState.capture()
        assert after.values[name] == wanted
        assert process_lines(after) == [code.format(wanted)]  # and not what follows from it
    finally:
        before.restore()


@pytest.mark.process
def test_a_script_computes_with_the_users_precision(tmp_path: Path) -> None:
    before = ProcessState.capture()
    try:
        torch.set_float32_matmul_precision("high")
        torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
        case = case_of(lambda x: (torch.ops.aten.mm.default(x, x),), torch.ones(2, 2))
        text = wrote(case, tmp_path, Kind.LOGIC).path.read_text()
    finally:
        before.restore()
    assert "torch.set_float32_matmul_precision('high')" in text
    assert "torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False" in text
    assert text.index("set_float32_matmul_precision") < text.index("def program")
