"""Make random programs that eager runs, that are defined, and that are the same for the same seed."""
