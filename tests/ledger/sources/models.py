"""The real models of ``tests.support``, trained in float32, in bfloat16 and under autocast, and with a fault."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext
from functools import partial
from types import MappingProxyType
from typing import Any

import numpy as np
import torch

from tests.calibration.compilers import candidate
from tests.ledger.answer import Answers, Case, of_report, one
from tests.support import models, more_models
from tests.support.faults import interpreted
from tests.support.region_tools import checked, gathered

Make = Callable[[], models.Case]

SMALL: Mapping[str, Make] = {
    **more_models.WRITTEN_HERE,
    **more_models.HALF_WRITTEN_HERE,
    "resnet": models.resnet,
    "dropout_mlp": models.dropout_mlp,
}
LIKE_OTHERS = ("gemma2", "distilbert", "clip", "swin")
"""Models for which another one stands: in 16 bits each takes up to 20 seconds."""

REFUSED_BY_EAGER = {("fourier", "bfloat16"), ("graph_network", "bfloat16")}
QUICK = ("embedding_bag", "policy", "dropout_mlp")

MODELS: Mapping[str, Make] = MappingProxyType(
    {
        name: make
        for name, make in {**more_models.HUGGING_FACE, **more_models.HALF, **SMALL}.items()
        if name not in LIKE_OTHERS
    }
)

PRECISIONS = ("float32", "bfloat16", "amp")
CLEAN = ("aot_eager", "everything", "reordered", "fused")
"""Compilers in turn: AOT autograd alone, and ones that round otherwise."""

PLANTED: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {"products": ("mm", "addmm", "bmm", "convolution"), "sums": ("sum_1",)}
)
"""The nodes of AOT autograd's graphs that are one percent too large, in turn."""

BY_INDUCTOR = {"gated": "amp", "residual": "float32", "attention_with_weights": "float32", "dropout_mlp": "bfloat16"}
"""A few more, in one precision."""


def cases() -> Iterator[Case]:
    """Each model clean and with a fault, small ones twice clean; precisions, compilers and faults take turns."""
    for number, (name, make) in enumerate(MODELS.items()):
        precisions = [precision for precision in PRECISIONS if (name, precision) not in REFUSED_BY_EAGER]
        for place in range(1 + (name in SMALL)):
            precision, compiler = precisions[(number + place) % len(precisions)], CLEAN[(number + place) % len(CLEAN)]
            yield Case(
                f"models/{name}/{precision}/{compiler}", partial(_clean, make, precision, compiler), name in QUICK
            )
        precision, fault = precisions[(number + 2) % len(precisions)], [*PLANTED][number % 2]
        yield Case(
            f"models/{name}/{precision}/planted {fault}", partial(_planted, make, precision, fault), name in QUICK
        )
    for name, precision in BY_INDUCTOR.items():
        yield Case(
            f"models/{name}/{precision}/inductor", partial(_clean, MODELS[name], precision, "inductor"), seconds=900
        )


def _clean(make: Make, precision: str, compiler: str) -> Answers:
    return one(of_report(gathered(partial(_train, make, precision, candidate(compiler)))))


def _planted(make: Make, precision: str, fault: str) -> Answers:
    wrong = interpreted(lambda node, value: _larger(value) if node.name in PLANTED[fault] else value, "aot")
    return one(of_report(gathered(partial(_train, make, precision, wrong))))


def _larger(value: Any) -> Any:
    return value * 1.01 if isinstance(value, torch.Tensor) and value.is_floating_point() else value


def _train(make: Make, precision: str, compiler: Any) -> None:
    np.random.seed(0)  # one of the models draws with NumPy
    case = make()
    case.model.train()
    model, inputs = case.model, dict(case.inputs)
    if precision == "bfloat16":
        model, inputs = model.bfloat16(), {name: _in_bfloat16(value) for name, value in inputs.items()}
    compiled = checked(model, compiler)
    with torch.autocast("cpu", torch.bfloat16) if precision == "amp" else nullcontext():
        loss = case.loss(compiled(**inputs))
    loss.backward()


def _in_bfloat16(value: Any) -> Any:
    return value.bfloat16() if isinstance(value, torch.Tensor) and value.is_floating_point() else value
