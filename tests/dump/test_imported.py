"""What a module that is named with ``--import`` lends to a dump."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from types import FunctionType

import numpy as np
import pytest
import torch

from checked_backend._torch.operators import registered_operators
from checked_backend.cli.replaying import _import, _keep_out
from checked_backend.dump.targets import Trusted, Unresolved, resolve_target

MODULE = """
import builtins, functools, importlib, os, torch, subprocess
from os import system, popen as opened
from torch import load
import dump_lends_other
from dump_lends_other import theirs

def own(x):
    return x + 1

def doubling(function):
    @functools.wraps(function)
    def around(x):
        return function(x) * 2
    return around

@doubling
def decorated(x):
    return x + 1

claimed = dump_lends_other.theirs_too
claimed.__module__, claimed.__qualname__ = __name__, "claimed"

class Holder:
    shell = staticmethod(os.system)
    def __call__(self, x):
        return x
    def method(self):
        return None

def outer():
    def inner(x):
        return x
    return inner

made = outer()
short = lambda x: x
renamed = own
partial = functools.partial(os.system, "touch pwned")
callable_instance = Holder()
evaluate = builtins.eval
own.system = os.system

def __getattr__(name):
    return getattr(os, name)

library = torch.library.Library("dump_lends", "DEF")
library.define("double(Tensor x) -> Tensor")
library.impl("double", lambda x: x * 2, "CPU")

@torch.library.custom_op("dump_lends_more::triple", mutates_args=())
def triple(x: torch.Tensor) -> torch.Tensor:
    return x * 3
"""

OTHER = """
import torch

def theirs(x):
    return x

def theirs_too(x):
    return x

library = torch.library.Library("dump_lends_theirs", "DEF")
library.define("double(Tensor x) -> Tensor")
library.impl("double", lambda x: x * 2, "CPU")

@torch.library.custom_op("dump_lends_theirs::triple", mutates_args=())
def triple(x: torch.Tensor) -> torch.Tensor:
    return x * 3
"""


@pytest.fixture(scope="module")
def trusted(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Trusted]:
    folder = tmp_path_factory.mktemp("lends")
    (folder / "dump_lends.py").write_text(MODULE)
    (folder / "dump_lends_other.py").write_text(OTHER)
    sys.path.insert(0, str(folder))
    before = registered_operators()
    __import__("dump_lends")
    yield Trusted(frozenset({"dump_lends"}), registered_operators() - before)
    sys.path.remove(str(folder))


def test_its_own_functions_and_operators(trusted: Trusted) -> None:
    own = resolve_target("function:dump_lends:own", trusted)
    assert isinstance(own, FunctionType)
    assert float(own(torch.ones(()))) == 2
    assert float(resolve_target("function:dump_lends:decorated", trusted)(torch.ones(()))) == 4
    for name in ("dump_lends.double", "dump_lends_more.triple"):
        assert isinstance(resolve_target(f"op:{name}.default", trusted), torch._ops.OpOverload)
        assert isinstance(resolve_target(f"packet:{name}", trusted), torch._ops.OpOverloadPacket)


@pytest.mark.parametrize(
    "path",
    [
        *("os.system", "builtins.eval", "importlib.import_module", "Holder.shell", "Holder.method", "Holder", "system"),
        *("opened", "evaluate", "partial", "callable_instance", "made", "short", "renamed", "theirs", "load"),
        *("own.system", "own.__globals__", "own.__call__", "__getattr__", "getcwd", "outer.inner", "missing"),
        *(
            "claimed",
            "torch.load",
            "subprocess.run",
            "callable_instance.method",
            "dump_lends_other.theirs",
            "__builtins__",
        ),
    ],
)
def test_nothing_else_of_it(trusted: Trusted, path: str) -> None:
    with pytest.raises(Unresolved):
        resolve_target(f"function:dump_lends:{path}", trusted)


@pytest.mark.parametrize("name", ["dump_lends_theirs.double", "dump_lends_theirs.triple"])
def test_operators_of_what_it_imports_are_not_its_own(trusted: Trusted, name: str) -> None:
    for target in (f"op:{name}.default", f"packet:{name}"):
        with pytest.raises(Unresolved, match="not an operator of a module that you named"):
            resolve_target(target, trusted)
        assert resolve_target(target) is not None  # whoever names no modules trusts what his program registered


@pytest.mark.parametrize("target", ["os:popen", "subprocess:call", "shutil:rmtree", "torch.serialization:load"])
def test_python_and_torch_lend_nothing_by_being_named(target: str) -> None:
    module = target.partition(":")[0]
    __import__(module)
    with pytest.raises(Unresolved, match="a dump may call"):
        resolve_target(f"function:{target}", Trusted(frozenset({module}), frozenset()))


@pytest.mark.parametrize("target", ["os:system", "builtins:eval", "os.path:join", "torch:load", "some.module:Class.f"])
def test_what_no_import_can_allow_is_not_said_to_need_one(target: str) -> None:
    with pytest.raises(Unresolved) as caught:
        resolve_target(f"function:{target}")
    assert "if you trust it" not in str(caught.value)
    with pytest.raises(Unresolved, match=r"Import some\.module first, if you trust it"):
        resolve_target("function:some.module:f")


def test_a_function_of_numpy_that_numpy_imports_is_not_its_own() -> None:
    assert np.load.__module__ == "numpy"
    with pytest.raises(Unresolved, match=r"numpy\.load is defined elsewhere, in numpy\.lib"):
        resolve_target("function:numpy:load", Trusted(frozenset({"numpy"}), frozenset()))


def test_a_module_in_the_folder_of_a_dump_is_not_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "dump_lends_bomb.py").write_text("raise SystemExit('run')")
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    _keep_out(tmp_path)
    assert str(tmp_path) not in sys.path
    with pytest.raises(Exception, match="--import dump_lends_bomb: ModuleNotFoundError"):
        _import("dump_lends_bomb", tmp_path)
