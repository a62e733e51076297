"""Noise or bug."""
