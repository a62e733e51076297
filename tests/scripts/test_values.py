"""Values and tensors as Python source."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from checked_backend.scripts.values import TensorWriter, Untranslatable, write_value


def test_tensors_in_one_memory_are_views_only_if_they_were() -> None:
    x = torch.arange(3.0)
    for tensors, detached in (((x, x.detach()), True), ((x[:2], x[1:]), False)):
        writer = TensorWriter(tensors)
        texts = [writer.write(tensor, "x") for tensor in tensors]
        assert writer.lines == ["memory = torch.arange(3, dtype=torch.float32)"]
        assert [text.endswith(".detach()") for text in texts] == [detached, detached]


def made_by_code(*tensors: torch.Tensor) -> list[Any]:
    writer = TensorWriter(tensors)
    values = [writer.write(tensor, f"x{place}") for place, tensor in enumerate(tensors)]
    assert not writer.saved
    names: dict[str, Any] = {"torch": torch}
    exec("\n".join([*writer.lines, f"made = [{', '.join(values)}]"]), names)
    return names["made"]


def bits(tensor: torch.Tensor) -> list[int]:
    return tensor.contiguous().as_strided(tensor.shape, (1,)).view(torch.uint8).tolist()


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
    made = made_by_code(*views)
    assert [tensor.dtype for tensor in made] == [view.dtype for view in views]
    assert [bits(tensor) for tensor in made] == [bits(view) for view in views]
    assert made[0].data_ptr() == made[1].data_ptr()


def test_lazy_bits_stay() -> None:
    number = torch.tensor([1 + 2j, complex(-0.0, -1)])
    for given in ([number.conj()], [number, number.conj()], [torch._neg_view(number), number[1:]]):
        for made, value in zip(made_by_code(*given), given, strict=True):
            assert torch.equal(made, value)
            assert (made.is_conj(), made.is_neg()) == (value.is_conj(), value.is_neg())


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
    (made,) = made_by_code(value)
    assert (made.dtype, made.shape, made.stride()) == (value.dtype, value.shape, value.stride())
    assert bits(made.contiguous()) == bits(value.contiguous())


def test_complex_numbers_that_no_file_can_hold() -> None:
    with pytest.raises(Untranslatable, match="complex128"):
        made_by_code(torch.randn(50, dtype=torch.complex128))


def test_what_is_no_plain_tensor_is_refused() -> None:
    with pytest.raises(Untranslatable, match="x0 is no plain strided tensor"):
        made_by_code(torch._efficientzerotensor((2,)))


def test_constants() -> None:
    value = [1, (2.5,), float("inf"), complex(-0.0, float("nan")), slice(None, 2), ..., "a", torch.float16, None]
    names: dict[str, Any] = {"torch": torch}
    exec(f"made = {write_value(value)}", names)
    assert repr(names["made"]) == repr(value)
    with pytest.raises(Untranslatable, match="a constant of type object"):
        write_value([object()])
