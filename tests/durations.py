"""What the tests cost: ``pytest --durations-file FILE`` adds each test's time to a file of lines.

``python -m tests.durations --refresh FILE`` makes of it ``durations.json``, which has the seconds of each file, and of
each test of half a second or longer: record a run of all the tests for it. What it names the default run leaves out.
Without ``--refresh`` what is dearest is printed.
"""

from __future__ import annotations

import argparse
import json
import os
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.support.process_marks import KINDS, kind_of

VARIABLE = "TEST_DURATIONS_FILE"
TABLE = Path(__file__).with_name("durations.json")
DEAR = 0.5
"""Seconds from which a test is named."""
PRINTED = 25

Table = dict[str, dict[str, Any]]
"""By file: the seconds of its tests of each kind, and by name those of dear ones (``tests``)."""


# the recording


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--durations-file",
        type=Path,
        default=os.environ.pop(VARIABLE, None),  # not for runs of pytest that tests start
        metavar="FILE",
        help=f"add the seconds of each test to this file; {VARIABLE} names it, too",
    )


def pytest_configure(config: pytest.Config) -> None:
    if config.option.durations_file is not None and not hasattr(config, "workerinput"):
        config.pluginmanager.register(_Recorder(config.option.durations_file))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Any:
    report = yield
    report.kind = kind_of(item)  # goes with the report from a worker of pytest-xdist to where it is recorded
    return report


@pytest.hookimpl(wrapper=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> Iterator[None]:
    """Mark dear tests; let pytest-xdist hand out the dearest files first: none is left for one worker at the end."""
    table = known()
    for item in dear(items, table):
        item.add_marker("more")
    yield
    if hasattr(config, "workerinput"):
        items[:] = dearest_first(items, table)


def dear(items: Iterable[pytest.Item], table: Table) -> list[pytest.Item]:
    """Those of the tests that the table names."""
    return [item for item in items if item.nodeid.partition("::")[2] in table.get(_file_of(item), {}).get("tests", {})]


def dearest_first(items: Sequence[pytest.Item], table: Table) -> list[pytest.Item]:
    """The same tests, by file; what of a file is not run does not count."""
    kinds: defaultdict[str, set[str]] = defaultdict(set)
    for item in items:
        kinds[_file_of(item)].add(kind_of(item))
    seconds = {file: cost(table.get(file, {}), kinds[file]) for file in kinds}
    return sorted(items, key=lambda item: -seconds[_file_of(item)])


def _file_of(item: pytest.Item) -> str:
    return item.nodeid.partition("::")[0]


class _Recorder:
    """Adds a line for each test when it is over: the file is right also where the run is ended."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._seconds: defaultdict[str, float] = defaultdict(float)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._seconds[report.nodeid] += report.duration
        if report.when == "teardown":
            line = json.dumps([report.nodeid, report.kind, round(self._seconds.pop(report.nodeid), 2)])
            with self._path.open("a", encoding="utf-8") as file:
                file.write(line + "\n")


# the table


def summary(lines: Iterable[str]) -> Table:
    """The table of what was recorded. Of a test that ran several times the longest counts."""
    longest: dict[tuple[str, str], float] = {}
    for name, kind, seconds in map(json.loads, lines):
        longest[name, kind] = max(seconds, longest.get((name, kind), 0.0))
    table: Table = {}
    for (name, kind), seconds in sorted(longest.items()):
        file, _, test = name.partition("::")
        row = table.setdefault(file, {})
        row[kind] = row.get(kind, 0.0) + seconds
        if seconds >= DEAR:
            row.setdefault("tests", {})[test] = round(seconds, 1)
    for row in table.values():
        row.update({kind: round(row[kind], 1) for kind in KINDS if kind in row})
    return table


def known() -> Table:
    """The table of the last refresh."""
    return json.loads(TABLE.read_text(encoding="utf-8")) if TABLE.exists() else {}


def cost(row: Mapping[str, Any], kinds: Iterable[str] = KINDS) -> float:
    """The seconds of a file's tests of some kinds."""
    return sum(row.get(kind, 0.0) for kind in kinds)


def _dearest(seconds: Mapping[str, float]) -> None:
    for name in sorted(seconds, key=lambda name: (-seconds[name], name))[:PRINTED]:
        print(f"  {seconds[name]:8.1f}  {name}")


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.durations", description=__doc__)
    parser.add_argument("--refresh", type=Path, metavar="FILE", help="take over what was recorded there")
    chosen = parser.parse_args(words)
    if chosen.refresh is not None:
        table = summary(chosen.refresh.read_text(encoding="utf-8").splitlines())
        if 2 * len(table) < len(known()):
            print(f"{chosen.refresh} has tests of {len(table)} files of {len(known())}: record a run of all of them")
            return 3
        TABLE.write_text(json.dumps(table, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    table = known()
    for kind in KINDS:
        print(f"{kind}: {sum(cost(row, (kind,)) for row in table.values()):,.0f} s")
    print("\nthe dearest files, s")
    _dearest({file: cost(row) for file, row in table.items()})
    print("\nthe dearest tests, s")
    _dearest({f"{file}::{test}": s for file, row in table.items() for test, s in row.get("tests", {}).items()})
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
