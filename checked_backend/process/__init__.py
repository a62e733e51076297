"""Run work in separate processes, and tell how they ended."""
