"""The README and the pages beside it: commands run, links lead somewhere, Python is Python, tables are of today."""

from __future__ import annotations

import ast
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import typer

from checked_backend import Coverage, Finding, Kind, Report
from checked_backend.cli import verbs
from checked_backend.report.write import write_report
from tests import docs
from tests.support.cli_tools import Run, runner

ROOT = Path(__file__).parent.parent
README = ROOT / "README.md"
PAGES = [README, *sorted(docs.FOLDER.glob("*.md"))]

_FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")

pytestmark = pytest.mark.skipif(not README.is_file(), reason="installed without its README")


def blocks(page: Path, language: str) -> list[str]:
    return [text for found, text in _FENCE.findall(page.read_text("utf-8")) if found == language]


def anchors(page: Path) -> set[str]:
    headings = re.findall(r"^#+ (.*)$", _FENCE.sub("", page.read_text("utf-8")), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def commands() -> Iterator[str]:
    for page in PAGES:
        for block in blocks(page, "sh"):
            for line in block.splitlines():
                for command in line.partition(" #")[0].split(";"):
                    if command.strip().startswith("checked-backend "):
                        yield command.strip()


def test_the_readme_reads_in_three_minutes() -> None:
    assert len(re.findall(r"\S*\w\S*", README.read_text("utf-8"))) <= 600  # at 200 a minute


def test_the_readmes_report_has_the_parts_of_a_real_one() -> None:
    label = re.compile(r"^   ([a-z]+(?: [a-z]+)?)  ", re.MULTILINE)
    [shown] = blocks(README, "text")
    real = (ROOT / "tests" / "golden" / "expected" / "views" / "pipe_120.txt").read_text("utf-8")
    assert {*label.findall(shown)} <= {*label.findall(real)}
    assert len(label.findall(shown)) == 5
    assert max(map(len, shown.splitlines())) <= 100


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_no_paragraph_is_long(page: Path) -> None:
    for paragraph in re.split(r"\n\n|\n(?=- |\d\. )", _FENCE.sub("", page.read_text("utf-8"))):
        if not paragraph.startswith("|"):
            assert len(re.findall(r"[.?!:](?= [A-Z*`]|$)", " ".join(paragraph.split()))) <= 5, paragraph


def test_the_tables_are_those_of_the_options(capsys: pytest.CaptureFixture[str]) -> None:
    assert docs.main([]) == 0, capsys.readouterr().out


def test_a_table_that_is_not_of_today_is_told_and_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(docs, "FOLDER", tmp_path)
    page = tmp_path / "page.md"
    page.write_text("before\n<!-- verb: selftest -->\nold\n<!-- end -->\nafter\n", "utf-8")
    assert docs.main([]) == 1
    assert "page.md: out of date" in capsys.readouterr().out
    assert docs.main(["--write"]) == 0
    assert docs.main([]) == 0
    text = page.read_text("utf-8")
    assert "| `--json` |  | Print JSON. |" in text
    assert "old" not in text


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_link_leads_somewhere(page: Path) -> None:
    links = [link for link in _LINK.findall(_FENCE.sub("", page.read_text("utf-8"))) if "://" not in link]
    assert links or page != README
    for link in links:
        name, _, anchor = link.partition("#")
        target = (page.parent / name).resolve() if name else page
        assert target.exists(), link
        assert not anchor or anchor in anchors(target), link


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_the_python_is_python(page: Path) -> None:
    for block in blocks(page, "python"):
        ast.parse(block)


def test_every_verb_has_its_table_on_one_page() -> None:
    verbs_shown = re.findall(r"<!-- verb: (\w+) -->", "".join(page.read_text("utf-8") for page in PAGES))
    known = typer.main.get_command(verbs.app).commands  # type: ignore[attr-defined]
    assert sorted([*verbs_shown, "doctor"]) == sorted(known)  # doctor has no option but --json


@pytest.mark.parametrize("command", sorted(set(commands())))
def test_every_command_has_a_verb_and_options_that_are_there(command: str) -> None:
    _, verb, *words = shlex.split(command.replace("...", ""))
    known = typer.main.get_command(verbs.app)
    if verb.startswith("-"):
        assert any(verb in parameter.opts for parameter in known.params)
        return
    found = known.commands[verb]  # type: ignore[attr-defined]
    options = {name for parameter in found.params for name in (*parameter.opts, *parameter.secondary_opts)}
    for word in words:
        if word == "--" or (verb == "run" and not word.startswith("-")):
            break  # the rest is the program's
        if word.startswith("-"):
            assert word in options, word


MODEL = """
import torch

def make():
    return torch.nn.Linear(3, 2), (torch.ones(4, 3),), {}
"""


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    return runner(capsys)


def test_the_commands_about_reports_run(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write_report(Report((), Coverage(checked={"outputs": 3}), "fine"), Path("checked_backend_reports"))
    write_report(
        Report((Finding(Kind.LOGIC, "output[0]", "wrong"),), Coverage(checked={"outputs": 1})),
        Path("checked_backend_reports"),
    )
    ran = [
        words
        for command in blocks_of_reports()
        if not {"checked_backend_sweep", "checked_backend_fuzz"} & {*(words := shlex.split(command))}
    ]
    assert len(ran) >= 4
    for words in ran:
        code, out, err = run(*words[1:])
        assert code == (0 if "--schema" in words else 1), (words, out, err)
        assert out
    assert "<svg" not in Path("report.html").read_text("utf-8")  # there are no numbers in these
    assert "FAIL" in Path("report.html").read_text("utf-8")


def blocks_of_reports() -> list[str]:
    return [command for command in sorted(set(commands())) if command.startswith("checked-backend report")]


@pytest.mark.process
def test_check_and_doctor_run(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model.py").write_text(MODEL, encoding="utf-8")
    monkeypatch.setenv("CHECKED_BACKEND_COMPILER", "eager")  # Inductor is not the point here
    assert "checked-backend check model.py:make" in set(commands())
    code, out, _ = run("check", "model.py:make", "--compiler", "aot_eager")
    assert (code, out.partition(":")[0]) == (0, "PASS")
    code, out, _ = run("doctor")
    assert "torch" in out
    assert code in (0, 2)


@pytest.mark.slow
@pytest.mark.inductor
def test_the_comparison_says_what_the_page_says(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, str(ROOT / "examples" / "compare_tools.py")],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=580,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    told = re.split(r"\n(?=\S+.* \(\d+ s\):\n)", done.stdout)
    said = {part.partition(" (")[0].strip(): part.partition(":\n")[2].strip() for part in told if part.strip()}
    assert said["torch.testing.assert_close"] == "0.10% off, at its defaults it fails, at 1e-3 it passes"
    assert said["TORCHDYNAMO_REPRO_AFTER=aot"] == "nothing"
    assert said["CompilerBisector"] == "inductor, lowerings, relu"
    assert "compare_tools.py:" in said["numcheck"].splitlines()[0]
    times = re.search(r"([0-9.e+]+) times", " ".join(said["numcheck"].split()))
    assert times is not None
    page = (docs.FOLDER / "verdict.md").read_text("utf-8")
    [told_times] = re.findall(r"\| .*, ([0-9,]+) times the noise;", page)
    assert float(times[1]) == pytest.approx(float(told_times.replace(",", "")), rel=0.5)  # the noise is an estimate
    [share] = re.findall(r"wrong by ([0-9.]+) % \(rms\)", page)
    assert said["torch.testing.assert_close"].startswith(f"{float(share):.2f}% off")
