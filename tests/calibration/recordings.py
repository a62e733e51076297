"""Where ``compare`` should draw the line: pairs of recordings that differ honestly, and pairs with a planted fault.

``python -m tests.calibration.recordings FOLDER [PYTHON...]`` records the programs of `PROGRAMS` with their noise, then
again as they run elsewhere: with other vector instructions, more threads, another BLAS, and under each other Python
that is named (another torch). Each of these is to pass. Then with planted faults, each of which is to fail. The table
says for several thresholds how many honest pairs would be accused, and how many faults missed. The last one:

Torch 2.13, with 2.11 and 2.15 as the others, on a processor with AVX512: 84 honest pairs, 33 with a fault::

    factor  roundings  accused  missed
         1         16        6       2
         2         16        1       2  elu without vectors
         4          4        2       1  randn of attention and of reduction without vectors; 0.1 % in bfloat16
         4          8        0       2  1 % and 0.1 % in bfloat16, which are 2.6 and 0.26 roundings
         8          4        2       2
         8          8        0       2
         8         16        0       2
        32         32        0       2

So all faults in float32 are found with each of these, also 0.1 % and constants that are off by 0.1 % to 1 %.
"""

from __future__ import annotations

import argparse
import itertools
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from unittest import mock

from checked_backend.program import compare

FACTORS = (1.0, 2.0, 4.0, 8.0, 16.0, 32.0)

ROUNDINGS = (2.0, 4.0, 8.0, 16.0, 32.0)

_FRAME = """
import os, torch
from torch import nn
from torch.nn import functional as F

FAULT = os.environ.get("FAULT", "")

def backend(gm, inputs):
    calls = []
    def run(*args):
        calls.append(1)
        outputs = gm.forward(*args)
        by = dict(percent=1e-2, permille=1e-3).get(FAULT)
        if by is None or len(calls) != 2:
            return outputs
        return [o * (1 + by) if torch.is_tensor(o) and o.is_floating_point() else o for o in outputs]
    return run

def train(compiled, model, make):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for step in range(4):
        compiled(*make()).float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
"""

_EACH = """
torch._dynamo.reset()
torch.manual_seed(0)
{body}
def {name}(*inputs, model=model):
    return model(*inputs)
train(torch.compile({name}, backend=backend), model, make)
"""

PROGRAMS = {
    "linear": "model = nn.Linear(64, 64)\nmake = lambda: (torch.randn(32, 64),)",
    "mlp": "model = nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 8))\n"
    "if FAULT == 'constant': model[1] = nn.GELU(approximate='tanh')\nmake = lambda: (torch.randn(32, 64),)",
    "layernorm": "model = nn.Sequential(nn.Linear(64, 64), nn.LayerNorm(64), nn.Linear(64, 8))\n"
    "if FAULT == 'constant': model[1].eps = 1e-3\nmake = lambda: (torch.randn(32, 64),)",
    "batchnorm": "model = nn.Sequential(nn.Linear(64, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, 8))\n"
    "if FAULT == 'constant': model[1].eps = 1e-3\nmake = lambda: (torch.randn(32, 64),)",
    "conv": "model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.SiLU(), nn.Conv2d(8, 8, 3), nn.Flatten())\n"
    "make = lambda: (torch.randn(4, 3, 12, 12),)",
    "convnet": "model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.LeakyReLU(0.01), nn.AvgPool2d(2), "
    "nn.Flatten(), nn.Linear(200, 4))\nif FAULT == 'constant': model[2].negative_slope = 0.011\n"
    "make = lambda: (torch.randn(4, 3, 12, 12),)",
    "attention": "model = nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True)\n"
    "if FAULT == 'constant': model.norm1.eps = 1e-3\nmake = lambda: (torch.randn(4, 16, 32),)",
    "embedding": "class Net(nn.Module):\n    def __init__(self):\n        super().__init__()\n"
    "        self.table, self.head = nn.Embedding(50, 32), nn.Linear(32, 50)\n"
    "        self.scale = 1.01 if FAULT == 'constant' else 1.0\n"
    "    def forward(self, words):\n        return F.log_softmax(self.head(self.table(words)) * self.scale, -1)\n"
    "model = Net()\nmake = lambda: (torch.randint(50, (8, 16)),)",
    "reduction": "class Net(nn.Module):\n    def __init__(self):\n        super().__init__()\n"
    "        self.weight = nn.Parameter(torch.randn(4096))\n"
    "    def forward(self, x):\n        return (x * self.weight).sum(-1) / (1000 if FAULT == 'constant' else 1001)\n"
    "model = Net()\nmake = lambda: (torch.randn(16, 4096),)",
    "elu": "model = nn.Sequential(nn.Linear(32, 64), nn.ELU(), nn.Linear(64, 64), nn.Softplus(), nn.Linear(64, 1))\n"
    "if FAULT == 'constant': model[1].alpha = 1.01\nmake = lambda: (torch.randn(32, 32),)",
    "bfloat16": "model = nn.Sequential(nn.Linear(64, 128), nn.SiLU(), nn.Linear(128, 8)).bfloat16()\n"
    "make = lambda: (torch.randn(32, 64).bfloat16(),)",
    "recurrent": "class Net(nn.Module):\n    def __init__(self):\n        super().__init__()\n"
    "        self.cell = nn.Linear(64, 32)\n"
    "    def forward(self, x):\n        state = torch.zeros(x.shape[0], 32)\n"
    "        for one in x.unbind(1):\n            state = torch.tanh(self.cell(torch.cat((one, state), -1)))\n"
    "        return state * (1.01 if FAULT == 'constant' else 1)\n"
    "model = Net()\nmake = lambda: (torch.randn(8, 6, 32),)",
}

HONEST = {
    "again": {},
    "no vectors": {"ATEN_CPU_CAPABILITY": "default"},
    "avx2": {"ATEN_CPU_CAPABILITY": "avx2"},
    "threads": {"OMP_NUM_THREADS": "2"},
    "other BLAS": {"MKL_CBWR": "COMPATIBLE", "ONEDNN_MAX_CPU_ISA": "SSE41", "MKL_ENABLE_INSTRUCTIONS": "SSE4_2"},
}

FAULTS = ("percent", "permille", "constant")


def record(python: str, program: Path, into: Path, noise: int, more: dict[str, str]) -> bool:
    """Record a program; True if that went well, or was done before."""
    if (into / "done").exists():
        return True
    words = (python, "-m", "checked_backend", "record", "--out", into, "--noise-runs", noise, "--", python, program)
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "FAULT": "", **more}
    done = subprocess.run([str(word) for word in words], env=environment, capture_output=True, timeout=300)
    if done.returncode == 0:
        (into / "done").touch()
    else:
        print(into, done.stderr.decode()[-500:], file=sys.stderr)
    return done.returncode == 0


def runs(folder: Path, pythons: Sequence[str]) -> Iterator[tuple[str, bool, Path]]:
    """The name of each second recording, whether it differs honestly, and its folder. The first is beside them."""
    folder.mkdir(parents=True, exist_ok=True)
    program = folder / "programs.py"
    program.write_text(_FRAME + "".join(_EACH.format(name=name, body=body) for name, body in PROGRAMS.items()))
    if not record(sys.executable, program, folder / "first", 2, {}):
        raise SystemExit("the first recording failed")
    others = [(f"torch {number}", python, {}) for number, python in enumerate(pythons, 1)]
    for label, python, more in [*((label, sys.executable, more) for label, more in HONEST.items()), *others]:
        if record(python, program, folder / label.replace(" ", "-"), 0, more):
            yield label, True, folder / label.replace(" ", "-")
    for fault in FAULTS:
        if record(sys.executable, program, folder / fault, 0, {"FAULT": fault}):
            yield fault, False, folder / fault


def failing(first: Path, second: Path, factor: float, roundings: float) -> set[str]:
    """The programs that thresholds tell apart."""
    with mock.patch.multiple(compare, FACTOR=factor, ROUNDINGS=roundings):
        report = compare.compare_recordings(first, second)
    return {str(finding.region).split(" ")[0] for finding in report.findings if finding.kind.fails}


def table(first: Path, found: Sequence[tuple[str, bool, Path]]) -> str:
    """For each threshold: honest pairs accused, and faults missed, with their names."""
    constant = {name for name, body in PROGRAMS.items() if "'constant'" in body}
    cases = [(name, label, honest) for label, honest, _ in found for name in PROGRAMS]
    cases = [case for case in cases if case[1] != "constant" or case[0] in constant]
    number = sum(honest for _, _, honest in cases)
    lines = [f"{number} honest pairs, {len(cases) - number} with a fault", "factor  roundings  accused  missed"]
    for factor, roundings in itertools.product(FACTORS, ROUNDINGS):
        told = {label: failing(first, folder, factor, roundings) for label, _, folder in found}
        accused = [f"{name} ({label})" for name, label, honest in cases if honest and name in told[label]]
        missed = [f"{name} ({label})" for name, label, honest in cases if not honest and name not in told[label]]
        names = ", ".join([*accused, *missed])
        lines.append(f"{factor:>6g}  {roundings:>9g}  {len(accused):>7}  {len(missed):>6}  {names}")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("pythons", nargs="*", help="Pythons with another torch, this package on their path")
    given = parser.parse_args()
    print(table(given.folder / "first", list(runs(given.folder, given.pythons))))


if __name__ == "__main__":
    main()
