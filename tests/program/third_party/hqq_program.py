"""Quantized linear layers of hqq, which compile their forward pass."""

import hashlib

import torch
from hqq.core.quantize import BaseQuantizeConfig, HQQBackend, HQQLinear
from torch import nn

torch.manual_seed(0)
HQQLinear.set_backend(HQQBackend.PYTORCH_COMPILE)
config = BaseQuantizeConfig(nbits=4, group_size=64)
layers = [HQQLinear(nn.Linear(64, 64), config, compute_dtype=torch.float32, device="cpu") for _ in range(2)]
x = torch.randn(16, 64, requires_grad=True)
for _ in range(2):
    out = layers[1](layers[0](x).relu())
    out.square().mean().backward()
print(hashlib.sha256(out.detach().numpy().tobytes() + x.grad.numpy().tobytes()).hexdigest())
