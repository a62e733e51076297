"""Dispatch modes for control runs: eager with random roundings, in float64, or with recorded choices or draws."""
