from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from checked_backend.checking.target import load_compiler, load_factory, parse_optimizer, parse_value
from checked_backend.errors import CheckedBackendError

FILE = """
from dataclasses import dataclass
import helper, torch

@dataclass
class Pair:
    x: torch.Tensor

def whole():
    return torch.nn.Linear(2, 2), (torch.ones(2),), {"input": 1}

def alone():
    return helper.f

def with_args():
    return helper.f, [torch.ones(2)]

def broken():
    return helper.f(torch.ones(2), torch.ones(3))

def wrong():
    return helper.f, 3, {}

def too_many():
    return helper.f, (), {}, 1

number = 3
"""


@pytest.fixture
def file(tmp_path: Path) -> Iterator[Path]:
    path, modules = list(sys.path), set(sys.modules)
    (tmp_path / "helper.py").write_text("def f(x, y=1):\n    return x + y\n")
    (tmp_path / "mine.py").write_text(FILE)
    (tmp_path / "raises.py").write_text("1 / 0\n")
    yield tmp_path / "mine.py"
    sys.path[:] = path
    for name in set(sys.modules) - modules:
        if name in ("helper", "mine", "raises"):
            del sys.modules[name]


def test_what_a_factory_may_return(file: Path) -> None:
    function, args, kwargs = load_factory(f"{file}:whole")
    assert isinstance(function, torch.nn.Linear)
    assert (len(args), kwargs) == (1, {"input": 1})
    assert load_factory(f"{file}:alone")[1:] == ((), {})
    assert len(load_factory(f"{file}:with_args")[1]) == 1


def test_a_factory_that_asks_for_a_size_makes_arguments_for_it(file: Path) -> None:
    file.write_text(
        FILE
        + """
def of_size(size=3):
    return helper.f, (torch.ones(size),)

def of_n(n):
    return helper.f, (torch.ones(n),)

def of_options(dtype=torch.float32):
    return helper.f, (torch.ones(2, dtype=dtype),)
"""
    )
    for name in ("of_size", "of_n"):
        make = load_factory(f"{file}:{name}", sized=True)[1]
        assert callable(make)
        assert make(5)[0].shape == (5,)
    assert isinstance(load_factory(f"{file}:of_options", sized=True)[1], tuple)


@pytest.mark.parametrize(
    ("target", "message"),
    [
        ("{}", r"give FILE\.py:FACTORY"),
        ("{}:", r"give FILE\.py:FACTORY"),
        ("mine:whole", r"give FILE\.py:FACTORY"),
        ("nowhere.py:whole", "nowhere.py: no such file"),
        ("{}:missing", "has no function 'missing'"),
        ("{}:number", "has no function 'number'"),
        ("{}:wrong", r"returned \(function, int, dict\); it must return"),
        ("{}:too_many", "it must return"),
    ],
)
def test_misuse(file: Path, target: str, message: str) -> None:
    with pytest.raises(CheckedBackendError, match=message):
        load_factory(target.format(file))


def test_the_users_own_traceback_is_shown(file: Path) -> None:
    shown = r"helper\.py\", line 2, in f\n(?s:.*)RuntimeError: The size"
    with pytest.raises(CheckedBackendError, match=shown) as caught:
        load_factory(f"{file}:broken")
    assert "factory.py" not in str(caught.value)
    with pytest.raises(CheckedBackendError, match=r"raises\.py raised:\n(?s:.*)ZeroDivisionError"):
        load_factory(f"{file.parent / 'raises.py'}:f")


def test_optimizers_by_name() -> None:
    parameter = torch.nn.Parameter(torch.ones(1))
    assert isinstance(parse_optimizer("Adam")([parameter]), torch.optim.Adam)
    made = parse_optimizer("SGD:lr=0.5,momentum=0.9,nesterov=True")([parameter])
    assert [made.defaults[name] for name in ("lr", "momentum", "nesterov")] == [0.5, 0.9, True]
    for wrong in ("Adamm", "Optimizer2", "lr_scheduler", "SGD:lr"):
        with pytest.raises(CheckedBackendError, match="--optimizer got"):
            parse_optimizer(wrong)


def test_values() -> None:
    assert parse_value("a=1", "-") == ("a", 1)
    assert parse_value("a=None", "-") == ("a", None)
    assert parse_value("a=b=c", "-") == ("a", "b=c")
    assert parse_value('a={"b": [1]}', "-") == ("a", {"b": [1]})


def test_a_compiler_is_a_name_or_a_function_of_a_file(file: Path) -> None:
    assert load_compiler("inductor") == "inductor"
    assert load_compiler("planted:logic") == "planted:logic"
    compiler = load_compiler(f"{file.with_name('helper.py')}:f")
    assert not isinstance(compiler, str)
    assert compiler(1, 2) == 3
    assert load_compiler(f"{file.with_name('helper.py')}:f") is compiler  # the file has run once


@pytest.mark.parametrize(
    ("target", "why"),
    [("mine.py:number", "has no function 'number'"), ("none.py:f", "no such file"), ("raises.py:f", "raised:")],
)
def test_a_compiler_that_cannot_be_loaded(file: Path, target: str, why: str) -> None:
    with pytest.raises(CheckedBackendError, match=why):
        load_compiler(str(file.with_name(target)))
