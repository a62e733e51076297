"""How calls are made: a rule for each family of operations."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from checked_backend.fuzz.generate import indexing, views
from checked_backend.fuzz.generate.draft import Draft
from checked_backend.fuzz.generate.undefined import is_overlapping
from checked_backend.fuzz.known import is_known
from checked_backend.fuzz.program import Constant, Ref, Size, Statement

__all__ = ["COMMON", "RULES", "Rule"]

Make = Callable[[Draft, str], Statement | None]


@dataclass(frozen=True, slots=True)
class Rule:
    """A family of operations.

    Attributes:
        name: What they have in common.
        weight: How often it is chosen.
        ops: Their names.
        make: Makes a call of one of them; None if nothing fits.
        changes: Whether they change a tensor, as the bodies of loops do.
    """

    name: str
    weight: float
    ops: tuple[str, ...]
    make: Make
    changes: bool = False


def _torch(words: str) -> tuple[str, ...]:
    return tuple(f"torch.{word}" for word in words.split())


def _functional(words: str) -> tuple[str, ...]:
    return tuple(f"F.{word}" for word in words.split())


def _methods(words: str) -> tuple[str, ...]:
    return tuple(f"Tensor.{word}" for word in words.split())


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


def _writable(draft: Draft) -> Ref | None:
    """A tensor to write to: mostly one that was computed, for leaves that require gradients cannot be written to."""
    return draft.any(lambda tensor: not (tensor.is_leaf and tensor.requires_grad) and not is_overlapping(tensor))


def _unary(draft: Draft, op: str) -> Statement | None:
    ref = draft.any()
    if ref is None:
        return None
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


def _unary_in_place(draft: Draft, op: str) -> Statement | None:
    ref = _writable(draft)
    return None if ref is None else Statement(op, (ref,))


def _binary(draft: Draft, op: str) -> Statement | None:
    ref = draft.any()
    if ref is None:
        return None
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
    return None if ref is None else Statement(op, (ref, draft.partner(ref)), _binary_options(draft, op))


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


def _dims(draft: Draft, ref: Ref, *, several: bool = False) -> Any:
    dims = draft.value(ref).dim()
    if not dims:
        return 0
    if several and draft.chance(0.3):
        return tuple(sorted(draft.rng.sample(range(dims), draft.rng.randint(1, dims))))
    return draft.rng.randrange(-dims, dims)


_WITHOUT_DIM = frozenset(_torch("std_mean var_mean prod argmax argmin any all std var sum mean amax amin norm max min"))
_SEVERAL = frozenset(_torch("sum mean amax amin std var logsumexp nansum norm std_mean var_mean count_nonzero"))
_KEEPS = frozenset(_torch("sum mean amax amin std var logsumexp argmax argmin any all prod max min"))


def _reduction(draft: Draft, op: str) -> Statement | None:
    ref = draft.any()
    if ref is None:
        return None
    if op in _WITHOUT_DIM and draft.chance(0.3):
        return Statement(op, (ref,))
    more: dict[str, Any] = {"dim": _dims(draft, ref, several=op in _SEVERAL)}
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
    ref = draft.any()
    if ref is None:
        return None
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
    dim = (_dims(draft, ref),) if op in _torch("cat stack concatenate") else ()
    return Statement(op, tuple(parts) if op == "torch.block_diag" else (parts, *dim))


def _product(draft: Draft, op: str) -> Statement | None:
    dims = {"torch.mv": 2, "torch.dot": 1, "torch.outer": 1, "torch.bmm": 3, "torch.baddbmm": 3, "torch.inner": 1}.get(
        op, 2
    )
    ref = draft.any(lambda tensor: tensor.dim() == dims) or draft.new_input(
        shape=[draft.rng.choice((1, 2, 3, 8)) for _ in range(dims)]
    )
    tensor = draft.value(ref)
    dtype = str(tensor.dtype).removeprefix("torch.")
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
    ref = draft.any()
    if ref is None:
        return None
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
        case "torch.full":
            return Statement(op, (sizes, number), dtype)
        case "torch.zeros" | "torch.ones":
            return Statement(op, (sizes,), dtype)
        case "torch.full_like":
            return Statement(op, (ref, number), dtype)
        case "Tensor.new_full":
            return Statement(op, (ref, sizes, number), dtype)
        case "Tensor.new_zeros" | "Tensor.new_ones":
            return Statement(op, (ref, sizes), dtype)
    return Statement(op, (ref,))


def _converting(draft: Draft, op: str) -> Statement | None:
    ref = draft.any()
    if ref is None:
        return None
    if op == "Tensor.type_as":
        other = draft.any()
        return None if other is None else Statement(op, (ref, other))
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
            return Statement(op, (ref,), {"dim": _dims(draft, ref)})
        case "pad":
            widths = [draft.rng.choice((0, 1, 2, -1)) for _ in range(2 * draft.rng.randint(1, min(2, tensor.dim())))]
            how = draft.rng.choice(("constant", "constant", "reflect", "replicate", "circular"))
            return Statement(op, (ref, widths), {"mode": how})
        case "one_hot":
            return Statement(op, (ref, 16))
        case "tril" | "triu":
            return Statement(op, (ref,), {"diagonal": draft.rng.choice((-1, 0, 1, 2))})
        case "flip":
            return Statement(op, (ref, [_dims(draft, ref)]))
    return Statement(op, (ref, draft.rng.choice((1, -1, 2))), {"dims": _dims(draft, ref)})


def _random(draft: Draft, op: str) -> Statement | None:
    ref = draft.any(lambda tensor: tensor.is_floating_point())
    if ref is None:
        return None
    if op == "torch.bernoulli":
        ref = draft.add(Statement("torch.sigmoid", (ref,))) or ref
    return Statement(op, (ref,))


RULES: tuple[Rule, ...] = (
    Rule("pointwise", 14, _UNARY, _unary),
    Rule("pairs", 20, _BINARY, _binary),
    Rule("pointwise in place", 7, _UNARY_IN_PLACE, _unary_in_place, changes=True),
    Rule("pairs in place", 11, _BINARY_IN_PLACE, _binary_in_place, changes=True),
    Rule(
        "into a tensor", 3, tuple(op for op in (*_BINARY, *_UNARY) if op.startswith("torch.")), _with_out, changes=True
    ),
    Rule("reductions", 11, _REDUCTIONS, _reduction),
    Rule("three operands", 5, _TERNARY, _ternary),
    Rule("views", 16, views.VIEWS, views.make),
    Rule("views in place", 1.5, views.VIEWS_IN_PLACE, views.make_in_place),
    Rule("combining", 4, _COMBINING, _combining),
    Rule("products", 2.5, _PRODUCTS, _product),
    Rule("creating", 3, _CREATING, _creating),
    Rule("converting", 6, _CONVERTING, _converting),
    Rule("normalizing", 5, _NORMALIZING, _normalizing),
    Rule("indexing", 7, indexing.INDEXING, indexing.make),
    Rule("assigning", 5, ("setitem",), indexing.make_assignment, changes=True),
    Rule("random", 0.7, _RANDOM, _random),
)
"""All rules. What torch itself lists with samples of arguments is added by `checked_backend.fuzz.generate.opinfo`."""
