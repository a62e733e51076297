"""Does a compiled program take its process with it? It is asked often while a program is made smaller."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from checked_backend.checking.program_run import fresh_dynamo
from checked_backend.fuzz.build import build, inputs_for
from checked_backend.fuzz.examine import Compiler
from checked_backend.fuzz.program import FuzzProgram
from checked_backend.process.worker import Death, run_in_worker

__all__ = ["death_of"]

_CALLS = 3


def death_of(program: FuzzProgram, compiler: Compiler, options: Mapping[str, Any], seconds: float) -> str:
    """The finer kind of how a process ends that compiles a program and calls it as a check does, without any check.

    Args:
        seconds: After which it hangs.

    Returns:
        One of `checked_backend.fuzz.groups.DEATHS`; empty if the process does not die.

    Raises:
        CheckedBackendError: No process can be forked here.
    """
    ended = run_in_worker(lambda: _ran(program, compiler, options), timeout=seconds)
    return ended.detail if isinstance(ended, Death) else ""


def _ran(program: FuzzProgram, compiler: Compiler, options: Mapping[str, Any]) -> str:
    compiled: Any = torch.compile(
        build([program]), backend=compiler, options=dict(options) or None, dynamic=program.dynamic or None
    )
    try:
        with fresh_dynamo(), torch.set_grad_enabled(program.gradients):
            for _ in range(_CALLS):
                results = compiled(*inputs_for([program]))
                roots = [one for one in results if isinstance(one, torch.Tensor) and one.requires_grad]
                if program.gradients and roots:
                    torch.autograd.backward(roots, [torch.ones_like(root) for root in roots])
    except Exception as error:  # it raises, and lives
        return type(error).__name__
    return "ran"
