"""A run and what changed since another, as text, JSON, CSV, JUnit XML and one HTML page."""
