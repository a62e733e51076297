"""Compile a region with the candidate compiler, and run what was compiled on the user's tensors."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from contextlib import AbstractContextManager
from difflib import get_close_matches
from itertools import compress
from typing import Any

import torch
from torch import fx
from torch.utils.checkpoint import checkpoint

from checked_backend._torch.autograd import is_accumulate_grad
from checked_backend._torch.dynamo import (
    InvalidBackend,
    TracingContext,
    as_from_dynamo,
    compiling,
    dynamo_disable,
    list_backends,
    lookup_backend,
    tracing,
)
from checked_backend._torch.fake_tensors import FakeTensor, detect_fake_mode, fakes_of_fixed_sizes
from checked_backend._torch.inductor import (
    inductor_front,
    inductor_mode_options,
    inductor_passed,
    inductor_setting_names,
)
from checked_backend._torch.operators import HigherOrderOperator, OpOverload, OpOverloadPacket, find_op_packet
from checked_backend.aot.boxed import boxed_module
from checked_backend.errors import CandidateError, CheckedBackendError, OptionError
from checked_backend.graphs.effects import has_effects
from checked_backend.graphs.nodes import recorded_value
from checked_backend.graphs.workarounds import powers_called
from checked_backend.numerics.bits import holds_floats
from checked_backend.options import CheckOptions, did_you_mean
from checked_backend.regions.execution import Call
from checked_backend.regions.gradient_gate import gradient_gate
from checked_backend.regions.inputs import storage_key
from checked_backend.regions.unsupported import compile_with_any_cache, fresh_cache, may_be_the_cache
from checked_backend.tensors.streams import wait_for_devices

Compiler = Callable[[fx.GraphModule, Sequence[Any]], Callable[..., Any]]

_HALF = (torch.float16, torch.bfloat16)
_FOR_TESTS = ("_TESTING_ONLY", "minifier_backend")
"""Endings of the names of backends that test torch itself."""


def resolve_compiler(options: CheckOptions, mode: str | None = None) -> Compiler:
    """Find the candidate compiler that the options name.

    Inductor is given ``fallback_random=True``, so that its random numbers can be those of eager.

    Args:
        mode: What the user passed as ``torch.compile(mode=...)``; only Inductor has modes.

    Raises:
        OptionError: The compiler is unknown; the message lists those that are known. Inductor has no such setting.
    """
    given = dict(options.compiler_options)
    if options.compiler == "inductor":
        _refuse_unknown_settings(given)
        patches = inductor_patches(options, mode)
        inductor = lookup_backend("inductor")
        return lambda gm, example_inputs: inductor(gm, list(example_inputs), config_patches=patches)  # type: ignore[call-arg]
    if mode:
        raise OptionError(f"mode={mode!r} is Inductor's, and the candidate is {options.compiler!r}. Drop the mode.")
    if callable(options.compiler):
        compiler: Callable[..., Any] = options.compiler
    else:
        try:
            compiler = lookup_backend(options.compiler)
        except InvalidBackend:
            names = [name for name in list_backends(exclude_tags=()) if not name.endswith(_FOR_TESTS)]
            known = ", ".join(name for name in names if name != "numcheck")
            raise OptionError(
                f"backend 'numcheck': option 'compiler' got {options.compiler!r}, which is no Dynamo backend here."
                f"{did_you_mean(options.compiler, names)} "
                f"Valid: {known}; or a callable (gm, example_inputs) -> callable."
            ) from None
    if given:
        return lambda gm, example_inputs: compiler(gm, example_inputs, options=given)
    return compiler


def _refuse_unknown_settings(given: Mapping[str, Any]) -> None:
    """Refuse settings that Inductor does not have: the caller's mistake would look like a crash of Inductor."""
    known = inductor_setting_names() if given else frozenset()
    for name in given:
        if name not in known:
            near = ", ".join(get_close_matches(name, sorted(known))) or "see torch._inductor.config"
            raise OptionError(f"option 'compiler_options' got {name!r}, which Inductor does not have. Near it: {near}.")


def with_mode_spelled_out(options: CheckOptions, mode: str | None) -> CheckOptions:
    """The user's options, with the meaning of ``torch.compile(mode=...)`` for Inductor added."""
    if options.compiler != "inductor":
        return options
    return options.model_copy(update={"compiler_options": inductor_patches(options, mode)})


def inductor_patches(options: CheckOptions, mode: str | None = None) -> dict[str, Any]:
    """The changes to Inductor's configuration while it compiles the candidate."""
    by_mode = inductor_mode_options(mode) if mode else {}
    return {**by_mode, "fallback_random": True, **options.compiler_options}


def inductor_front_compiler(options: CheckOptions, mode: str | None = None) -> Compiler:
    """Inductor up to code generation: its graphs run in eager."""
    patches = inductor_patches(options, mode)

    def inner(gm: fx.GraphModule, _example_inputs: Sequence[Any], **how: Any) -> Callable[..., Any]:
        passed = inductor_passed(gm, inference=bool(how.get("is_inference")), patches=patches) or copy_graph(gm)
        _leave_unrounded(passed)
        return boxed_module(passed)

    return lambda gm, example_inputs: inductor_front(gm, example_inputs, inner, patches)


def _leave_unrounded(gm: fx.GraphModule) -> None:
    """Do not round values of half precision that only arithmetic in float32 uses, as no generated kernel does.

    A decomposition that divides a float16 deviation by a million elements would round it to 4 bits.
    """
    cast = torch.ops.prims.convert_element_type.default
    for node in gm.graph.nodes:
        wide = all(_is_pointwise(user, (torch.float32,)) for user in node.users) and node.users
        if not wide or node.target is cast or not _is_pointwise(node, _HALF):
            continue
        for source in node.all_input_nodes:
            if getattr(recorded_value(source), "dtype", None) in _HALF:
                with gm.graph.inserting_before(node):
                    node.replace_input_with(source, gm.graph.call_function(cast, (source, torch.float32)))
    gm.recompile()


def _is_pointwise(node: fx.Node, dtypes: Collection[torch.dtype]) -> bool:
    """Whether a node computes each element of a tensor of one of these dtypes by itself."""
    tags = node.target.tags if isinstance(node.target, OpOverload) else ()
    return torch.Tag.pointwise in tags and getattr(recorded_value(node), "dtype", None) in dtypes


def inductor_with(options: CheckOptions, mode: str | None, **settings: Any) -> Compiler:
    """Inductor with other settings of its own."""
    patches = {**options.compiler_options, **settings}
    return resolve_compiler(options.model_copy(update={"compiler_options": patches}), mode)


def draws_numbers(gm: fx.GraphModule) -> bool:
    """Whether an operator of the name of some node's function draws random numbers."""
    names = {
        (node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")).partition(".")[0]
        for node in gm.graph.nodes
        if node.op in ("call_function", "call_method")
    }
    for name in names:
        packet = find_op_packet("aten", name)
        if isinstance(packet, OpOverloadPacket) and any(
            torch.Tag.nondeterministic_seeded in getattr(packet, overload).tags for overload in packet.overloads()
        ):
            return True
    return False


def compile_candidate(compiler: Compiler, gm: fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
    """Compile a region. The compiler gets the graph itself, not a copy, and may change it.

    Raises:
        CandidateError: The compiler returned something that cannot be called.
    """
    compiled = compiler(gm, example_inputs)
    if not callable(compiled):
        raise CandidateError(
            f"the candidate compiler returned {compiled!r}, which is not callable. A Dynamo backend takes "
            "(gm, example_inputs) and returns a function of the graph's inputs; is a `return` missing?"
        )
    called: Callable[..., Any] = dynamo_disable(compiled)
    return called


class NotCompiled:
    """Stands for the candidate of a region that could not be compiled. Calling it raises the compiler's exception."""

    def __init__(self, error: Exception) -> None:
        self.error = error

    def __call__(self, *_args: Any) -> Any:
        """Raise the compiler's exception."""
        raise self.error


class Candidate:
    """A compiled region.

    Args:
        compiled: The compiler's result; a `NotCompiled` if it failed.
        replaceable: Whether eager's gradients may be handed out in place of its own.
    """

    def __init__(self, compiled: Callable[..., Any], note: Callable[[str], None], *, replaceable: bool) -> None:
        self._compiled = compiled
        self._note = note
        self._replaceable = replaceable

    @property
    def missing(self) -> bool:
        """Whether it could not be compiled."""
        return isinstance(self._compiled, NotCompiled)

    def __call__(self, *args: Any) -> Any:
        """Run it, unchecked."""
        return self._compiled(*args)

    def results(self, args: Sequence[Any], call: Call) -> Any:
        """Run it for a check."""
        returned = self._returned(args, call)
        wait_for_devices(args)  # what errs later would seem to be a mistake of the check's own
        return returned

    def _returned(self, args: Sequence[Any], call: Call) -> Any:
        inputs = call.inputs
        # To hand out eager's gradients instead, all of the candidate's must pass one node.
        if not self._replaceable or not inputs.requires_grad or inputs.requires_grad & inputs.mutated:
            return self._compiled(*args)
        gated = gradient_gate(args, sorted(inputs.requires_grad))
        returned = self._compiled(*gated)
        if not isinstance(returned, (tuple, list)):
            return returned
        original = {id(alias): arg for alias, arg in zip(gated, args, strict=True)}
        return tuple(original.get(id(value), value) for value in returned)

    def backward_again(self, error: Exception) -> AbstractContextManager[Any] | None:
        """The context under which to run its backward pass once more, which compiles it anew; None to leave it."""
        if isinstance(error, CheckedBackendError) or not may_be_the_cache(error):
            return None
        return fresh_cache(error, self._note)


def eager_graph(gm: fx.GraphModule) -> fx.GraphModule:
    """Copy a graph for eager, so that its ``forward`` computes what the user's program does.

    Activation checkpointing recomputes with the random state of its forward pass: Dynamo's own operator for it is a
    mark for AOT autograd; run as it is, it draws new dropout masks in the backward pass. That for nested compiled
    regions cannot be differentiated at all outside of a compiler. Powers of negative numbers are spelled as calls.
    A cast to the dtype that a tensor has already gives the tensor itself, also in float64.
    """
    copied = copy_graph(gm)
    mark, nested = torch.ops.higher_order.tag_activation_checkpoint, torch.ops.higher_order.invoke_subgraph
    for body in copied.modules():
        if isinstance(body, fx.GraphModule):  # both nest
            for node in body.graph.find_nodes(op="call_function", target=mark):
                node.target = _checkpoint
            for node in body.graph.find_nodes(op="call_function", target=nested):
                node.target = _call_body
            pass_through_casts(body.graph)
            body.graph = powers_called(body.graph)  # which compiles it anew
    return copied


def keep_accumulating(gm: fx.GraphModule) -> None:
    """Let a graph of compiled autograd accumulate gradients even if its inputs are copies that require none.

    The operator for that does nothing for a parameter that does not require grad.
    """
    for node in gm.graph.nodes:
        if node.op == "call_function" and is_accumulate_grad(node.target) and isinstance(node.args[1], fx.Node):
            with gm.graph.inserting_before(node):
                requiring = gm.graph.call_function(_requiring_grad, (node.args[1],))
            requiring.meta = dict(node.args[1].meta)
            node.update_arg(1, requiring)
    gm.recompile()


def _requiring_grad(variable: torch.Tensor) -> torch.Tensor:
    return variable if variable.requires_grad else variable.detach().requires_grad_()


def _checkpoint(body: Callable[..., Any], *operands: Any, **options: Any) -> Any:
    """Checkpoint as the user's program does, whose function closes over its module.

    As an operand, a tensor that the body writes to (a batch norm's statistics) would be saved, and found changed later.
    """
    passed = [isinstance(operand, torch.Tensor) and operand.requires_grad for operand in operands]

    def run(*given: Any) -> Any:
        rest = iter(given)
        return body(*(next(rest) if is_passed else held for held, is_passed in zip(operands, passed, strict=True)))

    return checkpoint(run, *compress(operands, passed), **options)


def _call_body(body: Callable[..., Any], _identifier: str, *operands: Any) -> Any:
    return body(*operands)


def copy_graph(gm: fx.GraphModule) -> fx.GraphModule:
    """Copy a graph so that a compiler's changes do not reach it; parameters and constants stay shared."""
    copied = fx.GraphModule(gm, copy.deepcopy(gm.graph))
    copied.meta = dict(gm.meta)
    for name, child in list(copied.named_children()):
        if isinstance(child, fx.GraphModule):
            setattr(copied, name, copy_graph(child))
    return copied


_TO_DTYPE = {
    "float": torch.float32,
    "double": torch.float64,
    "half": torch.float16,
    "bfloat16": torch.bfloat16,
    "chalf": torch.complex32,
    "cfloat": torch.complex64,
    "cdouble": torch.complex128,
}
_CASTS = frozenset({"to", "type", "type_as", *_TO_DTYPE})


def pass_through_casts(graph: fx.Graph) -> None:
    """Replace casts to the dtype that a tensor has already by the tensor itself.

    In float64 such a cast would make another tensor, and a write to that would not reach the first.
    """
    for node in graph.nodes:
        if _is_cast(node) and _gives_itself(node):
            node.op, node.target, node.args, node.kwargs = "call_function", _itself, node.args[:1], {}


def copy_in_casts(graph: fx.Graph) -> None:
    """Have each cast make another tensor if it did so when it was traced, whatever the dtypes are later.

    Where all is float64, a cast would give the tensor itself, and a write to it would reach that, and the user's own
    tensor. Without writes nobody can tell.
    """
    if not any(map(has_effects, graph.nodes)):
        return
    for node in graph.nodes:
        if not _is_cast(node) or _gives_itself(node) or not all(map(_is_floating, (node.args[0], node))):
            continue
        if node.target == "type" and not any(isinstance(given, torch.dtype) for given in node.args):
            continue
        if node.target in _TO_DTYPE:
            node.args = (node.args[0], _TO_DTYPE[node.target])
        node.target, node.kwargs = "to", {**node.kwargs, "copy": True}


def _is_cast(node: fx.Node) -> bool:
    return node.op == "call_method" and node.target in _CASTS


def _is_floating(value: object) -> bool:
    return isinstance(value, fx.Node) and holds_floats(value.meta.get("example_value"))


def _gives_itself(node: fx.Node) -> bool:
    given, made = (source.meta.get("example_value") for source in (node.all_input_nodes[0], node))
    if not isinstance(given, torch.Tensor) or not isinstance(made, torch.Tensor):
        return False
    alike = (given.dtype, given.device, given.shape) == (made.dtype, made.device, made.shape)
    return alike and storage_key(given) is not None and storage_key(given) == storage_key(made)


def _itself(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


Region = Callable[..., Any]

_PLAIN = (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer, int, float, bool)


def compile_again(
    compiler: Compiler,
    graph: fx.GraphModule,
    example_inputs: Sequence[Any],
    inputs: Sequence[Any],
    change: Callable[[torch.dtype], torch.dtype] = lambda dtype: dtype,
) -> Region:
    """Compile a copy of a region's graph.

    Args:
        graph: The graph, which stays as it is.
        example_inputs: The fake values of the region's placeholders as Dynamo traced them. With symbolic sizes the
            graph is compiled for the same symbols.
        inputs: Real inputs, which a graph without symbolic sizes is compiled for.

    Raises:
        Exception: Whatever the compiler raises, also with an empty cache if its own one may be what failed.
    """
    return compile_with_any_cache(lambda: _compiled(compiler, copy_graph(graph), example_inputs, inputs, change))


def _compiled(
    compiler: Compiler,
    graph: fx.GraphModule,
    example_inputs: Sequence[Any],
    inputs: Sequence[Any],
    change: Callable[[torch.dtype], torch.dtype],
) -> Region:
    as_from_dynamo(graph)
    fake_mode = detect_fake_mode(example_inputs)
    symbolic = fake_mode is not None and (
        any(isinstance(value, torch.SymInt) for value in example_inputs)
        # a loop has shapes of its own to solve for, whatever its inputs are
        or any(isinstance(node.target, HigherOrderOperator) for node in graph.graph.nodes)
    )
    if not symbolic or fake_mode is None:
        if not all(type(value) in _PLAIN for value in inputs):
            with compiling(), tracing(None):
                return compiler(graph, list(inputs))
        # for real tensors torch's caches of graphs have no entry: these have no ShapeEnv
        fake_mode, fixed = fakes_of_fixed_sizes(inputs)
        with compiling(), tracing(TracingContext(fake_mode)):
            return compiler(graph, fixed)
    with compiling(), tracing(TracingContext(fake_mode)):
        with fake_mode:
            fakes = [
                torch.empty_strided(
                    value.size(), value.stride(), dtype=change(value.dtype), device=value.device
                ).requires_grad_(value.requires_grad)
                if isinstance(value, FakeTensor)
                else value
                for value in example_inputs
            ]
        for node, fake in zip((node for node in graph.graph.nodes if node.op == "placeholder"), fakes, strict=True):
            node.meta["example_value"] = fake
        return compiler(graph, fakes)


class CompiledOnce:
    """Compiles a region for given inputs, and returns the same result for inputs of the same kind.

    A region's forward and backward passes are compared separately, and both need its float64 twin.
    """

    def __init__(self, compile_for: Callable[[Sequence[Any]], Region]) -> None:
        self._compile_for = compile_for
        self._lock = threading.Lock()
        self._last: tuple[Hashable, Region] | None = None

    def is_ready(self, inputs: Sequence[Any]) -> bool:
        """Whether it is compiled for inputs of this kind."""
        return self._last is not None and self._last[0] == _key(inputs)

    def __call__(self, inputs: Sequence[Any]) -> Region:
        """The compiled region."""
        key = _key(inputs)
        with self._lock:
            if self._last is None or self._last[0] != key:
                self._last = key, self._compile_for(inputs)
            return self._last[1]


def _key(inputs: Sequence[Any]) -> Hashable:
    return (torch.is_grad_enabled(), torch.is_inference_mode_enabled(), *(_kind(value) for value in inputs))


def _kind(value: Any) -> Hashable:
    if not isinstance(value, torch.Tensor):
        return type(value), value if isinstance(value, (bool, int, float, str)) else id(value)
    strides = tuple(value.stride()) if value.layout is torch.strided and not value.is_nested else ()
    return type(value), value.dtype, value.device, value.layout, tuple(value.shape), strides, value.requires_grad
