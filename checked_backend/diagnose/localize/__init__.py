"""Find out where a failed check goes wrong: the stage of the compiler, the graph, the operator."""
