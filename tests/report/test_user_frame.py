"""Warnings name the user's code."""

from __future__ import annotations

import warnings

import pytest
import torch

import checked_backend as cb
from tests.support import faults


@pytest.mark.parametrize("policy", ["warn", "raise"])
def test_a_warning_names_a_file_of_the_user(policy: str, tmp_path: object) -> None:
    fault = faults.wrong_value() if policy == "warn" else faults.wrong_stride()
    options = {"compiler": fault, "on_divergence": policy, "localize": False, "report_dir": str(tmp_path)}
    compiled = torch.compile(lambda x: x.sin() + 1, backend="numcheck", options=options)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        compiled(torch.ones(3, 4))
    [warning] = [one for one in caught if issubclass(one.category, cb.errors.DivergenceWarning)]
    assert warning.filename == __file__
