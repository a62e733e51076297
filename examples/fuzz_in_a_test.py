"""Random programs in a test of your own compiler: Hypothesis draws them, and keeps those that failed.

Run it as ``pytest examples/fuzz_in_a_test.py``. It needs ``pip install 'checked-backend[fuzz]'``.
"""

from collections.abc import Callable, Sequence
from typing import Any

from hypothesis import HealthCheck, Phase, given, settings
from torch import fx

from checked_backend.fuzz.program import FuzzProgram
from checked_backend.fuzz.strategies import assert_passes, programs


def my_compiler(gm: fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
    """Your compiler. This one changes nothing."""
    return gm.forward


@settings(
    max_examples=25,
    deadline=None,
    phases=[Phase.reuse, Phase.generate],  # assert_passes makes a failing program smaller
    suppress_health_check=[HealthCheck.too_slow],
)
@given(programs(longest=5))
def test_my_compiler(program: FuzzProgram) -> None:
    """Its results, their memory and their gradients are eager's."""
    assert_passes(program, my_compiler)
