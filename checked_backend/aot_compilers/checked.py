"""Check one AOT compiler's graphs against the same graphs run eagerly."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import Any

from torch import fx

from checked_backend._torch.aot import no_donated_buffers
from checked_backend._torch.autograd import CallersContext
from checked_backend._torch.dynamo import dynamo_control_flow
from checked_backend.aot.boxed import AotCompiler, BoxedCallable, boxed
from checked_backend.aot_compilers.graph_kind import graph_info
from checked_backend.aot_compilers.inductor import inductor
from checked_backend.aot_compilers.plain import interpret, nop, print_graph, torchscript
from checked_backend.errors import CandidateError, OptionError
from checked_backend.options import CheckOptions, parse_options
from checked_backend.regions.build import build_region

_NAMED = (inductor, interpret, nop, print_graph, torchscript)
_BY_NAME: Mapping[str, AotCompiler] = MappingProxyType({compiler.__name__: compiler for compiler in _NAMED})


def checked(compiler: AotCompiler | str, **options: Any) -> AotCompiler:
    """A compiler that checks another AOT compiler: each of its graphs against the same graph run eagerly.

    Use it as forward, backward and inference compiler alike. A graph is checked on every call, with its real inputs:
    its outputs, the values that it saves for the backward graph, the inputs that it changes, and for a backward graph
    its gradients. The program gets the results of the compiler's code. AOT autograd itself is not checked, because both
    sides run the graph that it made; the backend ``numcheck`` and `check` also check AOT autograd.

    Args:
        compiler: ``(gm, example_inputs) -> callable``, boxed or not, or one of the names ``inductor``, ``interpret``,
            ``nop``, ``print_graph``, ``torchscript``. Inductor compiles with ``fallback_random=True``, so that it can
            draw eager's random numbers.
        options: The options of the backend ``numcheck`` that concern a single graph: ``on_divergence``, ``every``,
            ``budget``, ``ignore``, ``report_dir``, and for Inductor ``compiler_options``.

    Returns:
        The checking compiler. Its callables raise `DivergenceError` at a finding that fails, or do what
        ``on_divergence`` says; `collect` gathers what they find.

    Raises:
        OptionError: An unknown compiler, an unknown option or a bad value.
    """
    refused = sorted({"compiler", "gradients", "reference", "dump", "dump_values"} & options.keys())
    if refused:
        raise OptionError(f"checked: option {refused[0]!r} is for a backend, which sees gradients; this checks graphs.")
    found = _BY_NAME.get(compiler) if isinstance(compiler, str) else compiler
    if not callable(found):
        raise OptionError(f"checked: compiler got {compiler!r}. Valid: {', '.join(sorted(_BY_NAME))}, or a callable.")
    patches = options.pop("compiler_options", {})
    if found is inductor:
        found = partial(inductor, **{"fallback_random": True, **patches})
    elif patches:
        raise OptionError("checked: option 'compiler_options' is Inductor's, and the compiler is another one.")
    candidate = partial(_candidate, found)
    parsed = parse_options(CheckOptions, "checked", {**options, "compiler": candidate, "gradients": False})
    indices, context = itertools.count(), CallersContext()

    def compile_graph(gm: fx.GraphModule, example_inputs: Sequence[Any], /) -> BoxedCallable:
        info = graph_info(gm, next(indices))
        region = build_region(gm, example_inputs, parsed, None, info=info)

        def run(args: list[Any]) -> Any:
            values = list(args)
            args.clear()
            if info.graph == "backward":
                return context.run(region, *values)
            context.called()
            return region(*values)

        return boxed(run)

    return compile_graph


def _candidate(compiler: AotCompiler, gm: fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
    """Compile with an AOT compiler, and make its result callable like a region."""
    try:
        with no_donated_buffers():  # the saved values are needed again, for control runs
            compiled = compiler(gm, list(example_inputs))
    except dynamo_control_flow() as error:  # these exceptions steer Dynamo, and there may be no Dynamo here
        raise CandidateError(f"{type(error).__name__}: {error}") from error
    if not getattr(compiled, "_boxed_call", False):
        return compiled

    def run(*args: Any) -> Any:
        return compiled(list(args))

    return run
