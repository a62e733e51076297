"""Recording what the kernels of a generated module write."""

from __future__ import annotations

import ast
from types import FunctionType
from typing import Any

import pytest
import torch

from checked_backend._torch.generated_modules import GeneratedModule
from checked_backend.regions.operator_check.recorder import is_unchanged, recorded

TEXT = """
class Runner:
    def call(self, args):
        primals_1, = args
        args.clear()
        buf0 = empty_strided_cpu((3, ), (1, ), torch.float32)
        doubled(primals_1, buf0)
        buf1 = buf0; del buf0  # reuse
        doubled(buf1, buf1)
        with scope:
            buf2 = torch.ops.aten.sin.default(reinterpret_tensor(buf1, (3, ), (1, ), 0))
        buf3 = pair(buf2)
        buf4 = buf3[1]
        doubled(buf4, buf4)
        return (buf1, buf4, )
"""


class Scope:
    def __enter__(self) -> None: ...
    def __exit__(self, *_: object) -> None: ...


def double(source: torch.Tensor, target: torch.Tensor) -> None:
    target.copy_(2 * source)


def module() -> tuple[GeneratedModule, Any]:
    home: dict[str, Any] = {
        "torch": torch,
        "scope": Scope(),
        "doubled": double,
        "pair": lambda x: (x, x.clone()),
        "empty_strided_cpu": lambda size, stride, dtype: torch.full(size, 99.0, dtype=dtype),
        "reinterpret_tensor": torch.as_strided,
    }
    exec(TEXT, home)
    function = vars(home["Runner"])["call"]
    assert isinstance(function, FunctionType)
    definition = ast.parse(TEXT).body[0].body[0]  # type: ignore[attr-defined]
    graph = torch.fx.GraphModule({}, torch.fx.Graph())
    return GeneratedModule("forward", graph, {}, [(function, definition)], {"primals_1"}), home["Runner"]().call


def test_each_write_is_kept_also_where_memory_is_used_again() -> None:
    generated, call = module()
    x = torch.tensor([1.0, 2.0, 3.0])
    with recorded([generated], 1e9) as [(_, recording)]:
        results = call([x])
    sin = (4 * x).sin()
    assert torch.equal(results[0], 4 * x)
    assert {name: [value.tolist() for value in kept] for name, kept in recording.values.items()} == {
        "buf0": [(2 * x).tolist()],
        "buf1": [(4 * x).tolist()],
        "buf2": [sin.tolist()],
        "buf4": [sin.tolist(), (2 * sin).tolist()],
    }
    assert [value.tolist() for value in recording.results] == [(4 * x).tolist(), (2 * sin).tolist()]
    assert [id(value) for value in recording.results] == [id(recording.values[name][-1]) for name in ("buf1", "buf4")]
    assert recording.arguments is not None
    x.zero_()
    assert recording.arguments[0].tolist() == [1.0, 2.0, 3.0]


def test_the_module_is_as_before_also_after_an_exception() -> None:
    generated, call = module()
    [(function, _)] = generated.functions
    code = function.__code__
    with pytest.raises(TypeError), recorded([generated], 1e9):
        call([None])
    assert function.__code__ is code
    assert call([torch.ones(3)])[0].tolist() == [4.0] * 3


def test_a_thread_that_is_in_the_module_when_the_recording_ends_goes_on() -> None:
    generated, _ = module()
    [(function, _)] = generated.functions
    x = torch.ones(3)
    with recorded([generated], 1e9) as [(_, recording)]:
        still = FunctionType(function.__code__, function.__globals__)
    assert still(None, [x])[0].tolist() == [4.0] * 3
    assert (recording.arguments, recording.values) == (None, {})


def test_what_finds_no_room_is_not_kept() -> None:
    generated, call = module()
    with recorded([generated], 20) as [(_, recording)]:
        results = call([torch.ones(3)])
    assert not recording.is_complete
    assert results[0].tolist() == [4.0] * 3
    assert recording.kept < 100


def test_calls_of_two_threads_are_told_apart_from_one() -> None:
    generated, call = module()
    with recorded([generated], 1e9) as [(_, recording)]:
        call([torch.ones(3)])
        assert not recording.is_mixed
        call([torch.ones(3)])
    assert recording.is_mixed


def test_only_arguments_that_are_written_to_are_copied() -> None:
    text = """
def call(args):
    primals_1, primals_2, tangents_1, = args
    buf0 = primals_2; del primals_2  # reuse
    buf1 = reinterpret_tensor(tangents_1, (3, ), (1, ), 0); del tangents_1  # reuse
    kernel(primals_1, buf0, buf1)
    return (buf0, )
"""
    home: dict[str, Any] = {"reinterpret_tensor": torch.as_strided, "kernel": lambda a, b, c: b.copy_(a)}
    exec(text, home)
    definition = ast.parse(text).body[0]
    assert isinstance(definition, ast.FunctionDef)
    generated = GeneratedModule(
        "backward", torch.fx.GraphModule({}, torch.fx.Graph()), {}, [(home["call"], definition)], frozenset()
    )
    given = [torch.full((3,), float(number)) for number in range(3)]
    with recorded([generated], 1e9) as [(_, recording)]:
        home["call"](list(given))
    kept = recording.arguments or ()
    assert [one is other for one, other in zip(kept, given, strict=True)] == [True, False, False]
    assert [value[0].item() for value in kept] == [0.0, 1.0, 2.0]


def test_a_tensor_is_unchanged_by_its_bits() -> None:
    kept = torch.tensor([0.0, float("nan"), 1.0])
    assert is_unchanged(kept, kept.clone())
    assert not is_unchanged(kept, torch.tensor([-0.0, float("nan"), 1.0]))
    assert not is_unchanged(kept, kept.double())
    assert not is_unchanged(kept, kept.view(3, 1))
    waiting = torch.tensor([1 + 2j, 3 - 1j]).conj()
    assert is_unchanged(waiting, waiting.resolve_conj())
    assert not is_unchanged(waiting, waiting.conj())
