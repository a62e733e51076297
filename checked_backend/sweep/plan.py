"""The cases of a sweep: all models in all ways, without those filtered out, each with its settings."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from itertools import product
from pathlib import Path
from typing import Any

from checked_backend.errors import SuiteError
from checked_backend.process.job import Job, JobResources, Warm, run
from checked_backend.runs.case import Case
from checked_backend.sweep.rules import DTYPES, MODES, TAGS, Rules, Settings, matches

FIXED = "as dumped"
"""The mode and the dtype of a case in which both are fixed."""

LISTING_SECONDS = 600.0
"""Seconds after which listing a suite's models is given up."""

_MOST_NEAR = 8
_LISTING = "checked_backend.sweep.suites:list_models"
_PLAIN = ("huggingface", "timm")
_WITH_PLACE = {"python": "FILE.py", "dumps": "DIR", "torchbench": "DIR"}


@dataclass(frozen=True, slots=True)
class Sweep:
    """A sweep as the user asked for it.

    Attributes:
        ways: Pairs of mode and dtype.
        settings: Those of a case for which no rule says otherwise.
        only: Patterns of models to run; none means all.
        skip_tags: Tags of rules whose models are skipped: ``slow``.
        canary: Whether to run models that the suite itself lists as unreliable.
        shard: The shard's number, from 1, and the number of shards.
        engine: ``local`` or ``ray``, with the address of its cluster.
        fresh: Whether each case gets a fresh Python, and is never forked from one that has imported torch.
    """

    suites: Sequence[str]
    out: Path
    ways: Sequence[tuple[str, str]] = (("inference", "float32"),)
    devices: Sequence[str] = ("cpu",)
    compilers: Sequence[str] = ("inductor",)
    dynamic: bool = False
    settings: Settings = field(default_factory=Settings)
    rules: Rules = field(default_factory=Rules)
    only: Sequence[str] = ()
    exclude: Sequence[str] = ()
    skip_tags: Sequence[str] = ()
    canary: bool = False
    shard: tuple[int, int] = (1, 1)
    jobs: int = 1
    resources: JobResources = field(default_factory=JobResources)
    engine: str = "local"
    address: str | None = None
    rerun: Sequence[str] = ()
    repeats: int = 1
    fresh: bool = False

    def has(self, model: str) -> bool:
        """Whether the patterns select a model."""
        wanted = not self.only or any(matches(name, model) for name in self.only)
        return wanted and not any(matches(name, model) for name in self.exclude)

    def split(self, jobs: Sequence[SweepJob]) -> tuple[Sequence[SweepJob], list[SweepJob]]:
        """The jobs of this shard, and those of others."""
        which, many = self.shard
        return jobs[which - 1 :: many], [job for place, job in enumerate(jobs) if place % many != which - 1]

    def refuse_unknown(self, models: Sequence[str]) -> None:
        """Raise if a pattern of ``only`` selects no model of any suite: it is misspelt."""
        for name in self.only:
            if not any(matches(name, model) for model in models):
                raise SuiteError(f"--only got {name!r}, which no model matches. {_near(name, models)}")


def _near(pattern: str, models: Sequence[str]) -> str:
    """The models that a misspelt pattern may mean: those that have its text, or one like it; else the first of all."""
    lower = {model.lower(): model for model in models}
    text = pattern.strip("*").lower()
    near = [model for low, model in lower.items() if text in low] or [
        lower[low] for low in get_close_matches(text, lower, n=_MOST_NEAR)
    ]
    shown = ", ".join((near or list(models))[:_MOST_NEAR])
    return f"Near it: {shown}. * stands for any text." if near else f"There are {shown}, ..."


@dataclass(frozen=True, slots=True)
class Listed:
    """A suite and its models.

    Attributes:
        spec: The suite, in the form that a worker takes.
        fingerprint: A text that changes when the models do.
        devices: The number of CUDA devices that a process sees here.
    """

    spec: str
    label: str
    models: Sequence[Mapping[str, Any]]
    fingerprint: str
    versions: Mapping[str, str]
    devices: int


@dataclass(frozen=True, slots=True)
class SweepJob:
    """A case to run.

    Attributes:
        spec: Its suite as the process of the case finds it: ``python:/home/me/models.py``.
        state: A text that changes when its settings, its suite's source or its compiler's file do.
    """

    spec: str
    case: Case
    settings: Settings
    state: str = ""


def spec_of(text: str) -> tuple[str, str]:
    """A suite's spec with an absolute path, which works from any folder, and its label; or a SuiteError."""
    kind, colon, where = text.partition(":")
    if kind in _PLAIN and not colon:
        return kind, kind
    if kind not in _WITH_PLACE or not where:
        ways = [*_PLAIN, *(f"{name}:{place}" for name, place in _WITH_PLACE.items())]
        raise SuiteError(f"suite got {text!r}; expected {', '.join(ways[:-1])} or {ways[-1]}")
    path = Path(where).expanduser().resolve()
    if kind == "python" and not (path.is_file() and path.suffix == ".py"):
        raise SuiteError(f"suite {text}: {path} is no Python file")
    if kind != "python" and not path.is_dir():
        raise SuiteError(f"suite {text}: {path} is no folder")
    return f"{kind}:{path}", kind if kind == "torchbench" else f"{kind}:{path.name}"


def resolved_compiler(text: str) -> str:
    """A compiler as it is found from any folder: ``FILE.py:NAME`` with the whole path; a backend's name as it is."""
    path, _, name = text.rpartition(":")
    return f"{Path(path).resolve()}:{name}" if path.endswith(".py") else text


def fingerprint_of(compiler: str) -> str:
    """A text that changes when the file of ``FILE.py:NAME`` does; empty for the name of a backend."""
    path, _, _ = compiler.rpartition(":")
    if not path.endswith(".py") or not Path(path).is_file():
        return ""
    return hashlib.sha256(Path(path).read_bytes()).hexdigest()[:16]


def list_suite(text: str, compilers: Sequence[str], resources: JobResources, warm: Warm | None = None) -> Listed:
    """List a suite's models, in a separate process, because listing may run the code of the suite's authors.

    Raises:
        SuiteError: There is no such suite, it has no models, its library is missing, or its process died.
    """
    spec, label = spec_of(text)
    job = Job(_LISTING, {"spec": spec, "compilers": list(compilers)}, LISTING_SECONDS)
    end = run(job, replace(resources, threads=1), warm)
    if not end.answer:
        last = (end.log.strip().splitlines() or [""])[-1]
        raise SuiteError(f"suite {text}: its models cannot be listed: the process {end.words}: {last}")
    raw = json.loads(end.answer)
    if "error" in raw:
        raise SuiteError(str(raw["error"]))
    names = [str(model["name"]) for model in raw["models"]]
    for name in names:
        if not name.isprintable() or names.count(name) > 1:
            raise SuiteError(f"suite {text}: a model is called {name!r}; expected a printable name that no other has")
    return Listed(spec, label, raw["models"], raw["fingerprint"], raw["versions"], raw["devices"])


def parse_modes(words: Sequence[str], dtypes: Sequence[str]) -> list[tuple[str, str]]:
    """Pairs of mode and dtype of words such as ``inference`` and ``training:amp,float32``; others are refused."""
    pairs = []
    for word in words:
        mode, _, own = word.partition(":")
        if mode not in MODES:
            raise SuiteError(f"--mode got {word!r}; expected {' or '.join(MODES)}, for example training:float32,amp")
        for dtype in own.split(",") if own else dtypes:
            if dtype not in DTYPES:
                raise SuiteError(f"dtype got {dtype!r}; expected {', '.join(DTYPES)}")
            pairs.append((mode, dtype))
    return list(dict.fromkeys(pairs))


def planned(listed: Listed, asked: Sweep) -> list[SweepJob]:
    """The cases of a suite, of all shards, in order, each with its settings; a SuiteError if there is none."""
    made_by = {compiler: fingerprint_of(compiler) for compiler in asked.compilers}
    jobs = []
    for model in filter(lambda model: asked.has(model["name"]), listed.models):
        ways = [(FIXED, FIXED)] if model["fixed"] else asked.ways
        dynamic = asked.dynamic and not model["fixed"]
        for (mode, dtype), device, compiler in product(ways, asked.devices, asked.compilers):
            case = Case(listed.label, model["name"], mode, dtype, device, compiler, dynamic)
            settings = _settings(case, model, asked)
            compiled = made_by[compiler] and f", compiled by {made_by[compiler]}"
            jobs.append(SweepJob(listed.spec, case, settings, settings.digest(listed.fingerprint + compiled)))
    if not jobs:
        names = ", ".join(str(model["name"]) for model in listed.models[:8])
        raise SuiteError(
            f"suite {listed.label}: none of its {len(listed.models)} models is wanted; it has {names}, ..."
        )
    return jobs


def _settings(case: Case, model: Mapping[str, Any], asked: Sweep) -> Settings:
    settings = asked.rules.apply(case, asked.settings)
    if settings.skip is None:
        for tag in TAGS:
            if tag in asked.skip_tags and tag in settings.tags:
                settings = replace(settings, skip=f"{tag.replace('_', ' ')}: {settings.tags[tag]}")
    if settings.skip is None and model["canary"] and not asked.canary:
        settings = replace(settings, skip="a canary model; --canary runs it")
    return settings
