"""YAML with the line number of every value, for messages. Only plain data is read."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from checked_backend.errors import SuiteError

__all__ = ["Lined", "load_lined"]

_MAX_BYTES = 4 * 2**20
_MAX_VALUES = 200_000
_MAX_DEPTH = 12
_COLLECTIONS = ("tag:yaml.org,2002:map", "tag:yaml.org,2002:seq")
_NO_TAG = "got the tag {}; expected plain text, numbers, true, false, lists and mappings"


@dataclass(frozen=True, slots=True)
class Lined:
    """A value of a YAML file, with its place.

    Attributes:
        value: A mapping from text to `Lined`, a list of `Lined`, or a plain value.
        path: The file.
        line: The line number, from 1.
    """

    value: Any
    path: Path
    line: int

    def error(self, message: str) -> SuiteError:
        """An exception that names the file and the line."""
        return SuiteError(f"{self.path}:{self.line}: {message}")

    @property
    def kind(self) -> str:
        """The kind of value, in the words of YAML."""
        if self.value is None:
            return "nothing"
        names = {dict: "a mapping", list: "a list", str: "text", bool: "true or false", int: "a number"}
        return names.get(type(self.value), "a number" if isinstance(self.value, float) else type(self.value).__name__)

    @property
    def shown(self) -> str:
        """The value or, if it is no plain value, its kind, for a message."""
        return self.kind if isinstance(self.value, (dict, list)) or self.value is None else repr(self.value)[:80]


def load_lined(path: Path) -> Lined:
    """Read a YAML file. Aliases may not expand it beyond what a file of its size could hold.

    Raises:
        SuiteError: The file cannot be read, is no YAML, or is too large or too deeply nested.
    """
    try:
        data = path.read_bytes() if path.stat().st_size <= _MAX_BYTES else None
    except OSError as error:
        raise SuiteError(f"{path}: cannot be read: {error.strerror or error}") from error
    if data is None:
        raise SuiteError(f"{path}: larger than {_MAX_BYTES // 2**20} MiB, which no file of rules is")
    try:
        node = yaml.compose(data.decode("utf-8"), Loader=yaml.SafeLoader)
    except UnicodeDecodeError as error:
        raise SuiteError(f"{path}: not UTF-8 text: {error}") from None
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        place = f"{path}:{mark.line + 1}" if mark is not None else str(path)
        problem = getattr(error, "problem", None) or str(error)
        raise SuiteError(f"{place}: not YAML: {problem}") from None
    except RecursionError:
        raise SuiteError(f"{path}: nested too deeply") from None
    if node is None:
        return Lined(None, path, 1)
    return _Reader(path).read(node, 0)


class _Reader:
    def __init__(self, path: Path) -> None:
        self._path = path
        self._values = 0
        self._scalars = yaml.SafeLoader("")

    def read(self, node: yaml.Node, depth: int) -> Lined:
        here = Lined(None, self._path, node.start_mark.line + 1)
        self._values += 1
        if self._values > _MAX_VALUES:
            raise here.error(f"more than {_MAX_VALUES} values, counting what aliases repeat")
        if depth > _MAX_DEPTH:
            raise here.error("nested too deeply; does an alias stand within what it names?")
        if not isinstance(node, yaml.ScalarNode) and node.tag not in _COLLECTIONS:
            raise here.error(_NO_TAG.format(node.tag))
        if isinstance(node, yaml.MappingNode):
            value: Any = self._mapping(node, depth)
        elif isinstance(node, yaml.SequenceNode):
            value = [self.read(entry, depth + 1) for entry in node.value]
        else:
            value = self._scalar(node, here)
        return Lined(value, self._path, here.line)

    def _mapping(self, node: yaml.MappingNode, depth: int) -> dict[str, Lined]:
        found: dict[str, Lined] = {}
        for key_node, value_node in node.value:
            key = self.read(key_node, depth + 1)
            if not isinstance(key.value, str):
                raise key.error(f"a key got {key.shown}; expected text")
            if key.value in found:
                raise key.error(f"{key.value!r} stands twice in the same mapping")
            found[key.value] = self.read(value_node, depth + 1)
        return found

    def _scalar(self, node: yaml.Node, here: Lined) -> Any:
        tag = node.tag.rpartition(":")[2]
        if node.tag.startswith("tag:yaml.org,2002:") and tag in ("str", "int", "float", "bool", "null"):
            try:
                return self._scalars.construct_object(node)
            except (ValueError, yaml.YAMLError) as error:
                raise here.error(f"{node.value!r:.80} is no {tag}: {error}") from None
        if node.tag == "tag:yaml.org,2002:timestamp":
            return node.value  # dates stay text
        raise here.error(_NO_TAG.format(node.tag))
