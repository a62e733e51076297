"""Optimizers of heavyball, which compile their steps with a backend of their own."""

import hashlib

import heavyball
import torch
from torch import nn

for optimizer in (heavyball.SOAP, heavyball.Muon):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 4))
    opt = optimizer(model.parameters(), lr=3e-3)
    for _ in range(3):
        loss = model(torch.randn(32, 8)).square().mean()
        loss.backward()
        opt.step()
        opt.zero_grad()
    weights = b"".join(value.numpy().tobytes() for value in model.state_dict().values())
    print(optimizer.__name__, loss.item(), hashlib.sha256(weights).hexdigest())
