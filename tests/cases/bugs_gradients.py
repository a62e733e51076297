"""Miscompiled backward passes."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from tests.cases import case, normal


@case("bug", "grad", train=True)
def multilabel_margin() -> tuple[Any, ...]:
    """Labels after the terminator count as label 0 (pytorch/pytorch#185464)."""
    target = torch.tensor([[2, 0, -1, 1, 1], [4, -1, 1, 3, 0]])
    return (lambda x: F.multilabel_margin_loss(x, target)), normal(2, 5).requires_grad_()
