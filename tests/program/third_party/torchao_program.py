"""Torchao's optimizers with quantized state, which compile the update of each parameter."""

import hashlib

import torch
from torch import nn
from torchao.optim import AdamW4bit, AdamW8bit

for optimizer in (AdamW8bit, AdamW4bit):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 64))
    optim = optimizer(model.parameters(), lr=1e-3)
    for _ in range(3):
        loss = model(torch.randn(32, 64)).square().mean()
        loss.backward()
        optim.step()
        optim.zero_grad()
    weights = b"".join(value.numpy().tobytes() for value in model.state_dict().values())
    print(optimizer.__name__, loss.item(), hashlib.sha256(weights).hexdigest())
