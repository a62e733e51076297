from __future__ import annotations

from pathlib import Path

import pytest
import torch
from functorch.compile import make_boxed_func
from torch import fx, nn
from torch._dynamo.backends.common import aot_autograd

from checked_backend.graphs.source_line import callers_line, module_path, source_line


def test_source_line_is_the_innermost_frame_outside_of_torch(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    node = fx.Graph().placeholder("x")
    assert source_line(node) is None
    node.stack_trace = (
        '  File "/home/me/train.py", line 3, in main\n    loss = model(x)\n'
        f'  File "{tmp_path}/src/model.py", line 41, in forward\n    x = self.lin(x)\n'
        f'  File "{torch.__file__.removesuffix("__init__.py")}nn/modules/linear.py", line 9, in forward\n    return 1\n'
    )
    assert source_line(node) == "src/model.py:41 in forward: x = self.lin(x)"
    assert callers_line(node) is None
    node.stack_trace += '  File "/usr/lib/site-packages/library/layer.py", line 5, in forward\n    return act(x)\n'
    assert source_line(node) == "site-packages/library/layer.py:5 in forward: return act(x)"
    assert callers_line(node) == "src/model.py:41 in forward: x = self.lin(x)"
    node.stack_trace = '  File "/usr/lib/site-packages/library/layer.py", line 5, in forward\n'
    assert callers_line(node) is None


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Sequential(nn.Linear(3, 3), nn.ReLU())])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers[0](x).sin()  # type: ignore[no-any-return]


@pytest.mark.parametrize("forwards", [False, True])
def test_the_module_of_a_node_forward_and_backward(forwards: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if forwards:  # models of some libraries do: Dynamo asks `__dict__` for their submodules
        monkeypatch.setattr(Block, "__getattr__", lambda self, name: nn.Module.__getattr__(self, name), raising=False)
    found: list[tuple[str, str | None]] = []

    def compiler(gm: fx.GraphModule, _inputs: object) -> object:
        found.extend((node.name, module_path(node)) for node in gm.graph.nodes if node.op == "call_function")
        return make_boxed_func(gm.forward)

    compiled = torch.compile(Block(), backend=aot_autograd(fw_compiler=compiler, bw_compiler=compiler))
    compiled(torch.randn(2, 3)).sum().backward()
    assert ("relu", "layers.0.1") in found
    assert ("threshold_backward", "layers.0.1") in found
    assert ("sin", None) in found  # the module's own
