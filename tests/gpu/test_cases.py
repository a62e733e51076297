"""The programs that only look wrong, on the device."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch.utils import _pytree as pytree

import checked_backend as cb
from tests.calibration.alarms import PROGRAMS
from tests.cases import Case
from tests.cases.collection import ALL

REAL = {"modulo_of_sums": "logic.sign_of_zero", "random_permutation": "crash.compiling"}
"""What Inductor does get wrong of them: other zeros, and a pattern that it cannot compile (on a processor)."""

OPEN = {"bessel_near_zeros": "logic, on an H200: the float64 twin differs, by how much is not measured yet"}
"""False alarms of a GPU that are not mended."""

UNDEFINED = {"integer_casts"}
"""C++ leaves open what a number beyond the range of an integer becomes, and processors do differ."""


def moved(args: Any, device: str) -> Any:
    """Arguments on a device, which require grad as before."""
    return pytree.tree_map_only(
        torch.Tensor, lambda value: value.detach().to(device).requires_grad_(value.requires_grad), args
    )


def try_out(function: Callable[..., Any], args: Any, kwargs: Mapping[str, Any]) -> None:
    """Skip a program that cannot run on the device."""
    try:
        function(*pytree.tree_map_only(torch.Tensor, torch.clone, args), **kwargs)
    except RuntimeError as error:
        if "same device" in str(error):
            pytest.skip("it makes tensors on the processor")


@pytest.mark.parametrize("case", [case for case in ALL if case.category != "bug"], ids=lambda case: case.name)
def test_a_clean_program_is_not_accused(case: Case, device: str) -> None:
    if device == "cuda" and case.name in OPEN:
        pytest.xfail(OPEN[case.name])
    function, args, kwargs = case.program()
    if isinstance(function, torch.nn.Module):
        function = function.to(device)
    arguments = moved(args, device)
    try_out(function, arguments, kwargs)
    report = cb.check(function, arguments, kwargs, dynamic=case.dynamic, gradients=case.train)
    if {finding.detail for finding in report.findings} == {REAL.get(case.name)}:
        return
    wanted = {cb.Verdict.PASS} if case.category == "noise" else {cb.Verdict.PASS, cb.Verdict.INCONCLUSIVE}
    assert report.verdict in wanted, str(report)


@pytest.mark.parametrize("name", sorted(PROGRAMS.keys() - UNDEFINED))
def test_a_hard_program_is_not_accused(name: str, device: str) -> None:
    function, args = PROGRAMS[name]()
    arguments = moved(args, device)
    try_out(function, arguments, {})
    report = cb.check(function, arguments)
    assert report.verdict is not cb.Verdict.FAIL, str(report)
