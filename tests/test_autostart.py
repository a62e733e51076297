"""Programs that are checked run as they do alone, whatever they do with their process."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from tests.support.program_texts import COMPILER_WITH_COSINE_FOR_SINE
from tests.support.started_programs import VERB, finished
from tests.support.warm_process import WarmPython

ROUGH = f"""
import contextlib, copy, io, os, pickle, sys
import torch

{COMPILER_WITH_COSINE_FOR_SINE}
def f(x):
    return x.sin() + 1

printed = io.StringIO()
with contextlib.redirect_stderr(printed), contextlib.redirect_stdout(printed):
    torch.compile(f, backend=wrong)(torch.arange(4.0))
print(repr(printed.getvalue()))

net = torch.compile(torch.nn.Linear(2, 2), backend="eager")
x = torch.ones(1, 2)
print([torch.equal(other(x), net(x)) for other in (copy.deepcopy(net), pickle.loads(pickle.dumps(net)))])
torch.save(net, "net.pt")
print(torch.compile(net._orig_mod, options={{"max_autotune": True}}).get_compiler_config()["max_autotune"])

os.mkdir("elsewhere")
os.chdir("elsewhere")
os.environ.clear()
print(torch.compile(lambda x: x.sin() * 2, backend=wrong)(torch.arange(4.0)).tolist())
sys.stderr.close()
print(torch.compile(lambda x: x.sin() * 3, backend=wrong)(torch.arange(4.0)).tolist())
sys.stderr = None
print(torch.compile(lambda x: x.sin() * 4, backend=wrong)(torch.arange(4.0)).tolist(), end="")
"""


@pytest.mark.process
def test_a_program_may_close_redirect_clear_and_copy_what_it_likes(tmp_path: Path, warm_python: WarmPython) -> None:
    plain, checked = tmp_path / "plain", tmp_path / "checked"
    for folder in (plain, checked):
        folder.mkdir()
        (folder / "p.py").write_text(ROUGH)
    alone = finished((sys.executable, "p.py"), plain)
    code, out, err = finished((*VERB, "p.py"), checked)
    assert (alone[0], code, out) == (0, 1, alone[1]), err
    assert "5 regions" in err
    assert "4 that fail" in err
    assert "repro" not in os.listdir(checked / "checked_backend_reports")  # --no-localize holds
    assert not list((checked / "elsewhere").iterdir())
    (checked / "loads.py").write_text(
        "import torch; print(torch.load('net.pt', weights_only=False)(torch.ones(1, 2)).shape)"
    )
    assert warm_python.run(checked / "loads.py", cwd=checked).stdout == "torch.Size([1, 2])\n"


LACKS = """
import sys
sys.modules["pydantic"] = None
import torch
print(torch.compile(lambda x: x.sin() + 1, backend="eager")(torch.zeros(2)).tolist())
"""


@pytest.mark.process
def test_a_python_that_cannot_check_runs_the_program_and_is_no_pass(tmp_path: Path) -> None:
    (tmp_path / "p.py").write_text(LACKS)
    code, out, err = finished((*VERB, "p.py"), tmp_path)
    assert (code, out) == (2, "[1.0, 1.0]\n"), err
    assert "INCONCLUSIVE: a process was not checked, its Python lacks something" in err
    assert "pydantic" in err


BY_NAME = f"""
import torch

{COMPILER_WITH_COSINE_FOR_SINE}
options = {{"compiler": wrong, "on_divergence": "record"}}
torch.compile(lambda x: x.sin() + 1, backend="numcheck", options=options)(torch.arange(4.0))
"""


@pytest.mark.process
def test_what_a_program_checks_by_itself_is_told(tmp_path: Path) -> None:
    (tmp_path / "p.py").write_text(BY_NAME)
    code, _, err = finished((*VERB, "p.py"), tmp_path)
    assert code == 1, err
    assert "checked-backend: FAIL" in err
