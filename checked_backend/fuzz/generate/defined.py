"""Run a program in eager as long as torch defines what it computes; and the same program on other values.

What torch leaves open is no program, because compiled code may do anything with it.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from checked_backend.errors import FuzzError
from checked_backend.fuzz.build import dtype_name, run_call, run_eager, same_value
from checked_backend.fuzz.program import DTYPES, Constant, FuzzProgram, Ref, Statement, written
from checked_backend.random_state import random_untouched

MOST_ELEMENTS = 4096
"""The most elements of a value."""

_OTHER = 1_000_003


def run_defined(program: FuzzProgram) -> list[Any]:
    """The values of a program in eager.

    Raises:
        Exception: Eager refuses it, torch leaves a result open, or it is one that programs cannot have.
    """
    return run_eager(program, partial(run_defined_call, gradients=program.gradients))


def run_defined_call(call: Statement, known: Sequence[Any], *, gradients: bool) -> Any:
    """Run one call in eager, given all earlier values; it raises as `run_defined` does."""
    with warnings.catch_warnings(), torch.set_grad_enabled(gradients):
        warnings.simplefilter("ignore")
        if is_undefined(call, known):
            raise FuzzError(f"{call.op}: not defined")
        value = run_call(call, known)
    if call.op != "setitem" and not is_usable(value):
        raise FuzzError(f"{call.op}: too large")
    return value


def is_usable(value: Any) -> bool:
    """Whether a program may have this value: a small tensor of a known dtype, or a few of them."""
    if isinstance(value, torch.Tensor):
        return value.layout is torch.strided and value.numel() <= MOST_ELEMENTS and dtype_name(value) in DTYPES
    return isinstance(value, tuple | list) and bool(value) and len(value) < 20 and all(map(is_usable, value))


def on_other_values(program: FuzzProgram) -> FuzzProgram:
    """The same program on other values; where torch would not define the result, on its own integers, or as it is."""
    for dtypes in (DTYPES, [name for name in DTYPES if name.startswith(("float", "bfloat", "complex"))]):
        inputs = tuple(
            replace(given, seed=given.seed + _OTHER) if given.dtype in dtypes else given for given in program.inputs
        )
        other = replace(program, inputs=inputs)
        if inputs != program.inputs and _is_defined(other):
            return other
    return program


def _is_defined(program: FuzzProgram) -> bool:
    try:
        with random_untouched():
            torch.manual_seed(0)
            run_defined(program)
            return runs_alike(program)
    except Exception:  # whatever torch raises: eager refuses these values
        return False


def runs_alike(program: FuzzProgram) -> bool:
    """Whether eager runs a program, and gives the same twice; forward, and backward if it is differentiated."""
    try:
        with warnings.catch_warnings(), torch.random.fork_rng(devices=[]):
            warnings.simplefilter("ignore")
            first, second = (_results(program) for _ in range(2))
    except Exception:  # whatever torch raises: it is no program
        return False
    return len(first) == len(second) and all(map(same_value, first, second))


def _results(program: FuzzProgram) -> list[Any]:
    torch.manual_seed(0)
    with torch.set_grad_enabled(program.gradients):
        values = run_eager(program)
        results = [values[place] for place in program.returns]
        if not program.gradients:
            return results + values[: len(program.inputs)]
        wanted = [value for value in results if isinstance(value, torch.Tensor) and value.requires_grad]
        if not wanted:
            raise RuntimeError("nothing to differentiate")
        torch.autograd.backward(wanted, [torch.ones_like(value) for value in wanted])
    grads = [value.grad for value in values[: len(program.inputs)] if value.grad is not None]
    return [*results, *values[: len(program.inputs)], *grads]


UNDEFINED_OPS = frozenset(
    {
        *("sort", "argsort", "topk", "kthvalue", "median", "nanmedian", "mode", "msort"),  # which of equal elements
        *("svd", "svd_lowrank", "pca_lowrank", "geqrf", "qr", "lobpcg", "ormqr", "pinverse"),  # signs of vectors
        *("multinomial", "rrelu", "rrelu_", "alpha_dropout", "feature_alpha_dropout", "feature_dropout"),
        # eager's gradient of the last is wrong: https://github.com/pytorch/pytorch/pull/77128
        *("as_strided", "as_strided_", "as_strided_copy", "put", "put_", "as_strided_scatter"),
        *("histc", "bincount", "nonzero", "unique", "unique_consecutive"),
        *("masked_select", "argwhere", "nonzero_static", "item", "tolist", "to_sparse", "equal", "allclose"),
        *("view_as_real", "fractional_max_pool2d", "fractional_max_pool3d", "segment_reduce", "narrow_copy"),
        *("unsafe_split", "unsafe_split_with_sizes", "unsafe_chunk"),  # whether they share memory is left open
        *("retain_grad", "detach_", "requires_grad_", "rename", "rename_", "refine_names", "sparse_mask"),
    }
)
"""Operations that are left out by name: ties, signs and memory that torch leaves open, or sizes that depend on data."""

_LINALG = frozenset(
    {"norm", "vector_norm", "matrix_norm", "cross", "vecdot", "multi_dot", "diagonal", "vander", "matmul"}
)
_SHIFTS = ("<<", ">>", "shift")
_TO_INTEGERS: dict[str, torch.dtype] = {
    "long": torch.int64,
    "int": torch.int32,
    "short": torch.int16,
    "char": torch.int8,
    "byte": torch.uint8,
}
_WRITES = ("setitem", "Tensor.copy_", "Tensor.index_put_", "Tensor.masked_scatter_")
_DUPLICATES = ("scatter", "index_copy", "index_put", "index_fill", "put_", "take_along_dim")


def draws(op: str) -> bool:
    """Whether an operation draws random numbers."""
    return any(word in op for word in ("rand", "bernoulli", "dropout", "normal"))


def is_undefined(call: Statement, values: Sequence[Any]) -> bool:
    """Whether torch leaves open what a call gives."""
    own = call.op.rpartition(".")[2]
    if own in UNDEFINED_OPS or (call.op.startswith("torch.linalg.") and own not in _LINALG):
        return True
    if own == "embedding_bag" and isinstance(call.kwargs.get("offsets"), Ref):
        return True  # random offsets: eager reads beyond the indices
    target = written(call)
    if target is not None and is_overlapping(values[target.value]):
        return True  # torch refuses most of these; in the others the order of writes decides
    tensors = [values[arg.value] for arg in call.args if isinstance(arg, Ref)]
    tensors = [tensor for tensor in tensors if isinstance(tensor, torch.Tensor)]
    return (
        _shifts_too_far(call, values, tensors)
        or _converts_what_does_not_fit(call, tensors)
        or _writes_twice(call, tensors)
        or _writes_what_it_reads(call, values)
    )


def is_overlapping(value: Any) -> bool:
    """Whether two elements of a tensor may lie in one place."""
    if not isinstance(value, torch.Tensor):
        return False
    reach = 0
    for step, size in sorted(zip(value.stride(), value.shape, strict=True)):
        if size > 1:
            if step <= reach:
                return True
            reach += step * (size - 1)
    return False


def _shifts_too_far(call: Statement, values: Sequence[Any], tensors: Sequence[torch.Tensor]) -> bool:
    if not any(word in call.op for word in _SHIFTS):
        return False
    by = call.args[1]
    if isinstance(by, Ref) and not isinstance(values[by.value], torch.Tensor):
        by = values[by.value]  # the number of a turn
    widths = [1 if tensor.dtype is torch.bool else 8 * tensor.element_size() for tensor in tensors] or [64]
    if not isinstance(by, Ref):
        return not 0 <= by < min(widths)
    last = tensors[-1]
    if not isinstance(call.args[0], Ref):
        return True
    return bool(((last < 0) | (last >= min(widths))).any()) or bool((tensors[0] < 0).any())


def _converts_what_does_not_fit(call: Statement, tensors: Sequence[torch.Tensor]) -> bool:
    """Whether numbers become integers that cannot hold them."""
    own = call.op.rpartition(".")[2]
    wanted = _TO_INTEGERS.get(own)
    for argument in (*call.args, *call.kwargs.values()):
        if isinstance(argument, Constant) and argument.name.startswith(("int", "uint")):
            wanted = getattr(torch, argument.name)
    sources = tensors
    if call.op in _WRITES and len(tensors) > 1:
        wanted, sources = tensors[0].dtype, tensors[1:]
    if own in ("type_as", "view_as") and len(tensors) > 1:
        wanted, sources = tensors[1].dtype, tensors[:1]
    if wanted is None or wanted.is_floating_point or wanted.is_complex or wanted is torch.bool:
        return False
    limits = torch.iinfo(wanted)
    for tensor in sources:
        if tensor.is_complex():
            return True
        if tensor.is_floating_point():
            wide = tensor.detach().double()
            if not bool(((wide > float(limits.min) - 1.0) & (wide < float(limits.max))).all()):  # NaN is refused, too
                return True
    return False


def _writes_twice(call: Statement, tensors: Sequence[torch.Tensor]) -> bool:
    """Whether an operation may write two values to one place: an index has equal elements."""
    own = call.op.rpartition(".")[2]
    if not own.startswith(_DUPLICATES) or own.startswith(("scatter_add", "scatter_reduce")):
        return False
    dim = call.args[1] if len(call.args) > 1 and isinstance(call.args[1], int) else 0
    for index in tensors[1:]:
        if index.dtype in (torch.int64, torch.int32) and index.numel() > 1:
            ordered = index.sort(dim).values if -index.dim() <= dim < index.dim() else index.flatten().sort().values
            if bool((ordered.diff(dim=dim if ordered.dim() == index.dim() else 0) == 0).any()):
                return True
    return False


def _writes_what_it_reads(call: Statement, values: Sequence[Any]) -> bool:
    """Whether running statistics may share memory with each other, or with what a norm reads: the order decides."""
    if not call.op.endswith(("batch_norm", "instance_norm")):
        return False
    given = [values[ref.value] for ref in (*call.args, *call.kwargs.values()) if isinstance(ref, Ref)]
    memory = [tensor.untyped_storage().data_ptr() for tensor in given if isinstance(tensor, torch.Tensor)]
    return len(memory) != len(set(memory))
