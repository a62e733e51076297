"""The programs of the golden reports: each has one planted fault, or none, and the same numbers on every processor.

Values are small whole numbers, and errors are large. New programs go to the end: reports quote lines of this file.
"""

from __future__ import annotations

import errno
import itertools
import json
import os
import signal
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch._dynamo.backends.common import aot_autograd
from torch.nn import functional as F

import checked_backend as cb

__all__ = ["PROGRAMS"]

Compiler = Callable[[fx.GraphModule, Sequence[Any]], Callable[..., Any]]
Edit = Callable[[list[Any], tuple[Any, ...]], Any]

X = torch.arange(-6.0, 6.0).view(3, 4)


# compilers


def right(gm: fx.GraphModule, _inputs: Sequence[Any]) -> Callable[..., Any]:
    return gm.forward


def returning_inputs(_gm: fx.GraphModule, _inputs: Sequence[Any]) -> Callable[..., Any]:
    return lambda *args: args


def on_copies(gm: fx.GraphModule, _inputs: Sequence[Any]) -> Callable[..., Any]:
    return lambda *args: gm.forward(*(arg.clone() if isinstance(arg, Tensor) else arg for arg in args))


def edited(edit: Edit) -> Compiler:
    """A compiler that changes what a region returns."""

    def spoiled(gm: fx.GraphModule, _inputs: Sequence[Any]) -> Callable[..., Any]:
        return lambda *args: edit(list(gm.forward(*args)), args)

    return spoiled


def first(change: Callable[[Tensor], Tensor]) -> Compiler:
    """A compiler that changes the first result of a region."""
    return edited(lambda results, _args: (change(results[0]), *results[1:]))


def doubled(value: Tensor) -> Tensor:
    return value * 2 + 1


def with_nan(value: Tensor) -> Tensor:
    return value.where(value != value.amax(), torch.nan)


def transposed(value: Tensor) -> Tensor:
    return value.t().contiguous().t()


def wrong_relu(gm: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
    """AOT autograd's graphs node by node, with relu too large."""

    class Runner(fx.Interpreter):
        def run_node(self, n: fx.Node) -> Any:
            value = super().run_node(n)
            return value * 1.5 if str(n.target) == "aten.relu.default" else value

    def compiled(graph: fx.GraphModule, _inputs: Sequence[Any]) -> Callable[..., Any]:
        return Runner(graph).run

    return aot_autograd(fw_compiler=compiled, bw_compiler=compiled)(gm, inputs)


def drawing(results: list[Any], _args: tuple[Any, ...]) -> Any:
    torch.rand(())
    return results


def all_wrong(results: list[Any], _args: tuple[Any, ...]) -> Any:
    return [~value if value.dtype is torch.bool else value * 2 + 2 for value in results]


def crashing(_results: list[Any], _args: tuple[Any, ...]) -> Any:
    raise RuntimeError("the kernel met a <bad> & \x1b[31mred\x1b[0m \u202ename")


def refusing(_gm: fx.GraphModule, _inputs: Sequence[Any]) -> Callable[..., Any]:
    raise NotImplementedError("no lowering for relu")


def on_a_full_disk(_gm: fx.GraphModule, _inputs: Sequence[Any]) -> Callable[..., Any]:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def killed(_results: list[Any], _args: tuple[Any, ...]) -> Any:
    os.kill(os.getpid(), signal.SIGKILL)


def without_grad(results: list[Any], _args: tuple[Any, ...]) -> Any:
    torch.set_grad_enabled(False)
    return results


def second_call() -> Compiler:
    """A compiler whose programs are wrong in their second call, and in no other."""
    calls = itertools.count(1)
    return first(lambda value: doubled(value) if next(calls) == 2 else value)


def same_memory() -> Compiler:
    """A compiler whose programs return all results in the memory of the first call's."""
    kept: list[Tensor] = []

    def into(value: Tensor) -> Tensor:
        kept.extend([torch.empty_like(value)] * (not kept))
        return kept[0].copy_(value)

    return first(into)


# models


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.last = nn.Linear(4, 2)
        self.register_buffer("calls", torch.zeros(()))
        whole(self)

    def forward(self, x: Tensor) -> Tensor:
        self.calls.add_(1)
        hidden = torch.relu(self.first(x))
        return self.last(hidden)


class Überprüfung(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.größe = nn.Linear(4, 2)
        whole(self)

    def forward(self, eingänge: Tensor) -> dict[str, Tensor]:
        return {"ergebnis_日本語": self.größe(eingänge)}


class ANetWhoseNameIsSoLongThatNoTerminalAndNoTableShowsItInASingleLineOfEightyOrEvenOfOneHundredAndTwentyColumns(Net):
    pass


class Scalar(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))

    def forward(self, x: Tensor) -> Tensor:
        return (x[:2, :2] * self.weight).sum()


def whole(module: nn.Module) -> nn.Module:
    """A module whose parameters are whole numbers."""
    for parameter in module.parameters():
        values = torch.arange(parameter.numel(), dtype=parameter.dtype).remainder(5) - 2
        parameter.data = values.view(parameter.shape)
    return module


def with_dropout(x: Tensor) -> Tensor:
    return F.dropout(x, 0.5)


def viewed(x: Tensor) -> Tensor:
    return x.view(-1)


def scaled(x: Tensor) -> Tensor:
    return x * 0.7


def several(x: Tensor) -> tuple[Tensor, ...]:
    return x > 0, x.to(torch.int32), torch.complex(x, x), x.sum()


def in_two_regions(x: Tensor) -> Tensor:
    half = x / 2
    torch._dynamo.graph_break()
    return half * 4


def in_python(x: Tensor) -> Tensor:
    torch._dynamo.graph_break()
    return x


_CALLS = itertools.count(1)


def operator(kernel: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """A custom operator whose fake kernel says that it returns what it is given."""
    defined = torch.library.custom_op(f"golden::{kernel.__name__}", kernel, mutates_args=())
    defined.register_fake(torch.empty_like)
    return defined


@operator
def unrepeatable(x: Tensor) -> Tensor:
    return x * next(_CALLS)


@operator
def liar(x: Tensor) -> Tensor:
    return x.double()


@operator
def raising(x: Tensor) -> Tensor:
    raise ValueError("expected a whole number")


@operator
def too_large(x: Tensor) -> Tensor:
    raise torch.OutOfMemoryError("tried to allocate 8.00 GiB")


# ways to check


def watched(
    program: Callable[..., Any], *args: Any, times: int = 1, backward: bool = False, **options: Any
) -> cb.Report:
    """The report of a program that runs compiled by numcheck."""
    given = {"on_divergence": "record", "localize": False, **options}
    with cb.collect(closing=False) as session:
        compiled = torch.compile(program, backend="numcheck", options=given)
        results = [compiled(*args) for _ in range(times)]
        if backward:
            results[-1].sum().backward()
    return session.report


def interpreted(program: Callable[..., Any], *args: Any) -> cb.Report:
    """The report of a program whose metadata is compared node by node."""
    with cb.collect(closing=False) as session:
        torch.compile(program, backend="debug_interpreter", options={"on_divergence": "record"})(*args)
    return session.report


def not_checked() -> cb.Report:
    """The report of a block in which a region is called, and not checked."""
    compiled = torch.compile(Net(), backend="numcheck", options={"compiler": right, "every": 100, "closing": False})
    compiled(X)
    with cb.collect(closing=False) as session:
        compiled(X)
    return session.report


def every_member() -> cb.Report:
    """A report with what a compiler of kernels, other ranks, and a mistake of the check itself leave in it."""
    report = json.loads(watched(Net(), X, compiler=first(doubled)).to_json())
    code = "for (;;) { a < b && c; }"
    report["findings"][0] |= {
        "kernel": {"name": "cpp_fused_<0>", "language": "C++", "code": code, "computes": ["relu"], "others": ["b"]},
        "ranks": ["0 on node-a", "3 on node-b"],
        "explains": ["grad[first.weight]"],
        "searched": True,
        "repro": "checked_backend_reports/repro_relu.py",
        "repro_confirmed": False,
        "workaround": "torch._inductor.config.epilogue_fusion = False",
        "workaround_confirmed": False,
        "evidence": {"rank": "0 on node-a, 3 on node-b", "a key of another release": [1, "two", None, 0.5]},
    }
    skip = {"subject": "results", "reason": "the check itself failed: ValueError: a slip", "matters": True}
    report["coverage"]["skipped"].append(skip)
    report["coverage"]["notes"].append("the noise grew from 0.4 to 1.9 times")
    return cb.Report.from_json(json.dumps(report))


PROGRAMS: Mapping[str, Callable[[], cb.Report]] = MappingProxyType(
    {
        "pass": lambda: watched(Net(), X, compiler=right, backward=True),
        "pass_check": lambda: cb.check(Net(), (X,), compiler=right),
        "pass_bfloat16": lambda: cb.check(Net().bfloat16(), (X.bfloat16(),), compiler=right),
        "pass_layout_warning": lambda: watched(Net(), X, compiler=first(transposed)),
        "pass_ignored": lambda: watched(Net(), X, compiler=first(Tensor.double), ignore=("structure.dtype",)),
        "structure_dtype": lambda: watched(Net(), X, compiler=first(Tensor.double)),
        "structure_shape": lambda: cb.check(scaled, (X,), compiler=first(lambda value: value[None])),
        "structure_stride": lambda: cb.check(scaled, (X,), compiler=first(transposed)),
        "structure_results": lambda: cb.check(several, (X,), compiler=edited(lambda results, _args: results[:-1])),
        "alias": lambda: cb.check(viewed, (X,), compiler=first(Tensor.clone)),
        "alias_overwritten": lambda: watched(scaled, X, times=2, compiler=same_memory()),
        "mutation": lambda: cb.check(Net(), (X,), compiler=on_copies),
        "mutation_state": lambda: watched(Net(), X, compiler=edited(without_grad)),
        "logic": lambda: watched(Net(), X, compiler=first(doubled), on_divergence="warn"),
        "logic_check": lambda: cb.check(Net(), (X,), compiler=first(doubled), gradients=False),
        "logic_dtypes": lambda: cb.check(several, (X[:2, :2],), compiler=edited(all_wrong)),
        "logic_bfloat16": lambda: watched(Net().bfloat16(), X.bfloat16(), compiler=first(doubled)),
        "logic_this_call": lambda: watched(Net(), X, times=3, compiler=second_call()),
        "logic_regions": lambda: watched(in_two_regions, X, compiler=first(doubled)),
        "logic_training": lambda: cb.check(
            Scalar(), (X,), compiler=second_call(), iterations=2, optimizer=lambda params: torch.optim.SGD(params, 0.5)
        ),
        "localized": lambda: watched(Net(), X, compiler=wrong_relu, backward=True, localize=True),
        "precision": lambda: cb.check(scaled, (X,), compiler=first(lambda value: value.bfloat16().float())),
        "nonfinite": lambda: watched(Net(), X, compiler=first(with_nan)),
        "rng": lambda: cb.check(with_dropout, (X,), compiler=edited(drawing)),
        "exception": lambda: cb.check(raising, (X,), compiler=returning_inputs),
        "crash_running": lambda: cb.check(Net(), (X,), compiler=edited(crashing)),
        "crash_compiling": lambda: watched(Net(), X, compiler=refusing),
        "crash_killed": lambda: cb.check(scaled, (X,), compiler=edited(killed), isolate=True),
        "nondeterministic": lambda: cb.check(unrepeatable, (X,), compiler=right),
        "unsupported": lambda: watched(Net(), X, compiler=on_a_full_disk),
        "inconclusive_not_checked": not_checked,
        "inconclusive_nothing": lambda: cb.check(in_python, (X,), compiler=right),
        "inconclusive_memory": lambda: watched(too_large, X, compiler=returning_inputs),
        "metadata": lambda: interpreted(lambda x: liar(x) * 2, X),
        "names_long": lambda: watched(
            ANetWhoseNameIsSoLongThatNoTerminalAndNoTableShowsItInASingleLineOfEightyOrEvenOfOneHundredAndTwentyColumns(),
            X,
            compiler=first(doubled),
        ),
        "names_not_ascii": lambda: watched(Überprüfung(), X, compiler=first(doubled)),
        "every_member": every_member,
    }
)
"""The programs by the name of their report. Each is run once."""
