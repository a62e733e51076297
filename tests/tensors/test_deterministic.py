from __future__ import annotations

import os
import random
import subprocess
import sys
from contextlib import suppress
from typing import Any

import numpy as np
import pytest
import torch

import checked_backend as cb


def draws() -> list[Any]:
    drawn = [torch.rand(3).tolist(), random.random(), np.random.rand(3).tolist()]
    if torch.cuda.is_available():
        drawn.append(torch.rand(3, device="cuda").tolist())
    return drawn


def settings() -> list[Any]:
    cudnn: Any = torch.backends.cudnn
    return [
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
        cudnn.deterministic,
        cudnn.benchmark,
        os.environ.get("CUBLAS_WORKSPACE_CONFIG"),
    ]


def generators() -> list[Any]:
    numpy_state: Any = np.random.get_state()
    return [torch.get_rng_state().tolist(), random.getstate(), numpy_state[1].tolist(), numpy_state[2]]


def test_the_same_numbers_each_time_and_others_for_another_seed() -> None:
    with cb.deterministic(7):
        first = draws()
    random.random()
    torch.rand(1)
    with cb.deterministic(7):
        assert draws() == first
    with cb.deterministic(8):
        assert draws() != first


@pytest.mark.parametrize("raises", [False, True])
@pytest.mark.parametrize("workspace", [None, ":16:8"])
def test_everything_is_restored(raises: bool, workspace: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    if workspace is None:
        monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    else:
        monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", workspace)
    before, state, seed = settings(), generators(), torch.initial_seed()
    with suppress(ZeroDivisionError), cb.deterministic(2**40 + 1):
        draws()
        assert settings() == [True, False, True, False, ":4096:8"]
        assert torch.initial_seed() == 2**40 + 1
        if raises:
            _ = 1 / 0
    assert settings() == before
    assert generators() == state
    assert torch.initial_seed() == seed


def test_settings_of_the_user_come_back_and_blocks_nest() -> None:
    torch.use_deterministic_algorithms(True, warn_only=True)
    mine = settings()
    with cb.deterministic(1):
        first = draws()
        with cb.deterministic(2, warn_only=True):
            draws()
            assert settings()[:2] == [True, True]
        second = draws()
        assert settings()[:2] == [True, False]
    with cb.deterministic(1):
        assert [draws(), draws()] == [first, second]
    assert settings() == mine


def test_an_operator_without_a_deterministic_algorithm_raises() -> None:
    if torch.cuda.is_available():
        x = torch.zeros(4, device="cuda")
        with cb.deterministic(), pytest.raises(RuntimeError, match="deterministic"):
            torch.histc(x, bins=4)
    with cb.deterministic():
        assert bool(torch.empty(4).isnan().all())  # deterministic mode fills uninitialised memory


def test_as_a_decorator() -> None:
    @cb.deterministic(3)
    def run() -> list[Any]:
        return draws()

    assert run() == run()


@pytest.mark.process
def test_where_torchs_flags_are_frozen() -> None:
    """As by any test suite that imports ``torch.testing._internal.common_utils``."""
    program = """
import torch, checked_backend as cb
torch.backends.disable_global_flags()
before = torch.backends.cudnn.deterministic
with cb.deterministic(0):
    assert torch.backends.cudnn.deterministic
assert torch.backends.cudnn.deterministic == before
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
