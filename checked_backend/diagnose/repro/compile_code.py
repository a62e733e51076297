"""The compile call of a repro: backend, options, and those settings of the running process that matter."""

from __future__ import annotations

import sys
import sysconfig
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

from checked_backend._torch.dynamo import registered_here
from checked_backend._torch.settings import changed_settings
from checked_backend.diagnose.reduce.failing_case import FailingCase
from checked_backend.diagnose.repro.function_source import Source
from checked_backend.regions.inputs import find_effects
from checked_backend.regions.process_state import ProcessState, following
from checked_backend.scripts.values import Untranslatable, is_literal

_IRRELEVANT = (
    "cache",
    "caches",
    "caching",
    "compile_threads",
    "debug",
    "log",
    "logger",
    "logging",
    "precompile",
    "trace",
    "verbose",
    "worker",
    "progress",
    "pgo",
    "subproc",
    "recompile",
)


def matters(setting: str) -> bool:
    """Whether a setting's name has no word by which it changes how compilation goes, and not its result."""
    words = f"_{setting.replace('.', '_')}_"  # whole ones: epilogue_fusion is not about a log
    return not any(f"_{word}_" in words for word in _IRRELEVANT)


@dataclass(frozen=True, slots=True)
class CompileCode:
    """How a script compiles.

    Attributes:
        arguments: The arguments of ``torch.compile``, after the function.
        problem: Why the script cannot compile in a fresh process; "" if it can.
        copied: Whether ``lines`` have a user's own source, whose annotations may use names that the script lacks.
    """

    arguments: str
    lines: tuple[str, ...] = field(default=())
    problem: str = ""
    copied: bool = False


def write_compile(program: FailingCase, *, random: bool | None = None) -> CompileCode:
    """Write the compile call, with the settings of torch's compilers that this process has changed.

    Args:
        random: Whether the program is about random numbers; found out if not given.
    """
    options = program.case.options
    given = dict(options.compiler_options)
    random = is_random(program) if random is None else random
    if not random:  # the checker sets it everywhere
        given.pop("fallback_random", None)
    lines: list[str] = []
    problem = ""
    compiler = options.compiler
    if isinstance(compiler, str):
        compiler = registered_here(compiler) or compiler
    if isinstance(compiler, str):
        backend = repr(compiler)
    else:
        backend, lines, problem = _imported(compiler)
    for module, found in changed_settings().items():
        changed = {name: value for name, value in found.items() if matters(name) and is_literal(value)}
        if not changed:
            continue
        if module == "torch._inductor.config" and options.compiler == "inductor":
            given = {**changed, **given}
        else:
            lines += [f"import {module}", *(f"{module}.{name} = {value!r}" for name, value in changed.items())]
    if options.compiler == "inductor" and random:
        given.setdefault("fallback_random", True)
    arguments = [f"backend={backend}"]
    if given:
        arguments.append(f"options={given!r}")
    if program.case.dynamic:
        arguments.append("dynamic=True")
    return CompileCode(", ".join(arguments), tuple(lines), problem, any(line.startswith("\n") for line in lines))


def is_random(program: FailingCase) -> bool:
    """Whether a program draws random numbers, or may do so: found by running it on fake tensors."""
    return find_effects(program.case.graph, program.case.inputs).random


def _imported(function: Callable[..., Any]) -> tuple[str, list[str], str]:
    """The expression for a compiler, the lines before it, and the reason if it cannot be written."""
    found = _holder(function)
    if found is not None:
        module, name = found
        lines = [f"from {module} import {name.partition('.')[0]}"]
        root = import_root(module)
        if root is not None:
            lines = ["import sys", f"sys.path.insert(0, {str(root)!r})", *lines]
        return name, lines, ""
    source = Source()
    described = f"{getattr(function, '__module__', '')}.{getattr(function, '__qualname__', type(function).__name__)}"
    try:
        name = source.add(function)
    except Untranslatable as error:
        return "backend", [], f"the backend is {described}, which cannot be imported by its name: {error}"
    if source.tensors:
        return "backend", [], f"the backend is {described}, which refers to tensors of the running program"
    return name, [*source.imports, "", "", *source.lines], ""


def _holder(function: Callable[..., Any]) -> tuple[str, str] | None:
    """A module that a fresh process can import, and the name that a compiler has in it."""
    module, name = getattr(function, "__module__", "") or "", getattr(function, "__qualname__", "")
    owner = getattr(function, "__self__", None)
    likely = [module, type(owner).__module__, type(function).__module__]
    main = vars(sys.modules["__main__"])  # the main program also holds names that it imported
    for home in dict.fromkeys([*likely, *sys.modules]):
        held = getattr(sys.modules.get(home), "__dict__", {})
        if held is main or not held:
            continue
        if home == module and name and _step(sys.modules[home], name) == function:
            return home, name
        for own, value in list(held.items()):
            if own.startswith("__"):
                continue
            if value is function:
                return home, own
            if owner is not None and value is owner and name:
                return home, f"{own}.{name.rpartition('.')[2]}"
    return None


def _step(found: Any, path: str) -> Any:
    for step in path.split("."):
        found = getattr(found, step, None)
    return found


def import_root(module: str) -> Path | None:
    """The folder that a module is imported from, unless every Python finds it."""
    file = getattr(sys.modules[module], "__file__", None)
    if file is None:
        return None
    path = Path(file).resolve()
    root = path.parents[module.count(".") + (path.name == "__init__.py")]
    places = sysconfig.get_paths()
    known = {Path(places[key]).resolve() for key in ("stdlib", "purelib", "platlib")}
    return None if root in known else root


PROCESS_SETTINGS: Mapping[str, tuple[Any, str]] = MappingProxyType(
    {
        "deterministic": ((False, False), "torch.use_deterministic_algorithms({0[0]}, warn_only={0[1]})"),
        "flush_denormal": (False, "torch.set_flush_denormal({0})"),
        "float32_matmul_precision": ("highest", "torch.set_float32_matmul_precision({0!r})"),
        "fp32_precision.generic.all": ("none", "torch.backends.fp32_precision = {0!r}"),
        "fp32_precision.cuda.matmul": ("none", "torch.backends.cuda.matmul.fp32_precision = {0!r}"),
        "fp32_precision.cuda.conv": ("tf32", "torch.backends.cudnn.conv.fp32_precision = {0!r}"),
        "fp32_precision.cuda.rnn": ("tf32", "torch.backends.cudnn.rnn.fp32_precision = {0!r}"),
        "fp32_precision.mkldnn.matmul": ("none", "torch.backends.mkldnn.matmul.fp32_precision = {0!r}"),
        "fp32_precision.mkldnn.conv": ("none", "torch.backends.mkldnn.conv.fp32_precision = {0!r}"),
        "fp32_precision.mkldnn.rnn": ("none", "torch.backends.mkldnn.rnn.fp32_precision = {0!r}"),
        "matmul.allow_fp16_reduced_precision_reduction": (
            True,
            "torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = {0}",
        ),
        "matmul.allow_bf16_reduced_precision_reduction": (
            True,
            "torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = {0}",
        ),
        "matmul.allow_fp16_accumulation": (False, "torch.backends.cuda.matmul.allow_fp16_accumulation = {0}"),
        "cudnn.enabled": (True, "torch.backends.cudnn.enabled = {0}"),
        "cudnn.benchmark": (False, "torch.backends.cudnn.benchmark = {0}"),
        "cudnn.deterministic": (False, "torch.backends.cudnn.deterministic = {0}"),
        "mkldnn.enabled": (True, "torch.backends.mkldnn.enabled = {0}"),
        "mkldnn.deterministic": (False, "torch.backends.mkldnn.deterministic = {0}"),
        "sdp.flash": (True, "torch.backends.cuda.enable_flash_sdp({0})"),
        "sdp.mem_efficient": (True, "torch.backends.cuda.enable_mem_efficient_sdp({0})"),
        "sdp.math": (True, "torch.backends.cuda.enable_math_sdp({0})"),
        "sdp.cudnn": (True, "torch.backends.cuda.enable_cudnn_sdp({0})"),
    }
)
"""Torch's own values, and the code that sets others. Those of dtypes and devices stand in the program itself."""


def process_lines(state: ProcessState) -> list[str]:
    """The lines that set what is not as torch sets it itself."""
    changed = [name for name, (own, _) in PROCESS_SETTINGS.items() if state.values.get(name, own) not in (own, None)]
    led = {name for leader in changed for name in following(leader)}
    return [PROCESS_SETTINGS[name][1].format(state.values[name]) for name in changed if name not in led]
