"""Copies of tensors, and settings of the memory they get."""
