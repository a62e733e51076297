"""What is private to torch comes through one room."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import checked_backend

PACKAGE = Path(checked_backend.__file__).parent

# the first are where such names belong; the last is text of dumps, which run without the package
MAY_NAME_THEM = {*(PACKAGE / "_torch").glob("*.py"), PACKAGE / "dump" / "standalone.py"}


def private_names(source: str) -> Iterator[str]:
    """The private names of torch that a module's own code imports or reads."""
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Import():
                names = [alias.name for alias in node.names]
            case ast.ImportFrom():
                names = [f"{node.module}.{alias.name}" for alias in node.names]
            case ast.Attribute():
                names = [ast.unparse(node)]
            case _:
                continue
        for name in names:
            root, *rest = name.split("(")[0].split(".")
            if root == "torch" and any(part.startswith("_") and not part.startswith("__") for part in rest):
                yield name


def test_private_names_are_seen() -> None:
    source = """
import torch._dynamo.config
from torch.utils import _pytree as pytree
from torch import fx
torch._C._get_tracing_state(), torch.Tensor.__add__, fx.Graph._nodes, torch.equal(_own, _own).real
"""
    found = {*private_names(source)}
    assert found == {"torch._dynamo.config", "torch.utils._pytree", "torch._C", "torch._C._get_tracing_state"}


def test_private_names_come_through_one_room() -> None:
    modules = {*PACKAGE.rglob("*.py")}
    assert modules >= MAY_NAME_THEM
    found = {
        str(module.relative_to(PACKAGE)): names
        for module in modules - MAY_NAME_THEM
        if (names := [*private_names(module.read_text(encoding="utf-8"))])
    }
    assert not found
