"""Compare a program with itself, bit by bit: the same rows alone and in a batch, the same call again, other kernels.

Accuracy is another question: a program may round otherwise in another batch, and be right in both.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from itertools import zip_longest

import torch
from torch import fx

from checked_backend._torch.caches import without_compile_caches
from checked_backend._torch.dynamo import marked_dimensions
from checked_backend._torch.generated_modules import GeneratedModule, generated_modules_noted
from checked_backend.checking.backward import draw_like, roots_of
from checked_backend.checking.kernel_choices import kernel_choices
from checked_backend.checking.program import Outcome, Program, ProgramCall, ProgramCopy, Transform
from checked_backend.checking.program_run import fresh_dynamo
from checked_backend.checking.variants import substituted
from checked_backend.diagnose.kernel import kernel_in
from checked_backend.errors import CheckedBackendError, OptionError
from checked_backend.findings import Coverage, EvidenceKey, Finding, Kernel, Kind, Skip, Verdict
from checked_backend.graphs.schema import operator_name
from checked_backend.graphs.source_line import callers_line, module_path, source_line
from checked_backend.numerics.bits import same_bits
from checked_backend.numerics.measure import measure
from checked_backend.regions.call_findings import described_exception
from checked_backend.regions.operator_check.in_place import written
from checked_backend.regions.operator_check.recorder import recorded
from checked_backend.report import Report
from checked_backend.subjects import Subject, SubjectKind
from checked_backend.verdict.runner import short

QUESTIONS = ("batch", "runs", "choices")
"""What a program may be asked to keep its bits under."""

REPEATS = 3
"""Runs of the same call. Each has its arguments elsewhere in memory."""

MOST_BYTES = 1 << 31
"""The most bytes of inner tensors that are kept to find the operator."""

GROSS = 0.1
"""Rows that differ by more than this share are not the same but for rounding."""

Context = Callable[[], AbstractContextManager[None]]

Rows = Callable[[torch.Tensor | None, torch.Tensor | None], torch.Tensor | None]
"""Takes a tensor of each run. Returns the part of the first that the second should be; None: they are not compared."""


@dataclass(frozen=True, slots=True)
class Invariance:
    """What a program is asked to keep its bits under.

    Attributes:
        questions: Some of `QUESTIONS`, in the order in which they are asked.
        dimension: The dimension of the batch; None: the one that is marked as dynamic, else the first.
    """

    questions: Sequence[str] = ()
    dimension: int | None = None

    @classmethod
    def of(cls, asked: str | Sequence[str]) -> Invariance:
        """What was asked: ``("batch", "runs")``, ``"batch=1,choices"``.

        Raises:
            OptionError: It is none of the questions.
        """
        words = asked.split(",") if isinstance(asked, str) else list(asked) if isinstance(asked, Sequence) else [asked]
        questions, dimension = [], None
        for word in words:
            name, given, place = word.strip().partition("=") if isinstance(word, str) else (word, "", "")
            if name not in QUESTIONS or (given and not (name == "batch" and place.isdecimal())):
                valid = f"{', '.join(QUESTIONS)}; batch=1 if the rows are along dimension 1"
                raise OptionError(f"check: invariant got {word!r}; valid: {valid}.")
            questions.append(name)
            dimension = int(place) if given else dimension
        return cls(tuple(dict.fromkeys(questions)), dimension)


@dataclass(frozen=True, slots=True)
class Answer:
    """The answer to one question.

    Attributes:
        compared: How many tensors were compared.
    """

    how: str
    finding: Finding | None = None
    compared: int = 0


def compare_with_itself(
    program: Program, asked: Invariance, transform: Transform, *, choices: int, accuracy: Verdict
) -> Report:
    """Ask whether a program's bits stay as they are.

    Args:
        program: Its first call is asked about.
        choices: With how many sets of kernels to compile at most.
        accuracy: What the check of its accuracy came to, for the remark that has all answers.
    """
    first = program.calls[0]
    program = replace(program, continued=False, optimizer=None, calls=[first, first])
    question = _Question(program, transform)
    ask: Mapping[str, Callable[[], Answer]] = {
        "batch": partial(question.batch, asked.dimension),
        "runs": question.runs,
        "choices": partial(question.choices, max(choices, 2)),
    }
    said = [f"accurate: {_ACCURATE[accuracy]}"]
    findings, skips, compared = [], [], 0
    for name in asked.questions:
        called = _CALLED[name]
        try:
            answer = ask[name]()
        except Exception as error:
            why = str(error) if isinstance(error, _NotAskedError) else f"the check of it fails: {short(error)}"
            skips.append(Skip(called, why, matters=True))
            said.append(f"{called}: not known")
            continue
        compared += answer.compared
        if answer.finding is None:
            said.append(f"{called}: yes ({answer.how})")
        else:
            findings.append(answer.finding)
            said.append(f"{called}: no, {_place(answer.finding)}")
    checked = {"tensors compared bit by bit": compared} if compared else {}
    return Report(tuple(findings), Coverage(checked=checked, skipped=tuple(skips), notes=("; ".join(said),)))


_ACCURATE = {Verdict.PASS: "yes", Verdict.FAIL: "no", Verdict.INCONCLUSIVE: "not known"}
_CALLED = {"batch": "batch-invariant", "runs": "the same in each run", "choices": "the same with other kernels"}


def _place(finding: Finding) -> str:
    """Where the bits first differ, in words."""
    if finding.op is None:
        return f"seen at {finding.subject}"
    where = f" in {finding.module}" if finding.module else ""
    kernel = f": kernel {finding.kernel.name}" if finding.kernel is not None else ""
    return f"first at {finding.op}{where}{kernel}"


class _NotAskedError(CheckedBackendError):
    """Raised with the reason why a question cannot be asked of a program."""


@dataclass(slots=True)
class _Question:
    """Asks about the first call of a program."""

    program: Program
    transform: Transform

    @property
    def _call(self) -> ProgramCall:
        return self.program.calls[0]

    def _copy(self) -> ProgramCopy:
        return ProgramCopy(self.program, self.transform)

    def _run(self, copy: ProgramCopy, call: ProgramCall) -> Mapping[str, torch.Tensor]:
        """The values of one call: results, gradients, what it changes in place.

        Raises:
            _NotAskedError: It raises.
        """
        who = "the compiled program" if self.program.candidate is None else "the candidate"
        try:
            outcome = copy.step(0, call)
        except CheckedBackendError as error:
            raise _NotAskedError(f"{who}: {error}") from error
        _refuse(outcome.error or outcome.backward_error, who)
        return outcome.values

    def batch(self, dimension: int | None) -> Answer:
        """Are rows the same alone and in the batch?"""
        batch = _Batch.of(self.program, dimension)
        eager = self.program.run()
        _refuse(eager.error, "eager")
        entering = _gradients(eager)
        all_rows = partial(batch.rows, 0, batch.size, entering)
        whole = all_rows()
        # one row, all but one, half; the last ones begin elsewhere in memory
        bounds = [(0, 1), (batch.size - 1, batch.size), (0, batch.size // 2), (1, batch.size), (0, batch.size - 1)]
        parts = [part for start, stop in dict.fromkeys(bounds) if (part := batch.part(start, stop, entering))]
        named = [name for name in eager.values if not _is_unchanged(name, self.program, eager)]
        rows_of = {name: [part.of(eager.values[name], part.eager.get(name)) for part in parts] for name in named}
        with_rows = {name for name, rows in rows_of.items() if any(one is not None for one in rows)}
        mixed = _mixed(self.program, whole, parts, eager) & with_rows
        asked = with_rows - mixed
        if not asked:
            raise _NotAskedError(_why_none(batch, parts, mixed))
        with fresh_dynamo():
            # what a program counts in Python goes on from call to call, so the whole batch runs as often as its parts
            beside, compiled = self._copy(), self._copy()
            for copy in (beside, compiled):
                self._run(copy, replace(whole))
            for part in parts:
                expected, actual = self._run(beside, all_rows()), self._run(compiled, part.call)
                here = {name for name in asked if part.of(eager.values[name], part.eager.get(name)) is not None}
                if (different := _first_different(expected, actual, part.of, asked, needed=here)) is not None:
                    finding = _finding("batch", f"{part.differs} ({batch.words})", *different)
                    runs = [(nullcontext, [whole, last]) for last in (all_rows(), part.call)]
                    return Answer("", self._placed(finding, runs, part.near), len(asked))
        without = [name for name in named if name not in with_rows and _is_effect(name, eager, parts[0])]
        left_out = [
            f"; not asked of {', '.join(sorted(names))}, {why}"
            for names, why in ((mixed, "which depends on all rows"), (without, "which has no rows"))
            if names
        ]
        why = f"{batch.words}; {', '.join(map(str, parts))} alone{''.join(left_out)}"
        return Answer(why, None, len(asked))

    def runs(self) -> Answer:
        """Does the same call give the same bits?"""
        with fresh_dynamo():
            expected = self._run(self._copy(), self._call)
            for number in range(2, REPEATS + 1):
                actual = self._run(self._copy(), self._call)
                if (different := _first_different(expected, actual, needed=_results(expected, actual))) is not None:
                    message = f"run {number} of the same call is not bit for bit what the first one is"
                    finding = _finding("runs", message, *different)
                    found = self._placed(finding, [(nullcontext, [self._call])] * 2, _all_of)
                    return Answer("", found, len(expected))
        return Answer(f"{REPEATS} runs", None, len(expected))

    def choices(self, count: int) -> Answer:
        """Does the program give the same bits with other kernels?"""
        first, *others = kernel_choices(count)
        with first.used(), fresh_dynamo():
            expected = self._run(self._copy(), self._call)
        if not first.tuned.measured:
            return Answer("the compiler measured no kernels, so there is one for each purpose")
        for choice in others:
            with choice.used(), fresh_dynamo():
                actual = self._run(self._copy(), self._call)
            if (different := _first_different(expected, actual, needed=_results(expected, actual))) is not None:
                message = f"with {choice.kernels} it is not bit for bit what it is with {first.kernels}"
                finding = _finding("choices", message, *different)
                both = [(one.used, [self._call]) for one in (first, choice)]
                return Answer("", self._placed(finding, both, _all_of), len(expected))
        return Answer(f"{count} sets of kernels", None, len(expected))

    def _placed(self, finding: Finding, runs: Sequence[tuple[Context, Sequence[ProgramCall]]], rows: Rows) -> Finding:
        """The finding, with the first operator whose result differs, if the kernels can be seen.

        Args:
            runs: Two series of calls, each of a copy of the program that is made in a context: the last ones differ.
        """
        try:
            first, second = (self._seen(calls, context) for context, calls in runs)
        except Exception as error:  # the bits differ, wherever that begins
            why = f"not localized: {error}".partition("\n")[0]
            return replace(finding, evidence={EvidenceKey.LOCALIZED: why})
        for module, node in _first_nodes(first, second, rows):
            return replace(
                finding,
                graph=module.kind,
                node=node.name,
                op=operator_name(node),
                source=source_line(node),
                caller=callers_line(node),
                module=module_path(node),
                kernel=_kernel(module, node),
            )
        return finding

    def _seen(self, calls: Sequence[ProgramCall], context: Context) -> _Seen:
        """Compile the program anew for some calls, and record what its kernels write in the last of them."""
        modules: list[GeneratedModule] = []
        with context(), fresh_dynamo(), without_compile_caches():
            copy = self._copy()
            with generated_modules_noted(modules):
                for call in calls:
                    self._run(copy, call)
            with recorded(modules, MOST_BYTES) as recordings:
                self._run(copy, calls[-1])
            whole = [(module, one) for module, one in recordings if one.arguments is not None and not one.is_mixed]
            return [(module, {node.name: value for node, value in written(module, one)}) for module, one in whole]


# -- rows ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Batch:
    """The dimension of each of a program's arguments that rows are along."""

    program: Program
    dimensions: Mapping[str, int]
    size: int

    @classmethod
    def of(cls, program: Program, given: int | None) -> _Batch:
        tensors = {name: leaf for name, leaf in program.tensors().items() if _is_plain(leaf)}
        marked = {name: min(marks) for name, leaf in tensors.items() if (marks := marked_dimensions(leaf))}
        if given is not None or not marked:
            marked = {name: given or 0 for name, leaf in tensors.items() if leaf.dim() > (given or 0)}
        if not marked:
            raise _NotAskedError("no argument is a tensor that has a batch")
        size = next(int(tensors[name].shape[place]) for name, place in marked.items())
        if size < 2:
            raise _NotAskedError(f"the batch has {size} {'row' if size == 1 else 'rows'}: give one of at least two")
        return cls(program, {name: place for name, place in marked.items() if tensors[name].shape[place] == size}, size)

    @property
    def words(self) -> str:
        """Which dimensions those are."""
        places: dict[int, list[str]] = {}
        for name, place in self.dimensions.items():
            places.setdefault(place, []).append(name)
        return " and ".join(f"dimension {place} of {', '.join(names)}" for place, names in places.items())

    def rows(self, start: int, count: int, entering: Mapping[str, torch.Tensor] | None) -> ProgramCall:
        """A call with some of the rows, in tensors of its own: the program may write to them."""
        leaves = self.program.tensors()
        alone = {
            name: leaves[name].detach().narrow(place, start, count).clone().requires_grad_(leaves[name].requires_grad)
            for name, place in self.dimensions.items()
        }
        made = substituted(self.program, alone, f"rows {start} to {start + count - 1}")
        if made is None:
            raise _NotAskedError("its arguments cannot be taken apart")
        return replace(made, entering=entering)

    def part(self, start: int, stop: int, given: Mapping[str, torch.Tensor]) -> _Part | None:
        """Some rows alone, with their part of the gradients; None if eager refuses them."""
        call = self.rows(start, stop - start, None)
        if (outcome := ProgramCopy(self.program).step(0, call)).error is not None:
            return None
        part = _Part(start, stop - start, self.size, call, outcome.values)
        rows = {name: part.of(gradient, outcome.values.get(name)) for name, gradient in given.items()}
        entering = {name: given[name] if own is None else own for name, own in rows.items()}
        return replace(part, call=replace(call, entering=entering))


@dataclass(frozen=True, slots=True)
class _Part:
    """Some rows of a batch, alone.

    Attributes:
        start: The first of them, counted from 0.
        size: The number of rows of the batch.
        eager: What eager makes of them.
    """

    start: int
    count: int
    size: int
    call: ProgramCall
    eager: Mapping[str, torch.Tensor]

    def __str__(self) -> str:
        return f"row {self.start}" if self.count == 1 else f"rows {self.start} to {self.start + self.count - 1}"

    @property
    def differs(self) -> str:
        """What is wrong if they have other bits in the batch."""
        verb, pronoun = ("is", "it is") if self.count == 1 else ("are", "they are")
        return f"{self} of {self.size}, alone, {verb} not bit for bit what {pronoun} in the batch"

    def of(self, whole: torch.Tensor | None, alone: torch.Tensor | None) -> torch.Tensor | None:
        """These rows of a tensor of the batch, as many as a tensor of theirs has; None if it has no rows.

        A dimension may have several elements for each row, if others were merged into it.
        """
        if whole is None or alone is None or not _are_plain(whole, alone) or whole.dim() != alone.dim():
            return None
        places = [place for place in range(whole.dim()) if whole.shape[place] != alone.shape[place]]
        if len(places) != 1:
            return None
        each, rest = divmod(int(whole.shape[places[0]]), self.size)
        if rest or int(alone.shape[places[0]]) != each * self.count:
            return None
        return whole.narrow(places[0], self.start * each, self.count * each)

    def near(self, whole: torch.Tensor | None, alone: torch.Tensor | None) -> torch.Tensor | None:
        """The same of a tensor inside of the program. What differs grossly is no row: the batch lies elsewhere."""
        part = self.of(whole, alone)
        return part if part is not None and alone is not None and _is_near(part, alone) else None


def _all_of(whole: torch.Tensor | None, other: torch.Tensor | None) -> torch.Tensor | None:
    if whole is None or other is None or not _are_plain(whole, other) or whole.shape != other.shape:
        return None
    return whole


def _are_plain(one: torch.Tensor, other: torch.Tensor) -> bool:
    return _is_plain(one) and _is_plain(other) and one.dtype == other.dtype


def _is_plain(tensor: torch.Tensor) -> bool:
    return tensor.layout is torch.strided and not tensor.is_nested and not tensor.is_quantized


def _is_unchanged(name: str, program: Program, eager: Outcome) -> bool:
    """Whether this is an argument that the program does not write to."""
    subject = Subject(name)
    if subject.kind is not SubjectKind.MUTATED:
        return False
    given, after = program.tensors().get(subject.name), eager.values[name]
    return given is not None and _first_different({name: given.detach()}, {name: after}) is None


def _why_none(batch: _Batch, parts: Sequence[_Part], mixed: Collection[str]) -> str:
    """Why no result's rows were compared."""
    if not parts:
        return f"eager refuses each part of the batch, along {batch.words}"
    if not mixed:
        return f"no result has rows along {batch.words}"
    return (
        f"{', '.join(sorted(mixed))} {'depends' if len(mixed) == 1 else 'depend'} on all rows, in eager and in float64 "
        f"too (a normalisation over the batch, random numbers), or the batch is not {batch.words}: name its dimension, "
        "as in batch=1"
    )


def _is_effect(name: str, eager: Outcome, part: _Part) -> bool:
    """Whether this is a result, or something that the program changes in place: it has other values for other rows."""
    kind = Subject(name).kind
    if not kind.is_changed_in_place:
        return kind is SubjectKind.OUTPUT
    return name not in part.eager or _first_different({name: eager.values[name]}, part.eager, asked=(name,)) is not None


def _mixed(program: Program, whole: ProgramCall, parts: Sequence[_Part], eager: Outcome) -> set[str]:
    """The results whose rows influence one another, as in a batch normalisation, and not by rounding.

    Float64 shows it; if the program does not run in float64, its own precision.
    """
    inside = ProgramCopy(program, wide=True).step(0, whole)
    mixed: set[str] = set()
    for part in parts:
        wide = ProgramCopy(program, wide=True).step(0, part.call) if inside.error is None else None
        ran = wide is not None and wide.error is None
        expected, alone = (inside.values, wide.values) if ran and wide is not None else (eager.values, part.eager)
        rows = {name: part.of(expected.get(name), value) for name, value in alone.items()}
        mixed |= {name for name, own in rows.items() if own is not None and not _is_near(own, alone[name])}
    return mixed


def _is_near(part: torch.Tensor, alone: torch.Tensor) -> bool:
    """Whether two tensors may be the same but for rounding."""
    if part.is_complex():
        part, alone = (torch.view_as_real(one.resolve_conj()) for one in (part, alone))
    one, other = (tensor.detach().double().nan_to_num(0.0, 0.0, 0.0) for tensor in (part, alone))
    return float((one - other).square().mean()) <= GROSS**2 * float(one.square().mean()) if one.numel() else True


def _gradients(eager: Outcome) -> dict[str, torch.Tensor]:
    """Gradients to enter at the results, of which rows can be taken."""
    roots = roots_of(eager.outputs, refusing=False) if eager.gradients else {}
    generator = torch.Generator().manual_seed(0)
    return {name: draw_like(root, generator) for name, root in roots.items() if root.layout is torch.strided}


# -- runs ------------------------------------------------------------------------------------------------------------


def _refuse(error: Exception | None, who: str) -> None:
    if error is not None:
        raise _NotAskedError(f"{who} raises {described_exception(error)}")


def _results(*runs: Mapping[str, torch.Tensor]) -> set[str]:
    """The names of results and gradients in any of some runs."""
    kinds = (SubjectKind.OUTPUT, SubjectKind.GRADIENT)
    return {name for values in runs for name in values if Subject(name).kind in kinds}


def _first_different(
    expected: Mapping[str, torch.Tensor],
    actual: Mapping[str, torch.Tensor],
    rows: Rows = _all_of,
    asked: Collection[str] | None = None,
    *,
    needed: Collection[str] = (),
) -> tuple[str, torch.Tensor, torch.Tensor] | None:
    """The name of the first value that has other bits, with both sides of it.

    Args:
        asked: The names of those that are compared; None: all.
        needed: The names of those that must not be left out.

    Raises:
        _NotAskedError: One of these is missing in one of the runs, or has another shape or dtype, or no plain layout.
    """
    for name in sorted(needed):
        if rows(expected.get(name), actual.get(name)) is None:
            raise _NotAskedError(f"{name} cannot be compared bit by bit: it is no plain tensor of one shape and dtype")
    for name, value in actual.items():
        part = rows(expected.get(name), value) if asked is None or name in asked else None
        if part is not None and not same_bits(part, value):
            return name, part, value
    return None


def _finding(question: str, message: str, subject: str, expected: torch.Tensor, actual: torch.Tensor) -> Finding:
    metrics = measure(reference=expected, candidate=actual)
    return Finding(Kind.PRECISION, subject, message, f"precision.{question}", metrics=metrics, searched=True)


# -- the operator ----------------------------------------------------------------------------------------------------

_Seen = Sequence[tuple[GeneratedModule, Mapping[str, torch.Tensor]]]
"""The generated modules that one call called, with what their kernels wrote, by the names of nodes."""


def _first_nodes(first: _Seen, second: _Seen, rows: Rows) -> Iterator[tuple[GeneratedModule, fx.Node]]:
    """The nodes whose values differ, in the order of the graphs, the forward pass before the backward pass."""
    for is_backward in (False, True):
        sides = ([one for one in seen if (one[0].kind == "backward") == is_backward] for seen in (first, second))
        for mine, others in zip_longest(*sides):
            if mine is None or others is None:
                return
            for node in mine[0].graph.graph.nodes:
                if _first_different(mine[1], others[1], rows, (node.name,)) is not None:
                    yield mine[0], node


def _kernel(module: GeneratedModule, node: fx.Node) -> Kernel | None:
    try:
        return kernel_in([module], module.kind, node.name, module.graph)
    except CheckedBackendError:
        return None
