"""Compilers that are wrong on purpose, one for each class of miscompile.

Each function here makes a compiler ``(gm, example_inputs) -> callable`` for ``options={"compiler": ...}`` or
``cb.check(compiler=...)``. Most come in two variants:

- ``how="python"``: the region runs as it is, and what it returns, or an input's gradient, is spoiled in Python. The
  region's backward pass then consists of torch's own autograd nodes.
- ``how="aot"``: the region goes through AOT autograd, and the compiled forward or backward graph is spoiled. The region
  then is one autograd node, as under Inductor.

`clean` makes the same compilers with nothing spoiled. Inputs are named by the end of the user's name for them
(``"layers.0.weight"``), outputs by their number."""

from __future__ import annotations

import itertools
import os
import re
import signal
from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch
from torch import fx
from torch._dynamo.backends.common import aot_autograd
from torch._guards import TracingContext

from tests.support.raising import raising

# how they are made: a region, or its AOT graphs, runs, and what comes out is edited


Compiler = Callable[[fx.GraphModule, Sequence[Any]], Callable[..., Any]]

Edit = Callable[[list[Any], Sequence[Any]], Any]
"""Gets what a graph returned, as a list, and its inputs; gives back what the spoiled graph returns."""

MakeEdit = Callable[[fx.GraphModule], Edit]
"""Gets the Dynamo graph, for its names, when the graph to spoil is compiled."""


def input_position(gm: fx.GraphModule, name: str) -> int:
    """Which placeholder of a Dynamo graph is the input whose name ends so: ``"x"`` or ``"layers.0.weight"``."""
    names = _placeholders(gm)
    steps = r"(?:_modules|_parameters|_buffers)*_".join(re.escape(step) for step in name.lower().split("."))
    fitting = [place for place, found in enumerate(names) if re.search(rf"(?:^|_){steps}_?$", found.lower())]
    if len(fitting) != 1:
        raise LookupError(f"{len(fitting)} inputs are called {name!r}; there are {', '.join(names)}")
    return fitting[0]


def _placeholders(gm: fx.GraphModule) -> tuple[str, ...]:
    return tuple(node.name for node in gm.graph.nodes if node.op == "placeholder")


class MutatedInputs:
    """Which inputs' new values an AOT forward graph returns, before its outputs."""

    def __init__(self) -> None:
        self._known: dict[tuple[str, ...], tuple[int, ...]] = {}

    def of(self, gm: fx.GraphModule) -> tuple[int, ...]:
        """Positions of those inputs, for the Dynamo graph that AOT autograd is compiling or has compiled before."""
        names = _placeholders(gm)
        context = TracingContext.try_get()
        if context is not None:  # there is none when a region is compiled again outside of Dynamo
            metadata: Any = context.fw_metadata
            self._known[names] = tuple(metadata.mutated_inp_runtime_indices)
        return self._known[names]


class SpoilGradient(torch.autograd.Function):
    """The identity, with a spoiled gradient."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, spoil: Callable[[torch.Tensor], Any]) -> torch.Tensor:
        ctx.spoil = spoil
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[Any, None]:
        return ctx.spoil(gradient), None


def run_in_python(make_edit: MakeEdit) -> Compiler:
    """A compiler that runs the region as it is and edits its results."""

    def compiler(gm: fx.GraphModule, _example_inputs: Sequence[Any]) -> Callable[..., Any]:
        edit = make_edit(gm)
        return lambda *args: edit(list(gm.forward(*args)), args)

    return compiler


def interpreted(result: Callable[[fx.Node, Any], Any], how: Literal["python", "aot"]) -> Compiler:
    """A compiler that runs the region's own graph, or AOT autograd's: ``result`` gives each node another value."""

    def compiler(gm: fx.GraphModule, _example_inputs: Sequence[Any]) -> Callable[..., Any]:
        return run_nodes(gm, result)

    return compiler if how == "python" else through_aot(compiler)


def run_nodes(gm: fx.GraphModule, result: Callable[[fx.Node, Any], Any]) -> Callable[..., Any]:
    """A graph as a function that runs node by node; the arguments are those of `interpreted`."""

    class Runner(fx.Interpreter):
        def run_node(self, n: fx.Node) -> Any:
            return result(n, super().run_node(n))

    return Runner(gm).run


def through_aot(compiler: Compiler) -> Compiler:
    """A compiler of AOT autograd's graphs as a compiler of regions."""
    return through_aot_pair(compiler, compiler)


def through_aot_pair(forward: Compiler, backward: Compiler) -> Compiler:
    """Compilers of AOT autograd's forward (or inference) graphs and backward graphs as a compiler of regions."""

    def boxed(compiler: Compiler) -> Compiler:
        return lambda gm, inputs: _boxed(compiler(gm, inputs), None)

    compile_forward, compile_backward = boxed(forward), boxed(backward)
    return lambda gm, inputs: aot_autograd(
        fw_compiler=compile_forward, bw_compiler=compile_backward, inference_compiler=compile_forward
    )(gm, inputs)


def compiled_by_aot(
    forward: MakeEdit | None = None,
    backward: MakeEdit | None = None,
    around: Callable[[Callable[..., Any]], Callable[..., Any]] | None = None,
) -> Compiler:
    """AOT autograd with compilers that run the graphs and edit their results; ``around`` wraps the forward graph."""

    def compiler(gm: fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        def compile_forward(graph: fx.GraphModule, _inputs: Sequence[Any]) -> Callable[..., Any]:
            run = graph.forward if around is None else around(graph.forward)
            return _boxed(run, None if forward is None else forward(gm))

        def compile_backward(graph: fx.GraphModule, _inputs: Sequence[Any]) -> Callable[..., Any]:
            return _boxed(graph.forward, None if backward is None else backward(gm))

        return aot_autograd(
            fw_compiler=compile_forward, bw_compiler=compile_backward, inference_compiler=compile_forward
        )(gm, example_inputs)

    return compiler


def _boxed(run: Callable[..., Any], edit: Edit | None) -> Callable[..., Any]:
    def boxed(inputs: list[Any]) -> Any:
        args = tuple(inputs)
        inputs.clear()
        results = run(*args)
        return results if edit is None else edit(list(results), args)

    boxed._boxed_call = True  # type: ignore[attr-defined]
    return boxed


# ways to spoil one tensor


How = Literal["python", "aot"]
Spoil = Callable[[torch.Tensor], Any]


class PlantedError(RuntimeError):
    """What the crashing compilers raise."""


def changed(tensor: torch.Tensor) -> torch.Tensor:
    """Every element other than it should be, by far more than rounding."""
    if tensor.dtype == torch.bool:
        return tensor.logical_not()
    return tensor * 1.5 + 0.25 if tensor.dtype.is_floating_point or tensor.dtype.is_complex else tensor + 1


def last_bit(tensor: torch.Tensor) -> torch.Tensor:
    """The next greater numbers. Gradients pass as they are: torch 2.11 has none of ``nextafter``."""
    known = tensor.detach()
    return tensor + (torch.nextafter(known, torch.full_like(known, torch.inf)) - known)


def one_element_changed(tensor: torch.Tensor) -> torch.Tensor:
    """The last element a little off: by a hundredth of the greatest one."""
    spoiled = tensor.clone()
    if not tensor.numel():
        return spoiled
    last = tuple(size - 1 for size in tensor.shape)
    step = tensor.detach().abs().max() * 0.01 if tensor.dtype.is_floating_point or tensor.dtype.is_complex else 1
    spoiled[last] = tensor[last].logical_not() if tensor.dtype == torch.bool else tensor[last] + step
    return spoiled


def restrided(tensor: torch.Tensor) -> torch.Tensor:
    """The same values in another order in memory: the dimensions reversed, or a contiguous tensor of another one."""
    if not tensor.is_contiguous():
        return tensor.contiguous()
    order = tuple(reversed(range(tensor.dim())))
    return tensor.permute(order).contiguous().permute(order)


def with_nan(tensor: torch.Tensor) -> torch.Tensor:
    """NaN in the first element."""
    spoiled = tensor.clone()
    spoiled.view(-1)[:1] = float("nan")
    return spoiled


def replaced(at: int, spoil: Spoil) -> Edit:
    def edit(results: list[Any], _args: Sequence[Any]) -> Any:
        results[at] = spoil(results[at])
        return tuple(results)

    return edit


# compilers that get one operator wrong, always or under some condition


def wrong_operator(name: str, spoil: Spoil = changed, how: How = "python") -> Compiler:
    """Every call of an operator, such as ``"aten.relu.default"``, gives a spoiled result."""
    return interpreted(lambda node, value: spoil(value) if str(node.target) == name else value, how)


def _wrong_where(condition: Callable[[fx.Node], bool], name: str, spoil: Spoil = changed) -> Compiler:
    """An operator of AOT autograd's graphs gives a spoiled result where a condition holds."""
    return interpreted(
        lambda node, value: spoil(value) if str(node.target) == name and condition(node) else value, "aot"
    )


def wrong_if_unseen(name: str, spoil: Spoil = changed) -> Compiler:
    """An operator gives a spoiled result, unless the graph returns it: as a wrong fusion does."""
    return _wrong_where(lambda node: all(user.op != "output" for user in node.users), name, spoil)


def wrong_if_fused(name: str, spoil: Spoil = changed) -> Compiler:
    """An operator gives a spoiled result where its input was computed in the graph, and is not stored."""

    def fused(node: fx.Node) -> bool:
        computed = [source for source in node.all_input_nodes if source.op == "call_function"]
        return any(all(user.op != "output" for user in source.users) for source in computed)

    return _wrong_where(fused, name, spoil)


def wrong_if_symbolic(name: str, spoil: Spoil = changed) -> Compiler:
    """An operator gives a spoiled result in a graph that was compiled for any size."""

    def symbolic(node: fx.Node) -> bool:
        return any(isinstance(one.meta.get("val"), torch.SymInt) for one in node.graph.nodes)

    return _wrong_where(symbolic, name, spoil)


def wrong_for_readers(name: str, spoil: Spoil = changed, how: How = "aot") -> Compiler:
    """What an operator stores is right, and whatever else is compiled with it gets a spoiled value, as in a kernel."""

    class Runner(fx.Interpreter):
        def fetch_args_kwargs_from_env(self, n: fx.Node) -> Any:
            if n.op == "output" or "clone" in str(n.target):  # it is stored
                return super().fetch_args_kwargs_from_env(n)
            return tuple(fx.map_arg(given, lambda node: self._read(node)) for given in (n.args, n.kwargs))

        def _read(self, node: fx.Node) -> Any:
            value = self.env[node]
            return spoil(value) if str(node.target) == name else value

    def compiler(gm: fx.GraphModule, _example_inputs: Sequence[Any]) -> Callable[..., Any]:
        return Runner(gm).run

    return through_aot(compiler) if how == "aot" else compiler


def wrong_if_compiled_together(forward: str, backward: str, spoil: Spoil = changed) -> Compiler:
    """An operator of a backward graph is wrong if the forward graph compiled with it has another operator."""

    def compiler(gm: fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        together: list[fx.Node] = []

        def result(node: fx.Node, value: Any) -> Any:
            return spoil(value) if together and str(node.target) == backward else value

        def compile_forward(graph: fx.GraphModule, _inputs: Sequence[Any]) -> Callable[..., Any]:
            together.extend(node for node in graph.graph.nodes if str(node.target) == forward)
            return graph.forward

        return through_aot_pair(compile_forward, lambda graph, _inputs: run_nodes(graph, result))(gm, example_inputs)

    return compiler


def left_out(name: str, how: How = "aot") -> Compiler:
    """An operator is not executed: its first argument takes its place."""

    def compiler(gm: fx.GraphModule, _example_inputs: Sequence[Any]) -> Callable[..., Any]:
        for node in list(gm.graph.nodes):
            if str(node.target) == name:
                node.replace_all_uses_with(node.args[0])
                gm.graph.erase_node(node)
        gm.recompile()
        return gm.forward

    return compiler if how == "python" else through_aot(compiler)


def refuses(name: str) -> Compiler:
    """The compiler raises where it meets an operator."""

    def compiler(gm: fx.GraphModule, _example_inputs: Sequence[Any]) -> Callable[..., Any]:
        if any(str(node.target) == name for node in gm.graph.nodes):
            raise NotImplementedError(f"no lowering for {name}")
        return gm.forward

    return through_aot(compiler)


# compilers whose programs are wrong in some of their calls, or keep what a call was given or has returned


def from_call(first: int, faulty: Compiler) -> Compiler:
    """A compiler whose programs are right until a call of them, counted from 1, and wrong from that one on."""
    return _in_calls(lambda number: number >= first, faulty)


def only_in_call(number: int, faulty: Compiler) -> Compiler:
    """A compiler whose programs are wrong in one call of them, counted from 1, and right before and after it."""
    return _in_calls(lambda call: call == number, faulty)


def _in_calls(wrong: Callable[[int], bool], faulty: Compiler) -> Compiler:
    def compiler(gm: fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        numbers = itertools.count(1)
        return on_data(lambda _args: wrong(next(numbers)), faulty)(gm, example_inputs)

    return compiler


def same_memory_for_all_calls(gm: fx.GraphModule, _example_inputs: Sequence[Any]) -> Callable[..., Any]:
    """A compiler whose programs return the results of all calls in the same memory."""
    kept: list[torch.Tensor] = []

    def run(*args: Any) -> Any:
        results = gm.forward(*args)
        if not kept:
            kept.extend(torch.empty_like(result) for result in results)
        return [memory.copy_(result) for memory, result in zip(kept, results, strict=True)]

    return run


def remembers_its_first_results(gm: fx.GraphModule, _example_inputs: Sequence[Any]) -> Callable[..., Any]:
    """A compiler whose programs return copies of the first call's results, whatever they are given."""
    kept: list[torch.Tensor] = []

    def run(*args: Any) -> Any:
        if not kept:
            kept.extend(result.clone() for result in gm.forward(*args))
        return [result.clone() for result in kept]

    return run


def writes_to_earlier_inputs(gm: fx.GraphModule, _example_inputs: Sequence[Any]) -> Callable[..., Any]:
    """A compiler whose programs add 1 to what the call before was given."""
    before: list[torch.Tensor] = []

    def run(*args: Any) -> Any:
        for tensor in before:
            tensor.add_(1)
        before[:] = [arg for arg in args if isinstance(arg, torch.Tensor) and arg.is_floating_point()]
        return gm.forward(*args)

    return run


def remembers_by_address(gm: fx.GraphModule, _example_inputs: Sequence[Any]) -> Callable[..., Any]:
    """A compiler whose programs remember their results by the addresses of what they are given."""
    kept: dict[tuple[int, ...], list[torch.Tensor]] = {}

    def run(*args: Any) -> Any:
        key = tuple(arg.data_ptr() for arg in args if isinstance(arg, torch.Tensor))
        if key not in kept:
            kept[key] = [result.clone() for result in gm.forward(*args)]
        return [result.clone() for result in kept[key]]

    return run


def forgets_to_count(gm: fx.GraphModule, _example_inputs: Sequence[Any]) -> Callable[..., Any]:
    """A compiler whose programs write to their inputs as if through raw memory: no write is counted."""

    def run(*args: Any) -> Any:
        given = [arg for arg in args if isinstance(arg, torch.Tensor)]
        before = [0 if tensor.is_inference() else tensor._version for tensor in given]
        results = gm.forward(*args)
        counted = [(tensor, count) for tensor, count in zip(given, before, strict=True) if not tensor.is_inference()]
        torch._C._autograd._unsafe_set_version_counter(
            tuple(tensor for tensor, _ in counted), tuple(count for _, count in counted)
        )
        return results

    return run


# compilers that crash, draw other random numbers, or leave the process another than they found it


def crash_when_compiling(how: How = "python") -> Compiler:
    crash = raising(PlantedError("the compiler crashed"))
    return compiled_by_aot(forward=crash) if how == "aot" else crash


def crash_when_running(how: How = "python") -> Compiler:
    return _after(raising(PlantedError("the compiled region crashed")), how)


def crash_in_backward(when: Literal["compiling", "running"] = "running") -> Compiler:
    """The compiled backward graph raises, or its compiler does."""
    if when == "running":
        return compiled_by_aot(backward=lambda _gm: raising(PlantedError("the compiled backward crashed")))
    return compiled_by_aot(backward=raising(PlantedError("the backward's compiler crashed")))


def dies_on(condition: Callable[[fx.GraphModule], bool], name: str, spoil: Spoil = changed) -> Compiler:
    """As `wrong_operator` on AOT autograd's graphs; the process dies where a graph fulfils a condition."""
    faulty = wrong_operator(name, spoil)

    def compiler(gm: fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        if condition(gm):
            os.kill(os.getpid(), signal.SIGUSR1)  # quieter than os.abort
        return faulty(gm, example_inputs)

    return through_aot(compiler)


def _after(work: Callable[[], object], how: How) -> Compiler:
    def edit(results: list[Any], _args: Sequence[Any]) -> Any:
        work()
        return tuple(results)

    return compiled_by_aot(forward=lambda _gm: edit) if how == "aot" else run_in_python(lambda _gm: edit)


def too_many_random_numbers(how: How = "python") -> Compiler:
    """One random number is drawn after the region has run: its values are right, the state it leaves is not."""
    return _after(lambda: torch.rand(()), how)


def reseeded(how: How = "python") -> Compiler:
    """The region seeds torch's random generator when it has run."""
    return _after(lambda: torch.manual_seed(1234), how)


def other_random_numbers(how: How = "python") -> Compiler:
    """The region draws from a stream of its own: its dropout mask is another one, and torch's state does not move."""

    def around(run: Callable[..., Any]) -> Callable[..., Any]:
        def elsewhere(*args: Any) -> Any:
            with torch.random.fork_rng(devices=()):
                torch.manual_seed(987)
                return run(*args)

        return elsewhere

    if how == "aot":
        return compiled_by_aot(around=around)
    return lambda gm, _example_inputs: around(gm.forward)


def leaves_setting(
    change: Callable[[], object], when: Literal["compiling", "running", "raising", "backward"] = "running"
) -> Compiler:
    """Changes a setting of the process and does not set it back."""

    def then(outputs: Any) -> Any:
        change()
        if when == "raising":
            raise PlantedError("after a setting was changed")
        return outputs

    if when == "backward":
        return compiled_by_aot(backward=lambda _gm: lambda outputs, _inputs: then(outputs))

    def compiler(gm: fx.GraphModule, _example_inputs: Sequence[Any]) -> Callable[..., Any]:
        if when == "compiling":
            change()
            return gm.forward
        return lambda *args: then(gm.forward(*args))

    return compiler


def clean(how: How = "python") -> Compiler:
    """A compiler without a fault, built as the wrong ones are."""
    if how == "aot":
        return compiled_by_aot()
    return lambda gm, _example_inputs: gm.forward


def once(number: int, spoil: Spoil) -> Spoil:
    """Spoils a tensor the n-th time only, counted from 1."""
    times = itertools.count(1)
    return lambda tensor: spoil(tensor) if next(times) == number else tensor


def on_data(condition: Callable[[Sequence[Any]], bool], faulty: Compiler) -> Compiler:
    """A compiler whose programs are wrong for the arguments of which a condition is true, and right for others."""

    def compiler(gm: fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        wrong = faulty(gm, example_inputs)
        return lambda *args: wrong(*args) if condition(args) else gm.forward(*args)

    return compiler


def spoiled_tangents(spoil: Spoil) -> Compiler:
    """The backward pass sees other gradients of the region's outputs than those that arrive, in whatever layout."""

    def edit(_gm: fx.GraphModule) -> Edit:
        return lambda results, _args: tuple(
            SpoilGradient.apply(value, spoil) if isinstance(value, torch.Tensor) and value.requires_grad else value
            for value in results
        )

    return run_in_python(edit)


# outputs


def spoiled_output(spoil: Spoil, at: int = 0, how: How = "python") -> Compiler:
    """Replace one output with what ``spoil`` makes of it, after the region has run or in the compiled forward graph."""
    if how == "aot":
        mutated = MutatedInputs()
        return compiled_by_aot(forward=lambda gm: replaced(at + len(mutated.of(gm)), spoil))
    return run_in_python(lambda _gm: replaced(at, spoil))


def stale_parameters(gm: fx.GraphModule, _example_inputs: Sequence[Any]) -> Callable[..., Any]:
    """A compiler that takes the parameters of the first call for constants; their gradients are right."""
    kept: dict[int, torch.Tensor] = {}

    def stale(place: int, arg: Any) -> Any:
        if not isinstance(arg, torch.nn.Parameter):
            return arg
        return arg + (kept.setdefault(place, arg.detach().clone()).to(arg.dtype) - arg.detach())

    return lambda *args: gm.forward(*map(stale, itertools.count(), args))


def instead(function: Callable[..., Any]) -> Compiler:
    """Run a function in place of a region with one output."""
    return lambda _gm, _example_inputs: lambda *args: (function(*args),)


def runs(program: Callable[..., Any]) -> Compiler:
    """Run a function in place of a region: it is given what is right, to call it, and the arguments."""
    return lambda gm, _example_inputs: lambda *args: program(gm.forward, *args)


def every_output(spoil: Spoil) -> Compiler:
    """Replace every output with what ``spoil`` makes of it."""
    return run_in_python(lambda _gm: lambda results, _args: tuple(map(spoil, results)))


def wrong_value(at: int = 0, how: How = "python") -> Compiler:
    """Every element of an output is wrong."""
    return spoiled_output(changed, at, how)


def one_element(at: int = 0, how: How = "python") -> Compiler:
    """One element of an output is wrong."""
    return spoiled_output(one_element_changed, at, how)


def wrong_dtype(at: int = 0, how: How = "python") -> Compiler:
    """An output is in float64."""
    return spoiled_output(lambda tensor: tensor.double(), at, how)


def wrong_shape(at: int = 0, how: How = "python") -> Compiler:
    """An output has a dimension too many."""
    return spoiled_output(lambda tensor: tensor.unsqueeze(0), at, how)


def wrong_stride(at: int = 0, how: How = "python") -> Compiler:
    """An output of two or more dimensions is laid out in another order."""
    return spoiled_output(restrided, at, how)


def made_nan(at: int = 0, how: How = "python") -> Compiler:
    return spoiled_output(with_nan, at, how)


def lost_alias(at: int = 0) -> Compiler:
    """An output that shares memory with an input, or with another output, is a copy.

    AOT autograd makes such outputs anew after the compiled graph, so a compiled graph cannot lose them.
    """
    return spoiled_output(lambda tensor: tensor.clone(), at)


def missing_output() -> Compiler:
    """The last output is not returned."""
    return run_in_python(lambda _gm: lambda results, _args: tuple(results[:-1]))


def extra_output() -> Compiler:
    """The first output is returned once more, at the end."""
    return run_in_python(lambda _gm: lambda results, _args: (*results, results[0]))


def returns_none() -> Compiler:
    return run_in_python(lambda _gm: lambda _results, _args: None)


def not_a_function() -> Compiler:
    """The compiler itself returns None: its author forgot the ``return``."""

    def compiler(gm: fx.GraphModule, _example_inputs: Sequence[Any]) -> Any:
        gm.graph.lint()

    return compiler


# mutations


def dropped_mutation(name: str, how: How = "python") -> Compiler:
    """An input is not changed in place, though it should be."""
    if how == "aot":
        return _spoiled_mutation(name, lambda _new, old: old)

    return _given(name, torch.clone)


def _given(name: str, spoil: Spoil) -> Compiler:
    """A compiler that gives a region what ``spoil`` makes of one input."""

    def compiler(gm: fx.GraphModule, _example_inputs: Sequence[Any]) -> Callable[..., Any]:
        place = input_position(gm, name)
        return lambda *args: gm.forward(*args[:place], spoil(args[place]), *args[place + 1 :])

    return compiler


def wrong_mutation(name: str, how: How = "python") -> Compiler:
    """An input is changed in place, to wrong values."""
    if how == "aot":
        return _spoiled_mutation(name, lambda new, _old: changed(new))
    return unwanted_mutation(name)


def unwanted_mutation(name: str) -> Compiler:
    """An input is changed in place after the region has run; for inputs that the region should leave alone."""

    def compiler(gm: fx.GraphModule, _example_inputs: Sequence[Any]) -> Callable[..., Any]:
        place = input_position(gm, name)

        def run(*args: Any) -> Any:
            results = gm.forward(*args)
            # .data: as compiled code does, and unlike torch operators, this tells autograd nothing
            args[place].data.copy_(changed(args[place].data))
            return results

        return run

    return compiler


# gradients


def spoiled_gradient(name: str, spoil: Spoil, how: How = "python") -> Compiler:
    """Replace the gradient that the region sends to one input with what ``spoil`` makes of it."""
    if how == "aot":
        return compiled_by_aot(backward=lambda gm: replaced(input_position(gm, name), spoil))
    return _given(name, lambda value: SpoilGradient.apply(value, spoil))


class _Overwriting(torch.autograd.Function):
    """The identity, whose backward pass writes to the gradient that it is given."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        right = gradient.clone()
        gradient.zero_()
        return right


def overwritten_cotangent() -> Compiler:
    """The gradient that arrives at the first output is overwritten; what leaves the region is right."""
    return spoiled_output(lambda tensor: _Overwriting.apply(tensor))  # type: ignore[no-untyped-call]


def zeroed_gradient(name: str, how: How = "python") -> Compiler:
    return spoiled_gradient(name, torch.zeros_like, how)


def scaled_gradient(name: str, how: How = "python", factor: float = 1.01) -> Compiler:
    """An input's gradient is one percent too large."""
    return spoiled_gradient(name, lambda gradient: gradient * factor, how)


def _spoiled_mutation(name: str, spoil: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> Compiler:
    """An AOT forward graph that returns ``spoil(new, old)`` for the new value of a mutated input."""
    mutated = MutatedInputs()

    def forward(gm: fx.GraphModule) -> Edit:
        position = input_position(gm, name)
        place = mutated.of(gm).index(position)

        def edit(results: list[Any], args: Sequence[Any]) -> Any:
            results[place] = spoil(results[place], args[position])
            return tuple(results)

        return edit

    return compiled_by_aot(forward=forward)
