"""The settings that are known to work around wrong compilations, as data."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any

import torch
from torch import fx

from checked_backend._torch.inductor import fall_back, inductor_settings, lowerings_kept
from checked_backend._torch.operators import OpOverload, is_composite
from checked_backend.diagnose.localize.called import operators_called
from checked_backend.options import CheckOptions
from checked_backend.regions.compile import resolve_compiler
from checked_backend.regions.graph_case import GraphCase
from checked_backend.report.clean import listed
from checked_backend.scripts.values import is_literal


@dataclass(frozen=True, slots=True)
class Setting:
    """Something that a person can set.

    Attributes:
        fallback: An operator that Inductor must leave to eager's kernel.
        flags: Settings of the process, by their dotted name under ``torch``.
        devices: Types of devices on which it has an effect; empty for all.
    """

    name: str
    patches: Mapping[str, Any] = field(default_factory=dict)
    fallback: OpOverload | None = None
    flags: Mapping[str, Any] = field(default_factory=dict)
    devices: tuple[str, ...] = ()

    @property
    def part(self) -> str:
        """The part of the compiler that it leaves out."""
        return self.name.removeprefix("no ")

    @property
    def short(self) -> str:
        """How it is set, in a few words."""
        if self.fallback is not None:
            return self.name
        flags = ", ".join(f"torch.{name} = {value!r}" for name, value in self.flags.items())
        return flags or f"options={dict(self.patches)!r}"

    def code_with(self, own: Mapping[str, Any]) -> str:
        """The code to paste into a program that sets these options of its own."""
        if self.flags:
            lines = [f"torch.{name} = {value!r}" for name, value in self.flags.items()]
            return "\n".join(["import torch", "", _EARLY, *lines])
        if self.fallback is not None:
            return _FALLBACK.format(op=self.fallback)
        patches = self._patches_on(own)
        unwritable = [key for key, value in patches.items() if not is_literal(value)]
        written = {key: value for key, value in patches.items() if key not in unwritable}
        options, own_values = repr(written), ""
        if unwritable:
            options = f"{{**own, {options[1:-1]}}}"
            own_values = f"own = {{}}  # your own values of {', '.join(map(repr, unwritable))} belong here\n"
        where = "# where you call torch.compile, with your other arguments; `model` is what you compile"
        return f"import torch\n\n{own_values}{where}\nmodel = torch.compile(model, options={options})"

    def _patches_on(self, own: Mapping[str, Any]) -> dict[str, Any]:
        patches = {**own, **self.patches}
        if _PASSES in self.patches and own.get(_PASSES):
            patches[_PASSES] = f"{own[_PASSES]},{self.patches[_PASSES]}"
        return patches

    def on(self, options: CheckOptions) -> CheckOptions:
        """The options under this setting.

        An operator's fallback and flags change the process that compiles; see `taken_back`.
        """
        if self.fallback is None and not self.flags:
            return options.model_copy(update={"compiler_options": self._patches_on(options.compiler_options)})
        inner = resolve_compiler(options)

        def compiler(gm: fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
            if self.fallback is not None:
                fall_back(self.fallback)
            _set(self.flags)
            return inner(gm, example_inputs)

        return options.model_copy(update={"compiler": compiler, "compiler_options": {}})


_EARLY = "# before the first call of a compiled function"


_FALLBACK = f"""\
import torch
import torch._inductor.decomposition
import torch._inductor.lowering

{_EARLY}
torch.compiler.config.cache_key_tag = "{{op}} left to eager"  # what was compiled before is compiled anew
op = torch.ops.{{op}}
torch._inductor.decomposition.decompositions.pop(op, None)
torch._inductor.decomposition.fast_random_decomps.cache_clear()
torch._inductor.lowering.make_fallback(op, warn=False)"""


@contextmanager
def taken_back(setting: Setting) -> Iterator[None]:
    """Undo at the end of a block what a setting changed in the process that compiles."""
    before = {name: attrgetter(name)(torch) for name in setting.flags}
    with nullcontext() if setting.fallback is None else lowerings_kept():
        try:
            yield
        finally:
            _set(before)


def _set(flags: Mapping[str, Any]) -> None:
    for name, value in flags.items():
        home, _, last = name.rpartition(".")
        setattr(attrgetter(home)(torch), last, value)


_PASSES = "disabled_passes"

_INDISPENSABLE = ("decompose_", "stable_sort", "fix_")
"""Beginnings of the names of passes that Inductor cannot do without."""

_GPUS = ("cuda", "xpu")
_NOT_COOPERATIVE = {"triton.cooperative_reductions": False, "triton.force_cooperative_reductions": False}
_NOT_MEASURED = {"max_autotune": False, "max_autotune_pointwise": False, "max_autotune_gemm": False}

STRICT: Sequence[Setting] = (
    Setting("no loose pointwise arithmetic", {"numerics": "strict_pointwise"}),
    Setting("no loose reductions", {"numerics": "strict_reduction"}, devices=("cuda",)),
    Setting("no loose arithmetic", {"numerics": "strict"}, devices=("cuda",)),
)
"""The degrees to which Inductor can be made to compute as eager does, the cheapest first; torch 2.15 has them."""

SETTINGS: Sequence[Setting] = (
    Setting("no fusion without eager's casts", {"emulate_precision_casts": True}),
    Setting("no approximate division", {"eager_numerics.division_rounding": True}, devices=_GPUS),
    Setting("no flushing of subnormal numbers", {"eager_numerics.disable_ftz": True}, devices=_GPUS),
    Setting("no math library of Triton's own", {"eager_numerics.use_pytorch_libdevice": True}, devices=("cuda",)),
    Setting("no zeros of either sign as a maximum", {"strict_signed_zero": True}),
    Setting("no strides of a view's own", {"strict_output_strides": True}),
    Setting("no floating-point contraction", {"cpp.enable_floating_point_contract_flag": "off"}, devices=("cpu",)),
    Setting("no unsafe math", {"cpp.enable_unsafe_math_opt_flag": False}, devices=("cpu",)),
    Setting("no fast math", {"use_fast_math": False}, devices=_GPUS),
    Setting("no online softmax", {"online_softmax": False}),
    Setting("no layout optimization", {"layout_optimization": False}),
    Setting("no padding of strides", {"comprehensive_padding": False}),
    Setting("no padding of shapes", {"shape_padding": False}, devices=_GPUS),
    Setting("no reuse of input memory", {"inplace_buffers": False}),
    Setting("no reuse of buffers", {"allow_buffer_reuse": False}),
    Setting("no reordering for peak memory", {"reorder_for_peak_memory": False}),
    Setting("no choice of loop orders", {"pick_loop_orders": False}),
    Setting("no loop ordering after fusion", {"loop_ordering_after_fusion": False}),
    Setting("no split reductions", {"split_reductions": False}),
    Setting("no mixed order of reductions", {"triton.mix_order_reduction": False}, devices=_GPUS),
    Setting("no persistent reductions", {"triton.persistent_reductions": False}, devices=_GPUS),
    Setting("no cooperative reductions", _NOT_COOPERATIVE, devices=_GPUS),
    Setting("no choice between kernels at run time", {"triton.multi_kernel": 0}, devices=_GPUS),
    Setting("no tuning of kernels by coordinate descent", {"coordinate_descent_tuning": False}),
    Setting("no choice of kernels by measuring them", _NOT_MEASURED),
    Setting("no CUDA graphs", {"triton.cudagraphs": False}, devices=("cuda",)),
    Setting("no epilogue fusion", {"epilogue_fusion": False}),
    Setting("no prologue fusion", {"prologue_fusion": False}),
    Setting("no freezing", {"freezing": False}),
    Setting("no tiling heuristics", {"cpp.enable_tiling_heuristics": False}, devices=("cpu",)),
    Setting("no decomposed tanh", {"cpp.use_decompose_tanh": False}, devices=("cpu",)),
)
"""Settings that cost little, the cheapest first."""

PASSES: Sequence[Setting] = (
    Setting("no constant folding", {"joint_graph_constant_folding": False}),
    Setting("no pattern matcher", {"pattern_matcher": False}),
    Setting("no passes before autograd", {"use_pre_grad_passes": False}),
    Setting("no joint graph passes", {"use_joint_graph_passes": False}),
    Setting("no passes after autograd", {"use_post_grad_passes": False}),
    Setting("no reordering for locality", {"reorder_for_locality": False}),
)
"""Settings that turn off several graph passes at once. If they help, a single pass is looked for first."""

COSTLY: Sequence[Setting] = (
    Setting("no fusion", {"max_fusion_size": 1, "realize_opcount_threshold": 0, "realize_reads_threshold": 0}),
    Setting("no vectorization", {"cpp.simdlen": 1}, devices=("cpu",)),
)
"""Settings that make the whole model slower, tried when no other helps."""

EAGER: Sequence[Setting] = (
    Setting(
        "eager's kernels for everything",
        {
            "fallback_by_default": True,
            "selective_decompose": True,
            "use_pre_grad_passes": False,
            "use_joint_graph_passes": False,
            "use_post_grad_passes": False,
        },
    ),
)
"""The very last resort, which leaves only the compiler's graph: eager, at eager's speed."""

PROCESS: Sequence[Setting] = (
    Setting(
        "no TF32",
        flags={"backends.cuda.matmul.allow_tf32": False, "backends.cudnn.allow_tf32": False},
        devices=("cuda",),
    ),
    Setting(
        "no bfloat16 inside of float32 products",
        flags={"backends.mkldnn.matmul.fp32_precision": "ieee", "backends.mkldnn.conv.fp32_precision": "ieee"},
        devices=("cpu",),
    ),
)
"""Settings of the whole process, eager included. They are tried if a process can be forked for it."""


def pass_settings(passes: Mapping[str, Sequence[str]]) -> list[Setting]:
    """For each graph pass that Inductor can do without, named with what it replaced, a setting that leaves it out."""
    return [
        Setting(f"no graph pass {name}{f' ({listed(patterns)})' if patterns else ''}", {_PASSES: name})
        for name, patterns in passes.items()
        if not name.startswith(_INDISPENSABLE)
    ]


def together(settings: Sequence[Setting]) -> Setting:
    """Several settings of Inductor's configuration as one."""
    patches: dict[str, Any] = {}
    for setting in settings:
        for key, value in setting.patches.items():
            patches[key] = f"{patches[key]},{value}" if key == _PASSES and key in patches else value
    return Setting(" and ".join(setting.name for setting in settings), patches)


def applicable(settings: Sequence[Setting], case: GraphCase) -> list[Setting]:
    """The settings that this version of torch has, that are not set like this already, and that fit the devices."""
    present = {**inductor_settings(), **case.options.compiler_options}
    devices = {value.device.type for value in case.inputs if isinstance(value, torch.Tensor)} or {"cpu"}

    def can_help(setting: Setting) -> bool:
        if setting.devices and not devices & set(setting.devices):
            return False
        if setting.flags:
            with suppress(AttributeError, RuntimeError):  # this version of torch has another name for it
                # "none" is the default
                return any(attrgetter(name)(torch) not in (value, "none") for name, value in setting.flags.items())
            return False
        changed = any(present.get(key) != value for key, value in setting.patches.items())
        return setting.fallback is not None or (changed and setting.patches.keys() <= present.keys())

    return [setting for setting in settings if can_help(setting)]


def operator_fallbacks(case: GraphCase) -> Iterator[Setting]:
    """For each operator of a graph, a setting that leaves it to eager's kernel. Composite operators have no kernel."""
    named = [node.target for node in case.graph.graph.nodes if isinstance(node.target, OpOverload)]
    targets = dict.fromkeys(named or operators_called(case.graph, case.inputs)[0])
    for op in reversed(targets):
        if not is_composite(op) and not op.is_view:
            yield Setting(f"eager's kernel for {op}", fallback=op)
