"""Programs that are dumped and replayed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from tests.support.dump_tools import Squared


@dataclass(frozen=True)
class Replayed:
    """A function with its arguments, and ``dynamic`` of ``torch.compile``."""

    function: Callable[..., Any]
    args: tuple[Any, ...]
    dynamic: bool | None


class Recurrent(nn.Module):
    """The library's own LSTM, which is one operator, and a GRU of two layers and two directions."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(4, 8, batch_first=True)
        self.gru = nn.GRU(8, 8, 2, bidirectional=True, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.gru(self.lstm(x)[0])[0]


class Conditional(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("scale", torch.tensor([1.0, 2.0, 3.0, 4.0]))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cond(x.sum() > 0, lambda a: self.linear(a).sin() * self.scale, lambda a: a.cos(), (x,))


def loop(x: torch.Tensor) -> torch.Tensor:
    from torch._higher_order_ops.while_loop import while_loop

    def body(i: torch.Tensor, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return i + 1, x.sin() + 1

    return while_loop(lambda i, x: i < 3, body, (torch.tensor(0), x))[1]


def scan(x: torch.Tensor) -> torch.Tensor:
    from torch._higher_order_ops.associative_scan import associative_scan

    return associative_scan(lambda a, b: a * b + 1, x, 0, combine_mode="generic")


def flex(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    from torch.nn.attention.flex_attention import flex_attention

    return flex_attention(q, k, v, score_mod=lambda s, b, h, i, j: torch.where(i >= j, s, -float("inf")))


@torch.compiler.nested_compile_region
def region(x: torch.Tensor) -> torch.Tensor:
    return (x @ x).relu()


def nested(x: torch.Tensor) -> torch.Tensor:
    return region(region(x)) + 1


def transforms(x: torch.Tensor) -> tuple[Any, ...]:
    def cube(x: torch.Tensor) -> torch.Tensor:
        return (x**3).sum()

    return torch.func.grad(cube)(x), torch.vmap(cube)(x.view(2, -1)), torch.randn_like(x)


def own_function(x: torch.Tensor) -> torch.Tensor:
    return Squared.apply(x.sin())  # type: ignore[no-any-return]


def checkpointed(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    def inner(x: torch.Tensor) -> torch.Tensor:
        return nn.functional.dropout((x @ w).relu(), 0.3) + torch.rand(4)

    return torch.utils.checkpoint.checkpoint(inner, x, use_reentrant=False)  # type: ignore[no-any-return]


def mapped(x: torch.Tensor) -> torch.Tensor:
    from torch._higher_order_ops.map import map as over_rows

    return over_rows(lambda row: row.sin() + torch.ones(3), x)  # type: ignore[no-any-return]


def scanned(x: torch.Tensor) -> Any:
    from torch._higher_order_ops.scan import scan as over_steps

    return over_steps(lambda carry, x: (carry + x, carry * x), torch.zeros(3), x)


def modes(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    with torch.inference_mode():
        doubled = x * 2
    with torch.no_grad():
        tripled = x.data * 3
    return doubled, tripled


class Stepped:
    """A step of an optimizer, compiled."""

    def __init__(self) -> None:
        self.parameters = [nn.Parameter(torch.randn(3)), nn.Parameter(torch.randn(2, 2))]
        self.optimizer = torch.optim.AdamW(self.parameters, foreach=True)

    def __call__(self) -> list[torch.Tensor]:
        for parameter in self.parameters:
            parameter.grad = torch.ones_like(parameter)
        self.optimizer.step()
        return [parameter.detach() for parameter in self.parameters]


@torch.library.custom_op("dump_replayed::double", mutates_args=())
def double(x: torch.Tensor) -> torch.Tensor:
    return x * 2


@double.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


def custom(x: torch.Tensor) -> torch.Tensor:
    return torch.ops.dump_replayed.double(x) + torch.tensor([1.0, 2.0, 3.0])


def layouts(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return x * 2 + y.sin()


def low(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return x.to(torch.float32) * 2, y.to(torch.bfloat16) + 1


def imaginary(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return (x * x.conj()).real + x.imag + (y * 2).abs()


def mutated(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    x.add_(1)
    y[1:].mul_(2)
    return x + y[:5]


def random(x: torch.Tensor) -> torch.Tensor:
    return nn.functional.dropout(x, 0.5) + torch.rand_like(x) + torch.randn(4)


def ragged(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return x[x > 0].sum(), x.nonzero() * 2, torch.zeros(int(x.shape[0]) + 1)


def scalars(x: torch.Tensor, scale: float, count: int) -> torch.Tensor:
    return x.repeat(count) * scale


def autocast(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        return (x @ w).relu().float().sum(0)


def empty(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.cat([x, y], 0).sum(0), x * 2


def integers(x: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    return table[x.long()] + nn.functional.one_hot(x.long() % 4, 4)


def _special(function: Callable[..., Any], *args: Any, dynamic: bool | None = None) -> Replayed:
    return Replayed(function, args, dynamic)


def _wide() -> torch.Tensor:
    return torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last)


def _shared() -> Replayed:
    base = torch.randn(20)
    return _special(mutated, base[:5], base[5:15:2])


SPECIAL: dict[str, Callable[[], Replayed]] = {
    "lstm": lambda: _special(Recurrent(), torch.randn(2, 5, 4)),
    "cond": lambda: _special(Conditional(), torch.ones(2, 4)),
    "while_loop": lambda: _special(loop, torch.randn(3, 3)),
    "associative_scan": lambda: _special(scan, torch.randn(6, 3)),
    "flex_attention": lambda: _special(flex, *(torch.randn(1, 2, 16, 8) for _ in range(3))),
    "nested_compile_region": lambda: _special(nested, torch.randn(4, 4)),
    "transforms": lambda: _special(transforms, torch.randn(4)),
    "own_function": lambda: _special(own_function, torch.randn(4, requires_grad=True)),
    "checkpointed": lambda: _special(checkpointed, torch.randn(2, 4), torch.randn(4, 4, requires_grad=True)),
    "map": lambda: _special(mapped, torch.randn(2, 3)),
    "scan": lambda: _special(scanned, torch.randn(2, 3)),
    "modes": lambda: _special(modes, torch.randn(3)),
    "optimizer": lambda: _special(Stepped()),
    "custom_op": lambda: _special(custom, torch.randn(3)),
    "channels_last_and_expanded": lambda: _special(layouts, _wide(), torch.randn(2, 1, 1, 4).expand(2, 3, 4, 4)),
    "float8": lambda: _special(
        low, torch.randn(4, 4).to(torch.float8_e4m3fn), torch.randn(4, 4).t().to(torch.float8_e5m2)
    ),
    "complex": lambda: _special(
        imaginary, torch.randn(3, dtype=torch.complex64), torch.randn(3, dtype=torch.complex128).conj()
    ),
    "shared_and_mutated": _shared,
    "random": lambda: _special(random, torch.randn(4, 4)),
    "data_dependent": lambda: _special(ragged, torch.randn(7)),
    "scalars": lambda: _special(scalars, torch.randn(7), 0.5, 3, dynamic=True),
    "autocast": lambda: _special(autocast, torch.randn(3, 4), torch.randn(4, 4, requires_grad=True)),
    "empty": lambda: _special(empty, torch.randn(0, 3), torch.randn(2, 3), dynamic=True),
    "integers": lambda: _special(
        integers, torch.randint(5, (6,), dtype=torch.uint8), torch.arange(20, dtype=torch.int32).view(5, 4)
    ),
}
