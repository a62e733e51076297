"""``python -m tests.calibration.own_dtype``: faults that are there at 16 bits alone, and how many of them are hidden.

Each is planted in a graph of AOT autograd, forward or backward, where the tensors are of half precision; in float64 the
compiler is right. What changes a tensor by less than a unit in the last place counts as no fault. Told is the share
that is not found, per dtype, with each operator checked by itself and without.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import fx

from checked_backend import check
from checked_backend.regions.operator_check.check import OperatorCheck, OperatorDecisions
from tests.support.faults import through_aot_pair

from .families import FAMILIES
from .run import DTYPES

_LOW = (torch.bfloat16, torch.float16)
_TRAINED = (
    "mlp", "layernorm_residual", "softmax_attention", "encoder_block", "gpt_block", "swiglu", "moe_gating",
    "conv_bn_train", "conv_groupnorm", "nll_loss", "kl_loss", "contrastive", "lstm", "embedding_positional",
)  # fmt: skip

aten = torch.ops.aten


def _summed(x: torch.Tensor) -> torch.Tensor:
    total = torch.zeros((), dtype=x.dtype)
    for value in x.flatten():
        total = total + value
    return total


def _softmax(x: torch.Tensor, dim: int, *_: Any) -> torch.Tensor:
    powers = x.exp()
    return powers / powers.sum(dim, keepdim=True).mul(1.03)


def _layer_norm(x: torch.Tensor, shape: Sequence[int], weight: Any, bias: Any, eps: float) -> Any:
    _, mean, rstd = aten.native_layer_norm(x, shape, weight, bias, eps)
    count = 1
    for size in shape:
        count *= size
    rows = x.reshape(-1, count)
    total, squares = torch.zeros_like(rows[:, 0]), torch.zeros_like(rows[:, 0])
    for column in rows.unbind(1):
        total, squares = total + column, squares + column * column
    average = total / count
    scale = (squares / count - average * average).clamp_min(0).add(eps).rsqrt()
    made = ((rows - average[:, None]) * scale[:, None]).reshape(x.shape)
    made = made if weight is None else made * weight
    return (made if bias is None else made + bias), mean, rstd


Fault = Callable[[fx.Node, Any, Sequence[Any]], Any]


def _scaled(names: Sequence[str], factor: float) -> Fault:
    def fault(node: fx.Node, result: Any, _args: Sequence[Any]) -> Any:
        if not any(name == str(node.target).split(".")[1] for name in names):
            return result
        if isinstance(result, tuple):
            return (result[0] * factor, *result[1:]) if result[0].dtype in _LOW else result
        return result * factor if result.dtype in _LOW else result

    return fault


def _instead(name: str, kernel: Callable[..., Any]) -> Fault:
    def fault(node: fx.Node, result: Any, args: Sequence[Any]) -> Any:
        low = bool(args) and isinstance(args[0], torch.Tensor) and args[0].dtype in _LOW
        return kernel(*args) if low and str(node.target).split(".")[1] == name else result

    return fault


def _mean(x: torch.Tensor, *_: Any) -> torch.Tensor:
    return _summed(x) / x.numel()


FAULTS: dict[str, Fault] = {
    "elementwise kernel 3 % off": _scaled(("gelu", "tanh", "silu", "sigmoid", "relu", "exp"), 1.03),
    "product 3 % off": _scaled(("mm", "addmm", "bmm", "convolution"), 1.03),
    "linear 10 % off": _scaled(("mm", "addmm"), 1.1),
    "norm 3 % off": _scaled(("native_layer_norm", "native_group_norm", "native_batch_norm"), 1.03),
    "attention 3 % off": _scaled(("_softmax", "_log_softmax"), 0.97),
    "gradient of an elementwise kernel 3 % off": _scaled(
        ("gelu_backward", "tanh_backward", "silu_backward", "threshold_backward", "_softmax_backward_data"), 1.03
    ),
    "softmax without its maximum": _instead("_softmax", _softmax),
    "statistics of a layer norm at 16 bits": _instead("native_layer_norm", _layer_norm),
    "loss accumulated at 16 bits": _instead("mean", _mean),
}
"""Faults by name."""

GRADIENT = "gradient times {factor}"


def _apart(wrong: Any, right: Any) -> bool:
    """Whether a fault makes a difference of a unit in the last place or more: a short sum at 16 bits may be exact."""
    wrong, right = (value[0] if isinstance(value, tuple) else value for value in (wrong, right))
    error, size = (one.double().square().mean().sqrt() for one in (wrong.double() - right.double(), right))
    return not bool(error < torch.finfo(right.dtype).eps * size)


def _compiler(fault: Fault | None, gradient: float, planted: list[bool]) -> Callable[..., Any]:
    def compile_graph(graph: fx.GraphModule, _inputs: Sequence[Any], *, backward: bool = False) -> Callable[..., Any]:
        class Runner(fx.Interpreter):
            def run_node(self, n: fx.Node) -> Any:
                result = super().run_node(n)
                if n.op == "output" and backward and gradient != 1:
                    return tuple(map(self.scaled, result))
                if fault is None or n.op != "call_function" or not isinstance(n.target, torch._ops.OpOverload):
                    return result
                args, _ = self.fetch_args_kwargs_from_env(n)
                made = fault(n, result, args)
                planted[0] |= made is not result and _apart(made, result)
                return made

            def scaled(self, value: Any) -> Any:
                if not isinstance(value, torch.Tensor) or value.dtype not in _LOW or value.dim() < 2:
                    return value
                planted[0] = True
                return value * gradient

        return Runner(graph, garbage_collect_values=False).run

    return through_aot_pair(compile_graph, partial(compile_graph, backward=True))


def _cases(dtypes: Sequence[str]) -> Iterator[tuple[str, str, str]]:
    for dtype in dtypes:
        for name in _TRAINED:
            for fault in [*FAULTS, GRADIENT.format(factor=1.01 if dtype == "bfloat16" else 1.004)]:
                yield dtype, name, fault


def _found(dtype: str, name: str, fault: str, *, apart: bool) -> bool | None:
    """Whether the fault is found; None if there is nothing of its kind in the program."""
    torch._dynamo.reset()
    subject, planted = FAMILIES[name], [False]
    gradient = float(fault.rsplit(" ", 1)[1]) if fault not in FAULTS else 1.0
    compiler = _compiler(FAULTS.get(fault), gradient, planted)
    off = mock.patch.object(OperatorCheck, "run", side_effect=lambda *_args: OperatorDecisions())
    with warnings.catch_warnings(), nullcontext() if apart else off:
        warnings.simplefilter("ignore")
        tensors = subject.make(DTYPES[dtype], training=True)
        report = check(subject.program(DTYPES[dtype]), tensors, compiler=compiler, dynamic=False)
    return str(report.verdict) == "fail" if planted[0] else None


def main(arguments: Sequence[str] | None = None) -> int:
    """Run, and print the shares."""
    parser = argparse.ArgumentParser(prog="python -m tests.calibration.own_dtype", description=__doc__)
    parser.add_argument("--dtype", nargs="*", default=["bfloat16", "float16"], choices=["bfloat16", "float16"])
    parser.add_argument("--every", type=int, default=1, help="run every n-th case only")
    parser.add_argument("--resume", type=Path, help="JSON lines of results, to append to")
    parser.add_argument("--time-limit", type=float, default=float("inf"))
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    until = time.monotonic() + options.time_limit
    shares: dict[tuple[str, bool], list[bool]] = defaultdict(list)
    missed: list[str] = []
    for dtype, name, fault in list(_cases(options.dtype))[:: options.every]:
        if time.monotonic() > until:
            break
        for apart in (True, False):
            found = _found(dtype, name, fault, apart=apart)
            if found is None:
                break
            shares[dtype, apart].append(found)
            if apart and not found:
                missed.append(f"{dtype} {name}: {fault}")
            if options.resume is not None:
                with options.resume.open("a") as file:
                    file.write(json.dumps([dtype, name, fault, apart, found]) + "\n")
    for (dtype, apart), found_all in sorted(shares.items()):
        how = "each operator by itself" if apart else "as a whole"
        hidden = len(found_all) - sum(found_all)
        print(f"{dtype}, {how}: {hidden} of {len(found_all)} hidden")
    print("\n".join(["hidden:", *missed]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
