"""Run AOT autograd over a Dynamo graph."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from torch import fx

from checked_backend._torch.aot import aot_autograd
from checked_backend._torch.autograd import CallersContext
from checked_backend.aot.boxed import AotCompiler, BoxedCallable, boxed
from checked_backend.aot.decompositions import decomposition_table
from checked_backend.aot.partition import partition_function
from checked_backend.options import AotOptions

JointObserver = Callable[[fx.GraphModule, Sequence[Any]], None]


def compile_with(
    gm: fx.GraphModule,
    example_inputs: Sequence[Any],
    *,
    options: AotOptions,
    fw_compiler: AotCompiler,
    bw_compiler: AotCompiler | None = None,
    inference_compiler: AotCompiler | None = None,
    on_joint: JointObserver | None = None,
) -> Callable[..., Any]:
    """Trace forward and backward of a Dynamo graph and compile each part.

    Args:
        bw_compiler: Compiles backward graphs; ``fw_compiler`` if None.
        inference_compiler: Compiles graphs traced without gradients; ``fw_compiler`` if None.
        on_joint: Called with the joint graph and its inputs before it is split.

    Returns:
        A callable with the signature of ``gm``.
    """
    partition = partition_function(options.partition)
    context = CallersContext()
    compile_backward = bw_compiler or fw_compiler

    def backward_compiler(graph: fx.GraphModule, inputs: Sequence[Any], /) -> BoxedCallable:
        return boxed(partial(context.run, compile_backward(graph, inputs)))

    def observed_partition(joint: fx.GraphModule, joint_inputs: Sequence[Any], **kwargs: Any) -> Any:
        if on_joint is not None:
            on_joint(joint, joint_inputs)
        return partition(joint, joint_inputs, **kwargs)

    # a new AotAutograd each time: it stores wrapped compilers in itself
    backend = aot_autograd(
        fw_compiler=fw_compiler,
        bw_compiler=backward_compiler,
        inference_compiler=inference_compiler or fw_compiler,
        partition_fn=partition if on_joint is None else observed_partition,
        decompositions=decomposition_table(options.decompositions),
    )
    compiled: Callable[..., Any] = backend(gm, example_inputs)

    def run(*args: Any) -> Any:
        context.called()
        return compiled(*args)

    return run
