"""Every private torch name that this package uses, in one place: a new torch release is one file's work."""

from __future__ import annotations

import copy
import functools
import logging
import os
import sys
import threading
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any, TypeVar

import sympy
import torch
from torch import fx
from torch._C import DisableTorchFunction, DisableTorchFunctionSubclass
from torch._C import _current_graph_task_id as current_graph_task_id
from torch._C import _DisableTorchDispatch as DisableTorchDispatch
from torch._C import _is_alias_of as is_alias_of  # type: ignore[attr-defined]
from torch._C import _will_engine_execute_node as will_engine_execute_node
from torch._C._autograd import (
    _get_current_graph_task_keep_graph as graph_task_keeps_graph,
)
from torch._C._autograd import (
    _pop_saved_tensors_default_hooks,
    _push_saved_tensors_default_hooks,
    _top_saved_tensors_default_hooks,
)
from torch._C._functorch import get_dynamic_layer_stack_depth, is_functorch_wrapped_tensor
from torch._decomp import core_aten_decompositions, get_decompositions
from torch._dynamo import disable as _disable
from torch._dynamo import maybe_mark_dynamic as mark_dynamic
from torch._dynamo.backends import registry
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.backends.registry import list_backends, lookup_backend
from torch._dynamo.convert_frame import compile_lock
from torch._dynamo.exc import (
    InvalidBackend,
    SkipFrame,
    TensorifyScalarRestartAnalysis,
    exceptions_allowed_to_be_fallback,
)
from torch._dynamo.source import GetItemSource
from torch._dynamo.utils import counters
from torch._functorch.aot_autograd import aot_function, aot_module
from torch._functorch.partitioners import default_partition, min_cut_rematerialization_partition
from torch._guards import CompileContext, TracingContext, detect_fake_mode, tracing
from torch._library.simple_registry import singleton as _library_registry
from torch._ops import HigherOrderOperator, OpOverload, OpOverloadPacket, _OpNamespace
from torch._prims_common import clone_preserve_strides
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
    UnsupportedOperatorException,
    disable_fake_tensor_cache,
)
from torch.amp.autocast_mode import _enter_autocast as enter_autocast
from torch.amp.autocast_mode import _exit_autocast as exit_autocast
from torch.autograd import _get_sequence_nr as autograd_sequence_number  # type: ignore[attr-defined]
from torch.autograd import forward_ad
from torch.fx.graph_module import _forward_from_src
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._device import DeviceContext as _DeviceContext
from torch.utils._python_dispatch import (
    TorchDispatchMode,
    is_traceable_wrapper_subclass,
    is_traceable_wrapper_subclass_type,
    transform_subclass,
)
from torch.utils._python_dispatch import _disable_current_modes as disable_current_modes
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_map_only, tree_unflatten
from torch.utils._sympy.interp import sympy_interp
from torch.utils._sympy.printers import PythonPrinter
from torch.utils._sympy.reference import PythonReferenceAnalysis
from torch.utils.checkpoint import _StopRecomputationError as StopRecomputationError

__all__ = [
    "FP32_PRECISIONS",
    "DisableTorchDispatch",
    "DisableTorchFunction",
    "DisableTorchFunctionSubclass",
    "FakeTensor",
    "FakeTensorMode",
    "HigherOrderOperator",
    "InvalidBackend",
    "OpOverload",
    "OpOverloadPacket",
    "StopRecomputationError",
    "StorageWeakRef",
    "TorchDispatchMode",
    "TracingContext",
    "aot_autograd",
    "aot_function",
    "aot_module",
    "autograd_sequence_number",
    "autograd_threads",
    "call_after_backward",
    "catch_backward_error",
    "changed_settings",
    "check_sparse_invariants",
    "clone_preserve_strides",
    "compile_id",
    "compile_lock",
    "compile_trifle",
    "compiling",
    "core_aten_decompositions",
    "current_graph_task_id",
    "custom_op_module",
    "decomposition",
    "default_device",
    "default_partition",
    "default_settings",
    "deferred_asserts",
    "detect_fake_mode",
    "disable_current_modes",
    "disable_fake_tensor_cache",
    "dispatch_modes",
    "dump_code",
    "dynamo_captures_data",
    "dynamo_control_flow",
    "dynamo_counters",
    "dynamo_disable",
    "dynamo_hides_errors",
    "dynamo_many_recompilations",
    "dynamo_reset",
    "dynamo_restarts",
    "element_source",
    "enter_autocast",
    "evaluate_expression",
    "evaluate_number",
    "exit_autocast",
    "fake_errors_unlogged",
    "fake_kernel",
    "fake_refusals",
    "fall_back",
    "find_op_packet",
    "forward_from_source",
    "fp32_precision",
    "fresh_compile_caches",
    "function_modes",
    "get_decompositions",
    "get_dynamic_layer_stack_depth",
    "graph_task_keeps_graph",
    "grouped_mm_functions",
    "has_dispatched",
    "higher_order_kernel",
    "homes_of_operators",
    "inductor_compile_graph",
    "inductor_decompositions",
    "inductor_front",
    "inductor_graph_passes",
    "inductor_mode_options",
    "inductor_passed",
    "inductor_setting_names",
    "inductor_settings",
    "inner_exception",
    "inner_tensors",
    "internal_functions",
    "is_accumulate_grad",
    "is_alias_of",
    "is_composite",
    "is_functorch_wrapped_tensor",
    "is_traceable_wrapper_subclass",
    "is_wrapper_type",
    "is_writing_out",
    "is_zero_tensor",
    "jit_autocast_off",
    "list_backends",
    "lookup_backend",
    "mark_dynamic",
    "min_cut_rematerialization_partition",
    "neg_view",
    "negative_view",
    "no_donated_buffers",
    "operator_names",
    "python_expression",
    "registered_here",
    "registered_operators",
    "registration_file",
    "renew_compile_threads",
    "rewrapped",
    "run_composite",
    "saved_tensor_hooks",
    "saved_tensor_hooks_lifted",
    "set_autograd_threads",
    "set_backend_flag",
    "set_dispatch_modes",
    "set_fp32_precision",
    "set_function_modes",
    "set_inference_mode",
    "set_saved_tensor_hooks",
    "shape_facts",
    "size_hint",
    "sparse_invariants_checked",
    "storage_again",
    "storage_identity",
    "storage_users",
    "tracing",
    "transforms_unharmed",
    "tree_flatten",
    "tree_leaves",
    "tree_map",
    "tree_map_only",
    "tree_unflatten",
    "triton_kernel",
    "uses_numpy",
    "warm_inductor",
    "will_engine_execute_node",
    "without_compile_caches",
    "zero_tensor_like",
]

_Function = TypeVar("_Function", bound=Callable[..., Any])


def dynamo_disable(function: _Function) -> _Function:
    """A function that Dynamo neither traces nor compiles, and nothing that it calls."""
    disabled: _Function = _disable(function)
    return disabled


def dynamo_control_flow() -> tuple[type[BaseException], ...]:
    """Exceptions that a Dynamo backend raises to steer Dynamo, not because it failed.

    Dynamo answers with a graph break, or traces the frame anew (``torch/_dynamo/output_graph.py``).
    """
    return (SkipFrame, TensorifyScalarRestartAnalysis, *exceptions_allowed_to_be_fallback)


def dynamo_counters() -> dict[str, Counter[str]]:
    """What Dynamo has counted so far.

    ``graph_break`` and ``unimplemented`` (which has the recompile limit too) by its words, ``frames`` by what became of
    them.
    """
    return {name: Counter(counters[name]) for name in ("graph_break", "unimplemented", "frames")}


def dynamo_hides_errors() -> bool:
    """Whether Dynamo runs a function in eager, without raising, where it fails itself."""
    return bool(torch._dynamo.config.suppress_errors)


def dynamo_restarts() -> tuple[type[BaseException], ...]:
    """Those of `dynamo_control_flow` after which Dynamo traces the frame anew, to another form of the same graph."""
    return (TensorifyScalarRestartAnalysis,)


def uses_numpy(gm: fx.GraphModule) -> bool:
    """Whether Dynamo traced NumPy's functions into a graph, as torch operators in their place."""
    wrappers = ("numpy_to_tensor_wrapper", "numpy_method_wrapper", "numpy_operator_wrapper")
    return any(type(node.target).__name__ in wrappers for node in gm.graph.nodes)


def fake_refusals() -> tuple[type[Exception], ...]:
    """What fake tensors raise for an operator whose sizes or results depend on data."""
    return (DataDependentOutputException, DynamicOutputShapeException, UnsupportedOperatorException)


@contextmanager
def fake_errors_unlogged() -> Iterator[None]:
    """Where sizes that do not fit are expected: torch logs what a fake kernel raises, with a traceback."""
    logger = logging.getLogger("torch._subclasses.fake_tensor")
    before = logger.disabled
    logger.disabled = True
    try:
        yield
    finally:
        logger.disabled = before


def dynamo_reset() -> None:
    """Forget everything that was compiled."""
    torch._dynamo.reset()


@contextmanager
def dynamo_captures_data() -> Iterator[None]:
    """Take operators whose results depend on data, such as ``item()``, into graphs; by default they break the graph."""
    with torch._dynamo.config.patch(capture_scalar_outputs=True, capture_dynamic_output_shape_ops=True):
        yield


@contextmanager
def dynamo_many_recompilations() -> Iterator[None]:
    """Compile a function anew as often as its inputs ask for it; by default Dynamo gives up after a few times."""
    with torch._dynamo.config.patch(recompile_limit=1000, accumulated_recompile_limit=10000):
        yield


def catch_backward_error(
    node: Any,
    handler: Callable[[Exception, Sequence[Any]], Mapping[int, torch.Tensor | None] | None],
    again: Callable[[Exception], AbstractContextManager[Any] | None] = lambda _error: None,
) -> None:
    """Call a handler when the backward of AOT autograd's node raises, before the exception goes on.

    Where the backward graph could not be compiled, which happens when it is first needed, that is tried again under
    what ``again`` gives for the exception, unless that is None.

    The handler gets the exception and the gradients that arrived at the node. Where it gives gradients, by their place
    in the node's ``next_functions``, those are used and nothing is raised.

    Such a node is an instance of a class that AOT autograd makes for one compiled graph
    (``torch/_functorch/_aot_autograd/runtime_wrappers.py``). Other nodes are left alone.
    """
    function = getattr(type(node), "_forward_cls", None)
    if function is None or function.__name__ != "CompiledFunction":
        return
    node.checked_backend_on_error = handler
    node.checked_backend_again = again
    original = function.backward
    if getattr(original, "checked_backend", False):
        return

    boxed = bool(getattr(function, "boxed_grads_call", False))  # since torch 2.13: one list, emptied as it is used

    @dynamo_disable
    def backward(ctx: Any, *gradients: Any) -> Any:
        arrived = tuple(gradients[0] if boxed else gradients)
        try:
            return original(ctx, *gradients)
        except Exception as error:
            on_error = getattr(ctx, "checked_backend_on_error", None)
            instead = None if on_error is None else on_error(error, arrived)
            if instead is None:
                raise
            return _in_places(ctx, instead)

    backward.checked_backend = True  # type: ignore[attr-defined]
    function.backward = staticmethod(backward)
    function._backward_impl = staticmethod(_compiling_again(function, function._backward_impl))


def _compiling_again(function: Any, original: Callable[[Any, list[Any]], Any]) -> Callable[[Any, list[Any]], Any]:
    """The backward of AOT autograd's class of nodes, whose compilation is tried once more."""

    def run(ctx: Any, args: list[Any]) -> Any:
        count = len(args)
        try:
            return original(ctx, args)
        except Exception as error:
            # the list is emptied as soon as the compiled graph runs
            uncompiled = function.compiled_bw is None and len(args) == count
            again = getattr(ctx, "checked_backend_again", None)
            under = again(error) if uncompiled and again is not None else None
            if under is None:
                raise
            try:
                with under:
                    return original(ctx, args)
            except Exception:  # what it raised at first is what is told
                raise error from None

    return run


def _in_places(ctx: Any, gradients: Mapping[int, torch.Tensor | None]) -> tuple[torch.Tensor | None, ...]:
    """Gradients for all arguments of a node, tensors or not."""
    wanted = iter([number for number, (target, _) in enumerate(ctx.next_functions) if target is not None])
    return tuple(gradients.get(next(wanted)) if needed else None for needed in ctx.needs_input_grad)


@contextmanager
def compiling() -> Iterator[None]:
    """Compile outside of Dynamo, but one thread at a time as inside: tracing patches ``nn.Module`` for the process."""
    session = getattr(torch.compiler, "_compile_session_context", nullcontext)  # since torch 2.13
    with compile_lock, session():
        yield


@contextmanager
def saved_tensor_hooks_lifted() -> Iterator[None]:
    """Run a block without the user's saved-tensor hooks, which are not to see what a checker saves."""
    lifted = []
    while True:
        top: Any = _top_saved_tensors_default_hooks(False)
        if top is None:
            break
        lifted.append(top)
        _pop_saved_tensors_default_hooks()
    try:
        yield
    finally:
        for pack, unpack in reversed(lifted):
            _push_saved_tensors_default_hooks(pack, unpack)


@contextmanager
def transforms_unharmed() -> Iterator[None]:
    """Leave the function transforms (``vmap``, ``grad``, forward-mode AD) that a block entered and did not leave."""
    depth, dual, level = get_dynamic_layer_stack_depth(), _in_dual_level(), forward_ad._current_level
    try:
        yield
    finally:
        while get_dynamic_layer_stack_depth() > depth:
            _left(torch._C._functorch.peek_interpreter_stack().key())
        if _in_dual_level() and not dual:
            torch._C._exit_dual_level(level=0)
        forward_ad._current_level = level


def _left(transform: Any) -> None:
    """Leave the innermost function transform, of this kind; torch 2.11's own function for that knows not all kinds."""
    functorch: Any = torch._C._functorch
    kinds = functorch.TransformType
    leave = {
        kinds.Vmap: functorch._vmap_decrement_nesting,
        kinds.Grad: functorch._grad_decrement_nesting,
        kinds.Jvp: functorch._jvp_decrement_nesting,
        kinds.Functionalize: functorch._func_decrement_nesting,
    }
    leave[transform]()


def _in_dual_level() -> bool:
    """Whether forward-mode AD is on; its levels do not nest, which is the only way to ask."""
    try:
        level = torch._C._enter_dual_level()
    except RuntimeError:
        return True
    torch._C._exit_dual_level(level=level)
    return False


FP32_PRECISIONS = (
    ("generic", "all"),
    ("cuda", "matmul"),
    ("cuda", "conv"),
    ("cuda", "rnn"),
    ("mkldnn", "matmul"),
    ("mkldnn", "conv"),
    ("mkldnn", "rnn"),
)
"""Where torch keeps how precisely float32 is computed with, the most general first."""


def fp32_precision(backend: str, operation: str) -> str:
    """How precisely a library computes with float32: ``none``, ``ieee``, ``tf32``, ``bf16``."""
    return str(torch._C._get_fp32_precision_getter(backend, operation))


def set_fp32_precision(backend: str, operation: str, precision: str) -> None:
    """Set what `fp32_precision` reads."""
    torch._C._set_fp32_precision_setter(backend, operation, precision)


def default_device() -> torch.device | None:
    """What ``torch.set_default_device`` was given; None where nothing was set."""
    return getattr(getattr(torch._GLOBAL_DEVICE_CONTEXT, "device_context", None), "device", None)


def function_modes() -> tuple[Any, ...]:
    """The active torch function modes, outermost first, but for that of the default device."""
    found = torch.overrides._get_current_function_mode_stack()
    return tuple(mode for mode in found if not isinstance(mode, _DeviceContext))


def set_function_modes(modes: Sequence[Any]) -> None:
    """Leave those torch function modes that are not among these, and enter these that are missing."""
    wanted = [
        *(mode for mode in torch.overrides._get_current_function_mode_stack() if isinstance(mode, _DeviceContext))
    ]
    while torch._C._len_torch_function_stack():
        torch.overrides._pop_mode()
    for mode in (*wanted, *modes):
        torch.overrides._push_mode(mode)


def dispatch_modes() -> tuple[Any, ...]:
    """The active dispatch modes, outermost first."""
    return tuple(torch.utils._python_dispatch._get_current_dispatch_mode_stack())


def set_dispatch_modes(modes: Sequence[Any]) -> None:
    """Leave the dispatch modes that were entered since these were the active ones."""
    while len(dispatch_modes()) > len(modes):
        torch.utils._python_dispatch._pop_mode()


def saved_tensor_hooks() -> Any:
    """The innermost hooks on tensors that autograd saves; None if there are none."""
    return _top_saved_tensors_default_hooks(True)


def set_saved_tensor_hooks(hooks: Any) -> None:
    """Leave the hooks on saved tensors that were entered since these were the innermost ones, or enter these again."""
    while saved_tensor_hooks() not in (None, hooks):
        _pop_saved_tensors_default_hooks()
    if hooks is not None and saved_tensor_hooks() is None:
        _push_saved_tensors_default_hooks(*hooks)


def set_inference_mode(enabled: bool) -> None:
    """Switch inference mode for this thread for good.

    Torch has a guard for that only, which sets the mode back when it dies: so it lives as long as the thread.
    """
    vars(threading.current_thread()).setdefault("checked_backend_modes", []).append(torch._C._InferenceMode(enabled))


def sparse_invariants_checked() -> bool:
    """Whether the indices of sparse tensors are checked when these are made."""
    return bool(torch._C._check_sparse_tensor_invariants())


def check_sparse_invariants(enabled: bool) -> None:
    """Set what `sparse_invariants_checked` reads."""
    torch._C._set_check_sparse_tensor_invariants(enabled)


def inner_exception(error: BaseException) -> BaseException | None:
    """What a compiler raised, where Dynamo wrapped it."""
    inner = getattr(error, "inner_exception", None)
    return inner if isinstance(inner, BaseException) else None


def element_source(source: Any, index: int) -> Any:
    """Where Dynamo gets an element of a list from, given where it gets the list from."""
    return GetItemSource(source, index)


def is_accumulate_grad(target: object) -> bool:
    """Whether a node's target is compiled autograd's operator that adds to a parameter's ``grad``.

    Its arguments are the gradients, the parameter, the parameter's ``grad`` or None, and whether there are hooks.
    """
    module = "torch._dynamo.compiled_autograd.ops"
    return getattr(target, "__name__", "") == "AccumulateGrad" and getattr(target, "__module__", "") == module


def inner_tensors(tensor: torch.Tensor) -> dict[str, torch.Tensor]:
    """The tensors that a wrapper subclass is made of, by name; empty for any other tensor."""
    wrapper: Any = tensor
    if not is_traceable_wrapper_subclass(wrapper):
        return {}
    names, _ = wrapper.__tensor_flatten__()
    return {name: getattr(tensor, name) for name in names}


def is_wrapper_type(kind: type) -> bool:
    """Whether tensors of this type are wrapper subclasses, which run operators on the tensors they are made of."""
    return bool(is_traceable_wrapper_subclass_type(kind))


def rewrapped(tensor: torch.Tensor, change: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
    """A wrapper subclass like the given one, made of changed inner tensors."""
    changed: torch.Tensor = transform_subclass(tensor, lambda _name, inner: change(inner))
    return changed


def neg_view(tensor: torch.Tensor) -> torch.Tensor:
    """The lazily negated view of a tensor."""
    return torch._neg_view(tensor)


def call_after_backward(callback: Callable[[], None]) -> None:
    """Call a function when the backward pass that is running has finished. Its exceptions reach the user's call."""
    torch.autograd.Variable._execution_engine.queue_callback(callback)


def compile_id() -> str:
    """The frame that Dynamo is compiling, as ``"frame/recompilation"``; empty outside of a compilation."""
    compiling = CompileContext.current_compile_id()
    return "" if compiling is None else str(compiling)


def registered_here(name: str) -> Callable[..., Any] | None:
    """The function of a backend that this program registered, which a fresh process does not know by its name.

    Args:
        name: The backend's name. Those of torch, and those that installed packages declare, are known everywhere.
    """
    function = registry._COMPILER_FNS.get(name)
    if function is None or registry._BACKENDS.get(name) is not None:
        return None
    if str(getattr(function, "__module__", "")).startswith("torch."):
        return None
    homes = [module for key, module in sys.modules.items() if key.startswith("torch._dynamo.backends.")]
    return None if any(value is function for home in homes for value in vars(home).values()) else function


def inductor_mode_options(mode: str) -> dict[str, Any]:
    """Inductor's config patches for a ``torch.compile(mode=...)``."""
    from torch._inductor import list_mode_options  # noqa: PLC0415  Inductor is slow to import and often not needed

    return dict(list_mode_options(mode, dynamic=None))


def inductor_front(
    gm: fx.GraphModule, example_inputs: Sequence[Any], inner: Callable[..., Any], patches: Mapping[str, Any]
) -> Callable[..., Any]:
    """Inductor without its back half: graph passes, decompositions and partitioning, then a compiler of one's own.

    AOT autograd's cache is off: it does not know what compiler made an entry.

    Args:
        gm: A Dynamo graph; it may be changed.
        example_inputs: Its inputs.
        inner: Gets each ATen graph and its inputs, with ``is_backward`` and ``is_inference`` by keyword.
        patches: Changes of Inductor's configuration.
    """
    from torch._functorch import config as functorch_config  # noqa: PLC0415  as Inductor below
    from torch._inductor.compile_fx import compile_fx  # noqa: PLC0415  Inductor is slow to import

    with functorch_config.patch(enable_autograd_cache=False):
        compiled: Any = compile_fx(gm, list(example_inputs), inner_compile=inner, config_patches=dict(patches))
    function: Callable[..., Any] = compiled
    return function


def inductor_passed(gm: fx.GraphModule, *, inference: bool, patches: Mapping[str, Any]) -> fx.GraphModule | None:
    """What Inductor's last graph passes, which fuse patterns of operators into one, make of an ATen graph.

    The graph is taken before they let operators write in place, so that it is functional still.

    Args:
        gm: A graph from AOT autograd, with the values that tracing recorded; it is not changed.
        inference: Whether it is the graph of a call without gradients.
        patches: Changes of Inductor's configuration.

    Returns:
        The graph, with recorded values; None where the passes are off.
    """
    from torch._inductor import config  # noqa: PLC0415  Inductor is slow to import and often not needed
    from torch._inductor.compile_fx import _recursive_post_grad_passes, fake_tensor_prop  # noqa: PLC0415
    from torch._inductor.pattern_matcher import stable_topological_sort  # noqa: PLC0415
    from torch._inductor.virtualized import V  # noqa: PLC0415

    taken: list[fx.Graph] = []
    hook = "post_grad_custom_post_pass"
    own = patches.get(hook, getattr(config, hook))  # the user's, which may be what is wrong

    def take(graph: fx.Graph) -> None:
        if callable(own):
            own(graph)
        if graph.owning_module is passed:  # not that of a body of control flow
            taken.append(copy.deepcopy(graph))

    passed = fx.GraphModule(gm, copy.deepcopy(gm.graph))
    examples = [node.meta.get("val") for node in gm.graph.find_nodes(op="placeholder")]
    fake_mode = detect_fake_mode(examples) or FakeTensorMode(allow_non_fake_inputs=True)
    context = TracingContext.try_get() or TracingContext(fake_mode)
    changed = {**patches, hook: take}
    with compiling(), tracing(context), V.set_fake_mode(fake_mode), config.patch(changed), torch.no_grad():
        fake_tensor_prop(passed, examples)
        _recursive_post_grad_passes(passed, is_inference=inference)
        if not taken:
            return None
        [graph] = taken
        stable_topological_sort(graph)
        result = fx.GraphModule(passed, graph)
        fake_tensor_prop(result, examples)
    return result


def set_backend_flag(backend: str, name: str, value: bool) -> None:
    """Set a flag of ``torch.backends``, also after ``torch.backends.disable_global_flags`` forbade it.

    Importing ``torch.testing._internal.common_utils``, as many test suites do, forbids it.

    Args:
        backend: ``cudnn`` or ``mkldnn``.
        name: The flag's name, for instance ``deterministic``.
        value: What it is set to.
    """
    with torch.backends.__allow_nonbracketed_mutation():
        setattr(getattr(torch.backends, backend), name, value)


def autograd_threads() -> bool:
    """Whether backward passes may use threads of their own."""
    return bool(torch._C._is_multithreading_enabled())


def set_autograd_threads(enabled: bool) -> None:
    """Set that, for good: ``torch.autograd.set_multithreading_enabled`` sets it back when it is left."""
    torch._C._set_multithreading_enabled(enabled)


def renew_compile_threads() -> None:
    """Let Inductor start new threads in a forked process; it would wait for ever for those of its parent."""
    module = sys.modules.get("torch._inductor.async_compile")
    if module is not None:
        module.AsyncCompile.pool.cache_clear()
        module.AsyncCompile._ready_future = None


def changed_settings() -> dict[str, dict[str, Any]]:
    """Settings of torch's compilers that are not at their defaults here, by module."""
    from torch._functorch import config as functorch  # noqa: PLC0415  slow to import
    from torch._inductor import config as inductor  # noqa: PLC0415

    modules: tuple[Any, ...] = (torch._dynamo.config, functorch, inductor)
    return {
        module.__name__: {
            name: value
            for name, value in module.get_config_copy().items()
            if module._config[name].alias is None
            and not module._is_default(name)
            and value != module._config[name].default  # it may have been set, and set back
        }
        for module in modules
    }


@contextmanager
def default_settings(names: Mapping[str, Iterable[str]]) -> Iterator[None]:
    """Have these settings, by module, at their defaults for a block."""
    with ExitStack() as stack:
        for module_name, chosen in names.items():
            module: Any = sys.modules[module_name]
            stack.enter_context(module.patch({name: copy.copy(module._config[name].default) for name in chosen}))
        yield


@contextmanager
def inductor_graph_passes(names: list[str]) -> Iterator[None]:
    """Note the graph passes that Inductor runs in a block, by the names that ``config.disabled_passes`` takes.

    Args:
        names: Gets the names, in the order in which the passes run. Seen are the subsystems of graph passes that
            ``CompilerBisector`` knows.
    """
    from torch._inductor.compiler_bisector import CompilerBisector  # noqa: PLC0415  Inductor is slow to import

    bisector: Any = CompilerBisector
    original = vars(bisector)["disable_subsystem"]

    def noting(cls: Any, backend: str, subsystem: str, debug_info: Callable[[], str] | None = None) -> bool:
        if subsystem.endswith("_passes") and debug_info is not None:
            names.append(debug_info())
        return bool(original.__func__(cls, backend, subsystem, debug_info))

    bisector.disable_subsystem = classmethod(noting)
    try:
        yield
    finally:
        bisector.disable_subsystem = original


def fall_back(op: OpOverload) -> None:
    """Let Inductor leave an operator to eager's kernel, in this process, from now on."""
    from torch._inductor import decomposition, lowering  # noqa: PLC0415  Inductor is slow to import

    decomposition.decompositions.pop(op, None)
    decomposition.fast_random_decomps.cache_clear()
    lowering.make_fallback(op, warn=False)


@contextmanager
def lowerings_kept() -> Iterator[None]:
    """Take back what `fall_back` does in a block."""
    from torch._inductor import decomposition, lowering  # noqa: PLC0415  Inductor is slow to import

    tables: tuple[Any, ...] = (
        decomposition.decompositions,
        lowering.lowerings,
        lowering.fallbacks,
        lowering.needs_realized_inputs,
    )
    before = [copy.copy(table) for table in tables]
    try:
        yield
    finally:
        for table, saved in zip(tables, before, strict=True):
            table.clear()
            table.update(saved)
        decomposition.fast_random_decomps.cache_clear()


@functools.cache
def warm_inductor() -> None:
    """Compile a trifle, once, so that processes forked from here need not look for the C++ compiler and the like."""

    def trifle(x: torch.Tensor) -> torch.Tensor:
        return x + 1

    with warnings.catch_warnings(), without_compile_caches(), torch.no_grad(), suppress(Exception):
        warnings.simplefilter("ignore")
        torch.compile(trifle, backend="inductor")(torch.ones(3, 17))


def inductor_settings() -> dict[str, Any]:
    """Inductor's present configuration, by name; nested ones as ``cpp.simdlen``."""
    from torch._inductor import config  # noqa: PLC0415  Inductor is slow to import

    return dict(config.get_config_copy())


def inductor_setting_names() -> frozenset[str]:
    """What Inductor's configuration can be patched by: its settings, and other names for them."""
    from torch._inductor import config  # noqa: PLC0415  Inductor is slow to import

    return frozenset(vars(config)["_config"])


@contextmanager
def without_compile_caches() -> Iterator[None]:
    """Compile everything anew: graphs are cached by what they say, which does not cover a patched compiler.

    C++ kernels stay cached: their key is their whole source and the command that compiles it.
    """
    from torch._functorch import config as functorch  # noqa: PLC0415  slow to import
    from torch._inductor import config as inductor  # noqa: PLC0415

    changes: tuple[tuple[Any, tuple[str, ...]], ...] = (
        (
            inductor,
            (
                "fx_graph_cache",
                "fx_graph_remote_cache",
                "autotune_local_cache",
                "autotune_remote_cache",
                "bundled_autotune_remote_cache",
            ),
        ),
        (functorch, ("enable_autograd_cache", "enable_remote_autograd_cache")),
        (torch._dynamo.config, ("automatic_dynamic_local_pgo", "automatic_dynamic_remote_pgo")),
    )
    with ExitStack() as stack:
        for module, names in changes:
            stack.enter_context(module.patch({name: False for name in names if hasattr(module, name)}))
        yield


@contextmanager
def fresh_compile_caches(folder: Path) -> Iterator[None]:
    """Compile everything anew, kernels too: with this empty folder as cache, and with nothing remembered.

    Remembered are also which vector instructions work here, found out with files of the cache. Precompiled headers are
    not used: they lie in another folder.
    """
    from torch._inductor import config as inductor  # noqa: PLC0415  Inductor is slow to import
    from torch._inductor import cpu_vec_isa  # noqa: PLC0415
    from torch._inductor.utils import clear_inductor_caches  # noqa: PLC0415

    def forget() -> None:
        clear_inductor_caches()
        homes = [kind for kind in vars(cpu_vec_isa).values() if isinstance(kind, type)]
        for home in (cpu_vec_isa, *homes):
            for function in list(vars(home).values()):
                clear = getattr(function, "cache_clear", None)
                if clear is not None:
                    clear()

    places = {"TORCHINDUCTOR_CACHE_DIR": str(folder), "TRITON_CACHE_DIR": str(folder / "triton")}
    before = {name: os.environ.get(name) for name in places}
    forget()
    os.environ.update(places)
    try:
        with without_compile_caches(), inductor.patch({"cpp_cache_precompile_headers": False}):
            yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
        forget()


def compile_trifle() -> None:
    """Compile the least program with Inductor, and run it.

    Raises:
        Exception: Whatever Inductor raises: nothing can be compiled here.
    """
    trifle = fx.symbolic_trace(lambda x: (x + 1,))
    inputs = [torch.ones(3, 17)]
    with warnings.catch_warnings(), compiling(), tracing(None), torch.no_grad(), disable_current_modes():
        warnings.simplefilter("ignore")
        lookup_backend("inductor")(trifle, list(inputs))(*inputs)


@contextmanager
def no_donated_buffers() -> Iterator[None]:
    """Compile a backward graph so that it leaves what the forward graph saved as it is.

    Inductor writes over saved activations that nobody else can see (``torch._functorch.config.donated_buffer``).
    """
    context = TracingContext.try_get()
    metadata: Any = None if context is None else context.fw_metadata
    if metadata is None:
        yield
        return
    donated, metadata.bw_donated_idxs = metadata.bw_donated_idxs, None
    # Inductor's cache does not know of donated buffers: it would hand out code that was compiled with them
    tag = f"{torch.compiler.config.cache_key_tag} no donated buffers"
    try:
        with torch.compiler.config.patch(cache_key_tag=tag):  # type: ignore[attr-defined]
            yield
    finally:
        metadata.bw_donated_idxs = donated


def inductor_compile_graph(
    gm: torch.fx.GraphModule, example_inputs: Sequence[Any], *, kind: str, user_outputs: Sequence[int], patches: Any
) -> Callable[[list[Any]], Any]:
    """Compile one AOT graph with Inductor.

    Args:
        gm: The graph; Inductor changes it.
        example_inputs: Its inputs.
        kind: ``forward``, ``backward`` or ``inference``.
        user_outputs: Places of the outputs whose strides must be as traced.
        patches: Inductor's config patches.

    Returns:
        A boxed callable.
    """
    from torch._inductor import config  # noqa: PLC0415  Inductor is slow to import and often not needed
    from torch._inductor.compile_fx import compile_fx_inner  # noqa: PLC0415
    from torch._inductor.virtualized import V  # noqa: PLC0415

    (output,) = gm.graph.find_nodes(op="output")
    output.meta["user_visible_output_idxs"] = list(user_outputs)
    fake_mode = detect_fake_mode(example_inputs) or FakeTensorMode(allow_non_fake_inputs=True)
    context = TracingContext.try_get() or TracingContext(fake_mode)
    with compiling(), tracing(context), V.set_fake_mode(fake_mode), config.patch(patches):
        compiled: Callable[[list[Any]], Any] = compile_fx_inner(
            gm, list(example_inputs), is_backward=kind == "backward", is_inference=kind == "inference"
        )
    return compiled


def inductor_decompositions() -> dict[Any, Callable[..., Any]]:
    """A copy of the decomposition table that Inductor uses under its present configuration."""
    from torch._inductor.decomposition import select_decomp_table  # noqa: PLC0415  Inductor is slow to import

    return dict(select_decomp_table())


@contextmanager
def jit_autocast_off() -> Iterator[None]:
    """Keep TorchScript's own autocast pass out of graphs that were traced with autocast already applied."""
    before = torch._C._jit_set_autocast_mode(False)
    try:
        yield
    finally:
        torch._C._jit_set_autocast_mode(before)


def evaluate_expression(expression: sympy.Expr, values: Mapping[sympy.Symbol, int]) -> int:
    """The value of a symbolic size, in plain Python integers (no sympy simplification).

    Raises:
        KeyError: A symbol of the expression has no value.
    """
    return int(sympy_interp(PythonReferenceAnalysis, dict(values), expression))


def evaluate_number(expression: sympy.Basic, values: Mapping[sympy.Symbol, float]) -> int | float | bool:
    """The value of a symbolic number: an integer where it must be one, else a float or a bool.

    Raises:
        Exception: A symbol of the expression has no value, or torch's interpreter lacks one of its functions.
    """
    value = sympy_interp(PythonReferenceAnalysis, dict(values), expression)
    if expression.is_integer:
        return int(value)
    return bool(value) if isinstance(value, bool) or getattr(value, "is_Boolean", False) else float(value)


# Of devices; nested and sparse tensors have kernels of their own for operators that are compositions otherwise.
_DEVICE_KEYS = ("CPU", "CUDA", "XPU", "MPS", "HPU", "MTIA", "PrivateUse1")


def is_composite(op: OpOverload) -> bool:
    """Whether an operator is only a composition of others, which run in its place (visible under inference mode)."""
    # Not op._can_decompose(): that also finds decompositions written in Python, which eager never runs. And some
    # compositions are for devices without a kernel (silu_backward): others run their own, which rounds otherwise.
    has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key
    if not has_kernel(op.name(), "CompositeImplicitAutograd"):
        return False
    return not any(has_kernel(op.name(), key) for key in _DEVICE_KEYS)


def run_composite(op: OpOverload, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """Run a composite operator's own kernel, so that modes see the operators that it is made of."""
    return op._op_dk(torch._C.DispatchKey.CompositeImplicitAutograd, *args, **kwargs)


@functools.cache  # torch searches all its operators each time
def decomposition(op: OpOverload) -> Callable[..., Any]:
    """What torch makes of an operator where it is decomposed.

    Raises:
        KeyError: It has no decomposition.
    """
    made: Callable[..., Any] = get_decompositions([op])[op]
    return made


def grouped_mm_functions() -> tuple[Callable[..., Any], ...]:
    """The ways in which a graph can ask for a grouped matrix product."""
    op = torch.ops.aten._grouped_mm
    return torch._grouped_mm, torch.nn.functional.grouped_mm, op, op.default


def higher_order_kernel(op: HigherOrderOperator) -> Callable[..., Any] | None:
    """The eager implementation of a higher-order operator, which calls its bodies as Python; None if it has none."""
    kernel = op.py_kernels.get(torch._C.DispatchKey.CompositeExplicitAutograd)
    return kernel if callable(kernel) else None


def negative_view(tensor: torch.Tensor) -> torch.Tensor:
    """A view of a tensor with its negative bit flipped."""
    return torch._neg_view(tensor)


def is_zero_tensor(tensor: torch.Tensor) -> bool:
    """Whether torch keeps a tensor as a zero without memory, as ``sgn``'s gradient (``ZeroTensorFallback.cpp``)."""
    return torch._C._dispatch_keys(tensor).has(torch._C.DispatchKey.ZeroTensor)


def storage_users(reference: StorageWeakRef) -> int:
    """How many tensors and other owners a storage has that is known by a weak reference; 0 if it is gone."""
    storage = torch.UntypedStorage._new_with_weak_ptr(reference.cdata)
    return 0 if storage is None else int(torch._C._storage_Use_Count(storage._cdata)) - 1  # less the one made here


def storage_again(reference: StorageWeakRef) -> torch.UntypedStorage | None:
    """A storage that is known by a weak reference; None if it is gone."""
    storage: torch.UntypedStorage | None = torch.UntypedStorage._new_with_weak_ptr(reference.cdata)
    return storage


def zero_tensor_like(tensor: torch.Tensor) -> torch.Tensor:
    """Another of the kind of `is_zero_tensor`; a leaf."""
    zeros = torch._efficientzerotensor(tensor.shape, dtype=tensor.dtype, device=tensor.device)
    return (zeros.conj() if tensor.is_conj() else zeros).requires_grad_(tensor.requires_grad)


def storage_identity(tensor: torch.Tensor) -> int:
    """What two tensors have in common that share memory; valid while the storage lives."""
    return int(tensor.untyped_storage()._cdata)


def forward_from_source(source: str, names: Mapping[str, Any]) -> Callable[..., Any]:
    """Compile the source of a function ``forward`` as FX compiles a graph's own code.

    FX keeps the source for tracebacks, and knows no other input than what was generated from a graph in memory.

    Args:
        source: Defines ``forward``.
        names: What the source calls by name.
    """
    function: Callable[..., Any] = _forward_from_src(source, dict(names))
    return function


def python_expression(expression: sympy.Basic) -> str:
    """A symbolic size as Python over plain numbers; names of symbols are variables, ``math`` is the module.

    Raises:
        Exception: The expression has a function that torch's printer does not know.
    """
    text = str(PythonPrinter().doprint(expression))
    return text.replace("torch.sym_float(", "float(").replace("torch._sym_sqrt(", "math.sqrt(")


def deferred_asserts(shape_env: Any) -> list[tuple[sympy.Basic, str]]:
    """What a trace took for granted of sizes that depend on data: each condition and its message."""
    found = getattr(shape_env, "deferred_runtime_asserts", None) or {}
    return [(check.expr, str(check.msg)) for checks in found.values() for check in checks]


def fake_kernel(op: OpOverload) -> tuple[Callable[..., Any] | None, str]:
    """The Python function that computes an operator's metadata, and what kind of function it is.

    Returns:
        The function, None where it is written in C++; and ``register_fake``, ``meta``, ``decomposition`` or ``C++``.
    """
    find = getattr(_library_registry, "get", None) or _library_registry._data.get  # no ``get`` before torch 2.12
    entry = find(op.name())
    kernel = None if entry is None else entry.fake_impl.kernel
    if kernel is not None:
        return _registered(kernel.func), "register_fake"
    function = op.py_kernels.get(torch._C.DispatchKey.Meta)
    if not callable(function):
        function = torch._decomp.meta_table.get(op)
    if callable(function):
        return function, "meta"
    function = torch._decomp.decomposition_table.get(op)
    if callable(function):
        return function, "decomposition"
    return None, "C++"


def _registered(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function that somebody registered, without the functions of ``torch.library`` around it."""
    while getattr(function, "__module__", "") in ("torch.library", "torch._library.custom_ops"):
        names = getattr(getattr(function, "__code__", None), "co_freevars", ())
        cells = dict(zip(names, getattr(function, "__closure__", None) or (), strict=False))
        around = [cells[name].cell_contents for name in ("func", "self") if name in cells]
        inner = getattr(around[0], "_abstract_fn", around[0]) if around else None
        if not callable(inner):
            return function
        function = inner
    return function


def find_op_packet(namespace: str, name: str) -> OpOverloadPacket | HigherOrderOperator | None:
    """The registered operator of this name, or None. Other attributes of ``torch.ops`` are not found."""
    home = getattr(torch.ops, namespace, None)
    if namespace != "higher_order" and not isinstance(home, _OpNamespace):
        return None
    packet = getattr(home, name, None)
    return packet if isinstance(packet, (OpOverloadPacket, HigherOrderOperator)) else None


_FUNCTORCH = (
    "_add_batch_dim _grad_decrement_nesting _grad_increment_nesting _jvp_decrement_nesting _jvp_increment_nesting "
    "_remove_batch_dim _unwrap_for_grad _vmap_decrement_nesting _vmap_increment_nesting _wrap_for_grad "
    "set_inplace_requires_grad_allowed"
)
_PREDISPATCH = (
    "_add_batch_dim _enter_dual_level _exit_dual_level _jvp_decrement_nesting _jvp_increment_nesting _make_dual "
    "_remove_batch_dim _unpack_dual _unwrap_for_grad _vmap_decrement_nesting _vmap_increment_nesting "
    "lazy_load_decompositions"
)


def internal_functions() -> dict[str, Callable[..., Any]]:
    """Internal functions that Dynamo writes into graphs, by ``module:name``.

    They set modes, open and close levels of `torch.func`'s transforms, and count calls, nothing else.
    """
    homes: dict[str, tuple[Any, str]] = {
        "torch._C": (
            torch._C,
            "_enter_dual_level _exit_dual_level _log_api_usage_once _set_fwd_grad_enabled _set_grad_enabled",
        ),
        "torch._C._autograd": (
            torch._C._autograd,
            "_get_data_attr _saved_tensors_hooks_disable _saved_tensors_hooks_enable",
        ),
        "torch._C._functorch": (torch._C._functorch, _FUNCTORCH),
        "torch._C._nn": (torch._C._nn, "_parse_to"),
        "torch._functorch.eager_transforms": (
            torch._functorch.eager_transforms,
            "_autograd_grad _set_tensor_requires_grad",
        ),
        "torch._functorch.predispatch": (torch._functorch.predispatch, _PREDISPATCH),
        "torch.amp.autocast_mode": (torch.amp.autocast_mode, "_enter_autocast _exit_autocast"),
        "torch.autograd.forward_ad": (torch.autograd.forward_ad, "_maybe_load_decompositions"),
        "torch.autograd.grad_mode": (torch.autograd.grad_mode, "_enter_inference_mode _exit_inference_mode"),
    }
    return {
        f"{home}:{name}": function
        for home, (module, names) in homes.items()
        for name in names.split()
        if callable(function := getattr(module, name, None))
    }


def homes_of_operators() -> dict[str, tuple[Any, str]]:
    """Where functions lie that are operators of ATen by another name: module or class, and what precedes that name."""
    bindings: Any = torch._C
    return {
        "torch": (torch, ""),
        "torch.Tensor": (torch.Tensor, ""),
        "torch.functional": (torch.functional, ""),
        "torch.nn.functional": (torch.nn.functional, ""),
        "torch.fft": (torch.fft, "fft_"),
        "torch.linalg": (torch.linalg, "linalg_"),
        "torch.special": (torch.special, "special_"),
        "torch._C._nn": (bindings._nn, ""),
        "torch._C._fft": (bindings._fft, ""),
        "torch._C._linalg": (bindings._linalg, ""),
        "torch._C._special": (bindings._special, ""),
    }


def operator_names(namespace: str) -> frozenset[str]:
    """The names of all operators in a namespace of ``torch.ops``, without the namespace."""
    names = (str(schema.name).partition("::") for schema in torch._C._jit_get_all_schemas())
    return frozenset(name for home, _, name in names if home == namespace)


def registered_operators() -> frozenset[str]:
    """The operators that are registered now, as ``namespace::name``."""
    return frozenset(str(name).partition(".")[0] for name in torch._C._dispatch_get_all_op_names())


def has_dispatched(overload: OpOverload) -> bool:
    """Whether an operator is one of the dispatcher's; TorchScript has others, for text, dictionaries and classes."""
    return bool(torch._C._dispatch_has_kernel(overload.name()))


def is_writing_out(overload: OpOverload) -> bool:
    """Whether an operator writes to tensors that it is given for its results, as ``out`` and the like."""
    return any(one.kwarg_only and one.is_write for one in overload._schema.arguments)


def registration_file(name: str) -> str:
    """The source file that registered ``namespace::name``; empty if not known."""
    lines = str(torch._C._dispatch_dump(name)).splitlines()
    found = next((line for line in lines if line.startswith("debug: registered at ")), "")
    return found.removeprefix("debug: registered at ").rpartition(":")[0]


def custom_op_module(name: str) -> str | None:
    """The Python module that registered ``namespace::name`` with ``torch.library.custom_op``; None if not known."""
    definition = torch._library.custom_ops.OPDEFS.get(name)
    return None if definition is None else str(definition._init_fn.__module__)


def triton_kernel(index: int) -> str:
    """``module:name`` of a Triton kernel in a graph, which knows it by its place in a table of the process."""
    kernel = torch._higher_order_ops.triton_kernel_wrap.kernel_side_table.get_kernel(index)
    function = getattr(kernel, "fn", kernel)
    function = getattr(function, "fn", function)  # an autotuner around the kernel
    return f"{getattr(function, '__module__', '?')}:{getattr(function, '__qualname__', '?')}"


def dump_code(graph: torch.fx.Graph) -> tuple[str, dict[str, Any]]:
    """A graph's ``forward(self, <each placeholder>)`` with shapes, strides and source lines, and the names it uses."""
    codegen = graph._codegen
    graph.set_codegen(torch.fx.graph.CodeGen())  # a joint graph's own one takes its inputs in two tuples
    try:
        code = graph.python_code("self", verbose=True, include_stride=True, include_device=True)
    finally:
        graph.set_codegen(codegen)
    return code.src, dict(code.globals)


def size_hint(value: torch.SymInt | torch.SymFloat | torch.SymBool) -> int | float | bool | None:
    """The value that a symbolic size had while tracing; None if it depends on data. Adds no guard."""
    node: Any = value.node
    hint = node.hint if node.has_hint() else None
    return hint if isinstance(hint, (int, float, bool)) else None


def shape_facts(value: Any, symbols: set[str]) -> tuple[dict[str, tuple[int | None, int | None]], list[str]]:
    """What tracing learned of symbols: the range of each, and the relations it relied on.

    Args:
        value: Any symbolic size of the graph.
        symbols: The names of the graph's symbols; relations that are about others too are left out.
    """
    environment: Any = value.node.shape_env
    if environment is None:
        return {}, []

    def bound(end: Any) -> int | None:
        return int(end) if getattr(end, "is_Integer", False) else None

    ranges = {str(symbol): (bound(r.lower), bound(r.upper)) for symbol, r in environment.var_to_range.items()}
    guards = [guard.expr for guard in environment.guards]
    relations = [str(guard) for guard in guards if {str(symbol) for symbol in guard.free_symbols} <= symbols]
    relations += [
        f"Eq({symbol}, {other})"
        for symbol, other in environment.replacements.items()
        if {str(symbol), *(str(symbol) for symbol in other.free_symbols)} <= symbols
    ]
    return {name: ends for name, ends in ranges.items() if name in symbols}, list(dict.fromkeys(relations))
