"""Advice on each kind of finding, a table from the finest key to the kind; and words about layout alone."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from checked_backend.findings import Finding, Kind, Verdict
from checked_backend.findings.paths import is_in_library
from checked_backend.report.clean import plural
from checked_backend.report.words import finest_key, for_several, said_of
from checked_backend.subjects import SubjectKind

if TYPE_CHECKING:
    from checked_backend.report.report import Report

_DYNAMO = "traced wrong by Dynamo"
_STATE = "mutation of a setting"  # its details are the settings' names

ADVICE: Mapping[str, str] = {
    "structure": "structure: a bug in the compiler, not in your model; report it, with the repro if there is one.",
    "structure.stride": (
        "stride: code that calls .view() on the result, or hands its pointer to a kernel that assumes strides, "
        "breaks. Return x.contiguous() from 'your line' to pin the layout: that is cheap. If nothing of yours "
        'depends on it, numcheck takes options={"layout": "ignore"}.'
    ),
    "node.layout": (
        "traced layout: a node's real strides or storage offset are not the traced ones, and nothing in the graph "
        "depends on them. A compiler that trusts them, and runs the operator as it is, may still read at the wrong "
        "places: mend the operator's fake kernel, or report it if it is torch's. If nothing of yours depends on "
        'it, debug_interpreter takes options={"layout": "ignore"}.'
    ),
    "node": (
        "traced metadata: for a custom operator make its register_fake and its schema say what its kernel does; "
        "for an operator of torch report it."
    ),
    _DYNAMO: (
        "Dynamo: what it traced is wrong already, before any kernel is compiled. Look at what the code depends on "
        "besides its arguments: hooks, globals, closures, attributes of modules. Do what 'because' says, or keep "
        "the code out of the compiler with torch.compiler.disable, and report it."
    ),
    "other_run": (
        "another run: what differs between the two (the notes list versions and machines) matters from this place "
        "on. All that follows from it is not listed. To see whether a compiler is to blame, run both with "
        "checked-backend run."
    ),
    "structure.requires_grad": (
        "requires_grad: a gradient is lost or made up. Look for detach() or no_grad() in the compiled function; "
        "if there is none, report it."
    ),
    "alias": (
        "alias: return x.clone() where you return a view. If you never write to them in place: "
        'options={"ignore": ("alias",)}.'
    ),
    "alias.overwritten": (
        "overwritten: until that is mended, keep y.clone() of results that you hold across calls, and report it."
    ),
    "alias.identity": (
        "identity: eager returns the very tensor object that it was given, the compiled program a new object over "
        "the same memory (or the reverse). It matters only to code that asks `out is x` or sets attributes on the "
        'result. If yours does not: options={"ignore": ("alias.identity",)}.'
    ),
    "logic.sign_of_zero": (
        "sign of zero: code that divides by such zeros, or asks for their sign (atan2, copysign, signbit), goes "
        "another way. Return x + 0.0 from 'your line' to have positive zeros alone. If nothing of yours depends "
        'on it, numcheck takes options={"layout": "ignore"}.'
    ),
    "mutation": (
        "mutation: replace the in-place operation by its out-of-place form, or move it out of the compiled "
        "function, and check again."
    ),
    "mutation.unexpected": "unexpected: hand the compiled function a clone of this tensor, and report it.",
    "mutation.uncounted": (
        "uncounted: a kernel that writes to a tensor through raw memory must count that for autograd: call "
        "torch.autograd.graph.increment_version on the input after the write. Until then, write out of place "
        "inside the compiled function, and report it."
    ),
    _STATE: "state: set it again after the compiled function, and report it.",
    "logic": "logic: report it, with the repro if there is one.",
    "logic.this_compilation": (
        "logic: the code is right when it is compiled once more, with empty caches. Inductor's caches do not tell "
        "apart all settings that its code depends on: ATEN_CPU_CAPABILITY is one that they miss. Run it with "
        "TORCHINDUCTOR_FORCE_DISABLE_CACHES=1. If it is right then, delete the cache (TORCHINDUCTOR_CACHE_DIR)."
    ),
    "precision": "precision: report it, if your model needs what is lost.",
    "precision.traced": (
        "precision: when it is compiled, this code takes another way, which rounds more: torch's own optimizers "
        "compute with Python's numbers in eager, and with float32 tensors when compiled. If that is too little "
        "for you, keep it out of the compiler with torch.compiler.disable."
    ),
    "precision.batch": (
        "batch: a library or a compiler may take another kernel for another size, and so may eager (ask with "
        "compiler='eager'). Where you need the same bits, pad each batch to one size, or keep the operator out of "
        "the compiler and call a kernel of which you know that it adds up in one order."
    ),
    "precision.runs": (
        "runs: look for sums by atomics and for memory that nothing has written to; "
        "torch.use_deterministic_algorithms(True) refuses or replaces the kernels of torch that do not repeat."
    ),
    "precision.choices": (
        "choices: the compiler takes the kernel that is fastest where and when it measures. Where you need the "
        "same bits, compile without max_autotune, or keep what was measured (TORCHINDUCTOR_CACHE_DIR) for all runs."
    ),
    "nonfinite": (
        "nonfinite: look at divisions, log, exp, sqrt and masked softmax: a rewrite that is equal on paper can "
        "overflow."
    ),
    "rng": (
        "rng: Inductor draws its own unless told otherwise: set "
        'options={"compiler_options": {"fallback_random": True}} to compare the same numbers. If the finding '
        "stays, the random state is advanced differently."
    ),
    "exception": "exception: code that relies on it is not safe to compile; fix what eager complains about first.",
    "crash": "crash: report it, with the repro if there is one: run by itself it gives the whole message.",
    "crash.differentiating": (
        "crash.differentiating: torch.compile has no gradient there, eager has. Take the gradient inside of the "
        "compiled function and return it, or keep this part out of the compiler with torch.compiler.disable."
    ),
    "crash.fake": (
        "register_fake: a program is traced with tensors that have no data, for which an operator's register_fake "
        "says what its kernel returns; without one nothing is compiled. Write it with torch.library.register_fake, "
        "from shapes, strides and dtypes of the arguments alone. A size that depends on data is "
        "torch.library.get_ctx().new_dynamic_size(), and the result is the same whatever it is."
    ),
    "nondeterministic": (
        "nondeterministic: call torch.use_deterministic_algorithms(True), fix the seeds, and check again."
    ),
    "unsupported": "unsupported: compare it by other means, or leave it out of the compiled function.",
}

OF_ITSELF = frozenset({"precision.batch", "precision.runs", "precision.choices"})
"""The details of findings of a program that is compared with itself."""

TENSORS_OF_BOTH_RUNS = "tensors of both runs"
"""What a comparison of two recorded runs counts."""

PROGRAM_RUNS = "program runs"
"""The name of the count of whole programs that were compared, beyond their compiled regions."""

CANDIDATE = "candidate"
"""The fact of a report that names a handwritten candidate. Without it, the candidate is the compiled program."""

NOTHING_CHECKED = (
    "Nothing was checked. Call the compiled function at least once inside the check, see that compilation is not "
    "turned off (TORCH_COMPILE_DISABLE, TORCHDYNAMO_DISABLE, torch.compiler.disable; a dispatch mode such as "
    "FlopCounterMode around the call), and that the check is not sampled away (options every and budget)."
)
NOTHING_COMPILED = (
    "Nothing was compiled, so eager was compared with eager. 'Not checked' says why Dynamo made no graph of the "
    "program: remove that reason (a torch.compiler.disable, a graph break, a switch or a stance), or check a function "
    "inside of it that does compute with tensors."
)
_CANDIDATES: Mapping[Kind, str] = {
    Kind.STRUCTURE: "Return as many results as the reference, of its types, shapes, dtypes and devices.",
    Kind.ALIAS: "Return memory of the candidate's own where the reference does, and an argument where that does.",
    Kind.MUTATION: "Write to the arguments that the reference writes to, and to no others.",
    Kind.EXCEPTION: "Raise what the reference raises for these arguments, or leave them out of the check.",
    Kind.LOGIC: (
        "Look at what the candidate does in the call that is named: masks and the last tile, where sums begin, "
        "indices, what it keeps of an earlier call."
    ),
    Kind.PRECISION: (
        "The candidate rounds more than the reference has to. Add up in float32, and round once, at the end."
    ),
    Kind.NONFINITE: (
        "Look for memory that is read before anything is written to it (the end of a tile, torch.empty), for exp "
        "that overflows, and for a division by zero."
    ),
    Kind.CRASH: "If the candidate need not take this call, leave its size out with sizes=...",
}
"""What to do about a handwritten candidate. There is no compiler to report it to."""

_LOCALIZE = (
    "To find the operator, a repro and a workaround: cb.check(..., localize=True), checked-backend check --localize, "
    'or numcheck with options={"localize": True}. It takes a minute or two.'
)
_SKIPPED = (
    "Something that matters was not checked, so this is not a pass. Each entry under 'Not checked' says why; remove "
    "the reason and check again."
)


def nothing_done(report: Report) -> tuple[bool, bool]:
    """Whether nothing was checked, and whether nothing was compiled that should have been."""
    coverage = report.coverage
    nothing_compiled = bool(coverage.checked.get(PROGRAM_RUNS)) and not coverage.regions
    nothing_compiled = nothing_compiled and CANDIDATE not in report.environment
    return not any(count > 0 for count in coverage.checked.values()), nothing_compiled


def advise(report: Report, findings: Sequence[Finding]) -> tuple[str, ...]:
    """Return what to do next, each piece of advice once, in the order of the main findings of all causes."""
    if CANDIDATE in report.environment:
        failing = [one for one in findings if one.fails]
        own = [_CANDIDATES.get(one.kind) for one in failing if one.detail not in OF_ITSELF]
        own += [ADVICE[one.detail] for one in failing if one.detail in OF_ITSELF]
        return tuple(dict.fromkeys([*filter(None, own), *_for_coverage(report, ())]))
    lines = list(dict.fromkeys(_for_findings(findings)))
    # the stage of a whole program alone is known without a search for the operator
    localized = any(one.op is not None or one.searched for one in report.findings)
    localized = localized or any("localized" in note for note in report.coverage.notes)
    if not localized and any(one.region and one.fails and _key(one) not in ("other_run", _DYNAMO) for one in findings):
        lines.insert(0, _LOCALIZE)
    return (*lines, *_for_coverage(report, findings))


def _for_coverage(report: Report, findings: Sequence[Finding]) -> Iterator[str]:
    """What to do where there is no verdict."""
    if report.verdict is not Verdict.INCONCLUSIVE:
        return
    nothing_checked, nothing_compiled = nothing_done(report)
    if nothing_checked and not any(one.kind is Kind.UNSUPPORTED for one in findings):  # they say why
        yield NOTHING_CHECKED
    if nothing_compiled:
        yield NOTHING_COMPILED
    elif any(skip.matters for skip in report.coverage.skipped):
        yield _SKIPPED


def _for_findings(findings: Sequence[Finding]) -> Iterator[str]:
    tried = [finding.workaround_confirmed for finding in findings if finding.workaround]
    if any(tried):
        yield "Today: paste the workaround shown with the finding; it was seen to make the finding vanish."
    elif tried:
        yield "Today: paste the workaround shown with the finding. It was not tried, so check again with it."
    shown = [finding.repro_confirmed for finding in findings if finding.repro]
    if any(shown):
        yield "To see it again: run the repro shown with the finding. It needs nothing but its own folder."
    elif shown:
        yield "A script was written, but it does not show the finding in a fresh process; the evidence says why."
    by_key: dict[str, list[Finding]] = {}
    for finding in findings:
        by_key.setdefault(_key(finding), []).append(finding)
    for key, alike in by_key.items():  # said once, of the finding of which most is known
        finding = next((one for one in alike if one.op and one.source), alike[0])
        low = finding.metrics is not None and finding.metrics.dtype.startswith(_LOW)
        more = [] if _is_exhausted(finding) else (_IN_LOW if low else _IN_WIDE).get(key, ())
        yield " ".join([ADVICE[key], *more, *_where(finding, key)])


_LOW = ("bfloat16", "float16", "float8")

_IN_LOW: Mapping[str, Sequence[str]] = {
    "precision": (
        'Try options={"compiler_options": {"emulate_precision_casts": True}} with Inductor; if the finding goes, '
        "it was fusion in low precision. Else compute in float32 what needs more digits.",
    ),
    "nonfinite": ("Float32 reaches further.",),
}
_IN_WIDE: Mapping[str, Sequence[str]] = {
    "precision": (
        'See that nothing computes in a lower precision: torch.set_float32_matmul_precision("highest"), and no '
        "autocast around it.",
    )
}
"""Further advice by the precision of the values: "use float32" does not help a float32 program."""

_BLAMED = frozenset({"logic", "precision", "nonfinite", "crash", _STATE})
"""Kinds of findings for which an operator may be at fault."""


def _where(finding: Finding, key: str) -> Sequence[str]:
    if key not in _BLAMED:
        return ()
    if _is_exhausted(finding):
        return (f"No setting helped, nor did keeping {_line(finding)} out of the compiler.",)
    if finding.workaround and finding.workaround_confirmed:
        return ()  # it was seen to help, and stands with the finding
    if finding.op and finding.source:
        return (f"Else keep the code at {_line(finding)} out of the compiler with torch.compiler.disable.",)
    return ("Which line is to blame is not known.",)


def _line(finding: Finding) -> str:
    is_known = finding.caller or not is_in_library(finding.source)
    return "'your line'" if is_known else "the library's line"


def _is_exhausted(finding: Finding) -> bool:
    """Whether all that could be advised was tried without success."""
    return not finding.workaround and not finding.workaround_confirmed


def _key(finding: Finding) -> str:
    if finding.at_fault and not finding.of_node and finding.detail != "crash.fake":
        return "node"
    if finding.of_node and finding.kind is not Kind.NONFINITE:
        return "node.layout" if finding.is_layout else "node"
    if finding.about.kind is SubjectKind.STATE:
        return _STATE
    if finding.of_other_run:
        return "other_run"
    if finding.stage == "eager":
        return _DYNAMO
    return finest_key(finding, ADVICE)


_SHOWN = 3

_OF_RESULTS = ("structure.stride", "structure.requires_grad", "logic.sign_of_zero")
_OF_NODES: Mapping[str, str] = {
    "structure.stride": "has other strides than were traced",
    "structure.offset": "begins elsewhere in memory than was traced",
}


def layout_sentence(findings: Sequence[Finding]) -> str:
    """``values agree; 8 outputs have other strides than in eager``.

    No values are known of nodes whose metadata was compared. They are told as ``1 node has other strides than were
    traced, on which nothing depends``.

    Args:
        findings: At least one, all about layout alone.
    """
    of_results, of_nodes = (
        ", ".join(_told([finding for finding in findings if finding.of_node is of_node])) for of_node in (False, True)
    )
    parts = [f"values agree; {of_results}"] if of_results else []
    return "; ".join([*parts, f"{of_nodes}, on which nothing depends"] if of_nodes else parts)


def _told(findings: Sequence[Finding]) -> Iterator[str]:
    by_detail: dict[str, list[Finding]] = {}
    for finding in findings:
        by_detail.setdefault(finding.detail, []).append(finding)
    for detail in (*_OF_RESULTS, "structure.offset"):
        if alike := by_detail.get(detail):
            first, kinds = alike[0], {finding.about.kind for finding in alike}
            count = len({(finding.region, finding.of_node and finding.graph, finding.subject) for finding in alike})
            noun = "node" if first.of_node else "output" if kinds == {SubjectKind.OUTPUT} else "result"
            phrase = for_several(_OF_NODES[detail], count) if first.of_node else said_of(first, count)
            yield f"{plural(count, noun)} {phrase}"


def layout_warning(findings: Sequence[Finding]) -> str:
    """The text of a warning of findings about layout alone, the same for each time that a program is compiled."""
    lines = [f"{layout_sentence(findings)}."]
    for finding in findings[:_SHOWN]:
        operator = f" ({finding.op})" if finding.of_node else ""
        where = f"; your line: {finding.source}" if finding.source else ""
        told = f"{finding.expected} in eager, {finding.actual} compiled"
        if finding.of_node:
            told = f"{finding.detail.removeprefix('structure.')} {finding.expected} traced, {finding.actual} ran"
        if finding.expected is None or finding.actual is None:
            told = finding.message
        lines.append(f"  {finding.subject}{operator}: {told}{where}")
        if finding.of_node and finding.at_fault:
            lines.append(f"    likely at fault: {finding.at_fault}")
    if len(findings) > _SHOWN:
        lines.append(f"  and {len(findings) - _SHOWN} more")
    lines += dict.fromkeys(ADVICE["node.layout" if finding.of_node else finding.detail] for finding in findings)
    lines.append('The check goes on, and this is not said again; options={"layout": "raise"} makes it an error.')
    return "\n".join(lines)
