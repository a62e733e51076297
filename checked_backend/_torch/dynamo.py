"""Dynamo: its backends, what it raises and counts, how it compiles, and the compilation that is running."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from traceback import FrameSummary
from types import FrameType
from typing import Any, TypeVar

import torch
import torch._dynamo.config
from torch import fx
from torch._dynamo import compiled_autograd, eval_frame
from torch._dynamo import disable as _disable
from torch._dynamo.backends import registry
from torch._dynamo.backends.registry import list_backends, lookup_backend
from torch._dynamo.convert_frame import compile_lock
from torch._dynamo.decorators import substitute_in_graph
from torch._dynamo.eval_frame import OptimizedModule
from torch._dynamo.exc import (
    InvalidBackend,
    SkipFrame,
    TensorifyScalarRestartAnalysis,
    exceptions_allowed_to_be_fallback,
)
from torch._dynamo.source import GetItemSource, LocalSource
from torch._dynamo.symbolic_convert import InstructionTranslator
from torch._dynamo.utils import counters
from torch._guards import CompileContext, TracingContext, tracing

__all__ = [
    "InvalidBackend",
    "OptimizedModule",
    "TracingContext",
    "ahead_of_time",
    "asked_while_tracing",
    "causes",
    "compile_id",
    "compile_lock",
    "compiling",
    "default_backend",
    "dynamo_captures_data",
    "dynamo_control_flow",
    "dynamo_counters",
    "dynamo_disable",
    "dynamo_hides_errors",
    "dynamo_leaves_draws_to_numpy",
    "dynamo_many_recompilations",
    "dynamo_reset",
    "dynamo_restarts",
    "element_source",
    "enters_compiled",
    "in_compiled_backward",
    "inner_exception",
    "list_backends",
    "lookup_backend",
    "must_stay_one_graph",
    "outside_of_graphs",
    "registered_here",
    "traced_stack",
    "tracing",
    "uses_numpy",
]

_Function = TypeVar("_Function", bound=Callable[..., Any])


def enters_compiled(frame: FrameType) -> bool:
    """Whether a frame is the one in which Dynamo calls what ``torch.compile`` was given."""
    code = frame.f_code
    return code.co_name == "compile_wrapper" and code.co_filename == eval_frame.__file__


def dynamo_disable(function: _Function) -> _Function:
    """A function that Dynamo neither traces nor compiles, and nothing that it calls."""
    disabled: _Function = _disable(function)
    return disabled


def default_backend() -> str | Callable[..., Any]:
    """The backend of a ``torch.compile`` that names none; a program may have set it (since torch 2.13)."""
    known = getattr(torch.compiler, "get_default_backend", None)
    found: str | Callable[..., Any] = "inductor" if known is None else known()
    return found


def ahead_of_time(made: Any, plain: Callable[[], Any]) -> None:
    """Have another compiled object compile ahead of time, which takes torch's own backends alone.

    Args:
        made: What ``torch.compile`` returned.
        plain: Makes the other one, when ``made`` is asked to compile ahead of time.
    """
    if isinstance(made, OptimizedModule):

        def compile_module(*args: Any, **kwargs: Any) -> Any:
            other = plain()
            found = other._aot_compile(*args, **kwargs)
            made.forward = other.forward
            return found

        object.__setattr__(made, "_aot_compile", compile_module)  # its own __setattr__ is the user's module's
    elif "aot_compile" in getattr(made, "__dict__", {}):
        made.aot_compile = lambda *args, **kwargs: plain().aot_compile(*args, **kwargs)


def same_config(made: Any, plain: Any) -> None:
    """Have ``get_compiler_config`` of a compiled object tell what it tells of another one.

    Args:
        made: What ``torch.compile`` returned.
        plain: What it returned for another function.
    """
    if callable(getattr(plain, "get_compiler_config", None)) and hasattr(made, "get_compiler_config"):
        object.__setattr__(made, "get_compiler_config", plain.get_compiler_config)


def asked_while_tracing(question: _Function) -> _Function:
    """A function or method that Dynamo calls when it traces, and whose answer it takes for a constant."""
    constant: _Function = torch._dynamo.assume_constant_result(question)
    return constant


def outside_of_graphs(function: _Function, left_out: Callable[..., bool]) -> _Function:
    """A function that Dynamo leaves to Python, for which it breaks the graph that it is tracing.

    Args:
        left_out: Traced with the function's arguments before Dynamo breaks a graph. If it says so, the function is not
            called at all and gives None.
    """
    called, untraced = _disable(function), _disable(function)

    def traced(*given: Any) -> Any:
        return None if left_out(*given) else untraced(*given)

    substitute_in_graph(called, skip_signature_check=True)(traced)
    hidden: _Function = called
    return hidden


def must_stay_one_graph() -> bool:
    """Whether Dynamo is tracing something that it must not break in parts (``fullgraph=True``)."""
    try:
        tracing_now: Any = InstructionTranslator.current_tx()
    except AttributeError:  # nothing is traced
        return False
    return bool(tracing_now.one_graph or tracing_now.error_on_graph_break)


def in_compiled_backward() -> bool:
    """Whether a backward pass runs that compiled autograd has captured."""
    return bool(compiled_autograd.in_compiled_autograd_region)


def dynamo_control_flow() -> tuple[type[BaseException], ...]:
    """Exceptions that a Dynamo backend raises to steer Dynamo, not because it failed.

    On such an exception Dynamo breaks the graph, or traces the frame anew (``torch/_dynamo/output_graph.py``).
    """
    return (SkipFrame, TensorifyScalarRestartAnalysis, *exceptions_allowed_to_be_fallback)


def dynamo_counters() -> dict[str, Counter[str]]:
    """Dynamo's counters so far.

    ``graph_break`` and ``unimplemented`` count by Dynamo's reasons, of which the recompile limit is one. ``frames``
    counts frames by their state.
    """
    return {name: Counter(counters[name]) for name in ("graph_break", "unimplemented", "frames")}


def dynamo_hides_errors() -> bool:
    """Whether Dynamo runs a function in eager, without raising, if compiling it fails."""
    return bool(torch._dynamo.config.suppress_errors)


def dynamo_restarts() -> tuple[type[BaseException], ...]:
    """Those exceptions of `dynamo_control_flow` after which Dynamo traces the frame anew, to another form of graph."""
    return (TensorifyScalarRestartAnalysis,)


def uses_numpy(gm: fx.GraphModule) -> bool:
    """Whether a graph has torch operators in place of NumPy's functions, which Dynamo traced."""
    wrappers = ("numpy_to_tensor_wrapper", "numpy_method_wrapper", "numpy_operator_wrapper")
    return any(type(node.target).__name__ in wrappers for node in gm.graph.nodes)


def marked_dimensions(tensor: torch.Tensor) -> frozenset[int]:
    """The dimensions that ``torch._dynamo.mark_dynamic`` or ``maybe_mark_dynamic`` was called with."""
    names = ("_dynamo_dynamic_indices", "_dynamo_weak_dynamic_indices")
    return frozenset().union(*(getattr(tensor, name, ()) for name in names))


def dynamo_reset() -> None:
    """Forget everything that was compiled."""
    torch._dynamo.reset()


@contextmanager
def dynamo_captures_data() -> Iterator[None]:
    """Trace operators whose results depend on data, such as ``item()``. By default they break the graph."""
    with torch._dynamo.config.patch(capture_scalar_outputs=True, capture_dynamic_output_shape_ops=True):
        yield


@contextmanager
def dynamo_leaves_draws_to_numpy() -> Iterator[None]:
    """Break graphs at NumPy's random functions; by default Dynamo has torch's generator draw in their place."""
    with torch._dynamo.config.patch(use_numpy_random_stream=True):
        yield


@contextmanager
def dynamo_many_recompilations() -> Iterator[None]:
    """Compile a function anew as often as its inputs need it. By default Dynamo gives up after a few times."""
    with torch._dynamo.config.patch(recompile_limit=1000, accumulated_recompile_limit=10000):
        yield


@contextmanager
def compiling() -> Iterator[None]:
    """Compile outside of Dynamo under its lock, because tracing patches ``nn.Module`` for the whole process."""
    session = getattr(torch.compiler, "_compile_session_context", nullcontext)  # since torch 2.13
    with compile_lock, session():
        yield


def inner_exception(error: BaseException) -> BaseException | None:
    """The compiler's exception inside an exception of Dynamo's; None if Dynamo wrapped nothing."""
    inner = getattr(error, "inner_exception", None)
    return inner if isinstance(inner, BaseException) else None


def causes(error: BaseException, *, suppressed: bool = False) -> Iterator[BaseException]:
    """An exception and its causes, the outermost first.

    Args:
        suppressed: Also those that ``raise ... from`` hides, as Dynamo does with its own.
    """
    pending: list[BaseException | None] = [error]
    seen: set[int] = set()
    while pending:
        cause = pending.pop(0)
        if cause is None or id(cause) in seen:
            continue
        seen.add(id(cause))
        yield cause
        shown = suppressed or not cause.__suppress_context__
        pending += [inner_exception(cause), cause.__cause__, cause.__context__ if shown else None]


def traced_stack(error: BaseException) -> Sequence[FrameSummary]:
    """Where Dynamo was in the user's code when it raised an exception; empty for other exceptions."""
    return getattr(error, "real_stack", None) or ()


def element_source(source: Any, index: int) -> Any:
    """The Dynamo source of a list's element, given the source of the list."""
    return GetItemSource(source, index)


def as_from_dynamo(gm: fx.GraphModule) -> None:
    """Give a copy of Dynamo's graph the marks by which AOT autograd knows such a graph, and its parameters.

    AOT autograd keeps parameters for the backward pass rather than views of them, so the copy is cut where the graph is
    (``_try_get_metadata_from_dynamo`` of ``torch/_functorch/_aot_autograd/frontend_utils.py``). The inputs' sources are
    invented: nothing may evaluate the guards of this compilation.
    """
    if "dynamo_compile_id" in gm.meta and not hasattr(gm, "_param_name_to_source"):
        held = (*gm.named_parameters(remove_duplicate=False), *gm.named_buffers(remove_duplicate=False))
        gm._param_name_to_source = {name: LocalSource(name) for name, _ in held}  # type: ignore[assignment]
        for node in gm.graph.find_nodes(op="placeholder"):
            node._dynamo_source = LocalSource(node.name)


def compile_id() -> str:
    """The identifier of the compilation that runs, as ``"frame/recompilation"``; empty outside of a compilation."""
    compiling = CompileContext.current_compile_id()
    return "" if compiling is None else str(compiling)


def registered_here(name: str) -> Callable[..., Any] | None:
    """The function of a backend that this program registered itself; None for any other backend.

    A fresh process knows the backends of torch, and those that installed packages declare. It does not know this one.
    """
    function = registry._COMPILER_FNS.get(name)
    if function is None or registry._BACKENDS.get(name) is not None:
        return None
    if str(getattr(function, "__module__", "")).startswith("torch."):
        return None
    homes = [module for key, module in sys.modules.items() if key.startswith("torch._dynamo.backends.")]
    return None if any(value is function for home in homes for value in vars(home).values()) else function
