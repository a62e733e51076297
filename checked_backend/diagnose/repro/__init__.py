"""Scripts that show a failure in a fresh process."""
