"""Compare a packaged model with the module that it was made of."""

from __future__ import annotations

import warnings
import zipfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch.export import ExportedProgram

from checked_backend._torch.inductor import load_compiled_package
from checked_backend.checking.compare_runs import compare_runs
from checked_backend.checking.program import (
    Outcome,
    Program,
    ProgramCall,
    ProgramCopy,
    eager_function,
    function_name,
    no_warning_is_an_error,
    refuse_misfits,
)
from checked_backend.errors import CheckedBackendError
from checked_backend.findings import EvidenceKey, Finding, Kind, Skip
from checked_backend.random_state import random_untouched
from checked_backend.regions.torch_state import RngState
from checked_backend.report import Report
from checked_backend.report.environment import environment
from checked_backend.report.ledger import Ledger
from checked_backend.subjects import Subject, SubjectKind

_EXPORT = "torch.export: the exported program, run in eager, differs already"
_PACKAGE = (
    "AOTInductor: the module, exported now and run in eager, agrees; or the package was made of another module, or "
    "when this one had other weights"
)
_WEIGHTS = "the package has other values than the module in"


def check_package(
    package: str | Path | ExportedProgram | Callable[..., Any],
    module: Callable[..., Any],
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
) -> Report:
    """Compare a packaged model with its source in eager, on the same inputs.

    Both run on copies of the arguments, without gradients. Compared are the results, in structure and values, what
    happens to the arguments, and exceptions. Differences are held against the noise of the module itself, as in
    `check`.

    Args:
        package: A ``.pt2`` file of AOTInductor (``aoti_compile_and_package``) or of ``torch.export.save``; an
            ``ExportedProgram``; or a packaged model that is loaded already. A file's code is run: trust it.
        module: The module or function that was exported, with the weights that the package should have.
        args: Positional arguments of one call.
        kwargs: Keyword arguments.

    Returns:
        The report. A package with other weights, or of another version of the module, fails.

    Raises:
        CheckedBackendError: The file cannot be loaded, or something cannot be copied.
    """
    with warnings.catch_warnings():
        no_warning_is_an_error()  # torch warns as it loads its own files
        candidate, compiled = _loaded(package)
    weights = "" if compiled else _other_weights(candidate, module)  # AOTInductor shows none of its own
    calls = [ProgramCall(args, dict(kwargs or {}))]
    program = Program(eager_function(module), calls, RngState.of_process(), gradients=False)
    with random_untouched():
        ledger = Ledger()
        expected = program.run()
        refuse_misfits(program, expected.error)
        findings = _differences(program, expected, candidate, ledger)
        if any(finding.fails for finding in findings):
            level = _level(program, expected) if compiled else weights
            findings = [_at_level(finding, level) for finding in findings]
        ledger.add_findings(findings)
        title = f"{function_name(program.function)}, packaged"
        return Report(ledger.findings(), ledger.coverage(), title=title, environment=environment())


def _loaded(package: Any) -> tuple[Callable[..., Any], bool]:
    """The packaged model as a function, and whether AOTInductor may have compiled it."""
    if isinstance(package, ExportedProgram):
        return _module_of(package), False
    if callable(package):
        return package, True
    path = Path(package)
    try:
        with zipfile.ZipFile(path) as archive:
            compiled = any("/aotinductor/" in name for name in archive.namelist())
        return (load_compiled_package(path), True) if compiled else (_module_of(torch.export.load(path)), False)
    except Exception as error:
        raise CheckedBackendError(
            f"{path}: no packaged model can be loaded from it: {type(error).__name__}: {error}. It is a .pt2 file of "
            "torch._inductor.aoti_compile_and_package or of torch.export.save, made for this machine."
        ) from error


def _module_of(exported: ExportedProgram) -> torch.nn.Module:
    """The exported program with buffers of its own: it shares those of the module that was exported."""
    module: torch.nn.Module = exported.module()
    copies: dict[int, torch.Tensor] = {}
    for child in module.modules():
        for name, buffer in child.named_buffers(recurse=False):
            setattr(child, name, copies.setdefault(id(buffer), buffer.detach().clone()))
    return module


def _differences(program: Program, expected: Outcome, candidate: Callable[..., Any], ledger: Ledger) -> list[Finding]:
    changed = _changes_state(program, expected)
    actual = ProgramCopy(program, lambda _copy: candidate).step(0, program.calls[0])
    reference, packaged = _visible(expected), _visible(actual)
    draws = expected.rng is not None and not expected.rng.same_as(program.rng)
    reference.rng = packaged.rng = None
    compared = compare_runs([reference], [packaged], program, ledger)
    findings = [finding for _, finding in compared.found]
    if draws:  # a package draws numbers of its own
        values = (Kind.LOGIC, Kind.PRECISION, Kind.MUTATION, Kind.NONFINITE)
        findings = [finding for finding in findings if finding.kind not in values]
        why = "the module draws random numbers, and a package draws its own; call eval(), or check it without them"
        ledger.skip(Skip("values", why, matters=True))
    else:
        ledger.limits(compared.limits, compared.own_precision_limits)
    if changed:
        why = f"the module changes {', '.join(changed[:3])} of its own, and a package keeps its own where none can look"
        ledger.skip(Skip("buffers", why, matters=True))
    return findings


def _visible(outcome: Outcome) -> Outcome:
    """An outcome without the module's own tensors: those of a package cannot be seen."""
    own = (SubjectKind.PARAMETER, SubjectKind.BUFFER, SubjectKind.ATTRIBUTE)
    subjects = {name: value for name, value in outcome.subjects.items() if Subject(name).kind not in own}
    return replace(outcome, subjects=subjects)


def _changes_state(program: Program, expected: Outcome) -> list[str]:
    """Buffers of the module that its call changes."""
    if not isinstance(program.function, torch.nn.Module):
        return []
    before = dict(program.function.named_buffers())
    return [
        name
        for name, tensor in before.items()
        if (after := expected.subjects.get(f"buffer[{name}]")) is not None and not torch.equal(tensor, after)
    ]


def _level(program: Program, expected: Outcome) -> str:
    """Whether the exported program differs from the module already, in words; "" if that is unknown."""
    module: Any = program.function
    call = program.calls[0]
    try:
        exported = _module_of(torch.export.export(module, tuple(call.args), dict(call.kwargs)))
        earlier = any(finding.fails for finding in _differences(program, expected, exported, Ledger()))
    except Exception:  # the package was not exported from this module in this way
        return ""
    return _EXPORT if earlier else _PACKAGE


def _other_weights(packaged: Any, module: Any) -> str:
    """Parameters and buffers that have other values in the package than in the module, in words; "" if none have."""
    if not isinstance(module, torch.nn.Module):
        return ""
    own = packaged.state_dict()
    names = []
    for name, tensor in module.state_dict().items():
        if isinstance(tensor, torch.Tensor) and name in own:
            try:
                torch.testing.assert_close(own[name], tensor, rtol=0, atol=0, equal_nan=True, check_device=False)
            except AssertionError:
                names.append(name)
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return f"{_WEIGHTS}: {', '.join(names[:3])}{more}" if names else ""


def _at_level(finding: Finding, level: str) -> Finding:
    if not finding.fails or not level:
        return finding
    message = f"{finding.message}. {level[0].upper()}{level[1:]}" if finding.message else level
    return replace(finding, message=message, evidence={**finding.evidence, EvidenceKey.LEVEL: level})
