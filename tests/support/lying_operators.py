"""Custom operators for tests: defined for one test, by schema, kernel and fake kernel."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stdout
from io import StringIO
from typing import Any

import pytest
import torch
from torch._higher_order_ops.effects import _EffectType, _register_effectful_op

import checked_backend as cb

NAME = "checked_backend_operators"
QUIET = pytest.mark.filterwarnings(
    "ignore:.*The output of this custom operator:UserWarning",  # torch sees some of these lies itself, and only warns
    "ignore:.*should not be instantiated:DeprecationWarning",  # Dynamo makes an autograd.Function object of its own
)


@contextmanager
def library_of_lies() -> Iterator[torch.library.Library]:
    """A library for one test; torch does not complain that its operators return what they were given."""
    # in a CI system (``CI`` is set) torch makes an error of its warning
    with (
        torch._functorch.config.patch(error_on_custom_op_aliasing=False),
        torch.library._scoped_library(NAME, "FRAGMENT") as library,
    ):
        yield library


def define(library: Any, schema: str, kernel: Callable[..., Any], fake: Callable[..., Any] | None = None) -> Any:
    """Define an operator; returns its packet."""
    name = schema.partition("(")[0]
    library.define(schema)
    library.impl(name, kernel, "CPU")
    if fake is not None:
        torch.library.register_fake(f"{NAME}::{name}", fake, lib=library)
    return getattr(getattr(torch.ops, NAME), name)


def transposed(x: torch.Tensor) -> torch.Tensor:
    """A kernel that returns what it is given, with other strides."""
    return x.t().contiguous().t()


def shifted(x: torch.Tensor) -> torch.Tensor:
    """A kernel that returns what it is given, at an offset."""
    return torch.empty(x.numel() + 3).as_strided(x.shape, x.stride(), 3).copy_(x)


@contextmanager
def with_effect(operator: Any) -> Iterator[None]:
    """The calls of an operator keep their order, as those of one that prints."""
    handle = _register_effectful_op(operator.default, _EffectType.ORDERED)
    try:
        yield
    finally:
        handle.destroy()


def differentiated_by(operator: Any) -> Callable[[torch.Tensor], torch.Tensor]:
    """A function whose backward pass calls an operator."""

    class Function(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x * 2

        @staticmethod
        def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
            return operator(gradients[0])

    return Function.apply


def record(
    program: Callable[..., Any], *calls: tuple[Any, ...], dynamic: bool | None = None, **options: Any
) -> cb.Report:
    """Compile, call with each tuple of arguments, go backward where there is something to go back from."""
    torch._dynamo.reset()
    options = {"on_divergence": "record", **options}
    compiled = torch.compile(program, backend=cb.debug_interpreter, dynamic=dynamic, options=options)
    with cb.collect() as session:
        for args in calls:
            leaves = torch.utils._pytree.tree_leaves(compiled(*args))
            free = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor) and leaf.requires_grad]
            if free:
                torch.autograd.backward(free, [torch.ones_like(leaf) for leaf in free])
    return session.report


def local(report: Any) -> list[Any]:
    """What is wrong of itself."""
    return [finding for finding in report.findings if not finding.evidence["inherited"]]


def run_alone(finding: cb.Finding) -> tuple[str, str]:
    """Run the script that shows an operator alone, where it is registered; what it ends with, and what it printed."""
    printed = StringIO()
    with redirect_stdout(printed), pytest.raises(SystemExit) as ended:
        exec(compile(finding.evidence["script"], "script.py", "exec"), {})
    return str(ended.value), printed.getvalue()
