"""E3nn's spherical harmonics, which compile themselves in the mode inductor."""

import hashlib

import e3nn
import torch
from e3nn import o3
from torch import nn

e3nn.set_optimization_defaults(jit_mode="inductor")
torch.manual_seed(0)
harmonics = o3.SphericalHarmonics([0, 1, 2, 3], normalize=True, normalization="component")
weights = nn.Parameter(torch.randn(16, 4))
optimizer = torch.optim.Adam([weights], lr=1e-2)
for _ in range(3):
    points = torch.randn(32, 3, requires_grad=True)
    optimizer.zero_grad()
    (harmonics(points) @ weights).square().mean().backward()
    optimizer.step()
    print(hashlib.sha256(points.grad.numpy().tobytes() + weights.detach().numpy().tobytes()).hexdigest())
