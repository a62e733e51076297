"""Measure how two tensors differ, in structure and in values. `checked_backend.verdict` judges the differences."""
