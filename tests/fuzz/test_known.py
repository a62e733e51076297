"""A program can call tensor operations and nothing else."""

from __future__ import annotations

import pytest
import torch

from checked_backend.errors import FuzzError
from checked_backend.fuzz.known import FUNCTION, METHOD, is_known, operation, plain, spelled


@pytest.mark.parametrize(
    "name", ["torch.add", "torch.linalg.norm", "torch.special.erf", "F.gelu", "Tensor.add_", "torch.zeros", "+="]
)
def test_tensor_operations_are_known(name: str) -> None:
    assert is_known(name)


@pytest.mark.parametrize(
    "name",
    [
        *("torch.load", "torch.save", "torch.hub.load", "torch.from_file", "torch.compile", "torch.set_default_dtype"),
        *("torch.ops", "torch.empty", "Tensor.resize_", "Tensor.set_", "Tensor.register_hook", "Tensor.__reduce_ex__"),
        *("os.system", "eval", "torch.classes.x", "torch.os.system", "F.os", "Tensor.share_memory_", "torch..add", ""),
        *("torch.utils.cpp_extension.load", "torch._C._nn.gelu", "Tensor.__class__", "Tensor.data"),
    ],
)
def test_everything_else_is_refused(name: str) -> None:
    with pytest.raises(FuzzError, match="no operation that may be called"):
        operation(name)


def test_functions_and_methods_are_called_as_such() -> None:
    assert operation("torch.add") == (FUNCTION, torch.add)
    assert operation("Tensor.add_") == (METHOD, "add_")
    assert spelled("Tensor.add_") == "add_"


def test_indexing_has_a_name() -> None:
    assert [plain(op) for op in ("getitem", "setitem")] == ["x[...]", "x[...] = y"]
