"""Run a dumped graph in eager, and refuse what would write out of its memory before it runs.

Most kernels check their arguments. Those below do not, because autograd, which usually calls them, cannot get them
wrong. A stranger's graph can. The child process that runs it protects its parent from a death, and an operator that
reads too far or divides by zero does no more. One that writes where the graph tells it to could run the graph's code:
it is refused before it runs.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import torch
from torch import fx

from checked_backend._torch.autograd import get_dynamic_layer_stack_depth, transforms_unharmed
from checked_backend._torch.operators import OpOverload, find_op_packet, is_writing_out
from checked_backend._torch.pytree import tree_leaves
from checked_backend.dump.load import Dump
from checked_backend.errors import DumpError
from checked_backend.graphs.operators import Operator
from checked_backend.modes.base import OperatorMode
from checked_backend.report.clean import clean, first_line

_SHOWN = 400


class OutOfRange(Exception):
    """Raised if an operator would leave its memory."""


class _Guard(OperatorMode):
    """Checks each operator's arguments before it runs."""

    def run(self, func: OpOverload, operator: Operator, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        leaves = (leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor))
        why = operator_argument_problem(func, args, kwargs) or next(filter(None, map(memory_problem, leaves)), None)
        if why is not None:
            raise OutOfRange(f"{func.name().partition('.')[0].replace('::', '.')}: {why}")
        return func(*args, **kwargs)


class _Refused(Exception):
    """Raised for a node that eager does not run, and for a graph after which later code would run otherwise."""


class _Nodewise(fx.Interpreter):
    def run_node(self, n: fx.Node) -> Any:
        try:
            return super().run_node(n)
        except _Refused:
            raise
        except Exception as error:
            raise _Refused(f"node {n.name}: {_describe(error)}") from error


def rehearse(dump: Dump, seed: int = 0) -> None:
    """Run a graph in eager, forward and backward, and throw away its results.

    Call this in a process of its own, with limits: the memory and the time that a graph needs are not known before.

    Args:
        dump: The result of `load_dump`. Neither its module nor its constants are touched.
        seed: For input values that were not saved.

    Raises:
        DumpError: The graph or its inputs cannot be built here, eager refuses a node, or a node would leave its memory;
            the message says which and why.
    """
    module = dump.build()
    training = dump.kind == "dynamo"
    with dump.ambient(), torch.set_grad_enabled(training and torch.is_grad_enabled()):
        inputs = dump.inputs(seed)
        if not training:
            inputs = [value.detach() if isinstance(value, torch.Tensor) else value for value in inputs]
        interpreter = _Nodewise(module)
        interpreter.extra_traceback = False  # else FX writes about a failing node to stderr
        try:
            with _modes_unharmed(), _Guard():
                depth = get_dynamic_layer_stack_depth()
                outputs = interpreter.run(*inputs)
                if get_dynamic_layer_stack_depth() != depth:
                    raise _Refused("the graph enters a transform of torch.func and does not leave it")
                roots = [leaf for leaf in tree_leaves(outputs) if isinstance(leaf, torch.Tensor) and leaf.requires_grad]
                if roots:
                    torch.autograd.backward(roots, [torch.ones_like(root) for root in roots])
        except _Refused as error:
            raise DumpError(f"{dump.path / 'graph.json'}: {error}") from None
        except Exception as error:
            raise DumpError(f"{dump.path / 'graph.json'}: the backward pass in eager: {_describe(error)}") from None


@contextmanager
def _modes_unharmed() -> Iterator[None]:
    """Leave the modes that a graph enters and does not leave: later code must not run under them."""
    kinds = [kind for kind in ("cpu", "cuda") if torch.amp.is_autocast_available(kind)]
    casts = {kind: (torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in kinds}
    with transforms_unharmed():
        try:
            yield
        finally:
            for kind, (enabled, dtype) in casts.items():
                torch.set_autocast_enabled(kind, enabled)
                torch.set_autocast_dtype(kind, dtype)


def _describe(error: Exception) -> str:
    if isinstance(error, OutOfRange):
        return f"it would leave its memory: {clean(str(error))}"
    return f"eager refuses it: {type(error).__name__}: {first_line(str(error).strip())[:_SHOWN]}"


class _Arguments(SimpleNamespace):
    """The arguments of an operator by name; None for one that it does not have."""

    def __getattr__(self, name: str) -> Any:
        return None


_Need = tuple[int, ...] | int | range | list[Any]
"""What is needed of a tensor: its shape, its number of elements, or a range for its values. Of a list: a list of
needs."""

_Requirement = tuple[str, Any, _Need | None] | str
"""The name of an argument, the argument, and what is needed of it; or a problem."""

_Rule = Callable[[_Arguments], Iterator[_Requirement]]


def memory_problem(tensor: torch.Tensor) -> str | None:
    """Why a tensor is not within its storage; None if it is."""
    if tensor.layout is not torch.strided or tensor.device.type == "meta" or not tensor.numel():
        return None
    try:
        there = tensor.untyped_storage().nbytes()
    except (NotImplementedError, RuntimeError):
        return None  # the tensor has no memory of its own: a zero that torch does not store, or a level of a transform
    span = 1 + sum((size - 1) * step for size, step in zip(tensor.shape, tensor.stride(), strict=True))
    needed = (tensor.storage_offset() + span) * tensor.element_size()
    if needed <= there:
        return None
    return f"a tensor of shape {tuple(tensor.shape)} reaches to byte {needed} of a storage of {there}"


def operator_argument_problem(overload: OpOverload, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> str | None:
    """Why an operator would leave its memory; None if it does not, as far as is known."""
    name = overload.name().partition("::")[2].partition(".")[0]
    inner = name.startswith("_") or "_backward" in name or name in ("rrelu_with_noise", "nanmedian")
    if inner and is_writing_out(overload):  # public operators resize what they write to, and check it
        return "it may not be told where to write"  # nor does a traced graph ever tell it
    family = _FAMILIES.fullmatch(name)
    rules = [rule for rule in (_forward_rule(family[1]) if family else None, _RULES.get(name)) if rule is not None]
    declared = overload._schema.arguments if rules else ()
    given = {argument.name: argument.default_value for argument in declared if argument.has_default_value()}
    given |= {argument.name: value for argument, value in zip(declared, args, strict=False)}
    found = (_first_problem(rule, _Arguments(**{**given, **kwargs})) for rule in rules)
    return next(filter(None, found), None)


def _first_problem(rule: _Rule, given: _Arguments) -> str | None:
    try:
        for requirement in rule(given):
            problem = requirement if isinstance(requirement, str) else _problem(*requirement)
            if problem is not None:
                return problem
    except (RuntimeError, LookupError, TypeError, ValueError, AttributeError, ArithmeticError) as error:
        return f"its arguments do not fit together ({type(error).__name__}: {first_line(str(error).strip())[:200]})"
    return None


def _problem(what: str, value: Any, need: _Need | None) -> str | None:
    if value is None or need is None:
        return None
    if isinstance(need, list):
        if len(value) != len(need):
            return f"{what} has {len(value)} tensors, not {len(need)}"
        return next(filter(None, (_problem(what, *pair) for pair in zip(value, need, strict=True))), None)
    if isinstance(need, range):
        if not value.numel():
            return None
        least, greatest = (int(bound) for bound in value.detach().to(torch.int64).aminmax())
        inside = least >= need.start and greatest < need.stop
        return None if inside else f"{what} from {least} to {greatest}, where {need.start} to {need.stop - 1} are there"
    if isinstance(need, int):
        return None if value.numel() == need else f"{what} has {value.numel()} elements, not {need}"
    return None if tuple(value.shape) == tuple(need) else f"{what} is of shape {tuple(value.shape)}, not {tuple(need)}"


_FAMILIES = re.compile(
    r"(\w*pad\dd|\w*pool\w*|upsample_\w+|grid_sampler_\dd|\w*nll_loss\w*|multi\w*_margin_loss|glu)_backward"
)
"""Backward operators that take their loops from one tensor, and their memory from another."""


def _forward_rule(forward_name: str) -> _Rule:
    """The gradient has the shape of the forward operator's result."""

    def rule(a: _Arguments) -> Iterator[_Requirement]:
        forward = getattr(find_op_packet("aten", forward_name), "default", None)
        if not isinstance(forward, OpOverload):
            return
        given, declared = vars(a), forward._schema.arguments
        if all(one.name in given or one.has_default_value() for one in declared):
            try:
                result = forward(**{one.name: _empty(given.get(one.name, one.default_value)) for one in declared})
            except NotImplementedError:
                return  # it does not run without memory
            yield "grad_output", a.grad_output, (result[0] if isinstance(result, (tuple, list)) else result).shape

    return rule


def _empty(value: Any) -> Any:
    """The same tensors without memory."""
    if isinstance(value, torch.Tensor):
        return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")
    return [_empty(one) for one in value] if isinstance(value, (list, tuple)) else value


def _pool(spatial: int) -> _Rule:
    def rule(a: _Arguments) -> Iterator[_Requirement]:
        source, gradient = a.self.shape, a.grad_output.shape
        if len(source) not in (spatial + 1, spatial + 2) or len(gradient) != len(source):
            yield f"self has {len(source)} dimensions, grad_output {len(gradient)}"
        yield "grad_output", a.grad_output, (*source[:-spatial], *gradient[-spatial:])
        yield "indices", a.indices, gradient
        yield "indices", a.indices, range(math.prod(source[-spatial:]))
        if a.output_size is not None and tuple(a.output_size) != tuple(gradient[-spatial:]):
            yield f"output_size is {tuple(a.output_size)}, and grad_output of shape {tuple(gradient)}"

    return rule


def _embedding_backward(a: _Arguments) -> Iterator[_Requirement]:
    yield "indices", a.indices, range(int(a.num_weights))


def _bag_backward(a: _Arguments) -> Iterator[_Requirement]:
    rows = int(a.num_weights) if a.weight is None else a.weight.shape[0]
    yield "indices", a.indices, range(rows)
    yield "offset2bag", a.offset2bag, range(0 if a.grad is None else a.grad.shape[0])
    yield "offset2bag", a.offset2bag, a.indices.numel() if a.offset2bag.numel() else 0
    yield "maximum_indices", a.maximum_indices, range(-1, rows)
    yield "offsets", a.offsets, range(a.indices.numel() + 1)
    yield "per_sample_weights", a.per_sample_weights, a.indices.numel()


def _layer_norm_backward(a: _Arguments) -> Iterator[_Requirement]:
    outer = a.input.numel() // max(1, math.prod(a.normalized_shape))
    yield "grad_out", a.grad_out, a.input.shape
    yield "weight", a.weight, tuple(a.normalized_shape)
    yield "bias", a.bias, tuple(a.normalized_shape)
    yield "mean", a.mean, outer
    yield "rstd", a.rstd, outer


def _batch_norm(a: _Arguments) -> Iterator[_Requirement]:
    channels = a.input.shape[1]
    update = a.train if a.update is None else a.update  # None for a forward operator
    saved = {"save_mean": a.save_mean, "save_invstd": a.save_invstd, "save_var": a.save_var}
    if not (update if update is not None else a.training is None or a.training):
        if a.running_mean is None or a.running_var is None:
            yield "there are no running statistics"
    elif update and (a.save_mean is None or (a.save_invstd is None and a.save_var is None)):
        yield "there are no saved statistics"
    for what in ("weight", "bias", "running_mean", "running_var"):
        yield what, getattr(a, what), channels
    for what, value in saved.items():
        yield what, value, channels if update or (value is not None and value.numel()) else None
    yield "grad_out", a.grad_out, a.input.shape


def _optimizer_step(a: _Arguments) -> Iterator[_Requirement]:
    shapes = [parameter.shape for parameter in a.self]
    for what in ("grads", "exp_avgs", "exp_avg_sqs", "state_sums"):
        yield what, getattr(a, what), shapes
    for what in ("max_exp_avg_sqs", "momentum_buffer_list"):
        yield what, getattr(a, what) or None, shapes
    yield "state_steps", a.state_steps, [1] * len(shapes)


def _foreach_copy(a: _Arguments) -> Iterator[_Requirement]:
    yield "src", a.src, [None] * len(a.self)


def _pivots(a: _Arguments) -> Iterator[_Requirement]:
    yield "pivots", a.pivots.abs(), range(1, (a.LD if a.LU is None else a.LU).shape[-2] + 1)


def _attention_backward(a: _Arguments) -> Iterator[_Requirement]:
    batch, heads, rows, width = a.query.shape
    _, key_heads, columns, value_width = a.value.shape
    for what in ("grad_out", "out"):
        yield what, getattr(a, what), (batch, heads, rows, value_width)
    yield "logsumexp", a.logsumexp, batch * heads * rows
    yield "key", a.key, (batch, key_heads, columns, width)
    yield "value", a.value, (batch, key_heads, columns, value_width)
    if not key_heads or heads % key_heads:
        yield f"{heads} heads of the query do not fit {key_heads} of the key"


def _transform(a: _Arguments) -> Iterator[_Requirement]:
    chosen = torch.tensor([int(dimension) for dimension in a.dim], dtype=torch.int64)
    yield "dim", chosen, range(a.self.dim())  # the operator around it counts from the front
    if len(chosen.unique()) < len(chosen):
        yield f"dimensions {chosen.tolist()} are not distinct"


def _weight_norm(a: _Arguments) -> Iterator[_Requirement]:
    v, g = (a.saved_v, a.saved_g) if a.v is None else (a.v, a.g)
    if not v.numel() or a.dim not in (0, v.dim() - 1):
        yield "it is along the first or the last dimension of a tensor that is not empty"
    for what, value in (("g", g), ("saved_norms", a.saved_norms)):
        yield what, value, v.shape[a.dim]
    yield "grad_w", a.grad_w, v.shape


def _unfold_backward(a: _Arguments) -> Iterator[_Requirement]:
    whole = torch.empty([int(size) for size in a.input_sizes], device="meta")
    yield "grad_in", a.grad_in, whole.unfold(a.dim, a.size, a.step).shape


def _ctc_loss_backward(a: _Arguments) -> Iterator[_Requirement]:
    times, batch, classes = a.log_probs.shape
    inputs, targets = (torch.as_tensor(lengths, dtype=torch.int64) for lengths in (a.input_lengths, a.target_lengths))
    yield "input_lengths", inputs, batch
    yield "input_lengths", inputs, range(times + 1)
    longest = int(targets.max()) if batch else 0
    yield "target_lengths", targets, batch
    yield "target_lengths", targets, range(a.targets.shape[-1] + 1)
    if a.targets.numel() < (int(targets.sum()) if a.targets.dim() == 1 else batch * longest):
        yield f"targets is of shape {tuple(a.targets.shape)}"
    yield "targets", a.targets, range(classes)
    yield "blank", torch.tensor(a.blank), range(classes)
    yield "log_alpha", a.log_alpha, (batch, times, max(a.log_alpha.shape[-1], 2 * longest + 1))
    yield "neg_log_likelihood", a.neg_log_likelihood, batch
    yield "grad", a.grad, batch


def _recurrent(a: _Arguments) -> Iterator[_Requirement]:
    gates = _GATES[int(a.mode)] * int(a.hidden_size)
    weights = [getattr(a, f"weight{place + (a.weight0 is None)}") for place in range(4)]
    yield "weights", weights, [(gates, a.input.shape[-1]), (gates, int(a.hidden_size)), gates, gates]
    times, batch = a.input.shape[:2]  # also with batch_first: the operator around it has transposed them
    for what in ("hx_", "cx_", "cx_tmp"):
        yield what, getattr(a, what), batch * int(a.hidden_size)
    for what in ("output", "grad_output"):
        yield what, getattr(a, what), times * batch * int(a.hidden_size)


_GATES: Mapping[int, int] = {0: 1, 1: 1, 2: 4, 3: 3}
"""The number of gates of a recurrent cell, by the number of its kind: plain with ReLU or tanh, LSTM, GRU."""

_RULES: Mapping[str, _Rule] = {
    name: rule
    for names, rule in (
        ("max_pool2d_with_indices_backward adaptive_max_pool2d_backward fractional_max_pool2d_backward", _pool(2)),
        ("max_pool3d_with_indices_backward adaptive_max_pool3d_backward fractional_max_pool3d_backward", _pool(3)),
        ("_adaptive_avg_pool2d_backward", _pool(2)),
        ("_adaptive_avg_pool3d_backward", _pool(3)),
        ("embedding_dense_backward", _embedding_backward),
        (
            "_embedding_bag_backward _embedding_bag_dense_backward _embedding_bag_per_sample_weights_backward",
            _bag_backward,
        ),
        ("native_layer_norm_backward", _layer_norm_backward),
        (
            "native_batch_norm native_batch_norm_backward batch_norm_backward _native_batch_norm_legit "
            "_native_batch_norm_legit_functional _native_batch_norm_legit_no_training _batch_norm_with_update "
            "_batch_norm_with_update_functional batch_norm_update_stats",
            _batch_norm,
        ),
        ("_fused_adam _fused_adamw _fused_sgd _fused_adagrad", _optimizer_step),
        ("_fused_adam_ _fused_adamw_ _fused_sgd_ _fused_adagrad_", _optimizer_step),
        ("linalg_lu_solve linalg_ldl_solve", _pivots),
        ("_scaled_dot_product_flash_attention_for_cpu_backward", _attention_backward),
        ("_fft_r2c _fft_c2r _fft_c2c", _transform),
        ("_foreach_copy", _foreach_copy),
        ("_weight_norm_interface _weight_norm_interface_backward", _weight_norm),
        ("unfold_backward", _unfold_backward),
        ("_ctc_loss_backward", _ctc_loss_backward),
        ("mkldnn_rnn_layer mkldnn_rnn_layer_backward", _recurrent),
    )
    for name in names.split()
}
