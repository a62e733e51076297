"""Miscompiled views, mutations, copies and layouts."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tests.cases import case, normal


def transposed(rows: int, columns: int) -> Tensor:
    """A matrix stored by columns."""
    return normal(columns, rows).t()


@case("bug", "mutation")
def assignment_of_own_shifted_copy() -> tuple[Any, ...]:
    """The clone on the right is dropped, and rows are read after they were overwritten."""

    def fn(x: Tensor) -> Tensor:
        x[1:] = x[:-1].clone()
        return x * 1

    return fn, normal(6, 8)


@case("bug")
def index_put_then_add_flipped() -> tuple[Any, ...]:
    """The copy back into the input is fused with a read of it at other positions (pytorch/pytorch#198270)."""

    def fn(x: Tensor) -> Tensor:
        x.index_put_((torch.arange(4),), x * 2.0)
        x.add_(x.flip(0))
        return x

    return fn, normal(4, 8)


@case("bug", "mutation")
def index_copy_then_copy_flipped() -> tuple[Any, ...]:
    """The same through index_copy_ and copy_; the sum that is returned is right."""

    def fn(x: Tensor) -> Tensor:
        x.index_copy_(0, torch.arange(4), x * 2.0)
        x.copy_(x.flip(0))
        return x.sum(0)

    return fn, normal(4, 8)


@case("bug", "mutation")
def mutation_through_idle_dropout() -> tuple[Any, ...]:
    """Dropout that is off returns its input; what is added to it in place is lost (pytorch/pytorch#195422)."""

    def fn(x: Tensor) -> Tensor:
        y = F.dropout(x, 0.5, False)
        y += y
        return y

    return fn, torch.ones(2, 2)


@case("bug")
def mutation_through_dropout_of_nothing() -> tuple[Any, ...]:
    """Dropout with probability 0 returns its input too."""

    def fn(x: Tensor) -> Tensor:
        y = F.dropout(x, 0.0, True)
        y.mul_(3)
        return x + 1

    return fn, torch.ones(2, 2)


@case("bug")
def overlapping_view_of_clone() -> tuple[Any, ...]:
    """An in-place addition through a view that overlaps itself (pytorch/pytorch#174371)."""

    def fn(x: Tensor) -> Tensor:
        y = x.clone().as_strided((2, 2), (1, 1), 0)
        y.add_(1.0)
        return y

    return fn, normal(2, 2, 10)


@case("bug", "mutation")
def gapped_windows_zero_the_rest() -> tuple[Any, ...]:
    """What no window covers becomes zero (pytorch/pytorch#198102)."""

    def fn(x: Tensor) -> Tensor:
        windows = x.unfold(1, 1, 5)
        windows.add_(windows)
        return x * 1

    return fn, torch.arange(1.0, 25.0).reshape(4, 6)


@case("bug", "exception")
def overlapping_windows_do_not_compile() -> tuple[Any, ...]:
    """An in-place operator on windows that overlap raises (pytorch/pytorch#183888)."""

    def fn(x: Tensor) -> Tensor:
        return (x + x).unfold(1, 4, 2).abs_()

    return fn, torch.linspace(-3, 3, 7).reshape(1, 7)


@case("bug", "metadata")
def addr_strides() -> tuple[Any, ...]:
    """The same for an outer product that ignores its first operand."""
    return (lambda x, y: torch.addr(x, y[:, 0], y[0], beta=0.0)), transposed(5, 6), normal(5, 6)


@case("bug", "metadata")
def put_strides() -> tuple[Any, ...]:
    """The same for put."""
    return (lambda x: x.put(torch.tensor([0, 7]), torch.tensor([1.0, 2.0]))), transposed(5, 6)


@case("bug", "metadata")
def cat_of_one_transposed() -> tuple[Any, ...]:
    """Eager's cat is contiguous."""
    return (lambda x: torch.cat([x.sin().t()])), normal(3, 4)


@case("bug", "metadata")
def squeezed_in_place() -> tuple[Any, ...]:
    """The shape that Dynamo knows is the one from before."""

    def fn(x: Tensor) -> Tensor:
        v = x.view(1, -1)
        v.squeeze_(0)
        return v.expand(2, *v.shape) + 1

    return fn, normal(8)


@case("bug", "mutation")
def two_inputs_change_places() -> tuple[Any, ...]:
    """The clone is dropped, and the second input gets what was just written to the first (pytorch/pytorch#198131)."""

    def fn(x: Tensor, y: Tensor) -> Tensor:
        kept = x.clone()
        x.copy_(y)
        y.copy_(kept)
        return x - y

    return fn, normal(4), normal(4, seed=1)


@case("bug")
def view_as_another_dtype_is_read_too_late() -> tuple[Any, ...]:
    """It is read after a later write to the input (pytorch/pytorch#198101)."""

    def fn(x: Tensor) -> Tensor:
        y = x.view(torch.int32) * 2
        y.sub_(-4)
        x[:, 2:5] = 2
        return y.view(torch.int64)

    return fn, torch.arange(-12, 12).reshape(4, 6)


@case("bug", "mutation")
def what_a_method_writes_to_a_closure() -> tuple[Any, ...]:
    """Dynamo loses it if the object is made inside (pytorch/pytorch#197896)."""
    counts = {"calls": 0}

    class Counter:
        def call(self) -> None:
            counts["calls"] += 1

    def fn(x: Tensor) -> Tensor:
        Counter().call()
        return x + 1

    return fn, normal(4)
