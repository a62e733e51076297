"""Run FX graphs node by node."""
