"""What checking metadata costs, as ratios that were measured in one run, interleaved.

    python tests/benchmarks/bench_debug_interpreter.py

Three questions, for a graph of 1,000 nodes on tiny tensors, static and dynamic:

- the checked graph over plain ``fx.Interpreter`` on the same graph (goal: 1.0 or less);
- the checks' own cost per node over that of torch's ``DebugInterpreter``, given the ``shape_env`` without which it does
  not run: each is its runner's time less the time of the same runner without checks;
- preparing the graph over compiling it with AOT autograd (goal: 0.1 or less).

With torch 2.13 on two busy cores, static and dynamic: 0.84 and 0.78; 0.3 and 0.2; 0.04 and 0.01.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import fx
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.compilers import DebugInterpreter

from checked_backend.aot.boxed import boxed, boxed_module
from checked_backend.metadata.interpreter import MetadataInterpreter

ROUNDS = 41
DEBUG_ROUNDS = 3


def program(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """About 1,000 ATen nodes: products, views, elementwise operators and reductions."""
    for _ in range(125):
        x = torch.relu(x @ w)
        x = (x + x.t().contiguous().t()) * 0.5
        x = torch.sigmoid(x) - x.mean(0)
    return x


def compiled_graph(*, dynamic: bool) -> tuple[fx.GraphModule, list[Any], float]:
    """The inference graph, its inputs, and how long AOT autograd took to make it."""
    captured: list[tuple[fx.GraphModule, list[Any]]] = []
    took: list[float] = []

    def compiler(gm: fx.GraphModule, _example: Any) -> Any:
        run = boxed_module(gm)

        def record(args: list[Any]) -> Any:
            captured.append((gm, list(args)))
            return run(args)

        return boxed(record)

    def backend(gm: fx.GraphModule, example: Any) -> Any:
        began = time.thread_time()
        compiled = aot_autograd(fw_compiler=compiler)(gm, example)
        took.append(time.thread_time() - began)
        return compiled

    torch._dynamo.reset()
    with torch.no_grad():
        torch.compile(program, backend=backend, dynamic=dynamic)(torch.randn(4, 4), torch.randn(4, 4))
    gm, args = captured[0]
    return gm, args, took[0]


def fail(findings: Any) -> None:
    """No finding is expected."""
    raise AssertionError(findings)


def timed(function: Callable[[], Any]) -> float:
    """Seconds of this thread's processor time that one call took: other programs do not count."""
    began = time.thread_time()
    function()
    return time.thread_time() - began


def measure(*, dynamic: bool) -> dict[str, float]:
    """All numbers for one kind of graph."""
    gm, args, aot = compiled_graph(dynamic=dynamic)
    nodes = sum(node.op == "call_function" for node in gm.graph.nodes)
    prepare = min(timed(lambda: MetadataInterpreter(gm, "inference", fail)) for _ in range(3))
    checked = MetadataInterpreter(gm, "inference", fail)
    plain, interpreter = boxed_module(gm), fx.Interpreter(gm)
    debug = DebugInterpreter(gm)
    example = next(n.meta["val"] for n in gm.graph.nodes if isinstance(n.meta.get("val"), torch.Tensor))
    gm.shape_env = example.fake_mode.shape_env
    runners: dict[str, Callable[[], Any]] = {
        "checked": lambda: checked(list(args)),
        "generated code": lambda: plain(list(args)),
        "fx.Interpreter": lambda: interpreter.run(*args),
        "DebugInterpreter": lambda: debug.run(*args),
    }
    times: dict[str, list[float]] = {name: [] for name in runners}
    with torch.no_grad():
        for index in range(ROUNDS + 2):
            for name, run in runners.items():
                if name == "DebugInterpreter" and index >= DEBUG_ROUNDS + 2:
                    continue
                seconds = timed(run)
                if index >= 2:
                    times[name].append(seconds)
    best = {name: statistics.median(values) for name, values in times.items()}
    return {
        "nodes": nodes,
        "checked us/node": best["checked"] / nodes * 1e6,
        "fx.Interpreter us/node": best["fx.Interpreter"] / nodes * 1e6,
        "checked / fx.Interpreter": best["checked"] / best["fx.Interpreter"],
        "own us/node": (best["checked"] - best["generated code"]) / nodes * 1e6,
        "DebugInterpreter's own us/node": (best["DebugInterpreter"] - best["fx.Interpreter"]) / nodes * 1e6,
        "own / DebugInterpreter's own": (best["checked"] - best["generated code"])
        / (best["DebugInterpreter"] - best["fx.Interpreter"]),
        "preparation s": prepare,
        "AOT compile s": aot,
        "preparation / AOT compile": prepare / aot,
    }


def main() -> None:
    torch.set_num_threads(1)
    static, dynamic = measure(dynamic=False), measure(dynamic=True)
    print(f"{'':34}{'static':>12}{'dynamic':>12}")
    for name in static:
        print(f"{name:34}{static[name]:12.4g}{dynamic[name]:12.4g}")


if __name__ == "__main__":
    main()
