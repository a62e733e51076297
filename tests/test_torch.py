"""What is private to torch comes through one room."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import checked_backend

PACKAGE = Path(checked_backend.__file__).parent
SUBJECTS = sorted(path.stem for path in (PACKAGE / "_torch").glob("*.py") if path.stem != "__init__")

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


def printed(code: str) -> str:
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.mark.process
def test_dynamo_is_not_loaded_for_what_does_not_need_it() -> None:
    light = ("autograd", "fake_tensors", "graph_code", "modes", "operators", "pytree", "symbols", "tensors")
    imports = "\n".join(f"import checked_backend._torch.{subject}" for subject in light)
    assert printed(f"import sys\n{imports}\nprint('torch._dynamo' in sys.modules)") == "False"


NOT_HERE = """
import ast, importlib, sys, torch
home = importlib.import_module("checked_backend._torch." + sys.argv[1])
for node in ast.walk(ast.parse(open(home.__file__, encoding="utf-8").read())):
    match ast.unparse(node).split("."):
        case ["torch", *names] if isinstance(node, ast.Attribute) and all(map(str.isidentifier, names)):
            value = torch
            for name in names:
                value = getattr(value, name, None)
            if value is None:
                print(ast.unparse(node))
"""


@pytest.mark.slow
@pytest.mark.parametrize("subject", SUBJECTS)
def test_a_subject_has_loaded_by_itself_what_it_names(subject: str) -> None:
    missing = printed(f"import sys\nsys.argv[1:] = ['{subject}']\n{NOT_HERE}").splitlines()
    # a table of Dynamo's, which is loaded where there is anything in it
    assert not [name for name in missing if "triton_kernel_wrap" not in name]
