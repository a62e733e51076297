"""Two recordings, made by two devices: how far the arithmetic of either is coarser than that of the noise runs.

A noise run rounds as the dtypes say. A GPU may multiply numbers in float32 as TF32, some CPUs as bfloat16, if the
settings let them; autocast chooses other dtypes on another device; and each device draws random numbers of its own.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from checked_backend.program.records import TensorRecord

__all__ = ["Arithmetic", "are_other_devices", "may_have_dtypes"]

_OF_FLOAT32 = 2.0**-24


@dataclass(slots=True)
class Arithmetic:
    """What one process of two runs has met so far, tensor by tensor in the order of the first run.

    Attributes:
        other_device: Whether the two ran on hardware that draws random numbers of its own.
        first: The coarsest roundoff with which the first has multiplied numbers in float32; 0 for that of the dtype.
        second: The same of the second.
        ratio: By how much a dtype of the second is coarser than the first's, where autocast chose another one.
        drew: Whether a region has drawn random numbers, which may be others in the second.
    """

    other_device: bool = False
    first: float = 0.0
    second: float = 0.0
    ratio: float = 1.0
    drew: bool = False

    def meet(self, one: TensorRecord, other: TensorRecord) -> None:
        """Take note of a tensor of both runs, before it is compared."""
        self.first = max(self.first, one.products)
        self.second = max(self.second, other.products)
        self.other_device = self.other_device or are_other_devices(one, other)
        if may_have_dtypes(one, other):
            self.ratio = max(self.ratio, other.roundoff / one.roundoff)
        self.drew = self.drew or (self.other_device and (one.drew or other.drew))

    def with_products_outside(self, one: TensorRecord, other: TensorRecord) -> Arithmetic:
        """The same, if code between the regions multiplied as coarsely as the settings let it."""
        first, second = max(self.first, one.products_outside), max(self.second, other.products_outside)
        return replace(self, first=first, second=second)

    @property
    def coarse(self) -> bool:
        """Whether either has multiplied more coarsely than its dtypes say."""
        return bool(self.first or self.second)

    def factor(self, record: TensorRecord) -> float:
        """By how much a tensor's noise may be greater than the noise runs have it.

        A noise run moves the factors of a product by a roundoff of float32 at least, and noise grows in proportion. If
        the first run is coarse itself, this moves a few factors by a whole coarse roundoff: the root is left. In a
        tensor of 16 bits, the roundings of its own dtype are the greater part.
        """
        fine = max(_OF_FLOAT32, record.roundoff)
        first = max(fine, self.first)
        return max(self.ratio, math.sqrt(first / fine) * max(1.0, self.second / first))


def may_have_dtypes(one: TensorRecord, other: TensorRecord) -> bool:
    """Whether two dtypes may be autocast's choice: each kind of device has its own."""
    floats = one.roundoff > 0 and other.roundoff > 0
    return floats and one.shape == other.shape and are_other_devices(one, other)


def are_other_devices(one: TensorRecord, other: TensorRecord) -> bool:
    """Whether two tensors were on devices of two kinds."""
    return bool(one.device and other.device) and one.device != other.device
