"""Compile a region with the candidate compiler."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from difflib import get_close_matches
from itertools import compress
from typing import Any

import torch
from torch import fx
from torch.utils.checkpoint import checkpoint

from checked_backend._torch.autograd import is_accumulate_grad
from checked_backend._torch.dynamo import InvalidBackend, dynamo_disable, list_backends, lookup_backend
from checked_backend._torch.inductor import (
    inductor_front,
    inductor_mode_options,
    inductor_passed,
    inductor_setting_names,
)
from checked_backend._torch.operators import OpOverloadPacket, find_op_packet
from checked_backend.aot.boxed import boxed_module
from checked_backend.errors import CandidateError, OptionError
from checked_backend.graphs.workarounds import powers_called
from checked_backend.options import CheckOptions, did_you_mean
from checked_backend.regions.casts import pass_through_casts

__all__ = [
    "Compiler",
    "compile_candidate",
    "copy_graph",
    "eager_graph",
    "inductor_front_compiler",
    "inductor_patches",
    "keep_accumulating",
    "own_random_compiler",
    "resolve_compiler",
    "unfused_compiler",
    "with_mode_spelled_out",
]

Compiler = Callable[[fx.GraphModule, Sequence[Any]], Callable[..., Any]]

_FOR_TESTS = ("_TESTING_ONLY", "minifier_backend")
"""Endings of the names of backends that test torch itself."""


def resolve_compiler(options: CheckOptions, mode: str | None = None) -> Compiler:
    """Find the candidate compiler that the options name.

    Inductor is given ``fallback_random=True``, so that its random numbers can be those of eager.

    Args:
        options: The options of ``numcheck``.
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
    """Inductor up to code generation: its graphs run in eager.

    Args:
        options: The options of ``numcheck``.
        mode: What the user passed as ``torch.compile(mode=...)``.
    """
    patches = inductor_patches(options, mode)

    def inner(gm: fx.GraphModule, _example_inputs: Sequence[Any], **how: Any) -> Callable[..., Any]:
        return boxed_module(inductor_passed(gm, inference=bool(how.get("is_inference")), patches=patches) or gm)

    return lambda gm, example_inputs: inductor_front(gm, example_inputs, inner, patches)


def unfused_compiler(options: CheckOptions, mode: str | None = None) -> Compiler | None:
    """The candidate compiler, made to round half precision wherever eager does; None for all but Inductor.

    Args:
        options: The options of ``numcheck``.
        mode: What the user passed as ``torch.compile(mode=...)``.
    """
    if options.compiler != "inductor":
        return None
    patches = {**options.compiler_options, "emulate_precision_casts": True}
    return resolve_compiler(options.model_copy(update={"compiler_options": patches}), mode)


def own_random_compiler(options: CheckOptions, gm: fx.GraphModule, mode: str | None = None) -> Compiler | None:
    """The candidate compiler with random operators of its own, as the user's program has them without a check.

    Args:
        options: The options of ``numcheck``.
        mode: What the user passed as ``torch.compile(mode=...)``.

    Returns:
        The compiler. None for all but Inductor, and for a graph that draws nothing, because it would be the candidate
        compiler.
    """
    if options.compiler != "inductor" or "fallback_random" in options.compiler_options or not _draws(gm):
        return None
    patches = {**options.compiler_options, "fallback_random": False}
    return resolve_compiler(options.model_copy(update={"compiler_options": patches}), mode)


def _draws(gm: fx.GraphModule) -> bool:
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

    Args:
        compiler: The result of `resolve_compiler`.
        example_inputs: As Dynamo gave them.

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
    for name, child in list(copied.named_children()):
        if isinstance(child, fx.GraphModule):
            setattr(copied, name, copy_graph(child))
    return copied
