from __future__ import annotations

import pytest
import torch

from checked_backend.numerics.structure import StructureDifference, compare_structure, significant_strides


@pytest.mark.parametrize(
    ("tensor", "expected"),
    [
        (torch.zeros(2, 3), ((0, 3), (1, 1))),
        (torch.zeros(2, 1, 3), ((0, 3), (2, 1))),
        (torch.zeros(3, 2).t(), ((0, 1), (1, 2))),
        (torch.zeros(0, 5), ()),
        (torch.zeros(()), ()),
        (torch.zeros(1, 1), ()),
        (torch.zeros(3).expand(2, 3), ((0, 0), (1, 1))),
    ],
)
def test_significant_strides(tensor, expected):
    assert significant_strides(tensor) == expected


def aspects(reference, candidate):
    return [difference.aspect for difference in compare_structure(reference=reference, candidate=candidate)]


def test_same_structure():
    x = torch.randn(2, 3)
    assert compare_structure(reference=x, candidate=x.clone()) == ()
    assert compare_structure(reference=None, candidate=None) == ()
    assert compare_structure(reference=3, candidate=4) == ()
    assert aspects(x, torch.nn.Parameter(x, requires_grad=False)) == []


def test_strides_of_size_one_and_empty_do_not_matter():
    assert aspects(torch.zeros(2, 1, 3), torch.zeros(2, 3, 1).transpose(1, 2)) == []
    assert aspects(torch.zeros(1, 4).as_strided((1, 4), (99, 1)), torch.zeros(1, 4)) == []
    assert aspects(torch.zeros(0, 4), torch.zeros(4, 0).t()) == []


def test_pending_conjugation_and_negation_do_not_matter():
    x = torch.randn(3, dtype=torch.complex64)
    assert aspects(x, x.conj()) == []
    assert aspects(x.imag, x.conj().imag) == []


@pytest.mark.parametrize(
    ("reference", "candidate", "expected"),
    [
        (None, torch.zeros(1), ["type"]),
        (torch.zeros(1), 1.0, ["type"]),
        (torch.zeros(2), torch.zeros(2, dtype=torch.float64), ["dtype"]),
        (torch.zeros(2, 3), torch.zeros(3, 2), ["shape"]),
        (torch.zeros(2), torch.zeros(2, device="meta"), ["device"]),
        (torch.zeros(2, 2), torch.zeros(2, 2).to_sparse(), ["layout"]),
        (torch.zeros(2, 3), torch.zeros(3, 2).t(), ["stride"]),
        (torch.zeros(2), torch.zeros(2, requires_grad=True), ["requires_grad"]),
        (
            torch.zeros(2, 3),
            torch.zeros(3, 2, dtype=torch.float64, device="meta").t().requires_grad_(),
            ["dtype", "device", "stride", "requires_grad"],
        ),
    ],
)
def test_differences_in_order(reference, candidate, expected):
    assert aspects(reference, candidate) == expected


def test_message():
    differences = compare_structure(reference=torch.zeros(2, 3), candidate=torch.zeros(3, 2).t())
    assert differences == (StructureDifference("stride", "(3, 1)", "(1, 2)"),)
    assert str(differences[0]) == "stride: expected (3, 1), got (1, 2)"


def test_subclass_is_another_type():
    class Tagged(torch.Tensor):
        pass

    (difference,) = compare_structure(reference=torch.zeros(1), candidate=torch.zeros(1).as_subclass(Tagged))
    assert (difference.aspect, difference.expected) == ("type", "Tensor")
    assert difference.actual.endswith("Tagged")
