"""Render a run, and what changed since another run, as text, JSON, JUnit XML and one HTML page."""
