"""A module of tensordict, compiled: its inputs and results are TensorDicts."""

import hashlib

import torch
from tensordict import TensorDict
from tensordict.nn import TensorDictModule, TensorDictSequential
from torch import nn

torch.manual_seed(0)
net = TensorDictSequential(
    TensorDictModule(nn.Linear(4, 8), in_keys=["x"], out_keys=["hidden"]),
    TensorDictModule(nn.Sequential(nn.GELU(), nn.Linear(8, 1)), in_keys=["hidden"], out_keys=["value"]),
)
compiled = torch.compile(net, backend="aot_eager")
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
for _ in range(3):
    found = compiled(TensorDict({"x": torch.randn(6, 4)}, batch_size=[6]))
    loss = found["value"].square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
print(loss.item(), hashlib.sha256(b"".join(p.detach().numpy().tobytes() for p in net.parameters())).hexdigest())
