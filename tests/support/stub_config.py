"""A configuration such as those of transformers, without transformers."""

from __future__ import annotations

from typing import Any, ClassVar


class Stub:
    """A configuration whose values are attributes. Subclasses set the values and the parts."""

    values: ClassVar[dict[str, Any]] = {}
    sub_configs: ClassVar[dict[str, Any]] = {}

    def __init__(self, **given: Any) -> None:
        self.given = given
        for name, value in {**self.values, **given}.items():
            kind = self.sub_configs.get(name)
            setattr(self, name, kind(**value) if kind is not None and isinstance(value, dict) else value)

    def to_dict(self) -> dict[str, Any]:
        """The values by name."""
        return {name: getattr(self, name) for name in self.values}
