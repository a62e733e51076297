"""Rules about models, in YAML: which to skip, batch sizes, which are slow or noisy, each with a reason."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from importlib import resources
from pathlib import Path
from types import MappingProxyType

from checked_backend.findings import Kind
from checked_backend.sweep.case import DTYPES, MODES, Case, Settings
from checked_backend.sweep.lines import Lined, load_lined

__all__ = ["SUITES", "TAGS", "Rule", "Rules", "load_rules"]

SUITES = ("torchbench", "huggingface", "timm", "python", "dumps")
"""Kinds of suites."""

TAGS = ("slow", "non_deterministic", "control_flow")
"""Properties of a model that a rule can note and that do not change how the model is run."""

_VERSION = 1
_WHERE = {"mode": MODES, "dtype": DTYPES, "device": ("cpu", "cuda"), "compiler": None, "dynamic": None}
_MAX_FOLDED = 4


@dataclass(frozen=True, slots=True)
class Rule:
    """One rule of a file.

    Attributes:
        models: Patterns of model names, in which ``*`` stands for any text.
        suite: The kind of suite that the rule applies to; None for every.
        when: Values that a case must have, by field.
        change: Changes the settings of such a case.
    """

    models: tuple[Pattern, ...]
    suite: str | None
    when: Mapping[str, tuple[object, ...]]
    change: Callable[[Settings], Settings]

    def applies(self, case: Case) -> bool:
        """Whether the rule applies to a case."""
        return (
            self.suite in (None, case.suite.partition(":")[0])
            and all(getattr(case, name) in values for name, values in self.when.items())
            and any(pattern.fullmatch(case.model) for pattern in self.models)
        )


@dataclass(frozen=True, slots=True)
class Rules:
    """Rules in their order: a later one overrides an earlier one."""

    rules: tuple[Rule, ...] = ()

    def apply(self, case: Case, settings: Settings) -> Settings:
        """Apply the rules to the settings of a case.

        Args:
            settings: Its settings without rules.
        """
        for rule in self.rules:
            if rule.applies(case):
                settings = rule.change(settings)
        return settings


def load_rules(paths: Sequence[Path]) -> Rules:
    """Read the rules that come with this package, then those in the user's files.

    Raises:
        SuiteError: A file is malformed. The message names the file, the line, and what was expected.
    """
    with resources.as_file(resources.files("checked_backend.sweep") / "rules.yaml") as shipped:
        return Rules(tuple(rule for path in (shipped, *paths) for rule in _rules_of(load_lined(path))))


def _rules_of(document: Lined) -> list[Rule]:
    top = _mapping(document, "the file", ("version", "rules"))
    version = top.get("version")
    if version is None:
        raise document.error(f"'version' is missing; expected 'version: {_VERSION}'")
    if version.value != _VERSION or isinstance(version.value, bool):
        raise version.error(f"version got {version.shown}; expected {_VERSION}")
    rules = top.get("rules", Lined([], document.path, document.line))
    if not isinstance(rules.value, list):
        raise rules.error(f"rules got {rules.shown}; expected a list of rules")
    return [_rule(entry) for entry in rules.value]


def _rule(entry: Lined) -> Rule:
    parts = _mapping(entry, "a rule", ("models", "suite", "when", "reason", *_ACTIONS))
    if "models" not in parts:
        raise entry.error("a rule without 'models'; expected names, in which * stands for any text")
    reason = parts.get("reason")
    if reason is None:
        raise entry.error("a rule without 'reason'; expected a sentence that says why")
    actions = [name for name in parts if name in _ACTIONS]
    if not actions:
        raise entry.error(f"a rule that does nothing; expected one of {', '.join(_ACTIONS)}")
    why = _text(reason, "reason")
    changes = [_ACTIONS[name](parts[name], name, why) for name in actions]

    def change(settings: Settings) -> Settings:
        for one in changes:
            settings = one(settings)
        return settings

    names = _texts(parts["models"], "models")
    suite = _suite(parts["suite"]) if "suite" in parts else None
    return Rule(tuple(Pattern(name) for name in names), suite, _when(parts.get("when")), change)


def _suite(entry: Lined) -> str:
    kind = _text(entry, "suite")
    if kind not in SUITES:
        raise entry.error(f"suite got {kind!r}; expected {', '.join(SUITES)}")
    return kind


class Pattern:
    """A pattern in which only ``*`` is special. ``fnmatch`` does not fit, because names have brackets.

    Nor does a regular expression: it takes time that grows exponentially with the number of stars.

    Args:
        name: The pattern.
    """

    def __init__(self, name: str) -> None:
        self._first, *self._others = name.split("*")

    def fullmatch(self, text: str) -> bool:
        """Whether it matches all of a text."""
        if not self._others:
            return text == self._first
        *middle, last = self._others
        if len(text) < len(self._first) + len(last) or not (text.startswith(self._first) and text.endswith(last)):
            return False
        place, end = len(self._first), len(text) - len(last)
        for part in middle:
            found = text.find(part, place, end)
            if found < 0:
                return False
            place = found + len(part)
        return True


def _when(entry: Lined | None) -> Mapping[str, tuple[object, ...]]:
    if entry is None:
        return MappingProxyType({})
    found: dict[str, tuple[object, ...]] = {}
    for name, value in _mapping(entry, "when", tuple(_WHERE)).items():
        valid = _WHERE[name]
        if name == "dynamic":
            if not isinstance(value.value, bool):
                raise value.error(f"dynamic got {value.shown}; expected true or false")
            found[name] = (value.value,)
            continue
        words = tuple(_texts(value, name))
        for word in words:
            if valid is not None and word not in valid:
                raise value.error(f"{name} got {word!r}; expected {', '.join(valid)}")
        found[name] = words
    return MappingProxyType(found)


SettingsChange = Callable[[Settings], Settings]


def _skip(value: Lined, name: str, reason: str) -> SettingsChange:
    if not isinstance(value.value, bool):
        raise value.error(f"{name} got {value.shown}; expected true, or false to run what an earlier rule skips")
    return partial(replace, skip=reason if value.value else None)


def _positive(value: Lined, name: str, _reason: str) -> SettingsChange:
    number = value.value
    if isinstance(number, bool) or not isinstance(number, int) or number < 1:
        raise value.error(f"{name} got {value.shown}; expected a whole number from 1 on")
    return partial(replace, **{name: number})


_MOST_SECONDS = 1e9


def _seconds(value: Lined, name: str, _reason: str) -> SettingsChange:
    number = value.value
    if isinstance(number, bool) or not isinstance(number, int | float) or not 0 < number < _MOST_SECONDS:
        raise value.error(f"{name} got {value.shown}; expected seconds")
    return partial(replace, **{name: float(number)})


def _dtype(value: Lined, name: str, _reason: str) -> SettingsChange:
    word = _text(value, name)
    if word not in DTYPES:
        raise value.error(f"{name} got {word!r}; expected {', '.join(DTYPES)}")
    return partial(replace, run_as=word)


def _tag(value: Lined, name: str, reason: str) -> SettingsChange:
    if not isinstance(value.value, bool):
        raise value.error(f"{name} got {value.shown}; expected true or false")

    def change(settings: Settings) -> Settings:
        others = {tag: why for tag, why in settings.tags.items() if tag != name}
        return replace(settings, tags={**others, name: reason} if value.value else others)

    return change


def _ignore(value: Lined, name: str, reason: str) -> SettingsChange:
    subjects = dict.fromkeys(_texts(value, name), reason)
    return lambda settings: replace(settings, ignore_outputs={**settings.ignore_outputs, **subjects})


def _known(value: Lined, name: str, reason: str) -> SettingsChange:
    valid = [kind.value for kind in Kind if kind.fails]
    kinds = _texts(value, name)
    for kind in kinds:
        if kind not in valid:
            raise value.error(f"{name} got {kind!r}; expected kinds of findings: {', '.join(valid)}")
    return lambda settings: replace(settings, known_fails={**settings.known_fails, **dict.fromkeys(kinds, reason)})


def _noise(value: Lined, name: str, reason: str) -> SettingsChange:
    parts: Mapping[str, Lined] = {"*": value}
    if isinstance(value.value, dict):
        parts = value.value
    limits = {}
    for subject, limit in parts.items():
        number = limit.value
        if isinstance(number, bool) or not isinstance(number, int | float) or not 0 < number < 1:
            raise limit.error(
                f"{name} got {limit.shown}; expected a relative error between 0 and 1, or a mapping of subjects to such"
            )
        limits[subject] = (float(number), reason)
    return lambda settings: replace(settings, noise={**settings.noise, **limits})


_ACTIONS: Mapping[str, Callable[[Lined, str, str], SettingsChange]] = MappingProxyType(
    {
        "skip": _skip,
        "batch_size": _positive,
        "timeout": _seconds,
        "run_as": _dtype,
        "ignore_outputs": _ignore,
        "known_fails": _known,
        "noise": _noise,
        **dict.fromkeys(TAGS, _tag),
    }
)


def _mapping(entry: Lined, what: str, valid: Iterable[str]) -> Mapping[str, Lined]:
    valid = tuple(valid)
    if not isinstance(entry.value, dict):
        raise entry.error(f"{what} got {entry.shown}; expected a mapping with {', '.join(valid)}")
    found: Mapping[str, Lined] = entry.value
    for name, value in found.items():
        if name not in valid:
            raise value.error(f"{what} has no {name!r}; expected {', '.join(valid)}")
    return found


def _text(entry: Lined, what: str) -> str:
    if not isinstance(entry.value, str) or not entry.value.strip():
        raise entry.error(f"{what} got {entry.shown}; expected text")
    return entry.value


def _texts(entry: Lined, what: str) -> list[str]:
    """One text or several. Nested lists, which YAML aliases make, are flattened."""
    return list(_folded(entry, what, 0))


def _folded(entry: Lined, what: str, depth: int) -> Iterable[str]:
    if not isinstance(entry.value, list):
        yield _text(entry, what)
        return
    if depth == _MAX_FOLDED:
        raise entry.error(f"{what}: lists within lists within lists")
    for part in entry.value:
        yield from _folded(part, what, depth + 1)
