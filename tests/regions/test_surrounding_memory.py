"""Writes of a compiled program to what lies beside its inputs: the base of a slice."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch

from tests.support import faults
from tests.support.region_tools import agreed, checked, found, gathered, meanwhile

Write = Callable[[torch.Tensor], object]


def writing(write: Write, place: int = 0) -> Callable[..., Any]:
    """A compiler whose programs do something to one of their tensors, beside what they should."""

    @faults.runs
    def compiler(forward: Callable[..., Any], *args: Any) -> Any:
        results = forward(*args)
        with torch.no_grad():
            write([arg for arg in args if isinstance(arg, torch.Tensor)][place])
        return results

    return compiler


def past_the_end(x: torch.Tensor) -> None:
    x.as_strided((1,), (1,), x.storage_offset() + x.numel()).add_(1)


def before_the_start(x: torch.Tensor) -> None:
    x.as_strided((1,), (1,), x.storage_offset() - 1).zero_()


def in_a_gap(x: torch.Tensor) -> None:
    x.as_strided((1,), (1,), x.storage_offset() + x.stride(0) - 1).fill_(7.0)


VIEWS: dict[str, tuple[Callable[[torch.Tensor], torch.Tensor], Write]] = {
    "rows, past the end": (lambda base: base[2:4], past_the_end),
    "rows, before the start": (lambda base: base[2:4], before_the_start),
    "columns, in a gap": (lambda base: base[:, :3], in_a_gap),
}


@pytest.fixture(params=[False, True], ids=["alone", "beside a thread"])
def threaded(request: pytest.FixtureRequest) -> Iterator[None]:
    """Whether another thread is there, which might be what changes something."""
    with meanwhile() if request.param else nullcontext():
        yield


@pytest.mark.usefixtures("threaded")
@pytest.mark.parametrize("changed", [False, True])
@pytest.mark.parametrize("name", VIEWS)
def test_writes_beside_a_slice_are_found(name: str, changed: bool) -> None:
    view, write = VIEWS[name]

    def body(x: torch.Tensor) -> torch.Tensor:
        if changed:
            x.mul_(2)
        return x + 1

    base = torch.randn(8, 6)
    unchecked = base.clone()
    report = gathered(lambda: checked(body, writing(write))(view(base)))
    assert {detail for detail, _ in found(report)} == {"mutation.beyond"}
    writing(write)(torch.fx.symbolic_trace(body), ())(view(unchecked))
    assert torch.equal(base, unchecked)  # the check wrote nothing there
    base = torch.randn(8, 6)
    assert agreed(gathered(lambda: checked(body, faults.clean())(view(base))))


@pytest.mark.parametrize("write", [lambda x: x.add_(1), lambda x: x.zero_()])
def test_what_eager_writes_beside_a_slice_too_is_no_finding(write: Write) -> None:
    def body(x: torch.Tensor) -> torch.Tensor:
        write(x.as_strided((3,), (1,), 0))
        return x + 1

    report = gathered(lambda: checked(body, "eager")(torch.randn(8, 6)[2:4]))
    assert "mutation.beyond" not in {detail for detail, _ in found(report)}


def test_a_base_that_is_written_to_between_calls_is_no_finding() -> None:
    base = torch.randn(8, 6)
    compiled = checked(lambda x: x * 2, "eager")

    def run() -> None:
        for step in range(3):
            base.fill_(step)
            compiled(base[1:3])

    assert agreed(gathered(run))


def test_a_view_whose_history_autograd_refuses_to_tell_is_no_leaf() -> None:
    """A step compiled with grad mode on, of a view of a weight that was made with grad mode off."""
    weight, gradient = torch.nn.Parameter(torch.ones(2, 4)), torch.ones(8)
    with torch.no_grad():
        view = weight.view(-1)

    @faults.runs
    def compiler(forward: Callable[..., Any], *args: Any) -> Any:
        results = forward(*args)
        weight.data = weight.data
        with torch.no_grad():
            weight.add_(0)
        return results

    assert gathered(lambda: checked(lambda view, gradient: view * gradient, compiler)(view, gradient)).findings == ()
