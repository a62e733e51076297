"""The exceptions of this package. Each message says what happened, where, and what to do."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from checked_backend.findings import Finding
    from checked_backend.report import Report

_NO_MEMORY = re.compile(r"can't allocate memory|^std::bad_alloc$|CUDA error: out of memory|_STATUS_ALLOC_FAILED")

_DEVICE_LOST = re.compile(
    r"(CUDA error|CUDA driver error|Triton Error \[CUDA\]): (unknown error|device-side assert|misaligned address"
    r"|an illegal (memory access|instruction)|invalid program counter|unspecified launch failure|hardware stack error"
    r"|operation not supported on global/shared address space|uncorrectable ECC error|the launch timed out)"
)
"""The errors after which CUDA refuses every further call of the process (``cudaError_t`` in CUDA's runtime API)."""


def is_device_lost(error: object) -> bool:
    """Whether an exception says that a device can do nothing more for this process."""
    return isinstance(error, RuntimeError) and _DEVICE_LOST.search(str(error)) is not None


def is_out_of_memory(error: object) -> bool:
    """Whether an exception says that memory has run out; of the CPU's, torch raises a plain ``RuntimeError``."""
    if isinstance(error, MemoryError):
        return True
    if not isinstance(error, RuntimeError):
        return False
    # torch's class by its name: reports are read without importing torch
    by_name = any(base.__name__ == "OutOfMemoryError" for base in type(error).__mro__)
    return by_name or _NO_MEMORY.search(str(error)) is not None


class CheckedBackendError(Exception):
    """Base of every error that this package raises on purpose."""


class OptionError(CheckedBackendError):
    """An unknown option or a value that an option does not take."""


class CandidateError(CheckedBackendError):
    """The candidate compiler broke its contract: it raised, or returned something that is not a compiled region."""


class DivergenceError(CheckedBackendError):
    """The candidate differs from the reference.

    Attributes:
        report: The full report; ``str(error)`` is its text.
    """

    def __init__(self, report: Report) -> None:
        super().__init__(str(report))
        self.report = report


class DivergenceWarning(UserWarning):
    """The candidate differs from the reference, and ``on_divergence="warn"``."""


class MetadataError(CheckedBackendError):
    """Raised if a value that ran does not have the metadata that was recorded when the graph was traced.

    Attributes:
        finding: The mismatch.
    """

    def __init__(self, message: str, finding: Finding) -> None:
        super().__init__(message)
        self.finding = finding


class ReplayError(CheckedBackendError):
    """The tape of a recorded run has no outcome for a random operator, or not one that fits."""


class OtherDrawsError(ReplayError):
    """The program draws by another operator than the recorded one did."""


class DumpError(CheckedBackendError):
    """A dump that cannot be written or read."""


class DumpWarning(UserWarning):
    """A dump could not be written; the program goes on without it."""


class FuzzError(CheckedBackendError):
    """A program, a folder or an option of ``fuzz`` that cannot be used."""


class SuiteError(CheckedBackendError):
    """A sweep's suite file that cannot be used."""
