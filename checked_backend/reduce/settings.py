"""The settings that are known to work around wrong compiles, as data."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from checked_backend._torch import OpOverload, fall_back, inductor_settings, is_composite, lookup_backend
from checked_backend.options import CheckOptions
from checked_backend.regions.candidate import Compiler
from checked_backend.regions.trial import Trial

__all__ = ["COSTLY", "SETTINGS", "Setting", "applicable", "operator_fallbacks"]


@dataclass(frozen=True, slots=True)
class Setting:
    """Something that a person can set.

    Attributes:
        name: What it does, for people.
        patches: Inductor's config patches.
        fallback: An operator that Inductor is to leave to eager's kernel.
        devices: Types of devices on which it means something; empty for all.
    """

    name: str
    patches: Mapping[str, Any] = field(default_factory=dict)
    fallback: OpOverload | None = None
    devices: tuple[str, ...] = ()

    @property
    def code(self) -> str:
        """What to paste."""
        if self.fallback is None:
            return f"torch.compile(model, options={dict(self.patches)!r})"
        return (
            "import torch._inductor.lowering as lowering  # before the first call of a compiled function\n"
            f"op = torch.ops.{self.fallback}\n"
            "torch._inductor.decomposition.decompositions.pop(op, None)\n"
            "lowering.make_fallback(op, warn=False)"
        )

    def on(self, options: CheckOptions) -> CheckOptions:
        """The options under this setting. An operator's fallback changes the process that compiles, for good."""
        if self.fallback is None:
            changed: dict[str, Any] = {"compiler_options": {**options.compiler_options, **self.patches}}
        else:
            patches = {"fallback_random": True, **options.compiler_options}
            changed = {"compiler": _falling_back(self.fallback, patches), "compiler_options": {}}
        return options.model_copy(update=changed)


def _falling_back(op: OpOverload, patches: Mapping[str, Any]) -> Compiler:
    def compiler(gm: fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        fall_back(op)
        inductor: Any = lookup_backend("inductor")
        compiled: Callable[..., Any] = inductor(gm, list(example_inputs), config_patches=dict(patches))
        return compiled

    return compiler


SETTINGS: Sequence[Setting] = (
    Setting("keep eager's casts between fused operators", {"emulate_precision_casts": True}),
    Setting("no floating-point contraction", {"cpp.enable_floating_point_contract_flag": "off"}, devices=("cpu",)),
    Setting("no unsafe math", {"cpp.enable_unsafe_math_opt_flag": False}, devices=("cpu",)),
    Setting("no fast math", {"use_fast_math": False}, devices=("cuda", "xpu")),
    Setting("no constant folding", {"joint_graph_constant_folding": False}),
    Setting("no pattern matcher", {"pattern_matcher": False}),
    Setting("no passes before autograd", {"use_pre_grad_passes": False}),
    Setting("no joint graph passes", {"use_joint_graph_passes": False}),
    Setting("no passes after autograd", {"use_post_grad_passes": False}),
    Setting("no online softmax", {"online_softmax": False}),
    Setting("no layout optimization", {"layout_optimization": False}),
    Setting("no padding of strides", {"comprehensive_padding": False}),
    Setting("no padding of shapes", {"shape_padding": False}, devices=("cuda", "xpu")),
    Setting("no reuse of input memory", {"inplace_buffers": False}),
    Setting("no reuse of buffers", {"allow_buffer_reuse": False}),
    Setting("no reordering for peak memory", {"reorder_for_peak_memory": False}),
    Setting("no reordering for locality", {"reorder_for_locality": False}),
    Setting("no choice of loop orders", {"pick_loop_orders": False}),
    Setting("no loop ordering after fusion", {"loop_ordering_after_fusion": False}),
    Setting("no split reductions", {"split_reductions": False}),
    Setting("no epilogue fusion", {"epilogue_fusion": False}),
    Setting("no prologue fusion", {"prologue_fusion": False}),
    Setting("no freezing", {"freezing": False}),
    Setting("no tiling heuristics", {"cpp.enable_tiling_heuristics": False}, devices=("cpu",)),
    Setting("tanh of the math library", {"cpp.use_decompose_tanh": False}, devices=("cpu",)),
)
"""Settings that cost little, in the order of what they cost."""

COSTLY: Sequence[Setting] = (
    Setting("no fusion", {"max_fusion_size": 1, "realize_opcount_threshold": 0, "realize_reads_threshold": 0}),
    Setting("no vectorization", {"cpp.simdlen": 1}, devices=("cpu",)),
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
"""Settings that make the whole model slower, tried when no other helps."""


def applicable(settings: Sequence[Setting], trial: Trial) -> list[Setting]:
    """The settings that this version of Inductor has, that are not set like this already, and that fit the devices."""
    present = {**inductor_settings(), **trial.options.compiler_options}
    devices = {value.device.type for value in trial.inputs if isinstance(value, torch.Tensor)} or {"cpu"}
    return [
        setting
        for setting in settings
        if setting.patches.keys() <= present.keys()
        and any(present[key] != value for key, value in setting.patches.items())
        and (not setting.devices or devices & set(setting.devices))
    ]


def operator_fallbacks(trial: Trial) -> Iterator[Setting]:
    """For each operator of a graph: leave it to eager's kernel. Compositions have none of their own."""
    targets = dict.fromkeys(node.target for node in trial.graph.graph.nodes if isinstance(node.target, OpOverload))
    for op in reversed(targets):
        if isinstance(op, OpOverload) and not is_composite(op) and not op.is_view:
            yield Setting(f"eager's kernel for {op}", fallback=op)
