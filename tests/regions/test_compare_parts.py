"""Sparse tensors are compared by what they store; outputs by the memory and the objects that they share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from checked_backend.regions.compare_parts import Part, compare_aliasing, compare_parts, value_pairs
from checked_backend.regions.execution import COMPRESSED, compressed_indices, flat_tensors

pytestmark = pytest.mark.filterwarnings("ignore:Sparse")

LAYOUTS = sorted([*COMPRESSED, torch.sparse_coo], key=str)


def dense() -> torch.Tensor:
    return torch.arange(16.0).reshape(4, 4) * torch.tensor([[1.0, 1, 0, 0], [1, 1, 0, 0], [0, 0, 1, 1], [0, 0, 1, 1]])


def in_layout(plain: torch.Tensor, layout: torch.layout) -> torch.Tensor:
    blocks: dict[str, Any] = {"blocksize": (2, 2)} if layout in (torch.sparse_bsr, torch.sparse_bsc) else {}
    return plain.to_sparse(layout=layout, **blocks)


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("batch", [False, True], ids=["matrix", "batch"])
def test_equal_sparse_tensors_have_values_to_compare(layout: torch.layout, batch: bool) -> None:
    plain = torch.stack([dense(), dense() * 2]) if batch else dense()
    part = Part("output[0]", in_layout(plain, layout), in_layout(plain.clone(), layout))
    assert list(compare_parts([part])) == []
    ((_, name, reference, candidate),) = value_pairs([part], frozenset())
    assert (name, reference.layout) == ("output[0]", torch.strided)
    assert reference.sum() == plain.sum()
    assert torch.equal(reference, candidate)


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_other_stored_places_are_told(layout: torch.layout) -> None:
    moved = torch.zeros(4, 4)
    moved[0, 2] = moved[3, 3] = 1.0
    (finding,) = compare_parts([Part("output[0]", in_layout(dense(), layout), in_layout(moved, layout))])
    assert (finding.detail, finding.subject) == ("structure.indices", "output[0]")
    assert {torch.sparse_bsr: "(0, 0)", torch.sparse_bsc: "(0, 0)"}.get(layout, "(0, 1)") in str(finding.expected)
    assert str(finding.actual).startswith("2 places")
    assert {torch.sparse_bsr: "(0, 1)", torch.sparse_bsc: "(0, 1)"}.get(layout, "(0, 2)") in str(finding.actual)


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_a_sparse_tensor_for_a_dense_one_is_a_difference_of_layout(layout: torch.layout) -> None:
    found = {finding.detail for finding in compare_parts([Part("output[0]", dense(), in_layout(dense(), layout))])}
    assert "structure.layout" in found


@pytest.mark.parametrize("layout", sorted(COMPRESSED, key=str), ids=str)
def test_compressed_indices_make_the_tensor_again(layout: torch.layout) -> None:
    sparse = in_layout(dense(), layout)
    made: Callable[..., torch.Tensor] = torch.sparse_compressed_tensor
    again = made(*compressed_indices(sparse), sparse.values(), sparse.shape, layout=layout)
    assert torch.equal(again.to_dense(), dense())


@pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="torch was built without oneDNN")
def test_a_tensor_in_onednns_layout_is_compared_as_a_plain_one() -> None:
    (plain,) = flat_tensors("x", dense().to_mkldnn()).values()
    assert torch.equal(plain, dense())


@pytest.mark.parametrize("lost", [lambda value: value.view_as(value), torch.empty_like])
def test_lost_identity_of_an_empty_tensor(lost: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Nothing tells an empty tensor's memory from another's, but its shape may be changed in place."""

    def outputs(value: torch.Tensor, other: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"output[0]": value, "output[1]": other}

    empty = torch.empty(0, 3)
    for expected, actual in ((empty, lost(empty)), (lost(empty), empty)):
        (finding,) = compare_aliasing(outputs(empty, expected), {}, outputs(empty, actual), {})
        assert finding.detail == "alias.identity"
    assert not [*compare_aliasing(outputs(empty, lost(empty)), {}, outputs(empty, torch.empty_like(empty)), {})]
    full = torch.ones(2, 3)
    (finding,) = compare_aliasing(outputs(full, full), {}, outputs(full, full.clone()), {})
    assert finding.detail == "alias.memory"
