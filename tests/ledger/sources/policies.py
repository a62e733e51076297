"""Options: the verdict under each, and what the user sees of it: an exception, a warning, nothing."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from types import MappingProxyType
from typing import Any

import torch

import checked_backend as cb
from checked_backend.errors import DivergenceWarning
from tests.ledger.answer import Answer, Answers, Case, of_report
from tests.metadata.test_lies import LIES
from tests.support import faults
from tests.support.lying_operators import define, library_of_lies
from tests.support.region_tools import checked

Options = Mapping[str, Any]


class Net(torch.nn.Module):
    """Only the first output needs a gradient; the third has zeros of both signs."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(6, 4)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return self.linear(x).relu(), x.cos(), (x * 0.3).round()


_stride = partial(faults.wrong_stride, 0)
_value = partial(faults.wrong_value, 0)
_element = partial(faults.one_element, 1)
_gradient = partial(faults.scaled_gradient, "linear.weight")
_LAYOUTS: Mapping[str, Callable[[], faults.Compiler]] = MappingProxyType(
    {
        "stride": _stride,
        "requires_grad": partial(faults.spoiled_output, torch.Tensor.requires_grad_, 1),
        "lost gradient": partial(faults.spoiled_output, torch.Tensor.detach),
        "sign of zero": partial(faults.spoiled_output, lambda result: torch.where(result == 0, -result, result), 2),
    }
)
_RAISE: Options = {"on_divergence": "raise"}

ROWS: Mapping[str, tuple[Callable[[], faults.Compiler], Options]] = MappingProxyType(
    {
        **{
            f"layout {policy}, {name}": (fault, {**_RAISE, "layout": policy})
            for name, fault in _LAYOUTS.items()
            for policy in ("warn", "raise", "ignore")
        },
        **{
            f"on_divergence {policy}, {name}": (fault, {"on_divergence": policy})
            for name, fault in (("value", _value), ("gradient", _gradient), ("stride", _stride))
            for policy in ("raise", "warn", "record", "fallback")
        },
        "on_divergence fallback, crash": (faults.crash_when_running, {"on_divergence": "fallback"}),
        "on_divergence raise, crash": (faults.crash_when_compiling, _RAISE),
        "ignore kind": (_value, {**_RAISE, "ignore": "logic"}),
        "ignore another kind": (_value, {**_RAISE, "ignore": "structure,rng"}),
        "ignore finer kind": (_stride, {**_RAISE, "layout": "raise", "ignore": ("structure.stride",)}),
        "ignore another finer kind": (_stride, {**_RAISE, "layout": "raise", "ignore": ("structure.dtype",)}),
        "ignore subject": (_gradient, {**_RAISE, "ignore": ("grad[linear.weight]",)}),
        "ignore another subject": (_element, {**_RAISE, "ignore": ("output[0]", "grad[linear.weight]")}),
        "ignore nothing that is": (_value, {**_RAISE, "ignore": ("structure.strides",)}),
        "every 2, wrong from call 3": (lambda: faults.from_call(3, _value()), {"every": 2}),
        "every 2, wrong in call 2": (lambda: faults.only_in_call(2, _value()), {"every": 2}),
        "every 1, wrong in call 2": (lambda: faults.only_in_call(2, _value()), {}),
        "budget that nothing earns": (_value, {"budget": 1e-5}),
        "budget and every": (_value, {"budget": 0.1, "every": 2}),
        "gradients unchecked, gradient": (_gradient, {"gradients": False}),
        "gradients unchecked, value": (_value, {"gradients": False}),
        "recompute, clean": (faults.clean, {"reference": "recompute"}),
        "recompute, value": (_value, {"reference": "recompute"}),
        "recompute, gradient": (_gradient, {"reference": "recompute"}),
        "no such option": (_value, {"on_divergances": "warn"}),
        "no such policy": (_value, {"on_divergence": "sometimes"}),
        "no such compiler": (lambda: "nonsense", {}),  # type: ignore[dict-item, return-value]
    }
)
"""A compiler, and options; options that are not given record and do not localize."""

METADATA: Mapping[str, tuple[str, Options]] = MappingProxyType(
    {
        **{f"record, {lie}": (lie, {"on_divergence": "record"}) for lie in LIES},
        "raise, dtype": ("dtype", _RAISE),
        "warn, dtype": ("dtype", {"on_divergence": "warn"}),
        "ignore, dtype": ("dtype", {**_RAISE, "ignore": ("structure.dtype",)}),
        "ignore operator, dtype": ("dtype", {**_RAISE, "ignore_ops": "checked_backend_operators::lie"}),
        "other checks, dtype": ("dtype", {**_RAISE, "checks": ("shape", "stride")}),
        "other graphs, dtype": ("dtype", {**_RAISE, "graphs": ("forward",)}),
        "layout ignored, offset": ("offset", {**_RAISE, "layout": "ignore"}),
        "layout raises, offset": ("offset", {**_RAISE, "layout": "raise"}),
    }
)
"""What a custom operator lies about, and options of ``debug_interpreter``."""


def cases() -> Iterator[Case]:
    """All rows of a table are one case."""
    yield Case("policies/numcheck", partial(_answers, ROWS, _numcheck), quick=True)
    yield Case("policies/debug_interpreter", partial(_answers, METADATA, _interpreted), quick=True)


def _answers(rows: Mapping[str, tuple[Any, Options]], run: Callable[[Any, Options], None]) -> Answers:
    return {name: _seen(partial(run, *row)) for name, row in rows.items()}


def _seen(run: Callable[[], None]) -> Answer:
    """The report of a run, and which exception or warning the user sees of it."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    with cb.collect() as session, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            run()
        except Exception as error:
            seen = f"raises {type(error).__name__}"
        else:
            seen = "warns" if any(issubclass(one.category, DivergenceWarning) for one in caught) else "is quiet"
    report = session.report
    answer = of_report(report)
    ignored = sorted({finding.detail for finding in report.coverage.ignored})
    return {**answer, "verdict": ", ".join([answer["verdict"], seen, *(f"ignores {detail}" for detail in ignored)])}


def _numcheck(make: Callable[[], Any], options: Options) -> None:
    compiled = checked(Net(), make(), **options)
    for _ in range(4):
        compiled(torch.randn(5, 6))[0].square().sum().backward()


def _interpreted(lie: str, options: Options) -> None:
    schema, kernel, fake, *_ = LIES[lie]
    with library_of_lies() as library, torch.no_grad():
        operator = define(library, f"lie{schema}", kernel, fake)
        compiled = torch.compile(_caller(operator), backend="debug_interpreter", options=dict(options))
        compiled(torch.randn(4, 5))


def _caller(operator: Callable[..., Any]) -> Callable[..., Any]:
    """A program that reads the only value of an operator, or returns the first and the last."""

    def program(x: torch.Tensor) -> Any:
        values = operator(x * 2)
        return (values[0], values[-1]) if isinstance(values, (list, tuple)) else values.sin()

    return program
