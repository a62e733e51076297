"""Name findings about a compiled region's results as the program's result names them."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from checked_backend.findings import Finding


@dataclass(slots=True)
class RegionResults:
    """The values that compiled regions returned during one call of a program.

    A region's results are a flat list: ``output[1]`` of a region may be ``output[loss]`` of the program.

    Attributes:
        names: The program's name of a region's result, by region and result; None if calls do not agree on it.
    """

    names: dict[tuple[str, str], str | None] = field(default_factory=dict)
    _returned: dict[str, list[list[weakref.ref[torch.Tensor] | None]]] = field(default_factory=dict)

    def forget(self) -> None:
        """Begin anew with the next call."""
        self._returned.clear()

    def watched(self, region: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap a compiled region, to see what it returns."""

        def run(*args: Any) -> Any:
            returned = function(*args)
            values: Sequence[Any] = returned if isinstance(returned, (tuple, list)) else (returned,)
            references = [weakref.ref(value) if isinstance(value, torch.Tensor) else None for value in values]
            self._returned.setdefault(region, []).append(references)
            return returned

        return run

    def named(self, findings: Sequence[Finding], outputs: Mapping[str, Any]) -> list[Finding]:
        """Give findings about regions' results the program's names for them.

        A region that ran several times in the call keeps its own names. So do results that the program did not return.
        """
        names = {id(value): name for name, value in outputs.items() if isinstance(value, torch.Tensor)}
        renamed: dict[tuple[str, str], str] = {}
        for region, calls in self._returned.items():
            for index, reference in enumerate(calls[0] if len(calls) == 1 else ()):
                tensor = None if reference is None else reference()
                if tensor is not None and id(tensor) in names:
                    renamed[region, f"output[{index}]"] = names[id(tensor)]
        for place, name in renamed.items():
            self.names[place] = name if self.names.get(place, name) == name else None
        return [
            replace(finding, subject=renamed.get((finding.region, finding.subject), finding.subject))
            for finding in findings
        ]
