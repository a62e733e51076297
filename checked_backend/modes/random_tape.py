"""Record the results of a program's random operators, and replay them in a run whose values or precision differ."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from checked_backend._torch.modes import DisableTorchDispatch
from checked_backend._torch.operators import OpOverload
from checked_backend.errors import OtherDrawsError, ReplayError
from checked_backend.graphs.operators import Operator, argument
from checked_backend.modes.base import OperatorMode, written_tensors

_DROPOUTS = ("native_dropout", "_fused_dropout")
# The outcome is 0 or 1 in the dtype of the probabilities. It is kept as bool.
_BINARY = ("bernoulli",)
# The arguments of these are parameters of distributions, computed values.
_BY_VALUES = frozenset({"multinomial", "poisson", "binomial", "_sample_dirichlet", "_standard_gamma"})
_BY_VALUES_OVERLOADS = frozenset(
    {"aten.bernoulli.default", "aten.bernoulli.Tensor", "aten.bernoulli_.Tensor", "aten.normal.Tensor_float",
     "aten.normal.float_Tensor", "aten.normal.Tensor_Tensor"}
)  # fmt: skip
_Shape = tuple[object, ...]


_ATTENTION = "_scaled_dot_product_"
"""Kernels of this name take queries, keys and values of (batch, heads, length, width)."""


@dataclass(frozen=True, slots=True)
class HiddenDropout:
    """One call of an attention kernel with dropout.

    The kernel takes its numbers from a generator, by a counter and the position in the matrix of attention weights:
    from the same state it drops the same weights, whatever the values are (Philox; ``philox_cuda_state`` in
    ``aten/src/ATen/native/transformers/cuda``).

    Attributes:
        state: The generator's state before the call.
        like: Query, key and value of the call, as shape and dtype.
        settings: The call's other arguments, by name, as far as they are numbers.
    """

    func: OpOverload
    generator: torch.Generator
    state: torch.Tensor
    like: tuple[tuple[torch.Size, torch.dtype], ...]
    settings: Mapping[str, Any]

    @classmethod
    def before(
        cls, func: OpOverload, operator: Operator, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> HiddenDropout | None:
        """What is about to be drawn; None if it is not known from where (cuDNN's recurrent layers keep their own)."""
        if "attention" not in operator.base or not args or not isinstance(args[0], torch.Tensor):
            return None
        device = args[0].device
        if device.type not in ("cpu", "cuda"):
            return None
        generator = torch.default_generator
        if device.type == "cuda":
            at = torch.cuda.current_device() if device.index is None else device.index
            generator = torch.cuda.default_generators[at]
        like = tuple((value.shape, value.dtype) for value in args[:3] if isinstance(value, torch.Tensor))
        found = {name: argument(operator, args, kwargs, name) for name in (*operator.positions, *kwargs)}
        settings = {name: value for name, value in found.items() if isinstance(value, (bool, int, float))}
        return cls(func, generator, generator.get_state(), like, settings)

    @contextmanager
    def again(self) -> Iterator[None]:
        """In the block the kernel draws the same; afterwards the generator goes on from where it was."""
        now = self.generator.get_state()
        self.generator.set_state(self.state)
        try:
            yield
        finally:
            self.generator.set_state(now)

    def mask(self) -> torch.Tensor | None:
        """The attention weights that were kept, (batch, heads, queries, keys), bool; None if the kernel is another one.

        With queries and keys of zero all weights are equal, and with the unit matrix for values each column of the
        result is the mask of one key.
        """
        if len(self.like) != 3 or not self.func._schema.name.split("::")[-1].startswith(_ATTENTION):
            return None
        query, key, value = (
            torch.zeros(shape, dtype=dtype, device=self.generator.device) for shape, dtype in self.like
        )
        keys, width = value.shape[-2:]
        kept = torch.zeros(*query.shape[:-1], keys, dtype=torch.bool, device=query.device)
        settings = {**self.settings, "is_causal": False}
        if any(item.name == "attn_bias" for item in self.func._schema.arguments):
            settings["attn_bias"] = None
        for first in range(0, keys, width):
            count = min(width, keys - first)
            value.zero_()[..., first : first + count, :count] = torch.eye(count, dtype=value.dtype, device=value.device)
            with self.again():
                found = self.func(query, key, value, **settings)[0]
            kept[..., first : first + count] = found[..., :count] != 0
        return kept


@dataclass(frozen=True, slots=True)
class _Outcome:
    """The outcome of one random operator.

    Attributes:
        shape: Shapes and integers among its arguments.
        mutated: Copies of the arguments that it wrote to, after the call.
        results: Copies of the random tensors that it returned, in order.
        hidden: Whether the outcome is inside a kernel (dropout in attention).
        dropout: How such a kernel draws the same again; None if it cannot be made to.
        by_values: Whether it depends on values that the program may have computed (probabilities), so that rounding
            changes it.
    """

    op: str
    shape: _Shape
    mutated: tuple[torch.Tensor, ...] = ()
    results: tuple[torch.Tensor, ...] = ()
    hidden: bool = False
    dropout: HiddenDropout | None = None
    by_values: bool = False


class RandomTape(list[_Outcome]):
    """The outcomes of a program's random operators, in order. They can be replayed any number of times."""

    @property
    def empty(self) -> bool:
        """Whether the recorded program drew nothing."""
        return not self

    @property
    def by_values(self) -> tuple[str, ...]:
        """Names of the operators whose draws depend on floating-point values, so that rounding flips some draws."""
        return tuple(outcome.op for outcome in self if outcome.by_values)

    @property
    def ops(self) -> tuple[str, ...]:
        """Names of the operators that drew, in order."""
        return tuple(outcome.op for outcome in self)


def draws_by_values(operator: Operator) -> bool:
    """Whether a random operator's parameters are values of tensors."""
    return operator.base in _BY_VALUES or operator.name in _BY_VALUES_OVERLOADS


def _draws(operator: Operator, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether this call draws. It does not if dropout is off, or its probability is zero."""
    if not operator.draws or operator.base.endswith("_backward"):
        return False
    if operator.base == "native_dropout":
        return argument(operator, args, kwargs, "train", True) is not False and args[1] != 0
    if operator.base.startswith("rrelu"):
        return bool(argument(operator, args, kwargs, "training", False))
    hidden = _hidden_probability(operator, args, kwargs)
    return hidden is None or hidden > 0


def _hidden_probability(operator: Operator, args: Sequence[Any], kwargs: Mapping[str, Any]) -> float | None:
    """The dropout probability of a kernel with dropout inside; None if it is not such a kernel."""
    for name in ("dropout_p", "dropout"):
        value = argument(operator, args, kwargs, name)
        if isinstance(value, (int, float)):
            return float(value)
    # The argument is left out: its default is 0.
    takes_it = "dropout_p" in operator.positions and "attention" in operator.base
    return 0.0 if takes_it else None


def _shape_of(value: Any) -> object:
    if isinstance(value, torch.Tensor):
        return tuple(value.shape)
    if isinstance(value, (list, tuple)):
        return tuple(_shape_of(item) for item in value)
    # Floats may come out of perturbed tensors; dtypes may be promoted.
    return value if type(value) is int else None


class RecordRandom(OperatorMode):
    """Run a program as it is, and record the outcomes of its random operators on a tape.

    Results and the use of random generators are those of the program without this mode. There is one exception: bits
    may differ if a program asks for singular values or eigenvalues alone (``linalg.svdvals`` and the like), because
    torch itself takes another path for them under any mode.

    Args:
        tape: Outcomes are appended to it.
    """

    def __init__(self, tape: RandomTape) -> None:
        super().__init__()
        self._tape = tape

    def run(self, func: OpOverload, operator: Operator, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run one operator, and record a copy of its outcome if it draws."""
        # The shapes are taken before the call: resize and out= variants may change the arguments.
        draws = _draws(operator, args, kwargs)
        if not draws:
            return func(*args, **kwargs)
        shape = (_shape_of(args), _shape_of(list(kwargs.values())))
        if _hidden_probability(operator, args, kwargs) is not None:
            with DisableTorchDispatch():
                dropout = HiddenDropout.before(func, operator, args, kwargs)
            self._tape.append(_Outcome(operator.name, shape, hidden=True, dropout=dropout))
            return func(*args, **kwargs)
        result = func(*args, **kwargs)
        with DisableTorchDispatch():
            self._tape.append(self._outcome(operator, args, kwargs, result, shape))
        return result

    @staticmethod
    def _outcome(
        operator: Operator, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any, shape: _Shape
    ) -> _Outcome:
        mutated = written_tensors(operator, args, kwargs)
        returned = result if isinstance(result, (list, tuple)) else (result,)
        results = [item for item in returned if isinstance(item, torch.Tensor)]
        results = [item for item in results if not any(item is other for other in mutated)]
        if operator.base in _DROPOUTS:
            results = results[1:]  # only the mask is random
        binary = operator.base in _BINARY

        def keep(tensor: torch.Tensor) -> torch.Tensor:
            return tensor.detach().to(torch.bool if binary else tensor.dtype, copy=True)

        return _Outcome(
            operator.name,
            shape,
            tuple(map(keep, mutated)),
            tuple(map(keep, results)),
            by_values=draws_by_values(operator),
        )


class ReplayRandom(OperatorMode):
    """Run a program with the outcomes on a tape in place of its random operators, which then draw nothing.

    Outcomes are given as recorded, in the dtype and on the device that the operator would have had. That holds for
    outcomes that do not depend on values (rand, uniform_, randperm, ...), and for those that do (bernoulli,
    multinomial, poisson, normal with tensor arguments). Dropout keeps its recorded mask, and rrelu its recorded slopes.
    Both compute their result from the present input. So does attention with dropout inside its kernel: the kernel draws
    from the generator's recorded state, and in a precision for which there is no such kernel its mask is used.

    Args:
        tape: Recorded by :class:`RecordRandom` from the same program on inputs of the same shapes.

    Attributes:
        position: How many outcomes were replayed.

    Raises:
        ReplayError: From the program, at the first random operator that is not the recorded one, has other shapes,
            comes after the end of the tape, or hides its outcome (cuDNN's recurrent layers with dropout).
    """

    def __init__(self, tape: RandomTape) -> None:
        super().__init__()
        self._tape = tape
        self.position = 0

    def run(self, func: OpOverload, operator: Operator, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run one operator, or return its recorded outcome if it draws."""
        if not _draws(operator, args, kwargs):
            return func(*args, **kwargs)
        with DisableTorchDispatch():
            outcome = self._next(operator, args, kwargs)
        if outcome.dropout is not None:
            with outcome.dropout.again():
                return func(*args, **kwargs)
        with DisableTorchDispatch():
            if operator.base in _DROPOUTS:
                return self._dropout(operator, args, outcome)
            if operator.base.startswith("rrelu"):
                return self._rrelu(operator, args, outcome)
            return self._replay(operator, args, kwargs, outcome)

    def _next(self, operator: Operator, args: tuple[Any, ...], kwargs: dict[str, Any]) -> _Outcome:
        if self.position >= len(self._tape):
            raise ReplayError(
                f"{operator.name} draws after the end of the tape, which has {len(self._tape)} outcomes. "
                f"Replay the program that was recorded, with one tape for all its calls."
            )
        outcome = self._tape[self.position]
        translated = _translated(operator, args, outcome)
        if translated is not None:
            self.position += 1
            return translated
        shape = (_shape_of(args), _shape_of(list(kwargs.values())))
        where = f"outcome {self.position} on the tape"
        if outcome.op != operator.name:
            raise OtherDrawsError(f"{operator.name} draws, but {where} is of {outcome.op}: not the program recorded.")
        if outcome.hidden and outcome.dropout is None:
            raise ReplayError(
                f"{operator.name} with dropout draws inside its kernel, so it cannot be replayed. "
                f"Set the dropout probability to 0."
            )
        if outcome.shape != shape:
            raise ReplayError(
                f"{operator.name} draws for arguments {shape}, but {where} is for {outcome.shape}: other shapes."
            )
        self.position += 1
        return outcome

    @staticmethod
    def _dropout(operator: Operator, args: tuple[Any, ...], outcome: _Outcome) -> Any:
        source, probability = args[0], float(args[1])
        keep = 1 - probability if operator.base == "native_dropout" else probability
        mask = outcome.results[0].to(source.device, copy=True)
        return (source * mask).mul_(0.0 if keep == 0 else 1 / keep), mask

    @staticmethod
    def _rrelu(operator: Operator, args: tuple[Any, ...], outcome: _Outcome) -> Any:
        # The slopes are 1 for elements that were positive when they were recorded.
        source = args[0]
        slopes = (outcome.mutated or outcome.results)[-1].to(source.device, source.dtype, copy=True)
        if operator.name.startswith("aten.rrelu_with_noise_functional"):
            return source * slopes, slopes
        args[1].copy_(slopes)
        if operator.name.startswith("aten.rrelu_with_noise_."):
            return source.mul_(slopes)
        return source * slopes

    @staticmethod
    def _replay(operator: Operator, args: tuple[Any, ...], kwargs: dict[str, Any], outcome: _Outcome) -> Any:
        mutated = written_tensors(operator, args, kwargs)
        for target, value in zip(mutated, outcome.mutated, strict=True):
            if target.shape != value.shape:
                target.resize_(value.shape)  # an out= variant
            target.copy_(value)
        if not outcome.results:
            return mutated[0] if len(mutated) == 1 else tuple(mutated)
        results = tuple(_as_now(operator, args, kwargs, value) for value in outcome.results)
        return results[0] if len(results) == 1 else results


def _translated(operator: Operator, args: Sequence[Any], outcome: _Outcome) -> _Outcome | None:
    """The outcome in the form of an operator that draws the same under another name; None for any other operator.

    Eager's dropout on the CPU draws with ``bernoulli_``. AOT autograd replaces it by ``native_dropout``, and in-place
    operators by those that return their result. Attention has no fused kernel in float64, where its weights are dropped
    by an operator of their own.
    """
    recorded = outcome.op.split(".")[1].rstrip("_")
    wanted = operator.base.rstrip("_")
    if not args or not isinstance(args[0], torch.Tensor):
        return None
    of_attention = outcome.dropout is not None and wanted in ("bernoulli", "native_dropout")
    if of_attention or {recorded, wanted} == {"bernoulli", "native_dropout"}:
        masks = (*outcome.mutated, *outcome.results)
        if outcome.dropout is not None:
            kept = outcome.dropout.mask()
            masks = () if kept is None else (kept,)
        if len(masks) != 1 or masks[0].shape != args[0].shape:
            return None
        into = operator.mutated and wanted == "bernoulli"
        return _Outcome(operator.name, (), masks if into else (), () if into else masks)
    values = outcome.mutated or outcome.results
    if recorded != wanted.removesuffix("_functional") or outcome.hidden or len(values) != 1:
        return None
    if bool(outcome.mutated) == bool(operator.mutated) or values[0].shape != args[0].shape:
        return None
    return _Outcome(operator.name, (), values if operator.mutated else (), () if operator.mutated else values)


def _as_now(operator: Operator, args: tuple[Any, ...], kwargs: dict[str, Any], value: torch.Tensor) -> torch.Tensor:
    """A copy of an outcome, in the dtype and on the device that the operator has in this run."""
    sources = [item for item in args if isinstance(item, torch.Tensor)]
    dtype: torch.dtype = kwargs.get("dtype") or value.dtype
    if kwargs.get("dtype") is None and (value.is_floating_point() or value.is_complex() or operator.base in _BINARY):
        if sources:
            dtype = sources[0].dtype
            for other in sources[1:]:
                dtype = torch.promote_types(dtype, other.dtype)
        elif not value.is_complex():
            dtype = torch.get_default_dtype()
    device = kwargs.get("device") or (sources[0].device if sources else value.device)
    return value.to(device, dtype, copy=True)
