"""Lightning, its compiled model checked against eager, and the checks logged beside the loss.

Run it as ``python examples/lightning_train.py [STEPS]``. It needs lightning.
"""

import sys
import tempfile

import lightning
import torch
from lightning.pytorch.loggers import CSVLogger
from torch import nn

import checked_backend as cb
from checked_backend.integrations.lightning import NumcheckCallback


class Regression(lightning.LightningModule):
    """A small model, compiled by name."""

    def __init__(self, compiler: str) -> None:
        super().__init__()
        layers = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 1))
        options = {"compiler": compiler, "on_divergence": "record"}
        self.model = torch.compile(layers, backend="numcheck", options=options)

    def training_step(self, batch: list[torch.Tensor], _index: int) -> torch.Tensor:
        """The loss of one batch."""
        inputs, targets = batch
        loss = (self.model(inputs) - targets).square().mean()
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """One optimizer."""
        return torch.optim.AdamW(self.parameters())


def main(steps: int = 4, compiler: str = "inductor") -> cb.Report:
    """Fit it."""
    lightning.seed_everything(0, verbose=False)
    inputs = torch.randn(64, 16)
    data = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(inputs, inputs.sum(1, keepdim=True)), 16)
    checks = NumcheckCallback()
    with tempfile.TemporaryDirectory() as folder:
        trainer = lightning.Trainer(
            accelerator="cpu",
            max_steps=steps,
            callbacks=[checks],
            logger=CSVLogger(folder),
            log_every_n_steps=1,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        trainer.fit(Regression(compiler), data)
        print({name: float(value) for name, value in trainer.logged_metrics.items()})
    if checks.report is None:
        raise RuntimeError("nothing was fitted")
    return checks.report


if __name__ == "__main__":
    print(main(*map(int, sys.argv[1:2])))
