"""Measure how two tensors differ, in structure and in values. `checked_backend.verdict` decides what that means."""
