"""Inputs as code."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from checked_backend.diagnose.repro.inputs_code import write_inputs
from checked_backend.diagnose.repro.translate import Untranslatable
from checked_backend.findings import Kind
from tests.support.reduce_tools import case_of
from tests.support.repro_tools import wrote

aten = torch.ops.aten


@pytest.mark.process
def test_inputs_in_one_memory_are_views_only_if_they_were(tmp_path: Path) -> None:
    x = torch.arange(3.0)
    case = case_of(lambda a, b: (aten.add.Tensor(a, b),), x, x.detach())
    assert wrote(case, tmp_path / "alone", Kind.LOGIC).path.read_text().count(", 0).detach()") == 2
    views = [x[:2], x[1:]]
    case = case_of(lambda a, b: (aten.add.Tensor(a, b),), *views)
    text = wrote(replace(case, inputs=views), tmp_path / "views", Kind.LOGIC).path.read_text()
    assert text.count("torch.as_strided(memory, (2,), (1,), ") == 2
    assert "detach" not in text


def made_by_code(inputs: dict[str, Any]) -> list[Any]:
    code = write_inputs(inputs)
    assert not code.saved
    names: dict[str, Any] = {"torch": torch}
    exec("\n".join([*code.lines, f"made = [{', '.join(code.values)}]"]), names)
    made: list[Any] = names["made"]
    return made


def bits(tensor: torch.Tensor) -> list[int]:
    numbers: list[int] = tensor.contiguous().as_strided(tensor.shape, (1,)).view(torch.uint8).tolist()
    return numbers


MEMORY = torch.tensor([3, 200, 7, 9, 1, 2, 3, 4, 5, 6, 7, 248], dtype=torch.uint8)


@pytest.mark.parametrize(
    "views",
    [
        (MEMORY.view(torch.float32), MEMORY[:8].view(torch.float64)),
        (MEMORY[:8].view(torch.float64), MEMORY.view(torch.float32)),
        (MEMORY[:4].view(torch.bool), MEMORY),
        (MEMORY.view(torch.float32), MEMORY.view(torch.int32)),
    ],
    ids=["float32, float64", "float64, float32", "bool, bytes", "float32, int32"],
)
def test_inputs_of_several_dtypes_in_one_memory(views: tuple[torch.Tensor, torch.Tensor]) -> None:
    made = made_by_code({"a": views[0], "b": views[1]})
    assert [tensor.dtype for tensor in made] == [view.dtype for view in views]
    assert [bits(tensor) for tensor in made] == [bits(view) for view in views]
    assert made[0].data_ptr() == made[1].data_ptr()


def test_what_is_conjugated_when_it_is_read_is_not_written_without_that() -> None:
    c = torch.tensor([1 + 2j, 3 - 1j])
    with pytest.raises(Untranslatable, match="conjugated"):
        write_inputs({"a": c, "b": c.conj()})
    (alone,) = made_by_code({"a": c.conj()})
    assert torch.equal(alone, c.conj())


@pytest.mark.parametrize(
    "value",
    [
        torch.arange(50).to(torch.uint16),
        torch.arange(12).to(torch.float8_e4m3fn),
        torch.arange(50, dtype=torch.bfloat16),
        torch.full((2,), -0.0),
        torch.tensor(2.0).expand(4),
    ],
    ids=["uint16", "float8", "bfloat16", "negative zeros", "expanded"],
)
def test_code_makes_the_bits_of_an_input(value: torch.Tensor) -> None:
    (made,) = made_by_code({"x": value})
    assert (made.dtype, made.shape, made.stride()) == (value.dtype, value.shape, value.stride())
    assert bits(made.contiguous()) == bits(value.contiguous())


def test_complex_numbers_that_no_file_can_hold() -> None:
    with pytest.raises(Untranslatable, match="complex128"):
        write_inputs({"x": torch.randn(50, dtype=torch.complex128)})
