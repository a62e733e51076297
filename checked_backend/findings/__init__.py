"""Plain data: the findings of a check, and its coverage."""

from checked_backend.findings.coverage import Coverage, RegionInfo, Skip
from checked_backend.findings.details import DETAILS, FINER
from checked_backend.findings.evidence import EvidenceKey
from checked_backend.findings.finding import Finding
from checked_backend.findings.kinds import Kind, Severity, Verdict
from checked_backend.findings.metrics import Metrics, NoiseScale
from checked_backend.findings.pictures import Distribution, Kernel, NodeError, WorstElement
from checked_backend.findings.values import Number

__all__ = [
    "DETAILS",
    "FINER",
    "Coverage",
    "Distribution",
    "EvidenceKey",
    "Finding",
    "Kernel",
    "Kind",
    "Metrics",
    "NodeError",
    "NoiseScale",
    "Number",
    "RegionInfo",
    "Severity",
    "Skip",
    "Verdict",
    "WorstElement",
]
