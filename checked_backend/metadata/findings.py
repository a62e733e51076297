"""Turn mismatches into findings, each with a script of its operator alone, and those of one run into an error."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx

from checked_backend._torch.pytree import tree_leaves
from checked_backend.errors import MetadataError
from checked_backend.findings import EvidenceKey, Finding, Kind
from checked_backend.graphs.schema import is_custom, operator_name
from checked_backend.graphs.source_line import callers_line, module_path, source_line
from checked_backend.metadata.attribution import attribute, unwrap_call
from checked_backend.metadata.expected import Inputs, Mismatch
from checked_backend.scripts.comparisons import all_are_finite, fake_kernel_differs, source_of
from checked_backend.scripts.values import TensorWriter, Untranslatable, write_value

_FAKE_IMPORTS = (
    "from contextlib import nullcontext",
    "",
    "import torch",
    "from torch._subclasses.fake_tensor import FakeTensorMode, disable_fake_tensor_cache",
    "from torch.utils._pytree import tree_leaves, tree_map_only",
)
_IMPORTS = ("import torch", "from torch.utils._pytree import tree_leaves")
_LISTED = 10  # findings spelled out in a message; the others usually follow from these
_KINDS: Mapping[str, Kind] = {"alias": Kind.ALIAS, "mutation": Kind.MUTATION, "nonfinite": Kind.NONFINITE}


@dataclass(frozen=True, slots=True)
class NodeMismatch:
    """One mismatch of one node.

    Attributes:
        place: The graph inside of that graph, or "".
        inputs: The node's real arguments, None if they are not known.
        inherited: Whether it follows from an input of the node that was wrong already.
        ignored: Why it is not reported, or "": an entry of the options, or that it follows from an ignored mismatch.
        depended: For a mismatch of layout, why it matters; "" if no later node depends on it.
    """

    node: fx.Node
    mismatch: Mismatch
    graph: str
    place: str
    inputs: Inputs | None
    inherited: bool = False
    ignored: str = ""
    depended: str = ""

    @property
    def subject(self) -> str:
        """The name of the wrong value, for people."""
        name = f"node[{self.place}: {self.node.name}]" if self.place else f"node[{self.node.name}]"
        return name if self.mismatch.index is None else f"{name}[{self.mismatch.index}]"

    @property
    def kind(self) -> Kind:
        """The kind of its finding."""
        return _KINDS.get(self.mismatch.what, Kind.STRUCTURE)

    @property
    def detail(self) -> str:
        """The finer kind."""
        what, kind = self.mismatch.what, self.kind.value
        return kind if what == kind else f"{kind}.{what}"


def to_finding(found: NodeMismatch) -> Finding:
    """The finding for a mismatch, with its source line, its attribution and a script."""
    node, mismatch = found.node, found.mismatch
    operator, source, module = operator_name(node), source_line(node), module_path(node)
    where = f"the {found.graph} graph" + (f" ({found.place})" if found.place else "")
    lines = [f"{found.subject} ({operator}) in {where}: {_difference(mismatch)}"]
    if found.inherited:
        lines[0] += " (inherited: an input of this node was wrong already)"
    if source:
        lines.append(f"    at {source}")
    if module:
        lines.append(f"    in {module}")
    if found.depended:
        lines.append(f"    it matters: {found.depended}")
    fault, script = "", None
    if not found.inherited and not found.ignored:
        fault = attribute(node, mismatch, found.inputs)
        lines.append(f"    likely at fault: {fault}")
        script = operator_script(node, found.inputs, lines[0], nonfinite=mismatch.what == "nonfinite")
    evidence: dict[str, Any] = {EvidenceKey.INHERITED: found.inherited}
    evidence |= {EvidenceKey.DEPENDED_ON: found.depended} if found.depended else {}
    evidence |= {EvidenceKey.AT_FAULT: fault} if fault else {}
    evidence |= {EvidenceKey.REMARK: mismatch.remark} if mismatch.remark else {}
    evidence |= {EvidenceKey.SCRIPT: script} if script else {}
    evidence |= {EvidenceKey.IGNORED: found.ignored} if found.ignored else {}
    return Finding(
        kind=found.kind,
        subject=found.subject,
        message="\n".join(lines),
        detail=found.detail,
        expected=mismatch.expected,
        actual=mismatch.actual,
        evidence=evidence,
        graph=found.graph,
        stage="aot",
        node=node.name,
        op=operator,
        source=source,
        caller=callers_line(node),
        module=module,
        more_than_layout=found.depended,
        inherited=found.inherited,
        ignored=found.ignored,
        script=script,
        at_fault=fault,
    )


def depended_on(finding: Finding, why: str) -> Finding:
    """A finding about a node's layout, marked as one that matters."""
    return replace(finding, more_than_layout=why, evidence={**finding.evidence, EvidenceKey.DEPENDED_ON: why})


def _difference(mismatch: Mismatch) -> str:
    remark = f" ({mismatch.remark})" if mismatch.remark else ""
    if mismatch.what == "nonfinite":
        return f"made {mismatch.actual} of finite inputs{remark}"
    if mismatch.what in ("mutation", "alias"):
        return f"{mismatch.what}: by its schema and its trace {mismatch.expected}, ran with {mismatch.actual}{remark}"
    if mismatch.what == "assert":
        return f"the trace took {mismatch.expected} for granted, ran with {mismatch.actual}{remark}"
    return f"{mismatch.what} {mismatch.expected}, ran with {mismatch.actual}{remark}"


def metadata_error(findings: Sequence[Finding]) -> MetadataError:
    """The error for the findings of one run; its ``finding`` is the first that is not inherited.

    Args:
        findings: At least one finding, in graph order.
    """
    local = [finding for finding in findings if not finding.inherited]
    first = (local or list(findings))[0]
    lines = ["what ran does not have the metadata that was recorded when the graph was traced."]
    if all(finding.kind is Kind.NONFINITE for finding in findings):
        lines = ["a node made a NaN or an infinity out of finite inputs."]
    lines += [finding.message for finding in findings[:_LISTED]]
    if len(findings) > _LISTED:
        lines.append(f"... and {len(findings) - _LISTED} more")
    if first.kind is not Kind.NONFINITE:
        lines.append(
            "A compiler that trusts this metadata makes wrong code. For a custom operator make its register_fake and "
            "its schema say what its kernel does; for an operator of torch report it with this text."
        )
    if first.repro:
        lines.append(f"This operator alone: {first.repro}")
    elif first.script is not None:
        lines += ["This operator alone:", *(f"    {line}" for line in first.script.splitlines())]
    return MetadataError("\n".join(lines), first)


def operator_script(node: fx.Node, inputs: Inputs | None, title: str, *, nonfinite: bool = False) -> str | None:
    """The script; None if the node is no operator or has an argument that cannot be written down.

    Args:
        inputs: Its real arguments. Of many values, others between the least and the greatest are made.
        nonfinite: Show that the operator makes a NaN or an infinity.
    """
    call = None if inputs is None else unwrap_call(node.target, *inputs)
    if call is None:
        return None
    operator, args, kwargs = call
    tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]

    def tensor(value: Any) -> str | None:
        return writer.write(value, "it") if isinstance(value, torch.Tensor) else None

    try:
        writer = TensorWriter(tensors, offsets=True, long=_in_range)
        written = [f"    {write_value(value, tensor)}," for value in args]
        keywords = [f"    {name!r}: {write_value(value, tensor)}," for name, value in kwargs.items()]
    except (RuntimeError, Untranslatable):  # also dtypes whose values torch cannot read, and tensors of vmap
        return None
    own = [f"# First import the module that registers {operator.name()}."] if is_custom(node) else []
    packet = f"torch.ops.{operator.namespace}.{operator._schema.name.partition('::')[2]}.{operator._overloadname}"
    end = (
        '"finite here" if all_are_finite(operator, args, kwargs) else "NOT FINITE"'
        if nonfinite
        else '"THEY DIFFER" if fake_kernel_differs(operator, args, kwargs) else "they agree here"'
    )
    lines = [
        *(f"# {line}" for line in title.splitlines()),
        *own,
        *(_IMPORTS if nonfinite else _FAKE_IMPORTS),
        *source_of(all_are_finite if nonfinite else fake_kernel_differs),
        "",
        "",
        "torch.manual_seed(0)",
        f"operator = {packet}",
        *writer.lines,
        "args = (",
        *written,
        ")",
        "kwargs = {",
        *keywords,
        "}",
        f"raise SystemExit({end})",
    ]
    return "\n".join(lines) + "\n"


def _in_range(values: torch.Tensor) -> str:
    """Other values between the least and the greatest of these."""
    shape, dtype = tuple(values.shape), values.dtype
    if dtype.is_complex:
        return f"torch.randn({shape}, dtype=torch.complex64).to({dtype})"
    # torch has no `min` for some narrow floats and wide unsigned integers
    wide = values.double() if dtype.is_floating_point else values.to(torch.int64)
    if dtype in (torch.uint16, torch.uint32, torch.uint64):
        wide = wide.clamp_min(0)  # only the lower half of uint64's range
    low, high = wide.min().item(), wide.max().item()
    if dtype.is_floating_point:
        ends = f"{write_value(low)}, {write_value(high)}, {values.numel()}"
        return f"torch.linspace({ends}, dtype=torch.float64).to({dtype}).reshape({shape})"
    return f"torch.randint({low}, {min(int(high), 2**63 - 2) + 1}, {shape}).to({dtype})"
