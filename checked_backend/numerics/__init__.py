"""Measure how two tensors differ, model the noise they must have, and judge."""
