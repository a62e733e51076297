"""Run a block so that it gives the same numbers each time, and restore all settings afterwards."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import numpy as np
import torch

from checked_backend._torch.settings import set_backend_flag
from checked_backend.tensors.caches import empty_caches

_CUBLAS = "CUBLAS_WORKSPACE_CONFIG"


@contextmanager
def deterministic(seed: int = 0, *, warn_only: bool = False) -> Iterator[None]:
    """Seed every generator and use deterministic algorithms inside a block. Restore all of this state afterwards.

    The block seeds torch's generators (CPU, CUDA, MPS), ``random`` and NumPy's global generator. It sets
    ``torch.use_deterministic_algorithms``, ``torch.backends.cudnn`` (deterministic, no benchmark), and
    ``CUBLAS_WORKSPACE_CONFIG``, which cuBLAS needs to be deterministic and reads when CUDA is first used. Unused
    memory is freed first, so that a large program has the same room each time.

    It also works as a decorator. All of this state belongs to the whole process: other threads see it too.

    Source: ``set_deterministic`` and ``clean_memory`` of ``torch/_inductor/fx_passes/numeric_utils.py``.

    Args:
        seed: For all generators.
        warn_only: Warn about an operator that has no deterministic algorithm, instead of raising.

    Raises:
        RuntimeError: An operator in the block has no deterministic algorithm.
    """
    empty_caches()
    with ExitStack() as stack:
        _keep_generators(stack)
        _keep_settings(stack)
        torch.manual_seed(seed)
        random.seed(seed)
        np.random.seed(seed % 2**32)  # NumPy takes 32 bits
        os.environ[_CUBLAS] = ":4096:8"
        set_backend_flag("cudnn", "deterministic", True)
        set_backend_flag("cudnn", "benchmark", False)
        torch.use_deterministic_algorithms(True, warn_only=warn_only)
        yield


def _keep_generators(stack: ExitStack) -> None:
    stack.callback(random.setstate, random.getstate())
    stack.callback(np.random.set_state, np.random.get_state())
    stack.callback(torch.set_rng_state, torch.get_rng_state())
    if torch.cuda.is_initialized():
        stack.callback(torch.cuda.set_rng_state_all, torch.cuda.get_rng_state_all())
    else:
        # CUDA's generator is seeded at its first use, with torch's last seed.
        stack.callback(torch.cuda.manual_seed_all, torch.initial_seed())
    if torch.backends.mps.is_available():
        stack.callback(torch.mps.set_rng_state, torch.mps.get_rng_state())


def _keep_settings(stack: ExitStack) -> None:
    stack.callback(_set_environment, os.environ.get(_CUBLAS))
    for flag in ("deterministic", "benchmark"):
        stack.callback(set_backend_flag, "cudnn", flag, getattr(torch.backends.cudnn, flag))
    stack.callback(
        torch.use_deterministic_algorithms,
        torch.are_deterministic_algorithms_enabled(),
        warn_only=torch.is_deterministic_algorithms_warn_only_enabled(),
    )


def _set_environment(value: str | None) -> None:
    if value is None:
        os.environ.pop(_CUBLAS, None)
    else:
        os.environ[_CUBLAS] = value
