"""Write a graph as a readable Python module that can be imported on its own."""

from __future__ import annotations

import inspect
import re
import textwrap
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any, cast

from torch import fx

from checked_backend._torch.graph_code import dump_code
from checked_backend.dump import standalone
from checked_backend.dump.encode import EncodedGraph
from checked_backend.dump.targets import known_function
from checked_backend.graphs.workarounds import powers_called
from checked_backend.report.clean import in_docstring

_INTERPRETING = ("higher_order:autograd_function_apply", "higher_order:tag_activation_checkpoint")
_KNOWN = ("inf", "nan", "NoneType", "torch", "device", "fx_pytree", "pytree", "json", "os")

_HEADER = '''\
"""{title}

Written by checked_backend from torch {torch}. {needs}
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from math import inf, nan
from typing import Any

import torch
import torch.fx._pytree as fx_pytree
import torch.utils._pytree as pytree
from torch import device
{imports}
NoneType = type(None)

'''

_FUTURE = "from __future__ import annotations\n"

# before anything else is imported
_OWN_FOLDER = """
import os
import sys

# Python looks for modules next to a script first. The folder of a dump that came from somebody else may hold a json.py
# or a torch.py, which this script must not import.
_HERE = os.path.dirname(os.path.realpath(__file__))
sys.path[:] = [path for path in sys.path if os.path.realpath(path or os.curdir) != _HERE]
"""

_MAIN = """

if __name__ == "__main__":
    main(_HERE, {needs!a}, {unsupported})
"""


def module_source(gm: fx.GraphModule, encoded: EncodedGraph, title: str, torch_version: str) -> str:
    """The text of ``module.py``: a class for each graph, the outermost ``GraphModule``, after those that it uses."""
    classes: list[str] = []
    names: dict[str, Any] = {}
    _add_class(gm, encoded.graph, encoded, "GraphModule", classes, names)
    needs = _needs(encoded)
    imports = [_import(name, value) for name, value in names.items() if name not in _KNOWN]
    imports += [
        f"import {name}" for name in encoded.requires if re.fullmatch(r"[A-Za-z_][\w.]*", name) and name != "__main__"
    ]
    header = _HEADER.format(
        title=in_docstring(title),
        torch=torch_version,
        needs=in_docstring(f"Needs {needs}."),
        imports="".join(f"{line}\n" for line in dict.fromkeys(imports)),
    )
    helpers: list[Callable[..., object]] = []
    if encoded.constants.storages():
        helpers.extend((standalone.read_storages, standalone._view, standalone.constants_of))
    if any("graph_module(" in text for text in classes):
        helpers.append(standalone.graph_module)
    return header + "".join(f"\n{inspect.getsource(helper)}\n" for helper in helpers) + "\n\n".join(classes) + "\n"


def repro_source(encoded: EncodedGraph) -> str:
    """The text of ``repro.py``, which runs the dump's graph with nothing but torch."""
    head, future, text = inspect.getsource(standalone).partition(_FUTURE)
    main = _MAIN.format(needs=in_docstring(_needs(encoded)), unsupported=ascii(list(encoded.unsupported)))
    return f"{head}{future}{_OWN_FOLDER}{text.rstrip()}\n{main}"


def _needs(encoded: EncodedGraph) -> str:
    missing = [*(f"import {name}" for name in encoded.requires), *encoded.unsupported]
    return "nothing but torch" if not missing else f"torch and: {'; '.join(missing)}"


def _import(name: str, value: Any) -> str:
    if isinstance(value, ModuleType):
        return f"import {value.__name__} as {name}"
    if isinstance(value, str):
        return f"{name} = {value!r}"  # an annotation that was never evaluated
    known = known_function(value)
    if known is not None:
        home, _, path = known.partition(":")
        return f"{name} = torch.Tensor.{path}" if home == "torch.Tensor" else f"from {home} import {path} as {name}"
    module = getattr(value, "__module__", None) or type(value).__module__
    qualified = getattr(value, "__qualname__", name)
    if module == "__main__" or "<" in qualified or "." in qualified:
        return f"# {name} is {in_docstring(f'{module}.{qualified}')}, which cannot be imported"
    return f"from {module} import {qualified} as {name}"


def _add_class(
    gm: fx.GraphModule,
    graph: Mapping[str, Any],
    encoded: EncodedGraph,
    name: str,
    classes: list[str],
    names: dict[str, Any],
) -> None:
    made: list[str] = []
    taken_apart = _taken_apart(graph)
    for attribute in graph["subgraphs"]:
        child = f"{'' if name == 'GraphModule' else name + '_'}{_local(attribute).replace('.', '_')}"
        body = cast("fx.GraphModule", gm.get_submodule(attribute))
        _add_class(body, graph["subgraphs"][attribute], encoded, child, classes, names)
        new = f"{child}()"
        if attribute in taken_apart:
            inputs = [node["name"] for node in graph["subgraphs"][attribute]["nodes"] if node["op"] == "placeholder"]
            new = f"graph_module({new}, {inputs})"
        made.append(f"{_assign(_local(attribute), made)} = {new}")
    if graph["constants"]:
        made.append(f"constants = constants_of({_specs(graph['constants'], encoded)})")
        made += [f"{_assign(attribute, made)} = constants[{attribute!r}]" for attribute in graph["constants"]]
    code, used = dump_code(powers_called(gm.graph))
    names.update(used)
    for attribute in graph["subgraphs"]:
        code = re.sub(rf"\b{re.escape(attribute)}\b", _local(attribute), code)
    lines = [f"class {name}(torch.nn.Module):"]
    if made:
        lines += ["    def __init__(self):", "        super().__init__()"]
        lines += [*(f"        {line}" for row in made for line in row.split("\n")), ""]
    lines.append(textwrap.indent(code.strip("\n").rstrip(), "    "))
    classes.append("\n".join(lines))


def _taken_apart(graph: Mapping[str, Any]) -> set[str]:
    """The subgraphs of operators that interpret the nodes of their body instead of calling it."""
    targets = {node["name"]: node["target"] for node in graph["nodes"] if node["op"] == "get_attr"}
    calls = [node for node in graph["nodes"] if node["target"] in _INTERPRETING]
    given = [value for node in calls for value in node["args"]["tuple"] if isinstance(value, dict) and "node" in value]
    return {targets[value["node"]] for value in given if value["node"] in targets}


def _local(attribute: str) -> str:
    # Dynamo gives bodies names such as cond_true_0, and fails on a variable of such a name
    return attribute if "_graph_" in attribute or "." in attribute else f"body_{attribute}"


def _assign(path: str, made: list[str]) -> str:
    parents = path.split(".")[:-1]
    for depth in range(1, len(parents) + 1):
        line = f"self.{'.'.join(parents[:depth])} = torch.nn.Module()"
        if line not in made:
            made.append(line)
    return f"self.{path}"


def _specs(constants: Mapping[str, Any], encoded: EncodedGraph) -> str:
    storages = encoded.constants.storages()
    rows = []
    for name, spec in constants.items():
        layout = {key: spec[key] for key in ("dtype", "shape", "stride", "storage_offset")}
        place = f"storage_{spec['storage']}", storages[spec["storage"]]["start"], spec["device"]
        rows.append(f"    {name!r}: {(*place, layout)!r},\n")
    return "{\n" + "".join(rows) + "}"
