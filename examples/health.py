"""Leave numcheck on while a model trains: one line of JSON for each check, and TensorBoard's files if it is installed.

Run it as ``python examples/health.py [FOLDER]``.
"""

import importlib
import importlib.util
import json
import sys
from dataclasses import asdict
from pathlib import Path

import torch
from torch import nn

import checked_backend as cb


def main(folder: Path, steps: int = 20, compiler: str = "inductor") -> Path:
    """Train a small model, checked."""
    folder.mkdir(parents=True, exist_ok=True)
    lines = folder / "checks.jsonl"
    board = None
    if importlib.util.find_spec("tensorboard"):
        board = importlib.import_module("torch.utils.tensorboard").SummaryWriter(folder)

    def keep(record: cb.CheckRecord) -> None:
        with lines.open("a", encoding="utf-8") as file:
            file.write(json.dumps(asdict(record)) + "\n")
        if board is not None and record.ratio is not None:
            which = "gradients" if record.backward else "results"
            board.add_scalar(f"{record.region}/{which}, times their noise", record.ratio, record.call)
            board.add_scalar("share of time spent on checks", record.share, record.call)

    model = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    options = {"compiler": compiler, "on_divergence": "record"}
    compiled = torch.compile(model, backend="numcheck", options=options)
    with cb.on_check(keep):
        for _ in range(steps):
            loss = compiled(torch.randn(16, 32)).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    if board is not None:
        board.close()
    return lines


if __name__ == "__main__":
    print(main(Path(sys.argv[1] if len(sys.argv) > 1 else "health")))
