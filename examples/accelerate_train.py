"""A training loop with accelerate, its compiled model checked against eager.

Run it as ``accelerate launch --cpu examples/accelerate_train.py [STEPS]``, or with python alone.
"""

import sys

import torch
from accelerate import Accelerator
from torch import nn

import checked_backend as cb
from checked_backend.integrations.accelerate import NumcheckPlugin


def main(steps: int = 8, backend: str = "inductor") -> cb.Report:
    """Train a small model, checked at every second call."""
    torch.manual_seed(0)
    plugin = NumcheckPlugin(backend=backend, check={"every": 2, "on_divergence": "record"})
    accelerator = Accelerator(cpu=True, dynamo_plugin=plugin)
    model = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.LayerNorm(64), nn.Linear(64, 1))
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
    with cb.collect(closing=False) as session:
        for _ in range(steps):
            optimizer.zero_grad()
            accelerator.backward(model(torch.randn(16, 32)).square().mean())
            optimizer.step()
    return session.report


if __name__ == "__main__":
    report = main(*map(int, sys.argv[1:2]))
    print(report)
    report.raise_for_verdict()
