"""All cases, in order of their modules."""

from __future__ import annotations

from tests.cases import (
    Case,
    bugs_gradients,
    bugs_memory,
    bugs_pointwise,
    cases_in,
    noise_arithmetic,
    noise_discrete,
    noise_linear,
    noise_nets,
    nondeterministic,
)

ALL: tuple[Case, ...] = tuple(
    case
    for module in (
        bugs_memory,
        bugs_pointwise,
        bugs_gradients,
        noise_arithmetic,
        noise_discrete,
        noise_linear,
        noise_nets,
        nondeterministic,
    )
    for case in cases_in(module)
)
