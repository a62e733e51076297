"""Hold PyTorch's own tools and `numcheck` against one wrong program: Inductor with the test bug in its `relu`.

    python examples/compare_tools.py

Takes a minute or two, mostly Inductor compiling. Prints what each tool says, and how long it took.
"""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Iterator

import torch
from torch import nn
from torch._dynamo import config as dynamo_config
from torch._inductor import config as inductor_config
from torch._inductor.compiler_bisector import CompilerBisector

import checked_backend as cb

BUG = {"cpp.inject_relu_bug_TESTING_ONLY": "accuracy"}


class Net(nn.Module):
    """Four layers, and a relu whose result matters little: its error is 0.1 % of the result."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(64, 64) for _ in range(4)])
        self.norm = nn.LayerNorm(64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Compute."""
        for layer in self.layers:
            x = torch.tanh(layer(x))
        x = torch.relu(self.norm(x) - 2.5) * 1e-3 + x
        return x.softmax(-1)


@contextlib.contextmanager
def fresh() -> Iterator[None]:
    """Compile anew, without gradients."""
    torch._dynamo.reset()
    with torch.no_grad():
        yield


def close(expected: torch.Tensor, actual: torch.Tensor, tolerance: float | None = None) -> bool:
    """Whether `assert_close` passes."""
    try:
        torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance)
    except AssertionError:
        return False
    return True


def by_assert_close(net: Net, x: torch.Tensor) -> str:
    """Compare with a tolerance."""
    with fresh():
        expected, actual = net(x), torch.compile(net, options=BUG)(x)
    off = float((actual - expected).square().mean().sqrt() / expected.square().mean().sqrt())
    told = [f"{off:.2%} off"]
    for name, tolerance in (("its defaults", None), ("1e-3", 1e-3)):
        told.append(f"at {name} it {'passes' if close(expected, actual, tolerance) else 'fails'}")
    return ", ".join(told)


def by_repro_after(net: Net, x: torch.Tensor) -> str:
    """TORCHDYNAMO_REPRO_AFTER=aot TORCHDYNAMO_REPRO_LEVEL=4."""
    with fresh(), dynamo_config.patch(repro_after="aot", repro_level=4), inductor_config.patch(BUG):
        try:
            torch.compile(net)(x)
        except Exception as error:
            return f"{type(error).__name__}: {error}".splitlines()[0]
    return "nothing"


def by_bisector(net: Net, x: torch.Tensor) -> str:
    """Torch's bisection, which takes a test function and so a tolerance."""

    def passes() -> bool:
        with fresh(), inductor_config.patch(BUG):
            return close(net(x), torch.compile(net)(x))

    with contextlib.redirect_stdout(sys.stderr):  # it prints each of its steps
        found = CompilerBisector.do_bisect(passes)
    return "nothing" if found is None else f"{found.backend}, {found.subsystem}, {found.debug_info}"


def by_numcheck(net: Net, x: torch.Tensor) -> str:
    """This package."""
    with fresh(), cb.collect() as session:
        torch.compile(net, backend="numcheck", options={"compiler_options": BUG, "on_divergence": "record"})(x)
    return str(session.report)


TOOLS: dict[str, Callable[[Net, torch.Tensor], str]] = {
    "torch.testing.assert_close": by_assert_close,
    "TORCHDYNAMO_REPRO_AFTER=aot": by_repro_after,
    "CompilerBisector": by_bisector,
    "numcheck": by_numcheck,
}


def main() -> int:
    """Run all tools. The exit code is 0 if numcheck names the operator and its line."""
    torch.manual_seed(0)
    net, x = Net(), torch.randn(16, 64)
    said = ""
    for name, tool in TOOLS.items():
        began = time.perf_counter()
        said = tool(net, x)
        print(f"\n{name} ({time.perf_counter() - began:.0f} s):\n{said}")
    return 0 if "compare_tools.py" in said.splitlines()[0] and "relu is wrong" in said.splitlines()[0] else 1


if __name__ == "__main__":
    sys.exit(main())
