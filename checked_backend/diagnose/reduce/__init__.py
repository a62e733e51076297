"""After a failure: how small? Reduce a program that goes wrong."""
