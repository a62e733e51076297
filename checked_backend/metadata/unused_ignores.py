"""Find entries of ``ignore_ops`` and ``ignore`` that match nothing, because a typing error would hide nothing."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import get_args

from checked_backend._torch.operators import OpOverloadPacket, find_op_packet
from checked_backend.findings import Kind
from checked_backend.metadata.plan import plain_name
from checked_backend.options import InterpreterOptions, MetadataCheck
from checked_backend.subjects import Subject, SubjectKind

__all__ = ["UnusedIgnores"]

_STRUCTURE = frozenset({*get_args(MetadataCheck), "indices", "outputs"})


class UnusedIgnores:
    """The entries that match nothing in one region's graphs.

    While the backward graph is not compiled yet, an entry with an existing operator may still match there. Such an
    entry is not reported.

    Args:
        options: The user's options.
    """

    def __init__(self, options: InterpreterOptions) -> None:
        self._ops = tuple(options.ignore_ops)
        self._findings = tuple(entry for entry in options.ignore if not _is_kind(entry))
        self._matched: set[str] = set()
        self._compiled: set[str] = set()

    def compiled(self, kind: str, matched: Collection[str]) -> None:
        """Note that a graph was compiled, and which entries are in it."""
        self._compiled.add(kind)
        self._matched.update(matched)

    def entries(self) -> Mapping[str, str]:
        """Each entry with a remark, which holds if no other region matches it; "" if this region matches it."""
        to_come = "forward" in self._compiled and "backward" not in self._compiled
        found: dict[str, str] = {}
        for entry in self._ops:
            exists = _exists(entry)
            if entry in self._matched or (exists and to_come):
                found[f"ignore_ops entry {entry!r}"] = ""
            else:
                known = "" if exists else ", and no operator of that name is registered"
                found[f"ignore_ops entry {entry!r}"] = f"matches no node of the graphs that were compiled{known}"
        for entry in self._findings:
            unknown = "is neither a kind of finding nor a node of the graphs that were compiled"
            waits = entry in self._matched or (to_come and Subject(entry).kind is SubjectKind.NODE)
            found[f"ignore entry {entry!r}"] = "" if waits else unknown
        return found

    def remarks(self) -> list[str]:
        """Lines about unmatched entries, for a message about a finding that an entry may have been meant for."""
        return [f"Note: {entry} {text}." for entry, text in self.entries().items() if text]


def _is_kind(entry: str) -> bool:
    """Whether an entry is a kind or finer kind of finding, of this backend or of numcheck, which shares the option."""
    kind, _, finer = entry.partition(".")
    if kind not in tuple(map(str, Kind)):
        return False
    return not finer or kind != str(Kind.STRUCTURE) or finer in _STRUCTURE


def _exists(entry: str) -> bool:
    """Whether an operator is registered under the name that a user gave."""
    namespace, _, rest = plain_name(entry).partition(".")
    if not rest:
        return find_op_packet("higher_order", namespace) is not None
    name, _, overload = rest.partition(".")
    packet = find_op_packet(namespace, name)
    if not isinstance(packet, OpOverloadPacket):
        return False
    return not overload or overload in packet.overloads()
