"""Write graphs to disk, and read them back without trusting them."""

from __future__ import annotations

from checked_backend.dump.eager import rehearse
from checked_backend.dump.load import Dump, load_dump
from checked_backend.dump.region import RegionDump
from checked_backend.dump.show import render_dump

__all__ = ["Dump", "RegionDump", "load_dump", "rehearse", "render_dump"]
