"""Run reference and candidate side by side, and say whether they agree."""
