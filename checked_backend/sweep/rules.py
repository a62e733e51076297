"""How to run and check a case, and rules about models, in YAML: which to skip, batch sizes, each with a reason."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from fnmatch import fnmatchcase
from importlib import resources
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

import yaml
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, field_validator, model_validator

from checked_backend.errors import SuiteError
from checked_backend.findings import Kind
from checked_backend.runs.case import Case

Mode = Literal["inference", "training"]
Dtype = Literal["float32", "bfloat16", "float16", "amp"]
MODES: tuple[str, ...] = get_args(Mode)
DTYPES: tuple[str, ...] = get_args(Dtype)


@dataclass(frozen=True, slots=True)
class Settings:
    """How to run and check a case, from the rules and the command line.

    Attributes:
        run_as: The dtype to run the model in, instead of the case's own.
        timeout: Seconds after which the case counts as hung.
        skip: The reason why the case is not run; empty if it is run.
        tags: Known properties of the model, each with its reason: ``slow``, ``non_deterministic``, ``control_flow``.
        ignore_outputs: Subjects whose findings do not fail the case, each with its reason.
        known_fails: Kinds of findings that are known of the model, each with its reason.
        noise: The greatest relative error that counts as noise, by subject, each with its reason.
        optimizer: An optimizer of ``torch.optim`` for training, as ``NAME:KEY=VALUE,...``; None for none.
    """

    run_as: str | None = None
    batch_size: int | None = None
    timeout: float = 1800.0
    skip: str | None = None
    tags: Mapping[str, str] = field(default_factory=dict)
    ignore_outputs: Mapping[str, str] = field(default_factory=dict)
    known_fails: Mapping[str, str] = field(default_factory=dict)
    noise: Mapping[str, tuple[float, str]] = field(default_factory=dict)
    compiler_options: Mapping[str, Any] = field(default_factory=dict)
    optimizer: str | None = None
    localize: bool = False

    def digest(self, source: str) -> str:
        """A short text that changes when the settings or the suite's source change.

        Time limits and tags are left out, because a result stays valid when they change.
        """
        parts = asdict(self)
        for name in ("timeout", "tags", "skip", "localize"):
            del parts[name]
        text = json.dumps([parts, source], sort_keys=True, default=str)
        return hashlib.sha256(text.encode()).hexdigest()[:16]


_Suite = Literal["torchbench", "huggingface", "timm", "python", "dumps"]
TAGS = ("slow", "non_deterministic", "control_flow")
"""Properties of a model that a rule can note and that do not change how the model is run."""

_MAX_BYTES = 4 * 2**20
_MAX_NAMES = 100_000
_MAX_FOLDED = 4
_STRING = "tag:yaml.org,2002:str"
_PLAIN = {f"tag:yaml.org,2002:{name}" for name in ("map", "seq", "str", "int", "float", "bool", "null", "timestamp")}


def matches(pattern: str, text: str) -> bool:
    """Whether a pattern matches all of a text. Only ``*`` is special: names have brackets and question marks."""
    return fnmatchcase(text, pattern.replace("[", "[[]").replace("?", "[?]"))


def _listed(value: object) -> list[object]:
    """One value or several, without the lists within lists that YAML aliases make."""
    return list(_unfolded(value, 0, [0]))


def _unfolded(value: object, depth: int, count: list[int]) -> Iterator[object]:
    count[0] += 1
    if depth > _MAX_FOLDED or count[0] > _MAX_NAMES:
        raise ValueError("lists within lists within lists")
    if not isinstance(value, list):
        yield value
        return
    for part in value:
        yield from _unfolded(part, depth + 1, count)


_Text = Annotated[str, Field(min_length=1, pattern=r"\S")]
_Texts = Annotated[list[_Text], BeforeValidator(_listed)]
_Noise = Annotated[float, Field(gt=0, lt=1)]


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


class _When(_Strict):
    mode: Annotated[list[Mode], BeforeValidator(_listed)] = []
    dtype: Annotated[list[Dtype], BeforeValidator(_listed)] = []
    device: Annotated[list[Literal["cpu", "cuda"]], BeforeValidator(_listed)] = []
    compiler: _Texts = []
    dynamic: bool = False


class Rule(_Strict):
    """One rule of a file, as the comment at the top of ``rules.yaml`` has it."""

    models: _Texts
    suite: _Suite = "python"
    when: _When = _When()
    reason: _Text
    skip: bool = False
    batch_size: Annotated[int, Field(gt=0)] = 1
    timeout: Annotated[float, Field(gt=0, lt=1e9)] = 1
    run_as: Dtype = "float32"
    ignore_outputs: _Texts = []
    known_fails: _Texts = []
    noise: Annotated[dict[str, _Noise], BeforeValidator(lambda v: v if isinstance(v, dict) else {"*": v})] = {}
    slow: bool = False
    non_deterministic: bool = False
    control_flow: bool = False

    @field_validator("known_fails")
    @classmethod
    def _are_kinds(cls, kinds: list[str]) -> list[str]:
        valid = [kind.value for kind in Kind if kind.fails]
        if not set(kinds) <= set(valid):
            raise ValueError(f"expected kinds of findings: {', '.join(valid)}")
        return kinds

    @model_validator(mode="after")
    def _does_something(self) -> Rule:
        actions = [name for name in Rule.model_fields if name not in ("models", "suite", "when", "reason")]
        if not self.model_fields_set & set(actions):
            raise ValueError(f"a rule that does nothing; expected one of {', '.join(actions)}")
        return self

    def applies(self, case: Case) -> bool:
        """Whether the rule applies to a case."""
        when = self.when.model_dump(include=self.when.model_fields_set)
        return (
            ("suite" not in self.model_fields_set or self.suite == case.suite.partition(":")[0])
            and all(getattr(case, name) in (v if isinstance(v, list) else [v]) for name, v in when.items())
            and any(matches(name, case.model) for name in self.models)
        )

    def apply(self, settings: Settings) -> Settings:
        """The settings of a case that it applies to."""
        changes = self.model_dump(include=self.model_fields_set & {"batch_size", "timeout", "run_as"})
        if "skip" in self.model_fields_set:
            changes["skip"] = self.reason if self.skip else None
        tags = {tag: why for tag, why in settings.tags.items() if tag not in self.model_fields_set}
        return replace(
            settings,
            **changes,
            tags={**tags, **{tag: self.reason for tag in TAGS if getattr(self, tag)}},
            ignore_outputs={**settings.ignore_outputs, **dict.fromkeys(self.ignore_outputs, self.reason)},
            known_fails={**settings.known_fails, **dict.fromkeys(self.known_fails, self.reason)},
            noise={**settings.noise, **{subject: (limit, self.reason) for subject, limit in self.noise.items()}},
        )


class _File(_Strict):
    version: Literal[1]
    rules: list[Rule] = []


@dataclass(frozen=True, slots=True)
class Rules:
    """Rules in their order: a later one overrides an earlier one."""

    rules: tuple[Rule, ...] = ()

    def apply(self, case: Case, settings: Settings) -> Settings:
        """Apply the rules to the settings that a case has without rules."""
        for rule in self.rules:
            if rule.applies(case):
                settings = rule.apply(settings)
        return settings


def load_rules(paths: Sequence[Path]) -> Rules:
    """Read the rules that come with this package, then those in the user's files.

    Raises:
        SuiteError: A file is malformed. The message names the file, the line, and what was expected.
    """
    with resources.as_file(resources.files("checked_backend.sweep") / "rules.yaml") as shipped:
        return Rules(tuple(rule for path in (shipped, *paths) for rule in _rules_of(path)))


def _rules_of(path: Path) -> list[Rule]:
    try:
        if path.stat().st_size > _MAX_BYTES:
            raise SuiteError(f"{path}: larger than {_MAX_BYTES // 2**20} MiB, which no file of rules is")
        root = yaml.compose(path.read_text(encoding="utf-8"), Loader=yaml.SafeLoader)
        if root is None:
            raise SuiteError(f"{path}:1: there is nothing in it; expected version and rules")
        _refuse_code(root, path)
        return _File.model_validate(yaml.SafeLoader("").construct_document(root)).rules
    except OSError as error:
        raise SuiteError(f"{path}: cannot be read: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise SuiteError(f"{path}: not UTF-8 text: {error}") from None
    except yaml.MarkedYAMLError as error:
        line = error.problem_mark.line + 1 if error.problem_mark is not None else 1
        raise SuiteError(f"{path}:{line}: not YAML: {error.problem or error}") from None
    except ValidationError as error:
        raise SuiteError(f"{path}:{_told(error.errors(include_url=False)[0], root)}") from None
    except RecursionError:
        raise SuiteError(f"{path}: nested too deeply; does an alias stand within what it names?") from None
    except (ValueError, yaml.YAMLError) as error:
        raise SuiteError(f"{path}: not YAML: {error}") from None


def _refuse_code(root: yaml.Node, path: Path) -> None:
    """Raise for what is not plain data, and for keys that stand twice. Dates become text."""
    waiting, seen = [root], set()
    while waiting:
        node = waiting.pop()
        if id(node) in seen:
            continue
        seen.add(id(node))
        where = f"{path}:{node.start_mark.line + 1}"
        if node.tag not in _PLAIN:
            raise SuiteError(f"{where}: got the tag {node.tag}; expected plain data")
        if isinstance(node, yaml.MappingNode):
            names: set[str] = set()
            for key, value in node.value:
                if key.tag != _STRING or key.value in names:
                    what = "a key that is no text" if key.tag != _STRING else f"{key.value!r} stands twice"
                    raise SuiteError(f"{path}:{key.start_mark.line + 1}: {what}")
                names.add(key.value)
                waiting.append(value)
        elif isinstance(node, yaml.SequenceNode):
            waiting.extend(node.value)
        elif node.tag == "tag:yaml.org,2002:timestamp":
            node.tag = _STRING


def _told(error: Any, root: yaml.Node) -> str:
    """The line of an error, and what is wrong."""
    node, name = root, "the file"
    for part in error["loc"]:
        if isinstance(node, yaml.MappingNode):
            values = {key.value: value for key, value in node.value}
            name = str(part) if isinstance(part, str) else name
            node = values.get(part, node)
        elif isinstance(node, yaml.SequenceNode) and isinstance(part, int) and part < len(node.value):
            node, name = node.value[part], "a rule" if name == "rules" else name
    value = error["input"]
    if error["type"] == "missing":
        what = f"{name!r} is missing"
    elif error["type"] == "extra_forbidden":
        kinds: dict[int, type[BaseModel]] = {1: _File, 3: Rule, 4: _When}
        what = f"there is no {name!r}; expected {', '.join(kinds[len(error['loc'])].model_fields)}"
    else:
        shown = "" if isinstance(value, (dict, list, Rule)) else f" got {value!r:.80}"
        what = f"{name}{shown}: {error['msg'].removeprefix('Value error, ')}"
    return f"{node.start_mark.line + 1}: {what}"
