"""Real programs, dumped with their values and replayed: bit for bit what the user's program computed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch._higher_order_ops.associative_scan import associative_scan
from torch._higher_order_ops.map import map as over_rows
from torch._higher_order_ops.scan import scan as over_steps
from torch._higher_order_ops.while_loop import while_loop
from torch.nn.attention.flex_attention import flex_attention

import checked_backend as cb
from tests.support.dump_tools import Squared, dumping, dumps, python, run, same_leaf
from tests.support.models import Case, bert_masked_lm, gpt2_lm, resnet


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
    return while_loop(lambda i, x: i < 3, lambda i, x: (i + 1, x.sin() + 1), (torch.tensor(0), x))[1]


def scan(x: torch.Tensor) -> torch.Tensor:
    return associative_scan(lambda a, b: a * b + 1, x, 0, combine_mode="generic")


def flex(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return flex_attention(q, k, v, score_mod=lambda s, b, h, i, j: torch.where(i >= j, s, -float("inf")))


@torch.compiler.nested_compile_region
def region(x: torch.Tensor) -> torch.Tensor:
    return (x @ x).relu()


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
    return over_rows(lambda row: row.sin() + torch.ones(3), x)  # type: ignore[no-any-return]


def scanned(x: torch.Tensor) -> Any:
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


def mutated(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    x.add_(1)
    y[1:].mul_(2)
    return x + y[:5]


def autocast(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        return (x @ w).relu().float().sum(0)


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
    "nested_compile_region": lambda: _special(lambda x: region(region(x)) + 1, torch.randn(4, 4)),
    "transforms": lambda: _special(transforms, torch.randn(4)),
    "own_function": lambda: _special(own_function, torch.randn(4, requires_grad=True)),
    "checkpointed": lambda: _special(checkpointed, torch.randn(2, 4), torch.randn(4, 4, requires_grad=True)),
    "map": lambda: _special(mapped, torch.randn(2, 3)),
    "scan": lambda: _special(scanned, torch.randn(2, 3)),
    "modes": lambda: _special(modes, torch.randn(3)),
    "optimizer": lambda: _special(Stepped()),
    "custom_op": lambda: _special(custom, torch.randn(3)),
    "channels_last_and_expanded": lambda: _special(
        lambda x, y: x * 2 + y.sin(), _wide(), torch.randn(2, 1, 1, 4).expand(2, 3, 4, 4)
    ),
    "float8": lambda: _special(
        lambda x, y: (x.to(torch.float32) * 2, y.to(torch.bfloat16) + 1),
        torch.randn(4, 4).to(torch.float8_e4m3fn),
        torch.randn(4, 4).t().to(torch.float8_e5m2),
    ),
    "complex": lambda: _special(
        lambda x, y: (x * x.conj()).real + x.imag + (y * 2).abs(),
        torch.randn(3, dtype=torch.complex64),
        torch.randn(3, dtype=torch.complex128).conj(),
    ),
    "shared_and_mutated": _shared,
    "random": lambda: _special(
        lambda x: nn.functional.dropout(x, 0.5) + torch.rand_like(x) + torch.randn(4), torch.randn(4, 4)
    ),
    "data_dependent": lambda: _special(
        lambda x: (x[x > 0].sum(), x.nonzero() * 2, torch.zeros(int(x.shape[0]) + 1)), torch.randn(7)
    ),
    "scalars": lambda: _special(lambda x, scale, count: x.repeat(count) * scale, torch.randn(7), 0.5, 3, dynamic=True),
    "autocast": lambda: _special(autocast, torch.randn(3, 4), torch.randn(4, 4, requires_grad=True)),
    "empty": lambda: _special(
        lambda x, y: (torch.cat([x, y], 0).sum(0), x * 2), torch.randn(0, 3), torch.randn(2, 3), dynamic=True
    ),
    "integers": lambda: _special(
        lambda x, table: table[x.long()] + nn.functional.one_hot(x.long() % 4, 4),
        torch.randint(5, (6,), dtype=torch.uint8),
        torch.arange(20, dtype=torch.int32).view(5, 4),
    ),
}


def leaves(value: Any) -> list[Any]:
    return [leaf for leaf in torch.utils._pytree.tree_leaves(value) if isinstance(leaf, torch.Tensor)]


SLOW = (pytest.mark.slow, pytest.mark.ci_sample)
# Dynamo makes an instance of a user's autograd.Function to trace its backward
TRACED = pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")


@pytest.mark.more
@pytest.mark.parametrize(
    "make", [resnet, *(pytest.param(make, marks=pytest.mark.slow) for make in (bert_masked_lm, gpt2_lm))]
)
def test_training_with_dynamic_shapes_replays_bit_for_bit(make: Callable[[], Case], tmp_path: Path) -> None:
    case = make()
    model = case.model.train()
    inputs = {name: value for name, value in case.inputs.items() if make is resnet or name != "labels"}
    outputs = leaves(dumping(model, tmp_path, dynamic=True)(**inputs))
    sum(output.sum() for output in outputs).backward()  # type: ignore[union-attr]
    gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    found = {name: cb.load_dump(path) for name, path in dumps(tmp_path).items()}
    last = max(dump.metadata["index"] for dump in found.values())
    kinds = {dump.kind: dump for dump in found.values() if dump.metadata["index"] == last}
    assert set(kinds) == {"dynamo", "joint", "forward", "backward"}
    assert all(name.startswith(f"{type(model).__name__.strip('_')}_") for name in found)

    replayed = {kind: run(dump) for kind, dump in kinds.items()}
    for output in outputs:
        assert any(same_leaf(output, other) for other in replayed["dynamo"])
        assert any(same_leaf(output, other) for other in replayed["forward"])
    for gradient in gradients:
        assert any(same_leaf(gradient, other) for other in replayed["backward"])

    # what the forward hands over is what the backward takes, with its bytes
    forward, backward = kinds["forward"].metadata, kinds["backward"].metadata
    saved = {entry["name"]: entry["bytes"] for entry in forward["saved"]}
    assert saved == {entry["name"]: entry["bytes"] for entry in backward["saved"]}
    assert sum(size or 0 for size in saved.values()) > 0
    assert forward["pairs"]["backward"] == kinds["backward"].title
    assert forward["symbols"]
    values = dict(zip((e["name"] for e in backward["inputs"]["inputs"]), kinds["backward"].inputs(), strict=True))
    for name, size in saved.items():
        if size is not None:
            assert values[name].numel() * values[name].element_size() == size

    # gradients through the Dynamo graph too
    dump = kinds["dynamo"]
    inputs = dump.inputs()
    with dump.ambient():
        again = [leaf for leaf in leaves(dump.module(*inputs)) if leaf.requires_grad]
        sum(leaf.sum() for leaf in again).backward()  # type: ignore[union-attr]
    regained = [value.grad for value in inputs if isinstance(value, torch.Tensor) and value.grad is not None]
    for gradient in gradients:
        assert any(same_leaf(gradient, other) for other in regained)


OFTEN = ["cond", "custom_op", "channels_last_and_expanded", "float8", "complex"]
"""The programs that are not slow."""


@TRACED
@pytest.mark.parametrize("name", [*OFTEN, *(pytest.param(name, marks=SLOW) for name in SPECIAL if name not in OFTEN)])
def test_special_programs_replay_bit_for_bit(name: str, tmp_path: Path) -> None:
    program = SPECIAL[name]()
    with torch.no_grad(), torch._dynamo.config.patch(allow_rnn=True):  # else nn.LSTM and nn.GRU stay in Python
        expected = leaves(dumping(program.function, tmp_path, dynamic=program.dynamic)(*program.args))
    computed: dict[str, list[Any]] = {"dynamo": [], "inference": []}
    given: list[Any] = []
    for path in dumps(tmp_path).values():
        dump = cb.load_dump(path)
        computed[dump.kind] += leaves(run(dump))
        given += dump.inputs()
    for kind, results in computed.items():
        assert all(any(same_leaf(leaf, other) for other in results) for leaf in expected), kind
    if name not in ("shared_and_mutated", "optimizer", "data_dependent"):  # the last two have several regions
        assert all(any(same_leaf(arg, value) for value in given) for arg in leaves(program.args))


EACH_IN_A_FORK = """
import os, runpy, sys
import torch._dynamo
for folder in sys.argv[1:]:
    if os.fork() == 0:
        os.chdir(folder)
        os.dup2(os.open("said.txt", os.O_WRONLY | os.O_CREAT), 1)
        sys.path[0], sys.argv[1:] = folder, ["--compiler", "eager"]
        runpy.run_path("repro.py", run_name="__main__")
        sys.exit()
    print(os.waitstatus_to_exitcode(os.wait()[1]), flush=True)
"""


@pytest.mark.process
@TRACED
def test_repros_run_from_their_folders_with_nothing_but_torch(tmp_path: Path) -> None:
    blocked = tmp_path / "blocked"
    blocked.mkdir()
    for module in ("checked_backend", "safetensors", "numpy", "pydantic", "transformers", "rich"):
        (blocked / f"{module}.py").write_text(f"raise ModuleNotFoundError('{module} is not installed here')")
    alone = []
    for name in (*(name for name in OFTEN if name != "custom_op"), "transforms", "own_function", "checkpointed"):
        program = SPECIAL[name]()
        dumping(program.function, tmp_path / name, values=False)(*program.args)
        alone += [folder.rename(tmp_path / f"{name}_{folder.name}") for folder in dumps(tmp_path / name).values()]
    done = python("-c", EACH_IN_A_FORK, *alone, folder=tmp_path, module_path=blocked)
    assert done.stdout.split() == ["0"] * len(alone), done.stderr
    for said in ((folder / "said.txt").read_text() for folder in alone):
        assert "output[0]" in said
        assert "differ" not in said
        assert "equal" in said


@pytest.mark.process
def test_a_custom_op_says_what_it_needs(tmp_path: Path) -> None:
    program = SPECIAL["custom_op"]()
    dumping(program.function, tmp_path, values=False)(*program.args)
    folders = [*dumps(tmp_path).values()]
    for folder in folders:
        assert cb.load_dump(folder).metadata["requires"] == [custom.__module__]
        assert f"import {custom.__module__}" in (folder / "module.py").read_text().splitlines()
    done = python("-c", f"import checked_backend as cb; cb.load_dump({str(folders[0])!r}).module", folder=tmp_path)
    assert done.returncode == 1
    message = done.stderr.strip().splitlines()[-1]
    assert message.endswith(f"if you trust it. The dump says that it needs: {custom.__module__}")
    assert "dump_replayed.double" in message
