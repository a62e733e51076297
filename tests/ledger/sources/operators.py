"""A sample of torch's operator database, under ``check`` and under ``debug_interpreter``."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from itertools import islice
from typing import Any

import torch

from tests.ledger.answer import Answers, Case, of_error, of_report
from tests.op_db.check import DTYPES, check_sample
from tests.op_db.entries import name_of, operators

EVERY = 12
QUICK = 6
SAMPLES = 2


def cases() -> Iterator[Case]:
    """The first samples of every so many operators."""
    for dtype, kind in DTYPES.items():
        for number, info in enumerate(operators(kind)[::EVERY]):
            if "empty" in info.name:  # what memory happens to hold is equal now and then
                continue
            yield Case(f"operators/{dtype}/{name_of(info)}", partial(_answers, info, dtype), quick=number % QUICK == 0)


def _answers(info: Any, dtype: str) -> Answers:
    gradients = dtype == "float32" and info.supports_autograd
    torch.manual_seed(0)
    samples = info.sample_inputs("cpu", DTYPES[dtype], requires_grad=gradients)
    answers = {}
    for number, sample in enumerate(islice(samples, SAMPLES)):
        try:
            answers[f"{number}"] = of_report(check_sample(info, sample, gradients=gradients))
        except Exception as error:
            answers[f"{number}"] = of_error(error)
    return answers
