"""After a failure: find its stage and operator, a small program that shows it, and a workaround."""
