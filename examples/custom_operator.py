"""For the author of a custom operator: a fake kernel that lies about its result, found before a compiler trusts it.

Dynamo and Inductor never run an operator to learn what it returns: they ask its fake kernel. This one forgets that the
real kernel transposes. Run it as ``python examples/custom_operator.py``.
"""

import torch

import checked_backend as cb


@torch.library.custom_op("example::swap", mutates_args=())
def swap(x: torch.Tensor) -> torch.Tensor:
    """The transposed matrix, as a copy."""
    return x.t().clone()


@swap.register_fake
def _lying(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)  # the truth: x.new_empty(x.shape[1], x.shape[0]), in x.t()'s strides


def program(x: torch.Tensor) -> torch.Tensor:
    """Uses it."""
    return swap(x.sin()) * 2


def main() -> cb.Report:
    """Run each node of the graph, and compare what is there with what was traced."""
    options = {"on_divergence": "record"}
    with cb.collect(closing=False) as session:
        torch.compile(program, backend="debug_interpreter", options=options)(torch.randn(3, 4))
    return session.report


if __name__ == "__main__":
    print(main())
