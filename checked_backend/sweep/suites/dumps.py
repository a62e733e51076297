"""The suite ``dumps:DIR``: each dumped graph is a model. Nothing is unpickled; see `checked_backend.dump`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from checked_backend.checking.replay import replay
from checked_backend.checking.target import load_compiler
from checked_backend.dump import load_dump, rehearse
from checked_backend.errors import DumpError, SuiteError
from checked_backend.runs.case import Case
from checked_backend.sweep.rules import Settings
from checked_backend.sweep.suites.base import Built, Model, Unsupported, digest_of

_GRAPH = "graph.json"


class Dumps:
    """A folder of dumped graphs, at any depth."""

    def __init__(self, folder: str) -> None:
        self._folder = Path(folder)

    def models(self) -> Sequence[Model]:
        """See `Suite`."""
        found = sorted(path.parent.relative_to(self._folder).as_posix() for path in self._folder.rglob(_GRAPH))
        if not found:
            raise SuiteError(f"{self._folder}: no dumped graph in it; expected folders with a {_GRAPH} each")
        return [Model(name, fixed=True) for name in found]

    def fingerprint(self) -> str:
        """See `Suite`."""
        files = (path for path in self._folder.rglob("*") if path.name in (_GRAPH, "inputs.json") and path.is_file())
        return digest_of(files, self._folder)

    def build(self, case: Case, settings: Settings) -> Built:
        """See `Suite`."""
        folder = (self._folder / case.model).resolve()
        if not folder.is_relative_to(self._folder.resolve()):
            raise SuiteError(f"{case.model!r} is not in {self._folder}")
        if settings.compiler_options:
            raise Unsupported("a dumped graph is replayed without compiler options")
        if settings.batch_size is not None:
            raise Unsupported("a dumped graph keeps its sizes, and a rule or --batch-size sets one")
        dump = load_dump(folder)
        try:
            rehearse(dump, 0)
        except DumpError as error:
            raise Unsupported(str(error)) from error
        inputs = dump.inputs(0)
        return Built(
            dump.module,
            inputs,
            ready=True,
            check=lambda: replay(dump, compiler=load_compiler(case.compiler), rehearsed=True),
        )
