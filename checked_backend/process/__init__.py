"""Processes of their own, and how they end."""
