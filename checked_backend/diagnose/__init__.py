"""After a failure: which stage and operator it comes from, how small a program shows it, and what helps."""
