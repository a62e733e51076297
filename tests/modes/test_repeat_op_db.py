"""Under a mode that perturbs nothing, operators and their gradients have the same bits as without any."""

from __future__ import annotations

from contextlib import ExitStack

import pytest
import torch
from torch.testing._internal.common_methods_invocations import op_db
from torch.utils._pytree import tree_leaves, tree_map

from checked_backend.modes.choice_tape import ChoiceTape, RecordChoices
from checked_backend.modes.monte_carlo import PoisonMode
from checked_backend.modes.random_tape import RandomTape, RecordRandom

SAMPLES = 3
# Torch's own code asks whether a dispatch mode is active, and then computes otherwise (``isTensorSubclassLike``). So a
# check runs eager once more without any mode where a control run differs.
ASKS_FOR_MODES = frozenset({
    "masked_fill", "norm", "prod", "fft.hfft2", "fft.hfftn", "linalg.cond", "linalg.eigvalsh", "linalg.lstsq",
    "linalg.svdvals",
})  # fmt: skip
UNINITIALISED = frozenset({"empty", "empty_like", "empty_strided", "empty_permuted", "new_empty", "new_empty_strided"})
QUICK = ("nn.functional.silu", "nn.functional.mish", "nn.functional.gelu", "nn.functional.channel_shuffle", "softmax",
         "nn.functional.layer_norm", "addmm", "histc")  # fmt: skip


def copied(value):
    if isinstance(value, torch.Tensor) and value.layout is torch.strided:
        return value.detach().clone().requires_grad_(value.requires_grad)
    return value


def run(op, sample, modes, inference):
    """Results and gradients."""
    torch.manual_seed(3)
    inputs, args, kwargs = tree_map(copied, (sample.input, tuple(sample.args), dict(sample.kwargs)))
    leaves = [leaf for leaf in tree_leaves((inputs, args, kwargs)) if getattr(leaf, "requires_grad", False)]
    with ExitStack() as stack:
        for mode in modes:
            stack.enter_context(mode)
        if inference:
            stack.enter_context(torch.inference_mode())
        results = [one for one in tree_leaves(op.op(inputs, *args, **kwargs)) if isinstance(one, torch.Tensor)]
        hanging = [one for one in results if one.requires_grad]
        if hanging and leaves and not inference:
            incoming = [(torch.arange(one.numel()).view(one.shape) * 0.37 + 0.1).sin().to(one.dtype) for one in hanging]
            found = torch.autograd.grad(hanging, leaves, incoming, allow_unused=True)
            results += [one for one in found if one is not None]
    return results


def bits(tensor):
    tensor = tensor.detach().to_dense() if tensor.layout is not torch.strided else tensor.detach()
    tensor = torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor
    return torch.stack([tensor.nan_to_num(7.0).double(), tensor.signbit() & (tensor == tensor)])


def same(one, other):
    return len(one) == len(other) and all(map(torch.equal, map(bits, one), map(bits, other)))


def differing(op):
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        if dtype not in op.supported_dtypes("cpu"):
            continue
        samples = list(op.sample_inputs("cpu", dtype, requires_grad=op.supports_autograd and dtype.is_floating_point))
        for number, sample in enumerate(samples[:SAMPLES]):
            for inference in (False, True):
                try:
                    plain, again = (run(op, sample, (), inference) for _ in range(2))
                except (RuntimeError, NotImplementedError, TypeError, ValueError):
                    continue  # in place on a leaf, or a gradient that is not there
                modes = RecordRandom(RandomTape()), RecordChoices(ChoiceTape()), PoisonMode(1)
                if same(plain, again) and not same(plain, run(op, sample, modes, inference)):
                    yield f"{dtype} sample {number}{' under inference mode' if inference else ''}"


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", QUICK)
def test_modes_change_no_bit(name):
    assert [found for op in op_db if op.name == name for found in differing(op)] == []


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", sorted({op.name for op in op_db} - UNINITIALISED))
def test_modes_change_no_bit_of_any_operator(name):
    found = [found for op in op_db if op.name == name for found in differing(op)]
    assert name in ASKS_FOR_MODES or found == []
