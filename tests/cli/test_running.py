"""``checked-backend run`` and ``CHECKED_BACKEND=1``, with programs in processes of their own."""

from __future__ import annotations

import json
import os
import signal
import site
import sys
import sysconfig
import time
import venv
from pathlib import Path

import pytest
import torch

from checked_backend.program.hook import FILES
from tests.support.cli_tools import Run
from tests.support.program_texts import COMPILER_WITH_COSINE_FOR_SINE
from tests.support.started_programs import PACKAGE, VERB, finished, started

pytestmark = pytest.mark.process

CLEAN = """
import random, sys
from pathlib import Path
import torch
from torch import compile

def f(x):
    return torch.nn.functional.dropout(x, 0.5)

class Net(torch.nn.Module):
    def forward(self, x):
        return x.sin() + 1

@torch.compile(backend="eager", dynamic=True)
def decorated(x):
    return x.cos() * 2

net = Net()
net.compile(backend="aot_eager")
x = (torch.randn(5) * random.random()).requires_grad_()
for _ in range(3):
    y = compile(f, backend="eager")(x) + net(x) + decorated(x)
    y.sum().backward()
print(sys.argv, sys.path[0], __name__, __file__, __spec__ and __spec__.name, Path.cwd())
print(x.grad.tolist(), torch.rand(2).tolist(), random.random())
"""

WRONG = f"""
import torch

{COMPILER_WITH_COSINE_FOR_SINE}
@torch.compile(backend=wrong)
def f(x):
    return x.sin() + 1

for _ in range(3):
    f(torch.arange(4.0))
"""


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A Python with the hook."""
    folder = tmp_path_factory.mktemp("venv")
    venv.create(folder, symlinks=True)
    python = folder / "bin" / "python"
    place = next(folder.glob("lib/python*/site-packages"))
    (place / "_others.pth").write_text("\n".join([str(PACKAGE.parent), *site.getsitepackages()]))
    code, out, err = finished((python, "-m", "checked_backend", "autostart", "--install"), folder)
    assert (code, out) == (0, f"installed in {place}\n"), err
    return str(python)


def test_a_clean_program_passes_and_runs_as_it_does_alone(tmp_path: Path) -> None:
    (tmp_path / "clean.py").write_text("import torch\ntorch.manual_seed(0)\nimport random\nrandom.seed(0)\n" + CLEAN)
    (tmp_path / "own").mkdir()
    (tmp_path / "own" / "sitecustomize.py").write_text("print('its own')")
    more = {"PYTHONPATH": os.pathsep.join([str(tmp_path / "own"), str(PACKAGE.parent)])}
    plain = finished((sys.executable, "clean.py", "--every", "7"), tmp_path, more)
    code, out, err = finished((*VERB, "--json-file", "run.json", "clean.py", "--every", "7"), tmp_path, more)
    assert (plain[0], code, out) == (0, 0, plain[1].replace("its own\n", "its own\n" * 2)), err  # the verb's, too
    assert plain[2] in err
    assert "checked-backend: PASS: the compiled program agrees with eager" in err
    assert "3 regions, 9 of 9 calls, 9 backward passes" in err
    assert err.endswith("checked-backend: wrote run.json\n")
    found = json.loads((tmp_path / "run.json").read_text())
    assert (found["verdict"], found["exit_code"], len(found["reports"])) == ("pass", 0, 1)


def test_a_wrong_backend_is_caught(tmp_path: Path) -> None:
    (tmp_path / "wrong.py").write_text(WRONG)
    words = ("--github", "--dump", "graphs", "-m", "wrong")
    code, out, err = finished((*VERB, *words), tmp_path)
    assert code == 1
    assert "wrote the graph graphs/f/f_dynamo_0 (checked-backend show graphs/f/f_dynamo_0)" in err
    assert (tmp_path / "graphs" / "f" / "f_dynamo_0" / "repro.py").exists()
    assert "checked-backend: FAIL: f: output[0] is wrong" in err
    assert "wrong.py:13 in f" in err
    assert err.count("differs from eager, which is said once") == 1
    assert out.startswith("\n::error file=wrong.py,line=13,title=checked_backend%3A logic::f: output[0] is wrong")


TRANSLATED = """
import torch

def tripled(x):
    return x * 3

@torch.compiler.substitute_in_graph(tripled)
def polyfill(x):
    return x * FACTOR

f = torch.compile(lambda x: tripled(x) + 1, backend="eager")
print([f(torch.full((2,), float(n))).sum().item() for n in range(5)])
"""


@pytest.mark.parametrize(("factor", "code"), [("3", 0), ("3.5", 1)])
def test_whole_calls_are_compared_with_eager(tmp_path: Path, factor: str, code: int) -> None:
    (tmp_path / "p.py").write_text(TRANSLATED.replace("FACTOR", factor))
    got, out, err = finished((*VERB, "--shadow", "--no-localize", "p.py"), tmp_path)
    assert (got, out) == (code, f"{[2 * (float(factor) * n + 1) for n in range(5)]}\n"), err
    assert "3 calls compared from outside with eager" in err
    if code:
        assert finished((*VERB, "p.py"), tmp_path)[0] == 0  # no region shows it
        assert "output[0] is wrong" in err
        assert "(as Dynamo traced it)" in err


def test_a_suite_of_tests_warns_of_nothing_new(tmp_path: Path) -> None:
    (tmp_path / "test_it.py").write_text("import torch\ndef test():\n    torch.compile(torch.sin, backend='eager')\n")
    words = ("-m", "pytest", "-q", "-p", "no:cacheprovider", "-W", "error::pytest.PytestWarning")
    code, out, err = finished((*VERB, *words), tmp_path)
    assert "1 passed" in out, out + err
    assert "warning" not in out
    assert code == 2  # nothing compiled ran


FORKS = """
import multiprocessing, os, sys, threading, torch

def f(x):
    return x.sin() + 1

def work(ends=True):
    torch.compile(f, backend="eager")(torch.randn(3))
    if not ends:
        os._exit(0)

if __name__ == "__main__":
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    child = multiprocessing.get_context("fork").Process(target=work, args=(sys.argv[1] == "ends",))
    child.start()
    child.join()
"""


@pytest.mark.parametrize(("ends", "code"), [("ends", 0), ("dies", 2)])
def test_forks_and_threads_are_checked_and_one_that_dies_is_no_pass(tmp_path: Path, ends: str, code: int) -> None:
    (tmp_path / "forks.py").write_text(FORKS)
    got, _, err = finished((*VERB, "forks.py", ends), tmp_path)
    assert got == code, err
    if ends == "ends":
        assert "2 regions in 2 processes, 2 of 2 calls" in err
    else:
        assert "1 region, 1 of 1 call" in err
        assert "a process that compiled left no complete report" in err


@pytest.mark.parametrize("number", ["SIGTERM", "SIGSEGV"])
def test_what_was_found_is_told_of_a_program_that_ends_while_the_operator_is_looked_for(
    tmp_path: Path, number: str
) -> None:
    end = f"os.kill(os.getpid(), signal.{number})"
    patch = f"import os, signal\nfrom checked_backend import backends\nbackends.investigate = lambda *_: {end}\n"
    (tmp_path / "wrong.py").write_text(patch + WRONG)
    code, _, err = finished((*VERB, "--localize", "wrong.py"), tmp_path)
    assert code == -getattr(signal, number)
    assert "checked-backend: FAIL: f: output[0] is wrong" in err
    assert "missing   a process that compiled left no complete report" in err
    assert "not yet: this was written while the operator was looked for" in " ".join(err.split())
    folder = next((tmp_path / "checked_backend_reports").glob("run-*"))
    code, out, _ = finished((*VERB[:3], "report", folder, "--junit", "out.xml"), tmp_path)
    assert code == 1
    assert "output[0] is wrong" in out
    assert 'failures="1"' in (tmp_path / "out.xml").read_text()


RANKS = f"""
import os, signal, torch
from checked_backend import backends

{COMPILER_WITH_COSINE_FOR_SINE}
backends.investigate = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
torch.distributed.init_process_group("gloo")

@torch.compile(backend=wrong)
def f(x):
    return x.sin() + 1 if os.environ["RANK"] == os.environ["WRONG"] else x.tanh() + 1

torch.distributed.all_reduce(f(torch.arange(4.0)))
torch.distributed.destroy_process_group()
"""


@pytest.mark.parametrize("wrong", ["1", ""])
def test_what_one_rank_of_two_found_is_told_when_it_is_killed_while_the_operator_is_looked_for(
    tmp_path: Path, wrong: str
) -> None:
    (tmp_path / "ranks.py").write_text(RANKS)
    words = (*VERB, "--localize", "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "ranks.py")
    code, _, err = finished(words, tmp_path, {"WRONG": wrong})
    if not wrong:
        assert code == 0, err
        assert "checked-backend: PASS" in err
        return
    assert code == 1
    assert "checked-backend: FAIL: f: output[0] is wrong" in err
    assert "in f: return x.sin() + 1 if" in " ".join(err.split())
    assert "missing   a process that compiled left no complete report" in err
    assert "ranks.py (rank 1): 1 finding" in err


REPLACES_ITSELF = f"""
import os, sys, types
if "AGAIN" not in os.environ:
    os.execve(sys.executable, [sys.executable, "p.py"], {{**os.environ, "AGAIN": "1"}})
import threading
code = '''
import torch
{COMPILER_WITH_COSINE_FOR_SINE}
print(torch.compile(lambda x: x.sin() + 1, backend=wrong)(torch.arange(4.0)).tolist())
'''
thread = threading.Thread(target=exec, args=(code, {{}}))
thread.start()
thread.join()
"""


@pytest.mark.parametrize("last", ["", "1 / 0"])
def test_with_the_hook_the_environment_alone_is_enough(tmp_path: Path, installed: str, last: str) -> None:
    """It replaces itself, and imports torch in a thread. Its exit code is its own."""
    (tmp_path / "p.py").write_text(REPLACES_ITSELF + last)
    code, out, err = finished((installed, "p.py"), tmp_path, {"CHECKED_BACKEND": "1", "CHECKED_BACKEND_LOCALIZE": "0"})
    assert (code, out) == (1 if last else 0, f"{(torch.arange(4.0).cos() + 1).tolist()}\n")
    assert "checked-backend: FAIL" in err
    assert ("p.py: exit code 1, " in err) == bool(last)


@pytest.mark.parametrize(("flags", "value"), [((), None), ((), ""), ((), "0"), (("-E",), "1"), (("-I",), "1")])
def test_off_nothing_is_loaded(tmp_path: Path, installed: str, flags: tuple[str, ...], value: str | None) -> None:
    more = {"CHECKED_BACKEND_RUN": str(tmp_path / "run")} | ({} if value is None else {"CHECKED_BACKEND": value})
    program = "import sys; print([n for n in sys.modules if 'checked' in n], *map(type, sys.meta_path))"
    code, out, err = finished((installed, *flags, "-c", program), tmp_path, more)
    assert (code, "Autostart" in out, err) == (0, False, "")
    assert flags or out.startswith("[]")
    assert not list(tmp_path.iterdir())


def test_the_hook_is_written_and_removed_as_it_was_written(
    tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sysconfig, "get_path", lambda _name: str(tmp_path))
    monkeypatch.setenv("COLUMNS", "200")
    assert run("autostart", "--status") == (0, f"not installed in {tmp_path}\n", "")
    assert "no hook is installed" in run("doctor")[1]
    assert run("autostart", "--remove")[0] == 0
    for _ in range(2):
        assert run("autostart", "--install")[1] == f"installed in {tmp_path}\n"
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == FILES
    (tmp_path / "checked_backend.start").unlink()
    assert run("autostart", "--status")[1] == f"checked_backend.start is missing in {tmp_path}\n"
    assert run("autostart", "--remove")[1] == f"not installed in {tmp_path}\n"
    assert not list(tmp_path.iterdir())
    (tmp_path / "checked_backend.start").write_text("mine:start")
    for verb in ("--install", "--remove"):
        code, _, err = run("autostart", verb)
        assert (code, "has not written this" in err) == (3, True)
    assert [path.name for path in tmp_path.iterdir()] == ["checked_backend.start"]
    assert run("autostart")[0] == run("autostart", "--install", "--remove")[0] == 3


def test_on_imports_no_torch_and_says_nothing_of_a_program_without_it(tmp_path: Path, installed: str) -> None:
    program = "import sys; print([name for name in ('torch', 'numpy', 'pydantic', 'rich') if name in sys.modules])"
    assert finished((installed, "-c", program), tmp_path, {"CHECKED_BACKEND": "1"}) == (0, "[]\n", "")
    code, _, err = finished((installed, "-c", "pass"), tmp_path, {"CHECKED_BACKEND": "maybe"})
    assert (code, err) == (0, "checked-backend: CHECKED_BACKEND got 'maybe'; expected 1 or 0. Nothing is checked\n")


@pytest.mark.parametrize(
    ("program", "code"),
    [
        ("", 2),
        ("import sys; sys.exit(3)", 3),
        ("raise SystemExit(4)", 4),
        ("import os; os._exit(5)", 5),
        ("1 / 0", 1),
        ("import os; os.kill(os.getpid(), 9)", -9),
        ("import os; os.kill(os.getpid(), 15)", -15),
        ("raise KeyboardInterrupt", -2),
    ],
)
def test_exit_codes_and_signals_pass_through(tmp_path: Path, program: str, code: int) -> None:
    (tmp_path / "p.py").write_text(program)
    got, out, err = finished((*VERB, "p.py"), tmp_path)
    assert (got, out) == (code, ""), err
    assert ("before it compiled anything" if code != 2 else "the program never called torch.compile") in err
    assert not list(tmp_path.glob("checked_backend_reports/*"))


def test_a_program_may_come_from_stdin(tmp_path: Path) -> None:
    code, out, err = finished((*VERB, "-", "word"), tmp_path, reads="import sys; print(sys.argv); sys.exit(3)")
    assert (code, out) == (3, "['-', 'word']\n"), err


WAITS = """
import os, sys, time
print(os.getpid(), flush=True)
try:
    time.sleep(60)
except KeyboardInterrupt:
    print("interrupted", flush=True)
    sys.exit(7)
"""


@pytest.mark.parametrize(
    ("number", "code", "said"), [("SIGINT", 7, "interrupted\n"), ("SIGTERM", -15, ""), ("SIGKILL", -9, "")]
)
@pytest.mark.skipif(sys.platform != "linux", reason="only Linux ends a child with its parent")
def test_a_signal_to_the_command_reaches_the_program(tmp_path: Path, number: str, code: int, said: str) -> None:
    (tmp_path / "p.py").write_text(WAITS)
    process = started((*VERB, "p.py"), tmp_path)
    program = int(process.stdout.readline())
    time.sleep(0.1)
    process.send_signal(getattr(signal, number))
    out, _ = process.communicate(timeout=60)
    assert (process.returncode, out) == (code, said)
    for _ in range(100):
        if not Path(f"/proc/{program}").exists():
            break
        time.sleep(0.1)
    assert not Path(f"/proc/{program}").exists()


MISUSE = {
    "option 'every' got 0": ("--every", "0", "p.py"),
    "q.py: there is no such program": ("q.py",),
    "ls: there is no such program; a command is run by its module": ("ls",),
    "'every' checks every n-th call, 'budget' as many as a share of the time": (
        *("--every", "2", "--budget", "0.1", "p.py"),
    ),
    "option 'ignore' got 'structur.stride'": ("--ignore", "structur.stride", "p.py"),
    "Did you mean 'alias'?": ("--ignore", "alais", "p.py"),
    "option 'compiler' got 'indctor', which is no Dynamo backend here. Did you mean 'inductor'?": (
        *("--compiler", "indctor", "p.py"),
    ),
    "If the program registers it: CHECKED_BACKEND_COMPILER=mine checked-backend run": (
        *("--compiler", "mine", "p.py"),
    ),
    "--json-file: there is no folder nowhere": ("--json-file", "nowhere/x.json", "p.py"),
}


@pytest.mark.parametrize("said", MISUSE)
def test_misuse_is_told_and_runs_nothing(tmp_path: Path, said: str, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")
    (tmp_path / "p.py").write_text("open('ran', 'w')")
    code, out, err = run("run", *MISUSE[said])
    assert (code, out) == (3, "")
    assert said in " ".join(err.split())
    assert "CHECKED_BACKEND_IGNORE" not in err
    assert not (tmp_path / "ran").exists()
    assert not list(tmp_path.glob("*/run-*"))
