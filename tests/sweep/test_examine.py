"""One case in this process: what becomes of models that are fine, wrong, broken, or not for this place."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._dynamo import register_backend
from torch._dynamo.backends import registry

from checked_backend import Report, Verdict, check
from checked_backend.runs.case import Case, CaseResult, Status
from checked_backend.sweep.examine import examine
from checked_backend.sweep.rules import Settings
from tests.support import faults

MODELS = """
import torch

def linear(batch_size=4):
    return torch.nn.Linear(8, 8), (torch.randn(batch_size, 8),)

def two():
    class Two(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)
        def forward(self, x):
            return self.a(x), self.b(x)
    return Two(), (torch.randn(3, 4),)

def function():
    return torch.sin, (torch.randn(3),)

def needs():
    import nowhere_to_be_found

def refuses():
    raise NotImplementedError("only on Tuesdays")

def hungry():
    return torch.nn.Identity(), (torch.zeros(1 << 45),)

def misfit():
    return torch.nn.Linear(8, 8), (torch.randn(3, 3),)

def leaves():
    raise SystemExit(0)

def shouts():
    raise ValueError("\\x1b[31mno")

def wrong_shape():
    return 3

def empty(batch_size=8):
    return torch.nn.Linear(4, 4), (torch.randn(batch_size // 16, 4),)

def closure():
    weight = torch.randn(4, 4)
    return lambda x: x @ weight, (torch.randn(2, 4),)

class Unspeakable(Exception):
    def __str__(self):
        raise ValueError("no")

def unspeakable():
    raise Unspeakable
"""


@pytest.fixture
def models(tmp_path: Path) -> Iterator[Path]:
    path = tmp_path / "zoo_of_examine.py"
    path.write_text(MODELS)

    register_backend(faults.spoiled_output(lambda output: output * 1.001, -1), name="second_is_wrong")
    yield path
    registry._BACKENDS.pop("second_is_wrong")
    registry._COMPILER_FNS.pop("second_is_wrong", None)


def examined(path: Path, model: str, settings: Settings | None = None, **way: Any) -> CaseResult:
    answers: list[CaseResult] = []
    stages: list[str] = []
    case = Case(f"python:{path.name}", model, **{"compiler": "eager", **way})
    rules = settings or Settings()
    examine(f"python:{path}", case, rules, note=stages.append, answer=answers.append)
    assert stages[0] == "building the model"
    early = answers[:-1]  # told while the operator may be looked for
    assert not early or {one.status for one in answers} == {Status.FAIL}
    assert not early or not (rules.ignore_outputs or rules.noise)
    return answers[-1]


@pytest.mark.parametrize("mode", ["inference", "training"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "amp"])
def test_a_model_that_agrees_passes_in_every_way(models: Path, mode: str, dtype: str) -> None:
    found = examined(models, "linear", mode=mode, dtype=dtype)
    assert (found.status.value, found.message) == ("pass", "")
    assert found.peak is not None
    assert Report.from_json(found.report).coverage.checked
    assert ("gradients" in Report.from_json(found.report).coverage.checked) == (mode == "training")


def test_dynamic_shapes_and_batch_sizes_reach_the_check(models: Path) -> None:
    report = Report.from_json(examined(models, "linear", Settings(batch_size=7), dynamic=True).report)
    assert report.coverage.checked["outputs"] > 1


def test_an_optimizer_takes_a_step_in_training_only(models: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []

    def spy(*args: Any, optimizer: Any, **settings: Any) -> Report:
        seen.append(optimizer)
        return check(*args, optimizer=optimizer, **settings)

    monkeypatch.setattr("checked_backend.sweep.examine.check", spy)
    settings = Settings(optimizer="SGD:lr=0.5")
    for mode in ("training", "inference"):
        assert examined(models, "linear", settings, mode=mode).status.value == "pass"
    assert (seen[0].func, seen[0].keywords, seen[1]) == (torch.optim.SGD, {"lr": 0.5}, None)


def test_a_wrong_compiler_fails_and_says_where(models: Path) -> None:
    found = examined(models, "two", compiler="second_is_wrong")
    assert found.status.value == "fail"
    assert "output[1]" in found.message


def test_outputs_that_a_rule_ignores_fail_nothing_and_stay_in_the_coverage(models: Path) -> None:
    settings = Settings(ignore_outputs={"output[1]": "unstable by design"})
    found = examined(models, "two", settings, compiler="second_is_wrong")
    assert found.status.value == "pass"
    coverage = Report.from_json(found.report).coverage
    assert [finding.subject for finding in coverage.ignored] == ["output[1]"]
    assert any("unstable by design" in note for note in coverage.notes)
    other = Settings(ignore_outputs={"output[0]": "x"})
    assert examined(models, "two", other, compiler="second_is_wrong").status.value == "fail"


def test_a_known_failure_fails_and_does_not_count_and_one_of_another_kind_counts(models: Path) -> None:
    found = examined(models, "two", compiler="second_is_wrong")
    (kind,) = {finding.kind for finding in Report.from_json(found.report).findings if finding.fails}
    known = examined(models, "two", Settings(known_fails={str(kind): "#1"}), compiler="second_is_wrong")
    assert (known.status.value, known.expected, known.verdict) == ("fail", "#1", None)
    other = examined(models, "two", Settings(known_fails={"crash": "#1"}), compiler="second_is_wrong")
    assert (other.expected, other.verdict) == ("", Verdict.FAIL)


def test_a_known_failure_that_is_gone_is_told(models: Path) -> None:
    found = examined(models, "two", Settings(known_fails={"logic": "#1"}))
    assert (found.status.value, found.message) == ("pass", "a rule knows it to fail, and it passes: #1")
    assert found.verdict is Verdict.PASS


@pytest.mark.parametrize(("limit", "status"), [(0.01, "pass"), (1e-5, "fail")])
def test_errors_within_a_rules_noise_fail_nothing(models: Path, limit: float, status: str) -> None:
    settings = Settings(noise={"output[*]": (limit, "measured")})
    assert examined(models, "two", settings, compiler="second_is_wrong").status.value == status


@pytest.mark.parametrize(
    ("model", "mode", "status", "why"),
    [
        ("needs", "inference", "import error", "No module named 'nowhere_to_be_found'"),
        ("refuses", "inference", "unsupported", "only on Tuesdays"),
        ("hungry", "inference", "out of memory", "can't allocate memory"),
        ("misfit", "inference", "error", "mat1 and mat2 shapes cannot be multiplied"),
        ("leaves", "inference", "error", "SystemExit: 0"),
        ("shouts", "inference", "error", "ValueError"),
        ("unspeakable", "inference", "error", "its text raises ValueError"),
        ("empty", "inference", "inconclusive", "what it returns has no elements, so nothing was compared"),
        ("wrong_shape", "inference", "error", "it must return (fn_or_module, args, kwargs)"),
        ("function", "training", "unsupported", "there is nothing to train"),
        ("none", "inference", "error", "has no model 'none'; it has linear, two"),
    ],
)
def test_what_cannot_be_run_says_why(models: Path, model: str, mode: str, status: str, why: str) -> None:
    found = examined(models, model, mode=mode)
    assert found.status.value == status
    assert why in found.message


def test_a_function_with_tensors_of_its_own_is_not_blamed_for_another_dtype(models: Path) -> None:
    found = examined(models, "closure", dtype="bfloat16")
    assert found.status.value == "unsupported"
    assert "a function's own tensors cannot be brought to bfloat16: " in found.message
    assert examined(models, "closure").status.value == "pass"


def test_an_unknown_option_of_the_compiler_is_no_pass(models: Path) -> None:
    found = examined(models, "linear", Settings(compiler_options={"nonsense": 1}), compiler="inductor")
    assert found.status.value not in ("pass", "skipped")


def test_what_is_known_not_to_repeat_itself_is_expected(models: Path) -> None:
    models.write_text(
        "import itertools, torch\n"
        "count = itertools.count()\n"
        "def drifting():\n"
        "    class Drifting(torch.nn.Module):\n"
        "        def forward(self, x):\n"
        "            return x + drift(x)\n"
        "    return Drifting(), (torch.randn(3),)\n"
        "@torch.library.custom_op('sweep_examine::drift', mutates_args=())\n"
        "def drift(x: torch.Tensor) -> torch.Tensor:\n"
        "    return torch.full_like(x, float(next(count)))\n"
        "@drift.register_fake\n"
        "def _(x):\n"
        "    return torch.empty_like(x)\n"
        "MODELS = {'drifting': drifting}\n"
    )
    plain = examined(models, "drifting")
    assert plain.status.value == "inconclusive"
    assert plain.verdict is not None
    known = examined(models, "drifting", Settings(tags={"non_deterministic": "it counts"}))
    assert (known.status.value, known.expected) == ("inconclusive", "known not to repeat itself: it counts")
    assert known.verdict is None
