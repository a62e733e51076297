"""Options of the backends: ``options={...}``, then ``CHECKED_BACKEND_*`` in the environment, then defaults."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar, get_args

from pydantic import Field, ValidationError, ValidationInfo, field_validator
from pydantic_settings import BaseSettings, NoDecode, SettingsConfigDict

from checked_backend.errors import OptionError
from checked_backend.findings import DETAILS, FINER, Kind
from checked_backend.subjects import NAMELESS, SubjectKind

ENV_PREFIX = "CHECKED_BACKEND_"

MetadataCheck = Literal[
    "structure",
    "dtype",
    "shape",
    "stride",
    "offset",
    "device",
    "layout",
    "bits",
    "requires_grad",
    "value",
    "alias",
    "mutation",
    "assert",
]
OnDivergence = Literal["raise", "warn", "record", "fallback"]
OnLayout = Literal["warn", "raise", "ignore"]


class BackendOptions(BaseSettings):
    """Options that every backend takes."""

    model_config = SettingsConfigDict(env_prefix=ENV_PREFIX, extra="forbid", frozen=True, env_ignore_empty=True)

    report_dir: Path = Field(Path("checked_backend_reports"), description="folder for reports and repros")
    dump: Path | None = Field(None, description="folder to dump graphs to; off if not set")
    dump_values: bool = Field(False, description="also write the real input values")


class AotOptions(BackendOptions):
    """Options of the backends that run AOT autograd themselves."""

    decompositions: Literal["none", "default", "core_aten", "inductor"] = Field(
        "none", description="decomposition table handed to AOT autograd"
    )
    partition: Literal["min_cut", "default"] = Field("min_cut", description="how forward and backward are split")


def _split_commas(value: Any) -> Any:
    if isinstance(value, str):
        parts = re.split(r",(?![^\[]*\])", value)  # a subject may have a comma: node[body of scan, in cond: mul]
        return tuple(part.strip() for part in parts if part.strip())
    return value


def _known_findings(entries: tuple[str, ...]) -> tuple[str, ...]:
    """Refuse a text that is no kind, finer kind or subject. It would hide nothing without anybody noticing."""
    for entry in entries:
        word = re.split(r"[\[.]", entry, maxsplit=1)[0]
        subjects = {kind.value for kind in SubjectKind if kind.value} | NAMELESS
        kinds = {kind.value for kind in Kind}
        if entry in kinds | DETAILS or (word in subjects and word not in kinds) or entry.startswith("gradient of "):
            continue
        if word in kinds:
            finer = [f"{word}.{one}" for one in FINER[Kind(word)]]
            near = did_you_mean(entry, finer)
            raise ValueError(f"{entry!r} is no finer kind.{near} There are: {', '.join(finer) or f'none of {word}'}")
        heads = {f"{one}[" if "[" in entry else one for one in subjects}
        near = did_you_mean(f"{word}[", heads) if "[" in entry else ""
        near = near.replace("['", f"{entry[len(word) :]}'")
        near = near or did_you_mean(entry, kinds | DETAILS | subjects)
        raise ValueError(
            f"{entry!r} is neither a kind of finding nor a subject.{near} Kinds: {', '.join(sorted(kinds))}; a finer "
            "kind such as 'structure.stride'; a subject such as 'output[0]', 'grad[layer.weight]'"
        )
    return entries


class InterpreterOptions(AotOptions):
    """Options of ``debug_interpreter``."""

    on_divergence: Literal["raise", "warn", "record"] = Field("raise", description="what a mismatch does")
    ignore: Annotated[tuple[str, ...], NoDecode] = Field((), description="findings not to report")
    layout: OnLayout = Field(
        "warn", description="what a mismatch does that is about strides or offsets on which nothing depends"
    )
    nonfinite: bool = Field(False, description="find the first node that makes a NaN or an infinity of finite inputs")
    checks: Annotated[tuple[MetadataCheck, ...], NoDecode] = Field(
        get_args(MetadataCheck), description="what is compared"
    )
    graphs: Annotated[tuple[Literal["forward", "backward", "inference"], ...], NoDecode] = Field(
        ("forward", "backward", "inference"), description="the kinds of graphs that are checked"
    )
    ignore_ops: Annotated[tuple[str, ...], NoDecode] = Field(
        (), description="operators whose findings are not reported: aten.relu, aten.relu.default, mylib::op"
    )

    _split = field_validator("ignore", "checks", "graphs", "ignore_ops", mode="before")(_split_commas)
    _known = field_validator("ignore")(_known_findings)

    @field_validator("graphs")
    @classmethod
    def _some_graph(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        if not value:
            raise ValueError("then no graph is checked; name at least one, of 'forward', 'backward', 'inference'")
        return value

    @field_validator("checks")
    @classmethod
    def _some_check(cls, value: tuple[str, ...], info: ValidationInfo) -> tuple[str, ...]:
        if not value and not info.data.get("nonfinite"):
            raise ValueError("then nothing is compared; name at least one, or set nonfinite=True")
        return value


class CheckOptions(BackendOptions):
    """Options of ``numcheck``."""

    compiler: str | Callable[..., Any] = Field(
        "inductor", description="the candidate: a Dynamo backend's name, or a callable (gm, example_inputs) -> callable"
    )
    compiler_options: dict[str, Any] = Field(default_factory=dict, description="handed to the candidate")
    on_divergence: OnDivergence = Field("raise", description="what a finding that fails does")
    layout: OnLayout = Field(
        "warn",
        description="what a finding about layout alone does: other strides, requires_grad or sign of zero, same values",
    )
    gradients: bool = Field(True, description="check the backward pass too")
    every: int = Field(1, ge=1, description="check every n-th call of each region")
    budget: float | None = Field(None, gt=0, le=1, description="share of the whole run's time that checking may take")
    reference: Literal["keep", "recompute"] = Field(
        "keep", description="keep eager's activations until backward, or recompute them there"
    )
    ignore: Annotated[tuple[str, ...], NoDecode] = Field(
        (), description="findings not to report: kinds, finer kinds (structure.stride), or subjects"
    )
    localize: bool = Field(True, description="after a failure find the operator, reduce, write a repro")
    progress: bool = Field(True, description="tell on stderr what long work is doing, such as looking for the operator")
    closing: bool = Field(True, description="tell at the end of a process or session how much agreed with eager")

    _split_ignore = field_validator("ignore", mode="before")(_split_commas)
    _known_ignore = field_validator("ignore")(_known_findings)

    @property
    def compiler_name(self) -> str:
        """The candidate's name: that of the backend, or of the function with its module."""
        named = self.compiler
        if isinstance(named, str):
            return named
        return f"{getattr(named, '__module__', '')}.{getattr(named, '__qualname__', type(named).__name__)}"

    @property
    def compiled_by(self) -> str:
        """The candidate in words: ``inductor``, ``inductor with {'max_autotune': True}``."""
        return f"{self.compiler_name} with {self.compiler_options}" if self.compiler_options else self.compiler_name

    def unsampled(self) -> CheckOptions:
        """These options with every call checked, for callers that make calls only to check them."""
        return self.model_copy(update={"every": 1, "budget": None})

    @field_validator("compiler")
    @classmethod
    def _not_itself(cls, value: str | Callable[..., Any]) -> str | Callable[..., Any]:
        if value == "numcheck":
            raise ValueError("numcheck cannot check itself; name the compiler to check, for example 'inductor'")
        return value


class RunOptions(CheckOptions):
    """Options of a program that is checked as a whole. Its child processes inherit them in the environment."""

    on_divergence: OnDivergence = Field("record", description="what a finding that fails does, beside the summary")
    run: Path | None = Field(None, description="folder of the run that a process belongs to; set by checked-backend")
    github: bool = Field(False, description="print annotations for GitHub")
    record: Path | None = Field(None, description="folder to record values in, instead of checking; set by record")
    noise: int = Field(0, ge=0, description="perturb every rounding, with this seed; set by record for its noise runs")
    shadow: bool = Field(False, description="also compare whole compiled calls with eager, at sampled calls")


def did_you_mean(word: str, valid: Iterable[str]) -> str:
    """`` Did you mean 'compiler'?``, or nothing if no valid word is near."""
    near = get_close_matches(word, sorted(valid), n=1)
    return f" Did you mean {near[0]!r}?" if near else ""


_OptionsT = TypeVar("_OptionsT", bound=BackendOptions)
_ALL: tuple[type[BackendOptions], ...] = (BackendOptions, AotOptions, InterpreterOptions, CheckOptions, RunOptions)


def environment_variable(option: str) -> str:
    """The variable that sets an option: ``CHECKED_BACKEND_EVERY``."""
    return ENV_PREFIX + option.upper()


def parse_options(cls: type[_OptionsT], backend: str, options: Mapping[str, Any] | None) -> _OptionsT:
    """Read the options of one backend.

    Args:
        options: What the user passed as ``torch.compile(options=...)``.

    Returns:
        Frozen options.

    Raises:
        OptionError: An unknown key, in ``options`` or in the environment, or a bad value. The message names the key,
            what it got, and what is valid.
    """
    given = dict(options or {})
    valid = sorted(cls.model_fields)
    for key in given:
        if key not in cls.model_fields:
            raise OptionError(
                f"backend {backend!r} has no option {key!r}.{did_you_mean(str(key), valid)} Valid options: "
                f"{', '.join(valid)}."
            )
    _without_conflict(cls, backend, given)
    known = {name.upper() for options_cls in _ALL for name in options_cls.model_fields}
    for variable in os.environ:
        if variable.startswith(ENV_PREFIX) and variable.removeprefix(ENV_PREFIX) not in known:
            names = sorted(ENV_PREFIX + name for name in known)
            raise OptionError(
                f"environment variable {variable} is not an option.{did_you_mean(variable, names)} Valid variables: "
                f"{', '.join(names)}."
            )
    try:
        return cls(**given)
    except ValidationError as error:
        raise OptionError(_explain(cls, backend, given, error)) from None


def _without_conflict(cls: type[BackendOptions], backend: str, given: dict[str, Any]) -> None:
    """Refuse ``budget`` together with ``every``. The one in the code comes before the other in the environment."""
    if "budget" not in cls.model_fields:
        return
    variables = {name: environment_variable(name) for name in ("budget", "every")}
    budget, every = given.get("budget") is not None, "every" in given
    named = [name for name, is_given in (("budget", budget), ("every", every)) if is_given]
    if not named:
        named = [variables[name] for name in variables if os.environ.get(variables[name])]
    elif named == ["every"]:
        given.setdefault("budget", None)
    elif named == ["budget"]:
        given["every"] = cls.model_fields["every"].default
    if len(named) == 2:
        raise OptionError(
            f"backend {backend!r}: options {named[0]!r} and {named[1]!r} exclude each other: 'every' checks every n-th "
            "call, 'budget' as many as a share of the time pays for. Give one of them."
        )


def _explain(cls: type[BackendOptions], backend: str, given: Mapping[str, Any], error: ValidationError) -> str:
    lines = []
    for key in dict.fromkeys(str(problem["loc"][0]) for problem in error.errors()):
        problems = [problem for problem in error.errors() if str(problem["loc"][0]) == key]
        got = given[key] if key in given else os.environ.get(ENV_PREFIX + key.upper())
        where = f"option {key!r}" if key in given else f"environment variable {ENV_PREFIX}{key.upper()}"
        reasons = "; ".join(dict.fromkeys(str(problem["msg"]).removeprefix("Value error, ") for problem in problems))
        meaning = cls.model_fields[key].description
        lines.append(f"backend {backend!r}: {where} got {got!r}: {reasons}. It is: {meaning}.")
    return "\n".join(lines)
