"""Hugging Face's Trainer, its compiled model checked against eager: one line more than without.

``Trainer`` refuses ``torch_compile_backend="numcheck"``, because accelerate knows a closed list of names. A program of
yours needs no line at all with ``checked-backend run train.py``, where ``torch_compile=True`` is all it has to say.

Run it as ``python examples/trainer.py [STEPS]``. It needs transformers and accelerate, and downloads nothing.
"""

import sys
import tempfile

import torch
from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainingArguments

import checked_backend as cb
from checked_backend.integrations.accelerate import use_numcheck


class Sentences(torch.utils.data.Dataset):
    """Random words; the label says whether the first is even."""

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        words = torch.randint(0, 100, (16,), generator=torch.Generator().manual_seed(index))
        return {"input_ids": words, "attention_mask": torch.ones(16, dtype=torch.long), "labels": words[0] % 2}


def main(steps: int = 4, backend: str = "inductor") -> cb.Report:
    """Train a small BERT, checked."""
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=100, hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64
    )
    with tempfile.TemporaryDirectory() as folder, cb.collect() as session:
        arguments = TrainingArguments(
            folder,
            max_steps=steps,
            per_device_train_batch_size=8,
            torch_compile=True,
            torch_compile_backend=backend,
            use_cpu=True,
            report_to=[],
            save_strategy="no",
            disable_tqdm=True,
        )
        trainer = Trainer(BertForSequenceClassification(config), arguments, train_dataset=Sentences())
        use_numcheck(trainer.accelerator, {"on_divergence": "record"})
        trainer.train()
    return session.report


if __name__ == "__main__":
    print(main(*map(int, sys.argv[1:2])))
