"""Run one case in this process: build the model, run it in eager, check it."""

from __future__ import annotations

import copy
import math
import random
import traceback
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any, TypeVar

import numpy as np
import torch
from pydantic import TypeAdapter

from checked_backend._torch.pytree import tree_leaves, tree_map
from checked_backend.checking import check
from checked_backend.checking.target import load_compiler, parse_optimizer
from checked_backend.errors import CheckedBackendError, OptionError, SuiteError, is_out_of_memory
from checked_backend.findings import Finding, Kind, Verdict
from checked_backend.options import CheckOptions, parse_options
from checked_backend.process.job import AnswerFolder
from checked_backend.regions.compile import resolve_compiler
from checked_backend.report import Report
from checked_backend.report.session import Session
from checked_backend.runs.case import Case, CaseResult, Status
from checked_backend.subjects import Subject
from checked_backend.sweep.rules import Settings, matches
from checked_backend.sweep.suites import suite_of
from checked_backend.sweep.suites.base import Built, Unsupported

_SEED = 0
SEED_OF_CHECK = 6_031_769
"""No seed that a compiler would set: it would not show."""

_LONGEST = 600
_DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16}
_OF_VALUES = (Kind.PRECISION, Kind.LOGIC)
_Rule = TypeVar("_Rule")
_EMPTY = "what it returns has no elements, so nothing was compared: does the batch size leave any?"


def refuse_unknown(compiler: str | Callable[..., object]) -> None:
    """Raise an `OptionError` if a name is no Dynamo backend."""
    resolve_compiler(parse_options(CheckOptions, "sweep", {"compiler": compiler}))


def answer_case(question: Mapping[str, Any], answers: AnswerFolder) -> None:
    """Run a case in a process of its own: the fields of `checked_backend.sweep.plan.SweepJob` as JSON values."""
    settings = TypeAdapter(Settings).validate_python(question["settings"])
    case = Case(**question["case"])
    examine(question["spec"], case, settings, answers.note, lambda result: answers.answer(result.to_json()))


def examine(
    spec: str, case: Case, settings: Settings, note: Callable[[str], None], answer: Callable[[CaseResult], None]
) -> None:
    """Run a case and answer with its result. No exception escapes. If this process dies, its parent sees that.

    Args:
        answer: Called with the result. If a region is wrong, it is called before, too: this process may end while the
            operator is looked for.
    """

    def tell(result: CaseResult) -> None:
        answer(replace(result, peak=_peak_of_process()))

    stage = "building the model"
    built: Built | None = None
    try:
        note(stage)
        _seed(_SEED)
        built = suite_of(spec).build(case, settings)
        training = case.mode == "training"
        program = _prepare(built, training, settings.run_as or case.dtype, case.device)
        stage = "running the model in eager"
        note(stage)
        empty = _runs_in_eager(program, training)
    except (Exception, SystemExit) as error:
        refused = _refused(error, stage)
        excuse = _excuse(built, settings.run_as or case.dtype)
        if excuse and refused.status is Status.ERROR:
            refused = replace(refused, status=Status.UNSUPPORTED, message=f"{excuse}: {refused.message}")
        tell(refused)
        return

    def tell_early() -> None:
        # rules name a program's results, for which a region has names of its own
        if not settings.ignore_outputs and not settings.noise:
            tell(_result_of(session.report, settings))

    stage = "checking the compiled program"
    try:
        note(stage)
        _seed(SEED_OF_CHECK)
        session = Session(tell_early)
        with session.entered():
            report = _override(_checked(program, training, case, settings), settings)
        result = _result_of(report, settings)
    except (Exception, SystemExit) as error:
        traceback.print_exc()
        tell(_unchecked(error, stage))
        return
    if empty and result.status is Status.PASS:
        result = replace(result, status=Status.INCONCLUSIVE, message=_EMPTY)
    tell(result)


def _excuse(built: Built | None, dtype: str) -> str:
    """Why a model that does not run in eager may not be to blame; empty if it is."""
    if built is None:
        return ""
    if not built.ready and not isinstance(built.function, torch.nn.Module) and dtype in ("bfloat16", "float16"):
        return f"a function's own tensors cannot be brought to {dtype}"
    return "as small as this suite makes it, it does not run in eager" if built.shrunk else ""


def _seed(seed: int) -> None:
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


def _runs_in_eager(program: Built, training: bool) -> bool:
    """Run the program once in eager, on copies: the check must start from the program's unchanged state.

    Returns:
        Whether what it returns are tensors without elements, so that there is nothing to compare.
    """
    try:
        copied = copy.deepcopy(program)
    except Exception:  # some models cannot be copied; the check reports that itself
        copied = program
    results = _step(copied, training)
    if training and _scalar_loss(results) is None:
        raise Unsupported("nothing of what it returns has gradients, so there is nothing to train")
    tensors = [leaf for leaf in tree_leaves(results) if isinstance(leaf, torch.Tensor)]
    return bool(tensors) and not any(tensor.numel() for tensor in tensors)


def _checked(program: Built, training: bool, case: Case, settings: Settings) -> Report:
    if program.check is not None:
        return program.check()
    return check(
        program.function,
        tuple(program.args),
        program.kwargs,
        compiler=load_compiler(case.compiler),
        gradients=training,
        dynamic=True if case.dynamic else None,
        optimizer=parse_optimizer(settings.optimizer) if settings.optimizer and training else None,
        localize=settings.localize,
        compiler_options=settings.compiler_options,
    )


def _refused(error: BaseException, stage: str) -> CaseResult:
    """The result of a model that cannot be built or does not run in eager."""
    traceback.print_exception(error)
    for cause in _causes(error):
        if isinstance(cause, Exception) and is_out_of_memory(cause):
            return CaseResult(Status.OUT_OF_MEMORY, _told(cause), stage)
        if isinstance(cause, Unsupported | NotImplementedError):
            return CaseResult(Status.UNSUPPORTED, str(cause) or "it says NotImplementedError", stage)
        if isinstance(cause, ImportError):
            return CaseResult(Status.IMPORT_ERROR, _told(cause), stage)
        if isinstance(cause, RuntimeError) and "not implemented for" in str(cause):
            return CaseResult(Status.UNSUPPORTED, _told(cause), stage)
    return CaseResult(Status.ERROR, _told(list(_causes(error))[-1]), stage)


def _unchecked(error: BaseException, stage: str) -> CaseResult:
    if isinstance(error, Exception) and is_out_of_memory(error):
        return CaseResult(Status.OUT_OF_MEMORY, _told(error), stage)
    if isinstance(error, OptionError | SuiteError):
        return CaseResult(Status.ERROR, str(error), stage)
    why = "it cannot be checked" if isinstance(error, CheckedBackendError) else "the check itself failed"
    return CaseResult(Status.INCONCLUSIVE, f"{why}: {_told(error)}", stage)


def _causes(error: BaseException) -> Iterator[BaseException]:
    """An exception, and the exceptions that it was raised from."""
    seen: set[int] = set()
    cause: BaseException | None = error
    while cause is not None and id(cause) not in seen:
        seen.add(id(cause))
        yield cause
        cause = cause.__cause__


def _told(error: BaseException) -> str:
    try:
        text = str(error)
    except Exception as other:  # a model's own exception
        text = f"its text raises {type(other).__name__}"
    lines = text.strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[0]}".rstrip(": ")[:_LONGEST]


def _result_of(report: Report, settings: Settings) -> CaseResult:
    limits = [limit for limit in report.coverage.detection_limit.values() if math.isfinite(limit)]
    status, why, expected = Status.of_verdict(report.verdict), "", ""
    if report.verdict is Verdict.FAIL:
        failing = [finding for finding in report.findings if finding.fails]
        more = f" (and {len(failing) - 1} more)" if len(failing) > 1 else ""
        why = f"{failing[0].kind}: {failing[0].subject}: {failing[0].message}{more}"
        reasons = [settings.known_fails.get(finding.kind.value, "") for finding in failing]
        expected = "; ".join(dict.fromkeys(reasons)) if all(reasons) else ""  # not if no rule knows one of the kinds
    elif report.verdict is Verdict.PASS and settings.known_fails:
        why = f"a rule knows it to fail, and it passes: {next(iter(settings.known_fails.values()))}"
    elif report.verdict is Verdict.INCONCLUSIVE:
        skips = [skip for skip in report.coverage.skipped if skip.matters]
        why = why_undecided(report)
        others = [one for one in report.findings if one.kind is not Kind.NONDETERMINISTIC]
        others_skipped = [skip for skip in skips if "repeat" not in skip.reason]
        if any(skip.reason.startswith("unsupported: memory") for skip in skips):
            status = Status.OUT_OF_MEMORY
        elif "non_deterministic" in settings.tags and not others and not others_skipped:
            expected = f"known not to repeat itself: {settings.tags['non_deterministic']}"
    return CaseResult(
        status,
        why[:_LONGEST],
        expected=expected,
        noise=max(limits, default=None),
        report=report.to_json(),
    )


def why_undecided(report: Report) -> str:
    """The first reason why a report has no verdict."""
    reasons = [f"{one.subject}: {one.message}" for one in report.findings]
    reasons += [f"{skip.subject}: {skip.reason}" for skip in report.coverage.skipped if skip.matters]
    return reasons[0] if reasons else "nothing of it was checked"


def _peak_of_process() -> int | None:
    """The peak memory of this process in bytes; None if the system cannot tell."""
    try:
        import resource  # noqa: PLC0415  Windows lacks it
    except ImportError:
        return None
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _override(report: Report, settings: Settings) -> Report:
    """Remove the findings that rules ignore. The coverage keeps each of them, with the rule's reason."""
    kept: list[Finding] = []
    ignored: list[Finding] = []
    notes: list[str] = []
    for finding in report.findings:
        why = _rule_for(finding.subject, settings.ignore_outputs) or _noise(finding, settings.noise)
        if why is None:
            kept.append(finding)
        else:
            ignored.append(finding)
            notes.append(f"{finding.subject}: a rule takes it out of the verdict: {why}")
    skipped = tuple(
        replace(skip, matters=skip.matters and _rule_for(skip.subject, settings.ignore_outputs) is None)
        for skip in report.coverage.skipped
    )
    coverage = replace(
        report.coverage,
        skipped=skipped,
        ignored=(*report.coverage.ignored, *ignored),
        notes=(*report.coverage.notes, *notes),
    )
    return replace(report, findings=tuple(kept), coverage=coverage)


def _rule_for(subject: str, rules: Mapping[str, _Rule]) -> _Rule | None:
    bare = Subject.of(subject).text
    return next((rule for name, rule in rules.items() if matches(name, bare)), None)


def _noise(finding: Finding, limits: Mapping[str, tuple[float, str]]) -> str | None:
    found, metrics = _rule_for(finding.subject, limits), finding.metrics
    if found is None or finding.kind not in _OF_VALUES or metrics is None or metrics.nonfinite_mismatched:
        return None
    limit, reason = found
    if not metrics.reference_rms or metrics.rmse / metrics.reference_rms > limit:
        return None
    return f"{reason} (its relative error {metrics.rmse / metrics.reference_rms:.2g} is within {limit:g})"


def _step(program: Built, training: bool) -> object:
    """Run one step: forward, and in training backward, too. Returns the results of the program."""
    if not training:
        with torch.no_grad():
            return program.function(*program.args, **program.kwargs)
    results = program.function(*program.args, **program.kwargs)
    loss = _scalar_loss(results)
    if loss is not None:
        loss.backward()
    return results


def _scalar_loss(results: object) -> torch.Tensor | None:
    """A loss that depends on every result that requires grad; None if no result does."""
    leaves = [leaf for leaf in tree_leaves(results) if isinstance(leaf, torch.Tensor) and leaf.requires_grad]
    if not leaves:
        return None
    parts = [(leaf.abs() if leaf.is_complex() else leaf).float().mean() for leaf in leaves]
    return torch.stack([part.cpu() for part in parts]).sum() if len(parts) > 1 else parts[0]


def _prepare(built: Built, training: bool, dtype: str, device: str) -> Built:
    """Bring a program to a mode, a device, and the case's dtype or the one that a rule replaces it with."""
    if built.ready:
        return built
    module = built.function if isinstance(built.function, torch.nn.Module) else None
    wanted = _DTYPES.get(dtype)
    if module is not None:
        module.train(training)
        module.to(device)
        if wanted is not None:
            module.to(wanted)
    args, kwargs = tree_map(lambda leaf: _moved(leaf, device, wanted), (tuple(built.args), dict(built.kwargs)))
    function = built.function
    if dtype == "amp":
        function = Autocast(module, device) if module is not None else torch.autocast(device)(built.function)
    return replace(built, function=function, args=args, kwargs=kwargs)


def _moved(leaf: object, device: str, dtype: torch.dtype | None) -> object:
    if not isinstance(leaf, torch.Tensor):
        return leaf
    wanted = dtype if leaf.is_floating_point() and dtype is not None else leaf.dtype
    if leaf.dtype == wanted and leaf.device.type == device:
        return leaf
    return leaf.detach().to(device=device, dtype=wanted).requires_grad_(leaf.requires_grad)


class Autocast(torch.nn.Module):
    """A model whose forward pass runs under autocast. Its backward pass does not, as torch recommends."""

    def __init__(self, model: torch.nn.Module, device: str) -> None:
        super().__init__()
        self.model = model
        self._device = device

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the model."""
        with torch.autocast(self._device):
            return self.model(*args, **kwargs)
