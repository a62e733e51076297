"""Clean programs of linear algebra: ill-conditioned, iterative, or unique only up to a sign."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tests.cases import case, normal


def hilbert(size: int) -> Tensor:
    """The classic ill-conditioned matrix."""
    index = torch.arange(size, dtype=torch.float64)
    return (1 / (index[:, None] + index[None] + 1)).float()


def symmetric(size: int, seed: int = 0) -> Tensor:
    """A symmetric matrix."""
    matrix = normal(size, size, seed=seed)
    return matrix + matrix.t()


@case("noise")
def inverse_of_hilbert() -> tuple[Any, ...]:
    """Condition number 1e10: no digit of the inverse is right in either."""
    return (lambda x: torch.linalg.inv(torch.sin(x))), hilbert(8)


@case("noise")
def solve_ill_conditioned() -> tuple[Any, ...]:
    """Condition number 1e5."""
    return (lambda a, b: torch.linalg.solve(a * 1.1 + 1e-5 * torch.cos(a), b.exp())), hilbert(5), normal(5, 3)


@case("noise")
def determinant_of_nearly_singular() -> tuple[Any, ...]:
    """A determinant that is a rounding error, and its logarithm."""

    def fn(x: Tensor) -> tuple[Tensor, Tensor]:
        y = torch.tanh(x)
        y = torch.cat([y, (y[0] * 0.3 + y[1] * 0.7)[None]])
        return torch.det(y), torch.linalg.slogdet(y)[1]

    return fn, normal(5, 6)


@case("noise")
def eigenvectors() -> tuple[Any, ...]:
    """Eigenvectors are unique up to a sign only."""
    return (lambda x: torch.linalg.eigh(torch.tanh(x) + torch.tanh(x).t())), symmetric(12)


@case("noise")
def eigenvectors_of_equal_eigenvalues() -> tuple[Any, ...]:
    """In a space of equal eigenvalues any basis will do."""

    def fn(x: Tensor) -> Tensor:
        y = torch.linalg.qr(x.sin())[0]
        return torch.linalg.eigh(y @ torch.diag(torch.tensor([1.0, 1.0, 1.0, 2.0, 2.0, 3.0])) @ y.t())[1]

    return fn, normal(6, 6)


@case("noise")
def singular_vectors() -> tuple[Any, ...]:
    """Singular vectors of a matrix of low rank: the last ones are arbitrary."""

    def fn(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return torch.linalg.svd(torch.tanh(x) @ y, full_matrices=False)

    return fn, normal(16, 3), normal(3, 10, seed=1)


@case("noise")
def qr_of_dependent_columns() -> tuple[Any, ...]:
    """The last columns of Q are made of rounding errors."""

    def fn(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        return torch.linalg.qr((x.cos() @ y) * 1.3)

    return fn, normal(12, 3), normal(3, 6, seed=1)


@case("noise")
def cholesky_of_nearly_singular() -> tuple[Any, ...]:
    """A covariance of nearly equal rows plus a tiny multiple of one."""

    def fn(x: Tensor) -> Tensor:
        y = 1 + 0.01 * torch.sin(x)
        return torch.linalg.cholesky(y @ y.t() + 1e-3 * torch.eye(20))

    return fn, normal(20, 30)


@case("noise")
def least_squares() -> tuple[Any, ...]:
    """A polynomial fit of high degree."""

    def fn(x: Tensor, y: Tensor) -> Tensor:
        powers = torch.stack([(x * 0.99) ** k for k in range(8)], 1)
        return torch.linalg.solve(powers.t() @ powers, powers.t() @ y[:, None])

    return fn, torch.linspace(-1, 1, 50), normal(50)
