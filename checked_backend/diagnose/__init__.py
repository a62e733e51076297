"""After a failure: where it comes from, how small it gets, and what helps."""
