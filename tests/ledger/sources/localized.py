"""Faults whose operator is looked for: inside of Inductor, and in compilers written in Python."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch import fx, nn
from torch.nn import functional as F

import checked_backend as cb
from checked_backend._torch.caches import without_compile_caches
from tests.ledger.answer import Answers, Case, of_report, one
from tests.support import faults
from tests.support.planted import PLANTED, planted
from tests.support.programs import PROGRAMS
from tests.support.region_tools import checked, gathered

EVERYWHERE = Path(__file__).resolve().parents[2] / "diagnose" / "localize" / "everywhere"

INDUCTOR: Mapping[str, bool] = MappingProxyType(
    {
        "inject_relu": True,
        "_softmax": True,
        "index": False,
        "select_scatter": False,
        "_adaptive_avg_pool2d": False,
        "addmm_fused": True,
        "copy_": True,
        "_log_softmax_backward_data": False,
    }
)
"""Faults of ``tests.support.planted``, one of each of eight families, and whether the repro is run."""


class Net(nn.Module):
    """Operators in a row."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(6, 8), nn.LayerNorm(8), nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = torch.tanh(self.first(x))
        hidden = self.norm(hidden)
        hidden = F.relu(hidden - hidden.mean(dim=1, keepdim=True))
        hidden = F.gelu(hidden)
        return self.last(hidden)


def leaky(gm: fx.GraphModule, _example_inputs: Sequence[Any]) -> Callable[..., Any]:
    """A compiler that lets a part of negative numbers through a relu."""
    for node in gm.graph.find_nodes(op="call_function", target=F.relu):
        node.target, node.args, node.kwargs = F.leaky_relu, node.args[:1], {"negative_slope": 0.01}
    gm.recompile()
    return gm.forward


def without_norm(gm: fx.GraphModule, _example_inputs: Sequence[Any]) -> Callable[..., Any]:
    """A compiler that leaves layer norms out."""
    for node in gm.graph.find_nodes(op="call_function", target=F.layer_norm):
        node.replace_all_uses_with(node.args[0])
        gm.graph.erase_node(node)
    gm.recompile()
    return gm.forward


_wrong = faults.wrong_operator
COMPILERS: Mapping[str, tuple[Callable[[], Any], torch.dtype]] = MappingProxyType(
    {
        "gelu by Dynamo's name": (lambda: _wrong(str(F.gelu)), torch.float32),
        "another layout": (lambda: _wrong("aten.addmm.default", faults.restrided, "aot"), torch.float32),
        "tanh backward": (lambda: _wrong("aten.tanh_backward.default", how="aot"), torch.float32),
        "gelu in bfloat16": (lambda: _wrong("aten.gelu.default", how="aot"), torch.bfloat16),
        "gelu backward in bfloat16": (lambda: _wrong("aten.gelu_backward.default", how="aot"), torch.bfloat16),
        "if fused": (lambda: faults.wrong_if_fused("aten.relu.default"), torch.float32),
        "if unseen": (lambda: faults.wrong_if_unseen("aten.sub.Tensor"), torch.float32),
        "for readers": (lambda: faults.wrong_for_readers("aten.relu.default"), torch.float32),
        "left out": (lambda: faults.left_out("aten.tanh.default"), torch.float32),
        "refused": (lambda: faults.refuses("aten.gelu.default"), torch.float32),
        "no operator": (lambda: faults.one_element(0, "aot"), torch.float32),
    }
)


def cases() -> Iterator[Case]:
    """Faults in Inductor, and in Python; those of which a module has the compiler have a repro."""
    for name, repro in INDUCTOR.items():
        yield Case(f"localized/inductor/{name}", partial(_in_inductor, name, repro), seconds=900)
    for name, (make, dtype) in COMPILERS.items():
        yield Case(f"localized/python/{name}", partial(_in_python, make, dtype), seconds=900)
    yield Case("localized/module/leaky", partial(_in_module, leaky), seconds=900)
    yield Case("localized/module/without norm", partial(_in_module, without_norm), seconds=900)


def _in_inductor(name: str, repro: bool) -> Answers:
    os.environ[PLANTED] = name  # in the processes, too, that this one starts
    os.environ["PYTHONPATH"] = os.pathsep.join([str(EVERYWHERE), os.environ.get("PYTHONPATH", "")])
    program = PROGRAMS[name]
    with planted(name), without_compile_caches():
        report = cb.check(program.run, program.inputs(), gradients=program.train, localize=True)
        return one(of_report(report, localized=True, repro=repro))


def _in_python(make: Callable[[], Any], dtype: torch.dtype) -> Answers:
    compiled = checked(Net().to(dtype), make(), localize=True, layout="raise")
    report = gathered(lambda: compiled(torch.randn(5, 6, dtype=dtype)).square().sum().backward())
    return one(of_report(report, localized=True))


def _in_module(compiler: Callable[..., Any]) -> Answers:
    report = cb.check(Net(), (torch.randn(5, 6),), compiler=compiler, localize=True)
    return one(of_report(report, localized=True, repro=True))
