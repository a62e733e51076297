"""Render the findings of fuzzing as text, as JSON, as JUnit XML, as one HTML page, and as issues to paste."""
