"""Settings that make a finding vanish, tried on a small program."""

from __future__ import annotations

import ast
import builtins
import json
import operator
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch

from checked_backend._torch.caches import without_compile_caches
from checked_backend._torch.inductor import inductor_graph_passes
from checked_backend.diagnose.oracle import Oracle, verdict_oracle, warm_up
from checked_backend.diagnose.workaround.settings import (
    ABOUT_PASSES,
    COSTLY,
    EAGER,
    PROCESS,
    SETTINGS,
    Setting,
    applicable,
    flags_not_set,
    operator_fallbacks,
    pass_settings,
    together,
)
from checked_backend.errors import CheckedBackendError
from checked_backend.process.worker import Death, cannot_fork, run_in_worker
from checked_backend.regions.graph_case import GraphCase

__all__ = ["Workaround", "find_workaround", "helps", "keep_line_out", "keep_out"]


@dataclass(frozen=True, slots=True)
class Workaround:
    """Something to set, or to write, so that a finding vanishes.

    Attributes:
        name: Its effect, for people.
        code: The code to paste.
        setting: The setting, to be tried elsewhere; None for `keep_out` and `keep_line_out`, which are no settings.
        source: The line that is kept out of the compiler; None for a setting.
    """

    name: str
    code: str
    setting: Setting | None = None
    source: str | None = None


def find_workaround(
    case: GraphCase,
    *,
    deadline: float,
    confirm: Callable[[Setting], bool] = lambda _setting: True,
    settings: Sequence[Setting] = SETTINGS,
    process: Sequence[Setting] = PROCESS,
    costly: Sequence[Setting] = (*COSTLY, *EAGER),
    fallbacks: bool = True,
    oracle: Oracle = verdict_oracle,
) -> Workaround | None:
    """Find a setting under which a program that goes wrong is right.

    Cheap settings are tried first, down to a single graph pass. Then follow eager's kernel for one operator, settings
    that change eager too, and settings that slow the whole model down.

    Args:
        case: A small program that goes wrong.
        deadline: A `time.monotonic` moment.
        confirm: Whether a setting that helps the program also helps the region that it was cut from. If not, the next
            one is tried.
        settings: Cheap settings, in order of preference.
        process: Settings of the whole process.
        costly: Settings that slow the whole model down.
        fallbacks: Whether eager's kernels for single operators are tried.

    Returns:
        The first that helps; None if none does, if the time is over, or if the compiler is not Inductor.
    """
    if case.options.compiler != "inductor":
        return None
    warm_up(case)
    search = _Search(case, confirm, deadline, oracle)
    alone = cannot_fork() is None  # some settings change the whole process
    found = search.one_of(applicable(settings, case))
    if found is not None and alone and found.patches.keys() & ABOUT_PASSES:
        found = search.one_of(pass_settings(_passes_of(case, deadline))) or found
    if found is None and alone:
        found = search.first_of([*(operator_fallbacks(case) if fallbacks else ()), *flags_not_set(process, case)])
    if found is None:
        found = search.first_of(applicable(costly, case))
    return None if found is None else Workaround(found.name, found.code, found)


def _passes_of(case: GraphCase, deadline: float) -> list[str]:
    """The graph passes that Inductor runs on a case."""

    def produce() -> str:
        names: list[str] = []
        with without_compile_caches(), inductor_graph_passes(names):
            case.findings()
        return json.dumps(names)

    try:
        answer = run_in_worker(produce, timeout=max(1.0, deadline - time.monotonic()))
    except CheckedBackendError:
        return []
    return [] if isinstance(answer, Death) else list(json.loads(answer))


def helps(setting: Setting, case: GraphCase, *, timeout: float, oracle: Oracle = verdict_oracle) -> bool:
    """Whether a case is right under a setting: there is no failing finding.

    Args:
        case: A case that goes wrong without it.
        timeout: Seconds.
    """
    findings = oracle(replace(case, options=setting.on(case.options)), timeout)
    return findings is not None and not any(found.kind.fails for found in findings)


def keep_out(op: str, source: str | None) -> Workaround:
    """The last resort: leave the call to eager, at the price of a graph break.

    Args:
        op: The operator (``aten.relu.default``), or the function (``torch.nn.functional.relu``, ``Tensor.add_``).
        source: The user's line.
    """
    steps = op.split(".")
    base = steps[1] if steps[0] in ("aten", "prims") and len(steps) > 1 else steps[-1]
    homes = (("torch", torch), ("torch.nn.functional", torch.nn.functional), ("torch.Tensor", torch.Tensor))
    known = next((f"{home}.{base}" for home, module in homes if hasattr(module, base)), None)
    first = "import torch\n"
    if steps[0] == "operator" and hasattr(operator, base):  # what Python's own signs call
        known, first = f"operator.{base}", "import operator\n\nimport torch\n"
    if known is None and steps[0] in ("aten", "prims"):
        known = f"torch.ops.{op}"
    if known is None:  # no name that a program could call it by
        return keep_line_out(source or "the line that calls it")
    eager = f"eager_{base.strip('_')}"
    where = f"# and call {eager} at {source}" if source else f"# and call {eager} instead"
    return Workaround(f"{base} outside of the compiler", f"{first}\n{eager} = torch.compiler.disable({known})\n{where}")


_LINE = re.compile(r"^(?P<place>[^:]*:\d+ in [^:]+): (?P<code>.*)$")


def keep_line_out(source: str) -> Workaround:
    """The last resort if the line has more than one call, or makes its calls in a backward pass or in a body.

    Args:
        source: The user's line.
    """
    name = "the line outside of the compiler"
    found = _LINE.match(source)
    moved = None if found is None else _moved(found["code"])
    if found is None or moved is None:
        return Workaround(
            name,
            f"import torch\n\n\n# move what stands at {source}\n# into a function of its own, and call that there\n"
            "@torch.compiler.disable\ndef in_eager(*args): ...",
        )
    function, call = moved
    return Workaround(
        name, f"import torch\n\n\n@torch.compiler.disable\n{function}\n\n\n# and at {found['place']}: {call}"
    )


_KNOWN = frozenset({"F", "math", "nn", "np", "torch", "bool", "complex", "float", "int", "str"})
_BUILT_IN = frozenset(dir(builtins))
"""Known where they are called. What is only read, like ``input`` or ``id``, is more often the user's own variable."""


def _moved(code: str) -> tuple[str, str] | None:
    """A statement as a function of the names it reads, and the call that replaces it; None if it is incomplete."""
    try:
        [statement] = ast.parse(code).body
    except (SyntaxError, ValueError):
        return None
    names = [node for node in ast.walk(statement) if isinstance(node, ast.Name)]
    inner = {node.arg for node in ast.walk(statement) if isinstance(node, ast.arg)}
    inner |= {node.id for part in ast.walk(statement) if isinstance(part, ast.comprehension) for node in _names(part)}
    stored = dict.fromkeys(node.id for node in names if isinstance(node.ctx, ast.Store) and node.id not in inner)
    called = [node.func for node in ast.walk(statement) if isinstance(node, ast.Call)]
    inner |= {node.id for node in called if isinstance(node, ast.Name) and node.id in _BUILT_IN}
    read = [node.id for node in names if isinstance(node.ctx, ast.Load)]
    if isinstance(statement, ast.AugAssign) and isinstance(statement.target, ast.Name):
        read.append(statement.target.id)
    given = ", ".join(name for name in dict.fromkeys(read) if name not in _KNOWN and name not in inner)
    call = f"in_eager({given})"
    if isinstance(statement, ast.Return):
        return f"def in_eager({given}):\n    {code}", f"return {call}"
    if isinstance(statement, ast.Expr):
        return f"def in_eager({given}):\n    {code}", call
    if not isinstance(statement, (ast.Assign, ast.AugAssign, ast.AnnAssign)) or not stored:
        return None
    results = ", ".join(stored)
    return f"def in_eager({given}):\n    {code}\n    return {results}", f"{results} = {call}"


def _names(part: ast.comprehension) -> list[ast.Name]:
    return [node for node in ast.walk(part.target) if isinstance(node, ast.Name)]


class _Search:
    """Tries settings until the deadline."""

    def __init__(self, case: GraphCase, confirm: Callable[[Setting], bool], deadline: float, oracle: Oracle) -> None:
        self._case = case
        self._confirm = confirm
        self._deadline = deadline
        self._oracle = oracle

    def first_of(self, settings: Sequence[Setting]) -> Setting | None:
        """The first setting that helps, on the region too."""
        return next((setting for setting in settings if self._helps(setting) and self._confirmed(setting)), None)

    def one_of(self, settings: Sequence[Setting]) -> Setting | None:
        """The first setting that helps, or the fewest that help together, on the region too.

        They are found by halving: if all of them together do not help, none helps alone.
        """
        pool = list(settings)
        while pool and self._helps(together(pool)):
            needed = self._needed(pool)
            if not needed:
                return None
            found = needed[0] if len(needed) == 1 else together(needed)
            if self._confirmed(found):
                return found
            pool = [setting for setting in pool if setting not in needed]
        return None

    def _needed(self, pool: Sequence[Setting]) -> list[Setting]:
        """The needed ones among settings that help together; empty if the time is over."""
        needed: list[Setting] = []
        while not needed or not self._helps(together(needed)):
            low, high = 0, len(pool)  # the first `high` help together with those needed, the first `low` do not
            while high - low > 1:
                middle = (low + high) // 2
                low, high = (low, middle) if self._helps(together([*pool[:middle], *needed])) else (middle, high)
            if time.monotonic() >= self._deadline or not high:
                return []
            needed.insert(0, pool[high - 1])
            pool = pool[: high - 1]
        return needed

    def _helps(self, setting: Setting) -> bool:
        seconds = self._deadline - time.monotonic()
        return seconds > 0 and helps(setting, self._case, timeout=seconds, oracle=self._oracle)

    def _confirmed(self, setting: Setting) -> bool:
        return time.monotonic() < self._deadline and self._confirm(setting)
