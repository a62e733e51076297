"""Lightning: a module of the user's, compiled as a whole, trained and validated by the Trainer; it names no check."""

import logging
import tempfile

import lightning
import torch
from torch import nn

logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)


class Net(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.GELU(), nn.Linear(16, 1))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.layers(inputs)

    def training_step(self, batch: list[torch.Tensor], _index: int) -> torch.Tensor:
        inputs, targets = batch
        return (self(inputs) - targets).square().mean()

    def validation_step(self, batch: list[torch.Tensor], _index: int) -> None:
        """The loss of one batch, printed."""
        print(f"validation {self.training_step(batch, 0).item():.9g}")

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=0.01)


lightning.seed_everything(0, verbose=False)
inputs = torch.randn(32, 8)
data = torch.utils.data.TensorDataset(inputs, inputs.sum(1, keepdim=True))
net = Net()
with tempfile.TemporaryDirectory() as folder:
    trainer = lightning.Trainer(
        accelerator="cpu",
        max_epochs=2,
        default_root_dir=folder,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
    )
    trainer.fit(
        torch.compile(net),
        torch.utils.data.DataLoader(data, 8, shuffle=True),
        torch.utils.data.DataLoader(data, 16),
    )
print(*(f"{parameter.double().sum().item():.17g}" for parameter in net.parameters()))
