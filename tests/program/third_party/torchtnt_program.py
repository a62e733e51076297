"""An AutoUnit of torchtnt, which compiles its module in place, trained with gradient accumulation and clipping."""

import hashlib

import torch
from torch import nn
from torchtnt.framework.auto_unit import AutoUnit
from torchtnt.framework.train import train
from torchtnt.utils.prepare_module import TorchCompileParams


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 16), nn.LayerNorm(16), nn.SiLU(), nn.Linear(16, 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x)


class Unit(AutoUnit):
    def compute_loss(self, state, data):
        inputs, targets = data
        outputs = self.module(inputs)
        return (outputs - targets).square().mean(), outputs

    def configure_optimizers_and_lr_scheduler(self, module):
        return torch.optim.AdamW(module.parameters(), lr=1e-2), None


torch.manual_seed(0)
unit = Unit(
    module=Net(),
    device=torch.device("cpu"),
    gradient_accumulation_steps=2,
    clip_grad_norm=1.0,
    torch_compile_params=TorchCompileParams(backend="aot_eager"),
)
data = [(torch.randn(16, 8), torch.randn(16, 1)) for _ in range(4)]
train(unit, data, max_epochs=2)
print(hashlib.sha256(b"".join(value.numpy().tobytes() for value in unit.module.state_dict().values())).hexdigest())
