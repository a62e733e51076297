"""Compute grouped matrix products (mixtures of experts) by ordinary ones, for dtypes that torch's kernel refuses."""

from __future__ import annotations

import torch


def grouped_mm(
    mat1: torch.Tensor,
    mat2: torch.Tensor,
    offs: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """The meaning of ``torch.nn.functional.grouped_mm`` in any floating dtype, and without a synchronisation.

    Args:
        mat1: Of shape (M, K), or (G, M, K).
        mat2: Of shape (K, N), or (G, K, N).
        offs: Where each of the G groups ends, shape (G,). The groups divide M if only ``mat2`` has three dimensions, N
            if only ``mat1`` has, and K if both matrices have two. None if both have three.
        bias: Not supported; torch itself does not support it on the CPU.
        out_dtype: Not used: the result has the dtype of the operands.

    Returns:
        Of shape (M, N), or (G, M, N) if both matrices have the same number of dimensions. Elements that belong to no
        group are zero; torch leaves them uninitialised.

    Raises:
        NotImplementedError: There is a bias.

    Source: `_grouped_mm_fallback` in ATen/native/GroupedMMUtils.h.
    """
    if bias is not None:
        raise NotImplementedError("grouped_mm with a bias")
    if offs is None:
        return torch.bmm(mat1, mat2)
    groups = offs.shape[0]
    if mat1.dim() == 2 and mat2.dim() == 2:
        group = _group_of(mat1.shape[1], offs)
        # Both operands are masked, because elements of other groups may be infinite or NaN.
        return torch.stack(
            [
                torch.where(group == number, mat1, 0) @ torch.where((group == number)[:, None], mat2, 0)
                for number in range(groups)
            ]
        )
    if mat1.dim() == 3:
        return grouped_mm(mat2.transpose(0, 1), mat1.transpose(1, 2), offs=offs).transpose(0, 1)
    group = _group_of(mat1.shape[0], offs)[:, None]
    result = mat1.new_zeros(mat1.shape[0], mat2.shape[2])
    for number in range(groups):
        rows = torch.where(group == number, mat1, 0)
        result = torch.where(group == number, rows @ mat2[number], result)
    return result


def _group_of(length: int, offs: torch.Tensor) -> torch.Tensor:
    """The group of each place along a dimension, as a tensor of shape (length,)."""
    places = torch.arange(length, device=offs.device)
    return (places[:, None] >= offs).sum(1)
