"""Plain words for kinds and stages, for a reader who knows neither compilers nor rounding."""

from __future__ import annotations

import re
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import fields, is_dataclass, replace
from typing import Any

from checked_backend.findings import Finding, Kind
from checked_backend.report.clean import first_line
from checked_backend.subjects import SubjectKind

# Each entry has words for one result, and a sentence. The finest key that fits is taken.
_WORDS: Mapping[str, tuple[str, str]] = {
    "structure": (
        "has another type, dtype, shape or device than in eager",
        "The compiled program returns something of another type, dtype, shape or device than your model does.",
    ),
    "structure.dtype": (
        "has another dtype than in eager",
        "The compiled program returns numbers of another dtype than your model does.",
    ),
    "structure.shape": (
        "has another shape than in eager",
        "The compiled program returns a tensor of another shape than your model does.",
    ),
    "structure.device": (
        "is on another device than in eager",
        "The compiled program returns a tensor on another device than your model does.",
    ),
    "structure.stride": (
        "has other strides than in eager",
        "The numbers are right, but they lie in memory in another order.",
    ),
    "structure.requires_grad": (
        "differs from eager in requires_grad",
        "The numbers are right, but the result takes part in autograd on one side only.",
    ),
    "structure.value": (
        "has another value than in eager",
        "A value that is no tensor is another one in eager.",
    ),
    "structure.outputs": (
        "differs from eager in what is there",
        "Eager and the compiled program return, or leave in what they change, not the same things.",
    ),
    "structure.container": (
        "is another kind of container, or in another order, than in eager",
        "What is in it may be right, but code that asks for its type, or goes through it in order, finds another one.",
    ),
    "structure.inference": (
        "is a tensor of inference mode, which eager's is not",
        "The numbers are right, but in normal mode autograd can neither save this tensor nor have it written to.",
    ),
    "alias": (
        "shares memory differently than in eager",
        "Writing to this tensor in place changes another one in eager and not when compiled, or the reverse.",
    ),
    "alias.overwritten": (
        "is overwritten by a later call",
        "The compiled program writes to a result that it gave you in an earlier call.",
    ),
    "mutation": (
        "is changed differently than in eager",
        "Something that the program changes in place has other values afterwards than in eager.",
    ),
    "mutation.unexpected": (
        "is changed, where eager only reads",
        "The compiled program writes to a tensor that your model only reads.",
    ),
    "mutation.uncounted": (
        "is changed behind autograd's back",
        "The values are right, but autograd is not told that they changed, and may use them in place of old ones.",
    ),
    "logic": (
        "is wrong",
        "The compiled program computes something else than your model.",
    ),
    "logic.sign_of_zero": (
        "has zeros of another sign than in eager",
        "The numbers are right, but some zeros are negative on one side only.",
    ),
    "logic.this_call": (
        "was wrong in one call only",
        "The result was wrong once, and not again from the same inputs: the hardware may be at fault.",
    ),
    "precision": (
        "is less precise than in eager",
        "The compiled program computes the same thing, with more rounding error than your model has to have.",
    ),
    "precision.batch": (
        "has other bits alone than in a batch",
        "The compiled program gives a row other bits when other rows are in the batch. Both may be accurate.",
    ),
    "precision.runs": (
        "has other bits in another run",
        "The compiled program gives other bits when it is run again on the same inputs. Both may be accurate.",
    ),
    "precision.choices": (
        "has other bits with other kernels",
        "The compiled program gives other bits where the compiler takes other kernels. Both may be accurate.",
    ),
    "nonfinite": (
        "has NaN or infinity where eager has none",
        "The compiled program makes NaN or infinity of inputs of which eager makes numbers.",
    ),
    "rng": (
        "is drawn differently than in eager",
        "The compiled program draws other random numbers.",
    ),
    "exception": (
        "does not raise as in eager",
        "Your model raises an error in eager, and the compiled program does not, or another one.",
    ),
    "crash": (
        "fails where eager runs",
        "Your model runs in eager, and compiling or running the compiled program fails.",
    ),
    "nondeterministic": (
        "does not repeat in eager",
        "Eager gives another result each time, so there is nothing to compare with.",
    ),
    "unsupported": (
        "could not be checked",
        "This could not be checked; it is no pass.",
    ),
}
_OF_OTHER_RUN = (
    "leaves the noise of the first run",
    "The second run has other values here than the first one, by more than the first one's own noise.",
)
_FEWER = (
    "has numbers where eager has NaN or infinity",
    "The compiled program makes numbers of inputs of which eager makes NaN or infinity.",
)
_OF_NODE = (
    "is not what was traced",
    "What ran has another dtype, shape or layout than was traced, and a compiler trusts the trace.",
)
_OF_STATE = (
    "is left changed",
    "A setting of the process is not what eager leaves it at.",
)

_PLURAL: Mapping[str, str] = {
    "is": "are",
    "was": "were",
    "has": "have",
    "does": "do",
    "begins": "begin",
    "differs": "differ",
    "fails": "fail",
    "leaves": "leave",
    "shares": "share",
}

_NAMED: Mapping[str, str] = {
    "candidate": "the compiled program",
    "rng state": "the random state",
    "results": "what it returns",
}
"""Subjects without brackets that need other words. In JSON and under ``ignore`` they keep their own."""

_OF_DYNAMO = (
    (re.compile(r" \[\d+/\d+(?:_\d+)?\]"), ""),
    (re.compile(r"\btorch_dynamo_resume_in_(\w+?)_at_(\d+)\b"), r"\1 from line \2 on"),
    (re.compile(r"\b___stack(\d+)\b"), r"value \1 at the graph break"),
)

_OF_CANDIDATE = (
    (re.compile(r"(?<=[Tt]he )compiled (program|function)"), "candidate"),
    (re.compile(r"\bwhen compiled\b"), "in the candidate"),
    (re.compile(r"\bthis region\b"), "the candidate"),
    (re.compile(r"compiling or running the candidate"), "the candidate"),
    (re.compile(r"that compiled and ran the program"), "that ran the candidate"),
    (re.compile(r" \(no float64 twin could run\)"), ""),
    (re.compile(r"\byour model\b"), "the reference"),
    (re.compile(r"\bYour model\b"), "The reference"),
    (re.compile(r"(?<=, )(\S+) compiled$"), r"\1 in the candidate"),
)

_STAGES: Mapping[str, str] = {
    "eager": "as Dynamo traced it",
    "aot": "AOT autograd",
    "decomposed": "Inductor's decompositions",
    "partitioned": "graph passes and partition",
    "compiled": "compiled code",
}


def words_of(finding: Finding) -> tuple[str, str]:
    """The kind of a finding as a verb phrase about one result, ``is wrong``, and in a sentence."""
    if finding.of_node and finding.kind is not Kind.NONFINITE:
        return _OF_NODE
    if finding.about.kind is SubjectKind.STATE:
        return _OF_STATE
    if finding.of_other_run:
        return _OF_OTHER_RUN
    if finding.kind is Kind.NONFINITE and (metrics := finding.metrics) is not None:
        fewer = metrics.nan_candidate + metrics.inf_candidate < metrics.nan_reference + metrics.inf_reference
        return _FEWER if fewer else _WORDS["nonfinite"]
    return _WORDS[finest_key(finding, _WORDS)]


def finest_key(finding: Finding, table: Container[str]) -> str:
    """The key of a table that is nearest to a finding's detail: that, what it is finer than, or the kind."""
    key = finding.detail
    while key and key not in table:
        key = key.rpartition(".")[0]
    return key or finding.kind.value


def for_several(phrase: str, count: int) -> str:
    """A verb phrase about one thing as one about so many: ``is wrong``, ``are wrong``."""
    verb, _, rest = phrase.partition(" ")
    return phrase if count == 1 else f"{_PLURAL.get(verb, verb)} {rest}"


def said_of(finding: Finding, count: int = 1) -> str:
    """The verb phrase for so many results with this finding: ``is wrong``, ``are wrong``."""
    return for_several(words_of(finding)[0], count)


def named(subject: str) -> str:
    """A subject in the words of somebody who does not know the check's: the candidate is the compiled program."""
    return _NAMED.get(subject, first_line(subject))


def stage_words(finding: Finding) -> str:
    """The stage of compilation that goes wrong; empty if it is not known."""
    stage = _STAGES.get(finding.stage or "", finding.stage or "")
    return f"{stage}, backward" if stage and finding.graph == "backward" else stage


def of_candidate(said: str) -> str:
    """Words about a handwritten candidate: the same as about a compiled program, which it stands in for."""
    return _replaced(said, _OF_CANDIDATE)


def plain_names(said: str) -> str:
    """A text without the names that Dynamo makes up: of code after a graph break, and of what is passed on there."""
    return _replaced(said, _OF_DYNAMO)


def _replaced(said: str, words: Sequence[tuple[re.Pattern[str], str]]) -> str:
    for pattern, new in words:
        said = pattern.sub(new, said)
    return said


def with_texts(said: Any, change: Callable[[str], str]) -> Any:
    """The same with each text changed: of a tuple, or of an object with attributes."""
    if type(said) is str:  # an enumeration of texts keeps its members
        return change(said)
    if isinstance(said, tuple):
        return tuple(with_texts(one, change) for one in said)
    if is_dataclass(said) and not isinstance(said, type):
        return replace(said, **{name.name: with_texts(getattr(said, name.name), change) for name in fields(said)})
    return said
