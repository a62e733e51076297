"""Calibration of the verdicts: clean programs and planted bugs, and how far apart they lie.

``python -m tests.calibration --help`` says how to run it. The numbers in `checked_backend.verdict.thresholds` come
from its output.
"""
