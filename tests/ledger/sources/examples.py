"""Every example, run as its first lines say, with a compiler that is quick: the exit code, and what its reports say."""

from __future__ import annotations

import runpy
import sys
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

import checked_backend as cb
from tests.ledger.answer import Answers, Case, of_report, one
from tests.support.started_programs import started

EXAMPLES = Path(__file__).resolve().parents[3] / "examples"
_PYTHON, _PYTEST = (sys.executable,), (sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "--rootdir", ".")
_RANKS = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")
_LAUNCH = ("-m", "accelerate.commands.launch", "--cpu", "--num_processes", "1")
_QUICKLY = {"CHECKED_BACKEND_COMPILER": "aot_eager"}

IN_PROCESS: Mapping[str, Callable[[Callable[..., cb.Report]], cb.Report]] = MappingProxyType(
    {
        "trainer.py": lambda main: main(1, "aot_eager"),
        "accelerate_train.py": lambda main: main(2, "aot_eager"),
        "lightning_train.py": lambda main: main(2, "aot_eager"),
        "custom_operator.py": lambda main: main(),
        "compiler_author.py": lambda main: main(),
    }
)
"""Those whose ``main`` returns a report."""

STARTED: Mapping[str, tuple[Any, ...]] = MappingProxyType(
    {
        "quickstart.py": (*_PYTHON, EXAMPLES / "quickstart.py"),
        "accelerate launch": (*_PYTHON, *_LAUNCH, EXAMPLES / "accelerate_train.py", "4"),
        "fsdp2_train.py": (*_PYTHON, *_RANKS, EXAMPLES / "fsdp2_train.py", "--training.steps", "2"),
        "library": (*_PYTEST, "--numcheck=aot_eager", EXAMPLES / "library"),
        "health.py": (*_PYTHON, EXAMPLES / "health.py"),
        "torch_upgrade.sh": ("sh", EXAMPLES / "torch_upgrade.sh", sys.executable, sys.executable, "train.py"),
        "compare_tools.py": (*_PYTHON, EXAMPLES / "compare_tools.py"),
    }
)
"""Those that are programs, but for ``fuzz_in_a_test.py``: how many programs are drawn there depends on time."""

_TRAIN = """
import torch
torch.manual_seed(0)
f = torch.compile(lambda x: (x.softmax(0) * 3).sum(), backend="aot_eager")
for _ in range(3):
    f(torch.randn(9, requires_grad=True)).backward()
"""


def cases() -> Iterator[Case]:
    for name, call in IN_PROCESS.items():
        yield Case(f"examples/{name}", partial(_returned, name, call), quick=name == "custom_operator.py")
    for name, words in STARTED.items():
        yield Case(f"examples/{name}", partial(_ended, words), seconds=900)
    yield Case("examples/read_report.py", _read)


def _returned(name: str, call: Callable[[Callable[..., cb.Report]], cb.Report]) -> Answers:
    return one(of_report(call(runpy.run_path(str(EXAMPLES / name), run_name="example")["main"])))


def _ended(words: tuple[Any, ...]) -> Answers:
    Path("train.py").write_text(_TRAIN)
    process = started(words, Path.cwd(), {} if "compare_tools" in str(words) else _QUICKLY)
    process.communicate()
    reports = [cb.Report.from_json(path.read_text()) for path in Path.cwd().glob("checked_backend_reports/*.json")]
    answers = [of_report(report, localized=True) for report in reports]
    return one(
        {
            "verdict": f"exit {process.returncode}",
            "findings": sorted({tuple(row) for answer in answers for row in answer["findings"]}),
            "where": sorted({tuple(row) for answer in answers for row in answer["where"]}),
        }
    )


def _read() -> Answers:
    """What it reads of the report of another example."""
    runpy.run_path(str(EXAMPLES / "compiler_author.py"), run_name="example")["main"]()
    lines = runpy.run_path(str(EXAMPLES / "read_report.py"), run_name="example")["main"](Path.cwd())
    found = [line.partition(": ")[2].partition(" at ")[0].split(" ", 1) for line in lines]
    return one({"verdict": "reads", "findings": sorted([kind, kind, subject] for kind, subject in found)})
