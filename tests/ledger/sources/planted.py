"""Compilers that are wrong on purpose: those of ``tests.support``, on one net, and those of ``selftest``."""

from __future__ import annotations

import functools
import json
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch import nn

import checked_backend as cb
from tests.ledger.answer import Answers, Case, of_error, of_report
from tests.support import faults
from tests.support.region_tools import checked

_WEIGHT, _BIAS, _MEAN = "layers.4.weight", "layers.4.bias", "layers.1.running_mean"

Make = Callable[[faults.How], faults.Compiler]


class Net(nn.Module):
    """Running statistics, a counter that the user adds to, dropout, and an output that is a view of the input."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Tanh(), nn.Dropout(0.25), nn.Linear(16, 4), nn.ReLU()
        )
        self.register_buffer("seen", torch.zeros(3))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        self.seen.add_(1)
        return self.layers(x), x.t()


def _on_gradient(spoil: Any) -> Make:
    return lambda how: faults.spoiled_gradient(_WEIGHT, spoil, how)


_BOTH: Mapping[str, Make] = MappingProxyType(
    {
        "clean": faults.clean,
        "value": functools.partial(faults.wrong_value, 0),
        "one element": functools.partial(faults.one_element, 0),
        "dtype": functools.partial(faults.wrong_dtype, 0),
        "shape": functools.partial(faults.wrong_shape, 0),
        "stride": functools.partial(faults.wrong_stride, 0),
        "nan": functools.partial(faults.made_nan, 0),
        "mutation dropped": functools.partial(faults.dropped_mutation, _MEAN),
        "mutation wrong": functools.partial(faults.wrong_mutation, _MEAN),
        "counter dropped": functools.partial(faults.dropped_mutation, "seen"),
        "counter wrong": functools.partial(faults.wrong_mutation, "seen"),
        "too many random numbers": faults.too_many_random_numbers,
        "reseeded": faults.reseeded,
        "different random numbers": faults.other_random_numbers,
        "crash when compiling": faults.crash_when_compiling,
        "crash when running": faults.crash_when_running,
        "gradient zero": functools.partial(faults.zeroed_gradient, _BIAS),
        "gradient scaled": functools.partial(faults.scaled_gradient, _BIAS),
        "gradient one element": _on_gradient(faults.one_element_changed),
        "gradient nan": _on_gradient(faults.with_nan),
        "gradient negated": _on_gradient(torch.neg),
        "gradient missing": _on_gradient(lambda gradient: None),
        "gradient dtype": _on_gradient(torch.Tensor.double),
    }
)
"""Faults that are planted in the region, and in the graphs that AOT autograd makes of it."""

_ONE: Mapping[str, Callable[[], faults.Compiler]] = MappingProxyType(
    {
        "alias lost": lambda: faults.lost_alias(1),
        "output missing": faults.missing_output,
        "output extra": faults.extra_output,
        "returns none": faults.returns_none,
        "not a function": faults.not_a_function,
        "input changed": lambda: faults.unwanted_mutation("x"),
        "weight changed": lambda: faults.unwanted_mutation("layers.0.weight"),
        "tangents spoiled": lambda: faults.spoiled_tangents(lambda tensor: tensor * 2),
        "cotangent overwritten": faults.overwritten_cotangent,
        "backward crashes when compiling": lambda: faults.crash_in_backward("compiling"),
        "backward crashes when running": lambda: faults.crash_in_backward("running"),
        "from call 3": lambda: faults.from_call(3, faults.wrong_value()),
        "only in call 2": lambda: faults.only_in_call(2, faults.one_element()),
        "same memory for all calls": lambda: faults.same_memory_for_all_calls,
        "remembers its first results": lambda: faults.remembers_its_first_results,
        "remembers by address": lambda: faults.remembers_by_address,
        "writes to earlier inputs": lambda: faults.writes_to_earlier_inputs,
        "forgets to count": lambda: faults.forgets_to_count,
        "leaves a setting": lambda: faults.leaves_setting(lambda: torch.set_default_dtype(torch.float64)),
        "operator wrong": lambda: faults.wrong_operator("aten.relu.default", how="aot"),
        "operator left out": lambda: faults.left_out("aten.tanh.default"),
        "operator wrong if fused": lambda: faults.wrong_if_fused("aten.relu.default"),
        "operator wrong if unseen": lambda: faults.wrong_if_unseen("aten.tanh.default"),
        "operator wrong for readers": lambda: faults.wrong_for_readers("aten.relu.default"),
        "operator refused": lambda: faults.refuses("aten.relu.default"),
    }
)
"""Faults of one form."""


def compilers() -> Iterator[tuple[str, Callable[[], faults.Compiler]]]:
    """Each fault's name, and what makes its compiler."""
    for name, make in _BOTH.items():
        yield from ((f"{name}/{how}", partial(make, how)) for how in ("python", "aot"))
    yield from _ONE.items()


def cases() -> Iterator[Case]:
    """Each fault in training, under ``numcheck`` and, where it shows in one call, under ``check``."""
    for name, make in compilers():
        for dtype in (torch.float32,) if name in _ONE else (torch.float32, torch.bfloat16):
            yield _case(name, make, dtype)
    yield Case("selftest", _selftest, seconds=600)


def _case(name: str, make: Callable[[], faults.Compiler], dtype: torch.dtype) -> Case:
    short = str(dtype).partition(".")[2]
    return Case(f"faults/{name}/{short}", partial(_answers, make, dtype), quick=dtype is torch.float32)


def _answers(make: Callable[[], faults.Compiler], dtype: torch.dtype) -> Answers:
    return {"numcheck": trained(make(), dtype), "check": _checked(make(), dtype)}


def trained(compiler: faults.Compiler, dtype: torch.dtype = torch.float32) -> Any:
    """The answer of numcheck to three steps of training."""
    torch.manual_seed(0)
    compiled = checked(Net().to(dtype), compiler)
    try:
        with cb.collect() as session:
            for _ in range(3):
                compiled(torch.randn(6, 8, dtype=dtype))[0].square().sum().backward()
    except Exception as error:
        return {**of_error(error), "findings": of_report(session.report)["findings"]}
    return of_report(session.report)


def _checked(compiler: faults.Compiler, dtype: torch.dtype) -> Any:
    torch._dynamo.reset()
    torch.manual_seed(0)
    return of_report(cb.check(Net().to(dtype), (torch.randn(6, 8, dtype=dtype),), compiler=compiler))


def _selftest() -> Answers:
    words = [sys.executable, "-m", "checked_backend", "selftest", "--json"]
    ran = subprocess.run(words, cwd=Path(__file__).resolve().parents[3], capture_output=True, text=True)
    rows = {row["fault"]: "caught" if row["caught"] else "not caught" for row in json.loads(ran.stdout)["faults"]}
    verdicts = {"": f"exit {ran.returncode}", **rows}
    return {name: {"verdict": verdict, "findings": []} for name, verdict in verdicts.items()}
