"""Make the golden outputs by what people and tools call: ``checked-backend``, `cb.check`, `cb.collect`, `cb.Report`.

Each part runs in the current folder, which is empty at first, and yields names of files and their texts.
"""

from __future__ import annotations

import importlib.util
import io
import os
import re
import shutil
import sys
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import redirect_stderr, redirect_stdout
from importlib.metadata import entry_points
from pathlib import Path
from typing import NamedTuple
from unittest import mock

import torch

import checked_backend as cb
from tests.golden.masks import mask, same
from tests.support.report_tools import Terminal

Files = dict[str, str]
Outputs = Iterator[tuple[str, str]]

_HERE = Path(__file__).parent
_ASSETS = re.compile(r"(?<=<style>).*?(?=</style>)|(?<=<script>).*?(?=</script>)", re.DOTALL)
_LOCALIZED = "reports/localized.json"
_QUIET = {"CHECKED_BACKEND_PROGRESS": "0"}  # what takes long, and is told, is different on each machine


class Ran(NamedTuple):
    """What one command line did."""

    code: int
    out: str
    err: str

    @property
    def text(self) -> str:
        return f"{self.out}{'(stderr) ' * bool(self.err)}{self.err}(exit code {self.code})\n"


def cli(*words: str, columns: int = 80, terminal: bool = False) -> Ran:
    """Run ``checked-backend`` in this process, with its output in a pipe or on a terminal of some width."""
    [command] = entry_points(group="console_scripts", name="checked-backend")
    out, err = Terminal() if terminal else io.StringIO(), io.StringIO()
    dropped = re.compile("CHECKED_BACKEND|NO_COLOR|FORCE_COLOR|COLORTERM|TTY_")
    kept = {name: value for name, value in os.environ.items() if not dropped.match(name)}
    kept |= {"COLUMNS": str(columns), "LINES": "50", "TERM": "xterm-256color", **_QUIET}
    with mock.patch.dict(os.environ, kept, clear=True), redirect_stdout(out), redirect_stderr(err):
        try:
            command.load()([*words])
        except SystemExit as ended:
            return Ran(int(ended.code or 0), out.getvalue(), err.getvalue())
    raise AssertionError(f"checked-backend {' '.join(words)}: it did not exit")


def sections(texts: Mapping[str, str]) -> str:
    return "\n".join(f"===== {title}\n{text}" for title, text in texts.items())


def _reports(_files: Files) -> Outputs:
    """The programs run: what they say, their reports as JSON, and the scripts beside these."""
    said: dict[str, str] = {}
    for name, program in _programs().items():
        torch._dynamo.reset()
        torch.manual_seed(0)
        err = io.StringIO()
        quiet = mock.patch.dict(os.environ, _QUIET)
        with quiet, redirect_stderr(err), warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always")
            report = program()
        json = report.to_json()
        read = cb.Report.from_json(json)
        assert read.to_json() == json, name
        only_here = [line for line in str(report).splitlines() if line not in str(read).splitlines()]
        ours = [str(one.message) for one in warned if one.category.__module__.startswith("checked_backend")]
        said[name] = "\n".join([report.headline, repr(report), *only_here, *ours, err.getvalue()])
        yield f"{name}.json", f"{json}\n"
    Path("programs.py").unlink()
    yield "said.txt", sections(said)
    for path in sorted(Path("checked_backend_reports").rglob("*.*")):
        if path.suffix in (".py", ".md"):
            yield f"{mask(path.name)}.txt", path.read_text(encoding="utf-8")


def _programs() -> Mapping[str, Callable[[], cb.Report]]:
    """The programs, read here: reports name a file by its path from the current folder."""
    spec = importlib.util.spec_from_file_location("programs", shutil.copy(_HERE / "programs.py", "."))
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    programs: Mapping[str, Callable[[], cb.Report]] = module.PROGRAMS
    return programs


def _views(files: Files) -> Outputs:
    """The stored reports in every form. Nothing is measured here, so every digit counts."""
    for name, text in files.items():
        if name.startswith("reports/") and name.endswith(".json"):
            _write(name, text)
    for rank, name in enumerate(("logic", "pass")):
        _write(f"few/{name}.json", files[f"reports/{name}.json"])
        _write(f"ranks/net-20260102T030405Z-rank{rank}-7-0.json", files[f"reports/{name}.json"])
    _write("few/broken.json", "{}")
    for where, terminal in (("pipe", False), ("terminal", True)):
        wide, narrow = (cli("report", "reports", columns=columns, terminal=terminal).text for columns in (120, 80))
        yield f"{where}_120.txt", wide
        yield f"{where}_80.txt", narrow if narrow != wide else "as in 120 columns\n"
    cli("report", "reports", "--html", "reports.html", "--junit", "reports.xml")
    shown: dict[str, str] = {}
    for words in (
        "few --certificate --html few.html --junit few.xml --json few.json",
        "ranks --merge",
        f"{_LOCALIZED} --model-explorer graph.json -v",
    ):
        shown[f"report {words}"] = cli("report", *words.split()).text
    shown["report -v, on a terminal"] = cli("report", _LOCALIZED, "-v", terminal=True).text
    yield "shown.txt", sections(shown)
    for path in sorted(path for path in Path().glob("*.*") if path.is_file()):
        yield path.name, path.read_text(encoding="utf-8")
    report = cb.Report.from_json(files["reports/every_member.json"])
    yield "api.html", report.to_html()
    yield "notebook.html", report._repr_html_()
    yield "api.txt", report.to_text(verbose=True)


def _sweep(_files: Files) -> Outputs:
    shutil.copy(_HERE / "models.py", ".")
    words = "--compiler models.py:right --compiler models.py:wrong --out swept --threads 1"
    yield "run.txt", cli("sweep", "python:models.py", *words.split()).text
    yield from _pages("sweep", "swept", "html", "json", "junit")


def _fuzz(_files: Files) -> Outputs:
    shutil.copy(_HERE / "models.py", ".")
    words = "--programs 2 --longest 2 --ops add --static --inference --no-localize --time 1h --timeout 600"
    ran = cli("fuzz", "--compiler", "models.py:refusing", "--out", "fuzzed", "--repros", "repros", *words.split())
    said = ran.err.splitlines(keepends=True)
    early = [line for line in said if " a second, " in line][:-1]  # how often it says so depends on time
    yield "run.txt", ran._replace(err="".join(line for line in said if line not in early)).text
    for path in sorted(Path().glob("repros/*")):
        yield f"{path.name}.txt", path.read_text(encoding="utf-8")
    yield from _pages("fuzz", "fuzzed", "html", "json", "junit")


def _pages(kind: str, source: str, *forms: str) -> Outputs:
    """What ``report`` makes of a folder. Pages may break words anywhere: masks could not find them."""
    paths = {form: Path(f"{kind}.{form}") for form in forms}
    words = [word for form, path in paths.items() for word in (f"--{form}", path.name)]
    yield "report.txt", cli("report", source, *words).text
    for path in filter(Path.exists, paths.values()):  # where the run failed there are none, and it says why
        yield path.name, path.read_text(encoding="utf-8").replace("<wbr>", "")


def _help(_files: Files) -> Outputs:
    general = cli("--help").out
    yield "checked-backend.txt", general
    for verb in re.findall(r"^  (\w\S*)", general.partition("Commands:")[2], re.MULTILINE):
        yield f"{verb}.txt", cli(verb, "--help").out


def _exits(files: Files) -> Outputs:
    """Command lines, each with its exit code and the first and the last line that it prints."""
    shutil.copy(_HERE / "models.py", ".")
    for name in ("pass", "logic", "unsupported"):
        _write(f"{name}.json", files[f"reports/{name}.json"])
    _write("broken/a.json", "{}")
    rows = []
    for line in (_HERE / "command_lines.txt").read_text(encoding="utf-8").splitlines():
        torch.manual_seed(0)
        ran = cli(*line.split())
        rows.append(f"{ran.code}  checked-backend {line}")
        for lines in (mask(text).strip().splitlines() for text in (ran.out, ran.err)):
            rows += [f"      {text[:140]}" for text in dict.fromkeys([*lines[:1], *lines[-1:]])]
    yield "exits.txt", "\n".join(rows) + "\n"


def _write(name: str, text: str) -> None:
    Path(name).parent.mkdir(exist_ok=True)
    Path(name).write_text(text, encoding="utf-8")


PARTS: Mapping[str, Callable[[Files], Outputs]] = {
    "reports": _reports,
    "views": _views,
    "sweep": _sweep,
    "fuzz": _fuzz,
    "help": _help,
    "exits": _exits,
}
"""What makes each part. `views` and `exits` show the reports that `reports` made, or else those that are stored."""


def produce(parts: Collection[str], stored: Files) -> Files:
    """Make parts of the golden outputs in the current folder.

    Args:
        parts: Names of `PARTS`.
        stored: The files as they are. JSON that is the same but for rounding is taken from there.
    """
    made: Files = {}
    for part in parts:
        for name, text in _without_assets(PARTS[part]({**stored, **made})):
            path, text = f"{part}/{name}", text if part in ("views", "help") else mask(text)
            is_same = part in ("reports", "sweep") and name.endswith(".json") and same(stored.get(path, ""), text)
            made[path] = stored[path] if is_same else text
    return made


def _without_assets(outputs: Outputs) -> Outputs:
    """Pages without their styles and scripts: each of these is a file, and in its place stands the file's name."""
    assets: dict[str, str] = {}
    for name, text in outputs:
        if name.endswith(".html"):
            text = _ASSETS.sub(lambda found: assets.setdefault(found[0], f"asset_{len(assets) + 1}.txt"), text)
        yield name, text
    yield from ((name, text) for text, name in assets.items())
