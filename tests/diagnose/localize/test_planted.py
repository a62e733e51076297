"""Faults planted inside Inductor: they can be planted and taken out again, and the operator is named."""

from __future__ import annotations

import ast
import os
import warnings
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch._inductor import config, decomposition, lowering
from torch.utils import _pytree as pytree

from checked_backend import Report, collect
from checked_backend._torch.caches import without_compile_caches
from checked_backend.diagnose.workaround.search import WorkaroundSearch
from checked_backend.process.job import AnswerFolder, Job, JobResources, run
from tests.support import models
from tests.support.planted import FAULTS, PLANTED, planted
from tests.support.programs import PROGRAMS
from tests.support.region_tools import checked

EVERYWHERE = Path(__file__).parent / "everywhere"
MODELS: dict[str, Callable[[], models.Case]] = {
    "bert": partial(models.bert_masked_lm, "eager", 0.0, 1),
    "gpt2": partial(models.gpt2_lm, "eager", 0.0, 1),
    "resnet": models.resnet,
    "vit": partial(models.vit_classifier, "eager", 0.0, 1),
}
HOMES = {
    "bert": (
        "addmm gelu _softmax native_layer_norm embedding_dense_backward native_layer_norm_backward bmm gather erf "
        "where sum embedding _log_softmax_backward_data"
    ),
    "gpt2": "tanh cat tanh_backward mm slice constant_pad_nd div exp tanh_fused",
    "resnet": (
        "convolution_backward _native_batch_norm_legit_functional inject_relu threshold_backward mean "
        "max_pool2d_with_indices_backward convolution scatter_add max_pool2d_with_indices copy_ rsqrt"
    ),
    "vit": ("select_scatter gelu_backward permute _softmax_backward_data var_mean _log_softmax nll_loss_backward"),
}
"""For each model the faults that are planted under it, too: its operators, as far as the fault changes its results.

Two more change them: ``amax`` under the resnet is not found, and for ``_to_copy`` under the transformer of pictures
nll_loss_forward is named.
"""
EVERY = [(name, "small") for name in FAULTS] + [(name, model) for model in HOMES for name in HOMES[model].split()]


def test_every_fault_has_a_program_that_runs_in_eager() -> None:
    assert set(PROGRAMS) == set(FAULTS) == {name for name, _ in EVERY}
    for program in PROGRAMS.values():
        results = pytree.tree_leaves(program.run(*program.inputs()))
        assert all(isinstance(result, torch.Tensor) for result in results)
        assert any(result.requires_grad for result in results) == program.train


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_taken_out_again(name: str) -> None:
    if (name, torch.__version__[:5]) == ("max_pool2d_with_indices_backward", "2.11."):
        pytest.skip("torch 2.11 lowers this operator; what is planted is a decomposition")

    def state() -> tuple[dict[object, object], dict[object, object], object]:
        return dict(lowering.lowerings), dict(decomposition.decompositions), config.cpp.inject_relu_bug_TESTING_ONLY

    def fails() -> None:
        with planted(name):
            seen.append(state())
            raise KeyError("on purpose")

    before, seen = state(), list[object]()
    with pytest.raises(KeyError, match="on purpose"):
        fails()
    assert seen != [before]
    assert state() == before


def hunt(question: Mapping[str, Any], answers: AnswerFolder) -> None:
    """In a process of its own: plant a fault under a program, and answer with the report of it."""
    name, on = question["name"], question["on"]
    os.environ[PLANTED] = name  # repros run in processes with the same fault
    os.environ["PYTHONPATH"] = os.pathsep.join([str(EVERYWHERE), os.environ.get("PYTHONPATH", "")])
    warnings.simplefilter("ignore")
    torch.manual_seed(0)
    no_workaround = mock.patch.object(WorkaroundSearch, "first", return_value=None)  # which takes long
    with planted(name), without_compile_caches(), no_workaround, collect() as session:
        train(name, on, lambda target: checked(target, "inductor", localize=True, report_dir=question["folder"]))
    answers.answer(session.report.to_json())


def train(name: str, on: str, compile_it: Callable[[Any], Any]) -> None:
    if on in MODELS:
        case = MODELS[on]()
        case.loss(compile_it(case.model)(**case.inputs)).backward()
        return
    program = PROGRAMS[name]
    with torch.set_grad_enabled(program.train):
        results = pytree.tree_leaves(compile_it(program.run)(*program.inputs()))
    if program.train:
        results = [one for one in results if isinstance(one, torch.Tensor)]
        torch.autograd.backward([(one * torch.arange(one.numel()).reshape(one.shape).cos()).sum() for one in results])


def packet(op: str | None) -> str:
    """``relu`` of ``aten.relu_.default``, ``Tensor.relu`` or ``torch.relu``."""
    steps = (op or "").split(".")
    return (steps[1] if steps[0] in ("aten", "prims") and len(steps) > 1 else steps[-1]).rstrip("_")


def calls_of(script: str) -> int:
    """Statements of a repro's program that compute something: one for each call of its graph."""
    [program] = [one for one in ast.parse(script).body if isinstance(one, ast.FunctionDef) and one.name == "program"]
    computing = (ast.Call, ast.BinOp, ast.Compare, ast.UnaryOp, ast.Subscript)
    return sum(any(isinstance(part, computing) for part in ast.walk(line)) for line in program.body)


@pytest.mark.slow
@pytest.mark.timeout(1000)
@pytest.mark.parametrize(
    ("name", "on"),
    [pytest.param(*one, marks=pytest.mark.ci_sample) if one == ("addmm_fused", "small") else one for one in EVERY],
)
def test_the_planted_operator_is_named_and_a_small_script_shows_it(name: str, on: str, tmp_path: Path) -> None:
    question = {"name": name, "on": on, "folder": str(tmp_path)}
    end = run(Job(f"{__name__}:hunt", question, 900.0), JobResources(threads=1))
    assert end.answer, end
    finding = next(one for one in Report.from_json(end.answer).findings if one.kind.fails)
    assert packet(finding.op) in {known.rstrip("_") for known in FAULTS[name].names}, finding.evidence
    assert finding.repro_confirmed
    assert 1 <= calls_of(finding.script or "") <= 5
