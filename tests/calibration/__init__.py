"""Calibration of the verdicts: clean programs and planted bugs, and how far apart they lie.

``python -m tests.calibration --help`` says how to run it. The constants in `checked_backend.numerics.judge` and
`checked_backend.regions.hearing` come from its output.
"""
