"""Calibration of the verdicts: clean programs and planted bugs, and how far apart they lie.

``python -m tests.calibration --help`` says how to run it. The constants in `checked_backend.verdict.outliers` and
`checked_backend.verdict.steps.in_order` come from its output.
"""
