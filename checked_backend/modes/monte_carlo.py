"""Monte Carlo arithmetic: rerun an eager program with every rounding replaced by a random one of the same size.

Or with other junk in its uninitialised memory, or with another zero where either may be chosen.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch

from checked_backend._torch.modes import DisableTorchDispatch
from checked_backend._torch.operators import OpOverload, decomposition
from checked_backend._torch.tensors import is_alias_of
from checked_backend.graphs.operators import (
    UNMARKED_STATISTICS,
    UPDATING,
    Operator,
    OperatorKind,
    accumulation_length,
    argument,
)
from checked_backend.modes.base import PLAIN, OperatorMode, tensors_in, written_tensors
from checked_backend.modes.exactness import adds_integers, counts, unrounded
from checked_backend.modes.noise_source import NoiseSource
from checked_backend.modes.random_tape import draws_by_values
from checked_backend.numerics.bits import unit_roundoff

# A compiler may sum sequentially in 16 lanes: n/16 roundings per lane, each uniform (variance 1/3).
_ACCUMULATION = 48
# Equal terms round the same way again and again: then the errors of a single lane add up to n/4 unit roundoffs. With
# this, noise times what the verdict allows of it is n unit roundoffs of the terms, which no order of summation exceeds
# (Higham, Accuracy and Stability of Numerical Algorithms, section 4.2).
_CORRELATED = 16
_U32 = 2.0**-24
# The error of these grows with the number of terms, also relative to cancelling terms. The noise of their inputs must
# therefore grow too.
_LINEAR = (
    "mm", "mv", "dot", "conv", "sum", "mean", "index_add", "scatter_add", "index_put", "batch_norm",
    "embedding_dense_backward",
)  # fmt: skip
# No implementation leaves these ranges, and operators that take these results may insist on them.
_RANGES = {
    "sigmoid": (0.0, 1.0), "_softmax": (0.0, 1.0), "hardsigmoid": (0.0, 1.0), "tanh": (-1.0, 1.0), "erf": (-1.0, 1.0),
    "sin": (-1.0, 1.0), "cos": (-1.0, 1.0), "special_ndtr": (0.0, 1.0),
}  # fmt: skip
# The small results of these hold the rounding of something inside that is not small: ``exp(x) - 1`` where ``exp(x)`` is
# nearly 1, ``1 + erf(x)`` in a tail. A normalisation's mean is wrong by the same amount for all elements, and a sum
# over the elements, which is zero in exact arithmetic, adds that up: the gradient of a bias in front of it. They are
# therefore run as the operators that they are made of, each with its own noise.
_MADE_OF_OTHERS = frozenset(
    f"aten.{name}.default"
    for name in (
        "_log_softmax", "_log_softmax_backward_data", "_softmax", "_softmax_backward_data", "gelu", "gelu_backward",
        "silu_backward", "mish_backward", "tanh_backward", "logsumexp", "logaddexp", "binary_cross_entropy",
        "binary_cross_entropy_backward", "binary_cross_entropy_with_logits", "native_batch_norm",
        "native_batch_norm_backward", "cudnn_batch_norm", "cudnn_batch_norm_backward", "native_group_norm",
        "native_group_norm_backward", "native_layer_norm", "native_layer_norm_backward", "_fused_rms_norm",
        "_fused_rms_norm_backward",
    )
)  # fmt: skip
# Only the first result of these is rounded. The others are for backward: a mask, or what attention keeps.
_FIRST_ONLY = frozenset({
    "multilabel_margin_loss_forward", "_scaled_dot_product_flash_attention_for_cpu",
    "_scaled_dot_product_flash_attention", "_scaled_dot_product_efficient_attention",
    "_scaled_dot_product_cudnn_attention", "_flash_attention_forward", "_efficient_attention_forward",
})  # fmt: skip
# Inputs of attention that are not perturbed. The logarithm of a row's sum of exponentials follows from the same inputs
# in forward and backward. If a whole row is masked, it is as large as the mask: one roundoff in only one of the two
# passes would be a factor of e to the power of 60.
_NOT_ROUNDED = ("logsumexp", "attn_bias", "bias")
_HALF = frozenset({torch.float16, torch.bfloat16})
# IEEE 754 leaves the sign of a zero open where either of two zeros may count as the greater.
_OPEN = frozenset({
    "max", "min", "amax", "amin", "aminmax", "maximum", "minimum", "fmax", "fmin", "cummax", "cummin", "clamp",
    "clamp_min", "clamp_max", "clip", "relu", "relu6", "hardtanh", "threshold", "max_pool2d_with_indices",
    "max_pool3d_with_indices", "adaptive_max_pool2d", "adaptive_max_pool3d", "sort", "topk", "median", "kthvalue",
    "mode", "unique", "_unique2",
})  # fmt: skip


def _is_plain(value: object) -> bool:
    """Whether a value is an ordinary floating tensor: no subclass, not fake, not sparse."""
    return (
        type(value) in PLAIN
        and isinstance(value, torch.Tensor)
        and (value.dtype.is_floating_point or value.dtype.is_complex)
        and value.device.type != "meta"
    )


def _as_float32(value: Any) -> Any:
    return value.float() if isinstance(value, torch.Tensor) and value.dtype in _HALF else value


def _combines(args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether a pointwise operator adds up products: ``a + alpha * b``, or complex numbers."""
    if kwargs.get("alpha", 1) not in (1, -1):
        return True
    return any(value.is_complex() for value in args if isinstance(value, torch.Tensor))


def _poisoned(
    noise: NoiseSource, func: OpOverload, operator: Operator, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Any:
    """Run an operator that leaves memory uninitialised; return its result with junk in it."""
    resized = args[0] if operator.mutated and args and isinstance(args[0], torch.Tensor) else None
    if operator.mutated and resized is None:  # an out= variant
        resized = kwargs.get("out")
    before = 0 if resized is None else resized.untyped_storage().nbytes() // resized.element_size()
    result = func(*args, **kwargs)
    if type(result) not in PLAIN or result.device.type == "meta" or result.layout != torch.strided:
        return result
    with DisableTorchDispatch():
        target = result.detach()
        if resized is not None:
            # Only the memory that the storage gained is uninitialised.
            after = result.untyped_storage().nbytes() // result.element_size()
            target = target.as_strided((max(0, after - before),), (1,), before)
        if not result.is_quantized:
            noise.fill_(target)
    return result


class PoisonMode(OperatorMode):
    """Fill uninitialised memory (``empty``, ``resize_``, ...) with junk that depends on the seed; change nothing else.

    A program whose results differ between two seeds reads memory that it never wrote.

    Args:
        seed: Same seed, same junk.
    """

    def __init__(self, seed: int) -> None:
        super().__init__()
        self._noise = NoiseSource(seed)

    def run(self, func: OpOverload, operator: Operator, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run one operator, and fill the memory that it left uninitialised."""
        if operator.kind is OperatorKind.UNINITIALISED:
            return _poisoned(self._noise, func, operator, args, kwargs)
        return func(*args, **kwargs)


class OneZero(OperatorMode):
    """Run a program with the same zero wherever an operator may return either: a maximum, a clamp, a sort.

    Args:
        negative: Whether that zero is -0.0.
    """

    def __init__(self, *, negative: bool) -> None:
        super().__init__()
        self._zero = -0.0 if negative else 0.0

    def run(self, func: OpOverload, operator: Operator, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run one operator, and set all zeros in its results to the chosen one."""
        result = func(*args, **kwargs)
        if operator.base in _OPEN:
            with DisableTorchDispatch():
                for value in result if isinstance(result, (tuple, list)) else (result,):
                    if type(value) is torch.Tensor and value.is_floating_point() and value.layout is torch.strided:
                        plain = value.detach()
                        plain.masked_fill_(plain == 0, self._zero)
        return result


class MonteCarloMode(OperatorMode):
    """Rerun a program, forward and backward, under Monte Carlo arithmetic.

    Each floating result of a rounding operator is multiplied by ``1 + magnitude * u * xi``, where u is the unit
    roundoff of its dtype and xi is uniform in [-1, 1]. Left alone are exact operators (views, copies, selections,
    comparisons, constants), sums and products that are exact, and most outcomes of random operators (a normal number
    with a computed mean or deviation is rounded). Operators that round inside (sums, matrix products, normalisations)
    get perturbed copies of their inputs and more noise on their results, because a compiler may add up in another
    order. The spread of the results over some seeds is the noise that the program must have at its precision.
    Uninitialised memory is filled with junk. Sources: D. S. Parker, Monte Carlo Arithmetic (1997);
    C. Denis, P. de Oliveira Castro, E. Petit, Verificarlo (2016).

    No global random generator is touched.

    Args:
        seed: Same seed, same program: same results.
        magnitude: Size of each perturbation, in unit roundoffs.
        correlated: Assume that all roundings of one sum go the same way, as they do if its terms are equal (the
            gradient of an average). Then the error grows with the number of terms, not with its root.

    Attributes:
        unperturbed: Names of operators that round, but whose results could not be perturbed (float8, sparse, tensor
            subclasses, higher-order operators without eager implementation).
    """

    def __init__(self, seed: int, magnitude: float = 1.0, *, correlated: bool = False) -> None:
        super().__init__()
        if not magnitude >= 0:
            raise ValueError(f"magnitude must be a number of unit roundoffs, 0 or more; got {magnitude}")
        self.magnitude = magnitude
        self.correlated = correlated
        self.unperturbed: set[str] = set()
        self._noise = NoiseSource(seed)
        self._noise_of_partial_sums = NoiseSource(~seed)

    def opaque(self, name: str) -> None:
        """Take note of a higher-order operator whose inside cannot be perturbed."""
        self.unperturbed.add(name)

    def run(self, func: OpOverload, operator: Operator, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run one operator and perturb it, as its kind demands."""
        kind = operator.kind
        if counts(operator, args, kwargs):
            return func(*args, **kwargs)
        whole = kind in (OperatorKind.ACCUMULATING, OperatorKind.COMBINING)
        if kind is OperatorKind.POINTWISE:  # other pointwise calls are looked at element by element, once they ran
            whole = bool(operator.mutated) or (bool(args) and type(args[0]) is list)
        if whole and adds_integers(func, operator, args, kwargs):
            return func(*args, **kwargs)
        if operator.name in _MADE_OF_OTHERS:
            return self._inside(func, operator, args, kwargs)
        if kind is OperatorKind.ACCUMULATING:
            return self._accumulating(func, operator, args, kwargs)
        if kind is OperatorKind.UNINITIALISED:
            return _poisoned(self._noise, func, operator, args, kwargs)
        if kind is OperatorKind.COMBINING or (kind is OperatorKind.POINTWISE and _combines(args, kwargs)):
            return self._combining(func, operator, args, kwargs)
        result = func(*args, **kwargs)
        if kind is OperatorKind.POINTWISE:
            if kwargs and kwargs.get("rounding_mode") is not None:
                return result
        elif kind is OperatorKind.EXACT:
            # The magnitude and the sign of a complex number are square roots and quotients.
            if operator.base not in ("abs", "sgn") or not isinstance(args[0], torch.Tensor) or not args[0].is_complex():
                return result
        elif kind is OperatorKind.RANDOM:
            # only `normal` with computed parameters rounds: it adds the mean and a number of standard deviations
            if operator.base != "normal" or not draws_by_values(operator):
                return result
        elif not self._narrows(operator, args, result):
            return result
        exact = unrounded(func, operator, args, kwargs, result)
        with DisableTorchDispatch():
            kept = None if exact is None else result.take(exact)
            self._perturb_results(operator, args, kwargs, result, 0.0)
            if exact is not None:
                flat = result.detach().reshape(-1)  # a copy where memory is in another order
                flat[exact] = kept
                if flat.data_ptr() != result.data_ptr():
                    result.detach().copy_(flat.view(result.shape))
        return result

    @staticmethod
    def _narrows(operator: Operator, args: tuple[Any, ...], result: Any) -> bool:
        source = args[1] if operator.base == "copy" and len(args) > 1 else args[0]
        if not isinstance(source, torch.Tensor) or not isinstance(result, torch.Tensor):
            return False
        source_dtype, result_dtype = source.dtype, result.dtype
        if source_dtype == result_dtype or not source_dtype.is_floating_point or not result_dtype.is_floating_point:
            return False
        return torch.finfo(result_dtype).eps > torch.finfo(source_dtype).eps

    def _inside(self, func: OpOverload, operator: Operator, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Perturb every operator that this one is made of.

        Kernels divide a kept deviation by the number of elements in float32; a million of them underflow in float16.
        """
        kept = operator.positions.get("rstd")
        if kept is not None and kept < len(args):
            args = (*args[:kept], _as_float32(args[kept]), *args[kept + 1 :])
        with self:
            result = decomposition(func)(*args, **kwargs)
        if operator.base in _RANGES:
            with DisableTorchDispatch():
                result.detach().clamp_(*_RANGES[operator.base])
        return result

    def _combining(self, func: OpOverload, operator: Operator, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Perturb the terms of a sum of products too: kernels round them to float32 or better."""
        low = next((value.dtype for value in tensors_in(args) if value.dtype in _HALF), None)
        if low is not None and not operator.mutated and "out" not in kwargs:
            with DisableTorchDispatch():
                args = tuple([self._noisy_copy(_as_float32(value), 1.0) for value in args])
            result = func(*args, **kwargs).to(low)
        else:
            result = func(*self._noisy_copies(args, 1.0, {position for position, _ in operator.mutated}), **kwargs)
        self._perturb_results(operator, args, kwargs, result, 0.0)
        return result

    def _accumulating(self, func: OpOverload, operator: Operator, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if operator.base in ("index_put", "_index_put_impl") and not argument(operator, args, kwargs, "accumulate"):
            return func(*args, **kwargs)
        if operator.base == "scatter" and argument(operator, args, kwargs, "reduce") is None:
            return func(*args, **kwargs)
        length = accumulation_length(operator, args, kwargs)
        terms = (length / _CORRELATED) ** 2 if self.correlated else length / _ACCUMULATION
        scale = math.sqrt(1 + terms) if any(name in operator.base for name in _LINEAR) else 1.0
        keep = {position for position, _ in operator.mutated}
        keep.update(operator.positions.get(name, -1) for name in UNMARKED_STATISTICS)
        if "attention" in operator.base:
            keep.update(operator.positions.get(name, -1) for name in _NOT_ROUNDED)
        noisy = self._noisy_copies(args, scale, keep)
        try:
            result = func(*noisy, **kwargs)
        except RuntimeError:  # its noisy input is out of its range (a probability above 1)
            result = func(*args, **kwargs)
        self._perturb_results(operator, args, kwargs, result, terms)
        if self.correlated:
            self._perturb_cancelled(operator, args, kwargs, result)
        return result

    def _perturb_cancelled(
        self, operator: Operator, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any
    ) -> None:
        """Perturb a sum by the roundings of the partial sums on its way: a result that cancels shows nothing of these.

        Times what the verdict allows of it, that is the running error bound of adding the terms up in their order
        (Higham, Accuracy and Stability of Numerical Algorithms, section 3.3).
        """
        terms, target, dims = args[0], result, argument(operator, args, kwargs, "dim")
        if operator.base == "convolution_backward":  # the gradient of its bias
            target, dims = result[2], [0, *range(2, terms.dim())]
        elif operator.base not in ("sum", "mean"):
            return
        if not (_is_plain(terms) and _is_plain(target)) or terms.layout is not torch.strided or terms.is_complex():
            return
        with DisableTorchDispatch():
            summed = [dims] if isinstance(dims, int) else dims or range(terms.dim())
            rest = set(range(terms.dim())) - {dim % terms.dim() for dim in summed}
            order = sorted(range(terms.dim()), key=lambda dim: (dim not in rest, dim))
            flat = _as_float32(terms.detach()).permute(order).flatten(len(rest))
            size = flat.cumsum(-1).abs_().sum(-1) / (max(1, flat.shape[-1]) if operator.base == "mean" else 1)
            moved = size.clone()
            if self._noise_of_partial_sums.perturb_(moved, 1.0):
                amplitude = self.magnitude * min(unit_roundoff(target.dtype), _U32) / _CORRELATED
                target.detach().add_(moved.sub_(size).view(target.shape), alpha=amplitude)

    def _noisy_copies(self, args: Sequence[Any], scale: float, keep: Collection[int]) -> list[Any]:
        with DisableTorchDispatch():
            return [value if place in keep else self._noisy_copy(value, scale) for place, value in enumerate(args)]

    def _noisy_copy(self, value: Any, scale: float) -> Any:
        """A copy of an input with noise of the accumulation's unit roundoff, where its dtype can represent that."""
        if type(value) in (list, tuple):
            return [self._noisy_copy(item, scale) for item in value]
        if not _is_plain(value) or value.layout != torch.strided:
            return value
        own = unit_roundoff(value.dtype)
        amplitude = self.magnitude * min(own, _U32) * scale
        # Noise far below the spacing of the dtype's numbers would need a copy in a wider dtype: another program.
        if amplitude < own * min(1.0, self.magnitude):
            return value
        copy = value.detach().clone()
        return copy if self._noise.perturb_(copy, amplitude) else value

    def _perturb_results(
        self, operator: Operator, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any, terms: float
    ) -> None:
        """Perturb the tensors that an operator returned or mutated, in place."""
        mutated = written_tensors(operator, args, kwargs)
        if operator.base in UPDATING and argument(operator, args, kwargs, "training"):
            mutated += tensors_in([argument(operator, args, kwargs, name) for name in UNMARKED_STATISTICS])
        returned = list(tensors_in(result))
        returned = returned[:1] if operator.base in _FIRST_ONLY else returned
        with DisableTorchDispatch():
            for target in mutated:
                self._perturb(operator, target, terms)
            for target in returned:
                if any(target is other for other in mutated):
                    continue
                # Some operators return their input if they have nothing to do, which their schema does not declare.
                if any(type(value) in PLAIN and is_alias_of(target, value) for value in args):
                    continue  # nothing was rounded
                self._perturb(operator, target, terms)

    def _perturb(self, operator: Operator, target: torch.Tensor, terms: float) -> None:
        if not _is_plain(target):
            if type(target) not in PLAIN:
                self.unperturbed.add(operator.name)
            return
        own = unit_roundoff(target.dtype)
        amplitude = self.magnitude * own
        if terms:
            amplitude = self.magnitude * math.sqrt(own * own + min(own, _U32) ** 2 * terms)
        try:
            if target.layout == torch.strided and self._noise.perturb_(target, amplitude):
                if operator.base in _RANGES and not target.is_complex():
                    target.clamp_(*_RANGES[operator.base])
                return
        except RuntimeError:
            # Memory that overlaps itself (expanded) cannot be changed in place.
            pass
        self.unperturbed.add(operator.name)
