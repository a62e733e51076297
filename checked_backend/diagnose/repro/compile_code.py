"""How a repro compiles: backend, options, the settings of the running process that matter, and a user's own source.

A script cannot import the user's functions, so it has their source, with everything that they refer to.
"""

from __future__ import annotations

import ast
import inspect
import math
import re
import sys
import sysconfig
import textwrap
import types
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch

from checked_backend._torch.dynamo import registered_here
from checked_backend._torch.operators import OperatorDefinition, operator_definition
from checked_backend._torch.settings import changed_settings
from checked_backend.diagnose.reduce.failing_case import FailingCase
from checked_backend.diagnose.repro.translate import name_of
from checked_backend.graphs.nodes import followed
from checked_backend.regions.inputs import find_effects
from checked_backend.regions.process_state import FOLLOWING, ProcessState
from checked_backend.scripts.values import Untranslatable, is_literal


@dataclass(slots=True)
class Source:
    """The imports, assignments and definitions that functions and classes need, in order.

    Attributes:
        tensors: Tensors that these refer to, and that a script must make.
    """

    tensors: dict[str, torch.Tensor] = field(default_factory=dict)
    _imports: dict[str, None] = field(default_factory=dict)
    _assignments: dict[str, str] = field(default_factory=dict)
    _definitions: dict[str, str] = field(default_factory=dict)

    @property
    def imports(self) -> list[str]:
        """Lines for the top of a script that has ``import torch``."""
        return [line for line in self._imports if line != "import torch"]

    @property
    def lines(self) -> list[str]:
        """Assignments and definitions."""
        assigned = [f"{name} = {text}" for name, text in self._assignments.items()]
        return [*assigned, *(f"\n{text}\n" for text in self._definitions.values())]

    def add(self, function: Callable[..., Any]) -> str:
        """Note everything that a function needs, and return its name.

        Args:
            function: A plain function, or a class. It may refer to modules, importable functions of torch, literals,
                tensors, and functions and classes of this kind.

        Raises:
            Untranslatable: It is something else, or refers to something else.
        """
        if not isinstance(function, (types.FunctionType, type)):
            raise Untranslatable(f"what is compiled is a {type(function).__name__}, and no plain function")
        name = function.__name__
        if name in self._definitions:
            return name
        self._definitions[name] = text = _definition(function)
        for other, value in _referred(function, text):
            self._note(other, value)
        del self._definitions[name]
        self._definitions[name] = text  # after the definitions that it needs
        return name

    def add_operator(self, definition: OperatorDefinition) -> str:
        """Note what registers a custom operator, with its fake and its gradient, and return its function's name.

        Raises:
            Untranslatable: The operator needs something else, or refers to something else.
        """
        own = definition.name.partition("::")[2]
        if own in self._definitions:
            return own
        if definition.more:
            raise Untranslatable(f"{definition.name} has {definition.more}")
        parts = {"": definition.function, "_fake": definition.fake, "_backward": definition.backward}
        parts["_setup_context"] = definition.setup
        texts: list[str] = []
        self._definitions[own] = ""
        for suffix, function in parts.items():
            if function is None:
                continue
            if not isinstance(function, types.FunctionType) or hasattr(function, "__wrapped__"):
                raise Untranslatable(f"{definition.name} is made of what is no plain function, or is wrapped by one")
            text = _definition(function)
            for other, value in _referred(function, text):
                if other != function.__name__:
                    self._note(other, value)
            texts.append(text.replace(f"def {function.__name__}(", f"def {own}{suffix}(", 1).rstrip() + "\n\n")
        given = f"{definition.name!r}, {own}, mutates_args={definition.mutated!r}, schema={definition.schema!r}"
        texts.append(f"{own} = torch.library.custom_op({given})")
        if definition.fake is not None:
            texts.append(f"{own}.register_fake({own}_fake)")
        if definition.backward is not None:
            setup = f", setup_context={own}_setup_context" if definition.setup is not None else ""
            texts.append(f"{own}.register_autograd({own}_backward{setup})")
        del self._definitions[own]
        self._definitions[own] = "\n".join(texts)
        return own

    def _note(self, name: str, value: Any) -> None:
        if (definition := operator_definition(value)) is not None and not isinstance(value, str):
            made = self.add_operator(definition)
            if made != name:
                raise Untranslatable(f"it calls the operator {definition.name} by the name {name}")
        elif isinstance(value, types.ModuleType):
            self._import(f"import {value.__name__} as {name}" if value.__name__ != name else f"import {name}")
        elif isinstance(value, torch.Tensor):
            self.tensors[name] = value.detach()
        elif (
            value is None or isinstance(value, (bool, int, str)) or (isinstance(value, float) and math.isfinite(value))
        ):
            self._assignments[name] = repr(value)
        elif isinstance(value, (torch.dtype, torch.memory_format, torch.layout)):
            self._assignments[name] = str(value)
        elif isinstance(value, (types.FunctionType, type)) and value.__name__ == name and not _is_torchs(value):
            self.add(value)
        elif callable(value) and _is_torchs(value) and (known := name_of(value)) is not None:
            if known.text.startswith("F."):
                self._import("import torch.nn.functional as F")
            if known.module is not None:
                self._import(f"import {known.module}")
            if known.text != name:
                self._assignments[name] = known.text
        else:
            raise Untranslatable(f"it refers to {name}, a {type(value).__name__}")

    def _import(self, line: str) -> None:
        self._imports[line] = None


def _definition(function: types.FunctionType | type) -> str:
    try:
        text = textwrap.dedent(inspect.getsource(function))
        [tree] = ast.parse(text).body
    except (OSError, SyntaxError, TypeError, ValueError):
        raise Untranslatable(f"the source of {function.__name__} is not known") from None
    if not isinstance(tree, (ast.FunctionDef, ast.ClassDef)):
        raise Untranslatable(f"{function.__name__} is no plain function")
    if isinstance(tree, ast.ClassDef):
        return text
    return "\n".join(text.splitlines()[tree.lineno - 1 :])  # without decorators, which may register the function


def _referred(function: types.FunctionType | type, text: str) -> Iterator[tuple[str, Any]]:
    """The names that a function or a class looks up outside itself, with their values."""
    if isinstance(function, type):
        held = vars(sys.modules[function.__module__])
        names = [node.id for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Name)]
        for method in vars(function).values():
            if isinstance(method, types.FunctionType) and set(method.__code__.co_freevars) - {"__class__"}:
                raise Untranslatable(f"the class {function.__name__} was made in a function")
    else:
        held = function.__globals__
        names = list(_names(function.__code__))
        yield from inspect.getclosurevars(function).nonlocals.items()
    for name in dict.fromkeys(names):
        if name in held:
            yield name, held[name]


def _names(code: types.CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _names(constant)


def _is_torchs(value: Any) -> bool:
    home = str(getattr(value, "__module__", None) or "torch")
    return home.partition(".")[0] in ("torch", "math", "operator", "builtins")


_IRRELEVANT = re.compile(  # whole words: epilogue_fusion is not about a log
    r"(?:^|[._])(?:cache|caches|caching|compile_threads|debug|log|logger|logging|precompile|trace|verbose|worker"
    r"|progress|pgo|subproc|recompile)(?:[._]|$)"
)


def matters(setting: str) -> bool:
    """Whether a setting's name has no word by which it changes how compilation goes, and not its result."""
    return _IRRELEVANT.search(setting) is None


@dataclass(frozen=True, slots=True)
class CompileCode:
    """How a script compiles.

    Attributes:
        arguments: The arguments of ``torch.compile``, after the function.
        problem: Why the script cannot compile in a fresh process; "" if it can.
    """

    arguments: str
    lines: tuple[str, ...] = ()
    problem: str = ""


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
    return CompileCode(", ".join(arguments), tuple(lines), problem)


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
        if home == module and name and followed(sys.modules[home], name) == function:
            return home, name
        for own, value in list(held.items()):
            if own.startswith("__"):
                continue
            if value is function:
                return home, own
            if owner is not None and value is owner and name:
                return home, f"{own}.{name.rpartition('.')[2]}"
    return None


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
    led = {name for leader in changed for name in FOLLOWING.get(leader, ())}
    return [PROCESS_SETTINGS[name][1].format(state.values[name]) for name in changed if name not in led]
