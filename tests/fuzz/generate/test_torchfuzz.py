"""Programs of torchfuzz become programs of this package, and what cannot is left out with a reason."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from checked_backend.errors import FuzzError
from checked_backend.fuzz.build import run_eager
from checked_backend.fuzz.examine import check_program
from checked_backend.fuzz.generate.draft import Choices
from checked_backend.fuzz.generate.torchfuzz import LeftOut, TorchFuzz, find_torchfuzz
from checked_backend.fuzz.program import FuzzProgram, decode_program, encode_program
from checked_backend.runs.case import Status
from tests.support import faults
from tests.support.torchfuzz_checkout import write_checkout

BODIES = (
    "torch.add(var, arg_1)",
    "torch.nn.functional.softmax(var.reshape(-1), dim=0).reshape(var.shape)",
    "torch.nn.functional.gelu(var)",
    "torch.cat([var, arg_1.to(torch.float32)]).sum() + torch.full((3, 1), 2.5, dtype=torch.float32)[1:, 0].sum() * var"
    " if var.dim() else -var",
)

Make = Callable[..., TorchFuzz]


@pytest.fixture
def make(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Make]:
    monkeypatch.setattr(sys, "path", [*sys.path])

    yield lambda *bodies, **choices: TorchFuzz(write_checkout(tmp_path / "pytorch", *bodies), Choices(**choices))
    for name in [name for name in sys.modules if name.partition(".")[0] == "torchfuzz"]:
        del sys.modules[name]


def _programs(torchfuzz: TorchFuzz, count: int) -> list[FuzzProgram]:
    return [torchfuzz.program(0, number) for number in range(count)]


def _arguments_in_order(text: str) -> list[str]:
    """The arguments in the order in which the function uses them, which is that of a graph's inputs."""
    body = text[text.index("):") : text.index("return result")]
    used = [name for name in ("arg_0", "arg_1", "sentinel") if name in body]
    return sorted(used, key=body.index)


def test_a_program_is_data_that_computes_what_the_function_does(make: Make) -> None:
    torchfuzz = make(*BODIES)
    for number in range(4):
        program = torchfuzz.program(0, number)
        assert decode_program(encode_program(program)) == program
        text = torchfuzz.text(number)
        names: dict[str, Any] = {"torch": torch}
        exec(text[text.index("def fuzzed") : text.index("sentinel = ")], names)
        values = run_eager(program)
        given = dict(zip(_arguments_in_order(text), values[: len(program.inputs)], strict=True))
        every = [given.get(name, torch.zeros(())) for name in ("arg_0", "arg_1", "sentinel")]
        assert torch.equal(names["fuzzed_program"](*every), values[program.returns[0]])


def test_layout_and_calls_are_those_of_torchfuzz(make: Make) -> None:
    program = next(one for one in _programs(make("torch.add(var, arg_1)"), 12) if one.inputs[0].stride == (1, 1))
    assert program.inputs[0].shape == (2, 3)  # its elements overlap
    assert {*program.ops} == {"torch.add", "*"}
    assert program.gradients
    assert program.dynamic


def test_the_same_seed_gives_the_same_program_and_nothing_else_changes(make: Make) -> None:
    torchfuzz = make(*BODIES)
    states = random.getstate(), torch.get_rng_state()
    first = _programs(torchfuzz, 3)
    assert _programs(torchfuzz, 3) == first
    assert torchfuzz.program(1, 0) != first[0] or torchfuzz.program(1, 1) != first[1]
    assert random.getstate() == states[0]
    assert torch.equal(torch.get_rng_state(), states[1])
    assert torch.get_default_device() == torch.device("cpu")


@pytest.mark.parametrize(
    ("body", "why"),
    [
        ("torch.ops.aten.neg(var)", "which no program may call"),
        ("var.sort().values", "whose result torch leaves open here"),
        ("torch.tensor(1.0) + var", "which no program may call"),
        ("var + var.sum().item()", "Tensor.item|Unsupported"),
        ("var.no_such_method()", "Unsupported|AttributeError|InternalTorchDynamoError"),
    ],
)
def test_what_cannot_be_a_program_is_left_out_with_the_reason(make: Make, body: str, why: str) -> None:
    with pytest.raises(LeftOut, match=why):
        make(body).program(0, 1)


def test_what_the_user_asks_for_holds(make: Make) -> None:
    torchfuzz = make("torch.exp(var)", training=False, dynamic=False, ops=("exp",))
    program = torchfuzz.program(0, 0)
    assert not program.gradients
    assert not program.dynamic
    assert not any(given.requires_grad for given in program.inputs)
    torchfuzz._choices = Choices(ops=("cos",))
    with pytest.raises(LeftOut, match="none of the operations"):
        torchfuzz.program(0, 0)


@pytest.mark.more
def test_the_oracle_is_check(make: Make) -> None:
    program = make("torch.exp(var)").program(0, 1)
    assert check_program(program, "eager").status is Status.PASS
    wrong = faults.every_output(
        lambda result: result * (1 + 1e-4)
    )  # torchfuzz takes five per cent of the sum for right
    assert check_program(program, wrong).status is Status.FAIL


@pytest.mark.parametrize("inside", [".", "tools/experimental", "tools/experimental/torchfuzz"])
def test_the_package_is_found_from_the_checkout_or_from_within(tmp_path: Path, inside: str) -> None:
    write_checkout(tmp_path, "var")
    assert find_torchfuzz(tmp_path / inside) == (tmp_path / "tools/experimental/torchfuzz").resolve()


def test_a_folder_without_it_and_one_that_does_not_import_are_told(make: Make, tmp_path: Path) -> None:
    with pytest.raises(FuzzError, match="no torchfuzz in it; expected a checkout of PyTorch"):
        find_torchfuzz(tmp_path)
    folder = write_checkout(tmp_path / "broken", "var")
    (folder / "tools/experimental/torchfuzz/codegen.py").write_text("import no_such_module_here\n")
    with pytest.raises(FuzzError, match="cannot be imported: ModuleNotFoundError"):
        TorchFuzz(folder, Choices())
