"""Dispatch modes: eager run with perturbed roundings, in float64, or with recorded choices and random numbers."""
