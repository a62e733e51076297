"""Render a run, and what changed since another run, as text, JSON, CSV, JUnit XML and one HTML page."""
