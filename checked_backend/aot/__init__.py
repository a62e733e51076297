"""Run AOT autograd with the caller's own compilers, partitioner and decompositions."""
