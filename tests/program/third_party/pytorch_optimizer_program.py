"""Optimizers of pytorch_optimizer that compile their steps."""

import hashlib

import torch
from pytorch_optimizer import create_optimizer
from torch import nn

for name in ("lion", "adan", "stableadamw"):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 4))
    optimizer = create_optimizer(model, name, lr=1e-3, compile=True, compile_kwargs={"backend": "aot_eager"})
    for _ in range(3):
        loss = model(torch.randn(32, 8)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    weights = b"".join(value.numpy().tobytes() for value in model.state_dict().values())
    print(name, loss.item(), hashlib.sha256(weights).hexdigest())
