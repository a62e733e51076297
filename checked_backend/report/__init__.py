"""Reports: the verdict, the findings and the coverage of a check, for people and for machines."""

from __future__ import annotations

from checked_backend.report.report import Report

__all__ = ["Report"]
