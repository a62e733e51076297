"""Importing the package is free, and its names are where it says."""

from __future__ import annotations

import pkgutil
import subprocess
import sys

import pytest

import checked_backend


def python(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def loaded(after: str) -> set[str]:
    names = python(f"import sys\n{after}\nprint(*sys.modules)")
    return {name for name in names.split() if "." not in name or name.startswith("checked_backend")}


@pytest.mark.process
def test_import_loads_nothing() -> None:
    fresh = loaded("import checked_backend")
    assert not {"torch", "pydantic", "numpy", "rich", "typer", "jinja2"} & fresh
    assert {name for name in fresh if name.startswith("checked_backend")} == {"checked_backend"}


@pytest.mark.process
@pytest.mark.parametrize("code", ["import checked_backend.cli", "from checked_backend import Report, Verdict"])
def test_torch_is_not_needed_to_read_reports(code: str) -> None:
    assert "torch" not in loaded(code)


def test_all_is_sorted_and_in_dir() -> None:
    assert checked_backend.__all__ == sorted(checked_backend.__all__)
    assert set(checked_backend.__all__) <= set(dir(checked_backend))


HOMES = {name: f"checked_backend.{home}" for home, names in checked_backend._HOMES.items() for name in names}


def test_every_name_has_a_home() -> None:
    assert {*HOMES, "__version__", "aot_compilers"} == set(checked_backend.__all__)


@pytest.mark.parametrize("name", sorted(HOMES))
def test_names_resolve(name: str) -> None:
    assert getattr(checked_backend, name) is getattr(sys.modules[HOMES[name]], name)


def test_no_submodule_hides_a_public_name() -> None:
    modules = {module.name for module in pkgutil.iter_modules(checked_backend.__path__)}
    assert modules & {*checked_backend.__all__} == {"aot_compilers"}  # the submodule itself is the public name


def test_version_and_unknown_names() -> None:
    assert checked_backend.__version__
    with pytest.raises(AttributeError, match="module 'checked_backend' has no attribute 'nonsense'"):
        _ = checked_backend.nonsense
    assert not hasattr(checked_backend, "__wrapped__")
