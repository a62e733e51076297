"""The state around a region that a run of it may depend on or leave changed: random streams, autocast, grad mode."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from checked_backend._torch.autograd import has_saved_tensor_hooks, saved_tensor_hooks_lifted, transforms_unharmed
from checked_backend.random_state import HostRandom
from checked_backend.regions.process_state import MODES, ProcessState

_TASKS = Path("/proc/self/task")


@dataclass(frozen=True, slots=True)
class RngState:
    """The states of the global random generators that a region can draw from.

    An operator that the user wrote in Python may draw from Python's and NumPy's.
    """

    cpu: torch.Tensor
    cuda: Mapping[int, torch.Tensor] = field(default_factory=dict)
    host: HostRandom = field(default_factory=HostRandom.capture)

    @classmethod
    def capture(cls, cuda_devices: Sequence[int] = ()) -> RngState:
        """Copy the current states of the CPU's generator and of these CUDA devices' generators."""
        return cls(torch.get_rng_state(), {index: torch.cuda.get_rng_state(index) for index in cuda_devices})

    @classmethod
    def of_process(cls) -> RngState:
        """Copy the current states of the CPU's generator and, where CUDA is in use, of those of all its devices."""
        return cls.capture(range(torch.cuda.device_count()) if torch.cuda.is_initialized() else ())

    @classmethod
    def for_inputs(cls, inputs: Sequence[Any]) -> RngState:
        """Copy the current states of the CPU's generator and of those of the inputs' CUDA devices."""
        devices = {value.device.index or 0 for value in inputs if isinstance(value, torch.Tensor) and value.is_cuda}
        return cls.capture(sorted(devices))

    def now(self) -> RngState:
        """Copy the current states of the same generators."""
        return RngState.capture(tuple(self.cuda))

    def restore(self) -> None:
        """Set the generators back to these states."""
        torch.set_rng_state(self.cpu)
        for index, state in self.cuda.items():
            torch.cuda.set_rng_state(state, index)
        self.host.restore()

    def reseeded(self, seed: int) -> RngState:
        """States of the same generators, from which torch's give other random numbers."""
        return RngState(
            torch.Generator().manual_seed(seed).get_state(),
            {index: torch.Generator(f"cuda:{index}").manual_seed(seed).get_state() for index in self.cuda},
            self.host,
        )

    def same_as(self, other: RngState) -> bool:
        """Whether torch's next random numbers would be the same."""
        return torch.equal(self.cpu, other.cpu) and all(
            torch.equal(state, other.cuda[index]) for index, state in self.cuda.items()
        )


@dataclass(frozen=True, slots=True)
class TorchState:
    """Modes of a thread under which a region was called, so that it can be run again the same way later.

    A backward pass usually runs outside of the ``autocast`` block of its forward pass; a control run there must
    enter it again.

    Attributes:
        saved_tensor_hooks: Whether the user's were in force. `entered` leaves them out.
    """

    modes: ProcessState
    saved_tensor_hooks: bool

    @classmethod
    def capture(cls) -> TorchState:
        """Read the modes of this thread."""
        return cls(ProcessState.capture(MODES), has_saved_tensor_hooks())

    @property
    def autocast(self) -> dict[str, torch.dtype]:
        """The dtypes of autocast, by kind of device, where it is on."""
        casts = ((name.partition(".")[2], value) for name, value in self.modes.values.items() if "autocast." in name)
        return {kind: dtype for kind, (enabled, dtype) in casts if enabled}

    @contextmanager
    def entered(self) -> Iterator[None]:
        """Run a block under these modes and leave the thread as it was, also after an exception.

        The user's saved-tensor hooks are not in force inside, and the autocast weight cache is off: it would keep a
        copy of every parameter until the user's own autocast block ends.
        """
        inference = self.modes.values["inference_mode"]
        same = torch.is_inference_mode_enabled() == inference
        with saved_tensor_hooks_lifted(), modes_restored(), nullcontext() if same else torch.inference_mode(inference):
            self.modes.restore()
            torch.set_autocast_cache_enabled(False)
            yield


@contextmanager
def modes_restored() -> Iterator[None]:
    """Undo what a traced graph does to autocast, grad mode and transforms when it raises between enter and exit."""
    before, cache = ProcessState.capture({*MODES, "autocast.nesting"}), torch.is_autocast_cache_enabled()
    try:
        with transforms_unharmed():
            yield
    finally:
        before.restore()
        torch.set_autocast_cache_enabled(cache)


def other_threads() -> dict[int, str]:
    """The operating system's text for how long each thread has run that Python knows, other than this one.

    That a thread is alive shows nothing: a pool's threads wait. So a thread is named on evidence only.

    Returns:
        The texts by the number of the thread; "" where the system tells none.
    """
    here = threading.get_ident()
    numbers = [thread.native_id for thread in threading.enumerate() if thread.ident != here]
    return {number: _run_time(number) for number in numbers if number is not None}


def _run_time(number: int) -> str:
    try:
        return (_TASKS / str(number) / "schedstat").read_text(encoding="ascii").split()[0]
    except (OSError, IndexError):
        return ""


@dataclass(frozen=True, slots=True)
class FinalRngStates:
    """The random states that both sides of a check left.

    The generators are the whole process's, so a thread that draws meanwhile makes the same difference.

    Attributes:
        others_ran: Whether another thread ran meanwhile.
    """

    reference: RngState
    candidate: RngState
    others_ran: bool
