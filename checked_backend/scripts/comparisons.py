"""The code by which scripts compare. `source_of` copies it into them, so it needs torch and the standard library alone.

Each comparison prints what both sides do, and returns whether they differ. A script has ``program``, ``compiled`` and
``make_inputs``.
"""

from __future__ import annotations

import ast
import inspect
import os
import signal
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from typing import Any

import torch

from checked_backend._torch.fake_tensors import FakeTensorMode, disable_fake_tensor_cache
from checked_backend._torch.modes import TorchDispatchMode
from checked_backend._torch.pytree import tree_leaves, tree_map_only

__all__ = ["source_of"]

Run = Callable[..., Any]
Make = Callable[[], list[Any]]
Others = Make | None
Arguments = Iterator[tuple[str, bool, list[torch.Tensor]]]


def source_of(function: Callable[..., object]) -> list[str]:
    """The source of a function of this file, and of what it uses here; two empty lines before each.

    Annotations are left out, because a script does not need them.
    """
    own = {name: value for name, value in globals().items() if getattr(value, "__module__", "") == __name__}
    needed, pending = set[str](), {function.__name__}
    while pending:
        needed.add(name := pending.pop())
        names = [node for node in ast.walk(ast.parse(inspect.getsource(own[name]))) if isinstance(node, ast.Name)]
        local = {node.id for node in names if isinstance(node.ctx, ast.Store)}
        pending |= {node.id for node in names} & own.keys() - local - needed
    return [line for name in own if name in needed for line in ("", "", *_without_annotations(own[name]))]


def _without_annotations(function: Callable[..., object]) -> list[str]:
    text = inspect.getsource(function).splitlines()
    spans = []
    for node in ast.walk(ast.parse("\n".join(text))):
        if isinstance(node, ast.arg) and node.annotation is not None:
            spans.append((node.lineno, node.col_offset + len(node.arg), node.annotation.end_col_offset))
        elif isinstance(node, ast.FunctionDef) and node.returns is not None:
            spans.append((node.returns.lineno, node.returns.col_offset - len(" -> "), node.returns.end_col_offset))
    for line, start, end in sorted(spans, reverse=True):
        rest = text[line - 1][end:]
        text[line - 1] = text[line - 1][:start] + (f"={rest[3:]}" if rest.startswith(" = ") else rest)
    return text


def values_differ(program: Run, compiled: Run, make_inputs: Make, tolerance: float, index: int | None = None) -> bool:
    """Whether a result is further from eager's than the tolerance."""
    expected, actual = program(*make_inputs()), compiled(*make_inputs())
    if index is not None:
        expected, actual = expected[index], actual[index]
    print("eager:   ", expected)
    print("compiled:", actual)
    wide = torch.complex128 if expected.is_complex() else torch.float64
    print("greatest difference:", (actual.to(wide) - expected.to(wide)).abs().max().item())
    return not torch.allclose(actual, expected, rtol=0, atol=tolerance, equal_nan=True)


def nonfinite_differs(program: Run, compiled: Run, make_inputs: Make, index: int | None = None) -> bool:
    """Whether a result is NaN or infinite elsewhere than eager's."""
    expected, actual = program(*make_inputs()), compiled(*make_inputs())
    if index is not None:
        expected, actual = expected[index], actual[index]
    print("eager:   ", expected)
    print("compiled:", actual)
    return not (torch.equal(actual.isnan(), expected.isnan()) and torch.equal(actual.isinf(), expected.isinf()))


def structure_differs(program: Run, compiled: Run, make_inputs: Make, index: int | None = None) -> bool:
    """Whether a result has another dtype, shape or stride."""
    seen = []
    for name, run in ("eager:   ", program), ("compiled:", compiled):
        value = run(*make_inputs())
        value = value if index is None else value[index]
        seen.append((value.dtype, tuple(value.shape), value.stride()))
        print(name, seen[-1])
    return seen[0] != seen[1]


def tensors(values: Any) -> list[torch.Tensor]:
    return [value for value in tree_leaves(values) if isinstance(value, torch.Tensor)]


def memory_of(value: Any) -> object:
    strided = isinstance(value, torch.Tensor) and value.layout is torch.strided
    return value.untyped_storage()._cdata if strided else object()


def relations_differ(program: Run, compiled: Run, make_inputs: Make) -> bool:
    seen = []
    print("inputs and results, counted together, that share memory, and that are the same object")
    for name, run in ("eager:   ", program), ("compiled:", compiled):
        inputs = make_inputs()
        results = run(*inputs)
        values = [*inputs, *(results if isinstance(results, tuple) else (results,))]
        pairs = [(i, j) for j in range(len(inputs), len(values)) for i in range(j)]
        shared = [(i, j) for i, j in pairs if memory_of(values[i]) == memory_of(values[j])]
        seen.append((shared, [(i, j) for i, j in pairs if values[i] is values[j]]))
        print(name, seen[-1])
    return seen[0] != seen[1]


def inputs_differ(program: Run, compiled: Run, make_inputs: Make, tolerance: float) -> bool:
    """Whether an input holds something else afterwards than after eager."""
    expected, actual = make_inputs(), make_inputs()
    program(*expected)
    compiled(*actual)
    print("inputs afterwards, eager:   ", expected)
    print("inputs afterwards, compiled:", actual)
    pairs = [
        pair for pair in zip(expected, actual, strict=True) if isinstance(pair[0], torch.Tensor) and pair[0].numel()
    ]
    wide = torch.complex128 if any(one.is_complex() for one, _ in pairs) else torch.float64
    pairs = [(one.to(wide), other.to(wide)) for one, other in pairs]
    print("greatest difference:", max((other - one).abs().max().item() for one, other in pairs))
    return not all(torch.allclose(other, one, rtol=0, atol=tolerance, equal_nan=True) for one, other in pairs)


def writes_differ(program: Run, compiled: Run, make_inputs: Make, counted: bool) -> bool:
    seen = []
    print("inputs that hold something else afterwards, and those to which a write was counted, from 0")
    for name, run in ("eager:   ", program), ("compiled:", compiled):
        before, after = make_inputs(), make_inputs()
        tensors = [i for i, value in enumerate(after) if isinstance(value, torch.Tensor)]
        versions = {i: after[i]._version for i in tensors}
        run(*after)
        changed = [i for i in tensors if not torch.allclose(after[i], before[i], rtol=0, atol=0, equal_nan=True)]
        seen.append((changed, [i for i in tensors if after[i]._version != versions[i]]))
        print(name, seen[-1])
    (expected, expected_count), (actual, actual_count) = seen
    if counted:
        return any(i in expected_count and i in actual and i not in actual_count for i in expected)
    return expected != actual


def exceptions_differ(program: Run, compiled: Run, make_inputs: Make) -> bool:
    """Whether one side alone raises."""
    results = []
    for name, run in ("eager", program), ("compiled", compiled):
        try:
            results.append(run(*make_inputs()))
        except Exception as error:
            results.append(error)
        print(f"{name}:", repr(results[-1])[:2000])
    return isinstance(results[0], Exception) != isinstance(results[1], Exception)


def random_state_differs(program: Run, compiled: Run, make_inputs: Make) -> bool:
    """Whether the generator of random numbers is in another state afterwards."""
    compiled(*make_inputs())  # what compiling itself draws does not count
    drawn = []
    for name, run in ("eager:   ", program), ("compiled:", compiled):
        inputs = make_inputs()
        torch.manual_seed(0)
        run(*inputs)
        drawn.append(torch.rand(()).item())
        print("the next random number after", name, drawn[-1])
    return drawn[0] != drawn[1]


def compiled_dies(program: Run, compiled: Run, make_inputs: Make) -> bool:
    """Whether the process of the compiled program dies."""
    print("eager:", program(*make_inputs()))
    child = os.fork()  # what dies is this child
    if child == 0:
        signal.alarm(60)  # what hangs dies too
        compiled(*make_inputs())
        os._exit(0)
    status = os.waitpid(child, 0)[1]
    print("compiled: exit status", status)
    return status != 0


def flat(value: Any) -> list[Any]:
    if isinstance(value, dict):
        value = list(value.values())
    return [leaf for item in value for leaf in flat(item)] if isinstance(value, (list, tuple)) else [value]


def alike(one: Any, other: Any) -> bool:
    if not isinstance(one, torch.Tensor) or not isinstance(other, torch.Tensor):
        return type(one) is type(other) and (isinstance(one, Exception) or one == other)
    same = (one.dtype, one.shape, one.stride()) == (other.dtype, other.shape, other.stride())
    return same and torch.allclose(one, other, rtol=0, atol=0, equal_nan=True)


def outcomes_differ(program: Run, compiled: Run, make_inputs: Make) -> bool:
    outcomes = []
    for name, run in ("eager", program), ("compiled", compiled):
        inputs = make_inputs()
        try:
            outcomes.append(flat((run(*inputs), inputs)))
        except Exception as error:
            outcomes.append([error])
        print(f"{name}, results and then inputs:", repr(outcomes[-1])[:2000])
    expected, actual = outcomes
    return len(expected) != len(actual) or not all(map(alike, expected, actual))


def show(value: Any) -> str:
    if not isinstance(value, torch.Tensor):
        return repr(value)
    text = f"dtype={value.dtype} shape={tuple(value.shape)}"
    if value.layout is not torch.strided:
        return f"{text} layout={value.layout}"
    significant = [step for size, step in zip(value.shape, value.stride(), strict=True) if size > 1 and value.numel()]
    text += f" significant strides={significant} storage offset={value.storage_offset()}"
    return text + " conjugated" * value.is_conj() + " negated" * value.is_neg()


def arguments(operator: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Arguments:
    for i, argument in enumerate(operator._schema.arguments):
        declared = argument.alias_info is not None and argument.alias_info.is_write
        yield argument.name, declared, tensors(args[i] if i < len(args) else kwargs.get(argument.name))


def written(operator: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Iterator[str]:
    for name, declared, values in arguments(operator, args, kwargs):
        yield from (f"argument {name}, which it writes to: {show(value)}" for value in values if declared)


def described(results: Any, given: Sequence[torch.Tensor]) -> Iterator[str]:
    owners = {memory_of(value): f"tensor argument {i}" for i, value in enumerate(given)}
    for i, value in enumerate(tree_leaves(results)):
        text = show(value)
        if isinstance(value, torch.Tensor) and value.numel() > 0:
            owner = owners.setdefault(memory_of(value), f"output {i}")
            text += f" in the memory of {owner}" if owner != f"output {i}" else ""
        yield text


def said_by_fake(operator: Any, args: Sequence[Any], kwargs: dict[str, Any], cached: bool) -> list[str]:
    said = []
    with (
        FakeTensorMode(allow_non_fake_inputs=True) as mode,
        nullcontext() if cached else disable_fake_tensor_cache(mode),
    ):
        for _ in range(2 if cached else 1):  # a trace calls each operator more than once
            fake_args, fake_kwargs = tree_map_only(torch.Tensor, mode.from_tensor, (args, kwargs))
            results = operator(*fake_args, **fake_kwargs)
            said = [*described(results, tensors((fake_args, fake_kwargs))), *written(operator, fake_args, fake_kwargs)]
    return said


def is_unchanged(now: torch.Tensor, was: torch.Tensor) -> bool:
    if now.shape != was.shape:
        return False
    return torch.equal(now, was) or (now.is_floating_point() and torch.allclose(now, was, 0, 0, equal_nan=True))


def fake_kernel_differs(operator: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
    expected, traced = said_by_fake(operator, args, kwargs, False), said_by_fake(operator, args, kwargs, True)
    given = tensors((args, kwargs))
    before = {id(value): value.clone() for value in given}
    real = operator(*args, **kwargs)
    actual = [*described(real, given), *written(operator, args, kwargs)]
    undeclared = [
        name
        for name, declared, values in arguments(operator, args, kwargs)
        if not declared and not all(is_unchanged(value, before[id(value)]) for value in values)
    ]
    differs, kept = expected != actual or traced != actual or bool(undeclared), False
    if not differs:
        again = {memory_of(value) for value in tensors(operator(*args, **kwargs))} - set(map(memory_of, given))
        kept = any(memory_of(value) in again for value in tensors(real) if value.numel() > 0)
    print("its fake kernel says:", *expected, sep="\n    ")
    if traced != expected:
        print("torch's cache of fake results says:", *traced, sep="\n    ")
    print("its kernel returns:", *actual, sep="\n    ")
    print("its kernel writes to what its schema does not declare as written:", undeclared or "nothing")
    if kept:
        print("called once more, its kernel returns the same memory again, which by its schema is each output's own")
    return differs or kept


def finite(value: torch.Tensor) -> bool:
    value = torch.view_as_real(value.resolve_conj()) if value.is_complex() else value
    return not value.is_floating_point() or bool(value.float().isfinite().all())


def all_are_finite(operator: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
    print("it is given:", *(f"{show(value)} finite={finite(value)}" for value in tensors((args, kwargs))), sep="\n    ")
    results = tensors(operator(*args, **kwargs))
    print("it returns:", *(f"{show(value)} finite={finite(value)}" for value in results), sep="\n    ")
    return all(map(finite, results))


class RoundedOtherwise(TorchDispatchMode):
    """Each operator's result is moved by a rounding, up or down."""

    def __init__(self, seed: int) -> None:
        TorchDispatchMode.__init__(self)
        self.signs = torch.Generator().manual_seed(seed)

    def __torch_dispatch__(self, operator: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = operator(*args, **(kwargs or {}))
        is_view = any(r.alias_info and not r.alias_info.is_write for r in operator._schema.returns)
        for part in made if isinstance(made, (tuple, list)) else [made]:
            if not is_view and isinstance(part, torch.Tensor) and (part.is_floating_point() or part.is_complex()):
                sign = 2 * torch.randint(0, 2, part.shape, generator=self.signs) - 1
                part.mul_(1 + torch.finfo(part.dtype).eps * sign.to(part.dtype))
        return made


def outcome(run: Run, inputs: Sequence[Any], gradients: bool) -> list[Any]:
    """What one call returns, what it leaves in its inputs, and their gradients; or what it raises."""
    torch.manual_seed(0)
    try:
        with torch.set_grad_enabled(gradients):
            results = run(*inputs)
        if gradients:
            loss = [r for r in results if isinstance(r, torch.Tensor) and r.requires_grad]
            torch.manual_seed(0)
            torch.autograd.backward(loss, [torch.randn_like(r) for r in loss])
        return [*results, *inputs, *(x.grad for x in inputs)]
    except Exception as error:
        return [error]


def outcomes(run: Run, make_inputs: Make, make_others: Others, gradients: bool) -> list[Any]:
    """The same of one call; or, with other inputs, of three: on each, and on the others in the memory of the first."""
    inputs = make_inputs()
    now = outcome(run, inputs, gradients)
    if make_others is None:
        return now
    then = [r.detach().clone() if isinstance(r, torch.Tensor) else r for r in now]
    others = make_others()
    for given in others, inputs:
        if given is inputs:
            for old, new in zip(inputs, make_others(), strict=True):
                if (old.shape, old.stride()) == (new.shape, new.stride()):
                    old.untyped_storage().copy_(new.untyped_storage())
        values = outcome(run, given, gradients)
        then += [r.detach().clone() if isinstance(r, torch.Tensor) else r for r in values]
        now += values
    return then + now  # what a later call writes over shows


def is_rounding(number: int, a: torch.Tensor, b: torch.Tensor, again: Callable[[], list[Any]]) -> bool:
    """Whether eager's own value moves as far by other roundings."""
    if not (a.is_floating_point() or a.is_complex()) or (a.shape, a.stride()) != (b.shape, b.stride()):
        return False
    wide = torch.complex128 if a.is_complex() else torch.float64
    value, spread = a.detach().to(wide), torch.zeros(a.shape, dtype=torch.float64)
    for seed in range(4):
        with RoundedOtherwise(seed):
            others = again()
        if number >= len(others) or not isinstance(others[number], torch.Tensor) or others[number].shape != a.shape:
            return False
        spread = torch.maximum(spread, (others[number].detach().to(wide) - value).abs().nan_to_num(0.0))
    off = (b.detach().to(wide) - value).abs()
    return bool(((off <= 8 * spread) | (value == b) | (value.isnan() & b.isnan())).all())


def shared_memory(values: Sequence[Any]) -> list[tuple[int, int]]:
    tensors = [(i, a.untyped_storage().data_ptr()) for i, a in enumerate(values) if isinstance(a, torch.Tensor)]
    return [(i, j) for i, a in tensors for j, b in tensors if j < i and a == b != 0]


def calls_differ(program: Run, compiled: Run, gradients: bool, make_inputs: Make, make_others: Others = None) -> bool:
    """Whether one call, or three with other inputs, end otherwise than in eager, by more than rounding."""
    eager, actual = (outcomes(run, make_inputs, make_others, gradients) for run in (program, compiled))
    wrong = 0
    for number, (a, b) in enumerate(zip(eager, actual, strict=False)):  # an exception ends one side
        if isinstance(a, Exception) or isinstance(b, Exception):
            wrong += not (isinstance(a, Exception) and isinstance(b, Exception))
            for side, value in (("eager", a), ("compiled", b)):
                raised = traceback.format_exception(value) if isinstance(value, Exception) else ["no exception"]
                print(f"{side}: {''.join(raised)}")
            break
        if not isinstance(a, torch.Tensor):
            continue
        rough = a.dtype in (torch.float16, torch.bfloat16)
        exact = not (a.is_floating_point() or a.is_complex())
        try:
            torch.testing.assert_close(
                b, a, rtol=0 if exact else 2e-2 if rough else 1e-4, atol=0, equal_nan=True, check_stride=True
            )
        except AssertionError as error:
            if is_rounding(number, a, b, lambda: outcomes(program, make_inputs, make_others, gradients)):
                continue
            wrong += 1
            print(f"value {number}: {error}\neager\n{a}\ncompiled\n{b}")
    shared = [shared_memory(side) for side in (eager, actual)]
    if shared[0] != shared[1]:
        wrong += 1
        print("values that share memory: eager", shared[0], "compiled", shared[1])
    return wrong > 0
