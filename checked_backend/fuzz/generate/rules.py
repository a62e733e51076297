"""How calls are made: a rule for each family of operations, and one for torch's own samples."""

from __future__ import annotations

import functools
import itertools
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from checked_backend._torch.op_database import operator_database
from checked_backend.fuzz.build import argument_of, dtype_name, eager_value
from checked_backend.fuzz.generate.defined import UNDEFINED_OPS, is_overlapping
from checked_backend.fuzz.generate.draft import Draft, NothingFits
from checked_backend.fuzz.known import is_known
from checked_backend.fuzz.program import DTYPES, Constant, Ref, Size, Statement

_VIEWS_IN_PLACE = ("Tensor.unsqueeze_", "Tensor.squeeze_", "Tensor.transpose_", "Tensor.t_", "Tensor.swapaxes_")
"""Operations that change the shape of the tensor itself."""


def _view(draft: Draft, op: str) -> Statement | None:
    """A call of one of `_VIEWS`."""
    own = op.removeprefix("Tensor.")
    ref = draft.at_least(_LEAST.get(own, 1))
    tensor = draft.value(ref)
    arguments = _ARGUMENTS[own](draft, ref, tensor)
    return None if arguments is None else Statement(op, (ref, *arguments))


def _view_in_place(draft: Draft, op: str) -> Statement | None:
    """A call of one of `_VIEWS_IN_PLACE`: on a computed tensor, mostly."""
    ref = draft.some(lambda tensor: not (tensor.is_leaf and tensor.requires_grad) and tensor.dim() > 0)
    tensor = draft.value(ref)
    dims = draft.chance(0.5) if op == "Tensor.squeeze_" else {"Tensor.unsqueeze_": 1, "Tensor.t_": 0}.get(op, 2)
    return Statement(op, (ref, *(_dim(draft, tensor) for _ in range(dims))))


_LEAST = {"diagonal": 2, "rot90": 2, "transpose": 2, "permute": 2, "movedim": 2, "swapaxes": 2}


def _dim(draft: Draft, of: Any) -> int:
    """Any dimension of a tensor, or of the tensor of a `Ref`."""
    dims = (draft.value(of) if isinstance(of, Ref) else of).dim()
    return draft.rng.randrange(-dims, dims) if dims else 0


def _size(draft: Draft, ref: Ref, dim: int) -> Any:
    """The size of a dimension: in a dynamic program as an expression."""
    return Size(ref.value, dim) if draft.dynamic and draft.chance(0.7) else draft.value(ref).shape[dim]


def _other_shape(draft: Draft, ref: Ref, tensor: Any) -> Any:
    """Arguments for another shape of the same number of elements."""
    shape = list(tensor.shape)
    way = draft.rng.choice(("flat", "merge", "split", "rows"))
    if way == "flat" or not shape:
        return (-1,)
    if way == "merge" and len(shape) > 1:
        at = draft.rng.randrange(len(shape) - 1)
        return (*(_size(draft, ref, dim) for dim in range(at)), -1, *shape[at + 2 :])
    if way == "split":
        at = draft.rng.randrange(len(shape))
        for part in (2, 3, 4):
            if shape[at] and shape[at] % part == 0:
                return (*shape[:at], part, shape[at] // part, *shape[at + 1 :])
    return (_size(draft, ref, 0), -1) if shape[0] else None


def _part(draft: Draft, ref: Ref, tensor: Any) -> Any:
    dim = _dim(draft, tensor)
    size = tensor.shape[dim]
    if not size:
        return None
    start = draft.rng.randrange(size)
    return dim, start, draft.rng.randint(0 if draft.chance(0.1) else 1, size - start) if size > start else 0


def _window(draft: Draft, ref: Ref, tensor: Any) -> Any:
    dim = _dim(draft, tensor)
    size = tensor.shape[dim]
    return (dim, draft.rng.randint(1, min(size, 4)), draft.rng.choice((1, 1, 2, 3))) if size else None


def _expanded(draft: Draft, ref: Ref, tensor: Any) -> Any:
    more = (draft.rng.choice((1, 2, 3)),) if draft.chance(0.4) else ()
    sizes = (draft.rng.choice((2, 3, 4)) if size == 1 else (-1) for size in tensor.shape)
    return (*more, *sizes)


def _sections(draft: Draft, ref: Ref, tensor: Any) -> Any:
    return draft.rng.choice((1, 2, 3)), _dim(draft, tensor)


def _sizes_of_parts(draft: Draft, ref: Ref, tensor: Any) -> Any:
    dim = _dim(draft, tensor)
    size = tensor.shape[dim]
    first = draft.rng.randint(0, size)
    return [first, size - first], dim


def _times(draft: Draft, ref: Ref, tensor: Any) -> Any:
    return tuple(draft.rng.choice((1, 1, 2, 3)) for _ in range(tensor.dim() + draft.chance(0.2)))


def _split_dim(draft: Draft, ref: Ref, tensor: Any) -> Any:
    dim = _dim(draft, tensor)
    return (dim, (2, -1)) if tensor.shape[dim] and tensor.shape[dim] % 2 == 0 else (dim, (1, -1))


def _two_dims(draft: Draft, ref: Ref, tensor: Any) -> Any:
    return _dim(draft, tensor), _dim(draft, tensor)


_ARGUMENTS: dict[str, Any] = {
    "view": _other_shape,
    "reshape": _other_shape,
    "flatten": lambda draft, ref, tensor: (draft.rng.randrange(tensor.dim()),),
    "unsqueeze": lambda draft, ref, tensor: (draft.rng.randint(-tensor.dim() - 1, tensor.dim()),),
    "squeeze": lambda draft, ref, tensor: () if draft.chance(0.4) else (_dim(draft, tensor),),
    "transpose": _two_dims,
    "permute": lambda draft, ref, tensor: tuple(draft.rng.sample(range(tensor.dim()), tensor.dim())),
    "t": lambda draft, ref, tensor: (),
    "expand": _expanded,
    "movedim": _two_dims,
    "narrow": _part,
    "select": lambda draft, ref, tensor: (part := _part(draft, ref, tensor)) and part[:2],
    "unbind": lambda draft, ref, tensor: (_dim(draft, tensor),),
    "split": _sections,
    "chunk": _sections,
    "tensor_split": _sections,
    "unfold": _window,
    "diagonal": lambda draft, ref, tensor: (draft.rng.choice((0, 0, 1, -1)),),
    "view_as": lambda draft, ref, tensor: (draft.some(lambda one: one.numel() == tensor.numel()),),
    "expand_as": lambda draft, ref, tensor: (draft.some(lambda one: one.dim() >= tensor.dim()),),
    "broadcast_to": lambda draft, ref, tensor: (_expanded(draft, ref, tensor),),
    "swapaxes": _two_dims,
    "unflatten": _split_dim,
    "repeat": _times,
    "tile": lambda draft, ref, tensor: (_times(draft, ref, tensor),),
    "repeat_interleave": lambda draft, ref, tensor: (draft.rng.choice((1, 2, 3)), _dim(draft, tensor)),
    "rot90": lambda draft, ref, tensor: (draft.rng.choice((0, 1, 2, 3)),),
    "ravel": lambda draft, ref, tensor: (),
    "split_with_sizes": _sizes_of_parts,
}
_VIEWS = tuple(f"Tensor.{name}" for name in _ARGUMENTS)
"""Operations on the shape, with what makes the arguments after the tensor. A program of a seed follows their order."""


_INDEXING = (
    *("getitem", "getitem", "getitem", "torch.index_select", "torch.gather", "torch.take", "Tensor.scatter"),
    *("Tensor.scatter_add", "Tensor.index_add", "Tensor.index_fill", "Tensor.index_copy", "Tensor.masked_fill"),
    *("Tensor.masked_fill_", "Tensor.scatter_", "Tensor.index_add_", "Tensor.index_put_", "torch.select_scatter"),
    *("torch.slice_scatter", "torch.diagonal_scatter", "Tensor.fill_diagonal_", "torch.take_along_dim", "F.embedding"),
)
"""Operations that read or write parts."""


def _indexing(draft: Draft, op: str) -> Statement | None:
    """A call of one of `_INDEXING`."""
    ref = draft.at_least(1)
    tensor = draft.value(ref)
    dim = draft.rng.randrange(tensor.dim())
    size, shape, dtype = tensor.shape[dim], tuple(tensor.shape), dtype_name(tensor)
    if op == "getitem":
        return Statement(op, (ref, _index(draft, ref)))
    if not size:
        return None
    arguments: tuple[Any, ...] | None = None
    options: dict[str, Any] = {}
    match op.rpartition(".")[2]:
        case "index_select":
            arguments = ref, dim, _indices(draft, size, (draft.rng.choice((1, 2, 5)),))
        case "gather":
            arguments = ref, dim, _indices(draft, size, shape)
        case "take_along_dim":
            arguments = ref, _indices(draft, size, shape), dim
        case "take" if tensor.numel():
            arguments = ref, _indices(draft, tensor.numel(), (2, 3))
        case "embedding" if tensor.dim() == 2 and dim == 0:
            arguments = _indices(draft, size, (3,)), ref
        case "scatter" | "scatter_" | "scatter_add":
            source = draft.any(lambda one: tuple(one.shape) == shape and one.dtype == tensor.dtype) or ref
            arguments = ref, dim, _indices(draft, size, (*shape[:dim], 1, *shape[dim + 1 :])), source
        case "index_add" | "index_add_" | "index_copy":
            source = draft.new_input(dtype, shape)
            arguments = ref, dim, draft.new_input("int64", (size,), fill="distinct", low=0), source
        case "index_fill":
            arguments = ref, dim, _indices(draft, size, (1,)), draft.rng.choice((0, 1, 2))
        case "masked_fill" | "masked_fill_":
            arguments = ref, draft.fitting(shape, "bool"), draft.rng.choice((0, 1, -1, 0.5))
        case "index_put_":
            values = draft.new_input(dtype, (1,) if draft.chance(0.5) else ())
            if shape[0]:
                arguments = ref, (_indices(draft, shape[0], (1,)),), values
                options["accumulate"] = draft.chance(0.5)
        case "select_scatter":
            source = draft.new_input(dtype, (*shape[:dim], *shape[dim + 1 :]))
            arguments = ref, source, dim, draft.rng.randrange(size)
        case "slice_scatter":
            start = draft.rng.randrange(size)
            arguments = ref, draft.new_input(dtype, (*shape[:dim], size - start, *shape[dim + 1 :])), dim, start
        case "diagonal_scatter" if tensor.dim() == 2:
            arguments = ref, draft.new_input(dtype, tensor.diagonal().shape)
        case "fill_diagonal_":
            arguments = ref, draft.rng.choice((0, 1, 2))
    return None if arguments is None else Statement(op, arguments, options)


def _assignment(draft: Draft, op: str) -> Statement | None:
    """An assignment ``x[index] = value``: now and then from the same tensor, or to one place after another."""
    ref = draft.some(lambda tensor: tensor.dim() > 0 and not (tensor.is_leaf and tensor.requires_grad))
    tensor = draft.value(ref)
    index = _index(draft, ref)
    if draft.chance(0.25):
        mask = draft.fitting(tensor.shape, "bool")
        if draft.value(mask).shape == tensor.shape:
            return Statement(op, (ref, mask, draft.rng.choice((0, 1, -1, 2.5))))
    if draft.chance(0.4):
        return Statement(op, (ref, index, draft.scalar()))
    shape = draft.value(ref)[eager_value(index, draft.values)].shape
    same = draft.any(lambda one: one.shape == shape and one.dtype == tensor.dtype)
    value = same if same is not None and draft.chance(0.6) else draft.fitting(shape, dtype_name(tensor))
    return Statement(op, (ref, index, value))


def _index(draft: Draft, ref: Ref) -> Any:
    """A basic index, with a tensor of indices now and then."""
    tensor = draft.value(ref)
    parts: list[Any] = []
    for size in tensor.shape:
        if draft.turns and draft.chance(0.4):
            turn = draft.rng.choice(draft.turns)
            parts.append(draft.rng.choice((turn, turn, slice(turn, None), slice(None, turn))))
            continue
        way = draft.rng.choices(("all", "one", "slice", "step", "tensor", "end"), (34, 22, 25, 12, 6, 12))[0]
        if way == "end":
            break
        if not size:
            way = "all"
        start = draft.rng.randrange(size) if size else 0
        match way:
            case "one":
                parts.append(start if draft.chance(0.7) else start - size)
            case "slice":
                stop = draft.rng.randint(start, size)
                parts.append(slice(start or None, -1 if draft.chance(0.2) else stop if draft.chance(0.6) else None))
            case "step":
                parts.append(slice(start, None, draft.rng.choice((2, 3))))
            case "tensor":
                parts.append(
                    draft.new_input("int64", (draft.rng.randint(1, size),), fill="distinct", low=0, stride=(1,))
                )
            case _:
                parts.append(slice(None))
    if draft.chance(0.12):
        parts.insert(draft.rng.randint(0, len(parts)), None)
    if draft.chance(0.15) and len(parts) < tensor.dim():
        parts.append(...)
    return parts[0] if len(parts) == 1 else tuple(parts)


def _indices(draft: Draft, size: int, shape: Any) -> Ref:
    """A new tensor of indices into a dimension."""
    return draft.new_input("int64", shape, fill="range", low=0, high=size - 1)


Make = Callable[[Draft, str], Statement | None]


@dataclass(frozen=True, slots=True)
class Rule:
    """A family of operations.

    Attributes:
        weight: How often it is chosen.
        make: Makes a call of one of them; None, or `NothingFits`, if it cannot.
        changes: Whether they change a tensor, as the bodies of loops do.
    """

    name: str
    weight: float
    ops: tuple[str, ...]
    make: Make
    changes: bool = False


def _named(prefix: str, words: str) -> tuple[str, ...]:
    return tuple(f"{prefix}.{word}" for word in words.split())


_torch, _functional, _methods = (functools.partial(_named, prefix) for prefix in ("torch", "F", "Tensor"))

_POINTWISE = (
    "abs neg sign exp exp2 expm1 log log2 log10 log1p sqrt rsqrt sin cos tan asin acos atan sinh cosh tanh asinh acosh "
    "atanh sigmoid erf erfc erfinv lgamma digamma floor ceil round trunc frac reciprocal square sinc deg2rad rad2deg "
    "logical_not nan_to_num sgn"
)
_UNARY = (
    *_torch(f"{_POINTWISE} positive isnan isinf isfinite isposinf isneginf signbit bitwise_not angle i0 logit clone"),
    *_torch("special.entr special.erfcx special.i0e special.i1 special.log_ndtr special.ndtr special.ndtri"),
    *_torch("zeros_like ones_like relu conj_physical isreal"),
    *_functional("relu relu6 elu selu celu gelu silu mish hardswish hardsigmoid hardtanh softplus softsign tanhshrink"),
    *_functional("logsigmoid leaky_relu softshrink hardshrink"),
    *_methods("contiguous detach bool abs neg exp sigmoid tanh"),
)
_ARITHMETIC = "add sub mul div floor_divide remainder fmod pow"
_COMPARING = "eq ne lt le gt ge logical_and logical_or logical_xor"
_BITS = "bitwise_and bitwise_or bitwise_xor bitwise_left_shift bitwise_right_shift"
_BINARY = (
    *_torch(f"{_ARITHMETIC} true_divide atan2 maximum minimum fmax fmin hypot copysign nextafter logaddexp logaddexp2"),
    *_torch(f"xlogy {_COMPARING} {_BITS} gcd lcm heaviside ldexp float_power rsub special.xlog1py special.zeta"),
    *("+", "-", "*", "/", "//", "%", "**", "&", "|", "^", "<<", ">>", "<", "<=", "==", "!=", ">", ">="),
)
_UNARY_IN_PLACE = tuple(
    f"Tensor.{name}_" for name in f"{_POINTWISE} zero relu bitwise_not".split() if is_known(f"Tensor.{name}_")
)
_BINARY_IN_PLACE = (
    *(f"Tensor.{name}_" for name in f"{_ARITHMETIC} {_COMPARING} {_BITS} atan2 hypot copysign ldexp xlogy".split()),
    *("+=", "-=", "*=", "/=", "&=", "|=", "^="),
    *_methods("copy_ copy_ copy_ float_power_ heaviside_"),
)
_REDUCTIONS = _torch(
    "sum mean prod amax amin argmax argmin any all std var logsumexp nansum nanmean count_nonzero norm max min "
    "cumsum cumprod logcumsumexp cummax cummin aminmax std_mean var_mean softmax log_softmax diff"
)
_TERNARY = _torch("where addcmul addcdiv lerp clamp")
_COMBINING = _torch("cat stack hstack vstack dstack column_stack block_diag concatenate meshgrid")
_PRODUCTS = (*_torch("matmul mm bmm mv dot inner outer addmm baddbmm"), "F.linear", "@")
_CREATING = (
    *_torch("full_like arange full zeros ones eye rand_like randn_like"),
    *_methods("new_zeros new_ones new_full"),
)
_CONVERTING = (*_methods("to to to long int float double half bfloat16 byte char short bool type_as"),)
_NORMALIZING = (
    *_functional("layer_norm normalize softmax log_softmax pad glu one_hot"),
    *_torch("tril triu flip roll"),
)
_RANDOM = (*_torch("bernoulli rand_like randn_like"), *_functional("dropout"))


_OF_MODELS = (
    "abs add addmm amax bmm cat clamp clone copy cos cumsum div embedding eq exp expand gather gelu gt index_select "
    "layer_norm leaky_relu log log_softmax lt masked_fill matmul max_pool2d maximum mean mm mul ne neg pow permute "
    "relu reshape rsqrt scatter_add sigmoid silu sin softmax softplus split sqrt square stack sub sum tanh to "
    "transpose tril unsqueeze var where"
)
COMMON = tuple(_OF_MODELS.split())
"""The operators that programs of users are mostly made of, as `checked_backend.fuzz.known.plain` names them."""


def _writable(draft: Draft) -> Ref:
    """A tensor to write to: mostly one that was computed, for leaves that require gradients cannot be written to."""
    return draft.some(lambda tensor: not (tensor.is_leaf and tensor.requires_grad) and not is_overlapping(tensor))


def _unary(draft: Draft, op: str) -> Statement | None:
    ref = draft.some()
    more: dict[str, Any] = {}
    if op in ("torch.zeros_like", "torch.ones_like", "torch.clone") and draft.chance(0.3):
        more["memory_format"] = Constant(draft.rng.choice(("contiguous_format", "preserve_format")))
    if op == "F.gelu" and draft.chance(0.5):
        more["approximate"] = "tanh"
    if op == "torch.round" and draft.chance(0.3):
        more["decimals"] = draft.rng.choice((-1, 1, 2))
    if op == "torch.nan_to_num" and draft.chance(0.4):
        more["nan"] = draft.rng.choice((1.0, -2.5))
    return Statement(op, (ref,), more)


def _binary(draft: Draft, op: str) -> Statement | None:
    ref = draft.some()
    other = draft.partner(ref)
    pair = (
        (other, ref) if draft.chance(0.15) and (isinstance(other, Ref) or not op.startswith("torch.")) else (ref, other)
    )
    return Statement(op, pair, _binary_options(draft, op))


def _binary_options(draft: Draft, op: str) -> dict[str, Any]:
    own = op.rpartition(".")[2].rstrip("_")
    if own == "div" and draft.chance(0.5):
        return {"rounding_mode": draft.rng.choice(("floor", "trunc"))}
    if own in ("add", "sub", "rsub") and draft.chance(0.3):
        return {"alpha": draft.rng.choice((2, -1, 3, 0.5))}
    return {}


def _binary_in_place(draft: Draft, op: str) -> Statement | None:
    ref = _writable(draft)
    return Statement(op, (ref, draft.partner(ref)), _binary_options(draft, op))


def _with_out(draft: Draft, op: str) -> Statement | None:
    """A call that writes to a tensor there is, or to one made for it."""
    call = _binary(draft, op) if op in _BINARY else _unary(draft, op)
    if call is None or op.startswith(("F.", "Tensor.")):
        return None
    like = next(ref for ref in call.args if ref in draft.tensors())  # the other may be a number, or that of a turn
    shape, dtype = draft.value(like).shape, draft.value(like).dtype
    used = {ref.value for ref in call.args if isinstance(ref, Ref)}
    fits = [
        ref
        for ref in draft.tensors(lambda t: t.shape == shape and t.dtype == dtype and not t.requires_grad)
        if ref.value not in used and not is_overlapping(draft.value(ref))
    ]
    out = draft.rng.choice(fits) if fits else draft.add(Statement("torch.zeros_like", (like,)))
    return None if out is None else Statement(op, call.args, {**call.kwargs, "out": out})


_WITHOUT_DIM = frozenset(_torch("std_mean var_mean prod argmax argmin any all std var sum mean amax amin norm max min"))
_SEVERAL = frozenset(_torch("sum mean amax amin std var logsumexp nansum norm std_mean var_mean count_nonzero"))
_KEEPS = frozenset(_torch("sum mean amax amin std var logsumexp argmax argmin any all prod max min"))


def _reduction(draft: Draft, op: str) -> Statement | None:
    ref = draft.some()
    if op in _WITHOUT_DIM and draft.chance(0.3):
        return Statement(op, (ref,))
    dims = draft.value(ref).dim()
    if dims and op in _SEVERAL and draft.chance(0.3):
        more: dict[str, Any] = {"dim": tuple(sorted(draft.rng.sample(range(dims), draft.rng.randint(1, dims))))}
    else:
        more = {"dim": _dim(draft, ref)}
    if op in _KEEPS and draft.chance(0.4):
        more["keepdim"] = True
    if op in _torch("std var std_mean var_mean") and draft.chance(0.4):
        more["correction"] = draft.rng.choice((0, 1, 2))
    if op in _torch("sum mean prod cumsum cumprod softmax") and draft.chance(0.2):
        more["dtype"] = Constant(draft.rng.choice(("float32", "float64", "int64", "bfloat16", "int32")))
    if op == "torch.diff":
        more["n"] = draft.rng.choice((1, 1, 2))
    return Statement(op, (ref,), more)


def _ternary(draft: Draft, op: str) -> Statement | None:
    ref = draft.some()
    if op == "torch.where":
        shape = draft.value(ref).shape
        masks = draft.tensors(lambda t: str(t.dtype) == "torch.bool" and t.shape == shape)
        mask = draft.rng.choice(masks) if masks else draft.fitting(shape, "bool")
        return Statement(op, (mask, ref, draft.partner(ref)))
    if op == "torch.clamp":
        low, high = (draft.rng.choice((-1, 0, -0.5, -300)), draft.rng.choice((1, 2, 0.5, 127, 200, 300)))
        bounds = {"min": low, "max": high}
        if draft.chance(0.4):
            bounds.pop(draft.rng.choice(("min", "max")))
        return Statement(op, (ref,), bounds)
    first, second = draft.partner(ref), draft.partner(ref)
    if op == "torch.lerp":
        return Statement(op, (ref, first, second))
    return Statement(op, (ref, first, second), {"value": draft.rng.choice((1, 2, 0.5))} if draft.chance(0.4) else {})


def _combining(draft: Draft, op: str) -> Statement | None:
    if op == "torch.meshgrid":
        flat = draft.tensors(lambda tensor: tensor.dim() < 2) or [draft.new_input(shape=(3,))]
        chosen = draft.rng.choices(flat, k=draft.rng.randint(1, 3))
        return Statement(op, tuple(chosen), {"indexing": draft.rng.choice(("xy", "ij"))})
    ref = draft.at_least(1)
    tensor = draft.value(ref)
    same = draft.tensors(lambda other: other.shape == tensor.shape)
    parts = [ref, *draft.rng.choices(same, k=draft.rng.choice((0, 1, 1, 2)))]
    if draft.chance(0.3):
        parts.append(draft.new_input(shape=tensor.shape))
    dim = (_dim(draft, ref),) if op in _torch("cat stack concatenate") else ()
    return Statement(op, tuple(parts) if op == "torch.block_diag" else (parts, *dim))


def _product(draft: Draft, op: str) -> Statement | None:
    dims = {"torch.mv": 2, "torch.dot": 1, "torch.outer": 1, "torch.bmm": 3, "torch.baddbmm": 3, "torch.inner": 1}.get(
        op, 2
    )
    ref = draft.any(lambda tensor: tensor.dim() == dims) or draft.new_input(
        shape=[draft.rng.choice((1, 2, 3, 8)) for _ in range(dims)]
    )
    tensor = draft.value(ref)
    dtype = dtype_name(tensor)
    inner, more = tensor.shape[-1], draft.rng.choice((1, 2, 5, 16))
    shapes: dict[str, Sequence[int]] = {
        "torch.mv": [inner],
        "torch.dot": [inner],
        "torch.outer": [more],
        "torch.inner": [more, inner],
        "F.linear": [more, inner],
        "torch.bmm": [*tensor.shape[:1], inner, more],
        "torch.baddbmm": [*tensor.shape[:1], inner, more],
    }
    other = draft.new_input(dtype, shapes.get(op, [inner, more]))
    if op in ("torch.addmm", "torch.baddbmm"):
        bias = draft.fitting([*tensor.shape[:-1], more], dtype)
        return Statement(op, (bias, ref, other), {"alpha": 2, "beta": 3} if draft.chance(0.3) else {})
    return Statement(op, (ref, other))


def _creating(draft: Draft, op: str) -> Statement | None:
    ref = draft.some()
    shape = draft.value(ref).shape
    sizes: Any = tuple(Size(ref.value, dim) if draft.dynamic else size for dim, size in enumerate(shape))
    dtype = {"dtype": Constant(draft.dtype())} if draft.chance(0.5) else {}
    number = draft.rng.choice((0, 1, 2, -1, 0.5, True))
    match op:
        case "torch.arange":
            count = sizes[-1] if sizes and draft.chance(0.7) else draft.rng.choice((1, 3, 8, 16))
            return Statement(op, (0, count, 1) if draft.chance(0.3) else (count,), dtype)
        case "torch.eye":
            return Statement(op, (draft.rng.choice((2, 3, 8)),), dtype)
        case "torch.rand_like" | "torch.randn_like":
            return Statement(op, (ref,))
    like = () if op in _torch("full zeros ones") else (ref,)
    shaped = () if op == "torch.full_like" else (sizes,)
    return Statement(op, (*like, *shaped, *((number,) if "full" in op else ())), dtype)


def _converting(draft: Draft, op: str) -> Statement | None:
    ref = draft.some()
    if op == "Tensor.type_as":
        return Statement(op, (ref, draft.some()))
    if op == "Tensor.to":
        more = {"copy": True} if draft.chance(0.15) else {}
        return Statement(op, (ref, Constant(draft.dtype())), more)
    return Statement(op, (ref,))


def _normalizing(draft: Draft, op: str) -> Statement | None:
    ref = draft.at_least(1)
    tensor = draft.value(ref)
    match op.rpartition(".")[2]:
        case "layer_norm":
            return Statement(op, (ref, [tensor.shape[-1]]))
        case "softmax" | "log_softmax" | "normalize" | "glu":
            return Statement(op, (ref,), {"dim": _dim(draft, ref)})
        case "pad":
            widths = [draft.rng.choice((0, 1, 2, -1)) for _ in range(2 * draft.rng.randint(1, min(2, tensor.dim())))]
            how = draft.rng.choice(("constant", "constant", "reflect", "replicate", "circular"))
            return Statement(op, (ref, widths), {"mode": how})
        case "one_hot":
            return Statement(op, (ref, 16))
        case "tril" | "triu":
            return Statement(op, (ref,), {"diagonal": draft.rng.choice((-1, 0, 1, 2))})
        case "flip":
            return Statement(op, (ref, [_dim(draft, ref)]))
    return Statement(op, (ref, draft.rng.choice((1, -1, 2))), {"dims": _dim(draft, ref)})


def _random(draft: Draft, op: str) -> Statement | None:
    ref = draft.some(lambda tensor: tensor.is_floating_point())
    if op == "torch.bernoulli":
        ref = draft.add(Statement("torch.sigmoid", (ref,))) or ref
    return Statement(op, (ref,))


RULES: tuple[Rule, ...] = (
    Rule("pointwise", 14, _UNARY, _unary),
    Rule("pairs", 20, _BINARY, _binary),
    Rule("pointwise in place", 7, _UNARY_IN_PLACE, lambda draft, op: Statement(op, (_writable(draft),)), changes=True),
    Rule("pairs in place", 11, _BINARY_IN_PLACE, _binary_in_place, changes=True),
    Rule(
        "into a tensor", 3, tuple(op for op in (*_BINARY, *_UNARY) if op.startswith("torch.")), _with_out, changes=True
    ),
    Rule("reductions", 11, _REDUCTIONS, _reduction),
    Rule("three operands", 5, _TERNARY, _ternary),
    Rule("views", 16, _VIEWS, _view),
    Rule("views in place", 1.5, _VIEWS_IN_PLACE, _view_in_place),
    Rule("combining", 4, _COMBINING, _combining),
    Rule("products", 2.5, _PRODUCTS, _product),
    Rule("creating", 3, _CREATING, _creating),
    Rule("converting", 6, _CONVERTING, _converting),
    Rule("normalizing", 5, _NORMALIZING, _normalizing),
    Rule("indexing", 7, _INDEXING, _indexing),
    Rule("assigning", 5, ("setitem",), _assignment, changes=True),
    Rule("random", 0.7, _RANDOM, _random),
)
"""All rules. What torch itself lists with samples of arguments is added by `checked_backend.fuzz.generate.rules`."""


_RANDOM_ORDER = ("torch.meshgrid",)
"""Entries whose samples come in the order of a set of strings, which each process has its own of."""

_WEIGHT = 14
_SAMPLES = 24
_MOST_ELEMENTS = 512


@functools.cache
def _entries() -> Mapping[str, Any]:
    """The entries that name an operation of a program, by its name."""
    found: dict[str, Any] = {}
    for info in operator_database():
        name = f"torch.{info.name}"
        if info.name.startswith("nn.functional."):
            name = f"F.{info.name.removeprefix('nn.functional.')}"
        if not is_known(name):
            name = f"Tensor.{info.name}"
        left_out = name in _RANDOM_ORDER or name.rpartition(".")[2] in UNDEFINED_OPS or "linalg" in name
        if is_known(name) and not left_out:
            found.setdefault(name, info)
    return found


def rules_of_samples() -> list[Rule]:
    """The rule for operations of torch's database; none where it cannot be imported."""
    ops = tuple(_entries())
    return [Rule("torch's samples", _WEIGHT, ops, _sampled)] if ops else []


def _sampled(draft: Draft, op: str) -> Statement | None:
    info = _entries()[op]
    near = draft.any()
    dtype = draft.dtype() if near is None or draft.chance(0.3) else dtype_name(draft.value(near))
    if getattr(torch, dtype) not in info.dtypes:
        dtype = "float32"
    sample = _sample(draft, info, getattr(torch, dtype))
    if sample is None:
        return None
    args = tuple(_argument(draft, value) for value in (sample.input, *sample.args))
    kwargs = {str(key): _argument(draft, value) for key, value in sample.kwargs.items()}
    return Statement(op, args, kwargs)


def _sample(draft: Draft, info: Any, dtype: torch.dtype) -> Any:
    """One of the first samples of an entry. No more of them are made than are needed."""
    place = draft.rng.randrange(_SAMPLES)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            samples = info.sample_inputs_func(info, "cpu", dtype, False)  # sample_inputs seeds torch for each of them
            found = list(itertools.islice(samples, place + 1))
        except Exception:  # an entry that has no samples of this dtype, or that needs what is not here
            return None
    return found[-1] if len(found) > place else draft.rng.choice(found) if found else None


def _argument(draft: Draft, raw: Any) -> Any:
    if isinstance(raw, torch.Tensor):
        return _tensor(draft, raw)
    return type(raw)(_argument(draft, item) for item in raw) if type(raw) in (list, tuple) else argument_of(raw)


def _tensor(draft: Draft, raw: torch.Tensor) -> Ref:
    """A tensor of the program with the sample's shape and dtype: one there is, or an input like the sample's."""
    if raw.layout is not torch.strided or dtype_name(raw) not in DTYPES or raw.numel() > _MOST_ELEMENTS:
        raise NothingFits(dtype_name(raw))
    if raw.is_floating_point() and draft.chance(0.75):
        found = draft.any(lambda tensor: tensor.shape == raw.shape and tensor.dtype == raw.dtype)
        if found is not None:
            return found
    if raw.dtype is torch.bool or raw.is_complex() or not raw.numel():
        return draft.new_input(dtype_name(raw), raw.shape)
    low, high = float(raw.min()), float(raw.max())
    if not (low >= -1e18 and high <= 1e18):
        low, high = -3.0, 3.0
    if not raw.is_floating_point():  # they may be indices
        return draft.new_input(dtype_name(raw), raw.shape, fill="range", low=int(low), high=int(high))
    fill = "edges" if draft.chance(0.1) else "range"
    return draft.new_input(dtype_name(raw), raw.shape, fill=fill, low=low, high=high)
