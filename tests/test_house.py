"""Rules that every file keeps: it imports at its top, and has its tests where one looks for them."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import checked_backend

PACKAGE = Path(checked_backend.__file__).parent
TESTS = Path(__file__).parent

IMPORTED_IN_FUNCTIONS = {
    "torch._inductor": "it is slow to import, and often not needed",
    "torch._functorch": "its configuration comes with the compilers, which are slow to import",
    "torch.testing": "it takes seconds to import, and needs expecttest, which is not always there",
    "resource": "Windows lacks it",
    "fcntl": "Windows lacks it",
}
"""Modules that functions of the package may import, and why not at the top of a file."""

IMPORT_BY_NAME = {
    "__init__.py": "importing the package is free; a public name loads its module",
    "autostart.py": "a Python that compiles nothing loads nothing",
    "cli/fuzzing.py": "--help is quick without torch",
    "cli/options.py": "--help is quick without torch",
    "cli/replaying.py": "the process is forked before it loads torch, and users name modules of their own",
    "cli/running.py": "--help and run of Inductor need no torch",
    "cli/sweeping.py": "--help is quick without torch",
    "cli/verbs.py": "--help is quick without torch",
    "fuzz/generate/torchfuzz.py": "PyTorch's torchfuzz is in a checkout",
    "integrations/vllm.py": "vLLM is there where it loads this, and off nothing of it is loaded",
    "process/job.py": "memory and threads are limited before torch is loaded",
    "process/warm.py": "who starts it says what to import before a fork; the libraries of suites are optional",
    "pytest_plugin/__init__.py": "a test run that does not ask for checks loads no torch",
    "runs/pool.py": "ray is optional",
    "sweep/suites/__init__.py": "the libraries of suites are optional",
    "sweep/suites/huggingface.py": "transformers is optional",
    "sweep/suites/timm_models.py": "timm is optional",
    "sweep/suites/torchbench.py": "the models are in a checkout",
}
"""Files that import modules by name when they run, and why."""


def files(root: Path) -> list[Path]:
    return sorted(path for path in root.rglob("*.py") if "__pycache__" not in path.parts)


def trees(root: Path) -> Iterator[tuple[str, ast.Module]]:
    for path in files(root):
        yield path.relative_to(root).as_posix(), ast.parse(path.read_text(encoding="utf-8"))


def imports_in_functions(tree: ast.Module) -> Iterator[str]:
    functions = (node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef))
    for node in (inner for function in functions for inner in ast.walk(function)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield f"{node.module}"


def test_imports_in_functions_are_seen() -> None:
    source = "import top\ndef function():\n    import a.b, c\n    def inner():\n        from d.e import f\n"
    assert {*imports_in_functions(ast.parse(source))} == {"a.b", "c", "d.e"}


def test_functions_import_nothing_without_a_reason() -> None:
    found = {(file, name) for file, tree in trees(PACKAGE) for name in imports_in_functions(tree)}
    allowed = {
        known: {(file, name) for file, name in found if f"{name}.".startswith(f"{known}.")}
        for known in IMPORTED_IN_FUNCTIONS
    }
    assert not found.difference(*allowed.values())
    assert all(allowed.values()), "a row of the table that no file needs any more"


def test_tests_import_the_package_at_the_top() -> None:
    ours = ("checked_backend", "tests")
    found = [(file, name) for file, tree in trees(TESTS) for name in imports_in_functions(tree)]
    assert not [(file, name) for file, name in found if name.partition(".")[0] in ours]


def test_modules_are_imported_by_name_where_that_has_a_reason() -> None:
    users = {
        file
        for file, tree in trees(PACKAGE)
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute | ast.Name)
        and ast.unparse(node) in ("importlib.import_module", "import_module", "__import__")
    }
    assert users == {*IMPORT_BY_NAME}


@pytest.mark.parametrize(
    "room", [path.parent.relative_to(PACKAGE).as_posix() for path in sorted(PACKAGE.rglob("*/__init__.py"))]
)
def test_every_package_has_a_folder_of_tests_or_a_file(room: str) -> None:
    name = Path(room).name.lstrip("_")
    assert [*TESTS.joinpath(room).rglob("test_*.py"), *TESTS.joinpath(room).parent.glob(f"test_{name}.py")]
