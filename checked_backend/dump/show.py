"""Render a dump as text for the terminal."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

from checked_backend.dump.load import Dump
from checked_backend.report.clean import clean


def render_dump(dump: Dump) -> str:
    """The text: the graph's origin, its inputs, its nodes with shapes and source lines, and its saved activations."""
    data = dump.metadata
    lines = [f"{dump.title}: torch {data['torch']}, Python {data['python']}, process {data['process']}"]
    if data["world_size"] > 1:
        lines.append(f"rank {data['rank']} of {data['world_size']}")
    lines += [f"{kind}: {name}" for kind, name in data["pairs"].items()]
    lines += [f"needs: import {name}" for name in data["requires"]]
    lines += [f"cannot be run from the dump: {reason}" for reason in data["unsupported"]]
    others = [entry for entry in data["inputs"]["inputs"] if entry["type"] == "other"]
    lines += [f"cannot be run from the dump: input {entry['name']} is {entry['value']}" for entry in others]
    lines += ["", *_inputs(data), "", *_graph(data["graph"], "graph")]
    lines += ["", *_operators(data["graph"])]
    if data["saved"]:
        lines += ["", *_saved(data)]
    return "\n".join(clean(line).replace("\n", "\\n") for line in lines)


def _inputs(data: Mapping[str, Any]) -> Iterator[str]:
    inputs = data["inputs"]
    values = "with values" if inputs["values"] else "without values"
    called = "" if inputs["called"] else ", as traced: the graph was never called"
    yield f"{len(inputs['inputs'])} inputs, {values}{called}"
    for entry in inputs["inputs"]:
        source = f"  {entry['source']}" if entry["source"] else ""
        yield f"  {entry['name']}: {_input(entry)}{source}"
    for name, symbol in inputs["symbols"].items():
        low, high = symbol["range"]
        yield f"  {name} = {symbol['hint']} in [{'-inf' if low is None else low}, {'inf' if high is None else high}]"
    for relation in inputs["relations"]:
        yield f"  {relation}"


def _input(entry: Mapping[str, Any]) -> str:
    spec = entry["tensor"]
    if spec is None:
        symbol = f" ({entry['symbol']})" if entry["symbol"] else ""
        return f"{entry['type']} {entry['value']}{symbol}" if entry["type"] != "other" else str(entry["value"])
    shape = (spec["symbolic"] or spec)["shape"]
    parts = [f"{spec['dtype']}[{', '.join(map(str, shape))}] strides {tuple(spec['stride'])} {spec['device']}"]
    if spec["storage_offset"]:
        parts.append(f"offset {spec['storage_offset']}")
    if spec["requires_grad"]:
        parts.append("requires grad")
    if spec["range"] is not None:
        parts.append(f"in [{_number(spec['range'][0])}, {_number(spec['range'][1])}]")
    if spec["alias_group"] is not None:
        parts.append(f"shares storage {spec['alias_group']}")
    return ", ".join(parts)


def _number(value: int | float) -> str:
    """A bound in few digits. An integer from a file may be greater than any float."""
    return str(value) if isinstance(value, int) else f"{value:g}"


def _graph(graph: Mapping[str, Any], title: str) -> Iterator[str]:
    yield f"{title}: {len(graph['nodes'])} nodes"
    for node in graph["nodes"]:
        target = (
            ""
            if node["op"] in ("placeholder", "output")
            else f" = {node['target'].partition(':')[2] or node['target']}"
        )
        source = f"    # {node['source']}" if node["source"] else ""
        yield f"  {node['name']}{target}{_arguments(node)}{_expected(node['expected'])}{source}"
    for name, child in graph["subgraphs"].items():
        yield ""
        yield from _graph(child, name)


def _arguments(node: Mapping[str, Any]) -> str:
    if node["op"] in ("placeholder", "get_attr"):
        return ""
    args, kwargs = node["args"]["tuple"], node["kwargs"]["dict"]
    return f"({', '.join([*map(_value, args), *(f'{key}={_value(value)}' for key, value in kwargs)])})"


def _value(value: Any) -> str:
    if isinstance(value, list):
        return f"[{', '.join(map(_value, value))}]"
    if isinstance(value, dict) and len(value) == 1:
        ((kind, inner),) = value.items()
        if kind == "tuple":
            return f"({', '.join(map(_value, inner))})"
        return str(inner)
    return repr(value)


def _expected(expected: Mapping[str, Any] | None) -> str:
    if expected is None:
        return ""
    if "tensor" in expected:
        tensor = expected["tensor"]
        shape = (tensor["symbolic"] or tensor)["shape"]
        return f" -> {tensor['dtype']}[{', '.join(map(str, shape))}]"
    if "symbol" in expected:
        return f" -> {expected['symbol']} = {expected.get('hint')}"
    return ""


def _operators(graph: Mapping[str, Any]) -> Iterator[str]:
    counts: Counter[str] = Counter()
    queue = [graph]
    while queue:
        current = queue.pop()
        counts.update(node["target"] for node in current["nodes"] if node["op"] in ("call_function", "call_method"))
        queue += current["subgraphs"].values()
    yield "operators: " + ", ".join(f"{name.partition(':')[2]} x{count}" for name, count in counts.most_common())


def _saved(data: Mapping[str, Any]) -> Iterator[str]:
    total = sum(entry["bytes"] or 0 for entry in data["saved"])
    verb = "saves for the backward" if data["kind"] == "forward" else "takes from the forward"
    yield f"{verb}: {len(data['saved'])} values, {total:,} bytes"
    for entry in sorted(data["saved"], key=lambda entry: -(entry["bytes"] or 0)):
        source = f"    # {entry['source']}" if entry["source"] else ""
        yield f"  {entry['name']}: {'-' if entry['bytes'] is None else format(entry['bytes'], ',')} bytes{source}"
