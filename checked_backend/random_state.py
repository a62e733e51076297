"""Keep a program's streams of random numbers as they are while this package works.

Some packages that this one imports late draw random numbers at import.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class HostRandom:
    """The states of Python's and NumPy's global generators.

    Attributes:
        python: The state of the module ``random``.
        numpy: The state of ``numpy.random``; None if NumPy is not loaded, so that nothing was drawn from it.
    """

    python: Any
    numpy: Any

    @classmethod
    def capture(cls) -> HostRandom:
        """The current states."""
        numpy: Any = sys.modules.get("numpy.random")
        return cls(random.getstate(), None if numpy is None else numpy.get_state())

    def numpy_has_drawn(self, later: HostRandom) -> bool:
        """Whether the state of NumPy's generator is another one later."""
        if self.numpy is None or later.numpy is None:
            return False
        before, after = (tuple(map(str, (*s[:1], bytes(s[1]), *s[2:]))) for s in (self.numpy, later.numpy))
        return before != after

    def restore(self) -> None:
        """Set the generators back."""
        random.setstate(self.python)
        numpy: Any = sys.modules.get("numpy.random")
        if numpy is not None and self.numpy is not None:
            numpy.set_state(self.numpy)


@contextmanager
def random_untouched() -> Iterator[None]:
    """Restore the states of Python's, NumPy's and torch's generators after a block.

    This loads neither NumPy nor torch. Other threads that draw meanwhile will draw the same numbers again.
    """
    host = HostRandom.capture()
    torch: Any = sys.modules.get("torch")
    # while torch is being imported it has no generators yet
    cpu = torch.get_rng_state() if hasattr(torch, "get_rng_state") else None
    cuda = torch.cuda.get_rng_state_all() if cpu is not None and _cuda_is_used(torch) else None
    try:
        yield
    finally:
        host.restore()
        if cpu is not None:
            torch.set_rng_state(cpu)
        if cuda is not None:
            torch.cuda.set_rng_state_all(cuda)


def _cuda_is_used(torch: Any) -> bool:
    cuda = getattr(torch, "cuda", None)
    return cuda is not None and bool(cuda.is_initialized())
