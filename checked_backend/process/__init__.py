"""Run work in separate processes, and say how they ended."""
