"""Inductor. It is slow to import, so each function imports it when it is called."""

from __future__ import annotations

import copy
import functools
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
from torch import fx

from checked_backend._torch.caches import without_compile_caches
from checked_backend._torch.dynamo import TracingContext, compiling, lookup_backend, tracing
from checked_backend._torch.fake_tensors import FakeTensorMode, detect_fake_mode
from checked_backend._torch.modes import disable_current_modes
from checked_backend._torch.operators import OpOverload


def aot_inductor(mode: str | None, options: Mapping[str, Any], dynamic: bool | None) -> Callable[..., Any]:
    """The backend that ``torch.compile(options={"use_aoti": True})`` chooses."""
    backend: Callable[..., Any] = torch._TorchCompileAOTInductorWrapper(mode, dict(options), dynamic)
    return backend


def load_compiled_package(path: Path) -> Callable[..., Any]:
    """Load a model that AOTInductor compiled into a package. Its machine code then runs in this process."""
    from torch._inductor import aoti_load_package  # noqa: PLC0415  Inductor is slow to import

    model: Callable[..., Any] = aoti_load_package(str(path))
    return model


def cuda_graph_results(device: torch.device) -> frozenset[int]:
    """Where the results of Inductor's latest CUDA graph begin. The graph writes to them each time it is replayed.

    Torch raises where a program reads such a result after that (``torch/_inductor/cudagraph_trees.py``). The graphs
    themselves hold tensors in that memory.
    """
    trees: Any = sys.modules.get("torch._inductor.cudagraph_trees")
    if trees is None or device.type != "cuda":
        return frozenset()
    try:
        manager = trees.get_manager(device.index, create_if_none_exists=False)
    except AssertionError:  # a thread in which torch has no graphs
        return frozenset()
    node = None if manager is None else manager.current_node
    return frozenset() if node is None else frozenset(ref.data_ptr() for ref in node.outputs_weakrefs if ref)


def inductor_mode_options(mode: str) -> dict[str, Any]:
    """Inductor's config patches for a ``torch.compile(mode=...)``."""
    from torch._inductor import list_mode_options  # noqa: PLC0415  Inductor is slow to import and often not needed

    return dict(list_mode_options(mode, dynamic=None))


def inductor_front(
    gm: fx.GraphModule, example_inputs: Sequence[Any], inner: Callable[..., Any], patches: Mapping[str, Any]
) -> Callable[..., Any]:
    """Compile with the front half of Inductor: its graph passes, decompositions and partitioning, then ``inner``.

    AOT autograd's cache is off, because its key leaves out which compiler made an entry.

    Args:
        gm: A Dynamo graph; it may be changed.
        inner: Gets each ATen graph and its inputs, with ``is_backward`` and ``is_inference`` by keyword.
    """
    from torch._functorch import config as functorch_config  # noqa: PLC0415  as Inductor below
    from torch._inductor.compile_fx import compile_fx  # noqa: PLC0415  Inductor is slow to import

    with functorch_config.patch(enable_autograd_cache=False):
        compiled: Any = compile_fx(gm, list(example_inputs), inner_compile=inner, config_patches=dict(patches))
    function: Callable[..., Any] = compiled
    return function


def inductor_passed(gm: fx.GraphModule, *, inference: bool, patches: Mapping[str, Any]) -> fx.GraphModule | None:
    """Run Inductor's last graph passes, which fuse patterns of operators into one, on a copy of an ATen graph.

    The result is copied before the passes make operators write in place, so it is still functional.

    Args:
        gm: A graph from AOT autograd, with the values that tracing recorded; it is not changed.

    Returns:
        The graph, with recorded values; None if the passes are off.
    """
    from torch._inductor import config  # noqa: PLC0415  Inductor is slow to import and often not needed
    from torch._inductor.compile_fx import _recursive_post_grad_passes, fake_tensor_prop  # noqa: PLC0415
    from torch._inductor.pattern_matcher import stable_topological_sort  # noqa: PLC0415
    from torch._inductor.virtualized import V  # noqa: PLC0415

    taken: list[fx.Graph] = []
    hook = "post_grad_custom_post_pass"
    own = patches.get(hook, getattr(config, hook))  # the user's own pass may be the wrong one, so it runs too

    def take(graph: fx.Graph) -> None:
        if callable(own):
            own(graph)
        if graph.owning_module is passed:  # the passes also run on the bodies of control flow
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


def generate_code_for(threads: int) -> None:
    """Have Inductor, from now on, generate code in this process for so many threads, whatever number runs it."""
    torch.get_num_threads = lambda: threads


def renew_compile_threads() -> None:
    """Make Inductor start new threads in a forked process. It would wait for ever for the threads of its parent."""
    module = sys.modules.get("torch._inductor.async_compile")
    if module is not None:
        module.AsyncCompile.pool.cache_clear()
        module.AsyncCompile._ready_future = None


@contextmanager
def inductor_graph_passes(passes: dict[str, list[str]]) -> Iterator[None]:
    """Note the graph passes that Inductor runs in a block, by the names that ``config.disabled_passes`` takes.

    Args:
        passes: Gets the names, in the order in which the passes run, each with the patterns that it replaced. Passes of
            subsystems that ``CompilerBisector`` does not know are missing.
    """
    from torch._inductor import pattern_matcher  # noqa: PLC0415  Inductor is slow to import
    from torch._inductor.compiler_bisector import CompilerBisector  # noqa: PLC0415

    bisector: Any = CompilerBisector
    disable = vars(bisector)["disable_subsystem"]
    latest: list[str] = []  # the patterns of the pass that runs

    def noting(cls: Any, backend: str, subsystem: str, debug_info: Callable[[], str] | None = None) -> bool:
        nonlocal latest
        if subsystem.endswith("_passes") and debug_info is not None:
            latest = passes.setdefault(debug_info(), [])
        return bool(disable.__func__(cls, backend, subsystem, debug_info))

    def noting_patterns(apply: Callable[..., None]) -> Callable[..., None]:
        def applied(entry: Any, *given: Any) -> None:
            name = getattr(entry, "pattern_name", None) or getattr(getattr(entry, "handler", None), "__name__", None)
            if name and name not in latest:
                latest.append(name)
            apply(entry, *given)

        return applied

    kinds = ("LoweringPatternEntry", "GraphPatternEntry", "ReplacementPatternEntry")
    with ExitStack() as stack:
        stack.callback(setattr, bisector, "disable_subsystem", disable)
        bisector.disable_subsystem = classmethod(noting)
        for kind in (getattr(pattern_matcher, name) for name in kinds):
            stack.callback(setattr, kind, "apply", kind.apply)
            kind.apply = noting_patterns(kind.apply)
        yield


def is_lowered(op: OpOverload) -> bool:
    """Whether Inductor can generate code for an operator itself, not only for the operators that it is made of."""
    from torch._inductor import lowering  # noqa: PLC0415  Inductor is slow to import

    return op in lowering.lowerings


EAGERS_KERNEL = "fallback_to_eager"
"""The annotation of a node (``torch.fx.traceback.annotate``) for which Inductor calls eager's kernel."""


def heeds_annotations() -> bool:
    """Whether Inductor heeds `EAGERS_KERNEL`, as it does from torch 2.13 on."""
    from torch._inductor.graph import GraphLowering  # noqa: PLC0415  Inductor is slow to import

    return EAGERS_KERNEL in GraphLowering.call_function.__code__.co_consts


def fall_back(op: OpOverload) -> None:
    """Make Inductor call eager's kernel for an operator, in this process, from now on."""
    from torch._inductor import decomposition, lowering  # noqa: PLC0415  Inductor is slow to import

    decomposition.decompositions.pop(op, None)
    decomposition.fast_random_decomps.cache_clear()
    lowering.make_fallback(op, warn=False)


@contextmanager
def lowerings_kept() -> Iterator[None]:
    """Undo every `fall_back` of a block at its end."""
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
    """Compile a trifle, once. Processes forked from here then need not search for the C++ compiler again."""
    with without_compile_caches(), suppress(Exception):
        compile_trifle()


def inductor_settings() -> dict[str, Any]:
    """Inductor's present configuration, by name; nested ones as ``cpp.simdlen``."""
    from torch._inductor import config  # noqa: PLC0415  Inductor is slow to import

    return dict(config.get_config_copy())


def inductor_setting_names() -> frozenset[str]:
    """The names by which Inductor's configuration can be patched: its settings and their aliases."""
    from torch._inductor import config  # noqa: PLC0415  Inductor is slow to import

    return frozenset(vars(config)["_config"])


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


def inductor_compile_graph(
    gm: torch.fx.GraphModule, example_inputs: Sequence[Any], *, kind: str, user_outputs: Sequence[int], patches: Any
) -> Callable[[list[Any]], Any]:
    """Compile one AOT graph with Inductor.

    Args:
        kind: ``forward``, ``backward`` or ``inference``.
        user_outputs: Places of the outputs whose strides must be as traced.

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
