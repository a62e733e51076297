"""Passes: each proposes smaller programs; only `Problem.consider` accepts one."""
