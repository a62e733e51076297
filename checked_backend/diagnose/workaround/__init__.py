"""Settings and changes that make a failure vanish."""
