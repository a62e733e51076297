"""The models of a dump's JSON files. A file that does not fit its model is refused before it is used."""

from __future__ import annotations

import base64
import math
import re
import struct
from collections.abc import Callable
from functools import partial
from typing import Annotated, Any, Literal

import torch
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, StringConstraints, model_validator, with_config
from typing_extensions import TypedDict

FORMAT = "checked_backend dump"
VERSION = 3

GraphKind = Literal["dynamo", "joint", "forward", "backward", "inference"]


DEVICE = r"^[a-z]{1,20}(:[0-9]{1,4})?$"

_BREAK = re.compile("[\x00-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")
"""Characters that a line must not have: breaks, terminal escapes, turns of the reading direction, half characters."""


def named_constant(name: str, kind: type) -> Any:
    """The dtype, layout or memory format of torch of this name; None if there is none."""
    found = vars(torch).get(name)
    return found if isinstance(found, kind) else None


def _must(holds: Callable[[str], bool], why: str) -> AfterValidator:
    """Refuses a text for which something does not hold."""

    def checked(text: str) -> str:
        if not holds(text):
            raise ValueError(why.format(text))
        return text

    return AfterValidator(checked)


def is_path(name: str) -> bool:
    """Whether a dump may hold a subgraph or a constant of this name."""
    return all(part.isascii() and part.isidentifier() and not part.startswith("__") for part in name.split("."))


def _random_state(text: str) -> str:
    """Check that the place in a random state is within the generator's table, because torch does not check it."""
    try:
        state = base64.b64decode(text, validate=True)
    except ValueError as error:
        raise ValueError(f"no random state: {error}") from None
    if len(state) == _TWISTER.size:
        left, seeded, place = _TWISTER.unpack(state)
        if seeded != 1 or not 1 <= left <= _TABLE + 1 - place:
            raise ValueError("no random state: its place lies outside of its table")
    return text


_TABLE = 624
_TWISTER = struct.Struct(f"<8xiiQ{8 * _TABLE + 8 * 4 + 8}x")
"""The state of a CPU's generator: numbers left in the table, whether it is seeded, and the place in the table."""

Size = Annotated[int, Field(ge=0, lt=2**48)]
Sizes = Annotated[list[Size], Field(max_length=1000)]
Name = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9._-]+$")]
Dtype = Annotated[
    str, _must(lambda name: named_constant(name, torch.dtype) is not None, "this torch has no dtype {!r}")
]
Identifier = Annotated[
    str,
    StringConstraints(max_length=1000),
    _must(lambda name: name.isascii() and name.isidentifier(), "not an identifier"),
]
Path = Annotated[str, StringConstraints(max_length=2000), _must(is_path, "not a path of identifiers")]
Device = Annotated[str, StringConstraints(pattern=DEVICE)]
Line = Annotated[str, StringConstraints(max_length=100_000), AfterValidator(partial(_BREAK.sub, "?"))]
RandomState = Annotated[
    str, StringConstraints(pattern=r"^[A-Za-z0-9+/]*={0,2}$", max_length=100_000), AfterValidator(_random_state)
]
Hash = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{64}$")]


class _Model(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class Symbolic(_Model):
    """Sizes and strides with their expressions as text."""

    shape: list[int | Line]
    stride: list[int | Line] | None


class SymbolicPlace(Symbolic):
    """Sizes, strides and the storage offset, with their expressions as text."""

    storage_offset: int | Line


class Tensor(_Model):
    """The layout of a tensor in memory."""

    dtype: Dtype
    shape: Sizes
    stride: Sizes
    storage_offset: Size
    device: Device
    requires_grad: bool
    leaf: bool
    parameter: bool
    conj: bool
    neg: bool
    storage: Size
    symbolic: SymbolicPlace | None
    range: Annotated[list[int | float], Field(min_length=2, max_length=2)] | None
    alias_group: int | None = None

    @model_validator(mode="after")
    def _fits(self) -> Tensor:
        if len(self.shape) > 64:
            raise ValueError("a tensor has at most 64 dimensions")
        if math.prod(self.shape) >= 2**62:
            raise ValueError("the elements of the tensor cannot be counted in 64 bits")
        if len(self.shape) != len(self.stride):
            raise ValueError("shape and stride have different lengths")
        if self.symbolic is not None and len(self.symbolic.shape) != len(self.shape):
            raise ValueError("the symbolic shape has another length")
        dtype: torch.dtype = getattr(torch, self.dtype)
        if self.requires_grad and not (dtype.is_floating_point or dtype.is_complex):
            raise ValueError(f"a tensor of dtype {self.dtype} cannot require grad")
        if self.conj and not dtype.is_complex:
            raise ValueError(f"a tensor of dtype {self.dtype} has no conjugate bit")
        if self.range is not None and not self.range[0] <= self.range[1]:
            raise ValueError("the range is empty")
        return self

    def end(self) -> int:
        """The first byte of the storage after this tensor."""
        if 0 in self.shape:
            return 0
        span = 1 + sum((size - 1) * step for size, step in zip(self.shape, self.stride, strict=True))
        dtype: torch.dtype = getattr(torch, self.dtype)
        return (self.storage_offset + span) * dtype.itemsize


class Storage(_Model):
    """The bytes of a storage that are used."""

    device: Device
    start: Size
    end: Size
    checksum: int | None

    @model_validator(mode="after")
    def _ordered(self) -> Storage:
        if self.start > self.end:
            raise ValueError("start is after end")
        return self


class TensorFacts(_Model):
    """The facts that tracing recorded about a tensor."""

    dtype: Line
    shape: list[int]
    stride: list[int] | None
    device: Line
    layout: Line
    requires_grad: bool
    bytes: int | None
    symbolic: Symbolic | None = None


@with_config(ConfigDict(extra="forbid", strict=True))
class Expected(TypedDict, total=False):
    """The value of a node: a tensor, a symbolic number with its hint, the items of a list, or another type."""

    tensor: TensorFacts
    symbol: Line
    hint: int | float | bool | dict[Line, Line] | None
    items: list[Expected | None]
    type: Line


class Node(_Model):
    """One node of a graph."""

    name: Identifier
    op: Literal["placeholder", "get_attr", "call_function", "call_method", "call_module", "output"]
    target: Annotated[str, StringConstraints(max_length=2000)]
    args: Any
    kwargs: Any
    expected: Expected | None
    source: Line | None
    stack: Size | None


class Graph(_Model):
    """A graph with its subgraphs and constants."""

    nodes: list[Node]
    subgraphs: dict[Path, Graph]
    constants: dict[Path, Tensor]


class Saved(_Model):
    """An activation that the forward keeps for the backward."""

    name: Line
    source: Line | None
    bytes: int | None


class Symbol(_Model):
    """The facts known about a symbolic size."""

    range: Annotated[list[int | None], Field(min_length=2, max_length=2)]
    hint: int | None


class GraphFile(_Model):
    """``graph.json``."""

    format: str
    version: int
    name: Name
    kind: GraphKind
    index: Size
    torch: Line
    python: Line
    process: int
    rank: int
    world_size: int
    graph: Graph
    storages: list[Storage]
    stacks: list[str]
    symbols: dict[Line, Symbol]
    relations: list[Line]
    pairs: dict[GraphKind, Name]
    saved: list[Saved]
    requires: list[Line]
    unsupported: list[Line]
    files: dict[Literal["module.py", "repro.py", "graph.dot"], Hash]
    checksum: Hash


class Input(_Model):
    """One input."""

    name: Identifier
    source: Line | None
    type: Literal["tensor", "int", "float", "bool", "none", "other"]
    tensor: Tensor | None = None
    value: int | bool | Line | None = None
    symbol: Line | None = None

    @model_validator(mode="after")
    def _consistent(self) -> Input:
        wanted = {"int": int, "bool": bool, "float": str, "other": str, "none": type(None), "tensor": type(None)}
        if (self.tensor is not None) != (self.type == "tensor") or type(self.value) is not wanted[self.type]:
            raise ValueError(f"the value is not of type {self.type!r}")
        if self.type == "float":
            float(str(self.value))
        return self


_FLOATING = _must(lambda name: getattr(torch, name).is_floating_point, "there is no autocast to dtype {!r}")


class Ambient(_Model):
    """Modes under which the graph was called."""

    grad: bool
    inference: bool
    autocast: dict[Device, Annotated[Dtype, _FLOATING]]


class InputsFile(_Model):
    """``inputs.json``."""

    format: str
    version: int
    inputs: list[Input]
    storages: list[Storage]
    symbols: dict[Line, Symbol]
    relations: list[Line]
    called: bool
    ambient: Ambient
    rng: dict[Device, RandomState] | None
    values: Literal["inputs.safetensors"] | None
    graph: Hash
    checksum: Hash
